"""Small networks that draft from the target's hidden states. No generation logic."""

from hf_specdec.heads.eagle import EagleConfig, EagleHead, LayerConfig

__all__ = ["EagleConfig", "EagleHead", "LayerConfig"]
