"""The command line: what it prints where, and its exit codes."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec import loading
from hf_specdec.cli import main
from hf_specdec.demo import PROMPTS, Demo, DemoOptions, run_demo
from hf_specdec.loading import encode
from tests.tokenizers_for_tests import SENTENCES, save_tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("cli") / "target")


def plain_text(folder, chat, use_template=True, **settings):
    """What the model itself says."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = encode(tokenizer, [chat], model.device, use_template)
    output = model.generate(**inputs, do_sample=False, **settings)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def generate(target, *arguments):
    return main(["generate", "--target", target, "--dtype", "float32", "--device", "cpu", *arguments])


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"hf-specdec {hf_specdec.__version__}\n"


def test_help_names_all_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("demo", "generate", "report", "check", "bench"))


@pytest.mark.parametrize("assistant", ["prompt-lookup", "ngram", "a folder"])
def test_generate_prints_what_plain_generation_says(target, assistant, capsys):
    assistant = target if assistant == "a folder" else assistant
    prompt = ["--prompt", SENTENCES[0], "--system", SENTENCES[1]]
    assert generate(target, *prompt, "--assistant", assistant, "--max-new-tokens", "20", "--num-draft-tokens", "3") == 0
    shown = capsys.readouterr()
    chat = [{"role": "system", "content": SENTENCES[1]}, {"role": "user", "content": SENTENCES[0]}]
    assert shown.out == plain_text(target, chat, max_new_tokens=20) + "\n"
    assert "mean acceptance length" in shown.err


def test_generate_without_a_chat_template_continues_standard_input(target, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(SENTENCES[2]))
    assert generate(target, "--prompt", "-", "--no-chat-template", "--max-new-tokens", "8") == 0
    chat = [{"role": "user", "content": SENTENCES[2]}]
    assert capsys.readouterr().out == plain_text(target, chat, use_template=False, max_new_tokens=8) + "\n"


def test_generate_samples_reproducibly(target, capsys):
    sampled = ["--prompt", SENTENCES[0], "--temperature", "1.5", "--top-k", "50", "--max-new-tokens", "20"]
    shown = []
    for seed in ("1", "1", "2"):
        assert generate(target, *sampled, "--seed", seed, "--verification", "token") == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]


def test_bench_measures_every_combination_and_draws(target, tmp_path, capsys):
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in SENTENCES[:2]))
    arguments = ["--questions", str(questions), "--variants", "prompt-lookup", "--plots", str(tmp_path / "plots")]
    arguments += ["--batch-size", "1,2", "--temperature", "0,0.5", "--target", target, "--profile"]
    assert main(["bench", "--dtype", "float32", "--max-new-tokens", "6", *arguments]) == 0
    shown = capsys.readouterr()
    found = [setting["options"] for setting in json.loads(shown.out.splitlines()[-1])["settings"]]
    assert [(one["batch_size"], one["temperature"]) for one in found] == [(1, 0), (1, 0.5), (2, 0), (2, 0.5)]
    assert shown.err.count("Seconds by phase") == 4 and "batch 2, temperature 0.5" in shown.err
    assert (tmp_path / "plots" / "speedup-by-category-3.png").is_file()


