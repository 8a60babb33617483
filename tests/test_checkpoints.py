"""Published checkpoints are recognised and open as they are; what does not fit is refused by name."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5ForConditionalGeneration

from hf_specdec.checkpoints import Dialect, headers, load_head, recognise
from hf_specdec.checkpoints import files as reader
from hf_specdec.checkpoints.write import write_head
from hf_specdec.heads import EagleHead
from hf_specdec.training.recipes.heads import head_config, initialise
from tests import reference_heads as files
from tests.models import tiny

LM = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64}


@pytest.fixture(scope="module")
def target():
    return tiny(num_hidden_layers=files.DEPTH)


def written(folder, pair, **changes) -> str:
    """A checkpoint with some settings changed (`None` removes one)."""
    config, tensors = pair
    config = {key: value for key, value in (config | changes).items() if value is not None or key in config}
    return files.write(folder, {key: value for key, value in config.items() if value is not None}, tensors)


# --- recognition ------------------------------------------------------------------------------------------


RECOGNISED = {
    "eagle": (files.eagle1(), ("eagle", "eagle", None)),
    "old": (files.old_speculators(), ("speculators eagle", "eagle", None)),
    "eagle3": (files.eagle3(), ("eagle3", "eagle", None)),
    "specforge": (files.specforge(), ("specforge", "eagle", None)),
    "modelopt": (files.modelopt(), ("modelopt", "eagle", None)),
    "speculators": (files.speculators(), ("speculators eagle3", "eagle", None)),
    "deepspec": (files.deepspec(), ("deepspec", "eagle", None)),
    "p-eagle": (files.parallel(), ("p-eagle", "parallel-head", 63)),
    "pard": ((LM | {"pard_token": 60, "spd_type": "pard"}, None), ("pard", "parallel-model", 60)),
}


@pytest.mark.parametrize("name", RECOGNISED)
def test_every_supported_kind_is_recognised(name, tmp_path):
    pair, expected = RECOGNISED[name]
    assert recognise(written(tmp_path, pair)) == Dialect(*expected)


def test_the_speculators_kind_of_parallel_head_is_recognised_by_either_key(tmp_path):
    for key in ("mask_token_id", "ptd_token_id"):
        pair = files.speculators(kind="peagle", **{key: 60})
        assert recognise(written(tmp_path / key, pair)) == Dialect("speculators peagle", "parallel-head", 60)


@pytest.mark.parametrize("key", ["mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id", "dflash"])
def test_the_mask_of_a_parallel_head_is_found_under_any_key(key, tmp_path):
    config, tensors = files.parallel()
    config.pop("ptd_token_id")
    config |= {"dflash_config": {"mask_token_id": 60}} if key == "dflash" else {key: 60}
    folder = written(tmp_path, (config, tensors))
    assert recognise(folder) == Dialect("p-eagle", "parallel-head", 60)
    assert load_head(folder, tiny(num_hidden_layers=8)).config.mask_token_id == 60


def test_a_language_model_is_recognised_whatever_its_depth(tmp_path):
    for depth in (1, 2):
        tiny(num_hidden_layers=depth).save_pretrained(tmp_path / str(depth))
        assert recognise(str(tmp_path / str(depth))) == Dialect("causal-lm", "causal-lm")


def test_models_with_an_encoder_or_in_other_formats_are_language_models(tmp_path):
    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    assert recognise(str(tmp_path / "t5")).family == "causal-lm"
    assert recognise(files.write(tmp_path / "gguf", LM | {"num_hidden_layers": 1}, None)).family == "causal-lm"


def test_a_head_that_lost_its_fc_is_no_language_model(tmp_path):
    """Nor is one with embeddings: a language model has a final norm, and its layers stand in a model."""
    config, tensors = files.eagle1()
    del tensors["fc.weight"]
    for further in ({}, {"embed_tokens.weight": torch.ones(files.V, files.H)}):
        with pytest.raises(ValueError, match=r"no known kind.*/model\.safetensors holds .*layers\.0\."):
            recognise(files.write(tmp_path, config, tensors | further))


def test_a_model_with_layers_for_further_tokens_is_a_language_model(tmp_path):
    names = ("model.embed_tokens", "model.layers.1.mlp.gate_proj", "model.layers.2.eh_proj", "model.norm", "lm_head")
    config = LM | {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1}
    location = files.write(tmp_path, config, {f"{name}.weight": torch.ones(2) for name in names})
    assert recognise(location) == Dialect("causal-lm", "causal-lm")


def test_a_language_model_with_a_mask_token_and_no_more_is_parallel(tmp_path):
    tiny().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pard_token": 60}))
    assert recognise(str(tmp_path)) == Dialect("pard", "parallel-model", 60)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"spd_type": "pard2", "pard_token": 60, "pard2_scale": 0.02} | LM, "PARD-2"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 1}}, "DFlash"),
        ({"architectures": ["DFlash2DraftModel"], "dflash_config": {}}, "DFlash2"),
        ({"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [1], "markov_rank": 256}, "DSpark"),
        ({"architectures": ["Gemma4DSparkModel"], "markov_rank": 0}, "DSpark"),
        ({"dflash_config": {"projector_type": "dspark"}}, "DSpark"),
        ({"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [2, 10]}, "DFlash"),
        ({"speculators_model_type": "mtp"}, "MTP"),
        ({"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x/y"}, "Medusa"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"], "draft_vocab_size": 9}, "latent attention"),
        ({"speculators_model_type": "mlp"}, "speculators_model_type='mlp'"),
    ],
)
def test_known_kinds_that_are_not_supported_are_refused_by_name(config, name, tmp_path):
    location = files.write(tmp_path, config, None)
    for opens in (recognise, lambda where: load_head(where, None)):
        with pytest.raises(ValueError, match=f"{name}.* not supported yet"):
            opens(location)


def test_a_file_of_mtp_layers_alone_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="MTP drafter"):
        recognise(files.write(tmp_path, {"model_type": "x"}, {"mtp.layers.0.norm.weight": torch.ones(4)}))


@pytest.mark.parametrize("config", [{}, LM, {"architectures": ["Thing"]}])
def test_an_unknown_kind_is_told_what_was_looked_for(config, tmp_path):
    with pytest.raises(
        ValueError, match=r"no known kind of drafter.*draft_vocab_size.*fusion_fc.*mask_hidden.*spd_type"
    ):
        recognise(files.write(tmp_path, config, {"thing.weight": torch.ones(4)}))


def test_a_complete_model_is_no_head(target, tmp_path):
    target.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="complete language model"):
        load_head(str(tmp_path), target)


# --- files that open --------------------------------------------------------------------------------------


def test_a_head_takes_the_targets_dtype_and_is_bound(target, tmp_path):
    location = files.write(tmp_path, *files.eagle3(torch.float16), pickled=True)
    head = load_head(location, target)
    assert (head.dtype, head.device, head.training) == (torch.float64, target.device, False)
    assert all(weight.isfinite().all() for weight in head.parameters())
    assert not any("embed" in name for name, _ in head.named_parameters())
    head(torch.tensor([[1]]), head.combine(torch.zeros(1, 1, 96).double()), torch.tensor([[0]]))


def test_draft_ids_follow_from_offsets_or_from_members(target, tmp_path):
    config, tensors = files.eagle3()
    expected = tensors["t2d"].nonzero()[:, 0]
    for missing in ("t2d", "d2t"):
        left = {name: value for name, value in tensors.items() if name != missing}
        head = load_head(files.write(tmp_path / missing, config, left), target)
        assert torch.equal(head.draft_ids, expected)
        assert torch.equal(head.to_target(torch.tensor([[0], [39]])), expected[[0, 39]][:, None])


def test_offsets_of_a_full_vocabulary_may_all_be_zero(target, tmp_path):
    config, tensors = files.deepspec()
    tensors["d2t"] = torch.zeros(files.V, dtype=torch.long)
    head = load_head(files.write(tmp_path, config, tensors), target)
    assert torch.equal(head.draft_ids, torch.arange(files.V))


def test_layers_are_counted_in_the_file(target, tmp_path):
    head = load_head(written(tmp_path, files.eagle3(), num_hidden_layers=40), target)
    assert len(head.layers) == 1


@pytest.mark.parametrize("says_head_dim", [True, False])
def test_heads_need_not_fill_the_width(says_head_dim, target, tmp_path):
    config, tensors = files.eagle3()
    for name in "qkv":
        weight = tensors[f"midlayer.self_attn.{name}_proj.weight"]
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = weight.repeat(2, 1)
    tensors["midlayer.self_attn.o_proj.weight"] = tensors["midlayer.self_attn.o_proj.weight"].repeat(1, 2)
    config |= {"head_dim": 16} if says_head_dim else {}
    head = load_head(files.write(tmp_path, config, tensors), target)
    assert (head.config.num_heads, head.config.num_kv_heads, head.config.head_dim) == (4, 2, 16)


def test_wrong_numbers_in_settings_give_way_to_shapes(target, tmp_path):
    changes = {"hidden_size": 99, "intermediate_size": 99, "num_key_value_heads": 4, "draft_vocab_size": 99}
    head = load_head(written(tmp_path, files.eagle3(), **changes), target)
    config = head.config
    assert (config.hidden_size, config.intermediate_size) == (files.H, files.INNER)
    assert (config.num_kv_heads, config.draft_vocab_size) == (files.KV, files.DRAFT)


def test_rope_settings_stand_in_many_places(target, tmp_path):
    yarn = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    cases = {
        "none": ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        "top": ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        "wins": ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 1e6}}, {"rope_theta": 1e6}),
        "yarn": ({"rope_theta": 150000, "rope_scaling": yarn}, {"rope_type": "yarn", "rope_theta": 150000.0}),
        "partial": ({"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.25}),
    }  # fmt: skip
    for name, (changes, expected) in cases.items():
        config = load_head(written(tmp_path / name, files.eagle3(), **changes), target).config
        assert expected.items() <= config.rope.items()


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("pair", "changes", "taps"),
    [
        (files.eagle3(), {}, (2, 4, 5)),  # 8 layers: 2, n // 2, n - 3
        (files.eagle3(), {IDS: [1, 2, 7]}, (1, 2, 7)),
        (files.speculators(), {IDS: [0, 3, 8]}, (0, 3, 8)),
        (files.speculators(), {IDS: None}, (2, 4, 5)),
        (files.specforge(), {}, (2, 4, 5)),
        (files.specforge(), {"eagle_config": {IDS: [1, 4, 8]}}, (1, 4, 8)),  # 8 is the number of layers
        (files.specforge(), {IDS: [2, 4, 5]}, (2, 4, 5)),
        (files.specforge(), {"eagle_config": {IDS: []}}, (2, 4, 5)),
        (files.speculators(), {IDS: []}, (2, 4, 5)),
        (files.deepspec(), {}, (1, 3, 4, 6, 8)),
        (files.deepspec(), {"target_layer_ids": [-1, 2, 3, 5, 7]}, (0, 3, 4, 6, 8)),
        (files.without_taps(), {}, (8,)),
        (files.eagle3(taps=2), {IDS: [3, 4]}, (3, 4)),
        (files.eagle1(), {}, ()),
    ],
)
def test_ids_of_layers_become_indices_of_hidden_states(pair, changes, taps, target, tmp_path):
    location = written(tmp_path, pair, **changes)
    assert load_head(location, target).config.taps == taps
    if len(taps) == 3:
        assert load_head(location, target, taps=(0, 1, 2)).config.taps == (0, 1, 2)


def test_a_narrower_head_brings_its_own_ends(tmp_path):
    wide = tiny(num_hidden_layers=8, hidden_size=64)
    config, tensors = files.eagle3()
    tensors |= files.random_tensors({"fc.weight": (files.H, 3 * 64), "embed_tokens.weight": (files.V, files.H)}, 3)
    head = load_head(files.write(tmp_path, config | {"target_hidden_size": 64}, tensors), wide)
    assert (head.config.hidden_size, head.config.target_hidden_size, head.config.num_taps) == (32, 64, 3)
    states = head(torch.tensor([[1]]), head.combine(torch.zeros(1, 1, 192).double()), torch.tensor([[0]]))
    assert head.logits(states).shape == (1, 1, files.DRAFT)


def test_copies_of_the_targets_ends_are_shared(target, tmp_path):
    config, tensors = files.eagle1()
    tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    tensors["lm_head.weight"] = target.lm_head.weight.detach().clone()
    head = load_head(files.write(tmp_path / "same", config, tensors), target)
    assert not head.config.own_embedding and not head.config.own_lm_head
    tensors["embed_tokens.weight"][-1, 0] += 1
    assert load_head(files.write(tmp_path / "other", config, tensors), target).config.own_embedding


@torch.no_grad()
def test_rows_of_the_targets_output_layer_are_shared_if_the_settings_say_so(target, tmp_path):
    config, tensors = files.eagle3()
    ids = torch.arange(files.DRAFT) + tensors["d2t"]
    tensors["lm_head.weight"] = target.lm_head.weight.detach()[ids]
    own = load_head(files.write(tmp_path / "own", config, tensors), target)
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match=r"cuts the vocabulary \(d2t\) and lacks lm_head.weight"):
        load_head(files.write(tmp_path / "silent", config, tensors), target)
    shared = load_head(files.write(tmp_path / "shared", config | {"shares_lm_head": True}, tensors), target)
    assert not shared.config.own_lm_head and shared.config.draft_vocab_size == files.DRAFT
    states = torch.randn(2, 3, files.H, dtype=target.dtype)
    assert torch.equal(shared.logits(states), own.logits(states))
    assert torch.equal(shared.to_target(torch.arange(files.DRAFT)), ids)
    again = copy.copy(shared).bind(target)
    assert again.bind(target).logits(states).equal(own.logits(states))
    other = tiny(num_hidden_layers=files.DEPTH, seed=3)
    assert not copy.copy(shared).bind(other).logits(states).equal(own.logits(states))


@torch.no_grad()
def test_rows_that_are_shared_take_their_bias_along_and_must_be_plain_numbers(target, tmp_path):
    config, tensors = files.eagle3()
    del tensors["lm_head.weight"]
    head = load_head(files.write(tmp_path, config | {"shares_lm_head": True}, tensors), target)
    biased = copy.deepcopy(target)
    biased.lm_head.bias = torch.nn.Parameter(torch.randn(files.V, dtype=target.dtype))
    states = torch.randn(2, files.H, dtype=target.dtype)
    difference = copy.copy(head).bind(biased).logits(states) - head.logits(states)
    torch.testing.assert_close(difference, biased.lm_head.bias[head.draft_ids].expand(2, -1))
    whole = torch.nn.Module()
    whole.weight = torch.zeros(files.V, files.H, dtype=torch.int8)
    biased.set_output_embeddings(whole)
    with pytest.raises(ValueError, match="own_lm_head=True"):
        copy.copy(head).bind(biased)


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True, "fc_norm": True}, {"norm_before_fc": True}])
def test_what_is_written_opens_as_it_was(changes, target, tmp_path):
    ids = torch.arange(0, files.V, 2)
    for name, mask in (("chain", {}), ("parallel", {"mask_token_id": 5, "num_draft_tokens": 4})):
        config = head_config(target, len(ids), 2 if mask else 1, **changes, **mask)
        head = initialise(EagleHead(config), target, ids)
        with torch.no_grad():
            for weight in head.parameters():
                weight.copy_(torch.randn_like(weight))
        (tmp_path / name).mkdir()
        write_head(head, tmp_path / name, torch.float32)
        found = load_head(str(tmp_path / name), target)
        assert found.config == head.config
        assert all(torch.equal(x, found.state_dict()[key].to(x)) for key, x in head.state_dict().items())
    with pytest.raises(ValueError, match="EAGLE-1 are read, not written"):
        write_head(load_head(files.write(tmp_path / "old", *files.eagle1()), target), tmp_path)


def test_speculators_say_how_far_to_draft(target, tmp_path):
    assert load_head(written(tmp_path, files.speculators()), target).config.num_draft_tokens == 5


def test_a_residual_before_the_norm_is_what_a_missing_key_means(target, tmp_path):
    assert not load_head(written(tmp_path, files.speculators()), target).config.norm_before_residual


@pytest.mark.parametrize(
    ("build", "changes", "is_fed_back"),
    [
        (files.speculators, {"norm_output": True}, True),
        (files.specforge, {"norm_output": True}, False),  # says only that there is a norm
        (files.specforge, {"norm_output": True, "fc_norm": True}, True),
    ],
)
def test_norm_output_means_two_things(build, changes, is_fed_back, target, tmp_path):
    config, tensors = build()
    if changes.get("fc_norm"):
        names = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
        tensors |= files.random_tensors({f"{name}.weight": (files.T,) for name in names}, 6)
    assert load_head(files.write(tmp_path, config | changes, tensors), target).config.norm_output is is_fed_back


def test_windows_of_layers_are_read(target, tmp_path):
    changes = {"layer_types": ["sliding_attention"], "sliding_window": 2048}
    assert load_head(written(tmp_path, files.eagle3(), **changes), target).config.layers[0].window == 2048
    changes = {"use_sliding_window": True, "sliding_window": 1024}
    assert load_head(written(tmp_path, files.eagle3(), **changes), target).config.layers[0].window == 1024
    changes = {"layer_types": ["full_attention"], "use_sliding_window": True, "sliding_window": 1024}
    assert load_head(written(tmp_path, files.eagle3(), **changes), target).config.layers[0].window is None
    changes = {"sliding_window": 2048}
    assert load_head(written(tmp_path, files.eagle3(), **changes), target).config.layers[0].window is None


def test_frequencies_in_old_files_are_no_surplus(target, tmp_path):
    config, tensors = files.eagle1()
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    load_head(files.write(tmp_path, config, tensors, pickled=True), target)


def split(tmp_path: Path, *, is_complete: bool = True) -> str:
    config, tensors = files.eagle3()
    location = files.write(tmp_path, config, None)
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        if is_complete or file == "a.safetensors":
            save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return location


def test_a_file_in_parts_opens(target, tmp_path):
    assert load_head(split(tmp_path), target).config.num_taps == 3


def test_the_part_that_holds_what_does_not_fit_is_named(target, tmp_path):
    location = split(tmp_path)
    part = load_file(tmp_path / "b.safetensors")
    name = next(name for name, value in part.items() if name.endswith("_proj.weight"))
    save_file(part | {name: part[name][:-1].contiguous()}, tmp_path / "b.safetensors")
    with pytest.raises(
        ValueError,
        match=rf"{location}/b\.safetensors: {re.escape(name)} .*{re.escape(str(tuple(part[name][:-1].shape)))}",
    ):
        load_head(location, target)


def test_a_repository_opens_like_a_folder(target, tmp_path, monkeypatch):
    files.write(tmp_path, *files.eagle3())

    def download(location, name):
        if location != "some/head":
            raise LocalEntryNotFoundError("no connection")
        if not (tmp_path / name).exists():
            raise EntryNotFoundError(name)
        return str(tmp_path / name)

    monkeypatch.setattr(reader, "hf_hub_download", download)
    assert load_head("some/head", target).config.num_taps == 3
    with pytest.raises(ValueError, match="cannot be reached"):
        recognise("other/head")


def test_a_header_that_cannot_be_fetched_is_an_error_of_one_line(monkeypatch):
    """Whichever HTTP library the Hub's uses: its errors are of no common kind."""

    class Broken:
        def get(self, *_, **__):
            raise Exception("connection refused")

    monkeypatch.setattr(headers, "get_session", Broken)
    with pytest.raises(
        ValueError, match=r"some/head .* model\.safetensors .* cannot be reached \(connection refused\)"
    ):
        headers.of_hub("some/head", "model.safetensors")


