"""What the documents show is executed, what they point to exists, and what they name is called so."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec import Eagle, cli, drafters
from tests.hub_server import HubServer
from tests.models import jittered, tiny
from tests.test_publishing import a_head
from tests.token_pairs import byte_level
from tests.tokenizers_for_tests import SENTENCES, save_tiny, trained_tokenizer

ROOT = Path(__file__).parent.parent
CARD = ROOT / "model_cards" / "custom_generate"
# Not ours: environments, caches, other work trees.
_SKIPPED = {"build", "dist", "node_modules", "shared"}


def documents() -> list[str]:
    """All documents of the repository, by their path in it."""
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(str(path) for path in found if not any(p.startswith(".") or p in _SKIPPED for p in path.parts))


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text_of(document), flags=re.DOTALL | re.MULTILINE)
    return [body for told, body in fenced if told == language]


@pytest.fixture
def registry():
    """Names that a document registers are forgotten again."""
    before = dict(drafters.NAMED)
    yield
    drafters.NAMED.clear()
    drafters.NAMED.update(before)


# --- snippets ---------------------------------------------------------------------------------------------


def a_target_with_a_head(folder: Path, depth: int = 8) -> tuple[str, str]:
    """Folders of a tiny target and of an untrained EAGLE-3 head for it."""
    tokenizer = trained_tokenizer()
    target = tiny(vocab=len(tokenizer), num_hidden_layers=depth, dtype=torch.float32)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    head = Eagle(a_head(target)).save_pretrained(folder / "head", target, tokenizer=tokenizer, name="org/target")
    return str(folder / "target"), str(head)


def names_for(folder: Path) -> dict:
    """What the snippets take for granted: a target and its folder, a smaller model, a head, a prompt."""
    name, head = a_target_with_a_head(folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    small_model = jittered(AutoModelForCausalLM.from_pretrained(name))
    inputs = tokenizer("The quick brown fox. The quick brown", return_tensors="pt")
    places = {"name": name, "folder": head, "head": head, "saved": str(folder / "saved")}
    models = {"model": hf_specdec.enable(model), "small_model": small_model, "tokenizer": tokenizer}
    return places | models | {"inputs": inputs, "text": "the quick brown fox", "hf_specdec": hf_specdec}


@pytest.mark.parametrize("document", [name for name in documents() if blocks(name, "python") and "cards" not in name])
def test_the_python_of_documents_runs(document, tmp_path, capsys, monkeypatch, registry):
    monkeypatch.chdir(tmp_path)
    names = names_for(tmp_path)
    exec("from transformers import pipeline", names)
    for block in blocks(document, "python"):
        exec(compile(block, document, "exec"), names)
    if document == "README.md":
        assert "mean acceptance length" in capsys.readouterr().out
        assert "generate" not in vars(names["model"])


def commands(document: str) -> list[tuple[str, str]]:
    """Every hf-specdec command that a document shows, with the words behind it."""
    shown = re.findall(r"^(?:[\w/.]*/)?hf-specdec (\w+)((?:.*\\\n)*.*)", "\n".join(blocks(document, "")), flags=re.M)
    return shown + re.findall(r"`hf-specdec (\w+)([^`]*)`", text_of(document))


@pytest.mark.parametrize("document", [name for name in documents() if commands(name)])
def test_commands_in_documents_exist(document, capsys):
    """Their names, and those of their options."""
    for command, words in commands(document):
        with pytest.raises(SystemExit) as stopped:
            cli.main([command, "--help"])
        assert stopped.value.code == 0, command
        known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
        assert set(re.findall(r"(?<!\S)--[\w-]+", words.partition("#")[0])) <= known, command


# --- examples ---------------------------------------------------------------------------------------------


def with_a_published_head(folder: Path, hub: HubServer) -> list[str]:
    target, head = a_target_with_a_head(folder)
    hub.add("org/head", Path(head))
    return [target, "org/head"]


def with_another_tokenizer(folder: Path, hub: HubServer) -> list[str]:
    tokenizer = byte_level(SENTENCES[:2], 300)
    tiny(seed=3, vocab=len(tokenizer), dtype=torch.float32).save_pretrained(folder / "other")
    tokenizer.save_pretrained(folder / "other")
    return [save_tiny(folder / "target"), str(folder / "other")]


def with_prompts(folder: Path, hub: HubServer) -> list[str]:
    lines = [json.dumps({"prompt": f"Write a story about {number} lighthouses."}) for number in range(240)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    data = ["--tokens", "2400", "--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "12"]
    return [save_tiny(folder / "target"), str(folder / "work"), "org/trained", "1s", *data]


def with_a_place_for_the_export(folder: Path, hub: HubServer) -> list[str]:
    return [*a_target_with_a_head(folder), str(folder / "served")]


def two_models(folder: Path, hub: HubServer) -> list[str]:
    return [save_tiny(folder / str(seed), seed=seed) for seed in range(2)]


ARGUMENTS = {
    "06_eagle_from_the_hub.py": with_a_published_head,
    "07_other_tokenizer.py": with_another_tokenizer,
    "08_train_and_publish.py": with_prompts,
    "12_serve_with_vllm.py": with_a_place_for_the_export,
}
SAID = {
    "02_pipeline.py": "without an assistant: None",
    "06_eagle_from_the_hub.py": "tree: ",
    "07_other_tokenizer.py": r"(.*the text is plain generation's: True\n){3}",
    "08_train_and_publish.py": 'assistant="org/trained"',
    "09_own_drafter.py": r"accepted by drafter +echo \d",
    "10_watermark.py": r"with a mark +z = .*, found: True.*\nwithout +z = .*, found: False",
    "12_serve_with_vllm.py": "--speculative-config",
}


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_run(example, tmp_path, monkeypatch, capfd, hub, registry):
    arguments = ARGUMENTS.get(example, two_models)(tmp_path, hub)
    for name, value in hub.environment(tmp_path / "home").items():  # of the commands that an example runs
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    find = importlib.util.find_spec  # nothing is served, whatever is installed
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "vllm" else find(name, *rest))
    monkeypatch.setattr("sys.argv", [example, *arguments])
    runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    said = capfd.readouterr().out
    assert said and re.search(SAID.get(example, ""), said), said
    assert len((ROOT / "examples" / example).read_text().splitlines()) < 60
    assert (example == "08_train_and_publish.py") == ("org/trained" in hub.repositories)


def test_examples_are_numbered_and_named_in_the_documents():
    names = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    assert [name[:2] for name in names] == [f"{number:02}" for number in range(1, len(names) + 1)]
    index = text_of("docs/README.md")
    assert not [name for name in names if f"examples/{name}" not in index]


# --- what is named exists ---------------------------------------------------------------------------------


def test_the_tables_of_the_readme_name_what_exists():
    text = text_of("README.md")
    for name in drafters.NAMED:
        assert f'"{name}"' in text
    for option in hf_specdec.options.OPTION_NAMES:
        assert f"`{option}`" in text


def test_files_named_in_the_documents_exist():
    existing = {path.name for folder in ("hf_specdec", "tests", "docs") for path in (ROOT / folder).rglob("*.py")}
    for document in ("docs/architecture.md", "docs/contributing.md", "docs/exactness.md"):
        assert set(re.findall(r"`(?:[\w]+/)*(\w+\.py)`", text_of(document))) <= existing, document


def option_tables() -> dict[str, dict[str, str]]:
    """Class -> option -> default, as docs/strategies.md tells."""
    found: dict[str, dict[str, str]] = {}
    for section in re.split(r"^## ", text_of("docs/strategies.md"), flags=re.M)[1:]:
        for name, table in re.findall(r"^Options of `(\w+)`:\n\n\|.*\n\|.*\n((?:\|.*\n)+)", section, flags=re.M):
            found[name] = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, flags=re.M))
    return found


def test_every_strategy_and_option_is_told_with_its_default():
    classes = {name: value for name, value in vars(drafters).items() if inspect.isclass(value)}
    wanted = {name for name, value in classes.items() if issubclass(value, drafters.Drafter)} - {"Drafter"}
    tables = option_tables()
    assert set(tables) == wanted | {"DraftTree"}
    for name, told in tables.items():
        parameters = inspect.signature(classes[name]).parameters.values()
        missing = inspect.Parameter.empty
        defaults = {p.name: "required" if p.default is missing else f"`{json_like(p.default)}`" for p in parameters}
        assert {option: default.strip() for option, default in told.items()} == defaults, name


def json_like(value: object) -> str:
    """A default as one writes it: strings in double quotes, long numbers in groups."""
    if isinstance(value, str):
        return json.dumps(value)
    return f"{value:_}" if isinstance(value, int) and not isinstance(value, bool) else repr(value)


def test_every_field_of_the_statistics_is_explained():
    text = text_of("docs/metrics.md")
    assert not [name for name in hf_specdec.SpecStats().to_dict() if f"`{name}`" not in text]


def test_every_format_of_checkpoints_is_listed():
    source = (ROOT / "hf_specdec" / "checkpoints" / "dialects.py").read_text()
    names = set(re.findall(r'Dialect\("([\w .-]+)"', source)) | set(re.findall(r'"(speculators \w+)"', source))
    assert len(names) > 5
    names |= {"specforge", "eagle3"}
    text = text_of("docs/checkpoints.md")
    assert not [name for name in names if f"`{name}`" not in text]


# --- links ------------------------------------------------------------------------------------------------


def prose(document: str) -> str:
    return re.sub(r"```.*?```", "", text_of(document), flags=re.DOTALL)


def links(document: str) -> list[str]:
    return re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(document))


def anchors(document: str) -> set[str]:
    """What the Hub and GitHub make of the headings."""
    made: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(document), flags=re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in made:
            number += 1
        made.add(name)
    return made


@pytest.mark.parametrize("document", documents())
def test_links_lead_somewhere(document):
    for link in links(document):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (ROOT / document).parent / place if place else ROOT / document
        assert target.exists(), link
        assert target.resolve().is_relative_to(ROOT.resolve()), link
        if anchor:
            assert anchor in anchors(str(target.resolve().relative_to(ROOT.resolve()))), link


def test_links_of_kinds_that_break_are_seen():
    """Negative control of the two functions above."""
    assert "how-it-compares" in anchors("README.md") and "nowhere" not in anchors("README.md")
    assert "docs/architecture.md" in links("README.md")


def test_every_page_is_in_the_index():
    pages = {name.removeprefix("docs/") for name in documents() if name.startswith("docs/")} - {"README.md"}
    assert pages <= set(links("docs/README.md"))
    assert "docs/README.md" in links("README.md")


# --- pictures ---------------------------------------------------------------------------------------------


def test_the_picture_of_the_architecture_is_drawn_from_the_imports():
    """docs/architecture.svg; drawn anew by python docs/draw_architecture.py."""
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_architecture.py"))["picture"]()
    assert drawn == (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")


# --- custom_generate --------------------------------------------------------------------------------------

USE = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
import hf_specdec

location, repository = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(location)
model = AutoModelForCausalLM.from_pretrained(location)
inputs = tokenizer(["The quick brown fox. The quick", "Write a short story"], return_tensors="pt", padding=True,
                   padding_side="left")
settings = {"max_new_tokens": 24, "do_sample": False}
plain = model.generate(**inputs, **settings)
recipe = {"custom_generate": repository, "trust_remote_code": True}
for assistant in ("auto", "prompt-lookup", model, False):
    assert torch.equal(plain, model.generate(**inputs, **settings, **recipe, assistant=assistant)), assistant
assert torch.equal(plain, model.generate(**inputs, **settings, **recipe))  # and without a word about it
one = {"input_ids": inputs["input_ids"][:1, -5:]}
text = model.generate(**one, **settings, **recipe, streamer=TextStreamer(tokenizer), assistant=model,
                      stop_strings=["never said"], tokenizer=tokenizer)
assert hf_specdec.last_stats(model).accepted > 0 and "generate" not in vars(model)
assert torch.equal(text, model.generate(**one, **settings))
try:
    model.generate(**inputs, **settings, **recipe, num_beams=2)
except ValueError as error:
    assert "num_beams" in str(error)
print("all the same")
"""


