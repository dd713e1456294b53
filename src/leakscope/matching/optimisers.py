"""Run all restarts of an optimiser at once, as rows of one matrix that never influence each other.

An optimiser is a frozen dataclass of settings; ``begin`` makes its state. The loop then asks for the points to
evaluate and tells their values and gradients.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from leakscope.contracts.errors import UserError

Project = Callable[[Tensor], Tensor]
Schedule = Literal["constant", "step", "cosine"]


def schedule_factor(schedule: Schedule, step: int, total: int) -> float:
    """What the learning rate is multiplied by at ``step`` of ``total``.

    >>> schedule_factor("step", 400, 1000), round(schedule_factor("cosine", 500, 1000), 6)
    (0.1, 0.5)
    """
    if schedule == "constant":
        return 1.0
    if schedule == "step":
        return float(0.1 ** sum(step >= int(total / part) for part in (2.667, 1.6, 1.142)))
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * step / total))
    raise UserError(f"schedule: expected 'constant', 'step' or 'cosine', got {schedule!r}")


class Run(Protocol):
    """The state of an optimiser at work; ``finished`` are the rows that cannot be improved any further."""

    finished: Tensor

    def ask(self) -> Tensor:
        """The points (restarts, n) to evaluate next."""

    def tell(self, values: Tensor, gradients: Tensor, usable: Tensor) -> None:
        pass


class Optimiser(Protocol):
    #: Whether a non-finite value is an ordinary event (a trial step too long) rather than the end of a restart.
    survives_non_finite: bool

    @property
    def lr(self) -> float: ...

    def begin(self, start: Tensor, iterations: int, project: Project) -> Run: ...


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Take Adam steps along the gradient, its sign, or a soft sign, with a learning-rate schedule.

    Soft sign: tanh(s g / mean|g|) with the slope s falling linearly from one to zero over the run. ``decay`` multiplies
    the learning rate at each step.
    """

    lr: float = 0.1
    gradient: Literal["plain", "sign", "soft_sign"] = "plain"
    schedule: Schedule = "cosine"
    decay: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    survives_non_finite = False

    def __post_init__(self) -> None:
        if self.gradient not in ("plain", "sign", "soft_sign"):
            raise UserError(f"gradient: expected 'plain', 'sign' or 'soft_sign', got {self.gradient!r}")
        if not self.lr > 0:
            raise UserError(f"lr: expected a positive number, got {self.lr}")
        if not 0 < self.decay <= 1:
            raise UserError(f"decay: expected a factor in (0, 1], got {self.decay}")
        schedule_factor(self.schedule, 0, 1)

    def begin(self, start: Tensor, iterations: int, project: Project) -> Run:
        return _AdamRun(self, start, iterations, project)


class _AdamRun:
    def __init__(self, settings: Adam, start: Tensor, iterations: int, project: Project) -> None:
        self.settings, self.iterations, self.project = settings, iterations, project
        self.points, self.step = start.clone(), 0
        self.mean, self.square = torch.zeros_like(start), torch.zeros_like(start)
        self.finished = torch.zeros(len(start), dtype=torch.bool, device=start.device)

    def ask(self) -> Tensor:
        return self.points

    def tell(self, values: Tensor, gradients: Tensor, usable: Tensor) -> None:
        rule = self.settings
        if rule.gradient == "sign":
            gradients = gradients.sign()
        elif rule.gradient == "soft_sign":
            slope = 1 - self.step / self.iterations
            size = gradients.abs().mean(1, keepdim=True)
            gradients = torch.tanh(slope * gradients / size.clamp_min(1e-30))
        first, second = rule.betas
        self.mean.lerp_(gradients, 1 - first)
        self.square.mul_(second).addcmul_(gradients, gradients, value=1 - second)
        factor = rule.lr * rule.decay**self.step * schedule_factor(rule.schedule, self.step, self.iterations)
        self.step += 1
        # A tiny epsilon: gradients of a matched update are small, and the usual 1e-8 would stop the run early.
        length = (self.square / (1 - second**self.step)).sqrt_().add_(1e-16)
        points = self.project(self.points.addcdiv(self.mean, length, value=-factor / (1 - first**self.step)))
        self.points = points if bool(usable.all()) else torch.where(usable[:, None], points, self.points)


