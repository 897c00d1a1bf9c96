"""Objectives of the record on mazes that have no name of their own.

nlgrpo train maze --rewards.solved.objective functional:experiments/mazes/maze_objectives.py:maxrl
"""

from __future__ import annotations

from torch import Tensor

SMALL = 1e-6  # keeps the logarithm of a group without a success finite


def maxrl(p: Tensor, r: Tensor) -> Tensor:
    """Log of the probability of success, log sum_y p(y) r(y): "Maximum Likelihood Reinforcement Learning" (MaxRL)."""
    return ((p * r).sum(-1) + SMALL).log()
