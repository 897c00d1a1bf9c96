"""Objectives: functionals of the policy that stand for a procedure at inference time, and their first variation.

Training replaces the rewards of a group of M samples of one prompt by the *linearised* rewards, the first variation of
the objective at the group's empirical distribution, up to a constant per group (IAMA, Alg. 1 to 4). Rewards are data:
no gradient flows through anything here. Legend: P prompts, M samples a prompt.

A string names an objective in a config: "mean", "bon:4", "soft:0.1"; `parse` reads it and `Objective.name` writes it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

import torch
from torch import Tensor

from nlgrpo.functional import Objective
from nlgrpo.kernels import reference
from nlgrpo.rank_based import BestOfN, BestOfPoisson, CVaR, Distortion, Mean, RankBased, WorstOfN
from nlgrpo.tilted import EntropicRisk, SoftBestOfN

__all__ = [
    "BestOfN",
    "BestOfPoisson",
    "CVaR",
    "Distortion",
    "EntropicRisk",
    "Mean",
    "Objective",
    "RankBased",
    "SoftBestOfN",
    "WorstOfN",
    "linearize_present",
    "parse",
    "value_present",
]


def linearize_present(objective: Objective, rewards: Tensor) -> Tensor:
    """`Objective.advantage` (P, M) when some rewards are NaN: the reward abstained for that completion.

    The entries of a group that are there count as a smaller group of their own. The absent ones get 0, so that they
    pull the policy nowhere, and so do all of a group that has one entry or fewer than the objective needs.
    """
    if not rewards.isnan().any():
        return objective.advantage(rewards)
    linear = torch.zeros_like(reference.widen(rewards))
    for rows, columns in _by_presence(rewards, objective.fewest):
        linear[rows, columns] = objective.advantage(rewards[rows, columns])
    return linear


def value_present(objective: Objective, rewards: Tensor) -> Tensor:
    """`Objective.value` (P,) over the entries of each group that are not NaN; NaN for a group of too few."""
    if not rewards.isnan().any():
        return objective.value(rewards)
    value = reference.widen(rewards).new_full(rewards.shape[:1], torch.nan)
    for rows, columns in _by_presence(rewards, objective.fewest):
        value[rows[:, 0]] = objective.value(rewards[rows, columns])
    return value


# name: the class, how its argument is read, how it is written
_BY_NAME: dict[str, tuple[Callable[..., Objective], type | None, str]] = {
    "mean": (Mean, None, "mean"),
    "bon": (BestOfN, int, "bon:N"),
    "wor": (WorstOfN, int, "wor:N"),
    "bop": (BestOfPoisson, float, "bop:RATE"),
    "cvar": (CVaR, float, "cvar:ALPHA"),
    "soft": (SoftBestOfN, float, "soft:TAU"),
    "erm": (EntropicRisk, float, "erm:BETA"),
}


def parse(text: str) -> Objective:
    """The objective that ``text`` names: "mean", "bon:4" -> BestOfN(4), "soft:0.1" -> SoftBestOfN(0.1).

    "bon:N" and "wor:N" may be followed by their estimator, "bon:4:unbiased" -> BestOfN(4, "unbiased").

    Raises ValueError for an unknown name, with the nearest known one, and for an argument that does not fit.
    """
    name, colon, argument = text.strip().partition(":")
    known = ", ".join(form for _, _, form in _BY_NAME.values())
    if name not in _BY_NAME:
        near = difflib.get_close_matches(name.lower(), _BY_NAME, cutoff=0.6)
        near.sort(key=lambda other: sorted(other) != sorted(name.lower()))  # two letters swapped come first
        hint = f" Did you mean {_BY_NAME[near[0]][2]!r}?" if near else ""
        raise ValueError(f"objective {text!r} is not known; expected one of {known}.{hint}")
    make, number, form = _BY_NAME[name]
    if number is None:
        if colon:
            raise ValueError(f"objective {text!r}: {name!r} takes no argument; write {form!r}.")
        return make()
    first, estimated, estimator = argument.partition(":") if number is int else (argument, "", "")
    try:
        value = number(first)
    except ValueError:
        raise ValueError(f"objective {text!r}: expected {form!r} with a number, got {first!r}.") from None
    return make(value, estimator) if estimated else make(value)


def _by_presence(rewards: Tensor, fewest: int) -> list[tuple[Tensor, Tensor]]:
    """For each number k >= ``fewest`` of entries that are there: the groups with k, (p, 1), and where, (p, k)."""
    absent = rewards.isnan()
    present_first = absent.to(torch.uint8).argsort(dim=-1, stable=True)
    counts = (~absent).sum(-1)
    rows_of = {k: (counts == k).nonzero() for k in counts.unique().tolist() if k >= fewest}
    return [(rows, present_first[rows[:, 0], :k]) for k, rows in rows_of.items()]
