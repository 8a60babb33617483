"""Heads with a cache agree with the slow ones of `reference_heads`, in every dialect."""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial

import pytest
import torch
from transformers import DynamicCache

from hf_specdec.checkpoints import load_head
from hf_specdec.heads import EagleConfig, EagleHead, LayerConfig
from tests import reference_heads as files
from tests.models import tiny

QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
DIALECTS = {
    "eagle": files.eagle1,
    "eagle-bias": lambda dtype: files.eagle1(dtype, bias=True),
    "eagle-qwen2": lambda dtype: files.eagle1(dtype, biases=QKV),
    "eagle-two-layers": lambda dtype: files.eagle1(dtype, layers=2),
    "old-speculators": files.old_speculators,
    "eagle3": files.eagle3,
    "specforge": files.specforge,
    "partial-rope": lambda dtype: files.specforge(dtype, partial_rotary_factor=0.5),
    "modelopt": files.modelopt,
    "without-taps": files.without_taps,
    "deepspec": files.deepspec,
    "p-eagle": files.parallel,
    "p-eagle-hidden-norm": lambda dtype: files.parallel(dtype, layers=2, plain_norm="hidden_norm"),
}
for chosen in itertools.chain.from_iterable(itertools.combinations(NORMS, count) for count in range(5)):
    build = partial(files.speculators, **dict.fromkeys(chosen, True))
    DIALECTS["-".join(("speculators", *chosen))] = build


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["float64", "float32"])
def target(request):
    return tiny(num_hidden_layers=files.DEPTH, dtype=request.param)


def opened(tmp_path, target, config, tensors):
    """Our head and the slow one of the same file."""
    head = load_head(files.write(tmp_path, config, tensors), target)
    embedding, lm_head = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()
    return head, files.ReferenceHead(config, tensors, embedding, lm_head)


def inputs(head, num_tokens, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = files.T * max(1, head.config.num_taps)
    features = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, files.V, (num_tokens,), generator=generator), features


def assert_close(ours, reference):
    tolerance = 1e-10 if ours.dtype == torch.float64 else 1e-5
    expected = torch.stack(reference) if isinstance(reference, list) else reference
    assert ours.shape == expected.shape
    scale = expected.abs().max().clamp(min=1)
    assert ((ours - expected).abs().max() / scale).item() <= tolerance


@torch.no_grad()
@pytest.mark.parametrize("dialect", DIALECTS)
def test_chunks_a_tree_and_feedback_agree_with_the_slow_forward(dialect, target, tmp_path):
    head, slow = opened(tmp_path, target, *DIALECTS[dialect](target.dtype))
    tokens, features = inputs(head, 7, target.dtype)
    hidden = [slow.combined(feature) for feature in features]
    assert_close(head.combine(features[None])[0], hidden)
    cache, chunks = DynamicCache(), []
    for start, end in ((0, 4), (4, 5), (5, 7)):
        positions = torch.arange(start, end)[None]
        chunks.append(head(tokens[None, start:end], head.combine(features[None, start:end]), positions, None, cache))
    states = torch.cat(chunks, dim=1)[0]
    expected = slow.states(tokens.tolist(), hidden, list(range(7)), torch.ones(7, 7).tril())
    assert_close(states, expected)
    assert_close(head.logits(states), [slow.logits(state) for state in expected])

    # A tree behind the chain: three children of its end, and one of the second of them.
    children, parents = torch.tensor([9, 3, 21, 5]), [6, 6, 6, 8]
    sees = torch.ones(11, 11).tril()
    sees[7:, 7:] = torch.eye(4)
    sees[10, 8] = 1
    first = head.feedback(states[-1:]).expand(3, -1)[None]
    mask = sees.bool()[None, None]
    siblings = head(children[None, :3], first, torch.tensor([[7, 7, 7]]), mask[:, :, 7:10, :10], cache)
    last = head(children[None, 3:], head.feedback(siblings[:, 1:2]), torch.tensor([[8]]), mask[:, :, 10:], cache)
    fed = [*hidden, *[slow.feedback(expected[6])] * 3]
    every = [*tokens.tolist(), *children.tolist()]
    grown = slow.states(every[:10], fed, [*range(7), 7, 7, 7], sees[:10, :10])
    fed.append(slow.feedback(grown[parents[3]]))
    grown = slow.states(every, fed, [*range(7), 7, 7, 7, 8], sees)
    assert_close(torch.cat([siblings, last], dim=1)[0], grown[7:])


