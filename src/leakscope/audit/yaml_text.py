"""Read a spec's YAML and its line numbers; the error for what cannot be audited."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from leakscope.contracts.checks import DEPTH, SPEC_BYTES, SPEC_VALUES, brief
from leakscope.contracts.errors import UserError

#: Problems that a message tells; those beyond are counted.
MAX_TOLD = 40
_SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


class SpecError(UserError):
    """The spec cannot be audited; ``problems`` has one line for each reason."""

    def __init__(self, problems: list[str], source: str = "audit spec") -> None:
        self.problems = list(problems)
        self.source = source
        more = len(self.problems) - MAX_TOLD
        told = [*self.problems[:MAX_TOLD], *([f"and {more} more"] if more > 0 else [])]
        super().__init__(f"{source}: cannot be used:\n" + "\n".join(f"  - {line}" for line in told))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems, self.source)


@dataclass(frozen=True)
class SpecFile:
    """The file of a spec and its text; the keys in ``replaced`` were set elsewhere, as on the command line."""

    path: Path
    text: str
    replaced: frozenset[str] = frozenset()


def item_lines(text: str) -> dict[str, list[int]]:
    """Return for each key of a YAML mapping the line of its value, or of each item of a list.

    >>> item_lines("model: mlp\\ndefenses:\\n  - none\\n  - top-k: {fraction: 0.1}\\n")
    {'model': [1], 'defenses': [3, 4]}
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return {}
    if not isinstance(node, yaml.MappingNode):
        return {}
    lists = {
        str(key.value): value.value if isinstance(value, yaml.SequenceNode) and value.value else [value]
        for key, value in node.value
    }
    return {key: [item.start_mark.line + 1 for item in items] for key, items in lists.items()}


def read_yaml(text: str, source: str = "audit spec") -> Any:
    """Read ``text``, not yet checked as a spec; an empty text is a spec without keys."""
    content = read_value(text, source)
    return {} if content is None else content


def read_value(text: str, source: str) -> Any:
    """Read YAML that holds only text, numbers, lists and mappings with each key once; raise SpecError for the rest.

    How much it becomes once its aliases are written out is counted before anything is built.
    """
    try:
        _refuse("", SPEC_BYTES.problem(len(text)))
        _check_events(text)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _Census().count(node)
            return _numbers(loader.construct_document(node))
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise SpecError([f"not valid YAML: {_short(' '.join(str(error).split()))}"], source) from error
    except _Refused as error:
        raise SpecError([_short(str(error))], source) from error
    except (ValueError, RecursionError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        # Some malformed scalars pass the parser and fail where a number is made of them.
        raise SpecError([f"not valid YAML: a value cannot be read: {_short(str(error))}"], source) from error


class _Refused(ValueError):
    """Valid YAML that no spec needs."""


class _Loader(yaml.SafeLoader):
    """The safe loader, to which a date is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:timestamp"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_PREFIX = "tag:yaml.org,2002:"
_TAGS = frozenset(_PREFIX + kind for kind in ("str", "int", "float", "bool", "null", "seq", "map", "merge"))


def _check_events(text: str) -> None:
    """Check depth and size by events of the parser, which needs no recursion."""
    depth = values = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if not isinstance(event, yaml.NodeEvent):
            continue
        values += 1
        depth += isinstance(event, yaml.CollectionStartEvent)
        if depth > DEPTH:
            raise _Refused(f"{_line(event)}expected at most {DEPTH} lists and mappings in each other, got more")
        _refuse(_line(event), SPEC_VALUES.problem(values))


def _refuse(where: str, problem: str | None) -> None:
    if problem is not None:
        raise _Refused(where + problem)


class _Census:
    """Count the values that a node becomes; what an alias names counts each time."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._open: set[int] = set()

    def count(self, node: yaml.Node) -> int:
        if id(node) in self._open:
            raise _Refused(f"{_line(node)}expected a list or mapping that does not hold itself")
        if id(node) not in self._sizes:
            self._open.add(id(node))
            if node.tag not in _TAGS:
                tag = node.tag.replace(_PREFIX, "!!")
                raise _Refused(f"{_line(node)}expected text, numbers, lists and mappings, got the tag {tag}")
            size = 1 + sum(map(self.count, _children(node)))
            self._open.discard(id(node))
            _refuse(f"{_line(node)}with its aliases written out ", SPEC_VALUES.problem(size))
            self._sizes[id(node)] = size
        return self._sizes[id(node)]


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if not isinstance(node, yaml.MappingNode):
        return []
    keys: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag not in (_PREFIX + "str", _PREFIX + "merge"):
            got = brief(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            raise _Refused(f"{_line(key)}expected text as a key, quoted where it reads as something else, got {got}")
        if key.value in keys:
            raise _Refused(f"{_line(key)}expected each key once, got {brief(key.value)} again")
        keys.add(key.value)
    return [value for _, value in node.value]


def _line(place: yaml.Node | yaml.Event) -> str:
    mark = place.start_mark
    return "" if mark is None else f"line {mark.line + 1}: "


def _short(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:300]} ... {text[-90:]}"


def _numbers(value: Any) -> Any:
    """Turn 1e-3 into a number: YAML 1.1 reads it, without a point, as text."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, int) and value.bit_length() > 63:
        raise _Refused(f"expected numbers of at most 63 bits, got {brief(value)}")
    return float(value) if isinstance(value, str) and _SCIENTIFIC.fullmatch(value) else value
