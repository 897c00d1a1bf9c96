"""A functional of the policy at one prompt, from rewards: what all objectives are, and what may be given to them.

Legend: P prompts, M atoms a prompt, usually the M samples of a group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from torch import Tensor

from nlgrpo.advantages import centre
from nlgrpo.kernels import reference


class Objective(ABC):
    """A functional R[pi] of the policy at one prompt. ``rewards`` (P, M) are those of M atoms, usually samples.

    ``probs``, (M,) or (P, M), are the atoms' probabilities under pi. Unless given they are samples, of 1/M each.
    """

    def linearize(self, rewards: Tensor, probs: Tensor | None = None) -> Tensor:
        """First variation dR/dpi at each atom, (P, M), up to a constant per prompt.

        Raises ValueError for rewards that are not (P, M >= 1) or hold a NaN, and for probs that are no distribution.
        """
        return self._linearize(*_check(rewards, probs))

    def value(self, rewards: Tensor, probs: Tensor | None = None) -> Tensor:
        """R of each prompt's distribution, (P,). Raises ValueError as `linearize`."""
        return self._value(*_check(rewards, probs))

    def advantage(self, rewards: Tensor) -> Tensor:
        """What each sample of a group adds, (P, M): its linearised reward less a baseline, here the group's mean.

        The baseline holds 1/M of the sample's own linearised reward, which makes the expected gradient (M-1)/M of that
        without one. Raises ValueError as `linearize`.
        """
        return centre(self.linearize(rewards))

    @property
    def fewest(self) -> int:
        """Samples that a group must have at least."""
        return 1

    @property
    @abstractmethod
    def name(self) -> str:
        """The string from which `nlgrpo.objectives.parse` makes this objective."""

    @abstractmethod
    def _linearize(self, rewards: Tensor, probs: Tensor | None) -> Tensor: ...

    @abstractmethod
    def _value(self, rewards: Tensor, probs: Tensor | None) -> Tensor: ...

    def __str__(self) -> str:
        return self.name


def is_number(x: object) -> bool:
    """Whether ``x`` is a finite int or float, and no bool."""
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def first(bad: Tensor) -> str:
    """The first true element of (P, M), in words."""
    group, sample = bad.nonzero()[0].tolist()
    return f"group {group}, sample {sample}"


def _check(rewards: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both as plain data in float32 or float64, ``probs`` expanded to (P, M)."""
    if rewards.ndim != 2 or rewards.shape[1] == 0:
        raise ValueError(f"expected rewards (P, M) with M >= 1, got {tuple(rewards.shape)}.")
    rewards = reference.widen(rewards.detach())
    if rewards.isnan().any():
        raise ValueError(
            f"reward of {first(rewards.isnan())} is NaN; "
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