@torch.no_grad()
def test_masked_slots_agree_with_the_slow_forward(target, tmp_path):
    head, slow = opened(tmp_path, target, *files.parallel(target.dtype))
    tokens, features = inputs(head, 3, target.dtype)
    tokens = torch.cat([tokens, torch.tensor([63, 63])])
    hidden = torch.cat([head.combine(features), head.masked_hidden().expand(2, -1)])
    states = head(tokens[None], hidden[None], torch.arange(5)[None])[0]
    slow_hidden = [*[slow.combined(feature) for feature in features], slow.masked(), slow.masked()]
    assert_close(states, slow.states(tokens.tolist(), slow_hidden, list(range(5)), torch.ones(5, 5).tril()))


def of_float64(target):
    if target.dtype != torch.float64:
        pytest.skip("one dtype is enough")


@torch.no_grad()
def test_the_same_head_in_another_dialect_drafts_the_same(target, tmp_path):
    of_float64(target)
    config, tensors = files.eagle3(target.dtype)
    renamed = {"model." + name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    lm_head = renamed.pop("model.lm_head.weight")
    renamed["lm_head.weight"] = lm_head
    others = {
        "plain": (config, tensors),
        "specforge": (files.specforge()[0], tensors),
        "modelopt": (files.modelopt()[0], {name: value for name, value in renamed.items() if name != "model.t2d"}),
        "speculators": (files.speculators()[0], renamed),
    }
    others["speculators"][0]["transformer_layer_config"]["rope_theta"] = 10000.0
    results, taps = [], set()
    for name, (settings, weights) in others.items():
        head = load_head(files.write(tmp_path / name, settings, weights), target)
        tokens, features = inputs(head, 5, target.dtype)
        results.append(head.logits(head(tokens[None], head.combine(features[None]), torch.arange(5)[None])))
        taps.add(head.config.taps)
    assert all(torch.equal(results[0], result) for result in results)
    assert taps == {(2, 4, 5)}


@torch.no_grad()
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rope_is_that_of_the_host(rope, target):
    of_float64(target)
    parameters = {"rope_theta": 150000.0} | rope
    model = tiny(rope_parameters=dict(parameters))
    config = small(head_dim=8, rope=parameters | {"max_position_embeddings": 256})
    positions = torch.tensor([[0, 1, 7, 200]])
    ours = EagleHead(config).rotary(positions, torch.float64)
    theirs = model.model.rotary_emb(torch.zeros(1, 4, 32, dtype=torch.float64), positions)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine[:, 0], other)


def small(**changes) -> EagleConfig:
    sizes = {"hidden_size": 32, "target_hidden_size": 32, "vocab_size": 64, "draft_vocab_size": 64}
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48, "taps": (1, 2, 3)}
    return EagleConfig(**({"kind": "eagle3", "layers": (LayerConfig(True),)} | sizes | shape | changes))


def initialised(config: EagleConfig) -> EagleHead:
    torch.manual_seed(0)
    head = EagleHead(config).double()
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return head


def test_a_new_head_is_not_a_number_anywhere():
    head = EagleHead(small(own_embedding=True, qk_norm=True, fc_bias=True, mask_token_id=3))
    assert all(weight.isnan().all() for weight in head.parameters())
    assert EagleHead(small(draft_vocab_size=40)).draft_ids.tolist() == [-1] * 40


