"""Recipes: one file a kind of drafter, and this table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hf_specdec.training.examples import Example
from hf_specdec.training.recipes.base import Losses, Recipe, RecipeOptions
from hf_specdec.training.recipes.draft import DraftStudent
from hf_specdec.training.recipes.eagle3 import Eagle3
from hf_specdec.training.recipes.p_eagle import PEagle
from hf_specdec.training.recipes.pard import Pard

# Builds a drafter with its first weights for a target, from the examples it is going to learn from.
Builder = Callable[[Any, Sequence[Example], RecipeOptions], Recipe]
RECIPES: dict[str, Builder] = {
    "eagle3": Eagle3.new,
    "p-eagle": PEagle.new,
    "pard": Pard.new,
    "draft": DraftStudent.new,
}

__all__ = ["RECIPES", "Builder", "Losses", "Recipe", "RecipeOptions"]
