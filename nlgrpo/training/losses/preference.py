"""Losses on pairs and winners among a reference's samples: DPO, IPO, BoNBoN, best-of-N SFT; and who makes a pair.

Every loss takes log-probabilities of whole responses, (B,), of the policy and of the reference, and gives one number a
pair, (B,), to be averaged and minimised. All but the last see the policy through the margin

    h = [log pi(y_w) - log pi_ref(y_w)] - [log pi(y_l) - log pi_ref(y_l)],   y_w the chosen one, y_l the rejected one

Legend: P prompts, K samples per prompt, N of which one is the best, B pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from nlgrpo.objectives.base import is_number


def dpo(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta h), in nats (Rafailov et al. 2023, eq. 7): Bradley-Terry with the reward beta log(pi / pi_ref).

    ``beta`` is the weight of the KL to the reference in the objective whose optimum this finds. Raises ValueError for
    shapes that are not one (B,), and for a beta that is not > 0.
    """
    return softplus(-_positive(beta) * _margin(chosen, rejected, ref_chosen, ref_rejected))


def ipo(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> Tensor:
    """(h - 1/(2 beta))^2 (Azar et al. 2023, eq. 17, where beta is called tau).

    Unlike DPO's the margin has an end: its optimum for pairs of two samples that are preferred with certainty is
    log pi / pi_ref = u / beta and a constant, u the share of the reference's samples that lie below. TRL divides each
    response's two log-probabilities by its number of tokens first; whoever wants that gives them so.

    Errors as `dpo`.
    """
    return (_margin(chosen, rejected, ref_chosen, ref_rejected) - 1 / (2 * _positive(beta))).square()


def bonbon(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, n: int, alpha: float
) -> Tensor:
    """alpha (-log pi(y_w)) + (1 - alpha) (h - c_n)^2, y_w the best and y_l the worst of n samples (Gui et al. 2024).

        c_n = 1/(2 beta_n) = (n - 1) sum_{k=1}^{n-1} 1/k                                             (`bonbon_margin`)

    The first term is `best_of_n_sft`, whose optimum is the best-of-n policy. The second asks for the mean margin that
    this policy has; that of single pairs varies around it (it is (n - 1) log u_w / u_l), so its own optimum is another
    policy: for n = 2 IPO's, log pi / pi_ref linear in u.

    ``alpha`` in [0, 1]; its authors choose it so that both terms are of one size (vBoN, Sec. 5). Raises ValueError for
    another alpha, for n < 2, and as `dpo`.
    """
    if not (is_number(alpha) and 0 <= alpha <= 1):
        raise ValueError(f"alpha={alpha!r}: expected a number from 0 (pairs only) to 1 (likelihood of the best only).")
    pull = (_margin(chosen, rejected, ref_chosen, ref_rejected) - bonbon_margin(n)).square()
    return alpha * best_of_n_sft(chosen) + (1 - alpha) * pull


def bonbon_margin(n: int) -> float:
    """E h of the best-of-n policy between the best and the worst of n samples: (n - 1) sum_{k=1}^{n-1} 1/k.

    For a continuous reward pi_bon / pi_ref = n u^(n-1), where u, the share of the reference below, is uniform; so
    h = (n - 1) (log max u - log min u). Of n uniform numbers E log max = -1/n. And -log u is exponential, whose
    greatest of n is 1 + 1/2 + .. + 1/n in expectation: E log min = -sum_{k=1}^n 1/k (Gui et al. 2024, Theorem 3).
    vBoN, Sec. 5 prints the reciprocal.

    Raises ValueError for n < 2: one sample is no pair.
    """
    return (_whole(n, least=2) - 1) * sum(1 / k for k in range(1, n))


def best_of_n_sft(chosen: Tensor) -> Tensor:
    """-log pi(y_w), y_w the best of N samples of the reference: its optimum is the best-of-N policy ("BoN-SFT")."""
    return -chosen


@dataclass(frozen=True)
class Pairs:
    """Samples of (P, K) by their place, each int64 (B,)."""

    prompt: Tensor
    chosen: Tensor
    rejected: Tensor


def pairs(rewards: Tensor, n: int, *, rejected: Literal["worst", "random"] = "worst", seed: int = 0) -> Pairs:
    """Best of N against the worst of the same N (BoNBoN), or against a random other one of them.

    ``rewards`` (P, K). Each prompt's samples are cut at random into K // n sets of n, which share none, so that pairs
    are independent; n = 2 pairs every sample once (DPO, IPO). Pairs of equal rewards prefer nothing and are left out:
    B <= P (K // n), in the order of the prompts. Among equal ones the best is chosen at random.

    Raises ValueError for rewards that are not (P, K) or hold a NaN, for n < 2 or n > K, and for another ``rejected``.
    """
    if rejected not in ("worst", "random"):
        raise ValueError(f"rejected={rejected!r} is not known; expected 'worst' or 'random'.")
    random = np.random.default_rng(seed)
    sets = _sets(rewards, _whole(n, least=2), random)
    given = _rewards_of(rewards, sets)
    best = given.argmax(-1, keepdim=True)
    if rejected == "worst":
        other = given.argmin(-1, keepdim=True)
    else:
        step = torch.from_numpy(random.integers(1, n, size=best.shape))
        other = (best + step.to(best.device)) % n
    keep = (given.gather(-1, other) < given.gather(-1, best))[..., 0]
    prompt = keep.nonzero()[:, 0]
    return Pairs(prompt, sets.gather(-1, best)[..., 0][keep], sets.gather(-1, other)[..., 0][keep])


def winners(rewards: Tensor, n: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Prompt and place of the best of each set of N samples, int64 (B,) each, B = P (K // n): what BoN-SFT learns.

    The sets are those of `pairs` with the same seed; n = 1 takes every sample. Errors as there.
    """
    sets = _sets(rewards, _whole(n, least=1), np.random.default_rng(seed))
    best = _rewards_of(rewards, sets).argmax(-1, keepdim=True)
    prompt = torch.arange(len(rewards), device=rewards.device)[:, None].expand(sets.shape[:2])
    return prompt.reshape(-1), sets.gather(-1, best).reshape(-1)


def _sets(rewards: Tensor, n: int, random: np.random.Generator) -> Tensor:
    """Places of the samples of each set, (P, K // n, n), in a random order: argmax then takes any of equal ones."""
    if rewards.ndim != 2 or rewards.shape[1] < n:
        raise ValueError(f"rewards: expected (P, K) with K >= n = {n}, got {tuple(rewards.shape)}; draw more samples.")
    if rewards.isnan().any():
        prompt, sample = rewards.isnan().nonzero()[0].tolist()
        raise ValueError(f"rewards[{prompt}, {sample}] is NaN; drop the prompt, or score it again, before this.")
    (P, K), count = rewards.shape, rewards.shape[1] // n
    shuffled = torch.from_numpy(random.permuted(np.tile(np.arange(K), (P, 1)), axis=1))
    return shuffled[:, : count * n].reshape(P, count, n).to(rewards.device)


def _rewards_of(rewards: Tensor, sets: Tensor) -> Tensor:
    return rewards.gather(1, sets.flatten(1)).view(sets.shape)


def _margin(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    shapes = [tuple(x.shape) for x in (chosen, rejected, ref_chosen, ref_rejected)]
    if chosen.ndim != 1 or len(set(shapes)) > 1:
        raise ValueError(f"expected four log-probabilities of responses, (B,) each, got {', '.join(map(str, shapes))}.")
    return (chosen - ref_chosen) - (rejected - ref_rejected)


def _positive(beta: float) -> float:
    if not (is_number(beta) and beta > 0):
        raise ValueError(f"beta={beta!r}: expected a finite number > 0, the weight of the KL to the reference.")
    return beta


def _whole(n: int, *, least: int) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or n < least:
        raise ValueError(f"n={n!r}: expected a whole number >= {least}, how many samples one is the best of.")
    return n
