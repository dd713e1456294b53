"""The rooms of the package and who imports whom, read off the source: late and type-checking imports included.

    python tools/rooms.py        print the graph, or what is wrong with it (exit code 1)

A room may import from the rooms before it and from no other, so there is no cycle. The adversary's rooms may not see
private data, the client's side, or anything that compares with the truth.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "leakscope"

#: Every room in the order in which they may import, and what it is for.
ROOMS: Mapping[str, str] = {
    "contracts": "the vocabulary: knowledge, observation, protocol, defense and channel, attack, reconstruction, task, "
    "inputs; settings and registry",
    "data": "private examples: the embedded default, readers of public data sets, splits among clients",
    "models": "reference victims, one family a file; models split between workers",
    "network": "reading somebody's model: one recorder, layers, heads, chains, kinks, planted layers",
    "federation": "how an update comes about: FedSGD, FedAvg, vertical, training over rounds",
    "defenses": "one defence a file, each with its channel",
    "labels": "label and label-count recovery, pure functions",
    "equations": "linear systems, constraints, residual blocks, last layers, index matrices, output gradients",
    "matching": "the search engine: distances, priors, canvas, simulations, optimisers, one loop, least squares",
    "attacks": "one paper a file",
    "limits": "theory only: identifiability, ranks, published bounds, Cramér–Rao, diagnosis",
    "metrics": "the table of measures; assignment, image, label and perceptual measures, intervals",
    "results": "what an audit leaves behind: typed rows, store, policy, verdict, summary",
    "report": "results in, pages and text tables out",
    "capture": "reading what real systems send: state dicts, arrays, files, Flower's messages; sign check, buffers",
    "audit": "spec, set-up, plan, jobs (attempts, controls, findings), executors, the run",
    "papers": "published tables as data, and the settings that reproduce them",
    "integrations": "other people's libraries: Flower, Opacus, pytest; each loaded only when it is used",
    "cli": "arguments in, calls out",
}
#: What the adversary works in, and what must stay out of its reach.
ADVERSARY = ("labels", "equations", "matching", "attacks")
TRUTH = (
    "data",
    "federation",
    "defenses",
    "metrics",
    "results",
    "report",
    "capture",
    "audit",
    "papers",
    "integrations",
    "cli",
    "limits",
)


def room_of(path: Path) -> str | None:
    """The room of a source file; None for the package's own front."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else None


def imports_of(path: Path) -> Iterator[str]:
    """Every room that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            # By name: a room that is loaded on first use is imported all the same.
            names = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        for name in names:
            head, _, rest = name.partition(".")
            if head == "leakscope" and rest.split(".")[0] in ROOMS:
                yield rest.split(".")[0]


def graph() -> dict[str, set[str]]:
    """For each room the rooms that it imports."""
    edges: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in sorted(SOURCE.rglob("*.py")):
        room = room_of(path)
        if room is not None:
            edges.setdefault(room, set()).update(other for other in imports_of(path) if other != room)
    return edges


def problems() -> list[str]:
    """What is wrong with the graph, one line each."""
    order = list(ROOMS)
    lines = [f"{room}: is no room that the list knows" for room in graph() if room not in ROOMS]
    for path in sorted(SOURCE.rglob("*.py")):
        room = room_of(path)
        for other in sorted(set(imports_of(path))) if room in ROOMS else ():
            place = path.relative_to(SOURCE)
            if other != room and order.index(other) > order.index(room):
                lines.append(f"{place}: imports {other}, which comes after {room}")
            if room in ADVERSARY and other in TRUTH:
                lines.append(f"{place}: {room} must not see {other}")
    return lines


def reduced(edges: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Only the edges that no longer way replaces, for the drawing."""

    def reach(room: str) -> set[str]:
        return set().union(*({other} | reach(other) for other in edges[room])) if edges[room] else set()

    found = {}
    for room, others in edges.items():
        through = set().union(*(reach(other) for other in others)) if others else set()
        found[room] = sorted(others - through, key=list(ROOMS).index)
    return found


def drawing() -> str:
    """The graph as Mermaid and as a table."""
    edges = graph()
    lines = ["```mermaid", "graph BT"]
    lines += [f"    {room} --> {other}" for room, others in reduced(edges).items() for other in others]
    lines += ["```", "", "| room | what it is for | imports from |", "|---|---|---|"]
    for room, words in ROOMS.items():
        others = ", ".join(sorted(edges[room], key=list(ROOMS).index)) or "nothing"
        lines.append(f"| `{room}` | {words} | {others} |")
    return "\n".join(lines)


def main() -> int:
    wrong = problems()
    print("\n".join(wrong) if wrong else drawing())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
