"""The command ``nlgrpo recipes``."""

from __future__ import annotations

from collections.abc import Sequence

import tyro

from nlgrpo.config.recipes import RECIPES


def list_recipes(arguments: Sequence[str]) -> int:
    """Print each recipe with a one-line description."""
    tyro.cli(_nothing, args=list(arguments), prog="nlgrpo recipes")
    for name, make in RECIPES.items():
        print(f"{name:<21} {(make.__doc__ or '').strip().splitlines()[0]}")
    return 0


def _nothing() -> None:
    """List the recipes that `nlgrpo train NAME` runs."""
