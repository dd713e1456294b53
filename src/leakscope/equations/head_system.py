"""The equations of a linear head for a batch, compressed to what they determine; float64.

With D (n, C) the derivatives of the loss at each example's logits and F (n, d) the head's inputs, the weight gradient
is G = D'F and the bias gradient D'1. G = U S W has rank n, so D = A U' and F = A^-T S W for some square A: n^2
unknowns, and each example's own row of D must be softmax minus one-hot of the logits that its own row of F gives.

Of examples with one label in an untrained network these equations hardly tell one rotation of A from another. That no
feature behind a ReLU is negative does: a third of them are zero, in different places for each example.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable

#: Residuals up to this are those of rounding; above the other, the update is not the gradient of such a batch.
EXACT, REFUSED = 1e-5, 0.1
#: Expected relative errors of features: up to the first they count as exact, above the second they are left out.
EXACT_FEATURES, USELESS_FEATURES = 100 * EXACT, 3 * REFUSED
#: Features behind a ReLU are not negative; a larger share of negative ones (L1) shows that they are wrong.
NEGATIVE_SHARE = 10 * EXACT
#: The smallest singular value of a gradient that still carries an example: relative to the largest, and to noise.
LEAST_RANK, LEAST_SIGNAL = 1e-7, 3.0
#: Starts for one choice of labels, choices of unknown ones, and starts for all of these together.
STARTS = 12
READINGS = 2 * STARTS
STARTS_IN_ALL = 3 * READINGS
#: Multiplications of a whole search: about a minute.
WORK = 4e11
#: Spread of the logits about their mean at which searches start.
SPREADS = (0.1, 1.0, 2.0, 3.0)
#: Steps of a search, and of each of the refinements with the weights that noise gives.
STEPS = 60

#: What unknowns leave unexplained, and a function for the derivative of that.
Equations = Callable[[Tensor], tuple[Tensor, Callable[[], Tensor]]]


@dataclass(frozen=True, eq=False)
class HeadSolution:
    """What the head's gradient says of each of n examples, in the order of ``labels``.

    ``output_gradients`` (n, C) add up to the bias gradient, so that the 1/n of a mean is inside. ``features`` (n, d):
    the head's inputs, None where only the output gradients follow. ``labels`` and ``losses`` (n,): None for a loss that
    is not cross-entropy. ``residual``, the certificate: the largest relative gap between what was observed and what the
    solution gives. ``error``: the relative error of the features to be expected from rounding or noise. ``exact``: the
    residual is that of rounding, and the error small. ``scale``: what the gradient was multiplied by.
    """

    output_gradients: Tensor
    features: Tensor | None
    labels: Tensor | None
    losses: Tensor | None
    residual: float
    error: float
    exact: bool
    scale: float = 1.0
    notes: tuple[str, ...] = ()


def exact_residual(signal: float, examples: int, rounding: float) -> float:
    """Return the residual that rounding leaves of a ``signal``, the norm of softmax minus one-hot of all examples.

    Softmax minus one is rounded to the last digits of one, however small it is.

    >>> exact_residual(1.0, 1, 3e-8), exact_residual(1e-3, 1, 3e-8)
    (1e-05, 0.0006)
    """
    return max(EXACT, 20 * rounding * math.sqrt(examples) / max(signal, 1e-300))


@dataclass(frozen=True, eq=False)
class HeadSystem:
    """The equations for one choice of labels; the unknowns are A, and with an unknown scale the log of a factor.

    ``targets`` (n, C): one-hot or soft labels. ``amplitude``: the factor before softmax minus targets, 1/n for a mean.
    """

    problem: "HeadProblem"
    targets: Tensor
    amplitude: float

    @property
    def free_scale(self) -> bool:
        return self.problem.scale is None

    def matrix(self, unknowns: Tensor) -> Tensor:
        n = self.problem.examples
        return unknowns[: n * n].reshape(n, n)

    def factor(self, unknowns: Tensor) -> float:
        return self.amplitude * (math.exp(float(unknowns[-1].clamp(-50, 50))) if self.free_scale else 1.0)

    def features(self, unknowns: Tensor) -> Tensor:
        return (_inverse(self.matrix(unknowns)) * self.problem.sizes) @ self.problem.right

    def logits(self, unknowns: Tensor) -> Tensor:
        return self.features(unknowns) @ self.problem.weight.T + self.problem.bias

    def output_gradients(self, unknowns: Tensor) -> Tensor:
        return self.matrix(unknowns) @ self.problem.left.T

    def start(self, mean: Tensor, spread: float, generator: torch.Generator) -> Tensor:
        """Return unknowns of random logits whose mean softmax is this one."""
        logits = spread * torch.randn(self.targets.shape, generator=generator, dtype=torch.float64)
        for _ in range(5):
            logits = logits + torch.log(mean) - torch.log(torch.softmax(logits, 1).mean(0))
        flat = (self.amplitude * (torch.softmax(logits, 1) - self.targets) @ self.problem.left).flatten()
        return torch.cat([flat, flat.new_zeros(1)]) if self.free_scale else flat

    def equations(self, unknowns: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return the equations of the output gradients, then of their sum, both divided by the amplitude."""
        given, matrix, amplitude = self.problem, self.matrix(unknowns), self.factor(unknowns)
        n, inverse = len(matrix), _inverse(matrix)
        along = (given.sizes[:, None] * given.right) @ given.weight.T
        softmax = torch.softmax(inverse @ along + given.bias, 1)
        shown = matrix @ given.left.T / amplitude
        rows = [(shown - softmax + self.targets).flatten()]
        if given.inner_sums is not None:
            rows.append((matrix.sum(0) - given.inner_sums) / amplitude)

        def derivative() -> Tensor:
            unit = torch.eye(n, dtype=matrix.dtype)
            slope = softmax[:, :, None] * (along.T - (softmax @ along.T)[:, None, :])
            moved = (slope @ inverse.T)[:, :, :, None] * inverse[:, None, None, :]
            blocks = [(moved + unit[:, None, :, None] * given.left[None, :, None, :] / amplitude).reshape(-1, n * n)]
            if given.inner_sums is not None:
                blocks.append((unit / amplitude)[:, None, :].expand(n, n, n).reshape(n, n * n))
            columns = torch.cat(blocks)
            if not self.free_scale:
                return columns
            return torch.cat([columns, -torch.cat([shown.flatten(), *rows[1:]])[:, None]], 1)

        return torch.cat(rows), derivative

    def signed(self, each: Tensor, feature: Tensor | None) -> Equations:
        """Weigh each example's equations with ``each`` (n,), and its negative features with ``feature`` (n,).

        Negative features are many equations of few unknowns: only the triangle of their orthogonal factors is kept.
        """
        n, classes = self.targets.shape

        def weighted(unknowns: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
            rest, derivative = self.equations(unknowns)
            weights = torch.cat([each.repeat_interleave(classes), each.max().expand(len(rest) - n * classes)])
            if feature is None:
                return rest * weights, lambda: derivative() * weights[:, None]
            features = self.features(unknowns)
            negative = (features < 0) * feature[:, None]
            columns = torch.cat([-features.T.expand(n, -1, -1), features[:, :, None]], 2) * negative[:, :, None]
            if not bool(torch.isfinite(columns).all()):
                return rest * math.nan, derivative
            triangles = torch.linalg.qr(columns, mode="r").R

            def both() -> Tensor:
                inverse = _inverse(self.matrix(unknowns))
                signs = (triangles[:, :, :n, None] * inverse[:, None, None, :]).reshape(-1, n * n)
                if self.free_scale:
                    signs = torch.cat([signs, signs.new_zeros(len(signs), 1)], 1)
                return torch.cat([derivative() * weights[:, None], signs])

            return torch.cat([rest * weights, triangles[:, :, n].flatten()]), both

        return weighted

    def deviations(self, unknowns: Tensor) -> tuple[Tensor, Tensor]:
        """Return the standard deviations (n,) that noise and rounding give an equation and a feature."""
        given, matrix = self.problem, self.matrix(unknowns)
        feature = given.noise * _inverse(matrix).norm(dim=1)
        softmax = torch.softmax(self.logits(unknowns), 1)
        # The gradient of the softmax by the features: p_k (V_k - sum_l p_l V_l).
        slopes = softmax * (given.weight[None] - (softmax @ given.weight)[:, None, :]).norm(dim=2)
        through = feature * slopes.square().mean(1).sqrt()
        direct = given.noise * (matrix / given.sizes).norm(dim=1) / self.factor(unknowns)
        return torch.sqrt(given.rounding**2 + direct**2 + through**2), feature

    def expected_error(self, unknowns: Tensor) -> float:
        """Return the largest relative error of an example's features that noise and rounding let expect."""
        n = self.problem.examples
        each, feature = self.deviations(unknowns)
        columns = self.signed(1 / each, 1 / feature if self.problem.nonnegative else None)(unknowns)[1]()
        norms = columns.norm(dim=0).clamp_min(1e-300)
        triangle = torch.linalg.qr(columns / norms, mode="r").R
        inverse, features = _inverse(self.matrix(unknowns)), self.features(unknowns)
        # dF_i = - sum over p, q of A^-T_iq dA_pq F_p
        root = torch.linalg.qr(features.T, mode="r").R.T
        moved = (root[None, :, None, :] * inverse[:, None, :, None]).reshape(n, n * n, -1)
        if self.free_scale:
            moved = torch.cat([moved, moved.new_zeros(n, 1, moved.shape[2])], 1)
        spread = torch.linalg.solve_triangular(triangle.T, moved / norms[:, None], upper=False)
        own = feature.square() * features.shape[1]
        errors = torch.sqrt(spread.square().sum((1, 2)) + own) / features.norm(dim=1)
        return float(errors.max().nan_to_num(math.inf, math.inf))


class HeadProblem:
    """The observed gradients; the same for every choice of labels.

    ``left`` U (C, n), ``sizes`` S (n,), ``right`` W (n, d); ``inner_sums``: U' times the bias gradient. ``noise``:
    standard deviation of the noise on an entry of G; ``rounding``: that of softmax minus one-hot.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        observed: Tensor,
        sums: Tensor | None,
        *,
        examples: int,
        nonnegative: bool,
        unit: float,
        scale: float | None,
    ) -> None:
        self.rounding = torch.finfo(observed.dtype).eps / 4
        self.weight, self.observed = weight, observed = _wide(weight), _wide(observed)
        self.bias = torch.zeros(len(weight), dtype=torch.float64) if bias is None else _wide(bias)
        self.sums = None if sums is None else _wide(sums)
        self.examples, self.nonnegative, self.unit, self.scale = examples, nonnegative, unit, scale
        self.amplitude = unit * (1.0 if scale is None else scale)
        left, sizes, right = torch.linalg.svd(observed, full_matrices=False)
        self.left, self.sizes, self.right = left[:, :examples], sizes[:examples], right[:examples]
        self.inner_sums = None if self.sums is None else self.left.T @ self.sums
        spare = sizes[examples:]
        entries = len(spare) * observed.shape[1]
        floor = self.rounding * float(observed.square().mean().sqrt())
        # What exceeds the rank is noise: of a defence, or of rounding.
        self.noise = max(floor, float(spare.square().sum() / entries) ** 0.5) if entries else floor

    @property
    def starts(self) -> int:
        n = self.examples  # a step factorises a matrix with n^2 columns
        return min(STARTS_IN_ALL, int(WORK / (STEPS * n**4 * (n * len(self.weight) + n * (n + 1)))))

    def check_solvable(self) -> None:
        sizes, n = self.sizes, self.examples
        if not self.starts:
            raise NotApplicable(f"{n} examples of {len(self.weight)} classes: solving the head would take minutes")
        last = float(sizes[-1] / sizes[0]) if len(sizes) == n else 0.0
        noise = self.noise * math.sqrt(self.observed.shape[1]) / float(sizes[0])
        if last < max(LEAST_RANK, LEAST_SIGNAL * noise):
            raise NotApplicable(
                f"the head's gradient does not show {n} examples: its singular value number {n} is {last:.1e} of the "
                f"largest, and its noise {noise:.1e}. Two examples are alike, one is too sure to leave a trace, or the "
                "noise is too strong"
            )

    def targets(self, labels: Tensor) -> Tensor:
        soft = labels.is_floating_point()
        return (labels if soft else torch.nn.functional.one_hot(labels.long(), len(self.weight))).double()

    def mean_softmax(self, targets: Tensor, amplitude: float) -> Tensor | None:
        return None if self.sums is None else self.sums / (amplitude * self.examples) + targets.mean(0)

    def possible(self, labels: Tensor) -> bool:
        """Return whether the mean softmax that these labels call for is one."""
        if self.scale is None:
            return True
        mean = self.mean_softmax(self.targets(labels), self.amplitude)
        noise = self.noise * math.sqrt(self.observed.numel()) / float(self.observed.norm())
        return mean is None or bool((mean > -1e-5 - 5 * noise).all())

    def system(self, targets: Tensor, number: int) -> HeadSystem:
        """Return the equations; an unknown amplitude starts somewhat above the least that the targets allow."""
        classes = len(self.weight)
        if self.scale is not None:
            return HeadSystem(self, targets, self.amplitude)
        if self.sums is None:
            least = float(self.sizes[0]) / math.sqrt(self.examples * self.observed.shape[1])  # a guess by its size
        else:  # no class may have a negative mean softmax
            counts = targets.sum(0)
            least = float((-self.sums / counts.clamp_min(1e-9))[counts > 0].max().clamp_min(1e-300))
        return HeadSystem(self, targets, least * classes / (classes - 1) * 1.5 ** (number % 4))

    def solution(self, system: HeadSystem, unknowns: Tensor, targets: Tensor) -> HeadSolution:
        """Return what these unknowns say, with soft labels; features are left out where they cannot be right."""
        amplitude, logits = system.factor(unknowns), system.logits(unknowns)
        delta, features = system.output_gradients(unknowns), system.features(unknowns)
        signal = torch.softmax(logits, 1) - targets
        size = signal.norm()
        explained = (delta.T @ features - self.observed).norm() / self.observed.norm()
        gaps = [(delta / amplitude - signal).norm() / size, explained]
        if self.sums is not None:
            gaps.append((delta.sum(0) - self.sums).norm() / (amplitude * size))
        residual = max(float(gap) for gap in gaps)
        error = system.expected_error(unknowns)
        exact = residual <= exact_residual(float(size), len(delta), self.rounding) and error <= EXACT_FEATURES
        doubt = ""
        negative = float(features.clamp(max=0).abs().sum() / features.abs().sum())
        if self.nonnegative and exact and negative > NEGATIVE_SHARE:
            doubt = f"{100 * negative:.2g} % of the features are negative, which a ReLU cannot give"
        elif error > USELESS_FEATURES:
            doubt = f"the features would be off by {100 * error:.0f} %, so badly are the examples told apart"
        return HeadSolution(
            output_gradients=delta,
            features=None if doubt else features,
            labels=targets,
            losses=-(targets * torch.log_softmax(logits, 1)).sum(1),
            residual=residual,
            error=error,
            exact=exact,
            scale=amplitude / self.unit,
            notes=(doubt,) if doubt else (),
        )


def least_squares(equations: Equations, unknowns: Tensor, steps: int) -> tuple[Tensor, float]:
    """Descend by Levenberg–Marquardt with columns of norm one; return where it ended and the sum of squares there.

    Each step is solved by orthogonal factors, not by normal equations, which would square a condition of 1e8.

    >>> across = torch.tensor([1.0, -1.0], dtype=torch.float64)
    >>> def circle(x):
    ...     return torch.stack([x @ x - 4, x @ across]), lambda: torch.stack([2 * x, across])
    >>> place, value = least_squares(circle, torch.tensor([3.0, 1.0], dtype=torch.float64), 20)
    >>> [round(float(v), 6) for v in place]
    [1.414214, 1.414214]
    """
    rest, derivative = equations(unknowns)
    value, damping = float(rest @ rest), 1e-2
    for _ in range(steps):
        columns = derivative()
        if not math.isfinite(value) or not bool(torch.isfinite(columns).all()):
            return unknowns, math.inf
        norms = columns.norm(dim=0).clamp_min(1e-12 * float(columns.norm()) + 1e-300)
        # The triangle with the right-hand side beside it; the orthogonal factor itself is not needed.
        triangle, taken = torch.linalg.qr(torch.cat([columns / norms, rest[:, None]], 1), mode="r").R, False
        for _ in range(12):
            ridge = math.sqrt(damping) * torch.eye(len(norms), len(norms) + 1, dtype=rest.dtype)
            damped = torch.linalg.qr(torch.cat([triangle, ridge]), mode="r").R
            step = torch.linalg.solve_triangular(damped[: len(norms), :-1], damped[: len(norms), -1:], upper=True)[:, 0]
            trial = unknowns - step / norms
            further, slope = equations(trial)
            reached = float(further @ further)
            if reached < value:
                taken = True
                break
            damping *= 5
        if not taken:
            break
        gain = 1 - reached / value
        unknowns, rest, derivative, value, damping = trial, further, slope, reached, max(damping / 6, 1e-20)
        if gain < 1e-9:
            break
    return unknowns, value


def _wide(value: Tensor) -> Tensor:
    if not bool(torch.isfinite(value).all()):
        raise NotApplicable("the head or its gradient holds NaN or infinite entries")
    return value.detach().double().cpu()


def _inverse(matrix: Tensor) -> Tensor:
    """Return the transpose of the inverse; not finite where there is none."""
    inverse: Tensor = torch.linalg.inv_ex(matrix).inverse.T
    return inverse
