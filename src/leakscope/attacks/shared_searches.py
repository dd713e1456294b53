"""Searches that several attacks have in common, run once.

``head-first`` matches the whole update just as ``inverting-gradients`` does where the head tells nothing, and as its
rival; a planted example is often the undefended update once more. What comes of a search follows from its settings, the
victim, the observed update, the labels and the draws, so that equal ones need not be run twice: with
``SharedSearches().in_use()`` around several attacks, the second is handed what the first has found, to the last bit.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leakscope.matching import Match, Matcher, Victim

#: Numbers in the inputs of all results that are kept (32 MB in float32); the oldest go first.
MOST_NUMBERS = 2**23


@dataclass(frozen=True, eq=False)
class _Result:
    match: Match
    generator_state: Tensor
    seconds: float


class SharedSearches:
    """Results of searches by everything they depend on; ``recalled_seconds`` is what searches took that were not run.

    It belongs to one process and one model: code is no part of the key, only the structure and every tensor.
    """

    def __init__(self) -> None:
        self.recalled_seconds = 0.0
        self._results: OrderedDict[Hashable, _Result] = OrderedDict()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Searches in this block are shared."""
        token = _IN_USE.set(self)
        try:
            yield
        finally:
            _IN_USE.reset(token)

    def run(self, matcher: Matcher, victim: Victim, observed: dict[str, Tensor], **problem: Any) -> Match:
        key = _key(matcher, victim, observed, **problem)
        if key is None:
            return matcher.run(victim, observed, **problem)
        generator: torch.Generator = problem["generator"]
        result = self._results.get(key)
        if result is None:
            started = time.perf_counter()
            match = matcher.run(victim, observed, **problem)
            result = _Result(copy.deepcopy(match), generator.get_state(), time.perf_counter() - started)
            self._keep(key, result)
            return match
        self.recalled_seconds += result.seconds
        generator.set_state(result.generator_state)
        return copy.deepcopy(result.match)

    def _keep(self, key: Hashable, result: _Result) -> None:
        self._results[key] = result
        while sum(kept.match.inputs.numel() for kept in self._results.values()) > MOST_NUMBERS:
            self._results.popitem(last=False)


_IN_USE: ContextVar[SharedSearches | None] = ContextVar("shared_searches", default=None)


def run_matcher(matcher: Matcher, victim: Victim, observed: dict[str, Tensor], **problem: Any) -> Match:
    """``matcher.run``, or what an equal search has found where searches are shared."""
    shared = _IN_USE.get()
    run = matcher.run if shared is None else lambda *args, **rest: shared.run(matcher, *args, **rest)
    return run(victim, observed, **problem)


def _key(
    matcher: Matcher,
    victim: Victim,
    observed: Mapping[str, Tensor],
    *,
    targets: Tensor | None,
    generator: torch.Generator,
    progress: Any = None,
    **facts: Any,
) -> Hashable:
    """All that the result depends on; None where some of it cannot be compared."""
    tables: list[Mapping[str, Tensor]] = [*victim.tensors, observed]
    tables += [dict(zip(("mean", "var"), pair, strict=True)) for pair in victim.batchnorm_targets.values()]
    given = {} if targets is None else {"targets": targets}
    # Objects go by their own equality, that of values for the house's dataclasses: a repr may leave something out.
    parts = matcher, victim.task, victim.channel, victim.reduction, tuple(sorted(facts.items()))
    modes = tuple((name, module.training) for name, module in victim.model.named_modules())
    digest = _digest([*tables, given, {"draws": generator.get_state()}])
    key = (parts, repr(victim.model), modes, digest)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _digest(tables: Iterable[Mapping[str, Tensor]]) -> str:
    """sha256 of named tensors, their types and shapes included."""
    digest = hashlib.sha256()
    for table in tables:
        digest.update(b"\ntable")
        for name, value in table.items():
            digest.update(f"\n{name} {value.dtype} {tuple(value.shape)} {value.device} ".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
