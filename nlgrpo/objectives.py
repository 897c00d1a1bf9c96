"""Objectives: functionals of the policy that stand for a procedure at inference time, and their first variation.

Training replaces the rewards of a group of M samples of one prompt by the *linearised* rewards, the first variation of
the objective at the group's empirical distribution, up to a constant per group (IAMA, Alg. 1 to 4). Rewards are data:
no gradient flows through anything here. Legend: P prompts, M samples a prompt.

A string names an objective in a config: "mean", "bon:4", "soft:0.1"; `parse` reads it and `Objective.name` writes it.
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nlgrpo import kernels
from nlgrpo.kernels import reference


class Objective(ABC):
    """A functional R[pi] of the policy at one prompt. ``rewards`` (P, M) are those of M atoms, usually samples.

    ``probs``, (M,) or (P, M), are the atoms' probabilities under pi; 1/M each unless given.
    """

    def linearize(self, rewards: Tensor, probs: Tensor | None = None) -> Tensor:
        """First variation dR/dpi at each atom, (P, M), up to a constant per prompt.

        Raises ValueError for rewards that are not (P, M >= 1) or hold a NaN, and for probs that are no distribution.
        """
        return self._linearize(*_check(rewards, probs))

    def value(self, rewards: Tensor, probs: Tensor | None = None) -> Tensor:
        """R of each prompt's distribution, (P,). Raises ValueError as `linearize`."""
        return self._value(*_check(rewards, probs))

    @property
    @abstractmethod
    def name(self) -> str:
        """The string from which `parse` makes this objective."""

    @abstractmethod
    def _linearize(self, rewards: Tensor, probs: Tensor | None) -> Tensor: ...

    @abstractmethod
    def _value(self, rewards: Tensor, probs: Tensor | None) -> Tensor: ...

    def __str__(self) -> str:
        return self.name


