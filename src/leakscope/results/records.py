"""Read what a store holds as typed records; the only place where its JSON is read.

Reading forgives: a missing or malformed value becomes NaN, None or nothing, so that damage costs one row only.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Self, get_type_hints

from leakscope.contracts.certificate import Certificate
from leakscope.contracts.reconstruction import DIAGNOSES
from leakscope.results.reasons import InScenario

Status = Literal["done", "failed", "refused"]
#: What a control is for: an attack with nothing to learn from, a guess without any attack, or an attack that must find.
ControlKind = Literal["blind", "held-out", "positive"]
BLIND: ControlKind = "blind"
HELD_OUT: ControlKind = "held-out"
POSITIVE: ControlKind = "positive"
#: The kind of finding that is a training under a defence.
UTILITY = "utility"
NAN = float("nan")


def plain(value: Any) -> Any:
    """Return ``value`` as JSON values; NaN and infinity, which JSON lacks, are null.

    >>> plain({"psnr": float("nan"), "curve": (1, 2.5)})
    {'psnr': None, 'curve': [1, 2.5]}
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def number(value: Any) -> float:
    """Return ``value`` as a float; NaN for anything that is no finite number.

    >>> number(3), number(None), number("x"), number(True), number(math.inf)
    (3.0, nan, nan, nan, nan)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NAN
    try:
        return float(value) if math.isfinite(value) else NAN
    except OverflowError:
        return NAN


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, items(value)))


def mean(values: Iterable[float]) -> float:
    """Return the mean of what is not NaN; NaN of nothing.

    >>> mean([1.0, NAN, 3.0]), mean([])
    (2.0, nan)
    """
    measured = [value for value in values if not math.isnan(value)]
    return math.fsum(measured) / len(measured) if measured else NAN


def highest(values: Iterable[float]) -> float:
    """Return the highest of what is not NaN; NaN of nothing."""
    return max((value for value in values if not math.isnan(value)), default=NAN)


def best(values: Iterable[float], better: Literal["higher", "lower"]) -> float:
    """Return the best for the adversary of what is not NaN; NaN of nothing.

    >>> best([3.0, NAN, 1.0], "lower")
    1.0
    """
    measured = [value for value in values if not math.isnan(value)]
    return (max if better == "higher" else min)(measured, default=NAN)


def counted(count: int, noun: str) -> str:
    """Write a count with its noun.

    >>> counted(1, "job"), counted(3000, "job")
    ('1 job', '3,000 jobs')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def first_line(text: str | None) -> str:
    """Return the first line of an error, which says what happened; the rest is its traceback.

    >>> first_line("ValueError: no\\nTraceback"), first_line(None)
    ('ValueError: no', '')
    """
    return next(iter((text or "").strip().splitlines()), "")


#: Characters of an error that are kept, half of its beginning and half of its end.
MAX_ERROR = 6000
#: An absolute path: folders from the root or from home, and a name.
_NAME = r"[^\s/'\"<>|:;,()\[\]{}]"
_PATH = re.compile(rf"(?<![\w./:~-])(?:file:)?(?:~/(?:{_NAME}+/)*|/(?:{_NAME}+/)+)({_NAME}*)")
_QUOTED = re.compile(r"""(['"])(?:file:)?~?/[^'"\n]*?([^'"\n/]*)\1""")
#: What is before the folder of a package is the user's.
_PACKAGES = re.compile(r"/(?:[^'\"\n]*/)?(?:site-packages|dist-packages|python3\.\d+)/|/[^'\"\n]*/(?=leakscope/\w+)")


def without_folders(text: str) -> str:
    """Cut absolute paths to their part within a package, or to their last name: folders name people.

    >>> without_folders("File '/home/ann/venv/lib/python3.11/site-packages/torch/nn/x.py', line 3")
    "File 'torch/nn/x.py', line 3"
    >>> without_folders("no such file: /home/ann/patients/scan.png; 3/4 of them")
    'no such file: scan.png; 3/4 of them'
    """
    text = _PACKAGES.sub("", text)
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    return _PATH.sub(r"\1", _QUOTED.sub(r"\1\2\1", text))


