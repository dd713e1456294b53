"""Cocktail Party Attack: Breaking Aggregation-Based Privacy in Federated Learning Using Independent Component Analysis.

Kariyappa et al., ICML 2023. The weight gradient of the first dense layer is G = D'X: each of its rows is a mixture of
the same n inputs. Independent component analysis tells them apart, whatever the labels, for n up to the number of
units. Behind convolutions X are embeddings, and pictures are searched that have them. Differences from the paper:

1. *Unmix* (:mod:`leakscope.equations.unmixing`). The paper descends from the identity for 25 000 steps on negentropy,
   mutual independence and total variation. The default finds fixed points of the same contrast on the differences
   between neighbouring pixels (or entries of a feature map), which takes a second and is 10 dB nearer; embeddings are
   refined by the paper's objective. ``preset("fc2-tiny-imagenet")`` and ``preset("vgg16-imagenet")`` are the published
   settings. Negentropy counts in both; the released code sets it to zero before use, against the paper's text.
2. *Sign and scale* follow from the bias gradient, D'1: what makes x of G makes 1 of it. (The paper tries both signs and
   keeps the one nearer to the truth.) Without a bias they are those that fill the value range.
3. *Solve* (:mod:`leakscope.equations.dense_signals`; not in the paper). Inputs that are nearly right tell which units
   are active; then D and X follow exactly from G, with a certificate, and the labels from D. This uses the sparsity of
   ReLU signals as SPEAR does (Dimitrov et al., 2024) and all other equations besides.
4. *Invert features*, behind convolutions: 1 - cos(z, f(x)) + TV is minimised, as in the paper. Certified embeddings of
   at least the size of an example are matched by their L1 distance instead, which is far nearer.

Several local steps are taken for one gradient: the rows are still mixtures of the same inputs.
"""

import dataclasses
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from leakscope.attacks.candidates import certify
from leakscope.attacks.gradient_matching import several_steps
from leakscope.contracts.attack import Attack, Progress
from leakscope.contracts.certificate import Certificate
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Classification
from leakscope.equations.dense_signals import Separated, positive_peak, separate
from leakscope.equations.determinacy import free_inputs_of_dense
from leakscope.equations.unmixing import Domain, Unmixed, count_sources, independent_rows, unmix
from leakscope.matching import Victim
from leakscope.matching.held import HeldMatching, Weighting
from leakscope.network.layers import DenseEntry, dense_entry, output_jacobian, structure

#: Features alone, as the paper inverts them.
FEATURES_ALONE = Weighting(name="features alone", features=1.0, ratio=1.0)
#: Outputs beyond which their derivatives cost more than they tell.
MOST_OUTPUTS = 256
_PUBLISHED = {"domain": "values", "start": "identity", "steps": 25_000, "lr": 1e-3, "solve": False}


@dataclass(frozen=True, kw_only=True)
class CocktailParty(Attack):
    """Unmix the first dense layer's gradient into the inputs of a batch, then solve for them exactly."""

    requires = ()
    presets = MappingProxyType(
        {
            "fc2-tiny-imagenet": {**_PUBLISHED, "independence": 1.47, "temperature": 12.4, "tv": 3.1},
            "vgg16-imagenet": {
                **{**_PUBLISHED, "independence": 5.3, "temperature": 7.7, "nonnegativity": 0.13, "sparsity": 5.0},
                **{"iterations": 25_000, "picture_tv": 0.1},
            },
        }
    )

    domain: Domain = setting("auto", "What is unmixed: differences between neighbours where there are any, or values.")
    start: Literal["fixed-point", "identity"] = setting("fixed-point", "Where the paper's objective starts from.")
    steps: int | None = setting(
        None,
        "Steps of the paper's objective; by default 0 for examples and those of iterations for embeddings.",
        ge=0,
    )
    lr: float = setting(0.02, "Step size of Adam on the paper's objective.", gt=0)
    negentropy: float = setting(1.0, "Weight of negentropy.", ge=0)
    independence: float = setting(0.1, "Weight of mutual independence.", ge=0)
    temperature: float = setting(5.0, "Factor of |cos| in its exponential.", gt=0)
    tv: float = setting(0.0, "Weight of total variation of the sources.", ge=0)
    nonnegativity: float = setting(0.13, "Weight of non-negativity; embeddings only.", ge=0)
    sparsity: float = setting(0.5, "Weight of the sum of absolute values; embeddings only.", ge=0)
    solve: bool = setting(True, "Solve for the exact inputs from the unmixed ones.")
    iterations: int = setting(300, "Steps of the search for pictures that have the embeddings.", ge=1)
    picture_tv: float = setting(0.2, "Weight of total variation of these pictures, falling to zero.", ge=0)

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        entry = dense_entry(observation.model, observation.input_shape)
        if isinstance(entry, str):
            raise NotApplicable(entry)
        update = observation.message.update
        if entry.weight_name not in update:
            raise NotApplicable(f"the update has no gradient of {entry.weight_name}: the layer is frozen")
        if (
            not entry.reads_input
            and structure(observation.model, observation.input_shape).layers[-1].name == entry.name
        ):
            raise NotApplicable(
                f"the first dense layer {entry.name!r} is the head: head-first solves what it reads exactly"
            )
        return _Party(self, observation, entry, generator, progress).reconstruct()


