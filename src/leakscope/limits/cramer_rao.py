"""The Cramér–Rao floor: the least error that any unbiased adversary can reach from a noisy gradient.

With J the Jacobian of what is seen by the inputs (one row an unknown) and Gaussian noise of standard deviation s, the
Fisher information of the inputs is F = J J' / s^2, and every unbiased estimate has

    mean squared error an unknown  >=  trace(F^-1) / n  >=  n / trace(F)                        (n unknowns)

Liu et al., "Data Reconstruction Attacks and Defenses: A Systematic Evaluation", theorem D.7 and equation 28 (which
lacks the division by the batch size) loosen it to the right-hand side. Here the trace itself is computed: exactly, or
for large problems by Hutchinson's estimator and conjugate gradients on products with F alone. Laplace noise has twice
the Fisher information of Gaussian noise of the same variance. Clipping by C has the Jacobian
(C / |g|) (J - J g g' / |g|^2) where |g| > C. Pruned and dropped entries are columns that are gone.

The adversary is taken to know the labels, the order of the examples and which entries were set to zero: one that does
not can only do worse. A prior on natural images is a bias, and with one an attack may go below the floor. Of a weight
update J is that of the client's local steps in their true order. Where F is singular the floor is infinite.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from leakscope.contracts.channel import Channel
from leakscope.contracts.checks import expected, refuse, whole
from leakscope.contracts.errors import UserError
from leakscope.equations.decomposition import MAX_SINGULAR_VALUES, Decomposition, decompose
from leakscope.limits.effort import PRODUCTS_WORK, effort_of
from leakscope.limits.jacobian import inverse_trace, make_jacobian, not_unasked, signs, too_large
from leakscope.matching.gradient_map import MAX_PRODUCTS, GradientMap, Linearisation, Progress, affordable_steps

Method = Literal["auto", "exact", "estimate"]

#: Defaults of the estimate: random directions, and steps of conjugate gradients for each.
PROBES, STEPS = 8, MAX_PRODUCTS
#: With fewer steps no probe ever settles. Where so few fit into a minute by the size of the update, the floor is left.
USEFUL_STEPS = 12
_FEWEST_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The least root-mean-square error of an unbiased adversary, in units of the value range, and what it rests on.

    ``rmse`` is infinite where some direction leaves no trace, and NaN where it could not be told; ``reason`` says why.
    ``interval`` (95 %, Student's t over the probes) and ``standard_error`` are None where ``rmse`` is exact.
    ``converged`` is the share of probes that had settled; the others stand too low, so ``rmse`` is still a floor.
    ``loosened`` is sqrt(n / trace(F)), never above ``rmse``; ``visible_rmse`` the error along a direction that leaves a
    trace. ``smallest`` and ``condition`` are of the Jacobian of what is seen; ``sigma`` is the noise on an entry, 1
    where it differs between tensors. ``surviving`` is the share of the Jacobian's squared norm that pruning and dropout
    leave (1 - p_hat), ``clip_factor`` that of clipping; 1 where each of several examples was clipped by itself.
    """

    rmse: float
    method: Literal["exact", "estimate"]
    unknowns: int
    sigma: float
    gradient_norm: float
    clip_factor: float
    surviving: float
    loosened: float
    visible_rmse: float | None = None
    example_rmse: tuple[float, ...] | None = None
    rank: int | None = None
    smallest: float | None = None
    condition: float | None = None
    standard_error: float | None = None
    interval: tuple[float, float] | None = None
    converged: float | None = None
    probes: int | None = None
    reason: str | None = None

    @property
    def psnr(self) -> float:
        """Return the floor in decibels, peak 1: no unbiased reconstruction has a higher PSNR on average."""
        if self.rmse in (0.0, math.inf):
            return math.copysign(math.inf, 0.5 - self.rmse)
        return -20 * math.log10(self.rmse)


