"""The command line of scripts/gpu.sh."""

from __future__ import annotations

import argparse
import difflib
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from gpu_kit import machine, plan, surroundings
from gpu_kit.runner import Runner

COMMANDS = ("prepare", "check", "speed", "all")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0; 1 if a step failed; 2, after one line, for what the user can mend; 128 + a signal."""
    options = parse(arguments)
    try:
        if options.list:
            show_steps()
            return 0
        if options.command == "prepare":
            from gpu_kit import wheels

            print(wheels.prepare(surroundings.WHEELS))
            return 0
        return measure(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, as all other errors."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="scripts/gpu.sh", description="Check and measure nlgrpo on a GPU.")
    parser.add_argument("command", nargs="?", choices=COMMANDS, default="all", help="default: all")
    parser.add_argument("--rehearse", action="store_true", help="run every step on a CPU, at tiny sizes")
    parser.add_argument("--only", type=names, default=(), metavar="STEP,..", help="only these steps")
    parser.add_argument("--out", type=Path, help="folder of the JSON file (default: bench/results/gpu)")
    parser.add_argument("--commit", help="commit that is measured, where the tree is a copy")
    parser.add_argument("--list", action="store_true", help="list the steps")
    return parser.parse_args(arguments)


def names(text: str) -> tuple[str, ...]:
    """Read names of steps. Raises ArgumentTypeError for an unknown one, with the nearest."""
    found = tuple(filter(None, text.split(",")))
    for name in found:
        if name not in plan.NAMES:
            near = difflib.get_close_matches(name, plan.NAMES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise argparse.ArgumentTypeError(f"no step is named {name!r}; {hint}the steps: {', '.join(plan.NAMES)}")
    return found


def show_steps() -> None:
    for step in plan.STEPS:
        print(f"{step.name:<10} {step.group}  {step.seconds:3.0f} s  {step.about}")


def measure(options: argparse.Namespace) -> int:
    """Run the steps of the command. Raises ValueError without a GPU, and for a folder that cannot be written."""
    steps = plan.of_command(options.command, options.only)
    if not steps:
        raise ValueError(f"--only {','.join(options.only)}: {options.command} has none of these steps")
    facts = machine.probe(surroundings.environment(options.rehearse))
    if facts["card"] is None and not options.rehearse:
        raise ValueError(
            f"torch {facts['versions']['torch']} finds no GPU; --rehearse runs every step on a CPU at tiny sizes"
        )
    path = result_path(options, facts)
    runner = Runner(
        path=path,
        record=header(options, facts),
        environment=lambda: surroundings.environment(options.rehearse),
        rehearse=options.rehearse,
    )
    if options.rehearse:
        show_differences(steps)
    status = runner.run(steps)
    print(path)
    return status


def header(options: argparse.Namespace, facts: dict[str, Any]) -> dict[str, Any]:
    commit, dirty = (options.commit, None) if options.commit else machine.commit()
    return {
        "format": plan.FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rehearsal": options.rehearse,
        "command": options.command,
        **facts,
        "driver": machine.driver(),
        "commit": commit,
        "dirty": dirty,
        "steps": {},
    }


def result_path(options: argparse.Namespace, facts: dict[str, Any]) -> Path:
    """Return the path of a new JSON file: CARD-DATE.json, and CARD-DATE-2.json for the second of a day.

    A rehearsal writes into a temporary folder unless ``--out`` names one, and never among the results of GPUs.
    """
    today = datetime.now(UTC).date().isoformat()
    if options.rehearse:
        if options.out is not None and options.out.resolve() == plan.RESULTS:
            raise ValueError(f"--out {options.out}: a rehearsal does not write among the results of GPUs")
        folder = options.out or Path(tempfile.mkdtemp(prefix="nlgrpo-rehearsal-"))
        name = f"rehearsal-{today}"
    else:
        folder = options.out or plan.RESULTS
        name = f"{card_name(facts['card'])}-{today}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write into {folder}: {error.strerror}") from error
    path = folder / f"{name}.json"
    number = 2
    while path.exists():
        path = folder / f"{name}-{number}.json"
        number += 1
    return path


def card_name(card: str) -> str:
    """Name of a card in a file's name: "NVIDIA H100 80GB HBM3" -> "h100-80gb-hbm3"."""
    plain = card.removeprefix("NVIDIA ").lower()
    return "-".join("".join(c if c.isalnum() else " " for c in plain).split())


def show_differences(steps: Sequence[plan.Step]) -> None:
    """Print how the rehearsal differs from a run on a GPU."""
    print("A rehearsal differs from a run on a GPU:")
    print("  all steps: device cpu, tiny sizes, one thread, Triton's interpreter where a kernel is named")
    for step in steps:
        print(f"  {step.name}: {step.rehearsal}")


if __name__ == "__main__":
    sys.exit(main())