class RankBased(Objective):
    """Procedures that reweight a response by the rank of its reward: T[pi](y) = f(C(r(y))) pi(y), C the CDF of rewards.

        R[pi] = sum_k r_(k) [F(C_k) - F(C_{k-1})],  F' = f, F(0) = 0;      dR/dpi(y) = -int_{r(y)}^{r_max} f(C(r)) dr

    On a group C_k = k/M, and the second is one sort and one suffix sum with the weights w_k = f(k/M)
    (`nlgrpo.kernels.linearize`). A member of the family gives f and F; equal rewards need no care.
    """

    @abstractmethod
    def _f(self, z: Tensor) -> Tensor: ...

    @abstractmethod
    def _integral(self, z: Tensor) -> Tensor:
        """F(z), the integral of f from 0 to z."""

    def weights(self, M: int) -> Tensor:
        """w_k = f(k/M) for k = 1 .. M, (M,) in float64."""
        return self._f(torch.arange(1, M + 1, dtype=torch.float64) / M)

    def _linearize(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        if probs is None:
            return kernels.linearize(rewards, self.weights(rewards.shape[1]).to(rewards))
        order = rewards.argsort(dim=-1, stable=True)
        return reference.linearize(rewards, self._f(_cdf(probs.gather(-1, order))))

    def _value(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        ordered, order = rewards.sort(dim=-1, stable=True)
        if probs is None:
            cdf = torch.arange(rewards.shape[1] + 1, dtype=torch.float64, device=rewards.device) / rewards.shape[1]
        else:
            cdf = torch.nn.functional.pad(_cdf(probs.gather(-1, order)), (1, 0))
        chosen = self._integral(cdf).diff(dim=-1).to(rewards)
        return torch.where(chosen == 0, 0.0, chosen * ordered).sum(-1)  # an infinite reward may have no mass


@dataclass(frozen=True)
class Mean(RankBased):
    """Expected reward of one sample, R[pi] = E r: f = 1, and the linearised reward is r - max r, plain GRPO."""

    @property
    def name(self) -> str:
        return "mean"

    def _f(self, z: Tensor) -> Tensor:
        return torch.ones_like(z)

    def _integral(self, z: Tensor) -> Tensor:
        return z


@dataclass(frozen=True)
class BestOfN(RankBased):
    """Expected reward of the best of ``n`` samples, and its first variation.

    R[pi] = E max(r_1, .., r_n);   dR/dpi(y) = -int_{r(y)}^{r_max} n C(r)^(n-1) dr      (IAMA, Prop. 4.2, Alg. 3)

    ``n = 1`` is `Mean`. ``estimator="plugin"``, so far the only one, takes the group's CDF for C: biased at order 1/M,
    any n, also n > M.

    Raises ValueError for an n that is no integer >= 1 and for an unknown estimator.
    """

    n: int
    estimator: Literal["plugin"] = "plugin"

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or isinstance(self.n, bool) or self.n < 1:
            raise ValueError(f"BestOfN(n={self.n!r}): expected an integer >= 1, the number of samples to choose from.")
        if self.estimator != "plugin":
            raise ValueError(f"BestOfN(estimator={self.estimator!r}): this version has only 'plugin'.")

    @property
    def name(self) -> str:
        return f"bon:{self.n}"

    def _f(self, z: Tensor) -> Tensor:
        return self.n * z ** (self.n - 1)

    def _integral(self, z: Tensor) -> Tensor:
        return z**self.n


@dataclass(frozen=True)
class SoftBestOfN(Objective):
    """Expected reward under the policy tilted by e^{r/tau}, the limit of soft best-of-N for many samples.

        e_j = exp((r_j - max r) / tau),   Z = E e,   R[pi] = E[r e] / Z,   dR/dpi(y_j) = e_j / Z (r_j - R)

    (IAMA, Alg. 4.) tau -> inf is `Mean`, tau -> 0 the maximum. On a group it is a plug-in estimate, biased at order
    1/M.

    Raises ValueError for a tau that is not positive and finite, and in use for infinite rewards.
    """

    tau: float

    def __post_init__(self) -> None:
        number = isinstance(self.tau, (int, float)) and not isinstance(self.tau, bool)
        if not (number and self.tau > 0 and math.isfinite(self.tau)):
            raise ValueError(f"SoftBestOfN(tau={self.tau!r}): expected a finite number > 0, in units of the reward.")

    @property
    def name(self) -> str:
        return f"soft:{self.tau!r}"

    def _tilt(self, rewards: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """e_j / Z (P, M), r_j - max r (P, M), and R - max r (P, 1).

        The shift by max r cancels in e/Z and is needed, as r/tau reaches hundreds; in r_j - R it makes a group of equal
        rewards exactly 0.
        """
        if rewards.isinf().any():
            raise ValueError(f"reward of {_first(rewards.isinf())} is infinite; {self} needs finite rewards.")
        shifted = rewards - rewards.amax(-1, keepdim=True)
        e = (shifted / self.tau).exp()
        p = torch.full_like(rewards, 1 / rewards.shape[1]) if probs is None else probs
        tilt = e / (p * e).sum(-1, keepdim=True)
        return tilt, shifted, (p * tilt * shifted).sum(-1, keepdim=True)

    def _linearize(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        tilt, shifted, expected = self._tilt(rewards, probs)
        return tilt * (shifted - expected)

    def _value(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        _, _, expected = self._tilt(rewards, probs)
        return (rewards.amax(-1, keepdim=True) + expected)[:, 0]


def linearize_present(objective: Objective, rewards: Tensor) -> Tensor:
    """Linearised rewards (P, M) when some rewards are NaN, which says that the reward abstained for that completion.

    The entries of a group that are there count as a smaller group of their own; theirs are centred on their mean, and
    the absent ones get 0, so that they pull the policy nowhere. A group with one entry or none is all 0.
    """
    if not rewards.isnan().any():
        return _centred(objective.linearize(rewards))
    linear = torch.zeros_like(reference.widen(rewards))
    for rows, columns in _by_presence(rewards):
        linear[rows, columns] = _centred(objective.linearize(rewards[rows, columns]))
    return linear


def value_present(objective: Objective, rewards: Tensor) -> Tensor:
    """`Objective.value` (P,) over the entries of each group that are not NaN; NaN for a group that has none."""
    if not rewards.isnan().any():
        return objective.value(rewards)
    value = reference.widen(rewards).new_full(rewards.shape[:1], torch.nan)
    for rows, columns in _by_presence(rewards):
        value[rows[:, 0]] = objective.value(rewards[rows, columns])
    return value


# name: the class, how its argument is read, how it is written
_BY_NAME: dict[str, tuple[Callable[..., Objective], type | None, str]] = {
    "mean": (Mean, None, "mean"),
    "bon": (BestOfN, int, "bon:N"),
    "soft": (SoftBestOfN, float, "soft:TAU"),
}


def parse(text: str) -> Objective:
    """The objective that ``text`` names: "mean", "bon:4" -> BestOfN(4), "soft:0.1" -> SoftBestOfN(0.1).

    Raises ValueError for an unknown name, with the nearest known one, and for an argument that does not fit.
    """
    name, colon, argument = text.strip().partition(":")
    known = ", ".join(form for _, _, form in _BY_NAME.values())
    if name not in _BY_NAME:
        near = difflib.get_close_matches(name.lower(), _BY_NAME, n=1, cutoff=0.6)
        hint = f" Did you mean {_BY_NAME[near[0]][2]!r}?" if near else ""
        raise ValueError(f"objective {text!r} is not known; expected one of {known}.{hint}")
    make, number, form = _BY_NAME[name]
    if number is None:
        if colon:
            raise ValueError(f"objective {text!r}: {name!r} takes no argument; write {form!r}.")
        return make()
    try:
        value = number(argument)
    except ValueError:
        raise ValueError(f"objective {text!r}: expected {form!r} with a number, got {argument!r}.") from None
    return make(value)


def _check(rewards: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both as plain data in float32 or float64, ``probs`` expanded to (P, M)."""
    if rewards.ndim != 2 or rewards.shape[1] == 0:
        raise ValueError(f"expected rewards (P, M) with M >= 1, got {tuple(rewards.shape)}.")
    rewards = reference.widen(rewards.detach())
    if rewards.isnan().any():
        raise ValueError(
            f"reward of {_first(rewards.isnan())} is NaN; "
            "groups with missing rewards go through linearize_present and value_present."
        )
    if probs is None:
        return rewards, None
    if probs.shape not in (rewards.shape, rewards.shape[1:]):
        raise ValueError(
            f"expected probs {tuple(rewards.shape)} or {tuple(rewards.shape[1:])}, got {tuple(probs.shape)}."
        )
    probs = probs.detach().to(rewards).expand_as(rewards)
    total = probs.sum(-1)
    if not ((probs >= 0).all() and ((total - 1).abs() <= 1e-4).all()):
        raise ValueError(
            f"probs of a group must be >= 0 and sum to 1; least {probs.min():g}, sums {total.tolist()[:4]}."
        )
    return rewards, probs


def _cdf(masses: Tensor) -> Tensor:
    """Running sum of the last dimension, ending on 1 exactly, as f and F may be steep there."""
    total = masses.cumsum(-1)
    return total / total[..., -1:]


def _centred(linear: Tensor) -> Tensor:
    return linear - linear.mean(-1, keepdim=True)


def _by_presence(rewards: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each number k > 0 of entries that are there: the groups with k, (p, 1), and where they are, (p, k)."""
    absent = rewards.isnan()
    present_first = absent.to(torch.uint8).argsort(dim=-1, stable=True)
    counts = (~absent).sum(-1)
    rows_of = {k: (counts == k).nonzero() for k in counts.unique().tolist() if k > 0}
    return [(rows, present_first[rows[:, 0], :k]) for k, rows in rows_of.items()]


def _first(bad: Tensor) -> str:
    group, sample = bad.nonzero()[0].tolist()
    return f"group {group}, sample {sample}"
