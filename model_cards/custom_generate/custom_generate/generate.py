"""What `model.generate(custom_generate=..., trust_remote_code=True)` runs in place of Transformers' own decoding."""

from typing import Any

import hf_specdec


def generate(*inputs: Any, model: Any, assistant: Any = "auto", **arguments: Any) -> Any:
    """Exact speculative decoding of one call; the model's own `generate` stays as it is.

    Args:
        *inputs: arguments of `generate` that are given without a name.
        model: the target.
        assistant: a strategy's name, a drafter, a smaller model, a folder or a Hub id; `False` decodes plainly.
        **arguments: all others of `generate`, and options such as `num_draft_tokens`, `verification` and `seed`.

    Raises:
        ValueError: for what cannot be served exactly; the message says why and what to do.
    """
    return hf_specdec.generate(model, *inputs, assistant=assistant, **arguments)


# A repository with weights makes this function its model's own `generate`; `enable` then knows whom it calls.
generate.calls_hf_specdec = True  # type: ignore[attr-defined]
