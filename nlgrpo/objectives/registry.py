"""Objectives: functionals of the policy that stand for a procedure at inference time, and their first variation.

Training replaces the rewards of a group of M samples of one prompt by the *linearised* rewards, the first variation of
the objective at the group's empirical distribution, up to a constant per group (IAMA, Alg. 1 to 4). Rewards are data:
no gradient flows through anything here. Legend: P prompts, M samples per prompt.

A string names an objective in a config: "mean", "bon:4", "soft:0.1"; `parse` reads it and `Objective.name` writes it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nlgrpo.kernels import reference
from nlgrpo.objectives.advantages import Baseline
from nlgrpo.objectives.base import Objective
from nlgrpo.objectives.diversity import Diversity, DPPDiversity, RaoDiversity
from nlgrpo.objectives.kde import Smoothed
from nlgrpo.objectives.rank_based import BestOfN, BestOfPoisson, CVaR, Distortion, Mean, RankBased, WorstOfN
from nlgrpo.objectives.tilted import EntropicRisk, SoftBestOfN

__all__ = [
    "BestOfN",
    "BestOfPoisson",
    "CVaR",
    "DPPDiversity",
    "Distortion",
    "EntropicRisk",
    "Mean",
    "Objective",
    "RankBased",
    "RaoDiversity",
    "Smoothed",
    "SoftBestOfN",
    "WorstOfN",
    "linearize_present",
    "parse",
    "present",
    "value_present",
]


def linearize_present(objective: Objective, rewards: Tensor, baseline: Baseline = "mean") -> Tensor:
    """`Objective.advantage` (P, M) when some rewards are NaN: the reward abstained for that completion.

    The entries of a group that are there count as a smaller group of their own. The absent ones get 0, so that they
    pull the policy nowhere, and so do all of a group that has one entry or fewer than the objective needs. Of a kernel
    matrix (P, M, M), a sample is absent whose similarity with itself is NaN.
    """
    absent = _absent(objective, rewards)
    if not absent.any():
        return objective.advantage(rewards, baseline)
    linear = torch.zeros(absent.shape, dtype=reference.widen(rewards).dtype, device=rewards.device)
    for rows, columns in _by_presence(absent, objective.fewest):
        linear[rows, columns] = objective.advantage(_picked(rewards, rows, columns), baseline)
    return linear


def present(objective: Objective, rewards: Tensor) -> Tensor:
    """(P, M) bool: the entries that count, which are not NaN, in groups of as many as the objective needs."""
    there = ~_absent(objective, rewards)
    return there & (there.sum(-1, keepdim=True) >= objective.fewest)


def learns_from_one(objective: Objective) -> bool:
    """Whether a group of one has a linearised reward that its reward changes; soft best-of-N has none."""
    one, two = (objective.advantage(torch.tensor([[x]], dtype=torch.float64), "none") for x in (1.0, 2.0))
    return not torch.equal(one, two)


def value_present(objective: Objective, rewards: Tensor) -> Tensor:
    """`Objective.value` (P,) over the entries of each group that are not NaN; NaN for a group of too few."""
    absent = _absent(objective, rewards)
    if not absent.any():
        return objective.value(rewards)
    value = reference.widen(rewards).new_full(rewards.shape[:1], torch.nan)
    for rows, columns in _by_presence(absent, objective.fewest):
        value[rows[:, 0]] = objective.value(_picked(rewards, rows, columns))
    return value


def per_completion(objective: Objective, rewards: Tensor) -> Tensor:
    """One number per completion, (P, M), for tables: its reward, or its share in the diversity of its group.

    The mean over a group is the group's mean reward, or its diversity. NaN for what is absent.
    """
    if not isinstance(objective, Diversity):
        return rewards
    absent, out = _absent(objective, rewards), torch.full_like(rewards[..., 0], torch.nan)
    for rows, columns in _by_presence(absent, objective.order):
        out[rows, columns] = objective.contributions(_picked(rewards, rows, columns))
    return out


class Form(NamedTuple):
    """How an objective is written: "bon:4:unbiased" is the name of the form and its arguments."""

    text: str
    make: type[Objective]
    arguments: tuple[type, ...] = ()  # how each is read
    needed: int = 0


FORMS = {
    "mean": Form("mean", Mean),
    "bon": Form("bon:N", BestOfN, (int, str), 1),
    "wor": Form("wor:N", WorstOfN, (int, str), 1),
    "bop": Form("bop:RATE", BestOfPoisson, (float,), 1),
    "cvar": Form("cvar:ALPHA", CVaR, (float,), 1),
    "soft": Form("soft:TAU", SoftBestOfN, (float,), 1),
    "erm": Form("erm:BETA", EntropicRisk, (float,), 1),
    "rao": Form("rao", RaoDiversity),
    "dpp": Form("dpp:N", DPPDiversity, (int, float), 1),
    "distortion": Form("distortion:F", Distortion),
}


def is_pairwise(text: str) -> bool:
    """Whether the objective that ``text`` names takes kernel matrices in the place of rewards."""
    form = FORMS.get(text.strip().partition(":")[0])
    return form is not None and form.make.pairwise


def parse(text: str, function: Callable[[str], Callable[..., Any]] | None = None) -> Objective:
    """The objective that ``text`` names: "mean", "bon:4" -> BestOfN(4), "soft:0.1" -> SoftBestOfN(0.1).

    - "bon:N" and "wor:N" may be followed by their estimator, "bon:4:unbiased" -> BestOfN(4, "unbiased"), and "dpp:N" by
      its eps, "dpp:3:0.01".
    - "distortion:1,0.5,0" is a `Distortion` by a table; "distortion:file.py:f" by what ``function`` makes of the text
      "file.py:f". Without ``function`` there are only tables.
    - A rank-based one may be followed by ":kde" or ":kde:BANDWIDTH", "wor:4:kde" -> `Smoothed` (WorstOfN(4)).

    Raises ValueError for an unknown name, with the nearest known one, and for an argument that does not fit.
    """
    text = text.strip()
    rank_based, smoothed, bandwidth = text.rpartition(":kde")
    if smoothed and (not bandwidth or bandwidth.startswith(":")):
        return _smoothed(text, parse(rank_based, function), bandwidth[1:])
    name, _, rest = text.partition(":")
    if name not in FORMS:
        known = ", ".join(form.text for form in FORMS.values())
        near = difflib.get_close_matches(name.lower(), FORMS, cutoff=0.6)
        near.sort(key=lambda other: sorted(other) != sorted(name.lower()))  # two letters swapped come first
        hint = f" Did you mean {FORMS[near[0]].text!r}?" if near else ""
        raise ValueError(f"objective {text!r} is not known; expected one of {known}.{hint}")
    return _distortion(text, rest, function) if name == "distortion" else _of_form(text, FORMS[name])


def _of_form(text: str, form: Form) -> Objective:
    given = text.split(":")[1:]
    if given and not form.arguments:
        raise ValueError(f"objective {text!r}: it takes no argument; write {form.text!r}.")
    if not form.needed <= len(given) <= len(form.arguments):
        raise ValueError(f"objective {text!r}: expected {form.text!r} with a number, got {':'.join(given)!r}.")
    try:
        read = [kind(argument) for kind, argument in zip(form.arguments, given, strict=False)]
    except ValueError:
        raise ValueError(
            f"objective {text!r}: expected {form.text!r} with a number, got {':'.join(given)!r}."
        ) from None
    return form.make(*read)


def _smoothed(text: str, objective: Objective, bandwidth: str) -> Objective:
    try:
        width = float(bandwidth) if bandwidth else "silverman"
    except ValueError:
        raise ValueError(f"objective {text!r}: expected ':kde' or ':kde:BANDWIDTH', got {bandwidth!r}.") from None
    return Smoothed(objective, width)  # type: ignore[arg-type]  # it refuses what is not rank-based


def _distortion_of(text: str, f: Callable[..., Any], named: str) -> Objective:
    try:
        return Distortion(f, named=named)
    except ValueError as error:
        raise ValueError(f"objective {text!r}: {error}") from error
    except Exception as error:  # f is the user's
        raise ValueError(f"objective {text!r}: f raised {type(error).__name__}: {error}.") from error


def _distortion(text: str, rest: str, function: Callable[[str], Callable[..., Any]] | None) -> Objective:
    try:
        table = [float(number) for number in rest.split(",")]
    except ValueError:
        if ":" in rest and function is not None:
            return _distortion_of(text, function(rest), rest)
        raise ValueError(
            f"objective {text!r}: expected 'distortion:' and numbers between commas, f at equal steps of [0, 1]"
            + (", or a function as module:function or file.py:function." if function is not None else ".")
        ) from None
    return Distortion(table)


def _absent(objective: Objective, rewards: Tensor) -> Tensor:
    """(P, M) bool."""
    if objective.pairwise and rewards.ndim == 3:
        return rewards.diagonal(dim1=-2, dim2=-1).isnan()
    return rewards.isnan()


def _picked(rewards: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Of rewards (P, M), or kernels (P, M, M), the groups ``rows`` (p, 1) with their ``columns`` (p, k) only."""
    if rewards.ndim == 2:
        return rewards[rows, columns]
    return rewards[rows[:, :, None], columns[:, :, None], columns[:, None, :]]


def _by_presence(absent: Tensor, fewest: int) -> list[tuple[Tensor, Tensor]]:
    """For each number k >= ``fewest`` of entries that are there: the groups with k, (p, 1), and where, (p, k)."""
    present_first = absent.to(torch.uint8).argsort(dim=-1, stable=True)
    counts = (~absent).sum(-1)
    rows_of = {k: (counts == k).nonzero() for k in counts.unique().tolist() if k >= fewest}
    return [(rows, present_first[rows[:, 0], :k]) for k, rows in rows_of.items()]