@dataclass(frozen=True, eq=False)
class _View:
    """A gradient on its way through a channel, at one point, in units of the noise on each tensor.

    A clipped gradient loses a change along itself: ``along`` reads that part, ``lost`` is what it is taken off.
    """

    local: Linearisation
    sigma: float
    norm: float
    factor: float
    along: Tensor | None
    lost: Tensor | None
    mask: Tensor | None

    @classmethod
    def at(cls, mapping: GradientMap, flat: Tensor, channel: Channel, sigma: float, seed: int) -> Self:
        local = mapping.linearise(flat)
        raw = dataclasses.replace(mapping, scales=None).update(flat)
        joined = torch.cat([value.flatten() for value in raw.values()])
        norm = float(joined.norm())
        factor = channel.clip_factor(norm)
        mask = channel.kept(list(raw.values()), torch.Generator().manual_seed(seed))
        if factor == 1:
            return cls(local, sigma, norm, factor, None, None, mask)
        units = [torch.full_like(value, (mapping.scales or {}).get(name, 1.0)) for name, value in raw.items()]
        scale = torch.cat([unit.flatten() for unit in units])
        return cls(local, sigma, norm, factor, scale * joined / norm, joined / norm / scale, mask)

    @property
    def projects(self) -> bool:
        """Tell whether clipping is an orthogonal projection here: where all noise is alike."""
        return self.along is not None and self.lost is not None and torch.equal(self.along, self.lost)

    @property
    def entries(self) -> int:
        return len(self.local.value) if self.mask is None else int(self.mask.sum())

    def forward(self, direction: Tensor) -> Tensor:
        """Compute how what is seen changes, entries that are set to zero being still there."""
        change = self.local.forward(direction)
        if self.along is not None and self.lost is not None:
            change = change - self.lost * (self.along @ change)
        return self.factor * change

    def backward(self, weights: Tensor) -> Tensor:
        if self.along is not None and self.lost is not None:
            weights = weights - self.along * (self.lost @ weights)
        return self.factor * self.local.backward(weights)

    def seen(self, rows: Tensor) -> Tensor:
        """Turn rows of the gradient's Jacobian into those of what is seen, entries set to zero being still there."""
        if self.along is not None and self.lost is not None:
            rows = rows.addr(rows @ self.along, self.lost, alpha=-1)
        return rows * self.factor


def cramer_rao(
    mapping: GradientMap,
    flat: Tensor,
    channel: Channel,
    *,
    method: Method = "auto",
    probes: int = PROBES,
    steps: int = STEPS,
    seed: int = 0,
    decomposition: Decomposition | None = None,
    progress: Progress | None = None,
) -> Floor:
    """Compute the floor at the true inputs ``flat`` (unit space, see ``mapping.flat``) behind ``channel``.

    "exact" makes the Jacobian and raises where it is too large; "estimate" never makes it; "auto" is exact where it
    can be. ``seed`` draws the dropout and the probes. ``decomposition``, of the undefended Jacobian with its vectors,
    saves that work. Give a mapping in float64: float32 loses weak directions.

    >>> from leakscope.limits.jacobian import gradient_map_at
    >>> mapping, flat = gradient_map_at(torch.nn.Linear(2, 3), (2,), batch=1, num_classes=3)
    >>> one, two = (cramer_rao(mapping, flat, Channel(noise=noise)).rmse for noise in (0.01, 0.02))
    >>> round(two / one, 9)
    2.0
    """
    _check(mapping, flat, method, probes, steps)
    if channel.beyond_theory is not None:
        raise UserError(f"channel: expected clipping, zeros and noise only, got {channel!r}: {channel.beyond_theory}")
    if decomposition is not None and (isinstance(channel.noise, Mapping) or channel.clip_per != "batch"):
        decomposition = None  # of another matrix
    mapping, channel = _clipped(mapping, channel)
    levels = {name: channel.information_level(name) for name in mapping.names}
    sigma = max(levels.values())
    if len(set(levels.values())) > 1 and all(levels.values()):  # then in units of the noise on each tensor
        mapping, sigma = dataclasses.replace(mapping, scales=levels), 1.0
    view = _View.at(mapping, flat, channel, sigma, seed)
    if not bool(torch.isfinite(view.local.value).all()):
        raise UserError("flat: the gradient at this input has NaN or infinite entries; check model and input")
    if method != "estimate":
        spectrum = _decomposed(mapping, flat, view, decomposition, progress)
        if not isinstance(spectrum, str):
            return _exact(mapping, view, *spectrum)
        if method == "exact":
            raise UserError(f"cramer_rao: not possible exactly: {spectrum}. Use method='estimate'.")
    return _estimate(mapping, view, probes, steps, seed, progress)


