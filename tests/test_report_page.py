"""The page of a run: everything escaped, every token there, readable and usable in a real browser."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import shutil
import subprocess
from base64 import b64encode
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hf_specdec import Finding, Trace, pages
from hf_specdec.cli import main
from hf_specdec.pages import Run, page, write_page
from hf_specdec.pages.pieces import pieces_of
from hf_specdec.rounds import RowRound, TracedRound
from tests.browser import CHROMIUM, Browser
from tests.tokenizers_for_tests import SENTENCES, save_tiny, trained_tokenizer

NODE = shutil.which("node")
EVIL = '<script>alert("1")</script>\n</script><!-- & <img src=x onerror=alert(2)>'
TEXTS = [f"{EVIL}  two  spaces\r\n\n\ttab 😀🎉 naïve 日本語 🏳️‍🌈 end", "The quick brown fox, and the dog sleeps on."]
PROMPTS = [f"\nsay {EVIL}", "😀"]
ARMS = ["suffix", "<b>model</b>", "prompt-lookup", "token-recycling", "a", "b", "c"]


def made_up_trace(tokenizer, texts=TEXTS, seed=0) -> Trace:
    """Rounds of all kinds over given texts: chains and trees that are partly right, rounds without a draft."""
    pick = random.Random(seed)
    trace = Trace("auto", [tokenizer.encode(prompt) for prompt in PROMPTS[: len(texts)]])
    left = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]
    while any(left):
        rows = [_round(row, tokens, pick, len(tokenizer)) for row, tokens in enumerate(left) if tokens]
        for part in rows:
            del left[part.row][: len(part.emitted)]
        phase = "verify" if trace.rounds else "prefill"
        trace.rounds.append(TracedRound({"draft": 0.001, phase: 0.03, "accept": 0.002}, rows))
    return trace


def _round(row, tokens, pick, vocab) -> RowRound:
    right, wrong = tokens[: pick.randrange(5)], pick.randrange(4)
    noise = [(tokens[len(right)] if len(right) < len(tokens) else 0) + 1 + i for i in range(wrong)]
    drafted, kept = [*right, *(token % vocab for token in noise)], list(range(len(right)))
    parents = None
    if wrong > 1 and pick.random() < 0.5:  # branches that leave the text at the same place
        parents = [*range(-1, len(right) - 1), *[len(right) - 1] * wrong]
    arm = pick.choice(ARMS) if drafted else None
    return RowRound(row, arm, drafted, parents, kept, tokens[: len(right) + 1])


@pytest.fixture(scope="module")
def tokenizer():
    return trained_tokenizer()


@pytest.fixture(scope="module")
def run(tokenizer):
    findings = [Finding("cache", "ok", "can be rolled back"), Finding("vocabulary <i>", "warning", EVIL, speed=EVIL)]
    findings.append(Finding("shapes", "error", "do not fit", correctness="refused"))
    made = Run.of(made_up_trace(tokenizer), tokenizer, {"target": f"org/{EVIL}", "made": "today"})
    return Run(made.trace, made.prompts, made.pieces, made.about, findings)


class Seen(HTMLParser):
    """What a page holds: tags, the text of each generated text, refused tokens, scripts."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts, self.refused, self.labels, self.scripts = [], [], [], [], []
        self.open: list[tuple[str, dict]] = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if tag not in ("meta", "input", "br"):
            self.open.append((tag, attributes))
        if attributes.get("class") == "text":
            self.texts.append("")
        if attributes.get("class") == "round":
            self.labels.append(attributes["aria-label"])
        if tag == "del":
            self.refused.append("")

    def handle_endtag(self, tag):
        if self.open:
            assert self.open.pop()[0] == tag

    def handle_data(self, data):
        inside = [tag for tag, _ in self.open]
        if "del" in inside:
            self.refused[-1] += data
        elif any(attributes.get("class") == "text" for _, attributes in self.open):
            self.texts[-1] += data
        elif inside and inside[-1] == "script":
            self.scripts.append(data)


