"""Heads that draft: perfect ones are never refused, and whatever a head says, the text is the target's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

import hf_specdec
from hf_specdec import Auto, DraftModel, DraftTree, Eagle, ParallelDraft, Suffix, load_drafter
from hf_specdec.accept import Draft
from hf_specdec.heads import LayerConfig
from tests import reference_heads as files
from tests.models import jittered, prompts, tiny
from tests.test_heads import initialised, small
from tests.test_law import PLAIN, PROMPT, VOCAB, assert_follows, first_tokens, target_law
from tests.test_law import small as small_target

GOLDEN = sorted(path.parent for path in Path(__file__).parent.glob("golden/speculators/*/config.json"))
FIRST = {"kind": "eagle", "taps": (), "layers": (LayerConfig(False),)}
TREE = DraftTree(depth=5, top_k=4, total_tokens=30)
DRAFTERS = {
    "eagle": lambda **sizes: Eagle(initialised(small(**FIRST, **sizes)), 4),
    "eagle3": lambda **sizes: Eagle(initialised(small(taps=(0, 1, 2), **sizes)), 4),
    "eagle3-tree": lambda **sizes: Eagle(initialised(small(taps=(0, 1, 2), **sizes)), tree=TREE),
    "wide-tree": lambda **sizes: Eagle(initialised(small(taps=(0, 1, 2), **sizes)), tree=DraftTree()),
    "eagle-tree": lambda **sizes: Eagle(initialised(small(**FIRST, **sizes)), 12, tree=TREE),
    "p-eagle": lambda **sizes: ParallelDraft(initialised(small(mask_token_id=3, **sizes)), num_draft_tokens=4),
}


def texts(model, drafter, num_rows, seed=0, **kwargs):
    """What plain generation says, and what comes with a drafter."""
    ids, mask = prompts(num_rows, seed=seed)
    kwargs = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False} | kwargs
    hf_specdec.enable(model)
    return model.generate(ids, assistant=False, **kwargs), model.generate(ids, assistant=drafter, **kwargs)


# --- perfect drafters -------------------------------------------------------------------------------------


def rolled(steps):
    """A hook after a layer that moves its state along: states of different layers differ."""

    def hook(module, args, output):
        return (output[0].roll(steps, -1), *output[1:]) if isinstance(output, tuple) else output.roll(steps, -1)

    return hook


@pytest.fixture(scope="module")
def cyclic():
    """A target that says one token after the other along a cycle; layer i moves its state by i + 1."""
    target = tiny(vocab=32, num_hidden_layers=4, eos_token_id=None)
    target.generation_config.eos_token_id = None
    with torch.no_grad():
        for number, layer in enumerate(target.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.register_forward_hook(rolled(number + 1))
        target.get_input_embeddings().weight.copy_(torch.eye(32))
        target.lm_head.weight.copy_(successor().roll(10, 1))
    return target


def successor():
    """A matrix that takes a token to the next one, 7 ids further."""
    return torch.eye(32, dtype=torch.float64).roll(7, 0)


def undoing(steps):
    return torch.eye(32, dtype=torch.float64).roll(-steps, 0)


def perfect(taps=(1, 2, 3), mask=None):
    """EAGLE-3: every tap says which token was read, and the MLP which one follows."""
    sizes = {"vocab_size": 32, "draft_vocab_size": 32, "intermediate_size": 32, "norm_output": True}
    head = initialised(small(taps=taps, mask_token_id=mask, **sizes))
    with torch.no_grad():
        for norm in [module for module in head.modules() if type(module).__name__ == "RMSNorm"]:
            norm.weight.fill_(1)
        layer = head.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        head.fc.weight.copy_(torch.cat([undoing(1), undoing(3), undoing(6)], dim=1))
        layer.mlp.gate_proj.weight.copy_(torch.eye(32))
        layer.mlp.up_proj.weight.copy_(torch.eye(32))
        layer.mlp.down_proj.weight.copy_(successor() * 10)
        head.lm_head.weight.copy_(successor())
    return head


def perfect_first():
    """EAGLE-1: from the last state to the one that follows."""
    head = initialised(small(vocab_size=32, draft_vocab_size=32, own_lm_head=False, **FIRST))
    with torch.no_grad():
        head.norm.weight.fill_(1)
        head.layers[0].self_attn.o_proj.weight.zero_()
        head.layers[0].mlp.down_proj.weight.zero_()
        head.fc.weight.copy_(torch.cat([torch.zeros(32, 32), successor()], dim=1))
    return head


def acceptance(target, drafter, num_rows=3):
    ids, mask = prompts(num_rows, vocab=32)
    hf_specdec.enable(target)
    target.generate(ids, attention_mask=mask, assistant=drafter, max_new_tokens=25, do_sample=False)
    stats = hf_specdec.last_stats(target)
    return stats.accepted / max(1, stats.drafted), stats.mean_acceptance_length


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("build", [perfect, perfect_first])
def test_a_perfect_head_is_never_refused(build, num_rows, cyclic):
    rate, length = acceptance(cyclic, Eagle(build(), 5), num_rows)
    assert rate == 1 and length > 4
    assert acceptance(cyclic, Eagle(build(), tree=TREE), num_rows)[1] > 4


def test_a_perfect_parallel_head_is_right_about_the_next_token(cyclic):
    assert acceptance(cyclic, ParallelDraft(perfect(mask=3), num_draft_tokens=1)) == (1, pytest.approx(2, abs=0.15))


def test_another_tap_or_position_is_refused(cyclic, monkeypatch):
    for taps in ((0, 1, 2), (2, 3, 4)):
        assert acceptance(cyclic, Eagle(perfect(taps), 5))[0] < 0.2
    from hf_specdec.drafters import head_reader

    true_add = head_reader.Pending.add

    def shifted(self, state, outcome, target_pass):
        target_pass.states = {tap: states.roll(1, 1) for tap, states in target_pass.states.items()}
        target_pass.prompt_states = {tap: states.roll(1, 1) for tap, states in target_pass.prompt_states.items()}
        true_add(self, state, outcome, target_pass)

    monkeypatch.setattr(head_reader.Pending, "add", shifted)
    assert acceptance(cyclic, Eagle(perfect(), 5))[0] < 0.9


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_parallel_model_that_is_the_target_is_right_about_the_next_token(num_rows):
    target = tiny(eos_token_id=None)
    rate, _ = acceptance(target, ParallelDraft(target, mask_token_id=3, num_draft_tokens=1), num_rows)
    assert rate == 1


# --- exactness --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_greedy_text_is_the_same(name, num_rows):
    target = tiny(num_hidden_layers=4)
    drafter = DRAFTERS[name]()
    for seed in range(4):
        plain, out = texts(target, drafter, num_rows, seed)
        assert torch.equal(plain, out)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_greedy_text_is_the_same_with_a_parallel_model(num_rows):
    target = tiny()
    plain, out = texts(target, ParallelDraft(jittered(target), 3, 4), num_rows)
    assert torch.equal(plain, out)


def test_lengths_may_follow_the_record_and_a_head_may_be_an_arm():
    target = tiny(num_hidden_layers=4)
    for drafter in (DRAFTERS["eagle3"](), DRAFTERS["eagle3-tree"]()):
        drafter.options = type(drafter.options)()
        for assistant in (drafter, Auto([Suffix(), drafter])):
            plain, out = texts(target, assistant, 3, max_new_tokens=40)
            assert torch.equal(plain, out)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("num_rows", [1, 3, 250])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3-tree", "p-eagle"])
def test_law(name, num_rows, temperature):
    """600 samples of small batches, 5,000 of large ones."""
    target = hf_specdec.enable(small_target(0, layers=3))
    drafter = DRAFTERS[name](vocab_size=VOCAB, draft_vocab_size=VOCAB)
    drafter.head_or_model = drafter.model if name == "p-eagle" else drafter.head
    drafter.head_or_model.float().lm_head.weight.data.mul_(0.3)
    options = {} if temperature == 1 else {"temperature": 0.7, "top_p": 0.9}
    warpers = [] if temperature == 1 else [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)]
    num_calls = 20 if num_rows == 250 else 600 // num_rows
    samples = first_tokens(target, num_calls, num_rows, assistant=drafter, **options)
    assert_follows(samples, target_law(target, PROMPT, LogitsProcessorList(warpers), 3, VOCAB))


# --- checkpoints and bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_golden_folders_open_and_draft(folder):
    target = tiny(num_hidden_layers=4)
    if "embed_tokens.weight" not in load_file(folder / "model.safetensors"):
        golden = load_file(folder / "golden.safetensors")
        target.get_input_embeddings().weight.data.copy_(golden["embeddings"])
    drafter = load_drafter(str(folder), target)
    assert isinstance(drafter, ParallelDraft if folder.name.startswith("peagle") else Eagle)
    for assistant in (drafter, str(folder)):
        plain, out = texts(target, assistant, 3)
        assert torch.equal(plain, out)


def test_other_folders_open(tmp_path):
    target = tiny(num_hidden_layers=files.DEPTH)
    for number, pair in enumerate((files.eagle1(), files.eagle3(), files.parallel())):
        folder = files.write(tmp_path / str(number), *pair)
        assert isinstance(load_drafter(folder, target), (Eagle, ParallelDraft))
    target.save_pretrained(tmp_path / "plain")
    assert isinstance(load_drafter(str(tmp_path / "plain"), target), DraftModel)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty"):
        load_drafter(str(tmp_path / "empty"), target)


def test_bad_input_is_refused():
    head, masked = initialised(small()), initialised(small(mask_token_id=3))
    for build, message in [
        (lambda: Eagle(tiny()), "EagleHead"),
        (lambda: Eagle(masked), "ParallelDraft"),
        (lambda: Eagle(head, tree=3), "DraftTree"),
        (lambda: DraftTree(depth=0), "depth=0"),
        (lambda: ParallelDraft(head), "Eagle"),
        (lambda: ParallelDraft(masked, mask_token_id=4), "made with 3"),
        (lambda: ParallelDraft(tiny()), "mask_token_id"),
        (lambda: ParallelDraft(tiny(), mask_token_id=64), "64 embeddings"),
        (lambda: Eagle(head).check(tiny(vocab=48)), "48"),
        (lambda: Eagle(head).check(tiny(hidden_size=64)), "64"),
        (lambda: Eagle(head).check(tiny(num_hidden_layers=2)), "taps"),
    ]:
        with pytest.raises(ValueError, match=message):
            build()


def test_without_states_nothing_is_drafted():
    from tests.test_contract import Bench

    bench = Bench(Eagle)
    assert bench.propose([4, 4, 4]).tokens.shape == Draft.empty(3).tokens.shape


assert PLAIN  # the settings that first_tokens samples with