def test_weights_of_a_large_model_on_the_hub_are_not_fetched(tmp_path, monkeypatch):
    files.write(tmp_path, LM, None)
    monkeypatch.setattr(reader, "hf_hub_download", lambda location, name: str(tmp_path / name))
    monkeypatch.setattr(reader, "weight_files", None)
    assert recognise("some/model").family == "causal-lm"


# --- files that do not ------------------------------------------------------------------------------------


def absolute(tensors):
    return {"d2t": tensors["d2t"] + torch.arange(files.DRAFT)}


def shuffled(tensors):
    return {"d2t": tensors["d2t"].flip(0)}


BROKEN = {
    "missing": (lambda t: {"midlayer.mlp.up_proj.weight": None},
                r"lacks tensors.*midlayer\.mlp\.up_proj\.weight \(48, 32\)"),
    "no fc": (lambda t: {"fc.weight": None}, r"lacks tensors.*fc\.weight"),
    "no ids": (lambda t: {"d2t": None, "t2d": None}, "neither d2t nor t2d"),
    "no norm": (lambda t: {"norm.weight": None}, r"lacks.*norm\.weight"),
    "no head": (lambda t: {"lm_head.weight": None}, r"lacks lm_head\.weight"),
    "extra": (lambda t: {"midlayer.conv.weight": torch.ones(2)}, r"holds tensors that.*midlayer\.conv\.weight"),
    "more taps' norms": (lambda t: {f"fc_norm.{i}.weight": torch.ones(32) for i in range(4)}, r"fc_norm\.3\.weight"),
    "twice": (lambda t: {"layers.0.hidden_norm.weight": torch.ones(32)}, "mean the same"),
    "nan": (lambda t: {"norm.weight": t["norm.weight"] * float("nan")}, r"norm\.weight holds .* not finite"),
    "infinite": (lambda t: {"fc.weight": t["fc.weight"] / 0}, r"fc\.weight holds .* not finite"),
    "quantised": (lambda t: {"fc.weight": t["fc.weight"].to(torch.int8)}, r"fc\.weight holds torch\.int8"),
    "float ids": (lambda t: {"d2t": t["d2t"].double()}, "d2t holds torch.float64"),
    "absolute ids": (absolute, "d2t holds the target's ids themselves"),
    "shuffled ids": (shuffled, "d2t does not lead to ascending ids"),
    "short ids": (lambda t: {"d2t": t["d2t"][:-1]}, "d2t has shape"),
    "contradicting ids": (lambda t: {"t2d": ~t["t2d"]}, "d2t and t2d name different ids"),
    "other vocabulary": (lambda t: {"t2d": t["t2d"][:-1]}, "t2d is made for 63 ids; the target scores 64"),
    "other width": (lambda t: {"fc.weight": t["fc.weight"][:, :-2]}, r"fc\.weight reads 94 columns"),
    "two taps": (lambda t: {"fc.weight": t["fc.weight"][:, :64]}, "reads 2 hidden states.*3 are named"),
    "odd queries": (lambda t: {"midlayer.self_attn.q_proj.weight": torch.ones(32, 48)}, "reads 48 columns"),
    "odd shape": (lambda t: {"midlayer.mlp.down_proj.weight": torch.ones(32, 47)}, r"down_proj.*has shape"),
    "flat": (lambda t: {"midlayer.mlp.gate_proj.weight": torch.ones(32)}, r"gate_proj\.weight has shape"),
    "a gap": (lambda t: {"layers.2.mlp.up_proj.weight": torch.ones(48, 32)}, r"layers \[0, 2\]"),
    "a mask": (lambda t: {"mask_hidden": torch.ones(1, 96)}, "needs the id of its mask token"),
    "quantisation scales": (lambda t: {"fc.weight_scale": torch.ones(1)}, r"fc\.weight_scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_tensors_that_do_not_fit_are_refused_by_name(name, target, tmp_path):
    change, message = BROKEN[name]
    config, tensors = files.eagle3()
    tensors = {key: value for key, value in (tensors | change(tensors)).items() if value is not None}
    location = files.write(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=message) as raised:
        load_head(location, target)
    assert location in str(raised.value)


NESTED = files.specforge()[0]["eagle_config"]


@pytest.mark.parametrize(
    ("pair", "changes", "message"),
    [
        (files.eagle3(), {"target_hidden_size": 64}, r"config\.json: target_hidden_size=64"),
        (files.modelopt(), {"vocab_size": 60}, r"config\.json: vocab_size is made for 60 ids"),
        (files.eagle1(), {"vocab_size": 60}, r"config\.json: vocab_size is made for 60 ids"),
        (files.eagle3(), {"hidden_act": "gelu"}, r"config\.json: hidden_act='gelu'"),
        (files.eagle3(), {"head_dim": 16}, "do not make the 32 queries"),
        (files.eagle3(), {"num_attention_heads": None}, "neither head_dim nor num_attention_heads"),
        (files.eagle3(), {"rope_scaling": {"type": "longrope"}}, "rope_type='longrope'"),
        (files.eagle3(), {"rope_parameters": {"full_attention": {}}}, "by kind of layer"),
        (files.eagle3(), {IDS: [2, 4]}, "fc.weight reads 3 hidden states"),
        (files.eagle3(), {IDS: [4, 2, 5]}, "must ascend"),
        (files.eagle3(), {IDS: [2, 4, 9]}, r"within 0 \.\.\. 8"),
        (files.specforge(), {IDS: [1, 3, 4]}, "contradict each other; pass taps="),
        (files.specforge(), {"norm_before_residual": True, "eagle_config": NESTED | {"norm_before_residual": False}},
         "norm_before_residual and eagle_config.norm_before_residual"),
        (files.specforge(), {"eagle_config": NESTED | {"use_aux_hidden_state": False}}, r"hold fc\.weight"),
        (files.specforge(), {"eagle_config": NESTED | {"use_mtp_layernorm": True}}, "use_mtp_layernorm=true"),
        (files.specforge(), {"eagle_config": NESTED | {"next_layer_regular": False}}, "next_layer_regular=false"),
        (files.specforge(), {"eagle_config": NESTED | {"parallel_draft_step": 4}}, "parallel_draft_step"),
        (files.specforge(), {"eagle_config": NESTED | {"use_input_layernorm_in_first_layer": False}}, "hold that norm"),
        (files.speculators(norm_before_fc=True), {"norm_before_fc": False}, r"norm_before_fc=false.*input_norm\."),
        (files.speculators(), {"norm_before_fc": True}, r"lacks.*input_norm\.weight"),
        (files.speculators(), {"fc_norm": True}, r"lacks.*fc_norm\.0\.weight"),
        (files.speculators(kind="peagle"), {}, "needs the id of its mask token"),
        (files.speculators(kind="peagle", mask_token_id=3), {}, "lacks.*mask_hidden"),
        (files.parallel(), {"ptd_token_id": 64}, "mask_token_id=64 is not below 64"),
        (files.parallel(), {"pard_token": 3}, "contradicts itself"),
        (files.parallel(), {"ptd_token_id": None}, "needs the id of its mask token"),
        (files.old_speculators(), {"layernorms": False}, r"layernorms=false.*embedding_layernorm\.weight"),
        (files.old_speculators(), {"fusion_bias": False}, r"fusion_bias=false.*fusion_fc\.bias"),
        (files.eagle1(), {"num_attention_heads": 5}, "head_dim=6 does not divide the rows of .*q_proj.*k_proj"),
        (files.eagle3(), {"num_attention_heads": "four"}, "unexpected kind"),
        (files.specforge(), {"eagle_config": [1, 2, 3]}, "unexpected kind"),
        (files.eagle3(), {IDS: 3}, "unexpected kind"),
        (files.eagle3(), {"rope_scaling": {"type": "yarn"}}, "unexpected kind.*factor"),
        (files.speculators(), {"speculators_config": {"proposal_methods": [3]}}, "unexpected kind"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused_by_name(pair, changes, message, target, tmp_path):
    location = written(tmp_path, pair, **changes)
    with pytest.raises(ValueError, match=message) as raised:
        load_head(location, target)
    assert location in str(raised.value)


@pytest.mark.parametrize("build", [files.eagle1, files.eagle3, files.deepspec, files.parallel])
def test_a_head_for_another_target_is_refused(build, tmp_path):
    location = files.write(tmp_path, *build())
    for changes in ({"hidden_size": 16}, {"hidden_size": 64}, {"hidden_size": 48}, {"vocab": 65}):
        with pytest.raises(ValueError, match=location):
            load_head(location, tiny(**{"num_hidden_layers": 8} | changes))
    if build is not files.eagle1:
        with pytest.raises(ValueError, match="target with 3 layers"):
            load_head(location, tiny(num_hidden_layers=3))


def test_a_head_of_the_first_kind_takes_no_taps(target, tmp_path):
    with pytest.raises(ValueError, match="no taps"):
        load_head(written(tmp_path, files.eagle1()), target, taps=(1, 2, 3))


def test_two_norms_where_engines_choose_differently_are_refused(target, tmp_path):
    config, tensors = files.parallel()
    tensors["layers.1.hidden_norm.weight"] = torch.ones(files.H)
    with pytest.raises(ValueError, match=r"layers\.1\.hidden_norm.*engines disagree"):
        load_head(files.write(tmp_path, config, tensors), target)


def test_a_final_norm_that_the_first_kind_does_not_have_is_not_dropped(target, tmp_path):
    config, tensors = files.eagle1()
    with pytest.raises(ValueError, match=r"will not be dropped: norm\.weight"):
        load_head(files.write(tmp_path, config, tensors | {"norm.weight": torch.ones(files.H)}), target)


class Payload:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = str(mark)

    def __reduce__(self):
        return (open, (self.mark, "w"))


def test_a_pickle_that_is_more_than_tensors_is_not_run(target, tmp_path):
    mark = tmp_path / "mark"
    location = files.write(tmp_path, files.eagle3()[0], {"fc.weight": Payload(mark)}, pickled=True)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin holds more than tensors"):
        load_head(location, target)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(mark)))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        load_head(location, target)
    assert not mark.exists()


def test_a_pickle_of_other_things_is_refused(target, tmp_path):
    for content, message in (({"state_dict": {}}, "state_dict"), ([torch.ones(2)], "a list")):
        location = files.write(tmp_path, files.eagle3()[0], content, pickled=True)
        with pytest.raises(ValueError, match=message):
            load_head(location, target)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(4, 4).to_sparse(), "fc.weight"),
        (torch.zeros(4, 4, device="meta"), "fc.weight"),
        (None, "3"),  # a key that is no name
    ],
)
def test_a_pickle_of_unusual_tensors_is_refused(value, message, target, tmp_path):
    config, tensors = files.eagle3()
    content = tensors | ({3: torch.zeros(1)} if value is None else {"fc.weight": value})
    location = files.write(tmp_path, config, tensors, pickled=True)
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=rf"pytorch_model\.bin holds more than plain tensors by name: {message}"):
        load_head(location, target)


