"""Options of ``nlgrpo merge`` and ``nlgrpo from-trl``; without PyTorch, so that ``--help`` takes no seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from tyro.conf import Positional


@dataclass
class Merge:
    """Merge an adapter in PEFT's format into its model: W + (alpha / r) B A, computed in float32.

    The result is a Hugging Face directory that needs no adapter: a causal model, or a classifier for the adapter of a
    reward model.
    """

    adapter: Positional[str]
    """Folder with adapter_config.json, such as runs/NAME/adapter."""
    out: str
    """Folder to write."""
    model: str | None = None
    """Model that the adapter was trained on. None: the one that it names."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Dtype of the result. auto: that of the model."""


def read_merge(arguments: Sequence[str]) -> Merge:
    return tyro.cli(Merge, args=list(arguments), prog="nlgrpo merge")


@dataclass
class FromTRL:
    """Print the nlgrpo configuration that corresponds to one of TRL's GRPOTrainer or RLOOTrainer (1.16).

    Values that TRL has by default and nlgrpo does not are written out. What is not carried over, and what must be
    checked by hand, is in comments at the top. The objective of each reward is "mean", as in TRL: choose your own.
    """

    file: Positional[Path]
    """YAML file of ``trl grpo --config``, Python script with ``GRPOConfig(..)``, or a text file with a command line."""
    processes: int = 1
    """Number of processes of the TRL run; its batch sizes are per process."""
    trainer: Literal["auto", "grpo", "rloo"] = "auto"
    """TRL's trainer. auto: as the file says; a YAML file that does not say so is of GRPOTrainer."""
    out: Path | None = None
    """TOML file to write. None: standard output."""


def read_from_trl(arguments: Sequence[str]) -> FromTRL:
    return tyro.cli(FromTRL, args=list(arguments), prog="nlgrpo from-trl")
