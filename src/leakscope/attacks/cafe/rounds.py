"""Solve steps I and II of CAFE: what each sample sent into and got back from a dense layer.

With s_t the 0/1 vector of the samples in round t, the bias gradient of a dense layer is V' s_t and its weight gradient
V' diag(s_t) H: row n of V is the output gradient of sample n at the layer (the 1/K of the mean included), row n of H
the layer's input. The paper approaches these linear least squares one round at a time (:class:`RunningSteps`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from leakscope.contracts.errors import MissingKnowledge, NotApplicable
from leakscope.contracts.observation import Message, Observation
from leakscope.equations.index_matrix import INSIDE, Identifiability, identify, index_matrix
from leakscope.matching.optimisers import RowAdam
from leakscope.models.split import VerticalModel
from leakscope.network.layers import FirstDense, first_dense

if TYPE_CHECKING:
    from leakscope.attacks.cafe import CAFE

Steps = Literal["projection", "descent"]


@dataclass(frozen=True, eq=False)
class Rounds:
    """Hold gradients of a vertical model on announced batches, and each worker's first dense layer."""

    observation: Observation
    model: VerticalModel
    layers: tuple[FirstDense, ...]
    batches: list[tuple[int, ...]]
    identifiability: Identifiability

    @classmethod
    def of(cls, observation: Observation) -> Rounds:
        model = observation.model
        if not isinstance(model, VerticalModel):
            raise NotApplicable(f"CAFE reads rounds of a VerticalModel, got a {type(model).__name__}")
        if any(message.kind != "gradient" for message in observation.messages):
            raise NotApplicable("CAFE reads gradients, got weight updates")
        batches = [message.indices for message in observation.messages if message.indices is not None]
        if len(batches) < len(observation.messages):
            raise MissingKnowledge("CAFE needs to know batch_indices, which messages of this observation lack")
        try:
            layers = first_dense(model)
        except ValueError as error:
            raise NotApplicable(str(error)) from error
        bare = [layer.share.name for layer in layers if not layer.bias]
        if bare:
            raise NotApplicable(f"CAFE reads the bias gradient of the first dense layer; none in {', '.join(bare)}")
        if observation.messages[0].partial:
            raise NotApplicable("CAFE needs whole messages, the first one at least, got a partial one")
        whole = tuple(message for message in observation.messages if not message.partial)
        for part, messages in (("bias", observation.messages), ("weight", whole)):
            names = [f"{layer.name}.{part}" for layer in layers]
            lost = ", ".join(name for name in names if any(name not in message.update for message in messages))
            if lost:
                raise NotApplicable(
                    f"the messages have no gradient of their own for {lost}: frozen, shared or computed"
                )
        assert observation.num_examples is not None  # granted
        return cls(observation, model, layers, batches, identify(batches, observation.num_examples))

    @property
    def samples(self) -> int:
        return self.identifiability.samples

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.observation.messages

    @property
    def whole(self) -> list[Message]:
        return [message for message in self.messages if not message.partial]

    @property
    def like(self) -> Tensor:
        return next(iter(self.messages[0].update.values()))

    def solve_output_gradients(self, bias_names: list[str]) -> tuple[list[Tensor], float, float]:
        """Step I for these layers together: V of each, the share that stays unexplained, and the expected error."""
        biases = [
            torch.stack([message.update[name].detach().cpu().double() for message in self.messages])
            for name in bias_names
        ]
        solution = solve_output_gradients(index_matrix(self.batches, self.samples), torch.cat(biases, dim=1))
        tables = solution.rows.split([bias.shape[1] for bias in biases], dim=1)
        return list(tables), solution.residual, solution.error


@dataclass(frozen=True, eq=False)
class Tables:
    """Hold H of each worker, one row per sample.

    ``determined`` (workers, samples): whether H follows; a sample for which every unit of a worker is dead sends
    nothing back. ``unexplained``: the share of the gradients that no rows explain; ``error``: the expected one of H.
    """

    inputs: list[Tensor]
    determined: Tensor
    unexplained: float
    error: float


