"""Variational best-of-N (vBoN): train a policy towards the distribution of the best of N samples of the reference.

    pi_bon(y) = (F(y) + p(y))^N - F(y)^N,   F(y) = P(y' below y) for y' ~ pi_ref,   p = pi_ref      (vBoN, Prop. 1)

"Below" is a fixed total order of the strings: by reward, equal rewards by a key of the string (vBoN, App. C). A string
that was drawn twice is one element, which is not below itself.

Legend: P prompts, M samples of the policy a prompt, K samples of the reference. Logarithms are natural, of whole
sequences, and computed in float64.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from nlgrpo.calibration.log_cdf import add_half, fit_exponential
from nlgrpo.kernels import ecdf
from nlgrpo.objectives.base import is_number

LINEAR = -36.0  # log p/F + log N below which (1 + p/F)^N - 1 is N p/F: the next term is 1e-16 of it
LEAST = -1e4  # of a log F by a curve, which soon becomes -inf where it is steep
NEAR_ONE = -0.7  # log of the larger of F and p, where F + p may be 1


@dataclass(frozen=True)
class VariationalBoN:
    """A reward's ``transform`` "vbon:N", whose objective is Eq. 5, or "vbon:N:bound", its lower bound Eq. 8."""

    n: int
    bound: bool = False

    def __str__(self) -> str:
        return f"vbon:{self.n}" + ":bound" * self.bound


def parse(text: str) -> VariationalBoN | None:
    """What "vbon:N" names; None for the name of something else. Raises ValueError for other arguments."""
    name, *arguments = text.strip().split(":")
    if name != "vbon":
        return None
    n, *form = arguments or [""]
    if not n.isdecimal() or int(n) < 1 or form not in ([], ["bound"]):
        raise ValueError(f"transform {text!r}: expected vbon:N or vbon:N:bound with N >= 1, such as vbon:4")
    return VariationalBoN(int(n), bool(form))


def log_bon_density(log_cdf: Tensor, log_p: Tensor, n: float) -> Tensor:
    """log[(F + p)^n - F^n], the log-probability that a string is the best of n, from log F and log p; float64.

        n log(F + p) + log(1 - (1 + p/F)^-n)                                                        (vBoN, Eq. 4, 11)

    The shapes broadcast. Neither power is formed, so that p = e^-10000 is as exact as p = 1/2: the error is below 1e-12
    of the result, or below 1e-12 where the result is near 0, for n up to 1e4. F = 0 gives n log p, n = 1 gives log p,
    p = 0 gives -inf; n need not be whole. No bound is set on F + p: with an estimated F it may pass 1, and the result
    0 (`vbon_reward` cuts it there).

    Differentiable in both: its gradient at F = 0 is (0, n).

    Raises ValueError for NaN and +inf, and for an n that is not a finite number >= 1.
    """
    _check_n(n)
    _refuse("log_cdf", log_cdf, ~(log_cdf < torch.inf), "expected log F, at most 0; -inf where F is 0")
    _refuse("log_p", log_p, ~(log_p < torch.inf), "expected the log-probability of a sequence")
    a, b = torch.broadcast_tensors(log_cdf.double(), log_p.double())
    ratio = torch.where(b == -torch.inf, -torch.inf, b - a).clamp(max=700.0)  # log p/F; e^700 is still a number
    small = ratio + math.log(n) < LINEAR
    growth = n * torch.log1p(torch.where(small, 0.0, ratio).exp())  # log (1 + p/F)^n
    share = torch.where(small, ratio + math.log(n), torch.log(-torch.expm1(-growth)))
    return n * _log_sum(a, b) + share


