"""Lengths under every objective (IAMA, Figs. 3a and 5): the default recipe with each of them, and one picture of all.

    python scripts/length_objectives.py [--out runs/lengths] [--objectives mean bon:2 ...] [-- --train.steps 600 ...]

Trains `length-bon` once for each objective, in a folder of its own, and lays the runs over each other. Runs that have
finished are not made again, and one that was stopped goes on; what follows ``--`` goes to every run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nlgrpo import report, train
from nlgrpo.sampled import read_evaluation

OBJECTIVES = ["mean", "bon:2", "bon:4", "bon:8", "bon:16", "soft:0.1", "soft:0.05"]


def finished(folder: Path) -> bool:
    try:
        return "after" in read_evaluation(folder)
    except ValueError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/lengths"), help="folder of the runs and the picture")
    parser.add_argument("--objectives", nargs="+", default=OBJECTIVES, help="as a config names them")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    options, more = parser.parse_args(own), sys.argv[2 + len(own) :]
    folders = [options.out / objective.replace(":", "-") for objective in options.objectives]
    for objective, folder in zip(options.objectives, folders, strict=True):
        if finished(folder):
            continue
        rewards = [f"--rewards.{name}.objective={objective}" for name in ("short", "long")]
        status = train.main(["length-bon", *rewards, f"--train.out={folder}", *more])
        if status != 0 or not finished(folder):
            return status or 1
    print(report.compare(folders, options.out / "lengths.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
