"""Base class of objectives: a functional of the policy at one prompt, and checks of its arguments.

Legend: P prompts, M atoms per prompt, usually the M samples of a group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from nlgrpo.kernels import reference
from nlgrpo.objectives import reweighted
from nlgrpo.objectives.advantages import Baseline, subtract_baseline
from nlgrpo.objectives.reweighted import Subsets


class Objective(ABC):
    """A functional R[pi] of the policy at one prompt. ``rewards`` (P, M) are the rewards of M atoms, usually samples.

    ``probs``, (M,) or (P, M), are the probabilities of the atoms under pi; 1/M each by default.
    """

    pairwise: ClassVar[bool] = False
    """Whether it takes kernel matrices (P, M, M), the similarities of a group's samples, instead of rewards."""

    voted: ClassVar[bool] = False
    """Whether it takes rewards with the numbers of the final answers, (P, M, 2), instead of rewards."""

    def linearize(self, rewards: Tensor, probs: Tensor | None = None) -> Tensor:
        """Return the first variation dR/dpi at each atom, (P, M), up to a constant per prompt.

        Raises ValueError for rewards that are not (P, M >= 1) or contain NaN, and for invalid probs.
        """
        return self._linearize(*self._checked(rewards, probs))

    def value(self, rewards: Tensor, probs: Tensor | None = None) -> Tensor:
        """Return the value R at each prompt, (P,). Raises ValueError as `linearize`."""
        return self._value(*self._checked(rewards, probs))

    def advantage(self, rewards: Tensor, baseline: Baseline = "mean") -> Tensor:
        """Return the linearised reward of each sample minus a baseline, (P, M).

        "mean" subtracts the mean of the group (IAMA). It contains 1/M of the sample's own linearised reward, so the
        expected gradient is (M-1)/M of that without a baseline. "loo" (leave-one-out) subtracts the mean of the others,
        which gives M/(M-1) times "mean" and has no such bias. "none" subtracts nothing. Unbiased estimators have an
        unbiased baseline of their own, which "mean" and "loo" both use.

        Raises ValueError as `linearize`, for another ``baseline``, and for infinite rewards with infinite advantages.
        """
        checked, _ = self._checked(rewards, None)
        if baseline == "none":
            return self._with_finite_terms(self._uncentred(checked, None), checked)
        return self._with_finite_terms(subtract_baseline(self._linearize(checked, None), baseline), checked)

    def reweighted_advantage(self, rewards: Tensor, weights: Tensor, baseline: Baseline = "mean") -> Tensor:
        """Return the `advantage` (P, M) at pi of samples of another policy q, given their importance weights.

            w_j = pi(y_j) / q(y_j);      gradient of R at pi = E 1/M sum_j w_j A_j grad log pi(y_j)

        ``weights`` (P, M) may be truncated or masked. A plug-in estimate is taken at the weighted empirical
        distribution, w_j / sum_l w_l. An estimate over subsets weights each subset by the product of its weights, and
        remains unbiased for weights that are not cut. With weights of 1 the result is that of `advantage`.

        Raises ValueError as `advantage`, for any infinite reward, and for weights that are not (P, M), finite and >= 0.
        """
        rewards, weights = self._with_weights(rewards, weights)
        self._with_finite_terms(rewards, rewards)  # also best-of-N needs finite ones here
        subsets = self._subsets(rewards)
        if subsets is not None:
            estimate = reweighted.uncentred if baseline == "none" else reweighted.advantages
            return estimate(subsets, weights).to(rewards)
        probs = reweighted.normalized(weights)
        if baseline == "none":
            return self._uncentred(rewards, probs)
        return subtract_baseline(self._linearize_weighted(rewards, probs), baseline)

    def reweighted_value(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """Return the `value` (P,) at pi for samples of another policy. Arguments and errors as `reweighted_advantage`.

        It is self-normalised: divided by the sum of the weights, of samples or of subsets. NaN without any weight.
        """
        rewards, weights = self._with_weights(rewards, weights)
        subsets = self._subsets(rewards)
        if subsets is not None:
            return reweighted.ratio(*subsets.means(weights.double())).to(rewards)
        values = self._value(rewards, reweighted.normalized(weights))
        return torch.where(weights.sum(-1) > 0, values, torch.nan)

    @property
    def fewest(self) -> int:
        """Minimum number of samples in a group."""
        return 1

    @property
    @abstractmethod
    def name(self) -> str:
        """The string that `nlgrpo.objectives.parse` turns into this objective."""

    @abstractmethod
    def _linearize(self, rewards: Tensor, probs: Tensor | None) -> Tensor: ...

    @abstractmethod
    def _value(self, rewards: Tensor, probs: Tensor | None) -> Tensor: ...

    def _uncentred(self, rewards: Tensor, probs: Tensor | None = None) -> Tensor:
        """Return the linearised reward with a constant that does not depend on the sample itself, if possible."""
        return self._linearize_weighted(rewards, probs)

    def _linearize_weighted(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        """`_linearize` for samples to which an estimate gives the probabilities ``probs`` (P, M)."""
        return self._linearize(rewards, probs)

    def _subsets(self, rewards: Tensor) -> Subsets | None:
        """Return the estimate as a mean over subsets of the group, with the samples' weights; None for a plug-in."""
        return None

    def _with_weights(self, rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return `_checked` rewards and their importance weights, in their dtype."""
        rewards, _ = self._checked(rewards, None)
        if weights.shape != rewards.shape[:2]:
            raise ValueError(f"expected weights {tuple(rewards.shape[:2])}, got {tuple(weights.shape)}.")
        bad = ~(weights.isfinite() & (weights >= 0))
        if bad.any():
            raise ValueError(f"the importance weight of {first(bad)} is not a finite number >= 0.")
        return rewards, weights.detach().to(rewards)

    def _checked(self, rewards: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return both detached, in float32 or float64, with ``probs`` expanded to (P, M)."""
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
        return rewards, masses(probs, rewards)

    def _with_finite_terms(self, terms: Tensor, rewards: Tensor) -> Tensor:
        """Return ``terms``. Raises ValueError if infinite rewards leave some of them infinite or NaN."""
        if not terms.isfinite().all() and rewards.isinf().any():
            raise ValueError(f"reward of {first(rewards.isinf())} is infinite; advantages of {self} need finite ones.")
        return terms

    def __str__(self) -> str:
        return self.name


def is_number(x: object) -> bool:
    """Whether ``x`` is a finite int or float, but not a bool."""
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def is_integer(x: object, least: float = -math.inf) -> bool:
    """Whether ``x`` is an int of at least ``least``, but not a bool."""
    return isinstance(x, int) and not isinstance(x, bool) and x >= least


def estimator_suffix(estimator: str) -> str:
    """Return what the estimator adds to the name of an objective: ":unbiased", or nothing for "plugin"."""
    return ":unbiased" if estimator == "unbiased" else ""


def first(bad: Tensor) -> str:
    """Return the place of the first true element of (P, M) in words."""
    group, sample = bad.nonzero()[0].tolist()
    return f"group {group}, sample {sample}"


def masses(probs: Tensor, atoms: Tensor) -> Tensor:
    """Expand ``probs`` (M,) or (P, M) to (P, M), in the dtype of ``atoms``. Raises ValueError if not a distribution."""
    if probs.shape not in (atoms.shape, atoms.shape[1:]):
        raise ValueError(f"expected probs {tuple(atoms.shape)} or {tuple(atoms.shape[1:])}, got {tuple(probs.shape)}.")
    probs = probs.detach().to(atoms).expand_as(atoms)
    total = probs.sum(-1)
    sums_to_1 = ((total - 1).abs() <= 1e-4).all()
    if not ((probs >= 0).all() and sums_to_1):
        raise ValueError(
            f"probs of a group must be >= 0 and sum to 1; the smallest is {probs.min():g}, sums {total.tolist()[:4]}."
        )
    return probs
