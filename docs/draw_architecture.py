"""Draws docs/architecture.svg from the imports of the package: python docs/draw_architecture.py

A box is a package, or some modules that belong together; rows follow from who imports whom. Arrows that others say
already (from A to C beside A to B and B to C) are left out. `tests/test_documents.py` fails where the picture is old.
"""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_specdec"

# What is drawn as one box: modules, or packages with all that is in them (more special names win), and what it does.
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "accept": ("the rules, as functions of tensors", ("accept",)),
    "counts and choices": (
        "statistics, draft lengths, noise",
        ("options", "noise", "stats", "schedule", "vocabulary", "versions", "files", "pictures"),
    ),
    "texts": ("indexes of tokens, trees", ("chains", "paths", "rounds", "history", "recycling")),
    "host": ("private names of Transformers", ("host", "trees")),
    "identity": ("which weights fit which target", ("fingerprints", "provenance")),
    "heads": ("EAGLE heads as modules", ("heads",)),
    "state": ("texts, caches, passes", ("state", "slots", "halves", "cached_model", "request")),
    "verify": ("the pass over a draft, its scores", ("verify", "scorer")),
    "judge": ("processors, rule, stopping", ("judge", "stopping", "streaming", "tracing", "recording", "room")),
    "drafters": ("the strategies", ("drafters",)),
    "checkpoints": ("published formats of heads", ("checkpoints",)),
    "loop": ("the rounds of a call", ("loop", "candidates")),
    "hub": ("folders and Hub ids", ("hub", "loading", "demo_model", "rows")),
    "checks of a pair": (
        "vocabularies, shapes, memory",
        ("checks.findings", "checks.sides", "checks.tokenizers", "checks.shapes", "checks.memory", "checks.pair"),
    ),
    "generation": ("enable, generate, speculate", ("generation",)),
    "check": ("does this drafter fit, will it pay?", ("checks.compat", "checks.measure")),
    "publishing": ("save, card, push, export", ("publishing",)),
    "the package": ("public names", ("", "public")),
    "bench": ("demo, bench, reports", ("checks", "pages", "demo")),
    "training": ("data, recipes, loop", ("training",)),
    "cli": ("hf-specdec", ("cli",)),
}
WIDTH, BOX, HEIGHT, GAP, MARGIN = 1180, 232, 58, 48, 22


def modules() -> dict[str, Path]:
    """Name within the package -> file; the package itself is ""."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, known: set[str]) -> set[str]:
    """Modules of the package that a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hf_specdec":
            parent = (node.module or "").removeprefix("hf_specdec").removeprefix(".")
            children = {f"{parent}.{alias.name}".removeprefix(".") for alias in node.names}
            found |= (children & known) or {parent}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("hf_specdec.") for alias in node.names} & known
    return found


def group_of(module: str) -> str:
    """The box of a module: that of its longest name in GROUPS.

    Raises:
        ValueError: if it has none.
    """
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        for group, (_, members) in GROUPS.items():
            if ".".join(parts[:length]) in members:
                return group
    raise ValueError(f"hf_specdec.{module} is in no box; add it to GROUPS in docs/draw_architecture.py.")


def edges() -> dict[str, set[str]]:
    """Box -> boxes it imports from, itself aside."""
    files = modules()
    found: dict[str, set[str]] = {group: set() for group in GROUPS}
    for module, path in files.items():
        found[group_of(module)] |= {group_of(other) for other in imports_of(path, set(files))}
    return {group: others - {group} for group, others in found.items()}


