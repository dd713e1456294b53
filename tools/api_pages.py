"""The generated parts of docs/api: which objects each page of the API reference shows, and the table of public names.

An object is written as ``::: its.full.path``, which mkdocstrings replaces by its signature and docstring.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import leakscope
from leakscope import data, defenses, federation, limits, matching, metrics, models, report, results
from leakscope.attacks import ATTACKS, GradientMatching, standard_attacks
from leakscope.audit.run import Audit, audit, run_spec
from leakscope.contracts.errors import MissingKnowledge, NotApplicable
from leakscope.contracts.inputs import SPACES
from leakscope.contracts.task import TASKS
from leakscope.defenses import DEFENSES
from leakscope.federation import PROTOCOLS
from leakscope.network.inspection import ModelInspection, inspect_model

#: Public names of the package that have their home in the contracts, in the order in which one meets them.
CONTRACTS = (
    *("Knowledge", "Observation", "Message", "Protocol", "Task", "InputSpace", "Box", "ValueRange", "Defense"),
    *("Channel", "Attack", "Reconstruction", "Certificate", "Diagnosis", "setting"),
)


def targets(registry: Mapping[str, Any]) -> list[Any]:
    return list(dict.fromkeys(entry.target for entry in registry.values()))


def public(room: Any) -> list[Any]:
    """Classes and functions of the package that a room names, those that begin with an underscore left out."""
    named = [value for name, value in vars(room).items() if not name.startswith("_")]
    ours = [v for v in named if (inspect.isclass(v) or inspect.isfunction(v)) and v.__module__.startswith("leakscope.")]
    return list(dict.fromkeys(ours))


def pages() -> dict[str, list[Any]]:
    """What each page shows, by the page's name."""
    training = [federation.FederatedTraining, federation.CentralTraining, federation.DefendedTraining]
    spaces = [type(space) if not inspect.isclass(space) else space for space in SPACES.values()]
    shown = {
        "audit": [audit, run_spec, Audit, results.Verdict, results.Policy, results.Store, report.write_report],
        "protocols": [*targets(PROTOCOLS), *training, federation.cached_training],
        "defenses": [*targets(DEFENSES), defenses.epsilon_of, defenses.noise_multiplier_for],
        "attacks": [*targets(ATTACKS), GradientMatching, standard_attacks],
        "contracts": [
            *(getattr(leakscope, name) for name in CONTRACTS),
            *(MissingKnowledge, NotApplicable),
            *targets(TASKS),
            *spaces,
        ],
        "models-and-data": [
            *(models.build_model, leakscope.VerticalModel, data.load_data, data.from_tensors, data.Examples),
            *(data.split_iid, data.split_dirichlet, data.split_by_group, inspect_model, ModelInspection),
        ],
        "matching": public(matching),
        "limits-and-measures": [
            *public(limits),
            *public(metrics),
            *(leakscope.recover_embedding, leakscope.Embedding),
            *(leakscope.recover_features, leakscope.RecoveredFeatures),
        ],
    }
    taken: set[str] = set()
    unique: dict[str, list[Any]] = {}
    for page, objects in shown.items():  # an object has one place; the first page that names it is its home
        unique[page] = [thing for thing in dict.fromkeys(objects) if path_of(thing) not in taken]
        taken.update(map(path_of, unique[page]))
    return unique


def path_of(thing: Any) -> str:
    """Where an object is defined.

    >>> path_of(Audit)
    'leakscope.audit.run.Audit'
    """
    return f"{thing.__module__}.{thing.__qualname__}"


def directives(page: str) -> str:
    return "\n\n".join(f"::: {path_of(thing)}" for thing in pages()[page])


def names() -> str:
    """The public names of the package, with the page of each."""
    homes = {path_of(thing): page for page, things in pages().items() for thing in things}
    lines = ["| name | what it is |", "| --- | --- |"]
    for name in sorted([*leakscope._NAMES, "audit"], key=str.lower):
        thing = audit if name == "audit" else getattr(leakscope, name)
        path = path_of(thing)
        lines.append(f"| [`ls.{name}`]({homes[path]}.md#{path}) | {first_sentence(thing)} |")
    return "\n".join(lines)


def first_sentence(thing: Any) -> str:
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split()).replace("|", "\\|")
    text = re.sub(r":(?:mod|meth|class|func|data|attr):`([^`]*)`", r"`\1`", text).replace("``", "`")
    return text.split(". ")[0].rstrip(".:")


def parts() -> Iterable[tuple[str, Any]]:
    """Name and maker of every generated part."""
    yield "api-names", names
    for page in pages():
        yield f"api-{page}", lambda page=page: directives(page)
