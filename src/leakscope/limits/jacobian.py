"""The rank of the Jacobian of the gradient with respect to the inputs, and the trace of the inverse of a large matrix.

At a generic point, full rank means that the inputs are determined locally (up to the order of the examples). Trace:
Hutchinson, "A Stochastic Estimator of the Trace of the Influence Matrix", 1990: z' A^-1 z for a random vector z of
signs has the trace of A^-1 as its mean. Conjugate gradients on A y = z give it: after k steps from zero it is the sum
of (step length) x (squared residual), which is Gauss quadrature (Golub and Meurant, "Matrices, Moments and Quadrature",
1994) and so grows with every step and never beyond z' A^-1 z.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.special import stdtrit
from torch import Tensor, nn

from leakscope.contracts.inputs import ValueRange
from leakscope.contracts.observation import Observation
from leakscope.equations.decomposition import Decomposition, JacobianRank, decompose
from leakscope.limits.effort import COLUMNS_WORK, Effort, effort_of
from leakscope.matching.gradient_map import GradientMap, Progress

#: Above these the Jacobian is never made: unknowns, and entries of the matrix (two gigabytes in float64).
MAX_UNKNOWNS, MAX_ENTRIES = 5000, 2**28
#: Up to so many unknowns the Jacobian of a small model is made unasked: above, it can take minutes.
QUICK_UNKNOWNS = 1024


def too_large(unknowns: int, columns: int) -> str | None:
    """Say why a Jacobian of this size is not made; None where it is.

    >>> too_large(6000, 10)
    '6000 unknowns; the Jacobian is made up to 5000'
    """
    if unknowns > MAX_UNKNOWNS:
        return f"{unknowns} unknowns; the Jacobian is made up to {MAX_UNKNOWNS}"
    if unknowns * columns > MAX_ENTRIES:
        return f"the Jacobian has {unknowns} x {columns} entries; it is made up to {MAX_ENTRIES} in all"
    return None


def not_unasked(unknowns: int, effort: Effort) -> str | None:
    """Say why the Jacobian of a model is not made unless asked for; None where it is."""
    if unknowns > QUICK_UNKNOWNS:
        return f"{unknowns} unknowns: above {QUICK_UNKNOWNS} it is computed with --exact only"
    return effort.refusal("the Jacobian", unknowns, COLUMNS_WORK)


def make_jacobian(mapping: GradientMap, flat: Tensor, *, progress: Progress | None = None) -> Tensor | str:
    """Make the Jacobian, with compressed columns where the inputs of linear layers are independent, or say why not."""
    # The count first: the number of columns needs a pass through the model.
    reason = too_large(mapping.unknowns, 1) or too_large(mapping.unknowns, mapping.columns(flat))
    if reason is not None:
        return reason
    try:
        matrix = mapping.jacobian(flat, progress=progress)
        draws = torch.Generator().manual_seed(0)
        direction = torch.randn(len(flat), generator=draws, dtype=torch.float64).to(flat)
        whole, ours = float(mapping.linearise(flat).forward(direction).norm()), float((direction @ matrix).norm())
        # Where the inputs of a linear layer are dependent, compression loses something: then each entry gets a column.
        if not math.isclose(whole, ours, rel_tol=1e3 * math.sqrt(torch.finfo(flat.dtype).eps)):
            if (reason := too_large(mapping.unknowns, mapping.entries)) is not None:
                return reason
            matrix = mapping.jacobian(flat, exact=True, progress=progress)
    except RuntimeError as error:  # an operation without a forward derivative, or one that vmap does not know
        return f"the model cannot be differentiated twice in forward mode: {str(error).strip().splitlines()[0]}"
    if not bool(torch.isfinite(matrix).all()):
        return "the Jacobian has NaN or infinite entries at this input"
    return matrix


def gradient_map_at(
    model: nn.Module,
    input_shape: tuple[int, ...],
    batch: int,
    num_classes: int,
    *,
    value_range: ValueRange | None = None,
    seed: int = 0,
    inputs: Tensor | None = None,
    labels: Tensor | None = None,
) -> tuple[GradientMap, Tensor]:
    """Return a model's map in float64 and a batch: ``inputs`` with ``labels``, or a random one in the box ([0, 1])."""
    update = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
    # The observation copies the model, so nothing below can reach the caller's.
    box = value_range or ValueRange()
    observation = Observation.from_update(
        model, update, input_shape=input_shape, num_classes=num_classes, num_examples=batch, value_range=box
    ).to(device="cpu", dtype=torch.float64)
    if labels is None:
        labels = torch.arange(batch) % max(2, num_classes)  # one output is the logit of two classes
    mapping = GradientMap.of(observation, labels)
    if inputs is not None:
        return mapping, mapping.flat(inputs.to(device="cpu", dtype=torch.float64))
    generator = torch.Generator().manual_seed(seed)
    return mapping, torch.rand((batch, *input_shape), generator=generator, dtype=torch.float64).flatten()


