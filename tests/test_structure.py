"""The package keeps its shape: imports point one way, private host names stay in one package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import hf_specdec

PACKAGE = Path(hf_specdec.__file__).parent

# Layers from the bottom up; a module imports only from layers below its own (or, within a layer, from the left).
LAYERS = [
    ["accept", "options", "noise", "stats", "schedule", "vocabulary", "versions", "files", "pictures"],
    ["chains", "paths", "rounds", "history", "recycling"],
    ["host.names", "host.attention", "host.models", "host.encoders", "host.layers", "host.processes", "host.rotary"],
    ["host.settings", "host.processors", "host.caches", "host.tree_masks", "host.passes", "host"],
    ["trees"],
    ["fingerprints", "provenance"],
    ["heads.eagle", "heads"],
    ["state", "slots", "halves", "cached_model", "request"],
    ["verify", "scorer"],
    ["stopping", "streaming", "tracing", "recording", "room"],
    ["judge"],
    ["drafters.base", "drafters.lookup_on_device", "drafters.prompt_lookup", "drafters.suffix"],
    ["drafters.token_recycling"],
    ["drafters.drawing", "drafters.translation", "drafters.cross_vocabulary"],
    ["drafters.encoder_decoder", "drafters.draft_model"],
    ["drafters.early_exit", "drafters.head_reader", "drafters.eagle", "drafters.parallel"],
    ["drafters.scheduled", "drafters.auto", "drafters"],
    ["checkpoints.connection", "checkpoints.headers", "checkpoints.files", "checkpoints.tokenizers"],
    ["checkpoints.names", "checkpoints.vocabulary", "checkpoints.dialects"],
    ["checkpoints.translate", "checkpoints.load", "checkpoints.write", "checkpoints"],
    ["loop", "candidates", "hub"],
    ["demo_model", "loading", "rows"],
    ["checks", "checks.findings", "checks.sides", "checks.tokenizers", "checks.shapes", "checks.memory", "checks.pair"],
    ["generation"],
    ["checks.measure", "checks.compat"],
    ["publishing.saving", "publishing.card", "publishing.pushing", "publishing.export", "publishing"],
    ["public", ""],
    ["pages.pieces", "pages.run", "pages.charts", "pages.page", "pages"],
    ["checks.report", "checks.tables", "checks.documents", "checks.questions", "checks.variants", "checks.settings"],
    ["checks.resuming", "checks.running", "checks.plots", "checks.bench", "checks.show", "demo"],
    ["training.examples", "training.themes", "training.writing", "training.prompts", "training.answers", "training"],
    ["training.losses", "training.features"],
    ["training.recipes.base", "training.recipes.conditional_drop", "training.recipes.heads"],
    ["training.recipes.students", "training.recipes.eagle3", "training.recipes.p_eagle"],
    ["training.recipes.pard", "training.recipes.draft", "training.recipes"],
    ["training.options", "training.evaluate", "training.curves", "training.checkpoint"],
    ["training.loop", "training.console"],
    [
        "cli.shared",
        "cli.calling",
        "cli.demo",
        "cli.generate",
        "cli.report",
        "cli.check",
        "cli.bench",
        "cli.data",
        "cli.train",
    ],
    ["cli.publish", "cli", "cli.__main__"],
]
ORDER = [module for layer in LAYERS for module in layer]


def modules() -> dict[str, Path]:
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, inside functions too."""
    known, found = set(modules()), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hf_specdec":
            parent = node.module.removeprefix("hf_specdec").removeprefix(".")
            children = {f"{parent}.{alias.name}".removeprefix(".") for alias in node.names}
            found |= (children & known) or {parent}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("hf_specdec.") for alias in node.names} & known
    return found


def test_every_module_has_a_place():
    assert set(modules()) == set(ORDER)


def test_imports_point_down():
    for name, path in modules().items():
        upward = {other for other in imported(path) - {name} if ORDER.index(other) > ORDER.index(name)}
        assert not upward, f"hf_specdec.{name} imports {upward} from above it"


def test_only_the_host_package_touches_private_names_of_transformers():
    ours = {"_Attachment", "_hf_specdec", "__dict__", "_orig_mod"}  # the last is torch.compile's
    for name, path in modules().items():
        if name.split(".")[0] == "host":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr not in ours:
                holder = ast.unparse(node.value)
                is_own = holder == "self" or node.attr.startswith("__") or holder in {"copy", "loop"}
                assert is_own, f"{path.name}: {ast.unparse(node)}"


def test_functions_fit_a_screen():
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                docstring = ast.get_docstring(node, clean=False)
                lines = node.end_lineno - node.lineno + 1 - (docstring.count("\n") + 1 if docstring else 0)
                assert lines <= 60, f"{path.name}: {node.name} has {lines} lines"


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, hf_specdec; print({'torch', 'transformers'} & set(sys.modules), 'Auto' in dir(hf_specdec))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["set()", "True"]


def test_the_package_lists_its_public_names_and_no_others():
    listed = [name for name in dir(hf_specdec) if not name.startswith("__")]
    assert listed == sorted(hf_specdec.__all__)


def test_names_are_found_wherever_one_begins():
    code = """
from hf_specdec.drafters import Suffix
from hf_specdec.generation import resolve_assistant
import hf_specdec
from hf_specdec import *
assert hf_specdec.Suffix is Suffix
assert set(hf_specdec.__all__) <= set(globals())
assert not hasattr(hf_specdec, "a.b")
try:
    hf_specdec.nothing
except AttributeError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "module 'hf_specdec' has no attribute 'nothing'\n"
