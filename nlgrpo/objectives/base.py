"""A functional of the policy at one prompt: what all objectives are, and what may be given to them.

Legend: P prompts, M atoms per prompt, usually the M samples of a group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from nlgrpo.kernels import reference
from nlgrpo.objectives.advantages import Baseline, subtract_baseline


class Objective(ABC):
    """A functional R[pi] of the policy at one prompt. ``rewards`` (P, M) are those of M atoms, usually samples.

    ``probs``, (M,) or (P, M), are the atoms' probabilities under pi. Unless given they are samples, of 1/M each.
    """

    pairwise: ClassVar[bool] = False
    """Whether it takes kernel matrices (P, M, M), similarities of the samples of a group, in the place of rewards."""

    def linearize(self, rewards: Tensor, probs: Tensor | None = None) -> Tensor:
        """First variation dR/dpi at each atom, (P, M), up to a constant per prompt.

        Raises ValueError for rewards that are not (P, M >= 1) or hold a NaN, and for probs that are no distribution.
        """
        return self._linearize(*self._checked(rewards, probs))

    def value(self, rewards: Tensor, probs: Tensor | None = None) -> Tensor:
        """R of each prompt's distribution, (P,). Raises ValueError as `linearize`."""
        return self._value(*self._checked(rewards, probs))

    def advantage(self, rewards: Tensor, baseline: Baseline = "mean") -> Tensor:
        """What each sample of a group adds, (P, M): its linearised reward less a baseline.

        "mean" takes the group's mean r~ (IAMA), which holds 1/M of the sample's own linearised reward, so that the
        expected gradient is (M-1)/M of that without one; "loo", leave-one-out, takes the mean of the others, which is
        M/(M-1) times "mean" and has no such share; "none" takes nothing. An estimator that is without bias has a
        baseline without bias, and is the same with "mean" and "loo".

        Raises ValueError as `linearize`, and for another ``baseline``.
        """
        if baseline == "none":
            return self._uncentred(self._checked(rewards, None)[0])
        return subtract_baseline(self.linearize(rewards), baseline)

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

    def _uncentred(self, rewards: Tensor) -> Tensor:
        """The linearised reward with a constant to which the sample itself adds nothing, as far as there is one."""
        return self._linearize(rewards, None)

    def _checked(self, rewards: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Both as plain data in float32 or float64, ``probs`` expanded to (P, M)."""
        if rewards.ndim != 2 or rewards.shape[1] == 0:
            raise ValueError(f"expected rewards (P, M) with M >= 1, got {tuple(rewards.shape)}.")
        rewards = reference.widen(rewards.detach())
        if rewards.isnan().any():
            raise ValueError(
                f"reward of {first(rewards.isnan())} is NaN; "
                "groups with missing rewards go through linearize_present and value_present."
            )
        return rewards, None if probs is None else masses(probs, rewards)

    def __str__(self) -> str:
        return self.name


def is_number(x: object) -> bool:
    """Whether ``x`` is a finite int or float, and no bool."""
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def first(bad: Tensor) -> str:
    """The first true element of (P, M), in words."""
    group, sample = bad.nonzero()[0].tolist()
    return f"group {group}, sample {sample}"


def masses(probs: Tensor, atoms: Tensor) -> Tensor:
    """``probs`` (M,) or (P, M) as (P, M), in the type of ``atoms`` (P, M). ValueError if they are no distribution."""
    if probs.shape not in (atoms.shape, atoms.shape[1:]):
        raise ValueError(f"expected probs {tuple(atoms.shape)} or {tuple(atoms.shape[1:])}, got {tuple(probs.shape)}.")
    probs = probs.detach().to(atoms).expand_as(atoms)
    total = probs.sum(-1)
    if not ((probs >= 0).all() and ((total - 1).abs() <= 1e-4).all()):
        raise ValueError(
            f"probs of a group must be >= 0 and sum to 1; least {probs.min():g}, sums {total.tolist()[:4]}."
        )
    return probs
