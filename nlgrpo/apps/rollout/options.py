"""Options of ``nlgrpo rollout``; without PyTorch, so that ``--help`` takes no seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

ABOUT = """Sample and score completions of the reference: nlgrpo rollout [recipe] [file.toml] [--section.key value ...]

Recipe, file and keys are those of `nlgrpo train`. The reference is model.path; the prompts are all of data.source. The
results are stored file by file: the same command resumes after a stop or a kill, and with other rewards or more prompts
it computes only what is missing."""


@dataclass
class Options:
    """Options in addition to the configuration keys."""

    out: Path | None = None
    """Folder of the rollouts. None: runs/<recipe>-rollouts."""
    samples: int = 100
    """K, completions per prompt."""
    prompts: int | None = None
    """Use only this many prompts, the first of the source. None: all."""
    ks: tuple[int, ...] = ()
    """Two or more sample sizes. Kolmogorov-Smirnov tests compare the CDFs of each pair (vBoN, Table 1)."""
    ks_nested: bool = False
    """Take the smaller sample from the larger one, as the paper does. The larger may then be K."""
    dry_run: bool = False
    """Print the plan and sample nothing."""


def read_options(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Return the options, and the arguments that are left: those of `nlgrpo train`."""
    return tyro.cli(Options, args=list(arguments), prog="nlgrpo rollout", description=ABOUT, return_unknown_args=True)
