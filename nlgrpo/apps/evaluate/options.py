"""Options of ``nlgrpo evaluate``; without PyTorch, so that ``--help`` takes no seconds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

ABOUT = """Compare models with a reference under each inference procedure: nlgrpo evaluate MODEL [MODEL ...] [options]

A model is the folder of a run, one of its checkpoints (RUN/checkpoints/step-00000300), a Hugging Face directory, or a
hub name; LABEL=PATH gives it a label. The folder of a sweep stands for all its finished runs. Configuration keys
such as --data.source, --rewards.NAME.function, --rollout.temperature and --evaluation.prompts are options too; they
override the configuration of the first model that is a run. Under torchrun, write --samples instead of --n."""


def read_options(arguments: Sequence[str]) -> tuple[list[str], argparse.Namespace, list[str]]:
    """Return the names of the models, the options, and the arguments that are left: keys of a configuration."""
    given = list(arguments)
    names: list[str] = []
    while given and not given[0].startswith("-"):
        names.append(given.pop(0))
    parser = argparse.ArgumentParser(prog="nlgrpo evaluate", allow_abbrev=False, description=ABOUT)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--reference", help="model to compare with; default: the initial model of the run")
    parser.add_argument("--file", type=Path, help="TOML file with data, rewards, ... as for training")
    parser.add_argument("--out", type=Path, default=Path("runs/evaluation"), help="folder of samples and results")
    parser.add_argument(
        "--n", "--samples", type=int, default=64, help="completions per prompt; use --samples under torchrun"
    )
    parser.add_argument(
        "--ns", default="1,2,4,8,16", help="values of N for best-of-N and worst-of-N, separated by commas"
    )
    parser.add_argument(
        "--procedures",
        default="bon,wor",
        help='"bon", "wor" (for every N), "soft:0.1", "cvar:0.1", "rewind:0.85:32", ...',
    )
    parser.add_argument("--gold", default="", help="rewards that score what the other rewards choose")
    parser.add_argument("--no-kl", action="store_true", help="leave out the KL to the reference, a third of the time")
    known, rest = parser.parse_known_args(given)
    return names, known, rest