def solve(rounds: Rounds) -> Tables:
    tables, unexplained, error = rounds.solve_output_gradients([f"{layer.name}.bias" for layer in rounds.layers])
    condition = rounds.identifiability.condition
    floor = 10 * torch.finfo(rounds.observation.dtype).eps * (condition if math.isfinite(condition) else 1e3)
    solutions = []
    for layer, table in zip(rounds.layers, tables, strict=True):
        norms = torch.linalg.vector_norm(table, dim=1)
        rows = torch.where((norms > floor * norms.max())[:, None], table, 0.0)  # the others are rounding
        solutions.append(solve_inputs(rounds.whole, f"{layer.name}.weight", rows, rounds.identifiability.determined))
    return Tables(
        inputs=[solution.rows for solution in solutions],
        determined=torch.stack([solution.determined for solution in solutions if solution.determined is not None]),
        unexplained=max(unexplained, *(solution.residual for solution in solutions)),
        error=math.hypot(error, max(solution.error for solution in solutions)),
    )


@dataclass(eq=False)
class RunningSteps:
    """Run steps I and II for one layer, one round at a time.

    "projection" goes to the nearest tables that explain the round, which needs no learning rate. "descent" is what the
    paper does: one step of gradient descent for V, one of row-wise Adam for H.
    """

    output_gradients: Tensor
    inputs: Tensor
    steps: Steps
    output_gradient_lr: float
    input_lr: float
    _adam: RowAdam = field(init=False)

    def __post_init__(self) -> None:
        self._adam = RowAdam(self.inputs)

    @classmethod
    def start(cls, settings: CAFE, samples: int, layer: FirstDense, generator: torch.Generator) -> RunningSteps:
        """As published: V in +-8e-4, H in [0, 0.08]; projections start from zero."""
        output_gradients = torch.rand((samples, layer.units), generator=generator).double()
        inputs = torch.rand((samples, layer.inputs), generator=generator).double()
        scale = 1.0 if settings.steps == "descent" else 0.0
        tables = scale * 8e-4 * (2 * output_gradients - 1), scale * 0.08 * inputs
        return cls(*tables, settings.steps, settings.signal_lr, settings.input_lr)

    def step_one(self, batch: Tensor, bias_gradient: Tensor) -> None:
        rest = bias_gradient - self.output_gradients[batch].sum(0)
        share = 1 / len(batch) if self.steps == "projection" else 2 * self.output_gradient_lr
        self.output_gradients[batch] += share * rest

    def step_two(self, batch: Tensor, weight_gradient: Tensor) -> None:
        rows = self.output_gradients[batch]
        rest = weight_gradient - rows.T @ self.inputs[batch]
        if self.steps == "descent":
            self.inputs[batch] -= self._adam.move(batch, -2 * rows @ rest, self.input_lr)
            return
        gram = rows @ rows.T
        # A little damping: in the first rounds the output gradients are no more than a first guess.
        gram.diagonal().add_(1e-6 * gram.diagonal().mean() + torch.finfo(gram.dtype).tiny)
        self.inputs[batch] += torch.linalg.solve(gram, rows @ rest)


def settle(rounds: Rounds, tables: list[RunningSteps], iterations: int) -> None:
    """Algorithm 3: step I to its end, then step II to its end, each visiting so many rounds."""
    for part in ("bias", "weight"):
        for layer, table in zip(rounds.layers, tables, strict=True):
            name = f"{layer.name}.{part}"
            messages = [message for message in rounds.messages if name in message.update]
            move = table.step_one if part == "bias" else table.step_two
            for step in range(iterations):
                message = messages[step % len(messages)]
                move(torch.tensor(message.indices), message.update[name].cpu().double())


#: Cut off in the eigenvalues of a system, relative to the largest: what is below was made by rounding.
CUTOFF = 1e-11


@dataclass(frozen=True, eq=False)
class Solution:
    """Hold one row per sample, zero unless ``determined``, the share of the gradients it leaves, the expected error."""

    rows: Tensor
    residual: float
    error: float
    determined: Tensor | None = None


def solve_output_gradients(matrix: Tensor, bias_gradients: Tensor) -> Solution:
    """Solve step I: the V (samples, units) of least norm with ``matrix`` V = ``bias_gradients`` (rounds, units)."""
    observed = bias_gradients.double()
    inverse = torch.linalg.pinv(matrix, rtol=CUTOFF)
    rows = inverse @ observed
    rows = rows + inverse @ (observed - matrix @ rows)  # once more for the error that rounding made
    rest = observed - matrix @ rows
    spare = len(matrix) - int(torch.linalg.matrix_rank(matrix))
    noise = float(rest.square().sum()) / spare if spare else 0.0
    error = _ratio(noise * float(inverse.square().sum()), float(rows.square().sum()))
    return Solution(rows, _ratio(float(rest.square().sum()), float(observed.square().sum())), error)


