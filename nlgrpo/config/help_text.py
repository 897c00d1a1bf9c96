"""What `--help` needs besides the keys of a configuration; imported only for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

TRAIN = """Train a model: nlgrpo train [recipe] [file.toml] [--section.key value ...] [--dry-run]

`nlgrpo recipes` lists the recipes. The file overrides the recipe, and the options below override both. --dry-run prints
the plan and trains nothing. --tiny lays the file's table [tiny] over it: the same run, for two CPU cores.

--rewards.NAME.function adds the reward NAME to those of the recipe. To replace the rewards, start from the recipe
`blank`, or use a file with a [rewards] table. A reward of weight 0 is only logged.

The defaults below are {recipe}. `nlgrpo train RECIPE --help` shows those of a recipe, and `nlgrpo train file.toml
--help` those of a file. Without a recipe and a file, `nlgrpo train` runs the recipe `maze`. Paths in a file are
relative to the working directory."""


def of_training(recipe: str) -> str:
    """Return the text above the options of ``nlgrpo train``, which have the defaults of ``recipe``."""
    described = "those that a file starts from" if recipe == "blank" else f"those of `{recipe}`"
    return TRAIN.replace("{recipe}", described)


@contextmanager
def each_file_parsed_once() -> Iterator[None]:
    """Context in which Python parses a text only once.

    tyro takes the help of a key from the source of its class. Before Python 3.13, `inspect` parses the whole file of a
    class to find it, for each class again, which took a third of the time of `--help`.
    """
    parse = ast.parse
    setattr(ast, "parse", lru_cache(parse))  # noqa: B010 - mypy allows no assignment to a function
    try:
        yield
    finally:
        setattr(ast, "parse", parse)  # noqa: B010
