"""Options of ``nlgrpo curves``; without PyTorch, so that ``--help`` takes no seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass
class Curves:
    """Win rate against KL of transforms of a calibrated reward (InfAlign, Theorem 3), for any model and reward."""

    n: int = 4
    """N of best-of-N and worst-of-N, for both the model and the reference."""
    transforms: str = "identity,log,exp:10,exp:-10,bon_fp,won_fp"
    """Separated by commas: identity, log, exp:T, power:T, bon_fp (optimal for each beta), bon_fp:N:BETA, won_fp,
    fp:PROCEDURE (the same for any procedure, as below), file.py:f."""
    procedures: str = ""
    """Further procedures at inference, separated by commas: any rank-based objective, such as cvar:0.1, bop:4 or
    distortion:file.py:f."""
    kls: str = "0.5,1,2,3"
    """KLs of the table, in nats. The curves end at the largest."""
    betas: str = ""
    """Betas of the table and the curves, instead of KLs."""
    suggest: int | None = None
    """Print the best t of exp:t for best-of-N with this N, and write nothing."""
    kl: float = 1.0
    """KL for --suggest."""
    worst: bool = False
    """Suggest for worst-of-N instead of best-of-N."""
    out: Path = Path("runs/curves")
    """Folder of curves.json, curves.csv and curves.png."""


def read_options(arguments: Sequence[str]) -> Curves:
    return tyro.cli(Curves, args=list(arguments), prog="nlgrpo curves")