def emitted(run, row):
    parts = zip(run.trace.rounds, run.pieces, strict=True)
    return [
        text
        for turn, texts in parts
        for p, t in zip(turn.rows, texts, strict=True)
        if p.row == row
        for text in t.emitted
    ]


@pytest.mark.parametrize("seed", range(5))
def test_pieces_make_up_the_text(tokenizer, seed):
    trace = made_up_trace(tokenizer, seed=seed)
    run = Run.of(trace, tokenizer)
    assert run.prompts == [tokenizer.decode(prompt) for prompt in trace.prompts]
    for row, text in enumerate(TEXTS):
        assert "".join(emitted(run, row)) == text + tokenizer.eos_token == tokenizer.decode(trace.tokens(row))
    for turn, texts in zip(trace.rounds, run.pieces, strict=True):
        for part, pieces in zip(turn.rows, texts, strict=True):
            for place in part.kept:  # a drafted token that stayed looks as it does in the text
                assert pieces.drafted[place] == pieces.emitted[part.kept.index(place)]


def test_a_character_of_several_tokens_belongs_to_the_last(tokenizer):
    ids = tokenizer.encode("a😀b")
    assert len(ids) == 6
    trace = Trace("x", [[]], [TracedRound({}, [RowRound(0, "x", ids, None, list(range(6)), ids)])])
    ((pieces,),) = pieces_of(trace, tokenizer)
    assert pieces.emitted == pieces.drafted == ["a", "", "", "", "😀", "b"]


def test_the_page_holds_every_token_and_nothing_that_texts_smuggle_in(run):
    html = page(run)
    seen = Seen(html)
    assert not seen.open
    assert seen.texts == ["".join(emitted(run, row)) for row in range(2)]
    names = [tag for tag, _ in seen.tags]
    assert names.count("script") == 2
    assert names.count("b") == 2 * len(run.findings)
    assert not {"img", "link", "iframe", "object", "base", "form"} & set(names)
    assert not any(name.startswith("on") or name in ("src", "href", "style") for _, a in seen.tags for name in a)
    assert any("<b>model</b>" in label for label in seen.labels)
    in_legend = len(run.trace.arms) + 3
    assert sum(a.get("class") == "t" for _, a in seen.tags) == run.trace.stats().emitted + in_legend
    data = json.loads(seen.scripts[0])
    assert [len(rounds) for rounds in data["rows"]] == [
        sum(part.row == row for turn in run.trace.rounds for part in turn.rows) for row in range(2)
    ]
    assert "http" not in re.sub(r"http-equiv", "", html)


def test_refused_tokens_are_all_told(run):
    seen = Seen(page(run))
    others = sum(int(text[1:]) for text in seen.refused[2:] if re.fullmatch(r"\+\d+", text))
    shown = sum(not re.fullmatch(r"\+\d+", text) for text in seen.refused[2:])
    stats = run.trace.stats()
    assert shown + others == stats.drafted - stats.accepted > 0


def test_a_run_survives_its_file(run, tmp_path):
    path = run.save(tmp_path / "run.json")
    assert Run.load(path) == run
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]
    assert write_page(Run.load(path), tmp_path / "page.html").read_text(encoding="utf-8") == page(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("format"), "does not say"),
        (lambda d: d.update(version=2), "version=2 is unknown"),
        (lambda d: d.pop("pieces"), "a part is missing"),
        (lambda d: d["pieces"].pop(), "one text for every"),
        (lambda d: d["pieces"][0][0]["emitted"].append("x"), "one text for every"),
        (lambda d: d["pieces"][0][0].update(emitted=[1]), "must hold texts"),
        (lambda d: d["prompts"].pop(), "one text for every"),
        (lambda d: d.update(about=["target"]), "a part is missing"),
        (lambda d: d.update(about={"target": 1}), "must hold texts"),
        (lambda d: d["findings"][0].update(level="fine"), "a level of ok, warning, error"),
        (lambda d: d["findings"][0].update(found=None), "must hold texts"),
        (lambda d: d["findings"][0].pop("topic"), "a part is missing"),
        (lambda d: d["trace"].update(rounds=[{}]), "no trace of a call"),
    ],
)
def test_a_damaged_run_is_refused(run, tmp_path, change, message):
    path = run.save(tmp_path / "run.json")
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message) as refused:
        Run.load(path)
    assert "run.json is no run" in str(refused.value)


