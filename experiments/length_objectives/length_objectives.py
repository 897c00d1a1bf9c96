"""Completion lengths under every objective (IAMA, Figs. 3a and 5): one run of `length-bon` each, one figure.

    python -m experiments.length_objectives.length_objectives [--out runs/lengths]
        [--objectives mean bon:2 ...] [-- --train.steps 600 ...]

Trains `length-bon` once per objective (`nlgrpo sweep`) and overlays the runs in one figure. Finished runs are reused,
and stopped ones resume. Arguments after ``--`` are passed to every run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments import quick
from nlgrpo.apps.report import compare as comparison
from nlgrpo.apps.sweep import sweep
from nlgrpo.apps.sweep.state import read_sweep_state

OBJECTIVES = ["mean", "bon:2", "bon:4", "bon:8", "bon:16", "soft:0.1", "soft:0.05"]


QUICK = [
    "--objectives", "mean", "bon:2", "--", *quick.TINY,
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/lengths"), help="folder of the runs and the figure")
    parser.add_argument("--objectives", nargs="+", default=OBJECTIVES, help="objectives, named as in a configuration")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    options, more = parser.parse_args(own), sys.argv[2 + len(own) :]
    try:
        status = sweep.run(["length-bon", *more], [{"objective": name} for name in options.objectives], options.out)
    except ValueError as error:
        parser.error(str(error))
    points = [point for point in read_sweep_state(options.out) if point.overrides["objective"] in options.objectives]
    if status != 0 or any(point.state != "done" for point in points):
        return status or 1
    print(comparison.compare([point.folder for point in points], options.out / "lengths.png"))
    return 0


if __name__ == "__main__":
    sys.exit(quick.run(main, QUICK))