def test_junk_is_refused(target, tmp_path):
    location = files.write(tmp_path, *files.eagle3(), pickled=True)
    (tmp_path / "pytorch_model.bin").write_bytes(b"hello world" * 100)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        load_head(location, target)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        load_head(location, target)


def test_weights_that_overflow_the_targets_dtype_are_refused(tmp_path):
    config, tensors = files.eagle3()
    tensors = {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}
    tensors["fc.weight"] = torch.full_like(tensors["fc.weight"], 1e300)
    location = files.write(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=r"fc\.weight holds numbers that are too large for torch\.float32"):
        load_head(location, tiny(num_hidden_layers=files.DEPTH, dtype=torch.float32))


@pytest.mark.parametrize("is_pickled", [True, False])
@pytest.mark.parametrize("build", [files.eagle3, files.eagle1])
def test_a_truncated_file_is_refused(is_pickled, build, target, tmp_path):
    location = files.write(tmp_path, *build(), pickled=is_pickled)
    path = tmp_path / ("pytorch_model.bin" if is_pickled else "model.safetensors")
    whole = path.read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=path.name):
            load_head(location, target)


def test_missing_and_damaged_parts_are_named(target, tmp_path):
    with pytest.raises(ValueError, match=r"names b\.safetensors, which is missing"):
        load_head(split(tmp_path / "part", is_complete=False), target)
    location = split(tmp_path / "outside")
    index = {"weight_map": {"fc.weight": "../a.safetensors"}}
    (tmp_path / "outside" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="no file beside it"):
        load_head(location, target)
    with pytest.raises(ValueError, match="has no weights; looked for"):
        load_head(files.write(tmp_path / "none", files.eagle3()[0], None), target)


def test_settings_that_are_missing_or_no_settings_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        recognise(str(tmp_path))
    for content, message in (("{", "is not JSON"), ("[]", "holds a list"), ("\xff", "is not JSON")):
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
        with pytest.raises(ValueError, match=message):
            recognise(str(tmp_path))
