"""Exact speculative decoding for Hugging Face Transformers: `model.generate(assistant=...)`, only faster.

The public names live in `hf_specdec.public`, which is loaded (torch and Transformers with it) when the first of them is
asked for: importing the package costs nothing.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hf_specdec.public import *  # noqa: F403
    from hf_specdec.public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        """A public name; modules are left to the import that asks for them, perhaps from within the package."""
        is_hidden = name.startswith("_") and name != "__all__"
        is_module = name.isidentifier() and importlib.util.find_spec(f"{__name__}.{name}") is not None
        public = None if is_hidden or is_module else importlib.import_module("hf_specdec.public")
        if not hasattr(public, name):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(public, name)


def __dir__() -> list[str]:
    """The public names, and what every module has; not what this file imports."""
    own = [name for name in globals() if name.startswith("__")]
    return sorted({*own, *importlib.import_module("hf_specdec.public").__all__})
