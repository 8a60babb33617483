"""Whisper targets: `generate` is a method of its own there, which decodes audio segment by segment."""

from __future__ import annotations

import pytest
import torch
from transformers import WhisperConfig, WhisperForCausalLM, WhisperForConditionalGeneration
from transformers.cache_utils import StaticLayer

import hf_specdec
import hf_specdec.loop
from hf_specdec import DraftModel, PromptLookup, host
from tests.models import jittered, tiny
from tests.test_stopping import Recording

BANDS, FRAMES = 8, 40  # a segment is 40 frames long
NO_TIMESTAMPS = 42  # all ids above it are timestamps
SETTINGS = {
    "max_length": 40,
    "is_multilingual": False,
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "prev_sot_token_id": NO_TIMESTAMPS - 1,
    "max_initial_timestamp_index": 10,
}


def whisper(seed=0, **changes):
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": FRAMES // 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    sizes |= layers | ids | {"num_mel_bins": BANDS, "max_target_positions": 96} | changes
    torch.manual_seed(seed)
    config = WhisperConfig(vocab_size=64, init_std=0.5, suppress_tokens=None, begin_suppress_tokens=None, **sizes)
    model = WhisperForConditionalGeneration(config).eval().double()
    for name, value in SETTINGS.items():  # update() knows only what other models have too
        setattr(model.generation_config, name, value)
    return model


def bare_decoder(target):
    """The target's decoder without an encoder, as distil-whisper's drafters are loaded."""
    model = WhisperForCausalLM(whisper().config).eval().double()
    model.model.decoder.load_state_dict(target.model.decoder.state_dict())
    return model


@pytest.fixture(scope="module")
def target():
    return hf_specdec.enable(whisper())


