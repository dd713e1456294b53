"""Hybrid: use R-GAP's equations as the start and as a term of a gradient-matching search, layer by layer.

Cangxiong Chen and Neill Campbell, "Analysing Training-Data Leakage from Gradients through Linear Systems and Gradient
Matching", BMVC 2022. From the last layer to the first: u x = v are the linear equations of a layer's input x (see
equations/constraints.py), its least-squares solution is the start, and Adam minimises

    mu1 sum_l (1 - cos(dL/dw_l(x), g_l)) + mu2 TV(x) + mu3 |u x - v|^2    over the tensors l of this and later layers

on the network from this layer on; what comes out is inverted through the activation and gives the next layer's system.
``form="constrained"`` minimises the first two terms subject to u x = v instead (the paper's equation 11).

``Hybrid.preset("paper")`` has the published steps and weights. Differences in both: the derivative at the logits is
held at what the last layer shows instead of computed from the label, which is the same at the true input; the best
iterate by the objective is kept, the start among them; float64. The defaults differ further (``trust``):

* While every layer behind is determined, its equations hold all that later gradients say. A determined layer needs no
  search, and in one that is not, TV alone chooses among the solutions, without a pass through the network.
* Behind a layer that was not determined, u and v carry errors, which a least-squares solution amplifies. It is damped
  as the residual of the redundant equations demands, and the search matches the update itself by relative squared
  differences in place of cosines, which leave lengths open.
* TV is the joint one of axes and channels, and its weight falls during the search; Adam is fifty times faster and slows
  down to zero; values stay in the valid range.

Measured on five CIFAR-10 test images, initial weights, mean squared error of pixels in [0, 1], in brackets what the
paper reports for two images of its own: CNN2 V1 0.0000 (0.0008), V2 0.0021 (0.0051); CNN3 V1 0.0093 (0.0478), V2 0.0124
(0.0322), V3 0.0000 (0.0020), V4 0.0355 (0.0417); CNN4 V1 0.0095 (0.0610); 3 to 32 seconds an image on one core. R-GAP:
0.0000, 0.0346; 0.0884, 0.0635, 0.0000, 0.0439; 0.0950. The published settings on the first two images: CNN2 V2 0.0018
(defaults 0.0008), CNN3 V1 0.0135 (0.0048).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import scipy.linalg
import scipy.sparse.linalg
import torch
from torch import Tensor

from leakscope.attacks.rgap import CLIP, Solver, Walk, reconstruction, solver_basis, walk_back
from leakscope.contracts.attack import Attack, Progress
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.inputs import InputSpace
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.settings import setting
from leakscope.equations.constraints import signal_at_input, stage_system
from leakscope.equations.head_system import EXACT_FEATURES
from leakscope.equations.linear_system import MAX_RANKED, Array, LinearSystem
from leakscope.matching import Adam, Cosine, Ramp, RelativeSquaredL2, total_variation
from leakscope.matching.optimisers import Schedule
from leakscope.matching.priors import TVVariant
from leakscope.matching.search import search
from leakscope.network.chain import Chain, Stage

Weights = tuple[float, float, float]

_PAPER: dict[str, Any] = {
    "iterations": (10_000, 8000, 1000),
    "weights": ((1.0, 1.0, 0.05), (1.0, 1.0, 0.1), (10.0, 0.1, 1.0)),
    "fade": 1.0,
    "distance": "cosine",
    "tv_variant": "l1mean_sum",
    "lr": 1e-3,
    "schedule": "constant",
    "trust": False,
    "clamp": False,
    "clip": 0.9999,
}


@dataclass(frozen=True, kw_only=True)
class Hybrid(Attack):
    """Solve layer by layer as R-GAP, search where the equations leave something open.

    ``iterations`` and ``weights`` have one entry a layer, the input's first; the last entry holds for all deeper ones.
    """

    presets = MappingProxyType({"paper": _PAPER})

    form: Literal["soft", "constrained"] = setting("soft", "The equations as a penalty, or kept to the letter.")
    iterations: int | tuple[int, ...] = setting((2000, 1000), "Steps of the search, one number a layer.", ge=1)
    weights: tuple[Weights, ...] = setting(
        ((1.0, 3.0, 1.0),), "Of matching, total variation and equations, one row a layer.", ge=0
    )
    fade: float = setting(1 / 30, "What the weight of total variation is multiplied by over the search.", gt=0, le=1)
    distance: Literal["squared", "cosine"] = setting("squared", "How two gradients are compared.")
    tv_variant: TVVariant = setting("joint", "Which definition of total variation.")
    lr: float = setting(0.05, "Step size of Adam.", gt=0)
    schedule: Schedule = setting("cosine", "How the step size falls over the run.")
    trust: bool = setting(True, "Leave out terms that say nothing new or are known to be wrong.")
    clamp: bool = setting(True, "Keep the input in its value range, other layers' in that of their activation.")
    clip: float | None = setting(None, CLIP, gt=0, lt=1)

    def problems(self) -> list[str]:
        if isinstance(self.iterations, int):
            object.__setattr__(self, "iterations", (self.iterations,))
        empty = [name for name in ("iterations", "weights") if not getattr(self, name)]
        return [f"{name}: expected one entry at least, got none" for name in empty]

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        basis = solver_basis(observation, self.clip)
        solver = _HybridSolver(**basis, ranks=True, settings=self, inputs=observation.inputs)
        walk, notes = walk_back(solver, observation, progress)
        result = reconstruction(observation, walk, notes)
        steps = sum(row["steps"] for row in walk.layers)
        return dataclasses.replace(result, info={**result.info, "steps": steps})

    def at(self, number: int) -> tuple[int, Weights]:
        assert isinstance(self.iterations, tuple)
        steps, weights = self.iterations, self.weights
        return steps[min(number, len(steps) - 1)], weights[min(number, len(weights) - 1)]


@dataclass(frozen=True, kw_only=True, eq=False)
class _HybridSolver(Solver):
    linear = False

    settings: Hybrid
    inputs: InputSpace

    def _solve(self, walk: Walk, stage: Stage, outputs: Array, signal: Array) -> Walk:
        system = stage_system(stage, outputs, signal, self.update)
        solution = system.solve()
        residual = max(solution.residual, self.misfit(stage, signal, solution.x))
        # A linear layer with a bias shows its input whatever went wrong behind it.
        layer = stage.operations[0]
        own = len(stage.operations) == 1 and system.diagonal is not None and layer.bias_name in self.update
        trusted = self.settings.trust and (own or not walk.layers or walk.layers[0]["trusted"])
        spectrum = system.spectrum_up_to(MAX_RANKED)
        rank = None if spectrum is None else spectrum.rank
        met = residual <= EXACT_FEATURES  # free of errors
        determined = trusted and rank == system.unknowns and met
        row: dict[str, Any] = {"layer": stage.name, "rows": system.rows, "rank": rank, "unknowns": system.unknowns}
        row |= {"residual": residual, "trusted": determined, "steps": 0, "objective": None}
        x, worst = solution.x, max(walk.residual, residual)
        # A first linear layer says everything of its input by its own gradient, so nothing is left to search.
        if not determined and system.diagonal is None:
            number, alone = self.chain.stages.index(stage), trusted and met
            search = _Search(
                self.chain, number, system, walk.start, self.update, self.settings, self._projection(number), alone
            )
            start = x if search.alone or not self.settings.trust else self._damped(system, x, stage)
            if search.names:
                x, row["objective"], worst = search.run(start)
                row["steps"] = search.steps
        signal = signal_at_input(stage, signal)
        return dataclasses.replace(walk, x=x, signal=signal, residual=worst, layers=(row, *walk.layers))

    def _projection(self, number: int) -> Callable[[Tensor], Tensor]:
        if not self.settings.clamp:
            return lambda rows: rows
        if number > 0:
            before = self.chain.stages[number - 1].activation
            return lambda rows: before(before.inverse(rows, self.clip))
        shape = (-1, *self.chain.stages[0].input_shape)
        return lambda rows: self.inputs.project(rows.reshape(shape)).reshape(rows.shape)

    def _damped(self, system: LinearSystem, x: Array, stage: Stage) -> Array:
        """Return the most probable input if the target has errors of the size that redundant equations show.

        Inputs are taken for equally spread over the value range; in other layers around zero, as far as the solution.
        """
        balanced = system.balanced
        gap = balanced.matrix @ x - balanced.target
        spectrum = system.spectrum_up_to(MAX_RANKED)
        rank = min(system.rows, system.unknowns) if spectrum is None else spectrum.rank
        noise = float(gap @ gap) / max(1, system.rows - rank)
        centre, variance = np.zeros_like(x), max(float(np.mean(x**2)), 1e-30)
        if self.inputs.bounded and stage is self.chain.stages[0]:
            like = torch.zeros((1, *stage.input_shape), dtype=torch.float64)
            low, high = self.inputs.from_unit(like), self.inputs.from_unit(like + 1)
            centre = ((low + high) / 2).reshape(-1).numpy()
            variance = float(((high - low) ** 2).mean()) / 12
        left = balanced.target - balanced.matrix @ centre
        damping = math.sqrt(noise / variance)
        move = scipy.sparse.linalg.lsmr(balanced.matrix, left, damp=damping, atol=1e-9, btol=1e-9, maxiter=1000)[0]
        return np.asarray(centre + move)


@dataclass(frozen=True, eq=False)
class _Search:
    """The objective of one layer's input, and its descent. ``alone``: only TV and the equations count."""

    chain: Chain
    number: int
    system: LinearSystem
    signal: Array
    update: Mapping[str, Tensor]
    settings: Hybrid
    project: Callable[[Tensor], Tensor]
    alone: bool

    @property
    def steps(self) -> int:
        return self.settings.at(self.number)[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, *self.chain.stages[self.number].input_shape)

    @property
    def constrained(self) -> bool:
        """Whether the equations are kept to the letter, which makes sense only for those that hold."""
        return self.settings.form == "constrained" and (self.alone or not self.settings.trust)

    @cached_property
    def names(self) -> frozenset[str]:
        own = self.chain.parameters(self.number)
        return frozenset(name for name in own if name in self.update and bool(self.update[name].any()))

    def run(self, start: Array) -> tuple[Array, tuple[float, float], float]:
        origin = torch.from_numpy(start)
        objective = self._objective()
        free = _null_space(self.system) if self.constrained else None
        # Clamping would break equations that are kept to the letter.
        project = self.project if free is None else (lambda rows: rows)
        first = project(origin[None]) if free is None else torch.zeros_like(origin)[None]

        def point(row: Tensor) -> Tensor:
            return row if free is None else origin + free(row)

        def evaluate(rows: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
            value, final, gradient = objective(point(rows[0]), step)
            return value[None], final[None, None], (gradient if free is None else free(gradient))[None]

        adam, steps = Adam(lr=self.settings.lr, schedule=self.settings.schedule), self.steps
        # One evaluation more than steps: where the last step led counts too.
        result = search(evaluate, first, adam, project=project, iterations=steps, evaluations=steps + 1)
        best = point(result.points[0])
        candidate = self._candidate(best.reshape(self.shape))
        left = float(RelativeSquaredL2()({name: self.update[name] for name in candidate}, candidate))
        return best.numpy(), (float(result.curves[0]), float(result.judged)), math.sqrt(left)

    def _objective(self) -> Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]:
        """The objective with TV as it counts at a step, as it counts in the end, and the gradient of the first."""
        rule = self.settings
        matching, variation, linear = rule.at(self.number)[1]
        if rule.trust:
            # The equations hold all that the gradients say, or they are wrong and the gradients hold it all.
            matching, linear = (0.0, linear) if self.alone else (matching, 0.0)
        linear = 0.0 if self.constrained else linear
        fading = Ramp(first=1.0, last=rule.fade, steps=self.steps)
        system = self.system.balanced if rule.trust else self.system
        matrix, transposed = system.matrix, system.matrix.T.tocsr()

        def objective(x: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
            picture = x.reshape(self.shape).clone().requires_grad_()
            tv = variation * total_variation(picture, rule.tv_variant)
            rest = matching * self._distance(picture) if matching > 0 else torch.zeros_like(tv)
            total = float(fading(torch.tensor(float(step)))) * tv + rest
            moves = total.requires_grad
            gradient = torch.autograd.grad(total, picture)[0].flatten() if moves else torch.zeros_like(x)
            value, final = total.detach(), (rule.fade * tv + rest).detach()
            if linear > 0:
                gap = matrix @ x.numpy() - system.target
                square = linear * float(gap @ gap)
                value, final = value + square, final + square
                gradient = gradient + 2 * linear * torch.from_numpy(transposed @ gap)
            return value, final, gradient

        return objective

    def _candidate(self, picture: Tensor) -> dict[str, Tensor]:
        """The update of the layers from this one on, with the derivative at the last layer's output held."""
        weights = {n: p for n, p in self.chain.parameters(self.number).items() if n in self.names}
        twice = picture.requires_grad
        *stages, last = self.chain.stages[self.number :]
        for stage in stages:
            picture = stage(picture)
        held = (last.linear(picture) * torch.from_numpy(self.signal)).sum()
        gradients = torch.autograd.grad(held, list(weights.values()), create_graph=twice)
        return dict(zip(weights, gradients, strict=True))

    def _distance(self, picture: Tensor) -> Tensor:
        candidate = self._candidate(picture)
        if self.settings.distance == "cosine":
            return len(candidate) * Cosine(per="tensor")({name: self.update[name] for name in candidate}, candidate)
        each = [RelativeSquaredL2()({name: self.update[name]}, {name: value}) for name, value in candidate.items()]
        return torch.stack(each).sum()


def _null_space(system: LinearSystem) -> Callable[[Tensor], Tensor]:
    """The projection onto the directions that the equations leave open, from the smaller Gram matrix.

    >>> import scipy.sparse
    >>> free = _null_space(LinearSystem(scipy.sparse.csr_array([[1.0, 1.0]]), np.array([2.0])))
    >>> [round(value, 9) for value in free(torch.tensor([1.0, 0.0], dtype=torch.float64)).tolist()]
    [0.5, -0.5]
    """
    spectrum = system.spectrum_up_to(MAX_RANKED)
    if spectrum is None:
        limit = f"the constrained form decomposes systems of up to {MAX_RANKED} rows or unknowns"
        raise NotApplicable(f"{limit}, got {system.rows} and {system.unknowns}. Use form='soft'.")
    if spectrum.rank == system.unknowns:
        return torch.zeros_like
    matrix = system.balanced.matrix
    wide = system.rows < system.unknowns
    values, vectors = scipy.linalg.eigh((matrix @ matrix.T if wide else matrix.T @ matrix).toarray())
    largest = slice(len(values) - spectrum.rank, None)
    basis = matrix.T @ (vectors[:, largest] / np.sqrt(values[largest])) if wide else vectors[:, largest]
    basis = torch.from_numpy(np.ascontiguousarray(basis))
    return lambda row: row - basis @ (basis.T @ row)
