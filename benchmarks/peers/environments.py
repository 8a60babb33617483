"""The peers, and the environments they live in."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console

ADAPTERS = Path(__file__).parent / "adapters"
ROOT = Path(__file__).resolve().parents[2]
OURS = "hf_specdec"
PEERS = (OURS, "transformers", "economize", "flashspec", "dejavuu", "arctic")
# Installed behind all others, without a look at the Python it asks for.
ALONE = {"dejavuu": "dejavuu==0.2.0"}


def chosen(only: list[str] | None) -> list[str]:
    """The peers that are wanted, and this package.

    Raises:
        ValueError: if there is no such peer.
    """
    unknown = [name for name in only or () if name not in PEERS]
    if unknown:
        raise ValueError(f"--only {', '.join(unknown)}: there is no such peer; use one of {', '.join(PEERS)}.")
    return [name for name in PEERS if only is None or name in only or name == OURS]


def interpreter(name: str, environments: Path | None) -> str | None:
    """The Python of a peer: that of its environment, or this one if it has no requirements; `None` if it lacks it."""
    if not requirements(name).exists():
        return sys.executable
    python = environments and environments / f"env-{name}" / "bin" / "python"
    return str(python.absolute()) if python and python.exists() else None


def requirements(name: str) -> Path:
    """The file of a peer's requirements; peers without one live in our own environment."""
    return ADAPTERS / f"{name}.txt"


def make_environments(folder: Path, only: list[str] | None) -> None:
    """Makes the environments that are missing; one that fails leaves nothing behind, and stops no other."""
    console = Console(stderr=True)
    for name in chosen(only):
        if not requirements(name).exists() or interpreter(name, folder):
            continue
        console.print(f"Making {folder / f'env-{name}'}")
        try:
            make_environment(name, folder / f"env-{name}")
        except subprocess.CalledProcessError as error:
            shutil.rmtree(folder / f"env-{name}")
            console.print(f"{name}: {' '.join(error.cmd)} failed; its messages are above.", soft_wrap=True)


def make_environment(name: str, place: Path) -> None:
    """A virtual environment with our torch and the peer's requirements."""
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    commands = [
        [sys.executable, "-m", "venv", str(place)],
        [*pip, f"torch=={torch.__version__.split('+')[0]}", "--requirement", str(requirements(name))],
    ]
    if name in ALONE:
        commands.append([*pip, "--no-deps", "--ignore-requires-python", ALONE[name]])
    for command in commands:
        subprocess.run(command, check=True, cwd=ROOT)
