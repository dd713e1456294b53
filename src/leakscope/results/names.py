"""Name scenarios, protocols, defences and attacks shortly, the same on console and page."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leakscope.results.records import Row


@dataclass(frozen=True)
class Part:
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str, facts: Any) -> Part:
        """Read what a row says of the part with the repr ``text``; rows before 0.13 have its repr only.

        >>> Part.read("FedAvg(epochs=5, order=(1, 2))", None)
        Part(name='FedAvg', options={'epochs': 5, 'order': (1, 2)})
        """
        if isinstance(facts, dict) and isinstance(facts.get("class"), str) and isinstance(facts.get("options"), dict):
            return cls(facts["class"], {name: _shown(value) for name, value in facts["options"].items()})
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            call = ast.parse(text, mode="eval").body
            if isinstance(call, ast.Call):
                return cls(text.partition("(")[0], {str(word.arg): _literal(word.value) for word in call.keywords})
        return cls(text)


def _literal(node: ast.expr) -> Any:
    with suppress(ValueError):
        return ast.literal_eval(node)
    return _Code(ast.unparse(node))


class _Code(str):
    """Print unquoted: the value of an option that is a part with options of its own."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shown(value: Any) -> Any:
    """Show the value of an option; the parts of a chain, which a spec names by mappings, as they would be called.

    >>> _shown([{"gradient-noise": {"sigma": 0.1}}, {"top-k": {"fraction": 0.5}}])
    gradient-noise(sigma=0.1) + top-k(fraction=0.5)
    """
    if isinstance(value, dict):
        options = {name: told if isinstance(told, dict) else {} for name, told in value.items()}
        calls = {name: ", ".join(f"{k}={_shown(v)!r}" for k, v in told.items()) for name, told in options.items()}
        return _Code(", ".join(f"{name}({arguments})" for name, arguments in calls.items()))
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return _Code(" + ".join(repr(_shown(item)) for item in value))
    return value


def parts_of(rows: Iterable[Row]) -> dict[str, Part]:
    """Return every protocol, defence and attack of ``rows`` by its repr."""
    names = ("protocol", "defense", "attack")
    places = ((getattr(row.job, name), row.job.parts.get(name)) for row in rows for name in names)
    facts = {text: told for text, told in places if told or text != "none"}
    return {text: Part.read(text, told) for text, told in facts.items()}


def telling_options(reprs: Iterable[str], parts: Mapping[str, Part] | None = None) -> dict[str, list[str]]:
    """Return for each repr the options that tell it from others of the same name; of a single one its first numbers."""
    found = {text: (parts or {}).get(text) or Part.read(text, None) for text in dict.fromkeys(reprs)}
    options = {text: {f"{k}={value!r}": value for k, value in part.options.items()} for text, part in found.items()}
    told = {}
    for text, part in found.items():
        family = [options[other] for other, one in found.items() if one.name == part.name]
        told[text] = [option for option in options[text] if not all(option in other for other in family)]
        if len(family) == 1:  # told by its numbers; words such as scope='tensor' are mostly defaults
            words = {o for o, v in options[text].items() if v is None or type(v) in (str, bool)}
            told[text] = [option for option in options[text] if option not in words][:3]
    return told


def short_names(reprs: Iterable[str], parts: Mapping[str, Part] | None = None) -> dict[str, str]:
    """Name each repr with only those options that tell it from others of the same name, and a chain by its parts.

    >>> short_names(["Noise(sigma=1, kind='a')", "Noise(sigma=2, kind='a')", "Prune(fraction=0.9)", "none"])
    {"Noise(sigma=1, kind='a')": 'Noise(sigma=1)', "Noise(sigma=2, kind='a')": 'Noise(sigma=2)', \
'Prune(fraction=0.9)': 'Prune(fraction=0.9)', 'none': 'no defence'}
    >>> chain = {"class": "Chain", "options": {"parts": [{"clipping": {"norm": 1.4}}, {"noise": {"sigma": 0.1}}]}}
    >>> short_names(["Chain()"], {"Chain()": Part.read("Chain()", chain)})
    {'Chain()': 'clipping(norm=1.4) + noise(sigma=0.1)'}
    """
    names = {}
    for text, options in telling_options(reprs, parts).items():
        part = (parts or {}).get(text) or Part.read(text, None)
        chained = next((value for value in part.options.values() if type(value) is _Code and " + " in value), "")
        own = str(chained) or part.name + (f"({', '.join(options)})" if options else "")
        names[text] = "no defence" if text == "none" else own
    return names
