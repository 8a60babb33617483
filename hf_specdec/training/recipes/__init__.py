"""Recipes: one file a kind of drafter, and this table."""

from __future__ import annotations

from hf_specdec.training.recipes.base import Losses, Recipe, RecipeOptions
from hf_specdec.training.recipes.draft import DraftStudent
from hf_specdec.training.recipes.eagle3 import Eagle3
from hf_specdec.training.recipes.p_eagle import PEagle
from hf_specdec.training.recipes.pard import Pard

RECIPES: dict[str, type[Recipe]] = {recipe.name: recipe for recipe in (Eagle3, PEagle, Pard, DraftStudent)}

__all__ = ["RECIPES", "Losses", "Recipe", "RecipeOptions"]