class _Party:
    def __init__(
        self,
        attack: CocktailParty,
        observation: Observation,
        entry: DenseEntry,
        generator: torch.Generator,
        progress: Progress | None,
    ) -> None:
        self.attack, self.observation, self.entry = attack, observation, entry
        self.generator, self.progress = generator, progress
        update = observation.message.update
        self.gradient = update[entry.weight_name].detach()
        self.sums = None if entry.bias_name is None else update.get(entry.bias_name)
        self.notes: list[str] = []
        self.flags: list[str] = []

    def reconstruct(self) -> Reconstruction:
        if several_steps(self.observation):
            self.flags.append("steps not simulated")
        if not bool(self.gradient.any()):
            return self._nothing()
        unmixed = self._unmixed(self._count())
        near = self._project(self._scaled(unmixed))
        separated = self._separated(near)
        certified = separated is not None and separated.certified and self.sums is not None
        # What explains the update better than the unmixed inputs do, by the model's own equations.
        rows = near if separated is None or separated.rounds == 0 else separated.inputs
        if len(rows) > 1 and not certified:
            self.flags.append("mixture")
        if not unmixed.settled and not certified:
            self.flags.append("did not converge")
        labels = self._labels(separated) if certified else None
        residual = unmixed.residual if separated is None else separated.residual
        info = {
            "layer": self.entry.name,
            "sources": len(rows),
            "method": "unmixed, solved" if rows is not near else "unmixed",
            "steps": max(1, self._steps() + (0 if separated is None else separated.rounds)),
            "restarts": 1,
            "compiled": False,
            "outside": unmixed.residual,
            "negentropy": float(unmixed.negentropy.min()),
        }
        if self.entry.reads_input:
            result = self._result(rows if certified else self._project(rows), labels, residual, info)
            proofs = self._certificates(separated if certified else None, result)
            return dataclasses.replace(result, certificates=proofs)
        info = {**info, "embedding_residual": residual if certified else None}
        return self._inverted(rows, labels, info, exact=certified)

    def _count(self) -> int:
        known = self.observation.num_examples
        units = self.gradient.shape[0]
        if known is not None and known > min(self.gradient.shape):
            raise NotApplicable(
                f"{known} examples cannot be told apart by the {units} units and {self.gradient.shape[1]} inputs of "
                f"layer {self.entry.name!r}: there are fewer mixtures than examples"
            )
        if known is None:
            try:
                count = count_sources(self.gradient)
            except NotApplicable as error:
                raise NotApplicable(f"the number of examples is not known, and {error}") from error
            self.notes.append(f"the gradient of {self.entry.name!r} is a mixture of {count} inputs")
            return count
        count = min(known, independent_rows(self.gradient))
        if count < known:
            self.notes.append(
                f"the gradient of {self.entry.name!r} holds {count} different mixtures of {known} examples: some "
                "examples are alike, or too few units are active"
            )
        return count

    def _unmixed(self, count: int) -> Unmixed:
        names = ("domain", "start", "lr", "negentropy", "independence", "temperature", "tv")
        settings = {name: getattr(self.attack, name) for name in names}
        if not self.entry.reads_input:
            settings |= {"nonnegativity": self.attack.nonnegativity, "sparsity": self.attack.sparsity}
        steps = self._steps() if count > 1 else 0
        return unmix(self.gradient, count, self.generator, picture=self.entry.shape, iterations=steps, **settings)

    def _steps(self) -> int:
        if self.attack.steps is not None:
            return self.attack.steps
        return 0 if self.entry.reads_input else self.attack.iterations

    def _scaled(self, unmixed: Unmixed) -> Tensor:
        if self.sums is not None and bool(self.sums.any()):
            return unmixed.scaled(self.sums)
        self.notes.append(f"layer {self.entry.name!r} has no bias gradient: sign and scale of each input are a guess")
        return self._rescale(unmixed.sources)

    def _rescale(self, rows: Tensor) -> Tensor:
        inputs = self.observation.inputs
        if not self.entry.reads_input or not inputs.bounded:
            return positive_peak(rows)
        pictures = rows.reshape(-1, *self.observation.input_shape)
        high = inputs.from_unit(torch.ones_like(pictures)).flatten(1)
        brightest = round(0.99 * (rows.shape[1] - 1)) + 1  # so many values are below the upper end of the range
        best, least = rows, torch.full_like(rows[:, :1], math.inf)
        for signed in (rows, -rows):
            peaks = (signed / high).kthvalue(brightest, dim=1, keepdim=True).values
            scaled = signed / peaks.clamp_min(1e-300)
            beyond = (scaled - self._project(scaled)).norm(dim=1, keepdim=True)
            best, least = torch.where(beyond < least, scaled, best), torch.minimum(beyond, least)
        return best

    def _project(self, rows: Tensor) -> Tensor:
        if not self.entry.reads_input:
            return rows.clamp_min(0) if self.attack.nonnegativity > 0 else rows  # behind a ReLU
        return self.observation.inputs.project(rows.reshape(-1, *self.observation.input_shape)).flatten(1)

    def _separated(self, near: Tensor) -> Separated | None:
        outputs = math.prod(self.observation.output_shape)
        if not self.attack.solve or outputs > MOST_OUTPUTS:
            return None
        shape = self.observation.input_shape
        jacobian = output_jacobian(self.observation.model, self.entry, shape, self._project)
        try:
            return separate(self.gradient, self.sums, near, jacobian, rescale=self._rescale)
        except (NotApplicable, torch.linalg.LinAlgError) as error:
            self.notes.append(f"the inputs are not solved for: {str(error).strip().splitlines()[0]}")
            return None

    def _certificates(self, separated: Separated | None, result: Reconstruction) -> tuple[Certificate, ...]:
        if separated is None or several_steps(self.observation):
            return ()
        free = free_inputs_of_dense(separated.signals.double(), separated.inputs.double())
        facts = (separated.residual, free, "unmixed, solved", separated.rounding)
        return certify(self.observation, result.inputs, result.labels, *facts)

    def _labels(self, separated: Separated | None) -> Tensor | None:
        """Cross-entropy pulls one output up, that of the label."""
        one_row = len(self.observation.output_shape) == 1
        if separated is None or not one_row or not isinstance(self.observation.task, Classification):
            return None
        return separated.output_gradients.argmin(1).to(self.observation.device)

    def _nothing(self) -> Reconstruction:
        count = self.observation.num_examples or 1
        self.notes.append(f"the gradient of {self.entry.name!r} is zero: nothing is mixed in it")
        start = self.observation.inputs.start("grey", count, self.generator, self.gradient)
        inputs = self.observation.inputs.from_unit(start)
        info = {"layer": self.entry.name, "method": "none", "steps": 0, "restarts": 1, "compiled": False}
        self.flags.append("ill-conditioned")
        return self._result(inputs.flatten(1), None, math.inf, info)

    def _result(self, rows: Tensor, labels: Tensor | None, residual: float, info: dict[str, Any]) -> Reconstruction:
        return Reconstruction(
            inputs=rows.to(self.gradient).reshape(-1, *self.observation.input_shape),
            labels=labels,
            scores=torch.full((len(rows),), residual, dtype=torch.float64),
            flags=tuple(dict.fromkeys(self.flags)),
            notes=tuple(self.notes),
            info=info,
        )

    def _inverted(self, rows: Tensor, labels: Tensor | None, info: dict[str, Any], *, exact: bool) -> Reconstruction:
        """Pictures that have these embeddings, or their direction where they are few or only nearly right."""
        steps, victim = self.attack.iterations, Victim.of(self.observation)
        features = rows.to(self.gradient)
        matching = HeldMatching(
            model=victim.model,
            layer=victim.model.get_submodule(self.entry.name),
            features=features,
            adjoints=torch.zeros_like(features),
            gradients={},
            inputs=self.observation.inputs,
            tv=self.attack.picture_tv,
            angle=not exact or features.shape[1] < self.observation.inputs.size,
        )

        def watch(done: int, values: Tensor, _best: Tensor) -> None:
            if self.progress is not None:
                self.progress(done, steps, float(values[0]))

        found = matching.run(matching.start(self.generator), FEATURES_ALONE, steps, watch)
        pictures = matching.to_model(matching.pictures(found.points[0])).detach()
        distance = float(found.judged[0, 0])
        if found.still_falling(0, steps):
            self.flags.append("did not converge")
        info = {**info, "method": f"{info['method']}, features inverted", "steps": steps, "feature_distance": distance}
        result = self._result(pictures.flatten(1), labels, distance, info)
        return dataclasses.replace(result, history={"objective": [[float(value[0]) for value in found.curves]]})
