"""What an attack returns, and why it is what it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from leakscope.contracts.certificate import Certificate
from leakscope.contracts.errors import UserError
from leakscope.contracts.tables import html_facts

DiagnosisOutcome = Literal["recovered", "optimiser failed", "not identifiable", "undecided"]
DIAGNOSES: tuple[DiagnosisOutcome, ...] = ("recovered", "optimiser failed", "not identifiable", "undecided")

#: Up to this root-mean-square error, in units of the value range, an input counts as recovered: 30 dB.
RECOVERED = 10 ** (-30 / 20)

#: What each flag means. A flagged result supports no pass; one without a flag may, from another attack.
FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "did not converge": "The objective was still falling as the steps ran out; more steps may recover more.",
        "restarts disagree": "Restarts with equally good objectives found different inputs: this is one of several.",
        "non-finite restart": "A restart met NaN or infinity and was dropped; the others went on.",
        "non-finite objective": "Every restart met NaN or infinity; what is returned is a start value.",
        "labels uncertain": "The recovered labels are a guess; a wrong label misleads the search for the input.",
        "steps not simulated": "The local steps cannot be replayed (recipe unknown, or an optimiser other than SGD "
        "and Adam); the update was taken for one gradient.",
        "ill-conditioned": "The attack ended without explaining the update: the gradient is not smooth, its equations "
        "are badly conditioned, or the update was altered. That is a limit of this attack, not a sign of safety.",
        "not identifiable": "The announced batches do not determine every sample; those that they leave open are a "
        "guess.",
        "rounds disagree": "What the rounds tell does not fit together: the model moved too far between them, or the "
        "gradients were altered.",
        "defence approximated": "The defence makes the client's network a random one and the attack simulated its "
        "mean, or it mixes examples and the attack could not take them apart for certain; one that searches the random "
        "numbers too may recover more.",
        "mixture": "A batch of several examples went in; what came out may be mixtures of them.",
        "update not explained": "What came out leaves more of the update unexplained than noise or rounding does: the "
        "search ended in a wrong place, or what the attack assumes of the client is wrong.",
        "unlike the simulations": "The update is unlike those that the attack learned from: the protocol or defence is "
        "not what it was told, or the examples are of another kind.",
    }
)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why a result is what it is, and the numbers behind it; None where a number was not computed.

    ``residual`` is the norm of what the result leaves unexplained, relative to the update. ``hidden`` counts the
    directions that rounding of the update hides, or that the equations of a certificate leave free.
    """

    outcome: DiagnosisOutcome
    reason: str
    unknowns: int
    residual: float | None = None
    hidden: int | None = None
    condition: float | None = None
    expected_rmse: float | None = None


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """An adversary's guess, with its own opinion of it; nothing here was compared with the truth.

    ``certificates`` has one entry for each example, None where nothing was proved, or is empty. ``residual``: what the
    inputs leave of the equations that were solved. ``defence_undone``: what a known defence makes random or mixes was
    read for certain. ``diagnosis`` is the attack's own; ``leakscope.limits.diagnose`` makes one of any result.
    """

    inputs: Tensor
    labels: Tensor | None
    scores: Tensor
    history: Mapping[str, Any] = field(default_factory=dict, repr=False)
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None
    certificates: tuple[Certificate | None, ...] = ()
    residual: float | None = None
    defence_undone: bool = False

    def __post_init__(self) -> None:
        if (proofs := len(self.certificates)) not in (0, len(self.inputs)):
            raise UserError(f"certificates: expected one for each of {len(self.inputs)} examples, got {proofs}")
        if unknown := [flag for flag in self.flags if flag not in FLAGS]:
            raise UserError(f"unknown flags {unknown}: expected some of {', '.join(FLAGS)}")

    @property
    def certified(self) -> int:
        """Return how many examples have a certificate that holds."""
        return sum(proof is not None and proof.holds for proof in self.certificates)

    def _repr_html_(self) -> str:
        """Facts for a notebook; labels and pictures are private, and ``leakscope.report.show`` draws the latter."""
        scores = self.scores.detach().flatten().tolist()
        facts = {
            "examples": f"{len(self.inputs)} of shape {' x '.join(map(str, self.inputs.shape[1:])) or '()'}",
            "certified": f"{self.certified} of {len(self.inputs)}" if self.certificates else None,
            "labels": "none" if self.labels is None else "recovered or known",
            "scores": f"{min(scores):.3g} to {max(scores):.3g}" if scores else None,
            "flags": self.flags or None,
            "notes": self.notes or None,
            "diagnosis": None if self.diagnosis is None else f"{self.diagnosis.outcome}: {self.diagnosis.reason}",
        }
        return html_facts("Reconstruction", facts, [f"{flag}: {FLAGS[flag]}" for flag in self.flags])
