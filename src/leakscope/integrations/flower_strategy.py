"""Wrap a Flower strategy: see each reply before averaging, and change nothing that is averaged.

The wrapped strategy gets the same messages in the same order, and its own ``start`` runs. The server has no truth: what
the wrapper finds is how much of a client's update an attack explains, and no PSNR.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leakscope.audit.assess import Assessment
from leakscope.capture.flower import Capture, told_examples, weights_in
from leakscope.capture.recordings import Origin, save_recording
from leakscope.contracts.errors import UserError
from leakscope.integrations import load_library
from leakscope.integrations.flower_mod import Inline, library, worst_of_clients
from leakscope.integrations.leakage import measure

_flwr = load_library("flwr.app", "flower")
_strategies = load_library("flwr.serverapp.strategy", "flower")

INNER = (
    "the wrapper was not started itself: if another strategy stands around it, what was recorded may have been clipped "
    "or altered by that one before; put the wrapper outermost and call its start"
)


class AuditedStrategy(_strategies.Strategy):  # type: ignore[name-defined]
    """Record each client's reply as the server received it; attack at once where ``inline`` says so.

    It belongs outermost: inside another wrapper (Flower's server-side differential privacy is one) it would see what
    that has altered. It says so if it was not started itself.
    """

    def __init__(self, strategy: Any, capture: Capture, *, inline: Inline | None = None) -> None:
        if not isinstance(strategy, _strategies.Strategy):
            raise UserError(
                f"strategy: expected one of flwr.serverapp.strategy, got {type(strategy).__name__} of "
                f"{type(strategy).__module__}"
            )
        self.strategy, self.capture, self.inline = strategy, capture, inline
        self._configure, self._aggregate = strategy.configure_train, strategy.aggregate_train
        self._asked: dict[int, Any] = {}
        self._outermost = False

    def start(self, *args: Any, **options: Any) -> Any:
        self._outermost = True
        with _in_place(self.strategy, configure_train=self.configure_train, aggregate_train=self.aggregate_train):
            return self.strategy.start(*args, **options)

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
        messages = list(self._configure(server_round, arrays, config, grid))
        self._asked = {message.metadata.dst_node_id: message.content for message in messages}
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
        """Record the replies, hand all of them on unchanged, add findings to the aggregated metrics."""
        received = list(replies)
        found = self._record(server_round, received)
        told = worst_of_clients([reply.content for reply in received if reply.has_content()])
        arrays, metrics = self._aggregate(server_round, received)
        if self.inline is not None and self.inline.send:
            told |= summary_of(found)
        if told:
            metrics = _flwr.MetricRecord({**({} if metrics is None else metrics), **told})
        return arrays, metrics

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
        result: Iterable[Any] = self.strategy.configure_evaluate(server_round, arrays, config, grid)
        return result

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> Any:
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.strategy.summary()

    def __getattr__(self, name: str) -> Any:
        if name == "strategy":  # not set yet: copying and unpickling ask before
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def _record(self, server_round: int, replies: list[Any]) -> list[Assessment]:
        capture, inline = self.capture, self.inline
        attacked = inline is not None and inline.in_round(server_round)
        if not capture.records(server_round) and not attacked:
            return []
        if not self._outermost:
            warnings.warn(INNER, stacklevel=3)
        answers = [reply for reply in replies if reply.has_content() and reply.metadata.src_node_id in self._asked]
        notes = () if self._outermost else (INNER,)
        return record_replies(
            *(capture, inline, server_round),
            [
                Reply(
                    client=str(reply.metadata.src_node_id),
                    run=str(reply.metadata.run_id),
                    before=weights_in(self._asked[reply.metadata.src_node_id], capture.arrays, "sent out"),
                    after=weights_in(reply.content, capture.arrays, "received"),
                    examples=told_examples(reply.content),
                    notes=notes,
                )
                for reply in answers
            ],
        )


@dataclass(frozen=True, eq=False)
class Reply:
    """Hold one client's answer as the server has it: what it was sent, what it sent, how many examples it tells."""

    client: str
    run: str
    before: dict[str, Any]
    after: dict[str, Any]
    examples: int | None
    notes: tuple[str, ...] = ()


def record_replies(capture: Capture, inline: Inline | None, number: int, replies: list[Reply]) -> list[Assessment]:
    found = []
    # By client, so that which ones are attacked does not depend on who answered first.
    for place, reply in enumerate(sorted(replies, key=lambda reply: reply.client)):
        observation = capture.observation(reply.before, reply.after, reply.examples)
        facts: dict[str, Any] = {"client": reply.client, "run": reply.run, "notes": reply.notes}
        origin = Origin(place="server", number=number, library=library(), **facts)
        if capture.records(number):
            save_recording(Path(capture.folder), observation, origin)
        if inline is not None and inline.in_round(number) and place % inline.every_client == 0:
            found.append(measure(observation, origin, inline.attack, controls=inline.controls, seed=inline.seed))
    return found


def summary_of(found: list[Assessment]) -> dict[str, float]:
    """Return as metrics the client whose update was explained best, and counts over all clients."""
    numbers: dict[str, float] = {
        "leakscope.server.audited": float(sum(one.reconstruction is not None for one in found)),
        "leakscope.server.certified": float(sum(one.certified for one in found)),
    }
    explained = [one for one in found if one.unexplained is not None]
    worst = min(explained, key=lambda one: one.unexplained or 0.0, default=None)
    return numbers if worst is None else {**worst.metrics(), **numbers}


@contextmanager
def _in_place(target: Any, **methods: Any) -> Iterator[None]:
    """Replace methods of one object for a while, on the object itself and not on its class."""
    previous = {name: vars(target)[name] for name in methods if name in vars(target)}
    vars(target).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(target)[name]
        vars(target).update(previous)
