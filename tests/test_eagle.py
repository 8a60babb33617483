"""Heads that draft: perfect ones are never refused, and whatever a head says, the text is the target's."""

from __future__ import annotations

import copy
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

import hf_specdec
from hf_specdec import (
    Auto,
    DraftModel,
    DraftTree,
    Eagle,
    EarlyExit,
    ParallelDraft,
    PromptLookup,
    Suffix,
    TokenRecycling,
    host,
    load_drafter,
)
from hf_specdec.drafters import head_reader, parallel
from hf_specdec.heads import LayerConfig
from tests import reference_heads as files
from tests.families import small_family
from tests.models import jittered, prompts, tiny
from tests.reference import assert_follows, target_law
from tests.test_attention import flash_kernels, with_attention
from tests.test_heads import initialised, small
from tests.test_law import PROMPT, VOCAB, first_tokens
from tests.test_law import small as small_target
from tests.test_outputs import Pass
from tests.tokenizers_for_tests import trained_tokenizer

GOLDEN = sorted(path.parent for path in Path(__file__).parent.glob("golden/speculators/*/config.json"))
FIRST = {"kind": "eagle", "taps": (), "layers": (LayerConfig(False),)}
TREE = DraftTree(depth=5, top_k=4, total_tokens=30)
assert flash_kernels  # a fixture
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


def cyclic_target():
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


@pytest.fixture(scope="module")
def cyclic():
    return cyclic_target()


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


def test_another_tap_or_state_is_refused(cyclic, monkeypatch):
    for taps in ((0, 1, 2), (2, 3, 4)):
        assert acceptance(cyclic, Eagle(perfect(taps), 5))[0] < 0.2
    true_add = head_reader.Pending.add

    def shifted(self, state, outcome, target_pass):
        target_pass.states = {tap: states.roll(1, 1) for tap, states in target_pass.states.items()}
        target_pass.prompt_states = {tap: states.roll(1, 1) for tap, states in target_pass.prompt_states.items()}
        true_add(self, state, outcome, target_pass)

    monkeypatch.setattr(head_reader.Pending, "add", shifted)
    for build in (perfect, perfect_first):
        assert acceptance(cyclic, Eagle(build(), 5))[0] < 0.9


@pytest.fixture(scope="module")
def attentive():
    """A target whose first layer attends, by positions too, and whose other layers change nothing.

    Only the upper half of its states says what follows, and that is what was attended to.
    """
    target = tiny(vocab=32, num_hidden_layers=4, eos_token_id=None)
    target.generation_config.eos_token_id = None
    with torch.no_grad():
        for number, layer in enumerate(target.model.layers):
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.o_proj.weight[: 16 if number == 0 else 32] = 0
        attention = target.model.layers[0].self_attn
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.mul_(3)
        target.get_input_embeddings().weight[:, 16:] = 0
        target.lm_head.weight[:, :16] = 0
        target.lm_head.weight.mul_(20)
    return target


def attending(target, *, reads_tokens):
    """A head with the target's own attention: row t holds the token at t + 1, and its queries and keys with it.

    EAGLE-3 reads embeddings in its layer, EAGLE-1 before it. The first token of a text is in no row.
    """
    sizes = {"vocab_size": 32, "draft_vocab_size": 32, "intermediate_size": 64}
    config = (
        small(taps=(1, 2, 3), norm_before_residual=True, **sizes)
        if reads_tokens
        else small(**FIRST, own_lm_head=False, **sizes)
    )
    head = initialised(config)
    theirs, mine = target.model.layers[0], head.layers[0]
    with torch.no_grad():
        for name in "qkv":
            weight = getattr(theirs.self_attn, f"{name}_proj").weight
            wide = torch.cat([weight, torch.zeros_like(weight)], dim=1) if reads_tokens else weight
            getattr(mine.self_attn, f"{name}_proj").weight.copy_(wide)
        mine.self_attn.o_proj.weight.copy_(theirs.self_attn.o_proj.weight)
        mine.mlp.down_proj.weight.zero_()
        mine.input_layernorm.weight.copy_(theirs.input_layernorm.weight)
        head.norm.weight.fill_(1)
        if reads_tokens:  # and nothing of what is fed back
            head.fc.weight.zero_()
            mine.hidden_norm.weight.zero_()
            head.lm_head.weight.copy_(target.lm_head.weight)
        else:
            head.fc.weight.copy_(torch.cat([torch.eye(32), torch.zeros(32, 32)], dim=1))
    return head


