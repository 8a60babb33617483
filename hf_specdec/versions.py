"""What made a file or a figure: the commit of this checkout, and versions of what it runs on."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def versions() -> dict[str, str]:
    """Versions of this package and of what its results depend on."""
    return {name: found for name in ("hf_specdec", "torch", "transformers") if (found := _version(name))}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # a checkout that is not installed
        return None


def commit() -> str | None:
    """The commit of this checkout, "-dirty" behind it if files differ; `None` for an installed package."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], check=True, capture_output=True)
        described = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
