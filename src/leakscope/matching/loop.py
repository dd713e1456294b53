"""Gradient matching: settings of a search for inputs whose simulated update is the observed one, and its result."""

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from leakscope.contracts.checks import BYTES, FLOAT
from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import InputSpace
from leakscope.matching.canvas import Canvas, Pixels
from leakscope.matching.compilation import CannotCompile
from leakscope.matching.distances import Distance
from leakscope.matching.optimisers import Adam, Optimiser
from leakscope.matching.priors import Prior, assignment
from leakscope.matching.problem import Evaluator, Problem
from leakscope.matching.search import Evaluate, Evaluation, SearchResult, search
from leakscope.matching.simulations import Simulation, SingleGradient
from leakscope.matching.victim import Tensors, Victim, forward_flops

Progress = Callable[[int, int, float], None]
CURVE_POINTS = 200
# Compiling the step takes about half a minute and halves its time: it pays for runs beyond a minute.
WORTH_COMPILING_SECONDS = 60.0
ASSUMED_FLOPS_PER_SECOND = 2e10


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """A factor that goes from ``first`` to ``last`` by equal ratios over ``steps`` steps, then stays.

    >>> float(Ramp(first=1.0, last=4.0, steps=2)(torch.tensor(1.0)))
    2.0
    """

    first: float = 1.0
    last: float = 1.0
    steps: int = 1

    def __post_init__(self) -> None:
        if not (self.first > 0 and self.last > 0 and self.steps >= 1):
            raise UserError(f"Ramp: expected positive factors and at least one step, got {self}")

    def __call__(self, iteration: Tensor) -> Tensor:
        if self.first == self.last:
            return torch.full_like(iteration, self.last)
        share = (iteration / self.steps).clamp(max=1.0)
        return self.first * (self.last / self.first) ** share


@dataclass(frozen=True, eq=False)
class Match:
    """What came out of matching, best restart first in every sense: chosen by the objective alone."""

    inputs: Tensor  # (examples, ...) in the model's space
    label_logits: Tensor | None  # (examples, classes) where labels were optimised
    numbers: Mapping[str, float]  # what else the simulation left open
    objective: float
    distance: float
    curves: list[list[float]]  # objective by step, one curve per restart
    flags: tuple[str, ...]
    info: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Matcher:
    """Settings of the search; :meth:`run` does the work."""

    distance: Distance
    priors: tuple[Prior, ...] = ()
    #: Layers whose inputs a prior looks at, besides those of BatchNorm.
    record: tuple[str, ...] = ()
    #: Judges iterates and restarts instead of ``distance``, for distances whose value says little of progress.
    judge: Distance | None = None
    canvas: Canvas = Pixels()
    optimiser: Optimiser = Adam()
    simulation: Simulation = SingleGradient()
    #: What the distance is multiplied by.
    emphasis: Ramp = Ramp()
    iterations: int = 300
    restarts: int = 1
    tolerance: float = 0.0
    #: Weight of group consistency: restarts are pulled towards their mean; see :class:`GroupConsistency`.
    consistency: float = 0.0
    #: A restart whose best fell by less than a twentieth over this many steps has come to rest; 0 never stops it.
    patience: int = 0
    compile: Literal["auto", "never", "always"] = "auto"

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.restarts < 1:
            raise UserError(f"iterations and restarts: expected at least 1, got {self.iterations} and {self.restarts}")
        if self.compile not in ("auto", "never", "always"):
            raise UserError(f"compile: expected 'auto', 'never' or 'always', got {self.compile!r}")
        if self.compile == "always" and not self.simulation.compiles:
            raise UserError("compile: expected 'auto' or 'never' for replayed local steps, got 'always'")

    def run(
        self,
        victim: Victim,
        observed: Tensors,
        *,
        inputs: InputSpace,
        count: int,
        targets: Tensor | None,
        output_shape: tuple[int, ...],
        generator: torch.Generator,
        progress: Progress | None = None,
    ) -> Match:
        """Search ``count`` examples whose update is ``observed``; without ``targets`` labels are searched along."""
        like = next(iter(observed.values()))
        problem = Problem(self, victim, observed, inputs, count, targets, output_shape)
        BYTES.check("restarts: all starts together", FLOAT * self.restarts * problem.size)
        start = torch.stack([problem.start(generator, like) for _ in range(self.restarts)])
        evaluate, why = self._evaluator(problem, like)

        def watch(done: int, _values: Tensor, best: Tensor) -> None:
            if progress is not None:
                progress(done, self.iterations, float(best.min()))

        result = search(
            GroupConsistency(problem, evaluate, self.consistency) if self.consistency else evaluate,
            start,
            self.optimiser,
            project=problem.project,
            iterations=self.iterations,
            tolerance=self.tolerance,
            patience=self.patience,
            watch=watch,
        )
        objectives, distances = result.judged.unbind(1)
        winner = int(torch.argmin(torch.where(torch.isfinite(objectives), objectives, math.inf)))
        picture, logits, numbers = problem.unpack(result.points[winner])
        return Match(
            inputs=problem.to_model(picture).detach(),
            label_logits=None if logits is None else logits.detach(),
            numbers={name: float(value) for name, value in numbers.items()},
            objective=float(objectives[winner]),
            distance=float(distances[winner]),
            curves=_thin(result.curves),
            flags=_flags(problem, result, winner, self.iterations),
            info={
                "steps": len(result.curves),
                "restarts": self.restarts,
                "best_restart": winner,
                "evaluation": evaluate.way,
                "compiled": evaluate.way == "compiled",
                **why,
            },
        )

    def _evaluator(self, problem: Problem, like: Tensor) -> tuple[Evaluator, dict[str, str]]:
        if not self._compiles(problem.victim, problem.shape, like):
            return problem.evaluator(self.restarts, False), {}
        try:
            evaluate = problem.evaluator(self.restarts, True)
        except CannotCompile as error:
            if self.compile == "always":
                raise UserError(f"compile: expected a step that can be compiled, got one of which {error}") from error
            return problem.evaluator(self.restarts, False), {"not_compiled_because": str(error)}
        compiled = evaluate.compiled
        return evaluate, {"compiled_because": compiled.because} if compiled is not None and compiled.fresh else {}

    def _compiles(self, victim: Victim, shape: tuple[int, ...], like: Tensor) -> bool:
        """Whether to compile; a rule of counts, not of clocks, so that a run is the same each time."""
        if self.compile != "auto":
            return self.compile == "always"
        if not self.simulation.compiles or not self.canvas.compiles:
            return False
        if like.device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            return False
        work = self.iterations * self.restarts * 9 * forward_flops(victim.model, like.new_zeros(shape))
        return work / ASSUMED_FLOPS_PER_SECOND > WORTH_COMPILING_SECONDS


