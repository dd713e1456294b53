"""What a verdict is about: the statements that a store keeps, and what its rows say of attacks and of defences."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from leakscope.results.names import parts_of
from leakscope.results.records import Row, counted, items, mapping
from leakscope.results.store import Store
from leakscope.results.verdict import Verdict

#: Settings of attacks that say how long they try.
_EFFORTS = ("iterations", "steps", "restarts")


def audited_lines(store: Store, rows: Sequence[Row], verdict: Verdict) -> list[dict[str, Any]]:
    """Return a text for each statement, and whether it is a warning."""
    stored = [mapping(line) for line in items(store.meta("audited"))]
    newest, attempts = mapping(store.meta("newest")), [row for row in rows if row.counts]
    told = [
        *({"text": str(line["text"]), "warning": line.get("warning") is True} for line in stored if line.get("text")),
        *({"text": text, "warning": False} for text in attack_lines(attempts, newest)),
        *scale_lines(verdict),
    ]
    return [*(line for line in told if line["warning"]), *(line for line in told if not line["warning"])]


def attack_lines(attempts: Sequence[Row], newest: Mapping[str, Any]) -> list[str]:
    """Say which attacks ran, with their effort, which gave nothing or have not run, and what is of an earlier run."""
    parts, fates = parts_of(attempts), dict[str, Counter[str]]()
    names: dict[str, str] = {}
    for row in attempts:
        names[row.job.attack] = row.job.attack_name
        fates.setdefault(row.job.attack, Counter())[row.status] += 1
    now, earlier = mapping(newest.get("attacks")), mapping(newest.get("earlier"))
    ran = [attack for attack, fate in fates.items() if fate["done"]]
    lines = []
    if attempts:
        what = ", ".join(names[attack] + _effort(parts[attack].options) for attack in ran)
        clients = {row.job.indices or (row.job.batch,) for row in attempts}
        examples, each = len(set().union(*clients)), max(map(len, clients))
        seeds = len({row.job.seed for row in attempts})
        size = f"{counted(seeds, 'seed')}; {counted(examples, 'example')}, {each} a client"
        lines.append(f"Attacks: {len(ran)} ran{': ' if what else ''}{what}; {size}.")
    for status, title in (("refused", "Attacks refused"), ("failed", "Attacks that failed")):
        if own := [names[attack] for attack, fate in fates.items() if fate[status] and not fate["done"]]:
            lines.append(f"{title}: {', '.join(own)}.")
    if waiting := [str(name) for attack, name in now.items() if attack not in fates]:
        lines.append(f"Attacks not run yet: {', '.join(waiting)}.")
    before = [f"{names[one]} ({counted(int(count), 'job')})" for one, count in earlier.items() if one in fates]
    if before:
        lines.append(f"From an earlier run in this folder, and counted: {', '.join(before)}.")
    if apart := [names[attack] for attack in fates if now and attack not in now]:
        lines.append(f"Not asked for this time: {', '.join(apart)}. Choose another --out to leave them out.")
    return lines


def _effort(options: Mapping[str, Any]) -> str:
    told = [f"{name} {options[name]}" for name in _EFFORTS if options.get(name) is not None]
    told += ["without knowing the defence"] if options.get("ignore_defense") is True else []
    return f" ({', '.join(told)})" if told else ""


def scale_lines(verdict: Verdict) -> list[dict[str, Any]]:
    """Say of each defended scenario how large the defence's change is; warn where it does nothing, or too much."""
    lines = []
    for setting in verdict.settings:
        scale = setting.scale
        if scale is None or setting.defense == "none":
            continue
        text, warning = f"{setting.name}: the update's norm is {scale.update:.2g}", scale.unchanged or scale.lost
        if scale.unchanged:
            text += f", and {setting.defense_short} leaves it equal in every bit. It protects nothing here."
        elif scale.sent == 0:
            text += f", and {setting.defense_short} sends zeros: nothing can be learnt from it."
        else:
            text += f", {setting.defense_short} changes it by {scale.change:.2g} ({scale.ratio:.2g} times the update)."
        if scale.lost and scale.sent > 0:
            text += " The update is lost in it, and little can be learnt from what is sent. Use less noise."
        lines.append({"text": text, "warning": warning})
    return lines
