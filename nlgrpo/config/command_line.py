"""Checks of a command line and of the environment variables, before a command reads them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence

from nlgrpo.errors import UserError, did_you_mean, nearest

PREFIX = "NLGRPO_"
# Environment variables of the package, and of this repository's tests and scripts.
VARIABLES = (
    "NLGRPO_API_KEY", "NLGRPO_ATTENTION", "NLGRPO_BUILD_EXT", "NLGRPO_DEBUG", "NLGRPO_EXT", "NLGRPO_TRITON",
    "NLGRPO_FUZZ_OP", "NLGRPO_KIT_COUNTS", "NLGRPO_KIT_WHEELS", "NLGRPO_SANITIZE", "NLGRPO_SHARED",
)  # fmt: skip


def mode_of(arguments: Sequence[str], name: str, modes: Sequence[str]) -> str:
    """Return the word after ``nlgrpo NAME``, one of ``modes``; the first of them for a lone ``--help``.

    Raises UserError for another word.
    """
    if list(arguments) in (["-h"], ["--help"]):
        return modes[0]
    if not arguments or arguments[0] not in modes:
        got = f", got {arguments[0]!r}" if arguments else ""
        mode = modes[0] if len(modes) == 1 else f"({'|'.join(modes)})"
        raise UserError(f"expected: nlgrpo {name} {mode} [file.toml] [--section.key value ...]{got}")
    return arguments[0]


def check_arguments(arguments: Sequence[str], environ: Mapping[str, str] = os.environ, *, grid: bool = False) -> None:
    """Note options that are given twice, and unknown environment variables, on the standard error of the first rank.

    Raises UserError for variables that are misspelled, and in a ``grid`` for options that are given twice.
    """
    repeated = _repeated(arguments)
    if repeated and grid:
        raise UserError(f"{repeated[0]} is given twice; give it once, with commas between its values")
    notes = [f"{option} is given twice; only the last one counts" for option in repeated]
    for note in (*notes, *_unknown_variables(environ)):
        if environ.get("RANK", "0") == "0":
            print(f"note: {note}", file=sys.stderr)


def _repeated(arguments: Sequence[str]) -> list[str]:
    """Options that are given again, as they are spelled then. ``--a.no-b`` is the option ``--a.b``."""
    seen = set[str]()
    found = list[str]()
    for argument in arguments:
        if argument == "--":
            break
        if not argument.startswith("--"):
            continue
        option = argument.partition("=")[0]
        name = re.sub(r"(^|\.)no-([^.]*)$", r"\1\2", option[2:].replace("_", "-"))
        if name in seen and option not in found:
            found.append(option)
        seen.add(name)
    return found


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    known = {name.removeprefix(PREFIX): name for name in VARIABLES}
    notes = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in VARIABLES:
            continue
        if near := nearest(name.removeprefix(PREFIX), known):
            raise UserError(f"the environment variable {name} is not known{did_you_mean([known[near[0]]])}")
        notes.append(f"nlgrpo does not read the environment variable {name}")
    if environ.get("NLGRPO_TRITON", "") not in ("", "0", "1"):
        raise UserError(f"NLGRPO_TRITON = {environ['NLGRPO_TRITON']!r}: expected 0 (without Triton) or 1")
    return notes
