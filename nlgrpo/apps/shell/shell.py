"""``nlgrpo recipes``, and ``nlgrpo completion``: completion of commands and options for a shell."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from typing import Annotated, Literal
from unittest import mock

import tyro

from nlgrpo.config.recipes import RECIPES

# At the beginning of a line, or after the first spelling: "--list, --no-list", "--rollout.engine {nlgrpo,vllm}".
OPTION = re.compile(r"(?:^[\s│]*(?:-\w, )?|(?<=\w), )(--[a-z][\w.-]*)(?: \{([\w,.:-]+)\})?", re.MULTILINE)
ACTIONS = {"value": ("train", "compress"), "reward-model": ("train",)}  # commands with a word before their options


def list_recipes(arguments: Sequence[str]) -> int:
    """Print each recipe with a one-line description."""

    def recipes() -> None:
        """List the recipes that `nlgrpo train NAME` runs."""

    tyro.cli(recipes, args=list(arguments), prog="nlgrpo recipes")
    for name, make in RECIPES.items():
        print(f"{name:<21} {(make.__doc__ or '').strip().splitlines()[0]}")
    return 0


@dataclass
class Completion:
    """Print a script that completes commands, options and their choices.

    bash: nlgrpo completion bash > ~/.local/share/bash-completion/completions/nlgrpo
    zsh:  nlgrpo completion zsh > ~/.zfunc/_nlgrpo, with fpath+=~/.zfunc before compinit
    fish: nlgrpo completion fish > ~/.config/fish/completions/nlgrpo.fish
    """

    shell: Annotated[Literal["bash", "zsh", "fish", "tcsh", "powershell"], tyro.conf.Positional]
    """The shell."""


def print_completion(arguments: Sequence[str], commands: Mapping[str, tuple[str, str]]) -> int:
    """Run ``nlgrpo completion``. ``commands``: the table of `nlgrpo.cli`."""
    options = tyro.cli(Completion, args=arguments, prog="nlgrpo completion")
    import shtab

    print(shtab.complete(parser(commands), options.shell))
    return 0


def parser(commands: Mapping[str, tuple[str, str]]) -> argparse.ArgumentParser:
    """Return a parser with all commands, NAME: (module:function, description), and the options in their ``--help``."""
    import shtab

    root = argparse.ArgumentParser(prog="nlgrpo")
    root.add_argument("--version", action="store_true")
    parsers = root.add_subparsers()
    for name, (target, about) in commands.items():
        command = parsers.add_parser(name, help=about.partition(":")[0])
        places = [command]
        if name in ACTIONS:
            actions = command.add_subparsers()
            places = [actions.add_parser(action, help=action) for action in ACTIONS[name]]
        for place, action in zip(places, ACTIONS.get(name, ("",)), strict=True):
            for option, choices in options_of(target, [action] if action else []).items():
                place.add_argument(option, choices=choices or None)
            files = place.add_argument("files", nargs="*")
            files.complete = shtab.FILE  # type: ignore[attr-defined]
    return root


def options_of(target: str, arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the options of a command, ``module:function``, with their choices, from its help."""
    module, function = target.split(":")
    shown = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="120"), redirect_stdout(shown), suppress(SystemExit):
        getattr(importlib.import_module(module), function)([*arguments, "--help"])
    found = dict[str, list[str]]()
    for option, choices in OPTION.findall(shown.getvalue()):
        if option != "--help" and not found.get(option):
            found[option] = choices.split(",") if choices else []
    return found