def affordable_floor(
    mapping: GradientMap, *, probes: int = PROBES, steps: int = MAX_PRODUCTS
) -> tuple[Method, int] | str:
    """Say how the floor can be computed in a minute or two, with how many steps of an estimate; or why it cannot be."""
    examples = mapping.shape[0]
    effort = effort_of(mapping.victim.model, mapping.inputs.shape, examples).times(mapping.visits)
    if not_unasked(mapping.unknowns, effort) is None:
        return "auto", min(steps, affordable_steps(mapping))
    if (reason := effort.refusal("the floor", probes * USEFUL_STEPS, PRODUCTS_WORK)) is not None:
        return reason
    if affordable_steps(mapping) < _FEWEST_STEPS:
        largest = mapping.entries * examples * affordable_steps(mapping) // _FEWEST_STEPS
        return (
            f"the floor was not computed: an update of {mapping.entries:,} entries from {examples} examples, and it is "
            f"for {largest:,} in all at most; take fewer examples or a smaller model"
        )
    fitting = int(PRODUCTS_WORK / max(1.0, effort.operations * probes))
    return "estimate", min(steps, max(USEFUL_STEPS, affordable_steps(mapping)), fitting)


def _clipped(mapping: GradientMap, channel: Channel) -> tuple[GradientMap, Channel]:
    """Let the map itself clip, and the channel no longer, where each of several examples or local steps is clipped."""
    by_step = channel.clip is not None and channel.clip_per == "step"
    if not (by_step or channel.clips_examples):
        return mapping, channel
    alone = dataclasses.replace(channel, clip_per="batch")
    if not by_step and len(mapping.targets) == 1:
        return mapping, alone
    inner = dataclasses.replace(mapping.victim, channel=Channel(clip=channel.clip, clip_per=channel.clip_per))
    return dataclasses.replace(mapping, victim=inner), dataclasses.replace(alone, clip=None)


def _decomposed(
    mapping: GradientMap, flat: Tensor, view: _View, decomposition: Decomposition | None, progress: Progress | None
) -> tuple[Decomposition, float] | str:
    """Decompose the Jacobian of what is seen; return the share that survives too, or why it cannot be."""
    if view.along is None and view.mask is None and decomposition is not None and decomposition.vectors is not None:
        return decomposition, 1.0
    # Masks need the entries themselves. A clipped gradient needs them for all digits, its Gram matrix does not.
    small = mapping.unknowns <= MAX_SINGULAR_VALUES or not view.projects
    if view.mask is not None or (view.along is not None and small):
        reason = too_large(mapping.unknowns, view.entries)
        if reason is None:
            matrix, surviving = _columns(mapping, flat, view, progress)
            return decompose(matrix, vectors=True), surviving
        if view.mask is not None or not view.projects:
            return reason
    jacobian = make_jacobian(mapping, flat, progress=progress)
    if isinstance(jacobian, str):
        return jacobian
    removed = None if view.along is None else view.factor * view.local.backward(view.along)
    return decompose(jacobian.mul_(view.factor), removed=removed, vectors=True), 1.0


def _columns(mapping: GradientMap, flat: Tensor, view: _View, progress: Progress | None) -> tuple[Tensor, float]:
    """Make the Jacobian of what is seen, one column an entry that is left; and the share of its size that survives."""
    whole = left = 0.0

    def through(rows: Tensor) -> Tensor:
        nonlocal whole, left
        seen = view.seen(rows)
        kept = seen if view.mask is None else seen[:, view.mask]
        whole += float(seen.square().sum())
        left += float(kept.square().sum())
        return kept

    matrix = mapping.jacobian(flat, exact=True, through=through, progress=progress)
    return matrix, left / whole if whole else 1.0


