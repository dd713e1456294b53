"""The folder of an audit: what it tells of what was audited, where that was asked for, and how it grows."""

import dataclasses
import inspect
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from leakscope.audit.keys import identity, versions
from leakscope.audit.plan import AXES, Plan, joined
from leakscope.audit.setup import Setup
from leakscope.audit.spec import AuditSpec
from leakscope.audit.yaml_text import item_lines
from leakscope.contracts.protocol import BATCHNORM, client_copy, draws_units
from leakscope.contracts.task import outputs_of
from leakscope.report.sarif import Place, Source, place_of
from leakscope.report.template import cells_of, text_template
from leakscope.results.reasons import Scenario
from leakscope.results.records import UTILITY, mapping, plain, without_folders
from leakscope.results.scale import Scale, read_scales
from leakscope.results.store import DATABASE, Store, StoreError, check_same_audit


def open_store(setup: Setup, plan: Plan, directory: Path, scales: Mapping[Scenario, Scale]) -> tuple[Store, Plan]:
    """Return the folder's store, and the plan of all that was ever asked for in it."""
    # What the newest run asks for, and what each attack had done before it: rows of both count.
    newest: dict[str, Any] = {"attacks": {part.identity(): part.name for part in setup.spec.attacks}, "earlier": {}}
    if directory.exists() and not directory.is_dir():
        raise StoreError(f"{directory}: expected a folder, got a file; choose another --out")
    if not (directory / DATABASE).exists():
        meta = {**_meta(setup), **plan.meta(setup, identity(setup))}
        meta["plan"]["scales"] = _scales(meta["plan"], scales)
        return Store.create(directory, {**meta, "newest": newest, "audited": describe_audited(setup)}), plan
    store = Store.open(directory, write=True)
    try:
        stored = mapping(store.meta("identity"))
        # Trainings, once asked for, stay the same in all runs of a folder.
        known = {**({UTILITY: stored[UTILITY]} if UTILITY in stored else {}), **identity(setup)}
        check_same_audit(store, known, may_be_new=(UTILITY,))
        plan = Plan.read(store).grown(plan, store.finished())
        spec = _grown_spec(store.meta("spec"), _told_spec(setup))
        changes: dict[str, Any] = {
            **plan.meta(setup, known),
            **_newest(setup),
            "spec": spec,
            "audited": _grown_statements(store.meta("audited"), describe_audited(setup)),
        }
        old = mapping(store.meta("plan"))
        earlier = Counter(row.job.attack for row in store.rows() if row.counts and row.status == "done")
        changes["newest"] = {**newest, "earlier": dict(earlier)}
        changes["plan"] |= {
            "scales": _scales(changes["plan"], {**read_scales(old), **scales}),
            "kinds": {**mapping(old.get("kinds")), **changes["plan"]["kinds"]},
        }
        store.update(changes, {job.key: job.position for job in plan.jobs})
    except BaseException:
        store.close()
        raise
    return store, plan


def _scales(plan: Mapping[str, Any], scales: Mapping[Scenario, Scale]) -> list[dict[str, Any]]:
    cells = [Scenario(entry["protocol"], entry["defense"]) for entry in plan["settings"]]
    return [scales[cell].as_dict(cell) for cell in cells if cell in scales]


def _newest(setup: Setup) -> dict[str, Any]:
    """Return what the newest run decides; so the policy, as it only judges the rows."""
    source = source_of(setup.spec, setup.model).as_dict()
    return {"data": _told_data(setup), "source": source, "policy": dataclasses.asdict(setup.spec.policy)}


