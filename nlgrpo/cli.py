"""The console command ``nlgrpo``: which command was asked for, and what becomes of its errors.

A command's module is imported when the command runs: torch and transformers take seconds, and ``nlgrpo --help`` needs
neither.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from nlgrpo import __version__

# name: where its function is, and what it does
COMMANDS = {
    "train": (
        "nlgrpo.train:main",
        "Train: nlgrpo train [recipe] [file.toml] [--section.key value ...] [--dry-run]; --help lists every key",
    ),
    "generate": (
        "nlgrpo.commands.generate:generate",
        'Draw completions from a model: nlgrpo generate "Once upon a time" --samples 4',
    ),
    "recipes": ("nlgrpo.commands.recipes:list_recipes", "List the recipes that `nlgrpo train NAME` runs."),
    "report": (
        "nlgrpo.commands.report:write_report",
        "Write a run's report.html and pictures again: nlgrpo report runs/length-bon",
    ),
    "compare": (
        "nlgrpo.commands.report:compare",
        "Lay runs over each other in one picture: nlgrpo compare runs/length-bon runs/length-mean",
    ),
    "evaluate": (
        "nlgrpo.commands.evaluate:main",
        "What models are worth under each procedure: nlgrpo evaluate runs/length-bon runs/length-mean",
    ),
    "rollout": (
        "nlgrpo.commands.rollout:main",
        "Draw and score samples of the reference, for later stages: nlgrpo rollout [file.toml] --samples 100 --out DIR",
    ),
    "sweep": (
        "nlgrpo.commands.sweep:main",
        "Train a grid: nlgrpo sweep [recipe] [file.toml] --loss.beta 1e-2,1e-1 --objective mean,bon:4 [--retry]",
    ),
    "reward-model": (
        "nlgrpo.commands.reward_model:main",
        "Train a reward model on pairs: nlgrpo reward-model train [file.toml] [--section.key value ...] [--dry-run]",
    ),
    "value": (
        "nlgrpo.commands.value:main",
        "Fit a value model to rollouts, or to a sum of others: nlgrpo value train|compress [file.toml] [--dry-run]",
    ),
    "iro": (
        "nlgrpo.commands.iro:main",
        "Learn value models that guide a frozen model: nlgrpo iro [recipe] [file.toml] --iterations 3 --out DIR",
    ),
    "decode": (
        "nlgrpo.commands.decode:main",
        "Hold ways to decode against each other: nlgrpo decode [file.toml] --guide OUT --methods bon cd iro",
    ),
    "curves": (
        "nlgrpo.commands.curves:main",
        "Win rate against KL of transformed rewards, without a model: nlgrpo curves --n 4 [--suggest 4 --kl 1]",
    ),
    "verify": (
        "nlgrpo.commands.verify:main",
        "Check the mathematics against exact answers: nlgrpo verify [--out FOLDER] [--quick]",
    ),
}


def usage() -> str:
    lines = [f"nlgrpo {__version__}", "", "usage: nlgrpo COMMAND [--help]", ""]
    return "\n".join(lines + [f"  {name:<12} {about}" for name, (_, about) in COMMANDS.items()])


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0; 1, with a message, for what the user can mend; 2 for a command that does not exist."""
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has what it wants; Python flushes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    if arguments[0] not in COMMANDS:
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(COMMANDS)}"
        print(f"error: unknown command {arguments[0]!r}; {hint}", file=sys.stderr)
        return 2
    module, function = COMMANDS[arguments[0]][0].split(":")
    try:
        return int(getattr(importlib.import_module(module), function)(arguments[1:]))
    except ValueError as error:
        from rich.console import Console

        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
