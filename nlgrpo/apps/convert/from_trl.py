"""The command ``nlgrpo from-trl``: a run of TRL's ``GRPOTrainer`` or ``RLOOTrainer`` as a TOML file of nlgrpo."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nlgrpo.apps.convert.options import read_from_trl
from nlgrpo.apps.convert.trl_conversion import convert
from nlgrpo.apps.convert.trl_files import read
from nlgrpo.apps.convert.trl_script import KIND
from nlgrpo.errors import UserError


def main(arguments: Sequence[str]) -> int:
    """Convert and print."""
    options = read_from_trl(arguments)
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
