"""A call of `generate` from the command line: its options, its settings, what is kept of it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hf_specdec.cli.shared import given


def add_generation(parser: argparse.ArgumentParser) -> None:
    """Options of a call."""
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--no-chat-template", action="store_true", help="continue the prompt as it is")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="M", help="most tokens to generate (256)")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (the default)")
    sampling.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    sampling.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens of mass P")
    sampling.add_argument("--min-p", type=float, metavar="P", help="keep tokens at least P times as likely as the best")
    sampling.add_argument("--seed", type=int, metavar="S", help="makes sampling reproducible")
    speculation = parser.add_argument_group("speculation")
    speculation.add_argument("--num-draft-tokens", type=int, metavar="K", help="longest draft of a round")
    speculation.add_argument("--verification", metavar="RULE", help="auto, token, block or coupled")


def generate(arguments: argparse.Namespace, model: Any, tokenizer: Any, prompts: list[str], settings: Any) -> None:
    """One call for all prompts."""
    import torch

    import hf_specdec
    from hf_specdec.loading import encode

    hf_specdec.enable(model)
    if arguments.seed is not None:
        torch.manual_seed(arguments.seed)
    chats = [_chat(arguments, prompt) for prompt in prompts]
    model.generate(
        **encode(tokenizer, chats, model.device, use_template=not arguments.no_chat_template),
        **settings,
        assistant=arguments.assistant,
        max_new_tokens=arguments.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
    )


def generation_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Settings of the host's sampling and of ours; what is wrong without looking at a model is refused here."""
    from hf_specdec.generation import refuse_unknown_name

    refuse_unknown_name(arguments.assistant)
    return _sampling(arguments) | given(arguments, "num_draft_tokens", "verification")


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The host's sampling settings."""
    settings = given(arguments, "top_k", "top_p", "min_p")
    if arguments.temperature > 0:
        return settings | {"do_sample": True, "temperature": arguments.temperature}
    if arguments.temperature < 0:
        raise ValueError(f"--temperature {arguments.temperature} must be at least 0 (0 is greedy).")
    if settings:
        raise ValueError(
            "--top-k, --top-p and --min-p need sampling: give a --temperature above 0 too, or leave them out."
        )
    return {"do_sample": False}


def _chat(arguments: argparse.Namespace, prompt: str) -> list[dict[str, str]]:
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    return [*system, {"role": "user", "content": sys.stdin.read() if prompt == "-" else prompt}]


def recorded(arguments: argparse.Namespace, model: Any, tokenizer: Any, trace: Any) -> Any:
    """A traced call with what is known about it."""
    from datetime import datetime, timezone

    import hf_specdec
    from hf_specdec.loading import target_name
    from hf_specdec.pages import Run
    from hf_specdec.versions import versions

    named = ("temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens", "num_draft_tokens", "verification")
    about = {
        "target": target_name(model),
        "assistant": arguments.assistant,
        "numbers": f"{arguments.dtype} on {model.device}",
        "settings": ", ".join(f"{name} {value}" for name, value in given(arguments, *named).items()),
        "made": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "with": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
    check = hf_specdec.check(model, arguments.assistant, tokenizer=tokenizer, batch=len(trace.prompts))
    return Run.of(trace, tokenizer, about, check)