@functools.cache
def without_first_token(target):
    """Prompts after which the target says the same with and without their first token, which no head has read."""
    found = []
    for seed in range(40):
        ids, mask = prompts(3, 14, vocab=32, seed=seed)
        texts = target.generate(ids, attention_mask=mask, max_new_tokens=25, do_sample=False, pad_token_id=0)
        for prompt, text, shown in zip(ids, texts, mask.bool(), strict=True):
            own = text[14 - int(shown.sum()) :][None]
            choices, others = (target(read).logits[0, -26:-1].argmax(dim=-1) for read in (own, own[:, 1:]))
            if torch.equal(choices, others):
                found.append(prompt[shown])
    assert len(found) >= 6
    return found[:6]


def attended(target, drafter, num_rows):
    """Acceptance at every position of a chain, and tokens a round."""
    hf_specdec.enable(target)
    texts = without_first_token(target)
    for first in range(0, len(texts), num_rows):
        rows = texts[first : first + num_rows]
        ids = torch.stack([torch.nn.functional.pad(row, (14 - len(row), 0)) for row in rows])
        mask = torch.stack([torch.arange(14) >= 14 - len(row) for row in rows]).long()
        kwargs = {"attention_mask": mask, "max_new_tokens": 25, "do_sample": False, "pad_token_id": 0}
        plain = target.generate(ids, assistant=False, **kwargs)
        assert torch.equal(plain, target.generate(ids, assistant=drafter, **kwargs))
    return drafter.stats.acceptance_by_position, drafter.stats.mean_acceptance_length


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("reads_tokens", [True, False])
def test_a_head_with_the_targets_attention_is_never_refused(reads_tokens, num_rows, attentive):
    head = attending(attentive, reads_tokens=reads_tokens)
    rates, _ = attended(attentive, Eagle(head, 4), num_rows)
    assert rates == [1.0] * 4
    _, length = attended(attentive, Eagle(head, tree=DraftTree(4, 3, 12)), num_rows)
    assert length > 4


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("tree", [None, DraftTree(4, 3, 12)])
@pytest.mark.parametrize("reads_tokens", [True, False])
def test_a_position_that_is_off_by_one_is_noticed(reads_tokens, shift, tree, attentive, monkeypatch):
    """Of drafted rows only: all positions shifted alike are the same to a rotary embedding."""
    true_read = head_reader.HeadReader.read

    def shifted(self, tokens, hidden, widths=None, seen=None, positions=None):
        if widths is None:
            counted = self._positions(tokens.shape[1], None) if positions is None else positions
            positions = (counted + shift).clamp(min=0)
        return true_read(self, tokens, hidden, widths, seen, positions)

    head = attending(attentive, reads_tokens=reads_tokens)
    _, before = attended(attentive, Eagle(head, 4, tree=tree), 3)
    monkeypatch.setattr(head_reader.HeadReader, "read", shifted)
    rates, after = attended(attentive, Eagle(head, 4, tree=tree), 3)
    assert after < before - 0.5
    assert tree or (rates[0] == 1 and min(rates) < 0.8)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_parallel_model_that_is_the_target_is_right_about_the_next_token(num_rows):
    target = tiny(eos_token_id=None)
    rate, _ = acceptance(target, ParallelDraft(target, mask_token_id=3, num_draft_tokens=1), num_rows)
    assert rate == 1


def head_from_scratch(head, target, text, count):
    """What a P-EAGLE head drafts behind a text, in one pass without a cache."""
    states = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    known = head.combine(torch.cat([states[tap] for tap in head.config.taps], dim=-1))
    hidden = torch.cat([known, head.masked_hidden().expand(1, count - 1, -1)], dim=1)
    tokens = torch.tensor([text[1:] + [head.config.mask_token_id] * (count - 1)])
    made = head(tokens, hidden, torch.arange(tokens.shape[1])[None])
    return head.to_target(head.logits(made[0, -count:]).argmax(dim=-1)).tolist()