def storable_error(text: str | None) -> str | None:
    """Shorten an error and cut folders; replace lone surrogates, which cannot be stored."""
    if text is None:
        return None
    if len(text) > MAX_ERROR:
        half = MAX_ERROR // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
    return without_folders(text).encode("utf-8", "replace").decode()


class _Record:
    """A dataclass that is read from a JSON object, each field as its type asks."""

    @classmethod
    def read(cls, raw: Any) -> Self:
        facts = mapping(raw)
        readers: dict[str, Callable[[Any], Any]] = _readers_of(cls)  # type: ignore[arg-type]
        return cls(**{name: read(facts.get(name)) for name, read in readers.items()})


@dataclass(frozen=True, kw_only=True)
class JobRecord(InScenario, _Record):
    """Describe a job: a cell of the grid. ``protocol``, ``defense`` and ``attack`` are reprs; ``parts`` has their
    options.

    ``control`` is the control's name and ``control_kind`` what it is for, both None for an attempt that counts.
    """

    protocol: str
    defense: str
    attack: str
    attack_name: str
    seed: int
    batch: int
    control: str | None = None
    control_kind: str | None = None
    indices: tuple[int, ...] = ()
    knowledge: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExampleRecord(_Record):
    """Hold what an attempt made of one private example; ``values`` by the keys of the measures."""

    index: int
    values: Mapping[str, float]
    label: Any = None
    label_guess: Any = None
    score: float = NAN
    certificate: Certificate | None = None

    @property
    def certified(self) -> bool:
        """Check whether the attack proved, without the truth, that this is the client's example."""
        return self.certificate is not None and self.certificate.holds

    def value(self, key: str) -> float:
        return self.values.get(key, NAN)

    @classmethod
    def read(cls, raw: Any) -> Self:
        named = {"index", "label", "label_guess", "score", "certificate"}
        return super().read({**mapping(raw), "values": {k: v for k, v in mapping(raw).items() if k not in named}})


