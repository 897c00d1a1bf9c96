"""The console command ``nlgrpo``: finds the command, runs it, and prints its errors.

A command's module is imported only when the command runs: importing torch and transformers takes seconds, and
``nlgrpo --help`` needs neither.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nlgrpo import __version__, errors
from nlgrpo.config import command_line
from nlgrpo.errors import UserError, did_you_mean, nearest
from nlgrpo.runtime.atomic_files import disk_errors

# name: (module:function, description)
COMMANDS = {
    "train": (
        "nlgrpo.train:main",
        "Train a policy: nlgrpo train [recipe] [file.toml] [--section.key value ...] [--dry-run]; --help lists keys",
    ),
    "generate": (
        "nlgrpo.apps.respond.generate:generate",
        'Sample completions from a model: nlgrpo generate "Once upon a time" --samples 4',
    ),
    "serve": (
        "nlgrpo.apps.respond.serve:main",
        "Serve a model over OpenAI's protocol: nlgrpo serve --model DIR --procedure bon:4 --choose REWARD",
    ),
    "recipes": ("nlgrpo.apps.shell.shell:list_recipes", "List the built-in recipes for `nlgrpo train NAME`"),
    "report": (
        "nlgrpo.apps.report.commands:write_report",
        "Rewrite the report.html and figures of a run: nlgrpo report runs/maze",
    ),
    "watch": (
        "nlgrpo.apps.report.commands:watch",
        "Follow runs that are training in a browser: nlgrpo watch runs/maze",
    ),
    "compare": (
        "nlgrpo.apps.report.commands:compare",
        "Plot several runs in one figure: nlgrpo compare runs/maze runs/maze-grpo",
    ),
    "evaluate": (
        "nlgrpo.apps.evaluate.evaluate:main",
        "Evaluate models under best-of-N and other procedures: nlgrpo evaluate runs/maze runs/maze-grpo",
    ),
    "rollout": (
        "nlgrpo.apps.rollout.rollout:main",
        "Sample and score completions of the reference model: nlgrpo rollout [file.toml] --samples 100 --out DIR",
    ),
    "sweep": (
        "nlgrpo.apps.sweep.sweep:main",
        "Train a grid: nlgrpo sweep [recipe] [file.toml] --loss.beta 1e-2,1e-1 --objective mean,bon:4 [--retry]",
    ),
    "reward-model": (
        "nlgrpo.apps.reward_model.reward_model:main",
        "Train a reward model on pairs: nlgrpo reward-model train [file.toml] [--section.key value ...] [--dry-run]",
    ),
    "value": (
        "nlgrpo.apps.guided.value:main",
        "Train a value model on rollouts, or merge several: nlgrpo value train|compress [file.toml] [--dry-run]",
    ),
    "merge": (
        "nlgrpo.apps.convert.merge:main",
        "Merge an adapter (LoRA) into its model: nlgrpo merge runs/NAME/adapter --out DIR",
    ),
    "iro": (
        "nlgrpo.apps.guided.iro:main",
        "Train value models that guide a frozen model (IRO): nlgrpo iro [recipe] [file.toml] --iterations 3 --out DIR",
    ),
    "decode": (
        "nlgrpo.apps.guided.decode:main",
        "Compare decoding methods at equal budgets: nlgrpo decode [file.toml] --guide OUT --methods bon cd iro",
    ),
    "curves": (
        "nlgrpo.apps.curves.curves:main",
        "Compute win rate against KL of transformed rewards, without a model: nlgrpo curves --n 4 [--suggest 4 --kl 1]",
    ),
    "plan": (
        "nlgrpo.apps.plan.plan:main",
        "Estimate memory on GPUs that are not here: nlgrpo plan my.toml --gpus 8 --gpu h100",
    ),
    "push": (
        "nlgrpo.apps.report.commands:push",
        "Upload the model of a run to the Hugging Face Hub: nlgrpo push runs/my --repo USER/NAME",
    ),
    "from-trl": (
        "nlgrpo.apps.convert.from_trl:main",
        "Convert a run of TRL (GRPOTrainer, RLOOTrainer): nlgrpo from-trl grpo.yaml --out my.toml",
    ),
    "doctor": (
        "nlgrpo.apps.doctor.doctor:main",
        "Check this machine: versions, GPU, ranks, ops, kernels, a training step: nlgrpo doctor [--json FILE]",
    ),
    "completion": (
        "nlgrpo.cli:completion",
        "Print a script that completes commands and options: nlgrpo completion bash (zsh, fish, ..)",
    ),
    "verify": (
        "nlgrpo.apps.verify.verify:main",
        "Check the mathematics against exact results: nlgrpo verify [--out FOLDER] [--quick]",
    ),
}


# What answers --help without PyTorch, which takes seconds to import. The other commands answer it themselves.
HELP = {
    "train": "nlgrpo.config.recipes:from_arguments",
    "generate": "nlgrpo.apps.respond.options:read_generate",
    "serve": "nlgrpo.apps.respond.options:read_serve",
    "evaluate": "nlgrpo.apps.evaluate.options:read_options",
    "rollout": "nlgrpo.apps.rollout.options:read_options",
    "sweep": "nlgrpo.apps.sweep.options:read_options",
    "reward-model": "nlgrpo.apps.reward_model.config:show_help",
    "value": "nlgrpo.apps.guided.value_config:show_help",
    "merge": "nlgrpo.apps.convert.options:read_merge",
    "iro": "nlgrpo.apps.guided.options:read_iro",
    "decode": "nlgrpo.apps.guided.options:read_decode",
    "curves": "nlgrpo.apps.curves.options:read_options",
    "plan": "nlgrpo.apps.plan.options:read_options",
    "from-trl": "nlgrpo.apps.convert.options:read_from_trl",
    "doctor": "nlgrpo.apps.doctor.options:read_options",
    "verify": "nlgrpo.apps.verify.options:read_options",
}


def completion(arguments: Sequence[str]) -> int:
    """Run ``nlgrpo completion``, the only command that needs the table of commands, and what prints their help."""
    run: Callable[..., int] = importlib.import_module("nlgrpo.apps.shell.shell").print_completion
    return run(arguments, {name: (HELP.get(name, place), about) for name, (place, about) in COMMANDS.items()})


def usage() -> str:
    lines = [f"nlgrpo {__version__}", "", "usage: nlgrpo COMMAND [--help]", ""]
    lines += [f"  {name:<12} {about}" for name, (_, about) in COMMANDS.items()]
    lines += ["", "Every command has --help, and --debug, which shows the traceback of an error."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0; 2, with a message, for an error the user can fix; 1, with a traceback, for a bug; 130
    after Ctrl-C, if the command does not save and stop then.
    """
    try:
        try:
            return errors.run(_run, sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, is done; Python flushes once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT  # as shells report it


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    if arguments[0] not in COMMANDS:
        longer = [name for name in COMMANDS if arguments[0] and name.startswith(arguments[0])]
        hint = did_you_mean(longer[:1] or nearest(arguments[0], COMMANDS), f"; the commands are: {', '.join(COMMANDS)}")
        raise UserError(f"unknown command {arguments[0]!r}{hint}")
    command_line.check_arguments(arguments[1:], grid=arguments[0] == "sweep")
    with disk_errors():
        if {"-h", "--help"} & set(arguments) and arguments[0] in HELP:
            _load(HELP[arguments[0]])(arguments[1:])  # exits, unless --help comes after --
        return int(_load(COMMANDS[arguments[0]][0])(arguments[1:]))


def _load(place: str) -> Callable[[Sequence[str]], Any]:
    """Import a function, ``module:function``."""
    module, function = place.split(":")
    found: Callable[[Sequence[str]], Any] = getattr(importlib.import_module(module), function)
    return found


if __name__ == "__main__":
    sys.exit(main())
