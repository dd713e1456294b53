"""Record what a Flower client received and what it answers, as a mod in one of two named positions.

The first mod of a list is the outermost: in ``[a, b, c]`` a message goes in through a, b, c and the answer comes out
through c, b, a. So the *raw* update is seen by the last of the list, and the update *as sent* by the first.
``audited_mods`` puts them there; the wrong order is refused, for it would show the protected update as the raw one.
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from leakscope.capture.flower import Capture, told_examples, told_round, weights_in
from leakscope.capture.recordings import Origin, Truth, save_recording
from leakscope.contracts.attack import Attack
from leakscope.contracts.checks import refuse, whole
from leakscope.contracts.disk import atomic_write, private_folder
from leakscope.contracts.errors import UserError
from leakscope.integrations import load_library
from leakscope.integrations.leakage import measure, unassessed

Position = Literal["raw", "as_sent"]
NOT_INNERMOST = (
    "another mod stands inside position 'raw': what was recorded may be protected already, and is then not what the "
    "client computed; put it last in the list"
)
#: Examples behind the answer to a message, for whoever measures; never sent.
TruthHook = Callable[[Any, Any], Truth | None]


@dataclass(frozen=True, kw_only=True)
class Inline:
    """Attack at once, while training waits: every nth round and every nth client only.

    Findings travel as metrics, numbers without inputs or labels, unless ``send`` is off. ``controls`` doubles the time.
    """

    attack: str | Attack = "linear-layer"
    every_round: int = 1
    every_client: int = 1
    controls: bool = True
    send: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        refuse("not a valid inline attack", whole(every_round=self.every_round, every_client=self.every_client))

    def in_round(self, number: int) -> bool:
        return (number - 1) % self.every_round == 0


@dataclass
class _Exchange:
    positions: list[str] = field(default_factory=list)
    truth: Truth | None = None


_EXCHANGE: ContextVar[_Exchange | None] = ContextVar("exchange", default=None)


def hold_truth(x: Tensor, y: Tensor) -> None:
    """Hold the examples a client's train function uses, for measuring on this client; they are not sent.

    Several calls add up. Without an audit mod around it nothing is held.
    """
    exchange = _EXCHANGE.get()
    if exchange is not None:
        held, pair = exchange.truth, (x.detach().cpu().clone(), y.detach().cpu().clone())
        exchange.truth = pair if held is None else (torch.cat([held[0], pair[0]]), torch.cat([held[1], pair[1]]))


class AuditMod:
    """Record each training exchange of a client at one position; attack it at once where ``inline`` says so.

    ``truth`` returns the examples behind an answer, given the message and Flower's context; or the train function calls
    :func:`hold_truth`. Both stay on the client: with them PSNR is measured, and only numbers travel.
    """

    def __init__(
        self,
        capture: Capture,
        *,
        position: Position,
        truth: TruthHook | None = None,
        inline: Inline | None = None,
        others: Tensor | None = None,
    ) -> None:
        if position not in ("raw", "as_sent"):
            raise UserError(f"position: expected 'raw' or 'as_sent', got {position!r}")
        if position == "raw" and capture.channel is not None:
            raise UserError(
                "capture.channel: what a client computed has passed no defence yet; give the channel to as_sent only"
            )
        self.capture, self.position, self.truth = capture, position, truth
        self.inline, self.others = inline, others

    def __call__(self, message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
        if not is_training(message):
            return call_next(message, context)
        outer = _EXCHANGE.get()
        exchange = outer or _Exchange()
        token = None if outer else _EXCHANGE.set(exchange)
        try:
            if self.position == "as_sent" and "raw" in exchange.positions:
                raise UserError(
                    "mods: 'raw' stands before 'as_sent', so each would record what the other is for. The first mod is "
                    "the outermost: use audited_mods(mods, raw=..., as_sent=...), which puts them in their places."
                )
            exchange.positions.append(self.position)
            inside = self.position == "raw" and is_mod(call_next)
            if inside:
                warnings.warn(NOT_INNERMOST, stacklevel=2)
            received = weights_in(message.content, self.capture.arrays, "received")
            reply = call_next(message, context)
            if not reply.has_error() and reply.has_content():
                self._record(message, context, received, reply, exchange, (NOT_INNERMOST,) if inside else ())
            return reply
        finally:
            if token is not None:
                _EXCHANGE.reset(token)

    def _record(
        self,
        message: Any,
        context: Any,
        received: dict[str, Any],
        reply: Any,
        exchange: _Exchange,
        doubts: tuple[str, ...],
    ) -> None:
        folder = Path(self.capture.folder)
        client, run = str(context.node_id), str(message.metadata.run_id)
        number = told_round(message.content) or _next_number(folder, run, client, self.position)
        attacked = self.inline is not None and self.inline.in_round(number)
        if not self.capture.records(number) and not attacked:
            return
        sent = weights_in(reply.content, self.capture.arrays, "sent")
        truth = exchange.truth if self.truth is None else self.truth(message, context)
        examples = told_examples(reply.content) or (None if truth is None else len(truth[0]))
        observation = self.capture.observation(received, sent, examples)
        origin = Origin(place=self.position, client=client, number=number, run=run, library=library(), notes=doubts)
        if self.capture.records(number):
            save_recording(folder, observation, origin, truth)
        if self.inline is None or not attacked:
            return
        if int(context.node_id) % self.inline.every_client == 0:
            options: dict[str, Any] = {"controls": self.inline.controls, "seed": self.inline.seed}
            found = measure(observation, origin, self.inline.attack, truth=truth, others=self.others, **options)
        else:
            found = unassessed(observation, origin, self.inline.attack, "not this client's turn")
        if self.inline.send:
            add_metrics(reply.content, found.metrics())


def audited_mods(mods: Sequence[Any], *, raw: AuditMod | None = None, as_sent: AuditMod | None = None) -> list[Any]:
    """Put the mods of the audit in their places: as sent first, raw last.

    >>> audited_mods(["noise"], raw=None, as_sent=None)
    ['noise']
    """
    for mod, position in ((raw, "raw"), (as_sent, "as_sent")):
        if mod is not None and mod.position != position:
            raise UserError(f"{position}: expected an AuditMod with position={position!r}, got {mod.position!r}")
    return [*([] if as_sent is None else [as_sent]), *mods, *([] if raw is None else [raw])]


def add_metrics(content: Any, numbers: dict[str, float]) -> None:
    """Add to the only MetricRecord, as strategies average one with the same keys in each reply, or to a new one."""
    records = content.metric_records
    if len(records) == 1:
        next(iter(records.values())).update(numbers)
    else:
        content["leakscope"] = load_library("flwr.app", "flower").MetricRecord(numbers)


def worst_of_clients(contents: Sequence[Any]) -> dict[str, float]:
    """Return the findings of the worst-off client, which the averages of strategies hide."""
    gathered: dict[str, list[float]] = defaultdict(list)
    for key, value in (pair for c in contents for record in c.metric_records.values() for pair in record.items()):
        if key.startswith("leakscope.") and isinstance(value, float) and not math.isnan(value):
            gathered[key].append(value)
    choose = {**dict.fromkeys(("psnr", "lift", "labels_correct", "certified"), max), "unexplained": min}
    names = {key: key.rsplit(".", 1)[-1] for key in gathered}
    return {f"{key}.worst_client": choose[name](gathered[key]) for key, name in names.items() if name in choose}


def is_mod(call_next: Any) -> bool:
    """Check that a further mod comes next, not the client's own function: Flower wraps each in one closure."""
    return str(getattr(call_next, "__qualname__", "")).startswith("make_ffn.")


def is_training(message: Any) -> bool:
    return str(message.metadata.message_type).split(".")[0] == "train" and message.has_content()


def library() -> str:
    return f"flwr {load_library('flwr', 'flower').__version__}"


def _next_number(folder: Path, run: str, client: str, position: str) -> int:
    """Count a client's exchanges in a file, where the server does not tell rounds: clients may change their process."""
    private_folder(folder)
    file = folder / f"run-{run}_client-{client}_{position}.exchanges"
    number = 1 + (int(file.read_text()) if file.exists() else 0)
    atomic_write(file, str(number).encode())
    return number
