"""Publishes a folder with a drafter on the Hub, in one commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from safetensors import SafetensorError, safe_open

from hf_specdec.checkpoints import files, recognise
from hf_specdec.publishing.card import check_repo_id

# What belongs to a drafter. A training's state and caches do not, nor records that name folders of this machine: what
# they say is in the card and in config.json.
PUBLISHED = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "README.md",
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "metrics.jsonl",
    "curves.png",
)


def push(
    folder: str | Path,
    repo_id: str,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    message: str | None = None,
) -> str:
    """Uploads a drafter. All files appear in one commit, so an interrupted upload changes nothing.

    Args:
        folder: with settings and weights, as `save_pretrained` or `hf-specdec train` wrote them.
        repo_id: such as "org/name"; created if it does not exist.
        private: whether a new repository is private; `None` leaves it to the organisation's setting.
        token: of the Hub; the one that is logged in by default.
        revision: a branch instead of main; created if it does not exist.
        message: of the commit.

    Returns:
        The address of the commit.

    Raises:
        ValueError: if the folder holds no drafter, or the Hub refuses.
    """
    check_repo_id(repo_id)
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{folder} is no folder; give one with a drafter's config.json and model.safetensors.")
    recognise(str(path))
    _check_weights(path)
    api: Any = HfApi(token=token)
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo,
            folder_path=path,
            allow_patterns=list(PUBLISHED),
            revision=revision,
            commit_message=message or "Upload drafter",
        )
    except Exception as error:  # the Hub's, or of the HTTP library, which is another one in every other release
        raise ValueError(
            f"{repo_id} could not be published ({error}). Look whether the name is right and whether you are logged in "
            "with a token that may write (hf auth login)."
        ) from error
    return str(done.commit_url)


def _check_weights(folder: Path) -> None:
    """Raises `ValueError` for weights that nobody should be offered: damaged ones, and pickles."""
    for path in files.weight_files(str(folder)):
        if path.suffix != ".safetensors":
            raise ValueError(f"{path} is a pickle, which is not published; open the drafter and use save_pretrained.")
        try:
            with safe_open(path, framework="pt"):  # compares the file's length with its header
                pass
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