def test_an_empty_run_has_a_page(tokenizer):
    """A call that failed in its first pass, and one that never drafted."""
    for rounds in ([], [TracedRound({"prefill": 0.1}, [RowRound(0, None, [], None, [], [7])])]):
        seen = Seen(page(Run.of(Trace("x", [[5]], rounds), tokenizer)))
        assert len(seen.texts) == 1


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("report") / "target")


def test_commands_record_and_show(target, tmp_path, capsys):
    model = ["--target", target, "--dtype", "float32", "--device", "cpu", "--max-new-tokens", "12"]
    recorded, shown = str(tmp_path / "run.json"), str(tmp_path / "page.html")
    assert main(["generate", *model, "--prompt", SENTENCES[0], "--assistant", "auto", "--trace", recorded]) == 0
    said = capsys.readouterr().out.removesuffix("\n")
    assert main(["report", recorded, "--output", shown]) == 0
    assert capsys.readouterr().out == f"{shown}\n"
    run = Run.load(recorded)
    text = re.sub("<(pad|start|end)>", "", "".join(emitted(run, 0)))
    assert text == said.rstrip("\N{REPLACEMENT CHARACTER}")  # the tiny model leaves characters unfinished
    assert run.about["assistant"] == "auto"
    assert {finding.topic for finding in run.findings} >= {"cache"}
    assert Seen((tmp_path / "page.html").read_text()).texts == ["".join(emitted(run, 0))]


def test_a_recorded_run_takes_no_options_of_a_call(run, tmp_path, capsys):
    recorded, shown = str(run.save(tmp_path / "run.json")), str(tmp_path / "page.html")
    for options in (["--target", "x", "--max-new-tokens", "5"], ["--no-chat-template"], ["--assistant", "suffix"]):
        assert main(["report", recorded, "--output", shown, *options]) == 2
        said = capsys.readouterr().err
        assert "was made already" in said and all(name in said for name in options if name.startswith("--"))
    assert not (tmp_path / "page.html").exists()