def vbon_reward(log_cdf: Tensor, log_p: Tensor, n: float, *, bound: bool = False) -> Tensor:
    """The reward whose expectation less 1 times KL(pi | pi_ref) is the vBoN objective, or its lower bound; float64.

        log pi_bon(y) - log pi_ref(y)       (vBoN, Eq. 5)
        (n - 1) log F(y)                    (vBoN, Eq. 8), ``bound=True``

    Eq. 5 is E[log pi_bon] + H(pi), and H(pi) = -E log pi_ref - KL(pi | pi_ref). Both are 0 for n = 1. For strings of
    small probability the first is the second and log n, a constant. An estimated F may make log pi_bon positive where p
    is large; it is cut at 0, as no probability passes 1. Where F = 0 the first is (n - 1) log p and the second -inf: an
    estimate needs a smoother (`log_strict_cdf`).

    Raises ValueError as `log_bon_density`, and for log_p = -inf, which no sample of the reference has.
    """
    _refuse("log_p", log_p, ~log_p.isfinite(), "expected a finite log-probability: KL(pi | pi_ref) is infinite here")
    density = log_bon_density(log_cdf, log_p, n)
    if not bound:
        return density.clamp(max=0.0) - log_p.double()
    return torch.zeros_like(density) if n == 1 else (n - 1) * log_cdf.double().expand_as(density)


def objective(log_pi: Tensor, log_ref: Tensor, log_cdf: Tensor, n: float) -> Tensor:
    """Estimate of -KL(pi | pi_bon) = E[log pi_bon(y) - log pi(y)] at each prompt (vBoN, Eq. 5), (P,) float64.

    From samples y ~ pi: log pi(y), log pi_ref(y) and log F(y), each (P, M). At most 0, and 0 only for pi = pi_bon,
    both in expectation and up to the error of F.

    Raises ValueError for shapes that differ, NaN, infinite log-probabilities, and an n below 1.
    """
    return _estimate(log_pi, log_ref, log_cdf, n, bound=False)


def bound(log_pi: Tensor, log_ref: Tensor, log_cdf: Tensor, n: float) -> Tensor:
    """Estimate of (n - 1) E log F(y) - KL(pi | pi_ref), below `objective` (vBoN, Theorem 2, Eq. 8), (P,) float64.

    By log n at least: the paper's proof drops it between its Eq. 14d and 14e. Greatest for pi ~ pi_ref F^(n-1), which
    is pi_bon in the limit of strings of small probability. Arguments and errors as `objective`.
    """
    return _estimate(log_pi, log_ref, log_cdf, n, bound=True)


def string_keys(completion_ids: Sequence[Sequence[int]]) -> Tensor:
    """A key of each string, int64 (S,), from its token ids: equal strings have equal keys, in every process and batch.

    64 bits of BLAKE2b: the order of the keys has nothing to do with length or content, and the chance that any two of a
    billion different strings share one is 3%.
    """
    digests = [hashlib.blake2b(np.asarray(ids, dtype="<i8").tobytes(), digest_size=8) for ids in completion_ids]
    return torch.tensor([int.from_bytes(d.digest(), "little", signed=True) for d in digests], dtype=torch.int64)


def strict_order(rewards: Tensor, keys: Tensor) -> Tensor:
    """The place of each string in its row's total order, int64 of the shape (P, M) of both: 0 is the lowest.

        y below y'   if r(y) < r(y'), or r(y) = r(y') and key(y) < key(y')                               (vBoN, App. C)

    Places rise by 1 and are equal for equal (reward, key) only: the same string. ``keys`` are those of `string_keys`.

    Raises ValueError for NaN rewards, for keys that are not int64, and for shapes that differ.
    """
    if keys.dtype != torch.int64 or keys.shape != rewards.shape:
        got = f"{str(keys.dtype).removeprefix('torch.')} {tuple(keys.shape)}"
        raise ValueError(f"keys: expected int64 {tuple(rewards.shape)}, one a reward (string_keys), got {got}.")
    by_key = keys.argsort(dim=-1, stable=True)
    _refuse("rewards", rewards, rewards.isnan(), "drop the sample before this")
    at = by_key.gather(-1, ecdf.argsort(rewards.gather(-1, by_key)))
    r, k = rewards.gather(-1, at), keys.gather(-1, at)
    differs = (r[..., 1:] != r[..., :-1]) | (k[..., 1:] != k[..., :-1])
    return torch.empty_like(at).scatter_(-1, at, pad(differs.cumsum(-1), (1, 0)))