def _flags(problem: Problem, result: SearchResult, winner: int, iterations: int) -> tuple[str, ...]:
    flags = []
    if not bool(result.alive.any()):
        return ("non-finite objective",)
    if not bool(result.alive.all()):
        flags.append("non-finite restart")
    if result.still_falling(winner, iterations, lambda row: problem.unpack(row)[0]):
        flags.append("did not converge")
    objectives = result.judged[:, 0]
    rivals = result.alive & (objectives <= 1.1 * objectives[winner] + 1e-12)
    chosen, *others = (problem.unpack(row)[0].flatten(1) for row in (result.points[winner], *result.points[rivals]))
    # Equal labels leave the order of examples open: compare each with its nearest counterpart.
    gaps = (torch.cdist(chosen, other, p=1).min(1).values.max() / chosen.shape[1] for other in others)
    if any(float(gap) > 0.1 for gap in gaps):
        flags.append("restarts disagree")
    return tuple(flags)


def _thin(curves: list[Tensor]) -> list[list[float]]:
    """At most CURVE_POINTS points per curve, first and last among them; non-finite ones become NaN."""
    count = len(curves)
    keep = sorted({round(i * (count - 1) / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)}) if count > 1 else [0]
    table = torch.stack([curves[i] for i in keep], dim=1).cpu().double()
    return [[value if math.isfinite(value) else math.nan for value in row] for row in table.tolist()]


@dataclass(frozen=True, eq=False)
class GroupConsistency:
    """Evaluate a problem in which the rows, its restarts, are pulled towards their mean.

    Yin et al., See through Gradients: Image Batch Recovery via GradInversion, CVPR 2021: each is pulled by weight *
    mean over pixels of (x_g - E_g[x_g])^2. Yin et al. take the length instead of the mean square, and register pictures
    before the mean is taken; here the examples of a batch are put in one order, and nothing is shifted. The mean is
    held while each is pulled, and best iterates are judged without the pull.
    """

    problem: Problem
    evaluate: Evaluate
    weight: float

    def __call__(self, rows: Tensor, iteration: int) -> Evaluation:
        objectives, judged, gradients = self.evaluate(rows, iteration)
        with torch.enable_grad():
            points = rows.detach().requires_grad_()
            pictures = torch.stack([self.problem.unpack(row)[0] for row in points])
            mean = group_mean(pictures.detach(), self.problem.targets)
            penalty = self.weight * (pictures - mean).square().flatten(1).mean(1)
            (pull,) = torch.autograd.grad(penalty.sum(), points)
        return objectives + penalty.detach(), judged, gradients + pull


def group_mean(pictures: Tensor, targets: Tensor | None) -> Tensor:
    """Return the mean of finite (restarts, examples, ...) in the order of each; equal targets may change places.

    >>> one = torch.tensor([[0.0], [1.0]])
    >>> group_mean(torch.stack([one, one.flip(0) + 0.2]), torch.tensor([3, 3])).flatten(1).tolist()
    [[0.10000000149011612, 1.100000023841858], [1.100000023841858, 0.10000000149011612]]
    """
    finite = torch.isfinite(pictures).flatten(1).all(1)
    if not bool(finite.any()):
        return pictures
    reference = pictures[finite][0].flatten(1)
    total, orders = torch.zeros_like(pictures[0]), []
    for picture, counts in zip(pictures, finite.tolist(), strict=True):
        costs = torch.cdist(reference, picture.flatten(1)).square().nan_to_num()
        if targets is not None and targets.dim() == 1 and not targets.is_floating_point():
            costs = costs + (targets[:, None] != targets[None]) * (1 + costs.max()) * len(targets)
        order = assignment(costs)
        orders.append(order)
        if counts:
            total += picture[order]
    mean = total / finite.sum()
    return torch.stack([mean[torch.argsort(order)] for order in orders])