def ranks(graph: dict[str, set[str]]) -> dict[str, int]:
    """Box -> row from the bottom: one above the highest that it imports from.

    Raises:
        ValueError: if boxes import each other in a circle.
    """
    known: dict[str, int] = {}

    def rank(group: str, above: tuple[str, ...]) -> int:
        if group in above:
            raise ValueError(f"Boxes import each other: {' -> '.join([*above, group])}; divide one of them.")
        if group not in known:
            known[group] = max((rank(other, (*above, group)) + 1 for other in sorted(graph[group])), default=0)
        return known[group]

    for group in graph:
        rank(group, ())
    return known


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without arrows that longer ways say already."""

    def below(group: str) -> set[str]:
        return graph[group].union(*map(below, graph[group]))

    return {group: others - set().union(*map(below, others)) for group, others in graph.items()}


def places(rows: list[list[str]], graph: dict[str, set[str]]) -> dict[str, tuple[float, float]]:
    """Box -> its centre. Each row is ordered by where the boxes stand that it is tied to."""
    ties = {group: graph[group] | {other for other in graph if group in graph[other]} for group in graph}
    where = {group: float(index) for row in rows for index, group in enumerate(row)}
    for _ in range(8):
        for row in rows:
            row.sort(key=lambda group: (sum(where[o] for o in sorted(ties[group])) / max(1, len(ties[group])), group))
            for index, group in enumerate(row):
                where[group] = (index + 1) / (len(row) + 1)
    centres = {}
    for level, row in enumerate(reversed(rows)):
        for index, group in enumerate(row):
            step = (WIDTH - 2 * MARGIN) / len(row)
            centres[group] = (MARGIN + step * (index + 0.5), MARGIN + HEIGHT / 2 + level * (HEIGHT + GAP))
    return centres


def arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """From the bottom of a box to the top of another."""
    (x1, y1), (x2, y2) = (start[0], start[1] + HEIGHT / 2), (end[0], end[1] - HEIGHT / 2 - 5)
    bend = min(GAP, (y2 - y1) / 2)
    curve = f"{x1:.0f},{y1 + bend:.0f} {x2:.0f},{y2 - bend:.0f} {x2:.0f},{y2:.0f}"
    return f'<path class="arrow" d="M{x1:.0f},{y1:.0f} C{curve}"/>'


def box(group: str, centre: tuple[float, float]) -> str:
    """A box with its name and what it does."""
    x, y = centre
    return (
        f"<g><title>{escape(', '.join(name or 'hf_specdec' for name in GROUPS[group][1]))}</title>"
        f'<rect x="{x - BOX / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{BOX}" height="{HEIGHT}" rx="7"/>'
        f'<text class="name" x="{x:.0f}" y="{y - 6:.0f}">{escape(group)}</text>'
        f'<text class="what" x="{x:.0f}" y="{y + 15:.0f}">{escape(GROUPS[group][0])}</text></g>'
    )


STYLE = """
text { font-family: system-ui, sans-serif; text-anchor: middle; fill: #1b1b1b }
.name { font-size: 17px; font-weight: 600 }
.what { font-size: 11.5px; fill: #444 }
rect { fill: #fff; stroke: #31597f; stroke-width: 1.5 }
.ground { fill: #f7f8fa; stroke: none }
.arrow { fill: none; stroke: #31597f; stroke-opacity: .6; stroke-width: 1.4; marker-end: url(#tip) }
"""


def picture() -> str:
    """The SVG."""
    graph = edges()
    level = ranks(graph)
    rows = [[group for group in GROUPS if level[group] == row] for row in range(max(level.values()) + 1)]
    arrows = reduced(graph)
    centres = places(rows, arrows)
    height = 2 * MARGIN + len(rows) * HEIGHT + (len(rows) - 1) * GAP
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#31597f"/></marker>'
    )
    lines = [arrow(centres[a], centres[b]) for a in GROUPS for b in sorted(arrows[a])]
    boxes = [box(group, centres[group]) for group in GROUPS]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            "<title>Packages of hf_specdec and who imports whom, drawn by docs/draw_architecture.py</title>",
            f"<style>{STYLE}</style><defs>{tip}</defs>",
            f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
            *lines,
            *boxes,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    (ROOT / "docs" / "architecture.svg").write_text(picture(), encoding="utf-8")
