"""Write the generated parts of docs/*.md and README.md, and docs/*.svg, again: from the code and committed figures.

    python tools/make_docs.py            write
    python tools/make_docs.py --check    exit code 1, and which pages, if something is out of date

A part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``; everything else in a page is left alone. The
same code gives the same text: nothing of the clock, the machine or its data enters.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from leakscope.attacks import ATTACKS
from leakscope.audit import CONTROLS, EXECUTORS, FINDINGS, Executor
from leakscope.audit.executors.ray import RayCluster
from leakscope.audit.sections import DataSpec, ModelSpec, TrainingSpec, UtilitySpec
from leakscope.audit.spec import AuditSpec
from leakscope.contracts.attack import Attack
from leakscope.contracts.checks import CAPS
from leakscope.contracts.knowledge import KNOWLEDGE_PRESETS, Knowledge
from leakscope.contracts.reconstruction import FLAGS
from leakscope.contracts.settings import Setting, settings_of
from leakscope.contracts.task import TASKS
from leakscope.data import DATA
from leakscope.defenses import DEFENSES
from leakscope.federation import PROTOCOLS
from leakscope.limits import imprint_guarantee
from leakscope.matching import DISTANCES
from leakscope.metrics import MEASURES
from leakscope.models import MODELS
from leakscope.papers import PAPERS
from leakscope.results import Policy

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
PAGES = (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md")
BENCHMARKS = ROOT / "benchmarks"
_PART = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_STANDARD = {"gradient": "gradients", "weight_delta": "weight updates", "rounds": "vertical learning"}


def settings_table(cls: type, common: type | None = None) -> str:
    """Every setting of a class, as the class itself describes it; without those of a ``common`` base."""
    known = {s.name for s in settings_of(common)} if common is not None else set()
    own = [s for s in settings_of(cls) if s.name not in known]
    rows = [[f"`{s.name}`", expected(s), default(s), s.help or "see the text"] for s in own]
    return table(["setting", "expected", "default", "meaning"], rows) if rows else "It has no settings."


def expected(setting: Setting) -> str:
    return inline(setting.expected) if setting.choices is None else "one of " + ", ".join(map(code, setting.choices))


def default(setting: Setting) -> str:
    return "required" if setting.required else code(repr(setting.default))


def standard(entry: Any) -> str:
    kinds = ", ".join(_STANDARD[kind] for kind in entry.standard_for)
    return kinds if entry.standard_with is None else f"{kinds}, with the right `{entry.standard_with}`"


def attacks() -> str:
    rows = [[f"[`{e.name}`](#{e.name})", e.target.__name__, e.summary, standard(e)] for e in ATTACKS.values()]
    parts = [table(["name", "class", "what it does", "in `standard` for"], rows)]
    parts += ["Every attack has these settings, beside its own:", settings_table(Attack)]
    for entry in ATTACKS.values():
        cls = entry.target
        needs = ", ".join(f"`{name}`" for name in cls.requires) or "nothing"
        uses = " It makes use of a defence that it knows." if cls.reads_channel else ""
        parts += [
            f"## {entry.name}",
            f"`leakscope.attacks.{cls.__name__}`: {entry.summary}. Source: {entry.source}. "
            f"It must know: {needs}.{uses}",
            prose(inspect.getmodule(cls).__doc__ or ""),
            prose(cls.__doc__ or ""),
            settings_table(cls, Attack),
        ]
        if cls.presets:
            shown = [
                [f"`{name}`", ", ".join(f"`{key}={value!r}`" for key, value in values.items())]
                for name, values in cls.presets.items()
            ]
            parts.append(table(["preset", "changes"], shown))
    return "\n\n".join(parts)


def models() -> str:
    rows = [
        [
            f"`{e.name}`",
            e.summary,
            size(e.input_shape),
            str(e.num_classes),
            ", ".join(f"`{name}`" for name in e.options()) or "none",
        ]
        for e in MODELS.values()
    ]
    return table(["name", "what it is", "input", "classes", "options"], rows)


def data() -> str:
    rows = [
        [
            f"`{e.name}`",
            e.summary,
            "its own" if e.shape is None else size(e.shape),
            "yes" if e.needs_path else "no",
            ", ".join(f"`{name}`" for name in e.options()) or "none",
        ]
        for e in DATA.values()
    ]
    return table(["name", "what it is", "shape", "needs files", "options"], rows)


def spec() -> str:
    return pydantic_table(AuditSpec)


def spec_model() -> str:
    return pydantic_table(ModelSpec)


def spec_data() -> str:
    return pydantic_table(DataSpec)


def spec_training() -> str:
    return pydantic_table(TrainingSpec)


def spec_utility() -> str:
    return pydantic_table(UtilitySpec)


def spec_policy() -> str:
    return settings_table(Policy)


def knowledge() -> str:
    rows = []
    for setting in settings_of(Knowledge):
        values = [getattr(preset, setting.name) for preset in KNOWLEDGE_PRESETS.values()]
        shown = [value if isinstance(value, str) else "yes" if value else "no" for value in values]
        rows.append([f"`{setting.name}`", setting.help, *shown])
    return table(["field", "what is known", *(f"`{name}`" for name in KNOWLEDGE_PRESETS)], rows)


def described(registry: Mapping[str, Any]) -> str:
    """A table of the entries, and the settings of each."""
    parts = [
        table(
            ["name", "class", "what it is"],
            [[f"`{e.name}`", f"`{e.target.__name__}`", e.summary] for e in registry.values()],
        )
    ]
    for entry in registry.values():
        summary = inline(" ".join((entry.target.__doc__ or "").strip().split("\n\n")[0].split()))
        parts += [f"**`{entry.name}`** {summary}", settings_table(entry.target)]
    return "\n\n".join(parts)


def protocols() -> str:
    return described(PROTOCOLS)


def defenses() -> str:
    return described(DEFENSES)


def tasks() -> str:
    return described(TASKS)


def measures() -> str:
    rows = []
    for measure in MEASURES.values():
        limit = "" if measure.limit is None else f"`{measure.limit}`"
        rows.append([f"`{measure.name}`", measure.title, measure.span, measure.better, limit, measure.meaning])
    heads = ["name", "shown as", "range", "better for the adversary", "limit of the policy", "meaning"]
    return table(heads, rows)


def caps() -> str:
    rows = [[code(cap.name), f"{cap.default:,} {cap.unit}".removesuffix(" of them"), cap.of] for cap in CAPS]
    return table(["variable", "default", "cap on"], rows)


def findings() -> str:
    return table(
        ["finding", "taken of", "what it tells"], [[f"`{f.name}`", f"a {f.per}", f.summary] for f in FINDINGS.values()]
    )


def controls() -> str:
    return table(
        ["control", "what takes the place of the update"], [[f"`{c.name}`", c.summary] for c in CONTROLS.values()]
    )


def executors() -> str:
    return table(["executor", "where jobs run"], [[f"`{e.name}`", e.summary] for e in EXECUTORS.values()])


def rooms() -> str:
    """The drawing as a file that every reader of Markdown shows, then the table."""
    _, _, rest = script(TOOLS / "rooms.py").drawing().partition("```\n\n")
    return f"![Who imports whom: an arrow leads from a room to one that it imports](rooms.svg)\n\n{rest}"


def strength() -> str:
    table = script(BENCHMARKS / "strength_table.py")
    return table.tables(table.read_rows(BENCHMARKS / "strength.jsonl"))


def exact_inversion() -> str:
    table = script(BENCHMARKS / "exact_inversion_table.py")
    return table.tables(table.read_rows(BENCHMARKS / "exact_inversion.jsonl"))


def strength_summary() -> str:
    table = script(BENCHMARKS / "strength_table.py")
    return table.summary(table.read_rows(BENCHMARKS / "strength.jsonl"))


def defense_study() -> str:
    table = script(BENCHMARKS / "defense_study_table.py")
    return table.table(table.read_rows(BENCHMARKS / "defense_study.csv"))


def knowing() -> str:
    table = script(BENCHMARKS / "knowing_table.py")
    return table.table(table.read_rows(BENCHMARKS / "knowing.jsonl"))


def scaling() -> str:
    table = script(BENCHMARKS / "scaling_table.py")
    return table.tables(table.read_rows(BENCHMARKS / "scaling.jsonl"))


def executor_runs() -> str:
    table = script(BENCHMARKS / "executors_table.py")
    return table.table(table.read_rows(BENCHMARKS / "executor_runs.jsonl"))


def executor_settings() -> str:
    return settings_table(RayCluster, Executor)


def pictures() -> dict[str, str]:
    """The drawn files of docs by name: plots of committed figures, and the rooms."""
    graph, draw = script(TOOLS / "rooms.py"), script(TOOLS / "draw_rooms.py")
    table = script(BENCHMARKS / "scaling_table.py")
    rows, plots = table.read_rows(BENCHMARKS / "scaling.jsonl"), script(BENCHMARKS / "scaling_plots.py")
    drawn = {table.plot_file(axis): plots.plot(axis, rows) for axis in table.drawn_axes(rows)}
    return drawn | {"rooms.svg": draw.picture(graph.reduced(graph.graph()), graph.ADVERSARY)}


def script(path: Path) -> ModuleType:
    """A file of ours that is no part of the package, as a module; others beside it may be imported by it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def gallery() -> str:
    rows = []
    for scene, attacks_of in json.loads((TOOLS / "gallery.json").read_text(encoding="utf-8")).items():
        for name, values in attacks_of.items():
            mean = f"{sum(values) / len(values):.1f}"
            rows.append([code(scene), name, mean, f"{min(values):.1f} to {max(values):.1f}", str(len(values))])
    return table(["scene of `tools/make_gallery.py`", "attack or strength", "mean", "worst to best", "pictures"], rows)