def test_only_what_is_ours_is_saved_and_what_is_shared_must_be_bound():
    head = initialised(small(own_lm_head=False))
    tokens, hidden, positions = torch.tensor([[1]]), torch.zeros(1, 1, 32).double(), torch.tensor([[0]])
    with pytest.raises(ValueError, match=r"embeddings; call head.bind"):
        head(tokens, hidden, positions)
    with pytest.raises(ValueError, match=r"output layer; call head.bind"):
        head.logits(hidden)
    before = set(head.state_dict())
    head.bind(tiny())
    assert set(head.state_dict()) == before and not any("embed" in name or "lm_head" in name for name in before)
    assert head.logits(head(tokens, hidden, positions)).shape == (1, 1, 64)


@pytest.mark.parametrize(("changes", "message"), [({"vocab": 63}, "64 token ids"), ({"hidden_size": 16}, "32 wide")])
def test_a_head_is_not_bound_to_another_target(changes, message):
    with pytest.raises(ValueError, match=message):
        EagleHead(small()).bind(tiny(**changes))


def test_frequencies_stay_fine_when_weights_are_coarse():
    assert EagleHead(small()).to(torch.bfloat16).rotary.frequencies.dtype == torch.float32


@torch.no_grad()
def test_a_window_hides_what_is_further_back():
    full, windowed = (initialised(small(own_embedding=True, layers=(LayerConfig(True, window=w),))) for w in (None, 3))
    tokens, hidden = torch.arange(8)[None], torch.randn(1, 8, 32).double()
    positions = torch.arange(8)[None]
    band = torch.ones(8, 8, dtype=torch.bool).tril().triu(-2)
    expected = full(tokens, hidden, positions, band[None, None])
    cache = DynamicCache()
    parts = [
        windowed(tokens[:, a:b], hidden[:, a:b], positions[:, a:b], None, cache) for a, b in ((0, 5), (5, 6), (6, 8))
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "medusa"}, "kind="),
        ({"layers": ()}, "needs a layer"),
        ({"num_heads": 3}, "heads"),
        ({"head_dim": 7}, "odd"),
        ({"hidden_size": 0}, "positive"),
        ({"draft_vocab_size": 65}, "larger"),
        ({"taps": ()}, "needs taps"),
        ({"taps": (3, 2)}, "ascend"),
        ({"has_fc": False}, "one tap"),
        ({"mask_token_id": 64}, "below 64"),
        ({"final_norm": False, "norm_output": True}, "final_norm"),
        ({"kind": "eagle"}, "no taps"),
        ({"embed_norm": True}, "belongs to"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0 must be an integer from 1 on"),
        ({"num_draft_tokens": 2.5}, "num_draft_tokens=2.5"),
        ({"hidden_size": 32.0}, "positive integer"),
        ({"taps": (1.0, 2.0)}, "integers"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan"),
        ({"rms_norm_eps": -1e9}, "rms_norm_eps"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x'"),
        ({"rope": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type='dynamic'"),
    ],
)
def test_contradictory_shapes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_a_head_that_reads_its_taps_has_no_mask():
    with pytest.raises(ValueError, match="no mask_hidden"):
        EagleHead(small()).masked_hidden()


@torch.no_grad()
def test_half_precision_drafts_nearly_the_same():
    fine = initialised(small(own_embedding=True, layers=(LayerConfig(True), LayerConfig(False))))
    coarse = copy.deepcopy(fine).to(torch.bfloat16)
    tokens, features, positions = torch.arange(6)[None], torch.randn(1, 6, 96).double(), torch.arange(6)[None]
    expected = fine.logits(fine(tokens, fine.combine(features), positions))
    states = coarse(tokens, coarse.combine(features.bfloat16()), positions, None, DynamicCache())
    found = coarse.logits(states)
    assert found.dtype == torch.bfloat16
    assert (found.double() - expected).norm() < 0.05 * expected.norm()