def audio(num_rows, num_frames=FRAMES):
    generator = torch.Generator().manual_seed(9)
    features = torch.randn(num_rows, BANDS, num_frames, dtype=torch.float64, generator=generator)
    lengths = torch.tensor([num_frames, num_frames - 30, num_frames // 2 + 5])[:num_rows, None]
    mask = (torch.arange(num_frames) < lengths).long()
    return {"input_features": features, "attention_mask": mask}


DRAFTERS = {
    "lookup": lambda target: PromptLookup(1, 3),
    "decoder": lambda target: DraftModel(tiny(seed=3)),
    "its own encoder": lambda target: DraftModel(whisper(seed=1, d_model=16)),
    "a close copy": lambda target: DraftModel(jittered(whisper())),
    "told to share": lambda target: DraftModel(jittered(whisper()), shares_encoder=True),
    "a bare decoder": lambda target: DraftModel(jittered(bare_decoder(target))),
}


@pytest.fixture(params=DRAFTERS)
def drafter(request, target):
    return DRAFTERS[request.param](target)


def agrees(target, drafter, **kwargs):
    """Whether the text is plain generate's."""
    plain = target.generate(assistant=False, **kwargs)
    ours = target.generate(assistant=drafter, **kwargs)
    assert hf_specdec.last_stats(target).drafted > 0
    return plain.shape == ours.shape and bool((plain == ours).all())


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("timestamps", [False, True])
def test_short_audio(target, drafter, num_rows, timestamps):
    assert agrees(target, drafter, return_timestamps=timestamps, **audio(num_rows))  # rows end at different places


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("condition", [False, True])
def test_long_audio(target, drafter, num_rows, condition):
    """Conditioned on what was said before, rows have decoder prompts of different lengths."""
    given = audio(num_rows, 150) | {"return_timestamps": True, "condition_on_prev_tokens": condition}
    assert agrees(target, drafter, **given)
    assert hf_specdec.last_stats(target).calls > 3  # one a segment, added up


CALLS = {
    "a prompt": {"prompt_ids": torch.tensor([NO_TIMESTAMPS - 1, 5, 6, 7])},
    "a decoder prompt": {"decoder_input_ids": torch.tensor([[1, 5, 6]] * 3)},
    "samples": {"do_sample": True, "temperature": 1.0, "top_k": 1, "num_return_sequences": 2},
    "suppressed": {"suppress_tokens": [28, 34], "begin_suppress_tokens": [3, 43]},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "a static cache": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("name", CALLS)
def test_other_calls(target, name):
    if name == "a static cache" and not StaticLayer.is_croppable:
        pytest.skip("refused: this Transformers cannot roll a static cache back")
    for drafter in (PromptLookup(1, 3), jittered(whisper())):
        assert agrees(target, drafter, **audio(3), **CALLS[name])


def test_long_audio_with_fallbacks_and_silence(target):
    """Segments are decoded again at higher temperatures, fewer rows each time."""
    thresholds = {"compression_ratio_threshold": 1.6, "logprob_threshold": -1.0, "no_speech_threshold": 0.6}
    given = audio(3, 150) | thresholds | {"return_timestamps": True, "temperature": (0.0, 0.5, 1.0), "top_k": 1}
    for drafter in (PromptLookup(1, 3), jittered(whisper())):
        assert agrees(target, drafter, **given)
    num_calls = hf_specdec.last_stats(target).calls
    assert agrees(target, drafter, **(given | {"temperature": 0.0}))
    assert num_calls > hf_specdec.last_stats(target).calls


@pytest.mark.parametrize("share", ["own", "told", "bare"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_twin_is_always_accepted_and_encoders_run_once(target, share, num_rows):
    twin = bare_decoder(target) if share == "bare" else whisper()
    counts = {"target": 0, "twin": 0}

    def count(name):
        def hook(*_):
            counts[name] += 1

        return hook

    hooks = [target.get_encoder().register_forward_hook(count("target"))]
    if share != "bare":
        hooks.append(twin.get_encoder().register_forward_hook(count("twin")))
    drafter = DraftModel(twin, shares_encoder=True if share == "told" else None)
    target.generate(assistant=drafter, return_timestamps=True, suppress_tokens=[2], **audio(num_rows))
    stats = hf_specdec.last_stats(target)
    assert stats.acceptance_rate == 1
    assert counts == {"target": stats.calls, "twin": stats.calls if share == "own" else 0}
    for hook in hooks:
        hook.remove()


def test_a_drafter_with_a_shorter_context(target):
    assert agrees(target, DraftModel(whisper(max_target_positions=20)), suppress_tokens=[2], **audio(3))
    assert 0 < hf_specdec.last_stats(target).coverage < 0.5


def test_output_dicts_agree(target):
    fields = dict.fromkeys(["output_scores", "output_logits", "output_hidden_states", "return_dict_in_generate"], True)
    plain, ours = (target.generate(assistant=a, **audio(3), **fields) for a in (False, PromptLookup(1, 3)))
    assert type(plain) is type(ours) and set(plain) == set(ours)
    assert torch.equal(plain.sequences, ours.sequences)
    for name in ("scores", "logits"):
        for there, here in zip(plain[name], ours[name], strict=True):
            assert torch.allclose(there, here, atol=1e-6)
    assert ours[host.CACHE_NAME].get_seq_length() == plain[host.CACHE_NAME].get_seq_length()


@pytest.mark.parametrize("num_frames", [FRAMES, 150])
def test_streams_agree(target, num_frames):
    tapes = []
    for assistant in (False, jittered(whisper())):
        tapes.append(Recording())
        target.generate(assistant=assistant, streamer=tapes[-1], return_timestamps=True, **audio(1, num_frames))
    assert tapes[0].events == tapes[1].events
    assert tapes[0].events.count("end") == (1 if num_frames == FRAMES else 4)


def test_segments_do_not_share_random_numbers(target, monkeypatch):
    seeds = []
    plain_noise = hf_specdec.loop.Noise

    def noise(seed, *args):
        seeds.append(seed)
        return plain_noise(seed, *args)

    monkeypatch.setattr(hf_specdec.loop, "Noise", noise)
    given = audio(3, 150) | {"return_timestamps": True, "temperature": 1.0, "assistant": "ngram", "seed": 7}
    texts = [target.generate(**given) for _ in range(2)]
    assert torch.equal(*texts)
    half = len(seeds) // 2
    assert seeds[:half] == seeds[half:] and seeds[0] == 7
    assert len(set(seeds)) == half > 2


def test_without_enable():
    model = whisper()
    plain = model.generate(**audio(3))
    for assistant in ("ngram", jittered(model)):
        assert torch.equal(plain, model.generate(custom_generate=hf_specdec.speculate(assistant), **audio(3)))


@pytest.mark.parametrize(
    ("given", "drafter", "message"),
    [
        ({"return_token_timestamps": True}, "ngram", "return_token_timestamps=True needs the attentions"),
        ({"num_beams": 2}, "ngram", "beam search"),
        ({}, lambda: whisper(num_mel_bins=4), "input_features with 4 bands, and .* input_features with 8 bands"),
        ({}, lambda: DraftModel(whisper(d_model=16), shares_encoder=True), "of width 16"),
    ],
)
def test_what_cannot_be_served_is_refused(target, given, drafter, message):
    with pytest.raises(ValueError, match=message):
        target.generate(assistant=drafter if isinstance(drafter, str) else drafter(), **audio(1), **given)


def test_options_that_a_model_cannot_honour(target):
    with pytest.raises(ValueError, match="has no encoder of its own"):
        DraftModel(bare_decoder(target), shares_encoder=False)
    decoder = hf_specdec.enable(tiny())
    for model in (whisper(), bare_decoder(target)):
        with pytest.raises(ValueError, match="attends to an encoder"):
            decoder.generate(torch.tensor([[5, 6]]), assistant=model)


def test_a_default_assistant_sits_out_what_it_cannot_serve():
    model = hf_specdec.enable(whisper(), "ngram")
    given = audio(1) | {"num_beams": 2}
    assert torch.equal(model.generate(**given), whisper().generate(**given))
