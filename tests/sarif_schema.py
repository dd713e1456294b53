"""SARIF 2.1.0 logs against the standard's own schema where it is at hand, and always against what the project needs.

The schema is no part of the repository. ``tools/sarif_schema.py`` fetches it from the Python package index, and the
environment of ``make test`` has it; without an index it cannot be had, and only the project's own rules are checked.
"""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema


@cache
def official_schema() -> dict[str, Any] | None:
    """The schema of the standard; None where it was never fetched and cannot be."""
    tool = _tool()
    try:
        found: dict[str, Any] = json.loads(tool.fetch())
    except OSError:
        return None
    return found


def sarif_problems(log: dict[str, Any]) -> list[str]:
    """What is wrong with a log, a line each."""
    return [*_by_the_standard(log), *_by_our_rules(log)]


def _by_the_standard(log: dict[str, Any]) -> list[str]:
    schema = official_schema()
    if schema is None:
        return []
    validator = jsonschema.validators.validator_for(schema)(schema, format_checker=jsonschema.FormatChecker())
    return [f"{list(error.absolute_path)}: {error.message}" for error in validator.iter_errors(log)]


def _by_our_rules(log: dict[str, Any]) -> list[str]:
    """What the standard leaves open and code scanning needs: a place in the repository for each result."""
    wrong = [] if log.get("version") == "2.1.0" and len(log["runs"]) == 1 else ["expected version 2.1.0 and one run"]
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    prints = set()
    for number, result in enumerate(run["results"]):
        where = f"results[{number}]"
        if rules[result["ruleIndex"]]["id"] != result["ruleId"]:
            wrong.append(f"{where}: rule and index differ")
        if not result["message"]["text"].strip():
            wrong.append(f"{where}: no message")
        if len(result["locations"]) != 1:
            wrong.append(f"{where}: expected one location")
        for location in (*result["locations"], *result.get("relatedLocations", ())):
            place = location["physicalLocation"]
            uri = place["artifactLocation"]["uri"]
            if re.match(r"/|\w+:|~|\.\.", uri) or place["region"]["startLine"] < 1:
                wrong.append(f"{where}: {uri} is no place in a repository")
        prints.add(result["partialFingerprints"]["primaryLocationLineHash"])
    if len(prints) != len(run["results"]):
        wrong.append("two results have the same fingerprint")
    return wrong


def _tool() -> ModuleType:
    path = Path(__file__).parents[1] / "tools" / "sarif_schema.py"
    spec = importlib.util.spec_from_file_location("fetch_sarif_schema", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
