"""A configuration with what the command line says laid over it."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence

import tyro

from nlgrpo.config import Config, RewardConfig, dashed

ABOUT = """Train a model. Before the options stand the name of a recipe (`nlgrpo recipes` lists them), a .toml file with
the keys below, or both; what is written here comes on top. --dry-run prints the plan and trains nothing.

--rewards.NAME.function adds the reward NAME to those of the recipe. To train for others instead, begin at the recipe
`blank`, or give a file with a [rewards] table, which replaces them; a weight of 0 keeps one in the log only."""

# every key of a section as the command line has it, and its type
KINDS = {
    dashed(f"--{section}.{key}"): kind
    for section, keys in typing.get_type_hints(Config).items()
    if dataclasses.is_dataclass(keys)
    for key, kind in typing.get_type_hints(keys).items()
}
SWITCHES = {name for name, kind in KINDS.items() if kind is bool}  # on or off
LISTS = {name for name, kind in KINDS.items() if typing.get_origin(kind) is tuple}


def override(config: Config, arguments: Sequence[str], *, program: str = "nlgrpo train") -> Config:
    """``config`` with ``--section.key value`` arguments laid over it (tyro).

    ``--rewards.NAME.key`` adds the reward NAME where there is none. An unknown key ends the program with the nearest
    known ones, as does ``--help`` with all of them.
    """
    rewards = dict(config.rewards)
    for argument in arguments:
        named = re.match(r"--rewards\.([^.=]+)\.", argument)
        if named and dashed(named[1]) not in map(dashed, rewards):
            rewards[named[1]] = RewardConfig()
    if not rewards and {"-h", "--help"} & set(arguments):
        rewards["NAME"] = RewardConfig()
    default = dataclasses.replace(config, rewards=rewards)
    return tyro.cli(
        Config,
        default=default,
        args=_switches(arguments),
        prog=program,
        description=ABOUT,
        config=(tyro.conf.SuppressFixed,),
    )


def _switches(arguments: Sequence[str]) -> list[str]:
    """The arguments with ``--data.shuffle false`` (or ``=false``) as tyro writes it: ``--data.no-shuffle``."""
    parts = [part for a in arguments for part in (a.split("=", 1) if dashed(a.split("=")[0]) in SWITCHES else [a])]
    found: list[str] = []
    for part in parts:
        if found and dashed(found[-1]) in SWITCHES and part.lower() in ("true", "false"):
            found[-1] = found[-1] if part.lower() == "true" else found[-1].replace(".", ".no-", 1)
        else:
            found.append(part)
    return found