def test_bench_wants_matplotlib_before_it_measures(target, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", "--target", target, "--questions", "no-such-file", "--plots", str(tmp_path)]) == 2
    assert 'pip install "hf_specdec[plots]"' in capsys.readouterr().err


def test_bench_prints_one_json_document_last(target, tmp_path, capsys):
    questions, saved = tmp_path / "questions.jsonl", tmp_path / "result.json"
    questions.write_text(json.dumps({"question_id": 1, "category": "math", "turns": [SENTENCES[3]]}) + "\n")
    arguments = ["--questions", str(questions), "--output", str(saved), "--variants", "plain,prompt-lookup"]
    assert main(["bench", "--target", target, "--dtype", "float32", "--max-new-tokens", "8", *arguments]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out.splitlines()[-1])
    assert document == json.loads(saved.read_text())
    assert document["variants"]["prompt-lookup"]["by_category"]["math"]["identical"] == 1
    assert "Speed-up against plain generation" in shown.err


def test_demo_compares_all_prompts(tmp_path):
    folder = save_tiny(tmp_path / "long", chat_template=None)
    model = AutoModelForCausalLM.from_pretrained(folder, max_position_embeddings=2048)
    model.save_pretrained(folder)
    for is_terminal in (False, True):
        console = Console(file=io.StringIO(), width=120, force_terminal=is_terminal)
        options = DemoOptions(target=folder, dtype="float32", device="cpu", max_new_tokens=6)
        comparisons = run_demo(options, console)
        assert [comparison.title for comparison in comparisons] == [title for title, _ in PROMPTS]
        assert all(comparison.parting is None for comparison in comparisons)
        shown = console.file.getvalue()
        assert shown.count("Identical: both gave the same") == 3
        assert "mean acceptance length" in shown


def test_demo_answers_what_parts_once_more_in_float32(monkeypatch, tmp_path):
    folder = save_tiny(tmp_path / "rounded", chat_template=None)
    AutoModelForCausalLM.from_pretrained(folder, max_position_embeddings=2048).save_pretrained(folder)
    monkeypatch.setattr(loading, "demo_model_path", lambda: folder)
    answer = Demo._answer

    def rounded(demo, inputs, assistant, *arguments):
        """The short prompt's answers part in bfloat16."""
        given = answer(demo, inputs, assistant, *arguments)
        parts = demo.options.dtype == "bfloat16" and assistant and inputs["input_ids"].shape[1] < 200
        return replace(given, tokens=[given.tokens[0] + 1, *given.tokens[1:]]) if parts else given

    monkeypatch.setattr(Demo, "_answer", rounded)
    console = Console(file=io.StringIO(), width=80)
    comparisons = run_demo(DemoOptions(device="cpu", max_new_tokens=6), console)
    assert [comparison.in_float32 is not None for comparison in comparisons] == [False, False, True]
    shown = console.file.getvalue()
    assert "Open question: Identical: both gave the same" in shown and shown.count(" in float32") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", "x", "--target", "no/such/folder"], "could not be opened"),
        (["generate", "--prompt", "x", "--dtype", "int8"], "dtype='int8' is unknown; use one of bfloat16"),
        (["generate", "--prompt", "x", "--device", "toaster"], "device='toaster' is unknown"),
        (["generate", "--prompt", "x", "--top-p", "0.5"], "need sampling"),
        (["generate", "--prompt", "x", "--verification", "none"], "verification='none' is unknown"),
        (["generate", "--prompt", "x", "--target", "no/one", "--assistant", "autp"], "assistant='autp' is neither"),
        (["demo", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["demo", "--assistant", "autp"], "assistant='autp' is neither"),
        (["bench", "--questions", "no-such-file"], "no-such-file"),
        (["bench", "--questions", "."], "'.' is a folder; a file is wanted here"),
        (["report", "."], "'.' is a folder; a file is wanted here"),
        (["bench", "--questions", "no-such-file", "--plots", __file__], "is a file; name a folder"),
        (["check", "x/y", "suffix", "--device", "cpu"], "--device says how to measure; give --measure too"),
        (["bench", "--questions", "x", "--variants", "magic"], "variant 'magic' is unknown"),
        (["bench", "--questions", "x", "--variants", "host-prompt-lookup", "--batch-size", "2"], "batch_size=2"),
    ],
)
def test_errors_of_users_are_one_line_and_exit_code_2(target, arguments, message, capsys):
    if arguments[0] == "generate" and "--target" not in arguments:
        arguments = [*arguments, "--target", target]
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1 and shown.startswith(f"hf-specdec {arguments[0]}: ")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["demo"], ""),
        (["data", "--output", "data"], "goes on where it was"),
        (["train", "eagle3", "--data", "data", "--output", "drafter", "--epochs", "1"], "goes on where it was"),
        (["bench", "--questions", "x", "--output", "bench.json"], "goes on where it was"),
        (["bench", "--questions", "x"], ""),
    ],
)
def test_an_interrupted_command_says_so_and_what_remains(arguments, hint, capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_specdec.cli.quiet_host", interrupted)
    assert main(arguments) == 130
    shown = capsys.readouterr().err
    assert f"hf-specdec {arguments[0]}: interrupted" in shown
    assert ("goes on" in shown) == bool(hint)


def test_check_names_the_strategies_where_a_drafter_is_neither_one_nor_there(target, hub, capsys):
    assert main(["check", target, "sufix"]) == 2
    shown = capsys.readouterr().err
    assert "drafter='sufix' cannot be opened" in shown and "token-recycling" in shown and "no folder" in shown


def test_check_says_that_a_file_is_no_folder(target, tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    for pair in ([target, str(path)], [str(path), target]):
        assert main(["check", *pair]) == 2
        assert "is a file; give the folder it lies in" in capsys.readouterr().err


def test_a_file_in_place_of_an_output_folder_is_named(target, tmp_path, capsys):
    path = tmp_path / "data"
    path.write_text("")
    assert main(["data", "--target", target, "--device", "cpu", "--output", str(path), "--max-new-tokens", "8"]) == 2
    assert f"'{path}' is a file; a folder is wanted here" in capsys.readouterr().err


def test_bench_leaves_the_document_off_a_terminal(target, tmp_path, capsys, monkeypatch):
    questions, saved = tmp_path / "questions.jsonl", tmp_path / "bench.json"
    questions.write_text(json.dumps({"prompt": SENTENCES[0]}) + "\n")
    arguments = ["bench", "--target", target, "--questions", str(questions), "--variants", "plain"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main([*arguments, "--max-new-tokens", "4", "--output", str(saved)]) == 0
    shown = capsys.readouterr()
    assert shown.out == "" and str(saved) in shown.err.replace("\n", "") and saved.is_file()


def test_unknown_arguments_exit_with_code_2():
    for arguments in ([], ["fly"], ["generate"], ["bench", "--limit", "few"], ["bench", "--batch-size", "1,x"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