def model_from_scratch(model, target, text, count):
    """What a PARD model drafts behind a text, likewise."""
    return model(torch.tensor([text + [3] * (count - 1)])).logits[0, -count:].argmax(dim=-1).tolist()


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", ["p-eagle", "pard"])
def test_all_tokens_of_a_parallel_draft_come_from_one_pass_as_without_a_cache(kind, num_rows, monkeypatch):
    """A slot at another position, one that is kept in the cache, or a second pass would show."""
    target = tiny(num_hidden_layers=4)
    if kind == "pard":
        session, model, from_scratch = parallel._ModelSession, jittered(target), model_from_scratch
        drafter, inner = ParallelDraft(model, 3, 4), model.model.layers[0]
    else:
        session, from_scratch, drafter = parallel._HeadSession, head_from_scratch, DRAFTERS["p-eagle"]()
        model, inner = drafter.model, drafter.model.layers[0]
    passes, drafts, true_propose = [], [], session.propose
    inner.register_forward_hook(lambda *_: passes.append(1))

    def compared(self, state, limits, noise):
        passes.clear()
        draft = true_propose(self, state, limits, noise)
        assert len(passes) == (draft.width > 0)
        bound = self.head if kind == "p-eagle" else model
        for place, row in enumerate(state.rows):
            length = int(draft.lengths[place])
            if length > 0:
                found = draft.tokens[place, :length].tolist()
                assert found == from_scratch(bound, target, state.tokens[row], max(limits))[:length]
                drafts.append(length)
        return draft

    monkeypatch.setattr(session, "propose", compared)
    plain, out = texts(target, drafter, num_rows)
    assert torch.equal(plain, out) and drafts.count(4) >= 5 * num_rows