def test_a_report_of_a_batch(target, tmp_path):
    model = ["--target", target, "--dtype", "float32", "--device", "cpu", "--max-new-tokens", "8"]
    asked = [part for sentence in SENTENCES[:3] for part in ("--prompt", sentence)]
    files = ["--output", str(tmp_path / "page.html"), "--save-run", str(tmp_path / "run.json")]
    assert main(["report", *model, *asked, *files, "--temperature", "1", "--seed", "5"]) == 0
    run = Run.load(tmp_path / "run.json")
    assert len(run.prompts) == 3 and all(s in p for s, p in zip(SENTENCES, run.prompts, strict=False))
    assert len(Seen((tmp_path / "page.html").read_text()).texts) == 3
    assert "temperature 1.0" in run.about["settings"] and "seed 5" in run.about["settings"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report"], "give either a RUN.json"),
        (["report", "run.json", "--prompt", "x"], "give either a RUN.json"),
        (["report", "no-such.json"], "no-such.json"),
        (["report", "pyproject.toml"], "is no run"),
        (["report", "--prompt", "x", "--output", "no/such/folder.html"], "cannot be written"),
        (["report", "--prompt", "x", "--save-run", "."], "cannot be written"),
        (["report", "--prompt", "x", "--top-k", "5"], "need sampling"),
        (["generate", "--prompt", "x", "--trace", "no/such/run.json"], "cannot be written"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]")
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1


# --- what a browser would make of it, without one -----------------------------------------------------------

VOID = {"meta", "input", "br"}
# What may stand directly in these, by the standard.
CHILDREN = {
    "ul": {"li"},
    "dl": {"div"},
    "table": {"caption", "thead", "tbody"},
    "thead": {"tr"},
    "tbody": {"tr"},
    "tr": {"th", "td"},
    "p": {"label", "small"},
    "span": {"span", "del", "i"},
    "del": {"i"},
    "html": {"head", "body"},
}


class Tree(HTMLParser):
    """Every element with its parent's name, attributes and text; a page that is not well-formed is refused."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.elements, self.declared = [], None
        self.open = []
        self.feed(html)
        self.close()
        assert not self.open and self.declared == "DOCTYPE html"

    def handle_decl(self, declaration):
        self.declared = declaration

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(set(names)) == len(names), f"an attribute of <{tag}> stands twice: {names}"
        parent = self.open[-1] if self.open else None
        self.elements.append({"tag": tag, "parent": parent, "text": "", **dict(attributes)})
        if tag not in VOID:
            self.open.append(self.elements[-1])

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)  # as within SVG
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, **wanted):
        """Elements with these attributes, in the page's order."""
        return [one for one in self.elements if all(one.get(name) == value for name, value in wanted.items())]


@pytest.fixture(scope="module")
def tree(run):
    return Tree(page(run))


@pytest.fixture(scope="module")
def assets():
    folder = Path(pages.__file__).parent
    return {kind: (folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js")}


def test_elements_stand_where_they_may(tree):
    for one in tree.elements:
        parent = (one["parent"] or {"tag": None})["tag"]
        assert one["tag"] in CHILDREN.get(parent, {one["tag"]}), f"<{one['tag']}> in <{parent}>"
    assert tree.all(tag="html")[0]["lang"] == "en" and tree.all(tag="title")[0]["text"]
    assert tree.all(name="viewport")[0]["content"] == "width=device-width, initial-scale=1"
    levels = [int(one["tag"][1]) for one in tree.elements if re.fullmatch(r"h\d", one["tag"])]
    assert levels[0] == 1 and all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_what_refers_to_an_element_finds_it(tree, assets):
    ids = [one["id"] for one in tree.elements if "id" in one]
    assert len(set(ids)) == len(ids)
    wanted = {one["aria-labelledby"] for one in tree.elements if "aria-labelledby" in one}
    wanted |= set(re.findall(r'getElementById\("([^"]+)"\)', assets["js"]))
    wanted |= set(re.findall(r"#([a-z][\w-]*)\b(?=[^;{}]*\{)", assets["css"]))
    assert wanted and wanted <= set(ids)
    for attribute in re.findall(r"dataset\.(\w+)", assets["js"]):
        assert any(f"data-{attribute}" in one for one in tree.elements)
    assert not any({"href", "src", "srcset", "action", "style"} & set(one) for one in tree.elements)


def test_everything_that_is_used_can_be_named_and_reached(tree):
    for role in ("button", "img", "region", "group"):
        found = tree.all(role=role)
        assert found and all(one.get("aria-label") or one.get("aria-labelledby") for one in found)
    for text in tree.all(**{"class": "text"}):
        rounds = [one for one in tree.all(**{"class": "round"}) if one["parent"] is text]
        assert [one["tabindex"] for one in rounds] == ["0"] + ["-1"] * (len(rounds) - 1)
        assert [one["data-round"] for one in rounds] == [str(place) for place in range(len(rounds))]
    (box,) = tree.all(id="show-refused")
    assert box["type"] == "checkbox" and box["parent"]["tag"] == "label"


def test_nothing_can_be_loaded_or_run_but_what_the_page_holds(tree, assets):
    def digest(text):
        return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    (policy,) = tree.all(**{"http-equiv": "Content-Security-Policy"})
    rules = dict(rule.split(maxsplit=1) for rule in policy["content"].split(";") if rule.strip())
    style, script = tree.all(tag="style")[0]["text"], tree.all(tag="script", type=None)[0]["text"]
    assert rules == {"default-src": "'none'", "style-src": digest(style), "script-src": digest(script)}
    assert (style, script) == (assets["css"], assets["js"])
    assert not re.search(r"url\(|@import|@font-face|expression\(", style)
    loads = r"fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|import\b|location|Image\(|Worker|open\("
    parses = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function\("
    code = re.sub(r"//.*", "", script)
    assert not re.search(f"{loads}|{parses}", code)


def test_the_page_holds_prompts_texts_and_rounds_as_they_were(run, tree):
    assert [one["text"] for one in tree.all(**{"class": "prompt"})] == run.prompts
    data = json.loads(tree.all(id="rounds")[0]["text"])
    texts = tree.all(**{"class": "text"})
    for row, (text, rounds) in enumerate(zip(texts, data["rows"], strict=True)):
        tokens = [one["text"] for one in tree.all(**{"class": "t"}) if one["parent"]["parent"] is text]
        assert "".join(tokens) == "".join(emitted(run, row))
        parts = [
            (part, pieces, turn)
            for turn, texts in zip(run.trace.rounds, run.pieces, strict=True)
            for part, pieces in zip(turn.rows, texts, strict=True)
            if part.row == row
        ]
        for told, (part, pieces, turn) in zip(rounds, parts, strict=True):
            assert (told["arm"], told["kept"], told["parents"]) == (part.arm, part.kept, part.parents)
            assert (told["drafted"], told["last"]) == (pieces.drafted, part.last)
            assert told["own"] == (None if part.last is None else pieces.emitted[-1])
            assert told["seconds"] == turn.seconds and told["sharing"] == len(turn.rows)
            assert part.last is None or data["meanings"][part.last]


def luminance(colour):
    shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return sum(weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    """The ratio of WCAG 2."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def schemes(css):
    """Colours by name, by day and by night."""
    found = [dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6})", part)) for part in css.split("@media", 2)[:2]]
    return {"light": found[0], "dark": found[0] | found[1]}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_from_the_paper(scheme, assets):
    colours = schemes(assets["css"])[scheme]
    assert contrast(colours["own"], colours["paper"]) >= 4.5  # warnings
    lines = [name for name in colours if name.startswith("arm-")] + ["focus", "own"]
    assert len(lines) == 8
    for background in ("paper", "sheet"):
        assert all(contrast(colours[name], colours[background]) >= 4.5 for name in ("ink", "faint"))
        assert all(contrast(colours[name], colours[background]) >= 3 for name in lines)


def test_the_style_sheet_defines_what_it_uses(tree, assets):
    defined = set(re.findall(r"--([\w-]+):", assets["css"]))
    assert set(re.findall(r"var\(--([\w-]+)", assets["css"])) <= defined
    by_day, by_night = (schemes(assets["css"])[name] for name in ("light", "dark"))
    assert by_day.keys() == by_night.keys() and all(by_day[name] != by_night[name] for name in by_day)
    styled = set(re.findall(r"\.([a-z][\w-]*)", re.sub(r"\{[^{}]*\}", "", assets["css"])))
    used = {name for one in tree.elements for name in (one.get("class") or "").split()}
    hooks = {"t", "plain", "ok"}  # what stands for something and looks like any other text
    assert used - styled - hooks == set()
    made_by_script = {"piece"}
    assert styled - used - made_by_script == set()


@pytest.mark.skipif(NODE is None, reason="needs node, to parse the page's script")
def test_the_script_can_be_parsed():
    subprocess.run([NODE, "--check", Path(pages.__file__).parent / "page.js"], check=True, timeout=300)


# --- in a browser -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("needs a Chromium (on Debian: apt-get install chromium)")
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def shown(run, tmp_path_factory):
    return write_page(run, tmp_path_factory.mktemp("page") / "page.html")


SIZES = [(375, 812), (1280, 900)]


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_page_fits_the_window_and_its_script_runs(browser, shown, run, width, height, is_dark):
    browser.open(shown, width, height, is_dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    texts = browser.run(
        "[...document.querySelectorAll('.text')].map(t => "
        "[...t.querySelectorAll('.t')].map(x => x.textContent).join(''))"
    )
    assert texts == ["".join(emitted(run, row)) for row in range(2)]
    prompts = browser.run("[...document.querySelectorAll('.prompt')].map(t => t.textContent)")
    assert prompts == run.prompts
    assert browser.run("document.scripts.length") == 2
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") != is_dark
    assert browser.run("document.querySelector('.text').innerText").count("\n") >= TEXTS[0].count("\n")
    assert browser.complaints == []


def test_keys_move_from_round_to_round(browser, shown, run):
    browser.open(shown, 1280, 900)
    at = "document.activeElement.dataset.round"
    heading = "document.querySelector('#round h3')?.textContent"
    num_rounds = sum(part.row == 0 for turn in run.trace.rounds for part in turn.rows)
    for _ in range(20):
        browser.press("Tab")
        if browser.run(at) is not None:
            break
    assert browser.run(at) == "0"
    assert browser.run(heading) == f"Round 1 of {num_rounds}"
    steps = [("ArrowRight", "1"), ("ArrowRight", "2"), ("ArrowLeft", "1"), ("End", str(num_rounds - 1)), ("Home", "0")]
    for key, place in steps:
        browser.press(key)
        assert browser.run(at) == place
        assert browser.run(heading) == f"Round {int(place) + 1} of {num_rounds}"
    outline = browser.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    browser.press("ArrowDown")
    lower = "document.activeElement.getBoundingClientRect().bottom"
    first = "document.querySelector('.round').getBoundingClientRect().bottom"
    assert browser.run(lower) > browser.run(first)
    browser.press("ArrowUp")
    assert int(browser.run(at)) < 5
    browser.press("Escape")
    assert browser.run(heading) is None
    browser.press("Tab")  # the other text; its rounds are one stop
    if browser.run("document.activeElement.tagName") == "SUMMARY":
        browser.press("Tab")
    assert browser.run("document.activeElement.closest('.text').dataset.row") == "1"
    assert browser.complaints == []


def test_pointing_shows_a_round_as_it_was(browser, shown, run):
    browser.open(shown, 1280, 900)
    parts = [
        (p, t)
        for turn, texts in zip(run.trace.rounds, run.pieces, strict=True)
        for p, t in zip(turn.rows, texts, strict=True)
        if p.row == 0
    ]
    for place, (part, pieces) in enumerate(parts):
        browser.point(f".text [data-round='{place}']")
        found = browser.run("[...document.querySelectorAll('#round del, #round .kept')].map(x => x.textContent)")
        seen = [piece.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·") for piece in pieces.drafted]
        assert sorted(text.removeprefix("…") for text in found) == sorted(seen)
        assert all(text.strip("\r\u200d\u200e\ufe0f") for text in found)
        assert browser.run("document.querySelectorAll('#round del').length") == len(part.drafted) - len(part.kept)
        parents = part.known_parents
        lines = sum(parent < 0 or parents.count(parent) > 1 for parent in parents)
        assert browser.run("document.querySelectorAll('#round li').length") == lines
        said = browser.run("document.querySelector('#round').textContent")
        assert (part.arm or "") in said and "ms" in said
    assert browser.complaints == []


def test_a_tap_keeps_a_round(browser, shown):
    browser.open(shown, 375, 812)
    browser.point("h1")
    browser.run("document.querySelector(\".text [data-round='3']\").click()")
    browser.point("h1")
    assert browser.run("document.querySelector('#round h3').textContent").startswith("Round 4 of")
    panel = browser.run("document.querySelector('#round').getBoundingClientRect().height")
    assert 0 < panel <= 0.43 * 812
    assert browser.complaints == []


def test_refused_tokens_can_be_hidden(browser, shown):
    browser.open(shown, 375, 812)
    seen = "[...document.querySelectorAll('.text del')].filter(x => x.getClientRects().length).length"
    assert browser.run(seen) > 0
    browser.run("document.getElementById('show-refused').click()")
    assert browser.run(seen) == 0
    assert browser.complaints == []


def test_no_file_is_written_over_the_run_it_is_made_of(tmp_path, capsys):
    same = str(tmp_path / "run.json")
    (tmp_path / "run.json").write_text("kept")
    for command in (
        ["report", same, "--output", same],
        ["report", "--prompt", "x", "--output", same, "--save-run", same],
    ):
        assert main(command) == 2
        assert "named twice" in capsys.readouterr().err
    assert (tmp_path / "run.json").read_text() == "kept"
