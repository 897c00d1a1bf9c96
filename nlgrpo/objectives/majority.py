"""Majority voting over final answers (self-consistency) as an objective.

It takes the reward and the answer of each sample, (P, M, 2), where other objectives take rewards. Legend: P prompts, M
atoms per prompt, usually the M samples of a group; n samples vote; K different answers; k votes for the winner.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from nlgrpo.kernels import reference
from nlgrpo.objectives import reweighted
from nlgrpo.objectives.advantages import Baseline, centre_subsets
from nlgrpo.objectives.base import Objective, estimator_suffix, first, is_integer, masses
from nlgrpo.objectives.reweighted import Subsets

MOST_VOTES = 128  # n! and C(M, n) stay within float64


@dataclass(frozen=True)
class MajorityVote(Objective):
    """Expected reward of the response that a majority vote of ``n`` samples chooses, and its first variation.

        R[pi] = E r(y*),   y* the first of y_1, .., y_n with the most frequent answer;
        dR/dpi(y) = n E[r(y*) | y_1 = y]                                   (self-consistency, Wang et al. 2023)

    ``rewards`` (P, M, 2) hold the reward of each atom and the number of its answer: equal numbers for equal answers, -1
    for no answer, which does not vote. The first of tied answers is any of them with equal probability, and the first
    response with the winning answer is any of its responses. Without any vote the first response is chosen. With
    rewards of 0 and 1 for the answer, R is maj@n.

    The expectation over the votes is a coefficient of a polynomial: with e_c(x) = sum_l (answer c has l votes) x^l,

        R = sum_{k, c} [x^n] r_c,k x^k prod_{d != c} (e_d^{<k}(x) + z e_d^{k}(x))    integrated over z in [0, 1]

    where z counts the answers that are tied with c: t of them have weight 1/(t + 1). Its derivative is computed by
    autograd, in float64. Two estimators on groups of M samples:

    ``"plugin"`` draws the n samples from the group with replacement: the empirical distribution in place of pi. It has
    a bias of order 1/M and takes any n. ``"unbiased"`` draws them without replacement: the value is the mean over all
    subsets of n samples (maj@n as in `nlgrpo.evaluation`), and the `advantage`

        M / (M - n) (r~_j - mean r~),   r~_j = n times the mean over the subsets that contain sample j

    has the policy gradient of R as its expectation; it needs M > n. With ``probs`` both are exact.

    Raises ValueError for an n that is not an integer in [1, 128], another estimator, inputs of another shape, rewards
    that are not finite, answers that are not integers >= -1, and with "unbiased" for n > M.
    """

    n: int
    estimator: Literal["plugin", "unbiased"] = "plugin"

    voted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not is_integer(self.n, 1) or self.n > MOST_VOTES:
            raise ValueError(f"MajorityVote(n={self.n!r}): expected an integer in [1, {MOST_VOTES}], the votes.")
        if self.estimator not in ("plugin", "unbiased"):
            raise ValueError(f"MajorityVote(estimator={self.estimator!r}): expected 'plugin' or 'unbiased'.")

    @property
    def name(self) -> str:
        return f"maj:{self.n}{estimator_suffix(self.estimator)}"

    @property
    def fewest(self) -> int:
        return self.n + 1 if self.estimator == "unbiased" else 1

    def _subsets(self, rewards: Tensor) -> Subsets | None:
        if self.estimator == "plugin":
            return None

        def means(weights: Tensor) -> tuple[Tensor, Tensor]:
            _, ones = reweighted.best_of_subsets(rewards[..., 0], weights, self.n)
            return self._expected(rewards, weights, False), ones

        return Subsets(self.n, means)

    def advantage(self, rewards: Tensor, baseline: Baseline = "mean") -> Tensor:
        if self.estimator == "plugin" or baseline not in ("mean", "loo"):
            return super().advantage(rewards, baseline)
        linear = self.linearize(rewards)
        M = linear.shape[1]
        if self.n >= M:
            raise ValueError(f"{self}: all samples of a group of {M} have the same advantage; expected M > {self.n}.")
        return centre_subsets(linear, self.n)

    def _value(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        with torch.no_grad():
            values = self._expected(rewards, self._weights(rewards, probs), self._replaced(rewards, probs))
        return values.to(rewards)

    def _linearize(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        replaced = self._replaced(rewards, probs)
        M = rewards.shape[1]
        with torch.inference_mode(False), torch.enable_grad():
            weights = self._weights(rewards, probs).clone().requires_grad_()
            value = self._expected(rewards.clone(), weights, replaced)
            (slopes,) = torch.autograd.grad(value.sum(), weights)
        if not replaced:
            # the slope is the mean over all subsets, of which n / M contain a sample
            slopes = slopes * M
        return slopes.to(rewards)

    def _replaced(self, rewards: Tensor, probs: Tensor | None) -> bool:
        """Whether the votes are drawn with replacement. Raises ValueError if there are too few samples to choose."""
        if self.estimator == "plugin" or probs is not None:
            return True
        if self.n > rewards.shape[1]:
            raise ValueError(f"{self}: {self.n} of {rewards.shape[1]} samples have no unbiased estimate; "
                             f"expected M >= {self.n}.")  # fmt: skip
        return False

    def _weights(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        """Probabilities of the atoms; 1 each where the votes are drawn without replacement."""
        if probs is not None:
            return probs.double()
        ones = torch.ones_like(rewards[..., 0], dtype=torch.float64)
        if self.estimator == "plugin":
            return ones / rewards.shape[1]
        return ones

    def _expected(self, rewards: Tensor, weights: Tensor, replaced: bool) -> Tensor:
        """Expected reward of the chosen response, (P,), a polynomial in the weights (P, M)."""
        values = rewards[..., 0].double()
        member, silent = _membership(rewards[..., 1])
        draw = _with_replacement if replaced else _without_replacement
        votes = draw(weights, values, member, self.n)
        none = draw(weights, values, silent.double()[:, :, None], self.n)
        # all are silent: the first response, whose reward is the mean of the n
        total = none.rewards[:, 0, self.n] / self.n
        for k in range(1, self.n + 1):
            total = total + _won_with(k, votes, none.counts[:, 0], self.n)
        if replaced:
            return total * float(math.factorial(self.n))
        return total * (1 / math.comb(rewards.shape[1], self.n))

    def _checked(self, rewards: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if rewards.ndim != 3 or rewards.shape[2] != 2 or rewards.shape[1] == 0:
            raise ValueError(f"{self}: expected rewards and answers (P, M, 2) with M >= 1, got {tuple(rewards.shape)}.")
        rewards = reference.widen(rewards.detach())
        values, answers = rewards.unbind(-1)
        numbers = answers.isfinite() & (answers == answers.round()) & (answers >= -1)
        self._refuse(~values.isfinite(), rewards, "a finite reward")
        self._refuse(~numbers, rewards, "an answer's number >= -1")
        if probs is None:
            return rewards, None
        return rewards, masses(probs, values)

    def _refuse(self, bad: Tensor, rewards: Tensor, expected: str) -> None:
        if bad.any():
            group, sample = bad.nonzero()[0].tolist()
            raise ValueError(f"{self}: {first(bad)} is {rewards[group, sample].tolist()}; expected {expected}.")


@dataclass(frozen=True)
class _Votes:
    """Polynomials in x for each answer, (P, K, n + 1).

    The coefficient of x^l in ``counts`` is the weight of l votes; in ``rewards`` it is the same times the sum of the
    rewards of the l responses.
    """

    counts: Tensor
    rewards: Tensor


def _membership(answers: Tensor) -> tuple[Tensor, Tensor]:
    """Return which atom has which answer, (P, M, K) float64, and which has none, (P, M)."""
    silent = answers < 0
    same = answers[:, :, None] == answers[:, None, :]
    # the first atom with the same answer
    leader = same.double().argmax(-1)
    leads = (leader == torch.arange(answers.shape[1], device=answers.device)) & ~silent
    number = (leads.cumsum(-1) - 1).gather(1, leader)
    K = max([1, *leads.sum(-1).tolist()])
    member = torch.nn.functional.one_hot(number.clamp(min=0), K).double()
    return member.masked_fill(silent[..., None], 0.0), silent


def _with_replacement(weights: Tensor, rewards: Tensor, member: Tensor, n: int) -> _Votes:
    """q^l / l! for l votes of an answer with probability q: n! [x^n] of their product is a multinomial probability."""
    q = torch.einsum("pm,pmk->pk", weights, member)
    earned = torch.einsum("pm,pmk->pk", weights * rewards, member)
    powers = torch.arange(n + 1, device=weights.device)
    factorials = torch.tensor([math.factorial(votes) for votes in range(n + 1)], dtype=torch.float64)
    counts = q[..., None] ** powers / factorials.to(q)
    return _Votes(counts, _shifted(counts) * earned[..., None])


def _without_replacement(weights: Tensor, rewards: Tensor, member: Tensor, n: int) -> _Votes:
    """Elementary symmetric polynomials of the weights of an answer: prod_j (1 + w_j x) over its atoms."""
    start = torch.zeros(n + 1, dtype=torch.float64, device=weights.device)
    start[0] = 1
    counts = start.expand(*member.shape[::2], n + 1)
    sums = torch.zeros_like(counts)
    for j in range(weights.shape[1]):
        w = (member[:, j] * weights[:, j, None])[..., None]
        r = rewards[:, j, None, None]
        with_j = _shifted(counts)
        sums = sums + w * (_shifted(sums) + with_j * r)
        counts = counts + w * with_j
    return _Votes(counts, sums)


def _shifted(polynomial: Tensor, k: int = 1) -> Tensor:
    """Return x^k times polynomials (.., n + 1), up to x^n."""
    return torch.nn.functional.pad(polynomial[..., : polynomial.shape[-1] - k], (k, 0))


def _won_with(k: int, votes: _Votes, silent: Tensor, n: int) -> Tensor:
    """Weight of the draws in which some answer wins with k votes, times the mean reward of its responses, (P,)."""
    nodes, shares = _quadrature(n // k)
    z = torch.from_numpy(nodes).to(votes.counts)[:, None]
    # (P, Z, n + 1): the answers so far have at most k votes, and one of them has won
    product = silent[:, None].expand(-1, len(z), -1)
    won = torch.zeros_like(product)
    for answer in range(votes.counts.shape[1]):
        counts = votes.counts[:, answer, None]
        fewer = counts[..., :k].expand(-1, len(z), -1)
        tied = z * counts[..., k : k + 1]
        loses = torch.cat((fewer, tied), -1)
        mean_reward = votes.rewards[:, answer, k, None, None] / k
        won = _times(won, loses) + _shifted(product, k) * mean_reward
        product = _times(product, loses)
    return (won[..., n] * torch.from_numpy(shares).to(won)).sum(-1)


def _times(long: Tensor, short: Tensor) -> Tensor:
    """Product of polynomials (P, Z, n + 1) and (P, Z, k + 1), up to x^n."""
    size = short.shape[-1]
    windows = torch.nn.functional.pad(long, (size - 1, 0)).unfold(-1, size, 1)
    return (windows * short.flip(-1)[..., None, :]).sum(-1)


@functools.lru_cache(maxsize=256)
def _quadrature(answers: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Legendre nodes and weights on [0, 1], exact for polynomials of degree ``answers`` - 1."""
    nodes, weights = np.polynomial.legendre.leggauss(max(1, (answers + 1) // 2))
    return (nodes + 1) / 2, weights / 2