@pytest.mark.parametrize("place", ["hub", "folder"])
def test_custom_generate_decodes_exactly(place, tmp_path):
    """In a process of its own, as the module's cache is the process's."""
    location = save_tiny(tmp_path / "target")
    with HubServer() as hub:
        hub.add("org/hf-specdec", CARD)
        environment = {**os.environ, **hub.environment(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
        repository = "org/hf-specdec" if place == "hub" else str(CARD)
        command = [sys.executable, "-c", USE, location, repository]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
        fetched = {name for name in hub.served if name.endswith(("generate.py", "requirements.txt"))}
    assert done.returncode == 0, done.stderr
    assert "all the same" in done.stdout
    assert len(fetched) == (2 if place == "hub" else 0)


def test_a_model_published_with_custom_generate_uses_it(tmp_path):
    """A repository of weights beside which the recipe lies: from_pretrained makes it the model's own `generate`."""
    location = Path(save_tiny(tmp_path / "target"))
    (location / "custom_generate").mkdir()
    for path in (CARD / "custom_generate").glob("*.*"):
        (location / "custom_generate" / path.name).write_bytes(path.read_bytes())
    script = """
import sys
import torch
from transformers import AutoModelForCausalLM
import hf_specdec

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
settings = {"max_new_tokens": 12, "do_sample": False}
assert "generate" in vars(model)
drafted = model.generate(ids, **settings)
assert hf_specdec.last_stats(model).rounds > 0
assert torch.equal(drafted, model.generate(ids, **settings, assistant=False))
own = vars(model)["generate"]
hf_specdec.enable(model, assistant="prompt-lookup")
assert torch.equal(drafted, model.generate(ids, **settings))
hf_specdec.disable(model)
assert vars(model)["generate"] is own
assert torch.equal(drafted, model.generate(ids, **settings))
"""
    with HubServer() as hub:
        environment = {**os.environ, **hub.environment(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", script, str(location)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr


def test_the_card_of_custom_generate_can_be_published():
    card = ModelCard.load(CARD / "README.md")
    assert "custom_generate" in card.data.tags and card.data.library_name == "transformers"
    needed = (CARD / "custom_generate" / "requirements.txt").read_text().split()
    assert needed == [f"hf_specdec>={hf_specdec.__version__}"]
    snippets = blocks("model_cards/custom_generate/README.md", "python")
    for word in re.findall(
        r"`(\w+)`", text_of("model_cards/custom_generate/README.md").split("come along:")[1].split("\n")[0]
    ):
        assert word in hf_specdec.options.OPTION_NAMES
    assert all(compile(snippet, "card", "exec") for snippet in snippets)