def jacobian_rank(
    model: nn.Module,
    input_shape: tuple[int, ...],
    batch: int,
    num_classes: int,
    *,
    value_range: ValueRange | None = None,
    seed: int = 0,
    exact: bool = False,
    progress: Progress | None = None,
) -> JacobianRank:
    """Compute the rank at a random batch in the box ([0, 1]) with labels 0, 1, ...; ``exact`` for many unknowns too.

    >>> jacobian_rank(nn.Linear(2, 3), (2,), batch=1, num_classes=3).rank
    2
    """
    mapping, flat = gradient_map_at(model, input_shape, batch, num_classes, value_range=value_range, seed=seed)
    spectrum = decompose_at(mapping, flat, exact=exact, progress=progress)
    return JacobianRank(mapping.unknowns, reason=spectrum) if isinstance(spectrum, str) else spectrum.summary()


def decompose_at(
    mapping: GradientMap, flat: Tensor, *, exact: bool = False, vectors: bool = False, progress: Progress | None = None
) -> Decomposition | str:
    """Compute the singular values of the Jacobian at ``flat``, or say why not."""
    if not exact:
        reason = not_unasked(mapping.unknowns, effort_of(mapping.victim.model, mapping.inputs.shape, mapping.shape[0]))
        if reason is not None:
            return reason
    matrix = make_jacobian(mapping, flat, progress=progress)
    return matrix if isinstance(matrix, str) else decompose(matrix, vectors=vectors)


#: A probe has settled when its last quarter of steps, ten at least, added less than this share.
_SETTLED = 1e-3
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class InverseTrace:
    """``inverse`` is the mean of the probes, infinite where one met a direction that the matrix takes to zero.

    ``interval`` is Student's at 95 %, ``converged`` the share of probes that had settled, ``trace`` the matrix's own.
    """

    inverse: float
    standard_error: float
    interval: tuple[float, float]
    trace: float
    converged: float


def signs(unknowns: int, probes: int, seed: int) -> Tensor:
    """Draw vectors of +1 and -1 in rows, in float64.

    >>> signs(4, 2, seed=0).abs().sum().item()
    8.0
    """
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randint(2, (probes, unknowns), generator=generator).double() - 1


def inverse_trace(
    product: Callable[[Tensor], Tensor], directions: Tensor, *, steps: int, progress: Progress | None = None
) -> InverseTrace:
    """Estimate the trace of a matrix's inverse from ``steps`` products at most for each of two or more ``directions``.

    >>> result = inverse_trace(lambda v: 4 * v, signs(6, 3, seed=0), steps=10)
    >>> result.inverse, result.standard_error, result.trace, result.converged
    (1.5, 0.0, 24.0, 1.0)
    """
    count = len(directions)

    def probe(number: int) -> tuple[float, float, bool]:
        def tell(step: int) -> None:
            if progress is not None:
                progress(number * steps + step, count * steps)

        return _quadratic_form(product, directions[number], steps, tell)

    values, traces, settled = zip(*map(probe, range(count)), strict=True)
    inverses = torch.tensor(values, dtype=torch.float64)
    mean = float(inverses.mean())
    error = float(inverses.std()) / math.sqrt(count) if math.isfinite(mean) else math.inf
    reach = float(stdtrit(count - 1, (1 + _CONFIDENCE) / 2)) * error
    interval = (mean - reach if math.isfinite(mean) else mean, mean + reach)
    return InverseTrace(mean, error, interval, sum(traces) / count, sum(settled) / count)


def _quadratic_form(
    product: Callable[[Tensor], Tensor], start: Tensor, steps: int, tell: Callable[[int], None]
) -> tuple[float, float, bool]:
    """Return start' A^-1 start from below, start' A start, and whether the former had settled."""
    left, direction, sums = start, start, [0.0]
    size = trace = float(start @ start)
    largest = 0.0  # stretch of a direction so far: what is tiny beside it is rounding
    for step in range(1, steps + 1):
        image = product(direction)
        curvature, length = float(direction @ image), float(direction @ direction)
        if step == 1:
            trace = curvature
        largest = max(largest, curvature / length)
        if curvature <= len(start) * torch.finfo(start.dtype).eps * largest * length:
            return math.inf, trace, True
        stride = size / curvature
        sums.append(sums[-1] + stride * size)
        left = left - stride * image
        rest = float(left @ left)
        tell(step)
        back = max(10, step // 4)
        if rest == 0 or (step > back and sums[-1] - sums[-1 - back] <= _SETTLED * sums[-1]):
            tell(steps)
            return sums[-1], trace, True
        direction = left + (rest / size) * direction
        size = rest
    return sums[-1], trace, False
