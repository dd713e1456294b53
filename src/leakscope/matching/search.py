"""The one loop of every search: ask the optimiser for points, evaluate them, tell it, remember the best."""

import ctypes
import functools
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leakscope.matching.optimisers import Optimiser, Project

#: mallopt's settings: blocks up to 32 MB come from the heap, which keeps 512 MB of free space at its end.
TRIM_THRESHOLD, MMAP_THRESHOLD = (-1, 2**29), (-3, 2**25)
#: By these a user has chosen otherwise.
CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Ask glibc to keep freed memory, unless the user has set it up: mapping fresh pages takes up to half of a step."""
    if not sys.platform.startswith("linux") or any(name in os.environ for name in CHOICES):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  other C libraries number their settings differently, or have none
    except (OSError, AttributeError):
        return False
    return all(library.mallopt(*setting) == 1 for setting in (TRIM_THRESHOLD, MMAP_THRESHOLD))


#: Examples searched or evaluated at a time where none influences another: so many fit into a processor's cache.
AT_ONCE = 32
#: Objectives (rows,), judged values (rows, k), of which the first says which point is best, gradients (rows, n).
Evaluation = tuple[Tensor, Tensor, Tensor]
#: From points (rows, n) and the number of the step.
Evaluate = Callable[[Tensor, int], Evaluation]
#: Told after each step: how many are done, the first judged values there, and the best so far; both (rows,).
Watch = Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True, eq=False)
class SearchResult:
    """Hold one row per start: its point, judged values, whether they stayed finite, the best at three quarters."""

    points: Tensor
    judged: Tensor
    alive: Tensor
    settled: Tensor
    curves: list[Tensor]

    def still_falling(self, row: int, iterations: int, picture: Callable[[Tensor], Tensor] = lambda row: row) -> bool:
        """Check that the objective fell by 1/20 over the second half, and the picture moved in the last quarter."""
        if len(self.curves) < iterations:
            return False  # came to rest, or reached the tolerance
        if iterations < 10:
            return True
        moved = float((picture(self.points[row]) - picture(self.settled[row])).abs().mean())
        curve = torch.stack(self.curves)[:, row].cpu()
        lowest = torch.cummin(torch.nan_to_num(curve, nan=math.inf), 0).values
        middle = float(lowest[len(curve) // 2])
        return moved > 1 / 256 and middle - float(lowest[-1]) > 0.05 * abs(middle)


def search(
    evaluate: Evaluate,
    start: Tensor,
    optimiser: Optimiser,
    *,
    project: Project,
    iterations: int,
    evaluations: int | None = None,
    keep: Literal["best", "last"] = "best",
    tolerance: float = -math.inf,
    patience: int = 0,
    watch: Watch | None = None,
) -> SearchResult:
    """Descend from ``start`` (rows, n); rows do not influence each other.

    ``iterations`` is what the optimiser plans for, ``evaluations`` how many there are. A row is done when its best
    value reaches ``tolerance``, when that fell by less than a twentieth over ``patience`` steps (0: never), when the
    optimiser has nothing more to try, or when a number is not finite and the optimiser does not survive that.
    """
    keep_freed_memory()
    state = optimiser.begin(start, iterations, project)
    best = settled = start.clone()
    best_judged = judged = start.new_full((len(start), 1), math.inf)
    # Nearly every step is finite in all rows: then no mask is made or used.
    every = alive = torch.ones(len(start), dtype=torch.bool, device=start.device)
    curves: list[Tensor] = []
    levels: list[Tensor] = []
    for step in range(iterations if evaluations is None else evaluations):
        if step == 3 * iterations // 4:
            settled = best
        points = state.ask()
        objectives, judged, gradients = evaluate(points, step)
        if step == 0:
            best_judged = torch.full_like(judged, math.inf)
        values, best_values = judged[:, 0], best_judged[:, 0]
        better = values < best_values
        if math.isfinite(sum(float(value.sum()) for value in (objectives, values, gradients))):
            usable = every
        else:
            usable = torch.isfinite(objectives) & torch.isfinite(values) & torch.isfinite(gradients).all(1)
            gradients = torch.where(usable[:, None], gradients, 0.0)
            if not optimiser.survives_non_finite or step == 0:
                alive = alive & usable
        racing = every if usable is every and alive is every else usable & alive
        if racing is not every:
            better = better & racing
        if bool(better.all()):
            best, best_judged = points, judged
        elif bool(better.any()):
            best = torch.where(better[:, None], points, best)
            best_judged = torch.where(better[:, None], judged, best_judged)
        best_values = best_judged[:, 0]
        curves.append(best_values if optimiser.survives_non_finite else values)
        levels.append(best_values)
        state.tell(objectives, gradients, racing)
        if watch is not None:
            watch(step + 1, values, best_values)
        done = state.finished | (best_values <= tolerance)
        if alive is not every:
            done = done | ~alive
        if patience and step >= patience:
            done = done | (best_values > 0.95 * levels[step - patience])
        if bool(done.all()):
            break
    if keep == "last":
        return SearchResult(state.ask(), judged, alive, settled, curves)
    return SearchResult(best, best_judged, alive, settled, curves)
