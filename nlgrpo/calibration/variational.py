"""Variational best-of-N (vBoN): train a policy towards the distribution of the best of N samples of the reference.

    pi_bon(y) = (F(y) + p(y))^N - F(y)^N,   F(y) = P(y' below y) for y' ~ pi_ref,   p = pi_ref      (vBoN, Prop. 1)

"Below" is a fixed total order of the strings: by reward, then by a key of the string (vBoN, App. C). Two equal strings
are one element of the order, which is not below itself.

Legend: P prompts, M samples of the policy per prompt, K samples of the reference per prompt. Logarithms are natural,
of whole sequences, and computed in float64.
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

# if log p/F + log N is smaller, (1 + p/F)^N - 1 = N p/F up to a relative error of 1e-16
LINEAR = -36.0
# smallest log F of a fitted curve, which may otherwise become -inf where it is steep
LEAST = -1e4
# F + p may be 1 if the log of the larger of F and p is above this
NEAR_ONE = -0.7


@dataclass(frozen=True)
class VariationalBoN:
    """The ``transform`` "vbon:N" of a reward, whose objective is Eq. 5, or "vbon:N:bound", its lower bound Eq. 8."""

    n: int
    bound: bool = False

    def __str__(self) -> str:
        return f"vbon:{self.n}:bound" if self.bound else f"vbon:{self.n}"


def parse_variational(text: str) -> VariationalBoN | None:
    """Parse "vbon:N" or "vbon:N:bound". Return None for any other name; raise ValueError for invalid arguments."""
    name, _, arguments = text.strip().partition(":")
    if name != "vbon":
        return None
    n, colon, form = arguments.partition(":")
    if not n.isdecimal() or int(n) < 1 or (colon and form != "bound"):
        raise ValueError(f"transform {text!r}: expected vbon:N or vbon:N:bound with N >= 1, such as vbon:4")
    return VariationalBoN(int(n), form == "bound")


def log_bon_density(log_cdf: Tensor, log_p: Tensor, n: float) -> Tensor:
    """Return log[(F + p)^n - F^n], the log-probability that a string is the best of n, from log F and log p; float64.

        n log(F + p) + log(1 - (1 + p/F)^-n)                                                        (vBoN, Eq. 4, 11)

    The shapes broadcast. The powers are not computed, so that p = e^-10000 is as accurate as p = 1/2: for n up to 1e4,
    the relative error is below 1e-12, or the absolute error if the result is near 0. F = 0 gives n log p, n = 1 gives
    log p, p = 0 gives -inf; n need not be an integer. With an estimated F, F + p may exceed 1 and the result 0, which
    `vbon_reward` clamps.

    Differentiable in both inputs; the gradient at F = 0 is (0, n).

    Raises ValueError for NaN and +inf, and for an n that is not a finite number >= 1.
    """
    _check_n(n)
    _refuse("log_cdf", log_cdf, ~(log_cdf < torch.inf), "expected log F, at most 0; -inf where F is 0")
    _refuse("log_p", log_p, ~(log_p < torch.inf), "expected the log-probability of a sequence")
    log_F, log_p = torch.broadcast_tensors(log_cdf.double(), log_p.double())
    # log p/F; e^700 is still a number
    ratio = torch.where(log_p == -torch.inf, -torch.inf, log_p - log_F).clamp(max=700.0)
    # log n p/F, instead of log(1 - (1 + p/F)^-n), which has rounding errors for a small p/F
    linear = ratio + math.log(n)
    small = linear < LINEAR
    log_growth = n * torch.log1p(torch.where(small, 0.0, ratio).exp())
    share = torch.where(small, linear, torch.log(-torch.expm1(-log_growth)))
    return n * _log_sum(log_F, log_p) + share


def vbon_reward(log_cdf: Tensor, log_p: Tensor, n: float, *, bound: bool = False) -> Tensor:
    """Return the reward whose expectation minus KL(pi | pi_ref) is the vBoN objective, or its lower bound; float64.

        log pi_bon(y) - log pi_ref(y)       (vBoN, Eq. 5)
        (n - 1) log F(y)                    (vBoN, Eq. 8), ``bound=True``

    Eq. 5 is E[log pi_bon] + H(pi), and H(pi) = -E log pi_ref - KL(pi | pi_ref). Both rewards are 0 for n = 1. For
    strings of small probability the first is the second plus log n, a constant. With an estimated F, log pi_bon may be
    positive where p is large; it is clamped at 0. If F = 0 the first is (n - 1) log p and the second -inf: an estimate
    needs a smoother (`log_strict_cdf`).

    Raises ValueError as `log_bon_density`, and for log_p = -inf, which no sample of the reference has.
    """
    _refuse("log_p", log_p, ~log_p.isfinite(), "expected a finite log-probability: KL(pi | pi_ref) is infinite here")
    density = log_bon_density(log_cdf, log_p, n)
    if not bound:
        return density.clamp(max=0.0) - log_p.double()
    if n == 1:
        return torch.zeros_like(density)
    return (n - 1) * log_cdf.double().expand_as(density)


def objective(log_pi: Tensor, log_ref: Tensor, log_cdf: Tensor, n: float) -> Tensor:
    """Estimate -KL(pi | pi_bon) = E[log pi_bon(y) - log pi(y)] at each prompt (vBoN, Eq. 5), (P,) float64.

    The inputs are log pi(y), log pi_ref(y) and log F(y) of samples y ~ pi, each (P, M). With the exact F, the expected
    value is at most 0, and 0 only for pi = pi_bon.

    Raises ValueError for shapes that differ, NaN, infinite log-probabilities, and an n below 1.
    """
    return _estimate(log_pi, log_ref, log_cdf, n, bound=False)


def bound(log_pi: Tensor, log_ref: Tensor, log_cdf: Tensor, n: float) -> Tensor:
    """Estimate (n - 1) E log F(y) - KL(pi | pi_ref), a bound below `objective` (vBoN, Theorem 2, Eq. 8), (P,) float64.

    It is lower by log n at least: the paper's proof drops this term between its Eq. 14d and 14e. Its maximum is at
    pi ~ pi_ref F^(n-1), which is pi_bon in the limit of strings of small probability. Arguments and errors as
    `objective`.
    """
    return _estimate(log_pi, log_ref, log_cdf, n, bound=True)


def string_keys(completion_ids: Sequence[Sequence[int]]) -> Tensor:
    """Return a key of each string from its token ids, int64 (S,). Equal strings have equal keys in every process.

    Keys are 64 bits of BLAKE2b: their order does not depend on length or content, and the probability of any collision
    among a billion different strings is 3%.
    """
    keys = []
    for ids in completion_ids:
        data = np.asarray(ids, dtype="<i8").tobytes()
        digest = hashlib.blake2b(data, digest_size=8).digest()
        keys.append(int.from_bytes(digest, "little", signed=True))
    return torch.tensor(keys, dtype=torch.int64)


def strict_order(rewards: Tensor, keys: Tensor) -> Tensor:
    """Return the position of each string in its row's total order, int64 (P, M), starting at 0 for the lowest.

        y below y'   if r(y) < r(y'), or r(y) = r(y') and key(y) < key(y')                               (vBoN, App. C)

    ``rewards`` and ``keys`` (P, M), the latter from `string_keys`. Positions are consecutive; only equal (reward, key)
    pairs, that is equal strings, share one.

    Raises ValueError for NaN rewards, for keys that are not int64, and for shapes that differ.
    """
    if keys.dtype != torch.int64 or keys.shape != rewards.shape:
        got = f"{str(keys.dtype).removeprefix('torch.')} {tuple(keys.shape)}"
        raise ValueError(f"keys: expected int64 {tuple(rewards.shape)}, one per reward (string_keys), got {got}.")
    by_key = keys.argsort(dim=-1, stable=True)
    _refuse("rewards", rewards, rewards.isnan(), "drop the sample first")
    order = by_key.gather(-1, ecdf.argsort(rewards.gather(-1, by_key)))
    r = rewards.gather(-1, order)
    k = keys.gather(-1, order)
    # the position rises by 1 where a string differs from the one before
    differs = (r[..., 1:] != r[..., :-1]) | (k[..., 1:] != k[..., :-1])
    position = pad(differs.cumsum(-1), (1, 0))
    return torch.empty_like(order).scatter_(-1, order, position)


def strict_counts(rewards: Tensor, keys: Tensor, reference: Tensor, reference_keys: Tensor) -> Tensor:
    """Count the reference samples strictly below each sample in the total order, int64 (P, M), out of K.

    ``rewards`` and ``keys`` (P, M), ``reference`` and ``reference_keys`` (P, K). Rewards of two dtypes are compared in
    the wider one.

    Raises ValueError as `strict_order`, for K = 0 and for different numbers of prompts.
    """
    if reference.ndim != 2 or rewards.ndim != 2 or len(rewards) != len(reference) or not reference.shape[1]:
        shapes = f"{tuple(rewards.shape)} and {tuple(reference.shape)}"
        raise ValueError(f"rewards and reference: expected (P, M) and (P, K) with K >= 1, got {shapes}.")
    M = rewards.shape[1]
    K = reference.shape[1]
    common = torch.promote_types(rewards.dtype, reference.dtype)
    pooled = torch.cat([rewards.to(common), reference.to(common)], 1)
    position = strict_order(pooled, torch.cat([keys, reference_keys], 1)).double()
    F = ecdf.cdf(position[:, M:], position[:, :M], "strict")
    return (F * K).round().long()


def log_strict_cdf(
    rewards: Tensor,
    keys: Tensor,
    reference: Tensor,
    reference_keys: Tensor,
    smoother: Literal["add-half", "exponential"] | None = "add-half",
) -> Tensor:
    """Estimate log F of each sample in the total order from K samples of the reference, float64 (P, M).

    "add-half" is log((count + 1/2) / (K + 1)). None is log(count / K), which is -inf below the lowest sample.
    "exponential" is the curve -a e^{-b r} fitted to the log F of the reference samples (vBoN, Sec. 6; `log_cdf.py`); it
    depends on the reward only, not on the key. Below the lowest sample it extrapolates by the range of the samples at
    most, and not below `LEAST`. A prompt whose samples with F > 0 all have one reward uses "add-half" instead.

    Raises ValueError as `strict_counts`, for another smoother, and for prompts for which the fit fails.
    """
    if smoother not in (None, "add-half", "exponential"):
        raise ValueError(f"smoother={smoother!r} is not known; expected None, 'add-half' or 'exponential'.")
    K = reference.shape[-1]
    F = strict_counts(rewards, keys, reference, reference_keys).double() / K
    if smoother is None:
        return F.log()
    log_F = add_half(F, K)
    if smoother == "add-half":
        return log_F
    reference_F = strict_counts(reference, reference_keys, reference, reference_keys).double() / K
    for p, r in enumerate(reference):
        fitted = r[reference_F[p] > 0]
        if fitted.unique().numel() > 1:
            curve = fit_exponential([r], [reference_F[p]], None)
            lowest = 2 * r.min() - r.max()
            within_reach = torch.maximum(rewards[p : p + 1].to(r), lowest)
            log_F[p] = curve(within_reach).clamp(min=LEAST)[0]
    return log_F


def _log_sum(a: Tensor, b: Tensor) -> Tensor:
    """Return log(e^a + e^b). Near 0 it uses expm1, as `logaddexp` has an error of 1e-16 that n would amplify."""
    high = torch.maximum(a, b)
    low = torch.minimum(a, b)
    near = torch.log1p(high.clamp(min=NEAR_ONE).expm1() + low.exp())
    return torch.where(high > NEAR_ONE, near, torch.logaddexp(a, b))


def _estimate(log_pi: Tensor, log_ref: Tensor, log_cdf: Tensor, n: float, *, bound: bool) -> Tensor:
    if log_pi.ndim != 2 or log_pi.shape[1] == 0 or not log_pi.shape == log_ref.shape == log_cdf.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (log_pi, log_ref, log_cdf))
        raise ValueError(f"log_pi, log_ref, log_cdf: expected one shape (P, M >= 1) for all three, got {shapes}.")
    _refuse("log_pi", log_pi, ~log_pi.isfinite(), "expected the log-probability of a sample of the policy")
    reward = vbon_reward(log_cdf, log_ref, n, bound=bound)
    log_ratio = log_pi.double() - log_ref.double()
    return (reward - log_ratio).mean(-1)


def _check_n(n: float) -> None:
    if not (is_number(n) and n >= 1):
        raise ValueError(f"n={n!r}: expected a finite number >= 1, the number of samples to choose from.")


def _refuse(name: str, x: Tensor, bad: Tensor, expected: str) -> None:
    """Raise ValueError that names the first element of ``x`` that is ``bad``."""
    if bad.any():
        index = bad.nonzero()[0].tolist()
        element = f"{name}{index}" if index else name
        raise ValueError(f"{element} is {float(x[tuple(index)])}; {expected}.")
