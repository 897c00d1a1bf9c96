"""DPO, IPO, BoNBoN and best-of-N SFT on the reference's samples: losses, and the selection of pairs and winners.

Every loss takes log-probabilities of whole responses, (B,), of the policy and the reference, and returns one number per
pair, (B,). All but best-of-N SFT depend on the margin

    h = [log pi(y_w) - log pi_ref(y_w)] - [log pi(y_l) - log pi_ref(y_l)],   y_w chosen, y_l rejected

Legend: P prompts, K samples per prompt, N samples from which the best is chosen, B pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from nlgrpo.objectives.base import is_integer, is_number


def dpo(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> Tensor:
    """DPO loss -log sigmoid(beta h), in nats (Rafailov et al. 2023, eq. 7).

    This is the Bradley-Terry likelihood with the reward beta log(pi / pi_ref). ``beta`` is the weight of the KL penalty
    in the corresponding RL objective. Raises ValueError for shapes that are not all (B,), and for beta <= 0.
    """
    h = _margin(chosen, rejected, ref_chosen, ref_rejected)
    return softplus(-_positive(beta) * h)


def ipo(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> Tensor:
    """IPO loss (h - 1/(2 beta))^2 (Azar et al. 2023, eq. 17, where beta is called tau).

    Unlike in DPO the margin stays bounded: for pairs of two samples with deterministic preferences, the optimum is
    log pi / pi_ref = u / beta + constant, where u is the fraction of reference samples below. TRL first divides the
    log-probabilities of each response by its number of tokens; pass them divided for the same loss.

    Raises ValueError as `dpo`.
    """
    h = _margin(chosen, rejected, ref_chosen, ref_rejected)
    target = 1 / (2 * _positive(beta))
    return (h - target).square()


def bonbon(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, n: int, alpha: float
) -> Tensor:
    """BoNBoN loss, alpha (-log pi(y_w)) + (1 - alpha) (h - c_n)^2, on best y_w and worst y_l of n (Gui et al. 2024).

        c_n = 1/(2 beta_n) = (n - 1) sum_{k=1}^{n-1} 1/k                                             (`bonbon_margin`)

    The first term is `best_of_n_sft`, whose optimum is the best-of-n policy. The target c_n of the second is the mean
    margin of that policy. As the margins of its pairs, (n - 1) log u_w / u_l, vary around the mean, the second term has
    a different optimum: for n = 2 that of IPO, log pi / pi_ref linear in u.

    ``alpha`` in [0, 1]; the authors choose it so that both terms have the same magnitude (vBoN, Sec. 5). Raises
    ValueError for another alpha, for n < 2, and as `dpo`.
    """
    if not (is_number(alpha) and 0 <= alpha <= 1):
        raise ValueError(f"alpha={alpha!r}: expected a number from 0 (margin term only) to 1 (likelihood term only).")
    h = _margin(chosen, rejected, ref_chosen, ref_rejected)
    distance = (h - bonbon_margin(n)).square()
    return alpha * best_of_n_sft(chosen) + (1 - alpha) * distance


def bonbon_margin(n: int) -> float:
    """Expected margin h of the best-of-n policy between best and worst of n samples: (n - 1) sum_{k=1}^{n-1} 1/k.

    For a continuous reward pi_bon / pi_ref = n u^(n-1), where u, the fraction of the reference below, is uniform; so
    h = (n - 1) (log max u - log min u). For n uniform numbers E log max = -1/n. As -log u is exponential, the expected
    maximum of n such numbers is 1 + 1/2 + .. + 1/n, that is E log min = -sum_{k=1}^n 1/k (Gui et al. 2024, Theorem 3).
    vBoN, Sec. 5 prints the reciprocal.

    Raises ValueError for n < 2.
    """
    _check_n(n, least=2)
    return (n - 1) * sum(1 / k for k in range(1, n))


def best_of_n_sft(chosen: Tensor) -> Tensor:
    """BoN-SFT loss -log pi(y_w), y_w the best of N samples of the reference. Its optimum is the best-of-N policy."""
    return -chosen


@dataclass(frozen=True)
class Pairs:
    """Preference pairs as indices into rewards (P, K): prompt, chosen sample, rejected sample; each int64 (B,)."""

    prompt: Tensor
    chosen: Tensor
    rejected: Tensor


def pairs(rewards: Tensor, n: int, *, rejected: Literal["worst", "random", "all"] = "worst", seed: int = 0) -> Pairs:
    """Pair the best of n samples with the worst of the same n (BoNBoN), or with a random other one of them.

    ``rewards`` (P, K). Each prompt's samples are split at random into K // n disjoint sets of n, so that pairs are
    independent. n = 2 pairs every sample once (DPO, IPO). Ties for the best are broken at random. Pairs of equal
    rewards are left out: B <= P (K // n), in the order of the prompts. ``rejected="all"`` pairs every two samples of a
    set, the better one chosen: B <= P (K // n) n (n - 1) / 2, which are not independent (DPO in vBoN, with n = 6).

    Raises ValueError for rewards that are not (P, K) or contain a NaN, for n < 2 or n > K, and for another
    ``rejected``.
    """
    if rejected not in ("worst", "random", "all"):
        raise ValueError(f"rejected={rejected!r} is not known; expected 'worst', 'random' or 'all'.")
    _check_n(n, least=2)
    random = np.random.default_rng(seed)
    sets = _sets(rewards, n, random)
    set_rewards = _rewards_of(rewards, sets)
    if rejected == "all":
        return _all_pairs(sets, set_rewards)
    best = set_rewards.argmax(-1, keepdim=True)
    if rejected == "worst":
        other = set_rewards.argmin(-1, keepdim=True)
    else:
        step = torch.from_numpy(random.integers(1, n, size=best.shape))
        other = (best + step.to(best.device)) % n
    keep = set_rewards.gather(-1, other) < set_rewards.gather(-1, best)
    chosen = sets.gather(-1, best)[keep]
    other_samples = sets.gather(-1, other)[keep]
    return Pairs(keep.nonzero()[:, 0], chosen, other_samples)


def _all_pairs(sets: Tensor, rewards: Tensor) -> Pairs:
    """Pair every two samples with different rewards of each set (P, sets, n)."""
    first, second = torch.combinations(torch.arange(sets.shape[-1], device=sets.device)).unbind(1)
    first_is_better = rewards[..., first] > rewards[..., second]
    chosen = torch.where(first_is_better, sets[..., first], sets[..., second])
    rejected = torch.where(first_is_better, sets[..., second], sets[..., first])
    keep = rewards[..., first] != rewards[..., second]
    return Pairs(keep.nonzero()[:, 0], chosen[keep], rejected[keep])


def winners(rewards: Tensor, n: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return prompt and index of the best of each set of n samples, int64 (B,) each, B = P (K // n), for BoN-SFT.

    The sets are those of `pairs` with the same seed; n = 1 returns every sample. Raises ValueError as `pairs`.
    """
    _check_n(n, least=1)
    sets = _sets(rewards, n, np.random.default_rng(seed))
    best = _rewards_of(rewards, sets).argmax(-1, keepdim=True)
    prompt = torch.arange(len(rewards), device=rewards.device)[:, None].expand(sets.shape[:2])
    return prompt.reshape(-1), sets.gather(-1, best).reshape(-1)


def _sets(rewards: Tensor, n: int, random: np.random.Generator) -> Tensor:
    """Indices of the samples of each set, (P, K // n, n), in random order, so that argmax breaks ties at random."""
    if rewards.ndim != 2 or rewards.shape[1] < n:
        raise ValueError(f"rewards: expected (P, K) with K >= n = {n}, got {tuple(rewards.shape)}; draw more samples.")
    if rewards.isnan().any():
        prompt, sample = rewards.isnan().nonzero()[0].tolist()
        raise ValueError(f"rewards[{prompt}, {sample}] is NaN; drop the prompt, or score it again first.")
    P, K = rewards.shape
    sets = K // n
    samples = np.tile(np.arange(K), (P, 1))
    shuffled = torch.from_numpy(random.permuted(samples, axis=1))
    return shuffled[:, : sets * n].reshape(P, sets, n).to(rewards.device)


def _rewards_of(rewards: Tensor, sets: Tensor) -> Tensor:
    return rewards.gather(1, sets.flatten(1)).view(sets.shape)


def _margin(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    shapes = [tuple(x.shape) for x in (chosen, rejected, ref_chosen, ref_rejected)]
    if chosen.ndim != 1 or len(set(shapes)) > 1:
        raise ValueError(f"expected four log-probabilities of responses, (B,) each, got {', '.join(map(str, shapes))}.")
    return (chosen - ref_chosen) - (rejected - ref_rejected)


def _positive(beta: float) -> float:
    if not (is_number(beta) and beta > 0):
        raise ValueError(f"beta={beta!r}: expected a finite number > 0, the weight of the KL penalty.")
    return beta


def _check_n(n: int, least: int) -> None:
    if not is_integer(n, least):
        raise ValueError(f"n={n!r}: expected an integer >= {least}, the number of samples to choose from.")