def api_parts() -> dict[str, Callable[[], str]]:
    return dict(script(TOOLS / "api_pages.py").parts())


def imprint() -> str:
    rows = []
    for bins, examples in (
        (32, 8),
        (128, 8),
        (128, 16),
        (100, 64),
        (128, 64),
        (256, 64),
        (512, 64),
        (1024, 64),
        (1024, 256),
    ):
        one = imprint_guarantee(bins, examples)
        interval = f"{one.interval[0]} to {one.interval[1]}"
        share = f"{one.expected:.2f} ({one.expected / examples:.0%})"
        rows.append([f"{bins}", f"{examples}", share, interval, f"{one.published:.2f}", f"{one.one_shot:.3f}"])
    heads = ["bins", "examples", "alone on average", "95 %", "the paper's count", "a certain bin holds exactly one"]
    return table(heads, rows)


def distances() -> str:
    rows = []
    for name, distance in DISTANCES.items():
        summary = (type(distance).__doc__ or "").strip().split("\n\n")[0]
        rows.append([f"`{name}`", code(repr(distance)), inline(" ".join(summary.split()))])
    return table(["name", "object", "value"], rows)


def flags() -> str:
    return table(["flag", "meaning"], [[f"`{name}`", words] for name, words in FLAGS.items()])


