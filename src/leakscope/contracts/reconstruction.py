"""What an attack returns, and why it is what it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from leakscope.contracts.certificate import Certificate
from leakscope.contracts.errors import UserError
from leakscope.contracts.tables import html_facts, shipped_table

DiagnosisOutcome = Literal["recovered", "optimiser failed", "not identifiable", "undecided"]
DIAGNOSES: tuple[DiagnosisOutcome, ...] = ("recovered", "optimiser failed", "not identifiable", "undecided")

#: Up to this root-mean-square error, in units of the value range, an input counts as recovered: 30 dB.
RECOVERED = 10 ** (-30 / 20)

_FLAGS = shipped_table(__package__, "flags.toml")
#: What each flag means, and what can be done about it. A flagged result supports no pass.
FLAGS: Mapping[str, str] = MappingProxyType({name: facts["meaning"] for name, facts in _FLAGS.items()})
FLAG_REMEDIES: Mapping[str, tuple[str, ...]] = {name: tuple(facts["remedies"]) for name, facts in _FLAGS.items()}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why a result is what it is, and the numbers behind it; None where a number was not computed.

    ``residual`` is the norm of what the result leaves unexplained, relative to the update. ``hidden`` counts the
    directions that rounding of the update hides, or that the equations of a certificate leave free. ``layer``: whose
    gradient determines the batch by itself, down to what the layer ``lowest`` receives.
    """

    outcome: DiagnosisOutcome
    reason: str
    unknowns: int
    residual: float | None = None
    hidden: int | None = None
    condition: float | None = None
    expected_rmse: float | None = None
    layer: str | None = None
    lowest: str | None = None


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