# --- exactness --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_greedy_text_is_the_same(name, num_rows):
    same_texts(DRAFTERS[name](), num_rows, num_seeds=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DRAFTERS, "pard", "early-exit", "token-recycling"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_greedy_text_is_the_same_behind_50_prompts(name, num_rows):
    others = {
        "pard": lambda: ParallelDraft(jittered(tiny()), 3, 4),
        "early-exit": lambda: EarlyExit(2, num_draft_tokens=4),
        "token-recycling": lambda: TokenRecycling(num_draft_tokens=60),
    }
    same_texts((DRAFTERS | others)[name](), num_rows, num_seeds=-(-50 // num_rows))


def same_texts(drafter, num_rows, num_seeds):
    """Plain texts and those that come with a drafter, behind so many batches of prompts."""
    target = tiny(num_hidden_layers=4)
    for seed in range(num_seeds):
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


def cut_head(vocab_size=64, **changes):
    """A head that cannot draft every third id of the target."""
    ids = torch.arange(vocab_size)[torch.arange(vocab_size) % 3 != 1]
    head = initialised(small(vocab_size=vocab_size, draft_vocab_size=len(ids), **changes))
    head.draft_ids.copy_(ids)
    return head


CUT = {
    "eagle3-cut": lambda **sizes: Eagle(cut_head(taps=(0, 1, 2), **sizes), 4),
    "eagle3-cut-tree": lambda **sizes: Eagle(cut_head(taps=(0, 1, 2), **sizes), tree=TREE),
    "p-eagle-cut": lambda **sizes: ParallelDraft(cut_head(mask_token_id=3, **sizes), num_draft_tokens=4),
}


def law_drafter(name):
    """A drafter for the target of the laws, with a law of its own that is neither flat nor sharp."""
    if name == "pard":
        return ParallelDraft(small_target(5, layers=1), mask_token_id=6, num_draft_tokens=4)
    sizes = {"vocab_size": VOCAB} if "cut" in name else {"vocab_size": VOCAB, "draft_vocab_size": VOCAB}
    drafter = (DRAFTERS | CUT)[name](**sizes)
    head = drafter.model if "p-eagle" in name else drafter.head
    head.float().lm_head.weight.data.mul_(0.3)
    return drafter


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("num_rows", "num_samples"),
    [
        (250, 5000),
        (3, 300),
        pytest.param(1, 6000, marks=pytest.mark.slow),
        pytest.param(3, 6000, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "name",
    ["eagle", "eagle3", "eagle3-tree", "eagle3-cut", "eagle3-cut-tree", "p-eagle", "p-eagle-cut", "pard"],
)
def test_law(name, num_rows, num_samples, temperature):
    """Sample sizes as named."""
    target = hf_specdec.enable(small_target(0, layers=3))
    drafter = law_drafter(name)
    num_calls = num_samples // num_rows
    options = {} if temperature == 1 else {"temperature": 0.7, "top_p": 0.9}
    warpers = [] if temperature == 1 else [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)]
    samples = first_tokens(target, num_calls, num_rows, assistant=drafter, **options)
    assert drafter.stats.accepted > 0
    assert_follows(samples, target_law(target, PROMPT, LogitsProcessorList(warpers), 3, VOCAB))


ALL = [*DRAFTERS, *CUT]


def drafter_of(name):
    return (DRAFTERS | CUT)[name]()


@pytest.fixture(scope="module")
def target():
    return hf_specdec.enable(tiny(num_hidden_layers=4))


@pytest.mark.parametrize("name", CUT)
def test_a_head_with_a_cut_vocabulary_drafts_its_own_ids(name, target):
    for num_rows in (1, 3):
        plain, out = texts(target, drafter_of(name), num_rows)
        assert torch.equal(plain, out) and hf_specdec.last_stats(target).drafted > 0
    proposed = []
    head_session = "_HeadSession" if "p-eagle" in name else "_EagleSession"
    module = __import__(f"hf_specdec.drafters.{'parallel' if 'p-eagle' in name else 'eagle'}", fromlist=[head_session])
    true_propose = getattr(module, head_session).propose

    def recorded(self, *args):
        draft = true_propose(self, *args)
        proposed.extend(draft.tokens[draft.valid].tolist())
        return draft

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(getattr(module, head_session), "propose", recorded)
        ids, mask = prompts(3)
        target.generate(ids, attention_mask=mask, assistant=drafter_of(name), do_sample=True, top_k=0, seed=1)
    assert len(set(proposed)) > 5 and not any(token % 3 == 1 for token in proposed)


@pytest.mark.parametrize("name", ALL)
def test_rows_end_and_leave_on_their_own(name, target):
    text, _ = texts(target, False, 5, eos_token_id=None)
    ends = sorted({int(row[12 + 3 * place]) for place, row in enumerate(text[:3])})
    plain, out = texts(target, drafter_of(name), 5, eos_token_id=ends)
    assert torch.equal(plain, out)
    plain, out = texts(target, drafter_of(name), 5, eos_token_id=ends, logits_processor=[Pass()])
    assert torch.equal(plain, out)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_cache_handed_in_and_embeddings_for_a_prompt(name, num_rows, target):
    """The head knows nothing of what it has not seen, and drafts all the same."""
    ids, mask = prompts(num_rows)
    kwargs = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    results = []
    for assistant in (False, drafter_of(name)):
        cache = DynamicCache(config=target.config)
        text = target.generate(ids, attention_mask=mask, assistant=assistant, **kwargs, **{host.CACHE_NAME: cache})
        text = torch.cat([text, prompts(num_rows, 3, seed=7)[0].clamp(min=3)], dim=1)
        longer = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
        second = target.generate(text, attention_mask=longer, assistant=assistant, **kwargs, **{host.CACHE_NAME: cache})
        embeds = target.get_input_embeddings()(ids).detach()
        embedded = target.generate(inputs_embeds=embeds, attention_mask=mask, assistant=assistant, **kwargs)
        results.append((text, second, embedded))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert hf_specdec.last_stats(target).drafted > 0


@pytest.mark.parametrize("name", ALL)
def test_coupled_text_is_that_of_any_drafter(name, target):
    ids, mask = prompts(3)
    kwargs = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": True, "temperature": 0.9, "seed": 4}
    kwargs |= {"verification": "coupled", "pad_token_id": 0}
    expected = target.generate(ids, assistant=PromptLookup(7, 7), **kwargs)
    assert torch.equal(expected, target.generate(ids, assistant=drafter_of(name), **kwargs))


@pytest.mark.parametrize("name", ALL)
def test_a_seed_says_the_text(name, target):
    """Of trees, whatever the trees; of drawn chains, with the same drafter."""
    ids, mask = prompts(3)
    kwargs = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": True, "seed": 4, "pad_token_id": 0}
    found = [target.generate(ids, assistant=drafter_of(name), **kwargs) for _ in range(2)]
    assert torch.equal(*found)
    if "tree" in name:
        assert torch.equal(found[0], target.generate(ids, assistant=PromptLookup(7, 7), **kwargs))


@pytest.mark.scheduled
def test_trees_are_scheduled_under_a_seed_and_say_the_same_text(target):
    """Trees are not drawn, so lengths may be measured: the text is that of the seed all the same."""
    from hf_specdec import loop

    fixed = []
    true_session = loop.SpeculativeLoop._new_session

    def recorded(self, options):
        fixed.append((self.is_drawn, self.is_scheduled))
        return true_session(self, options)

    ids, mask = prompts(3)
    kwargs = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": True, "seed": 4, "pad_token_id": 0}
    head = initialised(small(taps=(0, 1, 2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.SpeculativeLoop, "_new_session", recorded)
        found = [target.generate(ids, assistant=Eagle(head, tree=TREE), **kwargs) for _ in range(3)]
        target.generate(ids, assistant=Eagle(head), **kwargs)
    assert all(torch.equal(found[0], text) for text in found)
    assert fixed == [(False, True)] * 3 + [(True, False)]


def test_where_trees_cannot_be_masked_chains_are_drawn(flash_kernels):
    model = with_attention("flash_attention_2", num_hidden_layers=4)
    drafter = DRAFTERS["eagle3-tree"]()
    plain, out = texts(model, drafter, 3)
    assert torch.equal(plain, out) and drafter.stats.accepted > 0
    ids, mask = prompts(3)
    kwargs = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": True, "seed": 1, "pad_token_id": 0}
    assert torch.equal(*(model.generate(ids, assistant=drafter, **kwargs) for _ in range(2)))


@pytest.mark.parametrize("name", [*ALL, "pard"])
def test_copies_and_pickles_draft_the_same(name, target):
    drafter = ParallelDraft(jittered(target), 3, 4) if name == "pard" else drafter_of(name)
    plain, _ = texts(target, drafter, 3)
    num_accepted = drafter.stats.accepted
    pickled = pickle.dumps(drafter)
    if name != "pard":  # what it shares with the target is not in it
        assert len(pickled) < 1.3 * sum(
            w.nbytes for w in (drafter.model if "p-" in name else drafter.head).parameters()
        )
    restored = pickle.loads(pickled)
    before = restored.stats.accepted
    assert torch.equal(plain, texts(target, restored, 3)[1])
    assert restored.stats.accepted - before == num_accepted
    assert copy.deepcopy(drafter) is drafter
    if name != "pard":
        kind = type(drafter)
        copied = copy.deepcopy(drafter.model if kind is ParallelDraft else drafter.head)
        again = kind(copied, num_draft_tokens=drafter.options.num_draft_tokens)
        assert torch.equal(plain, texts(target, again, 3)[1])


def test_a_parallel_model_takes_tokenizers_alone(target):
    for given in ("tokenizer", "target_tokenizer"):
        with pytest.raises(ValueError, match="must be Transformers tokenizers, not str"):
            ParallelDraft(target, 3, **{given: "org/name"})
    with pytest.raises(ValueError, match="must be Transformers tokenizers, not str"):
        target.generate(prompts(1)[0], assistant=ParallelDraft(target, 3, tokenizer=trained_tokenizer()), tokenizer="a")


def test_a_parallel_model_shares_the_targets_vocabulary(target):
    other = tiny(vocab=72)
    with pytest.raises(ValueError, match=r"scores 72 ids and the target 64.*ParallelDraft\(model, tokenizer="):
        texts(target, ParallelDraft(other, 3, 4), 1)
    tokenizer = trained_tokenizer()
    ours, theirs = tiny(vocab=len(tokenizer)), tiny(vocab=len(tokenizer) + 8, num_hidden_layers=4)
    padded = ParallelDraft(ours, 3, 4, tokenizer=tokenizer, target_tokenizer=tokenizer)
    plain, out = texts(theirs, padded, 3)
    assert torch.equal(plain, out) and padded.stats.drafted > 0
    changed = trained_tokenizer()
    changed.add_tokens(["apricot"])
    with pytest.raises(ValueError, match="differ in 1 tokens"):
        texts(theirs, ParallelDraft(ours, 3, 4, tokenizer=tokenizer, target_tokenizer=changed), 1)
    with pytest.raises(ValueError, match="language models only"):
        ParallelDraft(initialised(small(mask_token_id=3)), tokenizer=tokenizer)


def test_a_parallel_model_whose_cache_cannot_be_rearranged_drafts_in_lockstep(target):
    model = small_family("lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
    drafter = ParallelDraft(model, 3, 4)
    for num_rows, changes in ((1, {}), (3, {"logits_processor": [Pass()]})):
        plain, out = texts(target, drafter, num_rows, **changes)
        assert torch.equal(plain, out) and drafter.stats.drafted > 0
    with pytest.raises(ValueError, match="cannot draft for several rows"):
        texts(target, drafter, 3)


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


def test_taps_and_trees_may_be_said_when_a_folder_is_opened(tmp_path):
    target = tiny(num_hidden_layers=files.DEPTH)
    folder = files.write(tmp_path / "head", *files.eagle3())
    drafter = load_drafter(folder, target, taps=(0, 1, 2), tree=TREE)
    assert drafter.head.config.taps == (0, 1, 2) and drafter.tree == TREE
    plain, out = texts(target, drafter, 3)
    assert torch.equal(plain, out) and drafter.stats.drafted > 20
    target.save_pretrained(tmp_path / "plain")
    for options in ({"taps": (0, 1, 2)}, {"tree": TREE}):
        with pytest.raises(ValueError, match="plain"):
            load_drafter(str(tmp_path / "plain"), target, **options)
    with pytest.raises(ValueError, match="tree="):
        load_drafter(files.write(tmp_path / "parallel", *files.parallel()), target, tree=TREE)


@pytest.mark.parametrize("build", ["eagle3", "eagle3-tree", "eagle", "p-eagle"])
def test_a_head_drafts_from_its_own_threads_states(build):
    """Another thread runs the same target meanwhile, plainly or with a head of its own."""
    target = hf_specdec.enable(tiny(num_hidden_layers=4))
    ids, mask = prompts(2)
    kwargs = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    plain = target.generate(ids, assistant=False, **kwargs)

    def answers(assistant):
        return [target.generate(ids, assistant=assistant, **kwargs) for _ in range(3)]

    with ThreadPoolExecutor(3) as pool:
        assistants = (False, DRAFTERS[build](), DRAFTERS[build]())
        for found in pool.map(answers, assistants):
            assert all(torch.equal(text, plain) for text in found)


def test_bad_input_is_refused():
    head, masked = initialised(small()), initialised(small(mask_token_id=3))
    for build, message in [
        (lambda: Eagle(tiny()), "EagleHead"),
        (lambda: Eagle(masked), "ParallelDraft"),
        (lambda: Eagle(head, tree=3), "DraftTree"),
        (lambda: DraftTree(depth=0), "depth=0"),
        (lambda: DraftTree(top_k=0), "top_k=0"),
        (lambda: DraftTree(total_tokens=-1), "total_tokens=-1"),
        (lambda: DraftTree(depth=2.5), "depth=2.5"),
        (lambda: DraftTree(top_k=True), "top_k=True"),
        (lambda: Eagle(head, num_draft_tokens=0), "num_draft_tokens=0"),
        (lambda: Eagle(head, draft_temperature=-1), "draft_temperature=-1"),
        (lambda: ParallelDraft(tiny(), mask_token_id=-1), "mask_token_id=-1"),
        (lambda: ParallelDraft(3), "not int"),
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


@pytest.mark.parametrize("build", [files.eagle1, files.eagle3, files.specforge, files.deepspec, files.parallel])
def test_an_assistant_that_cannot_be_opened_leaves_the_target_as_it_was(build, tmp_path):
    """A head of another target, by name: nothing of it is used, and the next call is plain's."""
    target = hf_specdec.enable(tiny(num_hidden_layers=files.DEPTH, hidden_size=48))
    folder = files.write(tmp_path, *build())
    ids = prompts(1)[0]
    kwargs = {"max_new_tokens": 8, "do_sample": False}
    plain = target.generate(ids, **kwargs)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{tmp_path.name}.*cannot be opened"):
            target.generate(ids, assistant=folder, **kwargs)
    assert torch.equal(plain, target.generate(ids, assistant=False, **kwargs))


def test_a_head_that_taps_too_deep_is_not_bound_to_the_target():
    head = initialised(small())
    with pytest.raises(ValueError, match="taps"):
        Eagle(head).check(tiny(num_hidden_layers=2))
    assert head._bound_embedding == ()