def _exact(mapping: GradientMap, view: _View, spectrum: Decomposition, surviving: float) -> Floor:
    unknowns, rank, sigma = mapping.unknowns, spectrum.rank, view.sigma
    assert spectrum.vectors is not None
    # Zero for directions without a trace: they are counted by the rank, not added up.
    variances = torch.where(spectrum.values > spectrum.tolerance, (sigma / spectrum.values).square(), 0.0)
    total = float(variances.sum())
    squares = spectrum.vectors.square()
    examples = (squares @ variances).reshape(mapping.shape[0], -1).mean(dim=1).sqrt()
    rmse, reason = math.sqrt(total / unknowns), None
    if rank < unknowns:
        rmse, reason = math.inf, f"in {unknowns - rank} of {unknowns} directions the inputs leave no trace"
        lost = squares[:, spectrum.values <= spectrum.tolerance].sum(dim=1).reshape(mapping.shape[0], -1).sum(dim=1)
        # An example that takes part in such a direction, beyond rounding, has an infinite error.
        examples = torch.where(lost > 1e-9, math.inf, examples)
    return Floor(
        rmse=rmse,
        method="exact",
        reason=reason,
        **_common(mapping, view, float(spectrum.values.square().sum()), surviving),
        visible_rmse=math.sqrt(total / rank) if rank else None,
        example_rmse=tuple(examples.tolist()),
        rank=rank,
        smallest=float(spectrum.values[-1]),
        condition=spectrum.condition,
    )


def _estimate(
    mapping: GradientMap, view: _View, probes: int, steps: int, seed: int, progress: Progress | None
) -> Floor:
    unknowns, sigma = mapping.unknowns, view.sigma
    mask = None if view.mask is None else view.mask.to(view.local.value)

    def product(direction: Tensor) -> Tensor:
        change = view.forward(direction)
        return view.backward(change if mask is None else change * mask)

    directions = signs(unknowns, probes, seed).to(view.local.value)
    left = view.entries
    # With too few entries the floor is infinite, and only the loosened one, of one step, is left to compute.
    estimate = inverse_trace(product, directions, steps=steps if left >= unknowns else 1, progress=progress)
    whole = estimate.trace
    if mask is not None:
        # The same directions, so that what is left is never more than there was.
        whole = sum(float(view.forward(direction).square().sum()) for direction in directions) / probes
    facts = _common(mapping, view, estimate.trace, estimate.trace / whole if whole else 1.0)
    floor = partial(Floor, method="estimate", probes=probes, **facts)
    if left < unknowns:
        return floor(rmse=math.inf, reason=f"{left} entries are seen, which cannot show {unknowns} unknowns")
    if math.isinf(estimate.inverse):
        return floor(rmse=math.inf, reason="a direction was found in which the inputs leave no trace")
    if sigma == 0:
        why = "without noise the floor is zero or infinite by the rank, which an estimate does not give"
        return floor(rmse=math.nan, reason=why)
    scale = sigma**2 / unknowns
    low, high = (math.sqrt(max(0.0, scale * end)) for end in estimate.interval)
    rmse = math.sqrt(scale * estimate.inverse)
    error = scale * estimate.standard_error / (2 * rmse)  # by the derivative of the square root
    open_probes = round((1 - estimate.converged) * probes)
    early = f"{open_probes} of {probes} probes stopped after {steps} steps, so that this is lower than the true floor"
    reason = early if open_probes else None
    return floor(rmse=rmse, standard_error=error, interval=(low, high), converged=estimate.converged, reason=reason)


def _common(mapping: GradientMap, view: _View, trace: float, surviving: float) -> dict[str, Any]:
    loosened = view.sigma * math.sqrt(mapping.unknowns / trace) if trace else math.inf
    facts = {"sigma": view.sigma, "gradient_norm": view.norm, "clip_factor": view.factor}
    return {"unknowns": mapping.unknowns, **facts, "surviving": surviving, "loosened": loosened}


def _check(mapping: GradientMap, flat: Tensor, method: str, probes: int, steps: int) -> None:
    problems = []
    if flat.shape != (mapping.unknowns,):
        problems.append(f"flat: expected one row of {mapping.unknowns} numbers, got shape {tuple(flat.shape)}")
    elif not bool(torch.isfinite(flat).all()):
        problems.append("flat: expected finite numbers, got NaN or infinite ones")
    problems += expected("'auto', 'exact' or 'estimate'", lambda word: word in get_args(Method), method=method)
    refuse("cramer_rao", problems + whole(2, probes=probes) + whole(steps=steps))
