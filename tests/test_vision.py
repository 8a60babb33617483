"""Vision-language targets: images belong to the prompt's pass, rows still draft, accept and end on their own."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

import hf_specdec
from hf_specdec import DraftModel, PromptLookup
from tests.models import COMMON, tiny

TEXT = COMMON | {"vocab_size": 64}


def llava():
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        text_config=LlamaConfig(**TEXT),
        vision_config=CLIPVisionConfig(image_size=16, patch_size=8, **vision),
        image_token_id=63,
        vision_feature_select_strategy="default",
    )
    return LlavaForConditionalGeneration(config)


def qwen2_vl():
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    config = Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": rope},
        vision_config=vision | {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2},
        image_token_id=60,
        vision_start_token_id=61,
        vision_end_token_id=62,
        video_token_id=59,
    )
    return Qwen2VLForConditionalGeneration(config)


def inputs_of(make, num_rows):
    """One image a row, texts that repeat themselves."""
    generator = torch.Generator().manual_seed(1)
    motif = torch.randint(5, 50, (num_rows, 4), generator=generator).repeat(1, 3)
    if make is llava:
        ids = torch.cat([torch.full((num_rows, 4), 63), motif], dim=1)
        return {"input_ids": ids, "pixel_values": torch.randn(num_rows, 3, 16, 16, generator=generator)}
    image = torch.tensor([61, 60, 60, 60, 60, 62]).expand(num_rows, -1)
    ids = torch.cat([image, motif], dim=1)
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(num_rows * 16, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * num_rows),
        "mm_token_type_ids": (ids == 60).int(),
    }


@pytest.mark.parametrize("make", [llava, qwen2_vl])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("ends", [None, list(range(2, 60, 5))])
@pytest.mark.parametrize("drafter", ["lookup", "draft model"])
def test_greedy_identity(make, num_rows, ends, drafter):
    torch.manual_seed(0)
    target = hf_specdec.enable(make().eval())
    inputs = inputs_of(make, num_rows)
    kwargs = inputs | {"attention_mask": torch.ones_like(inputs["input_ids"]), "do_sample": False}
    kwargs |= {"max_new_tokens": 25, "eos_token_id": ends, "pad_token_id": 0}
    plain = target.generate(assistant=False, **kwargs)
    assistant = PromptLookup(1, 3) if drafter == "lookup" else DraftModel(tiny(dtype=torch.float32))
    assert torch.equal(plain, target.generate(assistant=assistant, **kwargs))
    assert torch.equal(plain, target.generate(assistant=False, **kwargs))
