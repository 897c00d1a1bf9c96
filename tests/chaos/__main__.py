"""Fault injection: are runs that are disturbed at any place equal, bit for bit, to undisturbed ones?

    make chaos                                  # 224 injections, 40 minutes on two cores
    make chaos ARGS="--seed 7 --injections 50"
    make chaos ARGS="--only train:rank-lost:3"  # one injection again

Real commands run on a tiny model: training and rollouts on two ranks under torchrun's agent, a sweep, value-guided
decoding (`nlgrpo iro`), `generate`, `serve` with a client, and training with a reward server. Each injection runs one
of them in a new folder and injects one fault at a random file operation: a C library (faults.c) is loaded before all
others, counts the operations on files below the folder, and makes them fail, or stops or kills the process. Then the
command is started again if it has not finished.

Checked is: all processes end within a limit; the second start finishes; all files, the newest checkpoint included, are
equal to those of an undisturbed run (times and figures are not compared); no process, partial file, shared memory or
temporary file is left; what the system reports (a full disk, a signal) prints no traceback.

Commands are forked from this process, which saves their imports; the runs of a sweep are new interpreters.
"""

from __future__ import annotations

import os
import sys

from chaos import library

if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, "-m", "chaos.trials", *sys.argv[1:]], os.environ | library.environment())
