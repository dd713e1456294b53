"""The page of an audit: one self-contained HTML file, a pure function of the store.

Nothing of the clock, the machine or the directory's name enters the page, so the same store gives the same
bytes. Every string of the store is untrusted: the template engine escapes all of it, and the page's own
policy forbids any fetch and any script but the one whose hash it names.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from leakscope.audit.store import Row, Store
from leakscope.audit.summary import summarise
from leakscope.audit.verdict import Verdict, judge_store
from leakscope.observation_files import atomic_write
from leakscope.report import sections, words
from leakscope.report.costs import costs_section
from leakscope.report.gallery import Gallery
from leakscope.report.limits import limits_section
from leakscope.report.measures import measures_section
from leakscope.report.weight_updates import updates_section

HEADLINES = {
    "leaks": (
        "Leaks above policy",
        "At least one private example was recovered beyond what the policy allows.",
    ),
    "within policy": (
        "Within policy",
        "No attack tried here reached the limits. This is evidence on these attacks, not proof against all.",
    ),
    "inconclusive": (
        "Inconclusive",
        "Nothing crossed the limits, but doubts remain, so this is not a pass. The reasons are below.",
    ),
    "nothing audited": (
        "Nothing audited",
        "No job has produced a measurement, so there is nothing to judge.",
    ),
}
# Control characters (of a coloured error text, say) are no HTML; line ends and tabs are.
_CONTROLS = {code: "\ufffd" for code in range(32) if chr(code) not in "\t\n\r"} | {127: "\ufffd"}


def render(directory: str | os.PathLike[str], pictures: bool | None = None) -> str:
    """The HTML page of the audit in ``directory``.

    ``pictures`` None shows pictures of data that is not private, and of private data if the audit was told to
    keep them; True shows whatever the store holds; False shows none.
    """
    with Store.open(Path(directory)) as store:
        context = build_context(store, pictures)
    return fill("report.html.j2", context)


def write_report(
    directory: str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    pictures: bool | None = None,
) -> Path:
    """Write the page of the audit in ``directory`` to ``path`` (default: report.html beside the store)."""
    target = Path(directory) / "report.html" if path is None else Path(path)
    content = render(directory, pictures).encode("utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(target, content)
    return target


def fill(template: str, context: dict[str, Any]) -> str:
    """``template`` with ``context``, the style sheet, the script and a policy that admits just them."""
    environment = Environment(
        loader=FunctionLoader(_resource),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = _resource("table.js")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    page = environment.get_template(template).render(
        **context, style=Markup(_resource("style.css")), script=Markup(script), script_hash=digest
    )
    # A lone surrogate from a JSON escape cannot be written as UTF-8.
    return page.translate(_CONTROLS).encode("utf-8", "replace").decode("utf-8")


def build_context(store: Store, pictures: bool | None) -> dict[str, Any]:
    """Everything the template names, as plain values."""
    meta = {key: _mapping(store.meta(key)) for key in ("spec", "versions", "plan", "model", "data", "policy")}
    rows = sorted(store.rows(), key=lambda row: (row.position, row.key))
    verdict = judge_store(store)
    settings = sections.settings_section(verdict, meta["data"])
    gallery = Gallery(store, rows, meta["data"], bool(store.meta("pictures")), pictures)
    title, subtitle = HEADLINES.get(verdict.outcome, (verdict.outcome, ""))
    return {
        "title": title,
        "subtitle": subtitle,
        "outcome": verdict.outcome,
        "doubts": _doubts(verdict),
        "policy": policy_lines(meta["policy"]),
        "progress": progress(rows, meta["plan"]),
        "worst": _worst(verdict, settings, gallery),
        "threat_model": [str(line) for line in store.meta("threat_model") or []],
        "facts": _facts(meta),
        "protocol": _protocol(rows),
        "model_repr": str(meta["model"].get("repr") or ""),
        "settings": settings,
        "all_measures": measures_section(summarise(rows, meta["policy"]), settings),
        "charts": sections.charts(settings, words.number(meta["policy"].get("max_psnr"))),
        "gallery": gallery.section(verdict, settings),
        "updates": updates_section(rows, settings),
        "limits": limits_section(rows, settings),
        "costs": costs_section(rows, settings),
        "curves": sections.curves_section(store, rows, settings),
        "jobs": sections.jobs_section(rows, settings, meta["data"]),
        "flags": sections.flags_section(verdict, rows),
        "flag_rule": words.FLAG_RULE,
        "measures": words.MEASURES,
        "provenance": _provenance(store, meta, rows),
        "versions": [(str(name), str(value)) for name, value in meta["versions"].items()],
        "spec": yaml.safe_dump(meta["spec"], sort_keys=False, allow_unicode=True, width=100),
        "credits": str(meta["data"].get("credits") or ""),
        "data_name": str(meta["data"].get("name") or "unnamed data"),
        "model_name": str(meta["model"].get("name") or "unnamed model"),
    }


def _doubts(verdict: Verdict) -> list[str]:
    """Reasons of the verdict that belong to no setting; those of the settings are shown with them."""
    told = {f"{s.protocol}, defence {s.defense}: {reason}" for s in verdict.settings for reason in s.reasons}
    return [str(reason) for reason in verdict.reasons if reason not in told]


def policy_lines(policy: dict[str, Any]) -> list[str]:
    """The policy in words.

    >>> policy_lines({"max_psnr": 20.0, "min_lift": 3.0})[0][:65]
    'An example counts as leaked when its PSNR is 20 dB or more and at'
    """
    psnr, lift = words.number(policy.get("max_psnr")), words.number(policy.get("min_lift"))
    lines = [
        f"An example counts as leaked when its PSNR is {psnr:g} dB or more and at least {lift:g} dB above "
        "the zero-information baseline."
    ]
    ssim, identification = (
        words.number(policy.get("max_ssim")),
        words.number(policy.get("max_identification")),
    )
    if not math.isnan(ssim):
        lines.append(f"It also counts as leaked when its SSIM is {ssim:g} or more.")
    if not math.isnan(identification):
        lines.append(f"A setting also leaks when more than {words.percent(identification)} of examples are identified.")
    return lines


def progress(rows: list[Row], plan: dict[str, Any]) -> dict[str, Any]:
    """How many of the planned jobs have which fate."""
    count = {status: sum(row.status == status for row in rows) for status in ("done", "failed", "refused")}
    total = plan.get("total")
    planned = total if isinstance(total, int) and total >= len(rows) else len(rows)
    return {
        **count,
        "planned": planned,
        "missing": planned - len(rows),
        "controls": sum(bool(row.job.get("control")) for row in rows),
    }


def _worst(verdict: Verdict, settings: list[dict[str, Any]], gallery: Gallery) -> dict[str, Any] | None:
    worst = verdict.worst
    if worst is None:
        return None
    place = (worst.protocol, worst.defense)
    setting = next((s for s in settings if (s["protocol"], s["defense"]) == place), None)
    original, guess = gallery.pair(worst.key, worst.index, "worst")
    return {
        "index": worst.index,
        "attack": worst.attack_name,
        "seed": worst.seed,
        "psnr": words.fixed(words.number(worst.psnr)),
        "ssim": words.fixed(words.number(worst.ssim), 2),
        "baseline": words.fixed(words.number(worst.baseline_psnr)),
        "lift": words.fixed(words.number(worst.lift)),
        "lift_reason": "" if math.isfinite(words.number(worst.lift)) else "no control of this attack was measured",
        "label": gallery.label_of(worst.key, worst.index),
        "setting": setting,
        "original": original,
        "guess": guess,
    }


def _facts(meta: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    model, data = meta["model"], meta["data"]
    parameters = words.number(model.get("parameters"))
    shape = data.get("shape") or []
    facts = [
        ("Model", str(model.get("name") or "unnamed")),
        ("Parameters", f"{parameters:,.0f}" if math.isfinite(parameters) else words.DASH),
        (
            "Data",
            str(data.get("name") or "unnamed") + (" (private)" if data.get("private", True) else " (public)"),
        ),
        ("Examples in the data", str(data.get("count", words.DASH))),
        ("Shape of an example", " × ".join(str(n) for n in shape)),
        ("Classes", str(data.get("num_classes", words.DASH))),
    ]
    names = data.get("class_names")
    if isinstance(names, list):
        text = ", ".join(str(name) for name in names[:20])
        facts.append(("Class names", text + (", …" if len(names) > 20 else "")))
    if model.get("training"):
        facts.append(("Training", str(model["training"])))
    return facts


def _protocol(rows: list[Row]) -> list[tuple[str, list[str]]]:
    """In full what was combined: each protocol, defence and attack once, as the rows name it."""

    def distinct(name: str) -> list[str]:
        return list(dict.fromkeys(str(row.job.get(name)) for row in rows))

    sizes = sorted({len(row.job.get("indices") or ()) for row in rows})
    return [
        ("How updates are made", distinct("protocol")),
        ("Examples behind one observation", [str(size) for size in sizes]),
        ("Defences", distinct("defense")),
        ("Attacks", distinct("attack")),
    ]


def _provenance(store: Store, meta: dict[str, dict[str, Any]], rows: list[Row]) -> list[tuple[str, str]]:
    finished = [str(row.finished) for row in rows if row.finished]
    seconds = sum(s for s in (words.number(row.seconds) for row in rows) if math.isfinite(s))
    infos = [_mapping((row.result or {}).get("info")) for row in rows]
    memory = [words.number((row.result or {}).get("peak_memory_mb")) for row in rows]
    measured = [m for m in memory if math.isfinite(m)]

    seeds = dict.fromkeys(row.job.get("seed") for row in rows)

    def seen(name: str) -> str:
        return ", ".join(sorted({str(info[name]) for info in infos if info.get(name) is not None})) or words.DASH

    return [
        ("Created", str(store.meta("created") or words.DASH)),
        ("Last job finished", max(finished, default=words.DASH)),
        ("Time of all jobs", words.duration(seconds)),
        ("Seeds", ", ".join(str(seed) for seed in sorted(seeds, key=words.number)) or words.DASH),
        ("Device", seen("device")),
        ("Precision", seen("dtype")),
        ("Threads", seen("threads")),
        ("Peak memory", f"{max(measured):.0f} MB" if measured else words.DASH),
        ("Store format", str(store.meta("format"))),
        ("Spec hash", str(store.meta("spec_hash") or words.DASH)),
        ("Model fingerprint", str(meta["model"].get("fingerprint") or "")),
        ("Data fingerprint", str(meta["data"].get("fingerprint") or words.DASH)),
    ]


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _resource(name: str) -> str:
    return resources.files("leakscope.report").joinpath(name).read_text(encoding="utf-8")