def strict_counts(rewards: Tensor, keys: Tensor, reference: Tensor, reference_keys: Tensor) -> Tensor:
    """How many of K reference samples lie strictly below each sample in the total order, int64 (P, M).

    ``rewards`` and ``keys`` (P, M), ``reference`` and ``reference_keys`` (P, K). Rewards of two dtypes meet in the one
    that holds both: one that was rounded is another reward.

    Raises ValueError as `strict_order`, for K = 0 and for different numbers of prompts.
    """
    if reference.ndim != 2 or rewards.ndim != 2 or len(rewards) != len(reference) or not reference.shape[1]:
        shapes = f"{tuple(rewards.shape)} and {tuple(reference.shape)}"
        raise ValueError(f"rewards and reference: expected (P, M) and (P, K) with K >= 1, got {shapes}.")
    M, K = rewards.shape[1], reference.shape[1]
    common = torch.promote_types(rewards.dtype, reference.dtype)
    pooled = torch.cat([rewards.to(common), reference.to(common)], 1)
    place = strict_order(pooled, torch.cat([keys, reference_keys], 1)).double()
    return (ecdf.cdf(place[:, M:], place[:, :M], "strict") * K).round().long()


def log_strict_cdf(
    rewards: Tensor,
    keys: Tensor,
    reference: Tensor,
    reference_keys: Tensor,
    smoother: Literal["add-half", "exponential"] | None = "add-half",
) -> Tensor:
    """log F of each sample in the total order, float64 (P, M), from K samples of the reference.

    "add-half" is log((count + 1/2) / (K + 1)), None log(count / K), which is -inf below the least sample, and
    "exponential" the curve -a e^{-b r} fitted to the reference's own log F (vBoN, Sec. 6; `log_cdf.py`), which sees
    the order in its fit only: at equal rewards it is equal. It is followed below the least sample as far as the samples
    reach, and to `LEAST`; a prompt whose samples with F > 0 share one reward has none, and takes "add-half".

    Raises ValueError as `strict_counts`, for another smoother, and for prompts that no curve fits.
    """
    if smoother not in (None, "add-half", "exponential"):
        raise ValueError(f"smoother={smoother!r} is not known; expected None, 'add-half' or 'exponential'.")
    K = reference.shape[-1]
    F = strict_counts(rewards, keys, reference, reference_keys).double() / K
    found = F.log() if smoother is None else add_half(F, K)
    if smoother == "exponential":
        own = strict_counts(reference, reference_keys, reference, reference_keys).double() / K
        for p, r in enumerate(reference):
            if r[own[p] > 0].unique().numel() > 1:
                seen = torch.maximum(rewards[p : p + 1].to(r), 2 * r.min() - r.max())
                found[p] = fit_exponential([r], [own[p]], None)(seen).clamp(min=LEAST)[0]
    return found


def _log_sum(a: Tensor, b: Tensor) -> Tensor:
    """log(e^a + e^b). Near 0, where `logaddexp` has an error of 1e-16 that n would enlarge, from e^a - 1."""
    high, low = torch.maximum(a, b), torch.minimum(a, b)
    near = torch.log1p(high.clamp(min=NEAR_ONE).expm1() + low.exp())
    return torch.where(high > NEAR_ONE, near, torch.logaddexp(a, b))


def _estimate(log_pi: Tensor, log_ref: Tensor, log_cdf: Tensor, n: float, *, bound: bool) -> Tensor:
    if log_pi.ndim != 2 or log_pi.shape[1] == 0 or not log_pi.shape == log_ref.shape == log_cdf.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (log_pi, log_ref, log_cdf))
        raise ValueError(f"log_pi, log_ref, log_cdf: expected three of one shape (P, M >= 1), got {shapes}.")
    _refuse("log_pi", log_pi, ~log_pi.isfinite(), "expected the log-probability of a sample of the policy")
    return (vbon_reward(log_cdf, log_ref, n, bound=bound) - (log_pi.double() - log_ref.double())).mean(-1)


def _check_n(n: float) -> None:
    if not (is_number(n) and n >= 1):
        raise ValueError(f"n={n!r}: expected a finite number >= 1, how many samples the best is chosen from.")


def _refuse(name: str, x: Tensor, bad: Tensor, expected: str) -> None:
    """ValueError for the first element of ``x`` that is ``bad``."""
    if bad.any():
        index = bad.nonzero()[0].tolist()
        place = f"{name}{index}" if index else name
        raise ValueError(f"{place} is {float(x[tuple(index)])}; {expected}.")
