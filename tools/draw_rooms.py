"""The graph of the rooms as a picture: layer above layer, arrows from who imports to what is imported.

The drawing needs no library and no network; GitHub and the site show the same file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDTH, BOX, TALL, STEP, MARGIN = 720, (104, 30), 30, 74, 16
#: A file by itself has no page's style sheet, and is shown on light and on dark pages.
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24324a;text-anchor:middle}rect{fill:#e8eefb;stroke:#2f6fde}"
    "path{fill:none;stroke:#8794a6;stroke-width:1.4}.adversary{fill:#fdeee0;stroke:#d9822b}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf7}rect{fill:#22304a;stroke:#86aefc}"
    ".adversary{fill:#43301c;stroke:#e0a15c}}"
)


def layers(edges: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Rooms by the longest way down; within a layer near to what they import.

    >>> layers({"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]})
    [['a'], ['b', 'c'], ['d']]
    """
    depth: dict[str, int] = {}

    def deep(room: str) -> int:
        if room not in depth:
            depth[room] = 1 + max((deep(other) for other in edges[room]), default=-1)
        return depth[room]

    rows: list[list[str]] = [[] for _ in range(1 + max(map(deep, edges)))]
    for room in edges:
        rows[depth[room]].append(room)
    place: dict[str, float] = {}
    for row in rows:
        row.sort(key=lambda room: sum(place[o] for o in edges[room]) / len(edges[room]) if edges[room] else 0.5)
        place |= {room: (number + 1) / (len(row) + 1) for number, room in enumerate(row)}
    return rows


def picture(edges: Mapping[str, Sequence[str]], adversary: Sequence[str]) -> str:
    """The drawing as the text of an SVG file."""
    rows = layers(edges)
    height = 2 * MARGIN + TALL + (len(rows) - 1) * STEP
    places = {
        room: (WIDTH * (number + 1) / (len(row) + 1), height - MARGIN - TALL / 2 - level * STEP)
        for level, row in enumerate(rows)
        for number, room in enumerate(row)
    }
    arrows, boxes = [], []
    for room, others in edges.items():
        x, y = places[room]
        kind = ' class="adversary"' if room in adversary else ""
        left, top = x - BOX[0] / 2, y - TALL / 2
        boxes.append(f'<rect{kind} x="{left:.1f}" y="{top:.1f}" width="{BOX[0]}" height="{TALL}" rx="6"/>')
        boxes.append(f'<text x="{x:.1f}" y="{y + 4.5:.1f}">{room}</text>')
        for other in others:
            a, b = places[other]
            start, end = y + TALL / 2, b - TALL / 2
            bend = (end - start) / 2
            curve = f"M{x:.1f} {start:.1f}C{x:.1f} {start + bend:.1f} {a:.1f} {end - bend:.1f} {a:.1f} {end - 3:.1f}"
            arrows.append(f'<path marker-end="url(#tip)" d="{curve}"/>')
    words = "; ".join(f"{room} imports {', '.join(others)}" for room, others in edges.items() if others)
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M1 1L7 4L1 7"/></marker>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>Who imports whom</title><desc>{words}.</desc><style>{STYLE}</style><defs>{tip}</defs>"
        f"{''.join(arrows)}{''.join(boxes)}</svg>\n"
    )
