"""Changes of a spec as options of the command line."""

from collections.abc import Mapping
from typing import Any

from leakscope.contracts.knowledge import Knowledge, nearest_preset

#: Between the defences of a chain, as they are typed.
CHAINED = "+"


def word_of(part: Any) -> str:
    """Write a part of a spec, or a list of defences, in one word.

    >>> word_of([{"gradient-clipping": {"norm": 0.5}}, {"gradient-noise": {"sigma": 0.01}}]), word_of("dlg")
    ('gradient-clipping:norm=0.5+gradient-noise:sigma=0.01', 'dlg')
    """
    if isinstance(part, list | tuple):
        return CHAINED.join(map(word_of, part))
    if isinstance(part, Mapping):
        ((name, options),) = part.items()
        told = ",".join(f"{key}={_value(value)}" for key, value in (options or {}).items())
        return f"{name}:{told}" if told else str(name)
    return str(part)


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else f"{value}"


def options_of(changes: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the words of each change by its key; the labels, which are part of the knowledge, have an option of
    their own.

    >>> options_of({"attacks": ["sme"], "controls": True, "policy": {"max_identification": 0.5}})
    {'attacks': ['--attack', 'sme'], 'controls': ['--controls'], 'policy': ['--max-identification', '0.5']}
    """
    words: dict[str, list[str]] = {}
    for key, value in changes.items():
        if key in ("attacks", "defenses"):
            words[key] = [word for part in value for word in (f"--{key[:-1]}", word_of(part))]
        elif key == "policy":
            words[key] = [word for k, v in value.items() for word in (f"--{k.replace('_', '-')}", f"{v:g}")]
        elif key == "knowledge":
            wanted = Knowledge(**value)
            preset, facts = nearest_preset(wanted)
            words[key] = ["--knowledge", word_of({preset: facts})]
            if wanted.labels != Knowledge.preset(preset).labels:
                words["labels"] = ["--labels", wanted.labels]
        elif value is True:
            words[key] = [f"--{key}"]
        elif value is not None:
            words[key] = [f"--{key}", str(value)]
    return words


def typed_options(changes: Mapping[str, Any]) -> str:
    """Write all changes as they are typed."""
    return " ".join(word for words in options_of(changes).values() for word in words)