@dataclass(frozen=True, kw_only=True)
class DiagnosisRecord(_Record):
    """Say why a result is what it is, as far as attack and Jacobian tell."""

    outcome: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class AttemptRecord(_Record):
    """Hold the result of one attempt or control. ``adaptive``: the attack knew the defence and made use of it.

    ``unexplained`` is what the result leaves of the update, ``unexplained_by_truth`` what the true examples leave:
    noise, rounding, and what the attack does not know of the defence; NaN where it cannot be computed. ``chose_model``:
    the attack made the client's model. ``given_labels``: the same attack told the labels, where it had guessed them
    wrong.
    """

    examples: tuple[ExampleRecord, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    diagnosis: DiagnosisRecord | None = None
    adaptive: bool = False
    chose_model: bool = False
    given_labels: tuple[ExampleRecord, ...] = ()
    peak_memory_mb: float = NAN
    unexplained: float = NAN
    unexplained_by_truth: float = NAN

    @property
    def best_psnr(self) -> float:
        return highest(example.value("psnr") for example in self.examples)

    @property
    def whole_psnr(self) -> float:
        """Average errors of the update before taking decibels, as a theoretical floor does."""
        errors = [example.value("mse") for example in self.examples]
        if not errors or any(math.isnan(error) for error in errors):
            return NAN
        return -10 * math.log10(max(sum(errors) / len(errors), 1e-30))


@dataclass(frozen=True)
class Row:
    key: str
    position: int
    status: Status
    job: JobRecord
    result: AttemptRecord | None = None
    error: str | None = None
    seconds: float | None = None
    finished: str | None = None
    #: The result as it was written; what is stored is never rebuilt from the record.
    raw: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    @property
    def examples(self) -> tuple[ExampleRecord, ...]:
        return () if self.result is None else self.result.examples

    @property
    def flags(self) -> tuple[str, ...]:
        return () if self.result is None else self.result.flags

    @property
    def reason(self) -> str:
        return first_line(self.error)

    @property
    def refusal(self) -> str:
        """Return why the job was refused, without the name of the error; what happened where it failed."""
        return self.reason.partition(": ")[2] or self.reason if self.status == "refused" else self.reason

    @property
    def starved(self) -> bool:
        """Check whether the threat model withholds what the attack requires."""
        return self.status == "refused" and self.reason.startswith("MissingKnowledge")

    @property
    def lacks(self) -> tuple[str, ...]:
        """Return what the attack asks for and the threat model withholds."""
        found = re.search(r"needs to know ([\w, ]+), which", self.reason) if self.starved else None
        return tuple(found[1].split(", ")) if found else ()

    @property
    def counts(self) -> bool:
        """Check that it is an attempt, and no control."""
        return self.job.control is None

    @classmethod
    def read(cls, key: str, position: int, status: Status, job: Any, result: Any, *rest: Any, **more: Any) -> Self:
        record = None if result is None else AttemptRecord.read(result)
        return cls(key, position, status, JobRecord.read(job), record, *rest, **{**more, "raw": result})


@dataclass(frozen=True)
class FindingRow(InScenario):
    """Hold what is true of a setting, or of the client ``batch`` and ``seed``, whatever attack is run.

    ``content`` is plain JSON values by its kind, or only a ``reason`` why there is nothing.
    """

    key: str
    position: int
    kind: str
    status: Status
    protocol: str
    defense: str
    batch: int
    seed: int
    content: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    seconds: float | None = None
    finished: str | None = None

    def value(self, name: str) -> float:
        return number(self.content.get(name))

    @property
    def reason(self) -> str:
        return first_line(self.error) or str(self.content.get("reason") or "")

    @classmethod
    def read(cls, key: str, position: int, kind: str, status: Status, subject: Any, content: Any, *rest: Any) -> Self:
        job = JobRecord.read(subject)
        client = (job.protocol, job.defense, job.batch, job.seed)
        return cls(key, position, kind, status, *client, mapping(content), *rest)

    def subject(self) -> dict[str, Any]:
        return {"protocol": self.protocol, "defense": self.defense, "batch": self.batch, "seed": self.seed}


def finding_words(kind: str) -> str:
    """Say what a finding is among jobs.

    >>> finding_words("floor"), finding_words(UTILITY)
    ('theory (floor)', 'training')
    """
    return "training" if kind == UTILITY else f"theory ({kind})"


def job_facts(job: JobRecord) -> dict[str, Any]:
    return mapping(plain(dataclasses.asdict(job)))


def _certificate(value: Any) -> Certificate | None:
    facts = mapping(value)
    free = _whole(facts.get("free_directions"))
    if not isinstance(facts.get("method"), str):
        return None
    return Certificate(
        residual=number(facts.get("residual")),
        tolerance=number(facts.get("tolerance")),
        free_directions=free if free >= 0 else None,
        method=facts["method"],
    )


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


#: How a field of a record is read, by its type; each takes any JSON value, and None where there is none.
_READERS: Mapping[Any, Callable[[Any], Any]] = {
    Any: lambda value: value,
    str: str,
    str | None: lambda value: str(value) if value else None,
    int: _whole,
    float: number,
    bool: lambda value: value is True,
    tuple[str, ...]: texts,
    tuple[int, ...]: lambda value: tuple(map(_whole, items(value))),
    Mapping[str, Any]: mapping,
    Mapping[str, str]: lambda value: {str(k): str(v) for k, v in mapping(value).items() if v},
    Mapping[str, float]: lambda value: {k: float(v) if isinstance(v, bool) else number(v) for k, v in value.items()},
    tuple[ExampleRecord, ...]: lambda value: tuple(ExampleRecord.read(e) for e in items(value) if isinstance(e, dict)),
    Certificate | None: _certificate,
    DiagnosisRecord | None: lambda value: (
        DiagnosisRecord.read(value) if mapping(value).get("outcome") in DIAGNOSES else None
    ),
}


@cache
def _readers_of(record: type) -> dict[str, Callable[[Any], Any]]:
    return {name: _READERS[hint] for name, hint in get_type_hints(record).items()}
