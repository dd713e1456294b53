"""As much of JSON Schema as the schemas of this package use; a keyword that is not known here is an error."""

from __future__ import annotations

import re
from typing import Any

_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}
_SILENT = {"$schema", "$defs", "title", "description"}


def violations(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None, where: str = "$") -> list[str]:
    """Every way in which ``value`` breaks ``schema``, a line each."""
    root = schema if root is None else root
    found = []
    for keyword, wanted in schema.items():
        if keyword == "$ref":
            found += violations(value, root["$defs"][wanted.removeprefix("#/$defs/")], root, where)
        elif keyword == "anyOf":
            if all(violations(value, choice, root, where) for choice in wanted):
                found.append(f"{where}: none of {len(wanted)} choices fits {value!r}")
        elif keyword == "type":
            kinds = [wanted] if isinstance(wanted, str) else wanted
            if not any(_is(value, kind) for kind in kinds):
                found.append(f"{where}: expected {wanted}, got {value!r}")
        elif keyword == "const" or keyword == "enum":
            if value not in ([wanted] if keyword == "const" else wanted):
                found.append(f"{where}: expected {wanted}, got {value!r}")
        elif keyword == "pattern":
            found += [] if re.search(wanted, value) else [f"{where}: {value!r} does not match {wanted}"]
        elif keyword == "required":
            found += [f"{where}: {key} is missing" for key in wanted if isinstance(value, dict) and key not in value]
        elif keyword == "properties":
            for key in wanted.keys() & (value.keys() if isinstance(value, dict) else ()):
                found += violations(value[key], wanted[key], root, f"{where}.{key}")
        elif keyword == "additionalProperties":
            for key in value.keys() - schema.get("properties", {}).keys() if isinstance(value, dict) else ():
                found += violations(value[key], wanted, root, f"{where}.{key}")
        elif keyword == "items":
            for number, item in enumerate(value if isinstance(value, list) else ()):
                found += violations(item, wanted, root, f"{where}[{number}]")
        elif keyword in ("minItems", "maxItems"):
            wrong = isinstance(value, list) and (len(value) < wanted if keyword == "minItems" else len(value) > wanted)
            found += [f"{where}: {keyword} {wanted}, got {len(value)}"] if wrong else []
        elif keyword not in _SILENT:
            raise NotImplementedError(keyword)
    return found


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])
