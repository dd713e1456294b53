"""What to audit, as a YAML file or a mapping says it; one :class:`SpecError` tells every problem, a line each."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, PrivateAttr, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails

from leakscope.audit import parts, sections
from leakscope.audit.parts import Part
from leakscope.audit.sections import ONCE, DataSpec, ModelSpec, Strict, TrainingSpec, UtilitySpec, key
from leakscope.audit.yaml_text import SpecError, SpecFile, read_yaml
from leakscope.contracts.checks import SPEC_BYTES, brief
from leakscope.contracts.disk import read_whole
from leakscope.contracts.errors import UserError
from leakscope.contracts.registry import find_name, folded, names_of_a_spec
from leakscope.results.policy import Policy

#: The audit that runs when nobody says what to audit: embedded pictures, a small network, two defences.
DEFAULT_SPEC: dict[str, Any] = {
    "model": "convnet",
    "data": "tiles",
    "examples": 6,
    "batch": 1,
    "protocols": ["fedsgd"],
    "defenses": ["none", {"gradient-noise": {"sigma": 0.01}}, {"gradient-pruning": {"fraction": 0.9}}],
    "attacks": "standard",
    "seeds": [0],
}


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


def _attacks(value: Any, info: ValidationInfo) -> Any:
    items = _listed(value)
    named = [item for item in items if isinstance(item, str) or (isinstance(item, dict) and len(item) == 1)]
    chosen = {folded(item if isinstance(item, str) else next(iter(item))) for item in named}
    return [one for item in items for one in (_standard(chosen, info) if item == "standard" else [item])]


def _standard(chosen: set[str], info: ValidationInfo) -> list[Any]:
    """List the standard attacks that are not ``chosen``, and the strongest search once more without the defences."""
    from leakscope.attacks import STRONGEST_SEARCH, standard_attacks
    from leakscope.contracts.knowledge import Knowledge

    granted = info.data.get("knowledge") or {}  # missing where it is wrong, which is told anyway
    standard = standard_attacks(_protocols(info), Knowledge(**granted) if granted else None)
    names = [name for name in standard if folded(name) not in chosen]
    defended = any(part.instance is not None for part in info.data.get("defenses") or ())
    again = granted.get("defense", False) and defended and STRONGEST_SEARCH in names
    return [*names, {STRONGEST_SEARCH: {"ignore_defense": True}}] if again else names


def _controls(value: Any) -> list[str]:
    from leakscope.audit.controls import CONTROLS

    return _kinds(value, CONTROLS)


def _findings(value: Any) -> list[str]:
    from leakscope.audit.findings import FINDINGS

    return _kinds(value, [name for name, kind in FINDINGS.items() if kind.per != "training"])  # has its own section


def _kinds(value: Any, table: Collection[str]) -> list[str]:
    if isinstance(value, bool):
        return list(table) if value else []
    return [find_name(str(kind), table) for kind in _listed(value)]


def _policy(value: Any) -> Any:
    policy = Policy.build(value) if isinstance(value, Mapping) else value
    if not isinstance(policy, Policy) or not policy.waive:
        return policy
    from leakscope.attacks import ATTACKS

    return dataclasses.replace(policy, waive=tuple(find_name(name, ATTACKS) for name in policy.waive))


def _knowledge(value: Any, info: ValidationInfo) -> dict[str, Any]:
    if value is None:
        from leakscope.contracts.protocol import default_knowledge

        value = default_knowledge(_protocols(info))
    return parts.knowledge_fields(value)


def _protocols(info: ValidationInfo) -> list[Any]:
    """Return the checked spec's protocols; the default where they are wrong, which is told anyway."""
    return [part.instance for part in info.data.get("protocols") or [parts.protocol_part("fedsgd")]]


