"""Examples that a tiny target wrote itself, and folders of them."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from hf_specdec.training.examples import Example, write_shard
from hf_specdec.training.features import FeatureStore
from hf_specdec.training.recipes import RECIPES, RecipeOptions

KINDS = {
    "eagle3": RecipeOptions(depth=4, coverage=1.0),
    "p-eagle": RecipeOptions(depth=4, coverage=1.0, num_layers=2, drop_rate=1.0),
    "pard": RecipeOptions(depth=4, num_layers=1, drop_rate=1.0),
    "draft": RecipeOptions(depth=4, num_layers=1),
}


def answered(target, count, *, length=24, seed=0, vocab=None):
    """Random prompts and the target's greedy answers."""
    generator = torch.Generator().manual_seed(seed)
    vocab = vocab or target.config.vocab_size
    found = []
    for number in range(count):
        prompt = torch.randint(3, vocab, (1, 3 + number % 5), generator=generator)
        text = target.generate(prompt, max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0)
        answer = text[0, prompt.shape[1] :].tolist()
        found.append(Example(tuple(prompt[0].tolist()), tuple(answer), 0.0, "self", True))
    return found


def data_folder(folder, location, count=30, **arguments):
    """A folder of examples by the target in another folder."""
    target = AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32).eval()
    folder.mkdir()
    write_shard(folder, 0, answered(target, count, **arguments))
    return str(folder)


def overfitted(kind, target, examples, *, steps=80, rate=1e-2):
    """A recipe that has learned a few examples by heart, with the losses on the way."""
    recipe = RECIPES[kind].new(target, examples, KINDS[kind])
    store = FeatureStore(target, recipe.taps)
    texts = store.texts(examples)
    weights = [weight for weight in recipe.module.parameters() if weight.requires_grad]
    optimizer, losses = torch.optim.Adam(weights, lr=rate), []
    for step in range(steps):
        found = recipe.losses(texts, step)
        losses.append(float(found.total.detach()) / found.count)
        (found.total / found.count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return recipe, texts, losses