def _meta(setup: Setup) -> dict[str, Any]:
    spec = setup.spec
    return {
        "spec": _told_spec(setup),
        "salt": setup.salt,
        "versions": versions(),
        "threat_model": setup.knowledge.describe(),
        "model": {
            "name": spec.model.name,
            "parameters": sum(p.numel() for p in setup.model.parameters()),
            "repr": repr(setup.model),
            "fingerprint": setup.model_fingerprint,
            "training": None if spec.training is None else spec.training.describe(),
            "training_losses": plain(setup.training_losses),
        },
        **_newest(setup),
        "pictures": setup.pictures,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _told_data(setup: Setup) -> dict[str, Any]:
    data = setup.data
    return {
        "name": setup.data_name,
        "private": data.private,
        "credits": "" if setup.hides_names else data.credits,
        "shape": list(data.x.shape[1:]),
        "inputs": data.public_inputs.facts(),
        "num_classes": data.num_classes,
        "task": setup.spec.task.identity(),
        "class_names": None if setup.class_names is None else list(setup.class_names),
        "count": len(data),
        "fingerprint": setup.data_fingerprint,
    }


def _told_spec(setup: Setup) -> dict[str, Any]:
    """Return the spec without folders, addresses of machines, and the file of private data."""
    spec = {**setup.spec.normalised(), "executor": setup.spec.executor.name}
    if setup.spec.show_names:
        return spec
    sections = [spec["data"], *((spec["utility"] or {}).get(name) for name in ("train", "test"))]
    for section in sections if setup.data.private else ():
        if section is not None and section["path"] is not None:
            section["path"] = "(private)"
    told: dict[str, Any] = _without_folders(spec)
    return told


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return without_folders(value) if isinstance(value, str) else value


def _grown_spec(stored: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the newest spec, its lists joined with those of the runs before."""
    before = {name: stored[name] if isinstance(stored.get(name), list) else [] for name in AXES}
    lists = {name: joined(before[name], now[name]) for name in AXES}
    counts = [spec["examples"] for spec in (stored, now) if isinstance(spec.get("examples"), int)]
    sections = [spec[UTILITY] for spec in (stored, now) if isinstance(spec.get(UTILITY), dict)]
    seeds = dict.fromkeys(seed for section in sections for seed in section.get("seeds", []))
    utility = {**sections[-1], "seeds": list(seeds)} if sections else None
    return {**now, **lists, "examples": max(counts, default=None), UTILITY: utility}


def _grown_statements(stored: Any, now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest statements, and those on protocols and defences that only earlier runs had."""
    before = [old for old in stored if isinstance(old, dict)] if isinstance(stored, list) else []
    return [
        *now,
        *(old for old in before if old not in now and not str(old.get("text")).startswith("Waived")),
    ]


def source_of(spec: AuditSpec, model: nn.Module) -> Source:
    """Return where ``spec`` was written; without a file, where ``model`` is made."""
    made = _model_place(spec.model.name, model)
    if spec.file is None:
        return Source(whole=made)
    path, lines = spec.file.path, item_lines(spec.file.text)
    tables = {}
    for name, parts in (("protocols", spec.protocols), ("defenses", spec.defenses)):
        starts = [] if name in spec.file.replaced else lines.get(name, [])
        tables[name] = {part.identity(): place_of(path, line) for part, line in zip(parts, starts, strict=False)}
    return Source(whole=place_of(path, next(iter(lines.get("model", [])), 1)), model=made, **tables)


def _model_place(name: str, model: nn.Module) -> Place:
    """Find the model's code: its factory, its class, the script, or the class of torch that it is made of."""
    module, _, attribute = name.partition(":")
    factory = getattr(sys.modules.get(module), attribute, None) if attribute else None
    places = [place for target in (factory, *type(model).__mro__) if (place := _defined(target)) is not None]
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    own = [place for place in places if not place.installed]
    if not own and script is not None and not (place := place_of(script)).installed:
        own = [place]
    return [*own, *places][0]


def _defined(target: Any) -> Place | None:
    """Find a function or class; None where its source is not at hand, as in a notebook."""
    try:
        file, line = inspect.getsourcefile(target), inspect.findsource(target)[1] + 1
    except (TypeError, OSError):
        return None
    return None if file is None else place_of(file, line)


def describe_audited(setup: Setup) -> list[dict[str, Any]]:
    """Say what the verdict is about, and what of it is a warning; what was run is told by the rows."""
    spec, modules = setup.spec, list(setup.model.modules())
    norms = [module.training for module in modules if isinstance(module, BATCHNORM)]
    promises = []
    for part, defense in product(spec.protocols, spec.defenses):
        passes = 0 if defense.instance is None else part.instance.passes(spec.batch)
        spent, promised = (defense.instance and defense.instance.epsilon_for(count) for count in (passes, None))
        if spent is not None and promised is not None:
            promises.append((defense.name, part.name, passes, spent, promised))
    text = text_template("audited.txt.j2", {}).render(
        **{"setup": setup, "spec": spec, "promises": promises},
        own=("train" if any(norms) else "eval") if norms else None,
        modes=sorted({part.instance.batchnorm for part in spec.protocols}),
        dropout=draws_units(setup.model, setup.inputs(torch.tensor([0]))[0]),
        dropouts={part.instance.dropout for part in spec.protocols},
        outputs=_outputs(setup) if spec.task.instance.has_classes else 0,
    )
    return [
        {"text": cells_of(line.removeprefix("! "))[0], "warning": line.startswith("! ")} for line in text.splitlines()
    ]


def _outputs(setup: Setup) -> int:
    x, _ = setup.inputs(torch.tensor([0]))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        answer = outputs_of(client_copy(setup.model, "eval")(x))
    return answer.shape[1] if answer.dim() > 1 else 1
