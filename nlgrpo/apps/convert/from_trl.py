"""The command ``nlgrpo from-trl``: a run of TRL's ``GRPOTrainer`` or ``RLOOTrainer`` as a TOML file of nlgrpo."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from tyro.conf import Positional

from nlgrpo.apps.convert.trl_conversion import convert
from nlgrpo.apps.convert.trl_files import read
from nlgrpo.apps.convert.trl_script import KIND
from nlgrpo.errors import UserError


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


def main(arguments: Sequence[str]) -> int:
    """Convert and print."""
    options = tyro.cli(FromTRL, args=list(arguments), prog="nlgrpo from-trl")
    given, notes = read(options.file)
    if options.trainer != "auto":
        given[KIND] = options.trainer
    converted = convert(given, options.processes)
    converted.notes[:0] = notes
    if options.out is None:
        sys.stdout.write(converted.toml())
        return 0
    if options.out.exists():
        raise UserError(f"{options.out} exists; name another file, or remove it")
    options.out.write_text(converted.toml(), "utf-8")
    print(options.out)
    return 0
