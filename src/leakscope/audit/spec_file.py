"""The file that a spec was written in, and the lines of its keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class SpecFile:
    """The file of a spec and its text. What ``replaced`` names was said elsewhere, on the command line say."""

    path: Path
    text: str
    replaced: frozenset[str] = frozenset()


def item_lines(text: str) -> dict[str, list[int]]:
    """For each key of a YAML mapping the line of its value, or of each item where that is a list.

    >>> item_lines("model: mlp\\ndefenses:\\n  - none\\n  - top-k: {fraction: 0.1}\\n")
    {'model': [1], 'defenses': [3, 4]}
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return {}
    if not isinstance(node, yaml.MappingNode):
        return {}
    lines: dict[str, list[int]] = {}
    for key, value in node.value:
        items = value.value if isinstance(value, yaml.SequenceNode) and value.value else [value]
        lines[str(key.value)] = [item.start_mark.line + 1 for item in items]
    return lines
