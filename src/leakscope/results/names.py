"""Short names of settings, protocols, defences and attacks, the same on console and page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leakscope.results.setting_verdict import SettingVerdict
    from leakscope.results.verdict import Verdict


@dataclass(frozen=True)
class Setting:
    """One protocol with one defence, as console and page name it."""

    name: str
    verdict: SettingVerdict
    protocol_short: str
    defense_short: str

    @property
    def protocol(self) -> str:
        return self.verdict.protocol

    @property
    def defense(self) -> str:
        return self.verdict.defense

    @property
    def cell(self) -> tuple[str, str]:
        """Protocol and defence, as records name their setting."""
        return self.protocol, self.defense

    @property
    def title(self) -> str:
        return f"{self.protocol}, defence {self.defense}"

    @property
    def short(self) -> str:
        return f"{self.protocol_short} · {self.defense_short}"

    @property
    def defense_parts(self) -> tuple[str, str]:
        """The name of the defence, and its options."""
        name, _, options = self.defense_short.partition("(")
        return name, options.removesuffix(")")


def name_settings(verdict: Verdict) -> list[Setting]:
    """Every setting in the order of the verdict."""
    protocols = short_names(s.protocol for s in verdict.settings)
    defenses = short_names(s.defense for s in verdict.settings)
    return [
        Setting(f"S{position}", setting, protocols[setting.protocol], defenses[setting.defense])
        for position, setting in enumerate(verdict.settings, start=1)
    ]


def split_repr(text: str) -> tuple[str, list[str]]:
    """Name and top-level arguments of a repr.

    >>> split_repr("FedAvg(epochs=5, order=(1, 2))")
    ('FedAvg', ['epochs=5', 'order=(1, 2)'])
    >>> split_repr("none")
    ('none', [])
    """
    name, bracket, rest = text.partition("(")
    if not bracket or not rest.endswith(")"):
        return text, []
    arguments, depth, current = [], 0, ""
    for character in rest[:-1]:
        depth += character in "([{"
        depth -= character in ")]}"
        if character == "," and depth == 0:
            arguments.append(current.strip())
            current = ""
        else:
            current += character
    return name, [a for a in (*arguments, current.strip()) if a]


def short_names(reprs: Iterable[str]) -> dict[str, str]:
    """For each repr its name with only those arguments that tell it from others of the same name.

    >>> short_names(["Noise(sigma=1, kind='a')", "Noise(sigma=2, kind='a')", "Prune(fraction=0.9)", "none"])
    {"Noise(sigma=1, kind='a')": 'Noise(sigma=1)', "Noise(sigma=2, kind='a')": 'Noise(sigma=2)', \
'Prune(fraction=0.9)': 'Prune(fraction=0.9)', 'none': 'no defence'}
    """
    unique = list(dict.fromkeys(reprs))
    families: dict[str, list[set[str]]] = {}
    for text in unique:
        name, arguments = split_repr(text)
        families.setdefault(name, []).append(set(arguments))
    result = {}
    for text in unique:
        name, arguments = split_repr(text)
        family = families[name]
        if len(family) > 1:
            arguments = [a for a in arguments if not all(a in other for other in family)]
        elif any(is_word(a) for a in arguments):
            # A single one is told by its numbers; words such as scope='tensor' are mostly defaults.
            arguments = [a for a in arguments if not is_word(a)][:3]
        else:
            arguments = arguments[:3]
        result[text] = "no defence" if text == "none" else name + (f"({', '.join(arguments)})" if arguments else "")
    return result


def is_word(argument: str) -> bool:
    """Whether an argument of a repr is a word or a switch and not a number.

    >>> is_word("scope='tensor'"), is_word("fraction=0.9")
    (True, False)
    """
    value = argument.partition("=")[2]
    return value[:1] in ("'", '"') or value in ("True", "False", "None")