class RowAdam:
    """Move some rows of a table by Adam at each step; unlike in :class:`Adam` every row counts its own steps."""

    def __init__(self, table: Tensor) -> None:
        self.mean, self.square = torch.zeros_like(table), torch.zeros_like(table)
        self.steps = torch.zeros(len(table), dtype=table.dtype, device=table.device)

    def move(self, rows: Tensor, gradient: Tensor, lr: float) -> Tensor:
        first, second = 0.9, 0.999
        shape = (-1,) + (1,) * (gradient.dim() - 1)
        self.steps[rows] += 1
        steps = self.steps[rows].reshape(shape)
        self.mean[rows] = first * self.mean[rows] + (1 - first) * gradient
        self.square[rows] = second * self.square[rows] + (1 - second) * gradient.square()
        length = (self.square[rows] / (1 - second**steps)).sqrt() + 1e-16
        return lr * self.mean[rows] / (1 - first**steps) / length


@dataclass(frozen=True, kw_only=True)
class LBFGS:
    """Run limited-memory BFGS, each restart with its own history and step length, one evaluation an iteration.

    ``line_search="backtracking"`` halves a step until the objective falls enough (Armijo); ``"none"`` takes every step
    of length ``lr`` as published DLG code does, and may diverge.
    """

    lr: float = 1.0
    history: int = 50
    line_search: Literal["backtracking", "none"] = "backtracking"
    survives_non_finite = True

    def __post_init__(self) -> None:
        if self.line_search not in ("backtracking", "none"):
            raise UserError(f"line_search: expected 'backtracking' or 'none', got {self.line_search!r}")
        if not self.lr > 0 or self.history < 1:
            raise UserError(f"LBFGS: expected lr > 0 and history >= 1, got {self.lr} and {self.history}")

    def begin(self, start: Tensor, iterations: int, project: Project) -> Run:
        return _LBFGSRun(self, start, project)


