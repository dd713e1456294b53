"""Share work between attacks: searches, readings of labels, and what is learned of a setting.

Results follow from the settings, the victim, the observed update, the labels and the draws. Where observations carry
the same :class:`SharedWork`, the second attack is handed what the first has found, to the last bit.
"""

import copy
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.contracts.observation import Observation, WorkStore
from leakscope.contracts.spool import tensor_bytes
from leakscope.labels import RecoveredLabels, label_candidates
from leakscope.matching import Match, Matcher, Victim

#: Numbers in all results that are kept (256 MB in float32); the oldest go first.
MOST_NUMBERS = 2**26


@dataclass(frozen=True, eq=False)
class _Result:
    found: Any
    numbers: int
    generator_state: Tensor
    seconds: float


class SharedWork:
    """Keep results of one process and one model by all they depend on; ``recalled_seconds`` were not spent again."""

    def __init__(self) -> None:
        self.recalled_seconds = 0.0
        self._results: OrderedDict[Hashable, _Result] = OrderedDict()

    def recall(self, key: Hashable, generator: torch.Generator, numbers: int, work: Callable[[], Any]) -> Any:
        result = self._results.get(key)
        if result is not None:
            self.recalled_seconds += result.seconds
            generator.set_state(result.generator_state)
            return copy.deepcopy(result.found)
        started = time.perf_counter()
        found = work()
        seconds = time.perf_counter() - started
        self._results[key] = _Result(copy.deepcopy(found), numbers, generator.get_state(), seconds)
        while sum(kept.numbers for kept in self._results.values()) > MOST_NUMBERS:
            self._results.popitem(last=False)
        return found


def shared(
    store: WorkStore | None,
    kind: str,
    parts: Hashable,
    model: nn.Module,
    tables: list[Mapping[str, Tensor]],
    generator: torch.Generator,
    numbers: int,
    work: Callable[[], Any],
) -> Any:
    """Return what ``work`` finds, or found before; it depends on the arguments and draws from ``generator`` alone."""
    key = None if store is None else _key(kind, parts, model, tables, generator)
    return work() if store is None or key is None else store.recall(key, generator, numbers, work)


def run_matcher(
    store: WorkStore | None,
    matcher: Matcher,
    victim: Victim,
    observed: dict[str, Tensor],
    *,
    targets: Tensor | None,
    generator: torch.Generator,
    progress: Any = None,
    **facts: Any,
) -> Match:
    """``matcher.run``, or what an equal search has found where work is shared."""
    tables: list[Mapping[str, Tensor]] = [*victim.tensors, observed, _given(targets=targets)]
    tables += [dict(zip(("mean", "var"), pair, strict=True)) for pair in victim.batchnorm_targets.values()]
    # Objects go by their own equality, that of values for the house's dataclasses: a repr may leave something out.
    parts = matcher, victim.task, victim.channel, victim.reduction, tuple(sorted(facts.items()))
    numbers = facts["count"] * facts["inputs"].size
    facts |= {"targets": targets, "generator": generator, "progress": progress}
    given = (store, "search", parts, victim.model, tables, generator, numbers)
    found: Match = shared(*given, lambda: matcher.run(victim, observed, **facts))
    return found


def read_labels(seen: Observation, generator: torch.Generator) -> list[RecoveredLabels]:
    """``label_candidates``, or what was read of an equal observation where work is shared."""
    message = seen.message
    parts = (
        *(seen.inputs, seen.num_classes, seen.task, seen.knowledge, seen.num_examples, seen.training, seen.channel),
        *(seen.reduction, seen.batchnorm, seen.output_shape, message.kind),
    )
    given = _given(labels=seen.labels, label_counts=seen.label_counts)
    tables = [seen.model.state_dict(), message.update, message.batchnorm_statistics or {}, given]

    facts = ("labels", parts, seen.model, tables, generator, seen.num_examples or 1)
    found: list[RecoveredLabels] = shared(seen.shared, *facts, lambda: label_candidates(seen, generator))
    return found


def _key(
    kind: str, parts: Hashable, model: nn.Module, tables: list[Mapping[str, Tensor]], generator: torch.Generator
) -> Hashable:
    modes = tuple((name, module.training) for name, module in model.named_modules())
    key = (kind, parts, repr(model), modes, _digest([*tables, {"draws": generator.get_state()}]))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if value is not None}


def _digest(tables: Iterable[Mapping[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for table in tables:
        digest.update(b"\ntable")
        for name, value in table.items():
            digest.update(f"\n{name} {value.dtype} {tuple(value.shape)} {value.device} ".encode())
            digest.update(tensor_bytes(value))
    return digest.hexdigest()