def solve_inputs(
    messages: Sequence[Message], weight: str, output_gradients: Tensor, determined: Tensor | None = None
) -> Solution:
    """Solve step II: the layer's inputs H (samples, inputs) from the gradients of ``weight`` (units, inputs).

    The normal equations are (S'S o VV') H = R with R_n = sum over the rounds with n of v_n' G_t, so the gradients, by
    far the largest part, are read one at a time. Rows of V are scaled to norm one first: then the system is conditioned
    no worse than S'S. Where step I leaves samples open (not ``determined``), only combinations of rounds are used that
    those samples do not enter, and nothing is said of a residual or an error.
    """
    tiny = torch.finfo(torch.float64).tiny
    norms = torch.linalg.vector_norm(output_gradients, dim=1)
    known = torch.ones_like(norms, dtype=torch.bool) if determined is None else determined.cpu()
    visible = known & (norms > 0)
    unit = torch.where(visible[:, None], output_gradients / norms.clamp_min(tiny)[:, None], 0.0)
    matrix = index_matrix([message.indices or () for message in messages], len(norms))
    rounds, vague = matrix * visible, matrix[:, ~known & (matrix.sum(0) > 0)]
    complete = vague.shape[1] == 0
    if not complete:
        rounds = rounds - vague @ (torch.linalg.pinv(vague, rtol=CUTOFF) @ rounds)
    values, vectors = torch.linalg.eigh((matrix.T @ rounds) * (unit @ unit.T))
    nonzero = values > CUTOFF * values[-1].clamp_min(tiny)
    inverse = (vectors[:, nonzero] / values[nonzero]) @ vectors[:, nonzero].T
    follows = visible & (vectors[:, nonzero].square().sum(1) >= 1 - INSIDE)

    rows = torch.zeros((len(norms), messages[0].update[weight].shape[1]), dtype=torch.float64)
    unexplained = total = 0.0
    for repeat in range(3):  # the first solves, the second takes back rounding, the third only looks
        right, unexplained, total = torch.zeros_like(rows), 0.0, 0.0
        for message, combined in zip(messages, rounds, strict=True):
            batch = torch.tensor(message.indices)
            observed = message.update[weight].detach().cpu().double()
            rest = observed - unit[batch].T @ rows[batch] if repeat else observed
            used = batch if complete else torch.nonzero(combined).flatten()
            right[used] += combined[used, None] * (unit[used] @ rest)
            unexplained, total = unexplained + float(rest.square().sum()), total + float(observed.square().sum())
        if repeat < 2:
            rows = rows + inverse @ right
    spare = sum(message.update[weight].numel() for message in messages) - rows.numel()
    noise = unexplained / spare if spare > 0 and complete else 0.0
    rows = torch.where(follows[:, None], rows / norms[:, None], 0.0)
    # A sample that no round shows has neither a row nor an error.
    counted = follows & (norms > CUTOFF * norms.max())
    spread = float((inverse.diagonal() / norms.square())[counted].sum()) * rows.shape[1]
    error = _ratio(noise * spread, float(rows[counted].square().sum()))
    return Solution(rows, _ratio(unexplained, total) if complete else 0.0, error, follows)


def share_unexplained(
    messages: Sequence[Message],
    layers: Sequence[FirstDense],
    output_gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    complete: bool = True,
) -> float:
    """Return the larger share of the layers' bias or weight gradients that these rows leave unexplained.

    Of biases only where step I is not ``complete``: samples that it does not determine may explain any weight gradient.
    """
    shares = []
    for layer, v, h in zip(layers, output_gradients, inputs, strict=True):
        for name in (f"{layer.name}.bias", f"{layer.name}.weight")[: 1 + complete]:
            unexplained = total = 0.0
            for message in messages:
                if name in message.update:
                    batch = torch.tensor(message.indices)
                    observed = message.update[name].detach().cpu().double()
                    explained = v[batch].sum(0) if observed.dim() == 1 else v[batch].T @ h[batch]
                    unexplained += float((observed - explained).square().sum())
                    total += float(observed.square().sum())
            shares.append(_ratio(unexplained, total))
    return max(shares)


def _ratio(part: float, whole: float) -> float:
    return (part / whole) ** 0.5 if whole else 0.0
