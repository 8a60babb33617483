"""Everything on one device: the CPU, a pretended second device, or a GPU (`pytest -m gpu`; two minutes on one).

The pretended one refuses tensors that were left on the CPU (`second_device.py`), so what would fail on a GPU for that
reason fails here. Random numbers come from the host wherever they are used: a sampled text is the CPU's on any device.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import CompileConfig, LogitsProcessorList

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
)
from hf_specdec.drafters.lookup_on_device import DeviceLookupSession
from tests.models import jittered, prompts, tiny
from tests.models import small as small_target
from tests.reference import assert_follows, target_law
from tests.second_device import NAME, SecondDevice
from tests.test_contract import DRAFTERS as CONTRACT
from tests.test_eagle import cyclic_target, perfect, perfect_first
from tests.test_encoder_decoder import built, t5
from tests.test_heads import initialised, small
from tests.test_law import PROMPT, VOCAB, first_tokens
from tests.test_unusual_targets import dispatched
from tests.token_pairs import overlapping
from tests.tree_drafters import Mixed, Oracle

GPU = "cuda:0"
CUDA = pytest.param(
    GPU,
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
COMMON = {"eos_token_id": [2, 7, 11], "pad_token_id": 0}
GREEDY = COMMON | {"do_sample": False}
SAMPLED = COMMON | {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 0, "seed": 3}


class Place:
    """A device, how things get there, and how much is asked of it: other tests ask the CPU for more."""

    def __init__(self, name, pretended=None):
        self.name, self.pretended = name, pretended
        self.batches = [1, 3] if name == GPU else [3]
        self.num_tokens = {GPU: 40, NAME: 7}.get(name, 16)

    def model(self, model):
        """A copy there."""
        model = copy.deepcopy(model)
        return self.pretended.take(model) if self.pretended else model.to(self.name)

    def said(self, model, drafter=False, num_rows=3, vocab=64, **settings):
        """What a model generates there."""
        ids, mask = prompts(num_rows, vocab=vocab)
        inputs = {"input_ids": ids.to(self.name), "attention_mask": mask.to(self.name)}
        return model.generate(**inputs, assistant=drafter, **({"max_new_tokens": self.num_tokens} | settings))


CPU = Place("cpu")


@pytest.fixture(params=["cpu", NAME, CUDA])
def place(request):
    if request.param != NAME:
        yield Place(request.param)
        return
    with torch.no_grad(), SecondDevice() as device:
        yield Place(NAME, device)


@pytest.fixture(params=["cpu", CUDA])
def real_place(request):
    return Place(request.param)


@pytest.fixture(scope="module")
def target():
    return tiny(num_hidden_layers=3)


def heads(**sizes):
    return initialised(small(taps=(0, 1, 2), **sizes))


def cross_vocabulary(place, target):
    theirs, ours = overlapping(75)
    return DraftModel(place.model(tiny(vocab=len(ours), seed=4)), 4, tokenizer=ours, target_tokenizer=theirs)


STRATEGIES = {
    "draft-model": lambda place, target: DraftModel(place.model(jittered(target)), 4),
    "draft-model on the CPU": lambda place, target: DraftModel(jittered(target), 4),
    "cross-vocabulary": cross_vocabulary,
    "prompt-lookup": lambda place, target: PromptLookup(1, 3),
    "prompt-lookup on the device": lambda place, target: PromptLookup(1, 3, on_device=True),
    "suffix": lambda place, target: Suffix(max_spec_factor=3.0),
    "token-recycling": lambda place, target: TokenRecycling(),
    "early-exit": lambda place, target: EarlyExit(2, 4),
    "eagle3": lambda place, target: Eagle(place.model(heads()), 4),
    "eagle3, tree": lambda place, target: Eagle(place.model(heads()), tree=DraftTree(5, 4, 30)),
    "p-eagle": lambda place, target: ParallelDraft(place.model(heads(mask_token_id=3)), num_draft_tokens=4),
    "pard": lambda place, target: ParallelDraft(place.model(jittered(target)), 3, num_draft_tokens=4),
    "mixed": lambda place, target: Mixed(),
    "auto": lambda place, target: Auto(
        [Suffix(), TokenRecycling(), DraftModel(place.model(jittered(target)), num_draft_tokens=4)]
    ),
}


def test_every_registered_drafter_is_tried(target):
    assert set(CONTRACT) <= {type(build(CPU, target)) for build in STRATEGIES.values()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_greedy_text_is_plains_and_sampled_text_the_cpus(strategy, place, target):
    """What copies learns from the first call, and is sampled with after that."""
    here, there = (hf_specdec.enable(where.model(target)) for where in (place, CPU))
    given = {"max_new_tokens": place.num_tokens}
    for num_rows in place.batches:
        drafter, other = (STRATEGIES[strategy](where, target) for where in (place, CPU))
        for where, model, chosen in ((place, here, drafter), (CPU, there, other)):
            plain = where.said(model, num_rows=num_rows, **GREEDY, **given)
            assert torch.equal(where.said(model, chosen, num_rows, **GREEDY, **given), plain)
        assert drafter.stats.drafted == other.stats.drafted > 0
        expected = CPU.said(there, other, num_rows, **SAMPLED, **given)
        assert torch.equal(place.said(here, drafter, num_rows, **SAMPLED).cpu(), expected)


@pytest.mark.parametrize("family", ["qwen3", "mistral8", "gemma3", "gpt2"])
def test_families_with_trees_of_the_text(family, place):
    """Masks of windows, and positions: accepted paths of trees are gathered in every kind of cache."""
    if (family, place.name) == ("gpt2", NAME):
        pytest.skip("the host's warning about padding makes a tensor where the pretended device cannot see it")
    here = hf_specdec.enable(place.model(tiny(family)))
    plain = place.said(here, **GREEDY)
    oracle = Oracle(plain.cpu(), 12, is_deep=True)
    for drafter in (oracle, DraftModel(place.model(jittered(tiny(family))), 4)):
        assert torch.equal(place.said(here, drafter, **GREEDY), plain)
    assert oracle.takes_trees == [True] and oracle.stats.accepted > 3


@pytest.mark.parametrize("drafter", ["eagle", "eagle3", "eagle3, tree", "p-eagle"])
def test_perfect_heads_are_believed(drafter, place):
    """States of another layer or position would be refused."""
    build = {
        "eagle": lambda: Eagle(place.model(perfect_first()), 5),
        "eagle3": lambda: Eagle(place.model(perfect()), 5),
        "eagle3, tree": lambda: Eagle(place.model(perfect()), tree=DraftTree(5, 4, 30)),
        "p-eagle": lambda: ParallelDraft(place.model(perfect(mask=3)), num_draft_tokens=1),
    }
    here, chosen = hf_specdec.enable(place.model(cyclic_target())), build[drafter]()
    place.said(here, chosen, vocab=32, do_sample=False, pad_token_id=0, max_new_tokens=25)
    assert chosen.stats.mean_acceptance_length > (1.8 if drafter == "p-eagle" else 4)
    assert drafter == "eagle3, tree" or chosen.stats.accepted == chosen.stats.drafted


@pytest.mark.parametrize("shares_encoder", [False, True])
def test_encoder_decoders(shares_encoder, place):
    model = built(t5)
    here = hf_specdec.enable(place.model(model))
    drafter = DraftModel(place.model(jittered(model)), shares_encoder=shares_encoder)
    assert torch.equal(place.said(here, drafter, **GREEDY), place.said(here, **GREEDY))
    assert drafter.stats.accepted > 0


def test_scores_and_processors_of_text(place, target):
    """What is returned lies on the device and is plain's; processors see every row's text there."""
    here = hf_specdec.enable(place.model(target))
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
    given = GREEDY | asked | {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "eos_token_id": None}
    plain = place.said(here, **given)
    for drafter in (DraftModel(place.model(jittered(target)), 4), TokenRecycling(), EarlyExit(2, 4)):
        ours = place.said(here, drafter, **given)
        assert torch.equal(ours.sequences, plain.sequences)
        for mine, theirs in zip(ours.scores, plain.scores, strict=True):
            assert mine.device == theirs.device and torch.allclose(mine.cpu(), theirs.cpu(), atol=1e-6)
        assert len(ours.hidden_states) == len(plain.hidden_states)


def test_static_caches(place, target):
    here = hf_specdec.enable(place.model(target))
    fixed = GREEDY | {"cache_implementation": "static", "disable_compile": True}
    for num_rows in place.batches:
        plain = place.said(here, num_rows=num_rows, **GREEDY)
        for drafter in (PromptLookup(1, 3), DraftModel(place.model(jittered(target)), 4), Oracle(plain.cpu(), 12)):
            assert torch.equal(place.said(here, drafter, num_rows, **fixed), plain)


def test_compiled_passes(real_place):
    """With graphs of the device on a GPU; on the CPU, graphs run as they were recorded."""
    torch._dynamo.reset()
    is_cuda = real_place.name == GPU
    config = CompileConfig(mode="reduce-overhead", dynamic=False) if is_cuda else CompileConfig(backend="eager")
    config._compile_all_devices = True
    here = hf_specdec.enable(real_place.model(tiny()))
    plain = real_place.said(here, **GREEDY)
    fixed = GREEDY | {"cache_implementation": "static", "compile_config": config}
    for drafter in (PromptLookup(1, 3, num_draft_tokens=4), DraftModel(real_place.model(jittered(tiny())), 4)):
        for _ in range(3):  # recorded, warmed up, replayed
            assert torch.equal(real_place.said(here, drafter, **fixed), plain)
    torch._dynamo.reset()


LAWS = {
    "draft-model": lambda place: DraftModel(place.model(small_target(5, layers=1)), 3),
    "prompt-lookup": lambda place: PromptLookup(1, 2, num_draft_tokens=3),
    "early-exit": lambda place: EarlyExit(1, 3),
    "eagle3": lambda place: Eagle(place.model(heads(vocab_size=VOCAB, draft_vocab_size=VOCAB).float()), 3),
    "mixed trees": lambda place: Mixed(VOCAB),
}


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("drafter", LAWS)
def test_law(drafter, verification, real_place, monkeypatch):
    """4 calls of 250 rows on the CPU, 20 on a GPU: 1,000 and 5,000 samples."""
    if real_place.name != "cpu":
        monkeypatch.setattr("tests.test_law.PROMPT", PROMPT.to(real_place.name))
    law = target_law(small_target(0), PROMPT, LogitsProcessorList(), 3, VOCAB)
    here = hf_specdec.enable(real_place.model(small_target(0)))
    calls = 4 if real_place.name == "cpu" else 20
    samples = first_tokens(here, calls, 250, assistant=LAWS[drafter](real_place), verification=verification)
    assert_follows(samples.cpu(), law)


def test_large_batches_look_up_on_the_device_by_themselves(place, target, monkeypatch):
    begun = []
    propose = DeviceLookupSession.propose
    monkeypatch.setattr(DeviceLookupSession, "propose", lambda self, *args: begun.append(1) or propose(self, *args))
    here = hf_specdec.enable(place.model(target))
    assert torch.equal(place.said(here, PromptLookup(), 16, **GREEDY), place.said(here, num_rows=16, **GREEDY))
    assert bool(begun) == (place.name != "cpu")


@pytest.mark.parametrize("away", ["cpu", "disk"])
def test_device_maps(away, real_place, target, tmp_path):
    """As device_map="auto" leaves a model that does not fit: layers that are brought to the device when they run."""
    model = tiny()
    here = hf_specdec.enable(dispatched(tiny(), tmp_path, [real_place.name, away, real_place.name]))
    plain = CPU.said(hf_specdec.enable(model), **GREEDY, max_new_tokens=real_place.num_tokens)
    for drafter in (PromptLookup(1, 3), DraftModel(real_place.model(jittered(model)), 4), TokenRecycling()):
        assert torch.equal(real_place.said(here, drafter, **GREEDY).cpu(), plain)
        assert drafter.stats.drafted > 0


def test_a_target_in_bfloat16_says_what_its_own_scores_say(real_place):
    """A pass over several tokens rounds in its own way: texts may part from plain's, where two tokens score alike."""
    here = hf_specdec.enable(real_place.model(tiny(dtype=torch.bfloat16)))
    drafter = DraftModel(real_place.model(jittered(tiny(dtype=torch.bfloat16))), 4)
    text = real_place.said(here, drafter, **(GREEDY | {"eos_token_id": None}))
    count, mask = real_place.num_tokens, prompts(3)[1].to(real_place.name)
    mask = torch.nn.functional.pad(mask, (0, count), value=1)
    with torch.no_grad():
        logits = here(input_ids=text, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0)).logits.float()
    scores = logits[:, -count - 1 : -1]
    chosen, best = scores.gather(2, text[:, -count:, None])[..., 0], scores.amax(2)
    assert ((best - chosen) <= 0.05 * best.abs().clamp(min=1)).all()