class _LBFGSRun:
    """Rows share no state; each keeps its last ``history`` moves and turns (changes of gradient) in a ring."""

    def __init__(self, settings: LBFGS, start: Tensor, project: Project) -> None:
        (rows, size), depth = start.shape, settings.history
        self.settings, self.project = settings, project
        self.points, self.trial = start.clone(), start.clone()
        self.values = start.new_full((rows,), math.inf)
        self.gradients, self.direction = torch.zeros_like(start), torch.zeros_like(start)
        self.length = start.new_ones(rows)
        self.moves, self.turns = start.new_zeros(rows, depth, size), start.new_zeros(rows, depth, size)
        # Inner products of the ring's entries, kept up to date so that a direction costs four matrix-vector products.
        self.move_turn = torch.zeros(rows, depth, depth, dtype=torch.float64, device=start.device)
        self.turn_turn = torch.zeros_like(self.move_turn)
        self.used = torch.zeros(rows, dtype=torch.long, device=start.device)
        self.finished = torch.zeros(rows, dtype=torch.bool, device=start.device)

    def ask(self) -> Tensor:
        return self.trial

    def tell(self, values: Tensor, gradients: Tensor, usable: Tensor) -> None:
        fresh = torch.isinf(self.values)
        slope = (self.gradients * self.direction).sum(1)
        enough = values <= self.values + 1e-4 * self.length * slope
        if self.settings.line_search == "none":
            enough = torch.ones_like(enough)
        accepted = usable & (fresh | enough) & ~self.finished
        self._remember(accepted & ~fresh, self.trial - self.points, gradients - self.gradients)
        keep = accepted[:, None]
        self.points = torch.where(keep, self.trial, self.points)
        self.gradients = torch.where(keep, gradients, self.gradients)
        self.values = torch.where(accepted, values, self.values)
        if bool(accepted.any()):
            self.direction = torch.where(keep, self._new_direction(), self.direction)
        opening = torch.where(self.used == 0, self._cautious(), self.settings.lr)
        self.length = torch.where(accepted, opening, self.length * torch.where(usable, 0.5, 0.1))
        self._restart_exhausted(~accepted & (self.length < 1e-9))
        self.trial = self.project(self.points + self.length[:, None] * self.direction)

    def _cautious(self) -> Tensor:
        """The first step has no curvature to go by: no longer than lr in the sum of absolute entries."""
        return self.settings.lr * (1 / self.gradients.abs().sum(1).clamp_min(1e-30)).clamp(max=1.0)

    def _remember(self, rows: Tensor, move: Tensor, turn: Tensor) -> None:
        curvature = (move * turn).sum(1)
        good = rows & (curvature > 1e-10 * turn.square().sum(1)) & (curvature > 0)
        which = torch.nonzero(good).flatten()
        if len(which) == 0:
            return
        slot = self.used[which] % self.settings.history
        self.moves[which, slot] = move[which]
        self.turns[which, slot] = turn[which]
        self.move_turn[which, slot] = _products(self.turns[which], move[which])
        self.move_turn[which, :, slot] = _products(self.moves[which], turn[which])
        self.turn_turn[which, slot] = self.turn_turn[which, :, slot] = _products(self.turns[which], turn[which])
        self.used[which] += 1

    def _new_direction(self) -> Tensor:
        """Minus the approximate inverse Hessian times the gradient, in the compact form of Byrd et al. (1994).

        H = c I + [S cY] [[R^-T (D + c Y'Y) R^-1, -R^-T], [-R^-1, 0]] [S cY]', with R the upper triangle of S'Y in the
        order of time and D its diagonal: one triangular solve for all restarts instead of a loop over the history.
        """
        depth = min(self.settings.history, int(self.used.max()))
        if depth == 0:
            return -self.gradients
        age = torch.arange(depth, 0, -1, device=self.used.device)  # oldest first
        slots = (self.used[:, None] - age) % self.settings.history
        valid = (self.used[:, None] >= age).double()
        # Rows and columns of the inner products (rows, depth, depth) in the order of time.
        place = (torch.arange(len(slots), device=slots.device)[:, None, None], slots[:, :, None], slots[:, None, :])
        both = valid[:, :, None] * valid[:, None, :]
        cross, square = self.move_turn[place] * both, self.turn_turn[place] * both
        own = torch.diagonal(cross, dim1=1, dim2=2)
        upper = torch.triu(cross) + torch.diag_embed(1 - valid)
        scale = own[:, -1] / square[:, -1, -1].clamp_min(1e-300)
        scale = torch.where(self.used > 0, scale, 1.0)[:, None]
        p = _products(self.moves, self.gradients).gather(1, slots) * valid
        q = _products(self.turns, self.gradients).gather(1, slots) * valid
        u = torch.linalg.solve_triangular(upper, p[:, :, None], upper=True)[:, :, 0]
        right = own * u + scale * (square @ u[:, :, None])[:, :, 0] - scale * q
        top = torch.linalg.solve_triangular(upper.mT, right[:, :, None], upper=False)[:, :, 0] * valid
        along = torch.zeros_like(self.move_turn[:, 0]).scatter(1, slots, top).to(self.gradients)
        against = torch.zeros_like(self.move_turn[:, 0]).scatter(1, slots, u * valid).to(self.gradients)
        scale = scale.to(self.gradients)
        result = scale * self.gradients
        result += (along[:, None] @ self.moves)[:, 0] - scale * (against[:, None] @ self.turns)[:, 0]
        descends = (result * self.gradients).sum(1, keepdim=True) > 0
        return -torch.where(descends, result, self.gradients)

    def _restart_exhausted(self, rows: Tensor) -> None:
        """Where no step along the direction helps: forget the history, and give up if there was none."""
        self.finished = self.finished | (rows & (self.used == 0))
        again = rows & (self.used > 0)
        self.used = torch.where(again, torch.zeros_like(self.used), self.used)
        self.direction = torch.where(again[:, None], -self.gradients, self.direction)
        self.length = torch.where(again, self._cautious(), self.length)


def _products(ring: Tensor, vector: Tensor) -> Tensor:
    return (ring @ vector[:, :, None])[:, :, 0].double()