def _workers(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if folded(value) == "auto":
        return None
    raise UserError(f"expected a whole number of at least 1, or auto, got {brief(value)}")


def _dtype(value: str | None) -> str | None:
    return None if value is None else find_name(value.removeprefix("torch."), ["float32", "float64"])


ProtocolParts = Annotated[list[Annotated[Part, BeforeValidator(parts.protocol_part)]], BeforeValidator(_listed), ONCE]
DefenseParts = Annotated[list[Annotated[Part, BeforeValidator(parts.defense_part)]], BeforeValidator(_listed), ONCE]
AttackParts = Annotated[list[Annotated[Part, BeforeValidator(parts.attack_part)]], BeforeValidator(_attacks), ONCE]


class AuditSpec(Strict):
    """One audit: protocols x defences x attacks x seeds x batches, with controls beside each attack, and findings."""

    model: sections.ModelKey = key("the victim; see the keys of `model`")
    data: sections.DataKey = key("the private examples; see the keys of `data`")
    task: Annotated[Part, BeforeValidator(parts.task_part)] = key(
        "what clients minimise: a [task](threat-models.md#tasks), or `package.module:loss`", "classification"
    )
    training: Annotated[TrainingSpec | None, AfterValidator(sections.whole_training)] = key(
        "federated training before the audit; see the keys of `training`; default: the model as it is", None
    )
    utility: UtilitySpec | None = key(
        "training under each defence, for what it costs; see the keys of `utility` and the "
        "[defence study](defense-study.md); default: none",
        None,
    )
    examples: int | None = key(
        "how many examples to attack, a multiple of `batch`; default: the fewest full batches that hold 8, as far "
        "as the data goes",
        None,
        ge=1,
    )
    batch: int = key(
        "examples a client holds, in vertical learning the samples that the workers share; batch b holds the "
        "examples b·batch to (b+1)·batch − 1",
        1,
        ge=1,
    )
    protocols: ProtocolParts = key("[protocols](protocols-and-defenses.md)", ["fedsgd"])
    defenses: DefenseParts = key("[defences](protocols-and-defenses.md#defences); `none` is the bare update", ["none"])
    knowledge: Annotated[dict[str, Any], BeforeValidator(_knowledge)] = key(
        "[the threat model](threat-models.md): a preset or a mapping; default: that of the protocols", None
    )
    attacks: AttackParts = key(
        "[attacks](attacks.md), or `package.module:Class`; `standard` stands for several", ["standard"]
    )
    seeds: Annotated[list[int], BeforeValidator(sections.seed_list), ONCE] = key(
        "a number n means the seeds 0 to n − 1", [0]
    )
    policy: Annotated[Policy, BeforeValidator(_policy)] = key(
        "limits of the verdict; see the keys of `policy`", Policy()
    )
    pictures: bool | None = key("whether originals and reconstructions are kept; default: only if not private", None)
    show_names: bool = key(
        "whether results tell the names of private data, of its classes, and of folders, and the labels of its "
        "examples; default: they do not",
        False,
    )
    about: dict[Literal["model", "data", "by"], str] = key(
        "what the report calls the `model` and the `data`, and `by` whom the audit was run; default: their names in "
        "the spec, and nobody",
        {},
    )
    controls: Annotated[list[str], BeforeValidator(_controls)] = key(
        "controls beside each attack: `true`, `false` or their kinds", True
    )
    findings: Annotated[list[str], BeforeValidator(_findings)] = key(
        "what is told of settings beside attacks: `true`, `false` or their kinds", True
    )
    lpips: Path | None = key(
        "file of LPIPS weights; default: the one in the folder `LEAKSCOPE_DATA`, if there is one", None
    )
    device: str = key("where attacks run, as torch names it", "cpu")
    dtype: Annotated[str | None, AfterValidator(_dtype)] = key(
        "precision of attacks, `float32` or `float64`; default: that of the update", None
    )
    threads: int = key("threads per job", 1, ge=1, le=1024)
    executor: Annotated[Part, BeforeValidator(parts.executor_part)] = key(
        "where jobs run, `serial`, `processes`, [`ray`](scaling.md) or `package.module:Class`; on the command line "
        "`processes`",
        "serial",
    )
    workers: Annotated[int | None, BeforeValidator(_workers)] = key(
        "parallel jobs, or `auto`: the processors that may be used, divided by `threads`; default: `auto`",
        None,
        ge=1,
        le=1024,
    )
    timeout: float | None = key(
        "seconds after which a job is stopped and counts as failed; needs `processes` or `ray`", None, gt=0, le=10**7
    )
    budget: Annotated[float | None, BeforeValidator(sections.seconds_of)] = key(
        "time after which no further job is begun (`90s`, `10m`, `1h30m` or seconds); the same command again goes on "
        "with what is left; default: all are run",
        None,
    )
    stop_on_leak: bool | None = key(
        "stop the rest of a scenario as soon as it exceeds the policy beyond doubt; default: unless there is a section "
        "`utility` or more than one seed, which compare whole scenarios",
        None,
    )
    _file: SpecFile | None = PrivateAttr(None)

    @property
    def stops_on_leak(self) -> bool:
        """Return whether a leak ends its scenario: unless asked, not where scenarios or seeds are compared."""
        return self.utility is None and len(self.seeds) == 1 if self.stop_on_leak is None else self.stop_on_leak

    @property
    def file(self) -> SpecFile | None:
        """Return the file that it was written in; no part of what is audited."""
        return self._file

    def written_in(self, file: SpecFile) -> AuditSpec:
        spec = self.model_copy()
        spec._file = file
        return spec

    @classmethod
    def parse(cls, mapping: Any, source: str = "audit spec") -> AuditSpec:
        """Check ``mapping``; raise SpecError with every problem."""
        if isinstance(mapping, AuditSpec):
            return mapping
        if not isinstance(mapping, Mapping):
            raise SpecError([f"expected a mapping of settings, got {type(mapping).__name__}"], source)
        problems = _across(mapping)
        try:
            spec = cls.model_validate(dict(mapping))
        except ValidationError as error:
            problems = [_line(entry) for entry in error.errors(include_url=False)] + problems
        if problems:  # outside the handler: the lines tell everything, the library's own account would bury them
            raise SpecError(problems, source)
        return spec

    def normalised(self) -> dict[str, Any]:
        """Return the spec as plain JSON values; objects are told by name and settings."""
        return self.model_dump(mode="json")


def load_spec(source: AuditSpec | Mapping[str, Any] | str | os.PathLike[str], *, allow_code: bool = False) -> AuditSpec:
    """Load the spec in a YAML file (or in a mapping); raise SpecError if it cannot be read or is wrong.

    Code that a file names (``package.module:Name``) must lie in the current folder or beside the file, unless
    ``allow_code``.
    """
    if isinstance(source, Mapping | AuditSpec):
        return AuditSpec.parse(source)
    return spec_with(Path(source), {}, allow_code=allow_code)


def spec_with(path: Path, settings: Mapping[str, Any], *, allow_code: bool = False) -> AuditSpec:
    """Load the spec in the YAML file ``path``, with ``settings`` in place of its own."""
    try:
        text = read_whole(path, SPEC_BYTES).decode("utf-8")
    except ValueError as error:
        raise SpecError([f"cannot be read: {error}"], str(path)) from error
    written = read_yaml(text, str(path))
    if not isinstance(written, dict):
        raise SpecError([f"expected a mapping of settings, got {type(written).__name__}"], str(path))
    with names_of_a_spec(path.parent, allowed=allow_code):
        spec = AuditSpec.parse({**written, **settings}, str(path))
    return spec.written_in(SpecFile(path, text, frozenset(settings)))


def parse_yaml(
    text: str, source: str = "audit spec", folder: Path | None = None, *, allow_code: bool = False
) -> AuditSpec:
    """Parse the spec in ``text``, which lies in ``folder``."""
    with names_of_a_spec(folder or Path.cwd(), allowed=allow_code):
        return AuditSpec.parse(read_yaml(text, source), source)


def _across(mapping: Mapping[str, Any]) -> list[str]:
    """Return problems between settings, which are told even when another setting is wrong."""
    problems = []
    examples, batch = mapping.get("examples"), mapping.get("batch", 1)
    if type(examples) is int and type(batch) is int and examples >= 1 and batch >= 1 and examples % batch:
        problems.append(f"examples: expected a multiple of batch ({batch}), got {examples}")
    executor = mapping.get("executor", "serial")
    name = next(iter(executor), "") if isinstance(executor, Mapping) else executor
    if mapping.get("timeout") is not None and folded(str(name)) == "serial":
        problems.append("timeout: expected executor 'processes' or 'ray', as only a process of its own can be stopped")
    return problems


def _line(error: ErrorDetails) -> str:
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error["loc"]).removeprefix(".")
    if error["type"] == "missing":
        return f"{where}: expected a value, got nothing"
    if error["type"] == "extra_forbidden":
        key = str(error["loc"][-1])
        nested: Any = {"model": ModelSpec, "data": DataSpec, "training": TrainingSpec, "utility": UtilitySpec}
        known = {1: AuditSpec, 2: nested.get(str(error["loc"][0])), 3: DataSpec}.get(len(error["loc"]))
        fields = [name for name in known.model_fields if name != "instance"] if known else []
        try:
            find_name(key, fields)
        except ValueError as unknown:
            return f"{where}: unknown key: {unknown}"
        return f"{where}: unknown key: expected it spelt {find_name(key, fields)}, got {key!r}"
    if error["type"] == "value_error":
        return f"{where}: " + "; ".join(parts.lines(str(error["ctx"]["error"])))
    message = error["msg"].replace("Input should be ", "expected ", 1)
    return f"{where}: {message[0].lower()}{message[1:]}, got {brief(error['input'])}"
