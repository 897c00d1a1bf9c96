"""Overrides from the command line and from TOML files, laid over a configuration."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import tyro

from nlgrpo.config.schema import AnyConfig, Config, RewardConfig, ScalarHeadConfig, dashed, read_toml
from nlgrpo.errors import UserError

HELP = frozenset(("-h", "--help"))


def key_types(config: type) -> dict[str, Any]:
    """Map every key of a configuration, spelled as on the command line, to its type."""
    return {
        dashed(f"--{section}.{key}"): kind
        for section, keys in typing.get_type_hints(config).items()
        if dataclasses.is_dataclass(keys)
        for key, kind in typing.get_type_hints(keys).items()
    }


LISTS = {name for name, kind in key_types(Config).items() if typing.get_origin(kind) is tuple}
SWITCHES = {name for name, kind in key_types(Config).items() if kind in (bool, bool | None)}


def canonical(key: str) -> str:
    """Spell a key, without leading dashes, in one way: "data.no-shuffle" is "data.shuffle"."""
    section, dot, name = dashed(key).rpartition(".")
    positive = f"{section}{dot}{name.removeprefix('no-')}"
    return positive if f"--{positive}" in SWITCHES else dashed(key)


def override(config: Config, arguments: Sequence[str], *, program: str = "nlgrpo train") -> Config:
    """Return ``config`` with ``--section.key value`` arguments laid over it (tyro).

    ``--rewards.NAME.key`` adds the reward NAME if it does not exist. An unknown key ends the program and prints the
    nearest known keys; ``--help`` prints all of them.
    """
    rewards = dict(config.rewards)
    for argument in arguments:
        named = re.match(r"--rewards\.([^.=]+)\.", argument)
        if named and dashed(named[1]) not in map(dashed, rewards):
            rewards[named[1]] = RewardConfig()
    about = ""
    if HELP & set(arguments):
        from nlgrpo.config import help_text

        about = help_text.of_training(config.recipe)
        rewards = rewards or {"NAME": RewardConfig()}
    return lay_over(dataclasses.replace(config, rewards=rewards), arguments, program=program, about=about)


NamedConfig = TypeVar("NamedConfig", bound=ScalarHeadConfig)


def from_file(config: NamedConfig, arguments: Sequence[str], *, program: str, about: str) -> NamedConfig:
    """Return ``config``, named after the file, with ``[file.toml] [--section.key value ...]`` laid over it."""
    rest = list(arguments)
    if rest and not rest[0].startswith("-"):
        file = rest.pop(0)
        if not file.endswith(".toml"):
            raise UserError(f"expected a .toml file or --section.key value, got {file!r}")
        config = read_toml(Path(file), dataclasses.replace(config, name=Path(file).stem))
    return lay_over(config, rest, program=program, about=about)


def lay_over(config: AnyConfig, arguments: Sequence[str], *, program: str, about: str) -> AnyConfig:
    """Like `override`, for any configuration dataclass."""
    if not arguments:
        return config
    keys = key_types(type(config)).items()
    reading: AbstractContextManager[None] = nullcontext()
    if HELP & set(arguments):
        from nlgrpo.config import help_text

        reading = help_text.each_file_parsed_once()
    with reading:
        return tyro.cli(
            type(config),
            default=config,
            args=_tyro_spelling(
                arguments,
                switches={name for name, kind in keys if kind is bool},
                optional={name for name, kind in keys if kind == bool | None},
            ),
            prog=program,
            description=about,
            config=(tyro.conf.SuppressFixed,),
        )


def _tyro_spelling(arguments: Sequence[str], switches: set[str], optional: set[str]) -> list[str]:
    """Rewrite ``--data.shuffle false`` (or ``=false``) as tyro spells it: ``--data.no-shuffle``.

    ``optional`` switches may also be None: ``--data.add-bos`` becomes ``--data.add-bos True``, as tyro wants them.
    """
    parts: list[str] = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if equals and dashed(option) in switches | optional:
            parts += [option, value]
        else:
            parts.append(argument)
    found: list[str] = []
    for position, part in enumerate(parts):
        option = dashed(part)
        positive = option.replace(".no-", ".", 1)
        before = dashed(found[-1]) if found else ""
        following = parts[position + 1] if position + 1 < len(parts) else "--"
        if before in switches and part.lower() == "true":
            continue
        if before in switches and part.lower() == "false":
            found[-1] = found[-1].replace(".", ".no-", 1)
        elif before in optional and part.lower() in ("true", "false", "none"):
            found.append(part.capitalize())
        elif option in optional and following.startswith("--"):
            found += [option, "True"]
        elif option not in optional and positive in optional:
            found += [positive, "False"]
        else:
            found.append(part)
    return found