def papers() -> str:
    rows = []
    for entry in PAPERS.values():
        for scale, words in entry.scales.items():
            first = scale == next(iter(entry.scales))
            rows.append([f"`{entry.name}`" if first else "", entry.source if first else "", f"`{scale}`", words])
    return table(["table", "paper", "scale", "what it runs"], rows)


PARTS: Mapping[str, Callable[[], str]] = {
    "attacks": attacks,
    "models": models,
    "data": data,
    "spec": spec,
    "spec-model": spec_model,
    "spec-data": spec_data,
    "spec-training": spec_training,
    "spec-utility": spec_utility,
    "spec-policy": spec_policy,
    "knowledge": knowledge,
    "protocols": protocols,
    "defenses": defenses,
    "distances": distances,
    "flags": flags,
    "papers": papers,
    "tasks": tasks,
    "measures": measures,
    "findings": findings,
    "caps": caps,
    "controls": controls,
    "executors": executors,
    "rooms": rooms,
    "strength": strength,
    "exact-inversion": exact_inversion,
    "strength-summary": strength_summary,
    "defense-study": defense_study,
    "knowing": knowing,
    "scaling": scaling,
    "executor-runs": executor_runs,
    "executor-settings": executor_settings,
    "imprint": imprint,
    "gallery": gallery,
    **api_parts(),
}


def pydantic_table(model: type[BaseModel]) -> str:
    # Objects are given from Python only; in a file the word is an error.
    fields = {name: field for name, field in model.model_fields.items() if name != "instance"}
    rows = []
    for name, field in fields.items():
        value = field.get_default(call_default_factory=True)
        if value is PydanticUndefined:
            shown = "required"
        elif value is None:
            shown = "unset"
        else:
            shown = "see below" if isinstance(value, Policy) else code(yaml_like(value))
        rows.append([f"`{name}`", shown, str(field.description)])
    return table(["key", "default", "meaning"], rows)


def yaml_like(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(yaml_like(item) for item in value) + "]"
    return str(value)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: Any) -> str:
    return f"`{text}`"


def size(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


def inline(text: str) -> str:
    """Docstring marks as Markdown has them."""
    text = re.sub(r":(?:mod|meth|class|func|data|attr):`([^`]*)`", r"`\1`", text)
    return re.sub(r"``([^`]*)``", r"`\1`", text)


def prose(docstring: str) -> str:
    """The paragraphs of a docstring, each on one line, without doctests."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    kept = [" ".join(p.split()) for p in paragraphs if p.strip() and not p.lstrip().startswith(">>>")]
    text = "\n\n".join(inline(p) for p in kept)
    # A mark of the source list behind a year says nothing to a reader.
    return re.sub(r" \(S\d+\)", "", text)


def regenerate(page: str) -> str:
    """``page`` with every generated part written anew."""

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in PARTS:
            raise ValueError(f"unknown generated part {name!r}: expected one of {', '.join(PARTS)}")
        return f"{match[1]}{PARTS[name]()}\n{match[3]}"

    return _PART.sub(fill, page)


def main(arguments: Sequence[str]) -> int:
    check = "--check" in arguments
    stale = []
    fresh = {path: regenerate(path.read_text(encoding="utf-8")) for path in PAGES}
    fresh |= {ROOT / "docs" / name: text for name, text in pictures().items()}
    for path, after in fresh.items():
        if not path.exists() or path.read_text(encoding="utf-8") != after:
            stale.append(path.name)
            if not check:
                path.write_text(after, encoding="utf-8")
    if stale:
        print(("out of date: " if check else "written: ") + ", ".join(stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
