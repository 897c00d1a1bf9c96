"""Rank-based objectives: procedures that reweight a response by the rank of its reward under the policy.

Legend: P prompts, M samples per prompt; C the cumulative distribution of the reward under the policy.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from nlgrpo import kernels
from nlgrpo.kernels import reference
from nlgrpo.kernels.reference import running_sums
from nlgrpo.objectives import reweighted
from nlgrpo.objectives.advantages import Baseline, centre_subsets
from nlgrpo.objectives.base import Objective, estimator_suffix, is_integer, is_number
from nlgrpo.objectives.reweighted import Subsets


class RankBased(Objective):
    """Base class: procedures that reweight a response by the rank of its reward, T[pi](y) = f(C(r(y))) pi(y).

        R[pi] = sum_k r_(k) [F(C_k) - F(C_{k-1})],  F' = f, F(0) = 0;      dR/dpi(y) = -int_{r(y)}^{r_max} f(C(r)) dr

    On a group C_k = k/M, and the first variation is one sort and one suffix sum with the weights w_k = f(k/M)
    (`nlgrpo.kernels.linearize`). A subclass defines f and F. Ties need no special treatment.
    """

    @abstractmethod
    def _f(self, z: Tensor) -> Tensor: ...

    @abstractmethod
    def _integral(self, z: Tensor) -> Tensor:
        """F(z), the integral of f from 0 to z."""

    def _masses(self, cdf: Tensor) -> Tensor:
        """Return F(C_k) - F(C_{k-1}) for C_0 = 0 .. C_M, (.., M + 1) -> (.., M)."""
        return self._integral(cdf).diff(dim=-1)

    def weights(self, M: int) -> Tensor:
        """Return w_k = f(k/M) for k = 1 .. M, (M,) in float64."""
        return self._f(_steps(M)[1:])

    def weight_at(self, ranks: Tensor) -> Tensor:
        """Return f(z) for ``ranks`` z in [0, 1], of their shape."""
        return self._f(ranks)

    @property
    def jumps(self) -> tuple[float, ...]:
        """Ranks in (0, 1) at which f jumps, ascending, as far as known: not those of a user's function."""
        return ()

    def masses(self, M: int) -> Tensor:
        """Return the weight in R of the k-th smallest of M rewards, F(k/M) - F((k-1)/M), (M,) in float64."""
        return self._masses(_steps(M))

    def _linearize(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        if probs is None:
            return kernels.linearize(rewards, self.weights(rewards.shape[1]).to(rewards))
        order = rewards.argsort(dim=-1, stable=True)
        return reference.linearize(rewards, self._f(_cdf(probs.gather(-1, order))))

    def _value(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        ordered, order = rewards.sort(dim=-1, stable=True)
        if probs is None:
            cdf = _steps(rewards.shape[1]).to(rewards.device)
        else:
            cdf = torch.nn.functional.pad(_cdf(probs.gather(-1, order)), (1, 0))
        chosen = self._masses(cdf).to(rewards)
        # infinite rewards of mass 0 count 0
        return torch.where(chosen == 0, 0.0, chosen * ordered).sum(-1)

    def _uncentred(self, rewards: Tensor, probs: Tensor | None = None) -> Tensor:
        """Return f(1) r_max - int_{r(y)}^{r_max} f(C(r)) dr, which is the reward itself for f = 1."""
        at_best = self.weights(rewards.shape[1])[-1].item()
        linear = self._linearize_weighted(rewards, probs)
        return linear + at_best * rewards.amax(-1, keepdim=True) if at_best else linear


@dataclass(frozen=True)
class Mean(RankBased):
    """Expected reward of one sample, R[pi] = E r (plain GRPO): f = 1, and the linearised reward is r - max r."""

    @property
    def name(self) -> str:
        return "mean"

    def _f(self, z: Tensor) -> Tensor:
        return torch.ones_like(z)

    def _integral(self, z: Tensor) -> Tensor:
        return z


@dataclass(frozen=True)
class OfN(RankBased):
    """Base class of `BestOfN` and `WorstOfN`: one of ``n`` samples is chosen. Two estimators on groups of M samples:

    ``"plugin"`` replaces C by the group's empirical CDF. It has a bias of order 1/M and takes any n, also n > M.
    ``"unbiased"`` needs M >= n. Its value is the mean over all subsets of n of the M samples, and its `advantage` is

        M / (M - n) (r~_j - mean r~),   w_k as in `BestOfN` and `WorstOfN`

    Both are unbiased: the expected policy gradient is that of R (the leave-one-out estimator of max@k). The factor
    M / (M - n) corrects for the baseline. For n = M only the chosen sample has an advantage, n times its distance to
    the next reward. n = 1 is REINFORCE with a leave-one-out baseline. With ``probs`` both estimators are exact.

    Raises ValueError for an n that is not an integer >= 1 and for an unknown estimator. The methods raise it for n > M
    with "unbiased".
    """

    n: int
    estimator: Literal["plugin", "unbiased"] = "plugin"

    sign: ClassVar[int]
    """1 if the largest reward is chosen, -1 if the smallest is."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not is_integer(self.n, 1):
            raise ValueError(f"{name}(n={self.n!r}): expected an integer >= 1, the number of samples to choose from.")
        if self.estimator not in ("plugin", "unbiased"):
            raise ValueError(f"{name}(estimator={self.estimator!r}): expected 'plugin' or 'unbiased'.")

    @property
    def fewest(self) -> int:
        return self.n if self.estimator == "unbiased" else 1

    def _subsets(self, rewards: Tensor) -> Subsets | None:
        if self.estimator == "plugin":
            return None
        signed = self.sign * rewards

        def means(weights: Tensor) -> tuple[Tensor, Tensor]:
            best, ones = reweighted.best_of_subsets(signed, weights, self.n)
            return self.sign * best, ones

        return Subsets(self.n, means, few=lambda weights: self.sign * _best_of_others(signed, weights))

    @abstractmethod
    def shares(self, M: int) -> Tensor:
        """Return the probability that the k-th smallest of M is chosen from a random subset of n, k = 1 .. M; (M,)."""

    def _gap_shares(self, M: int) -> Tensor:
        """Return w_k / M, the weight of the gap above the k-th smallest, (M,)."""
        return self.shares(M)

    @abstractmethod
    def _of_all(self, rewards: Tensor) -> Tensor:
        """Return the advantages for n = M >= 2."""

    def weights(self, M: int) -> Tensor:
        """Return w_k, (M,) in float64: f(k/M) for "plugin", or the weights of the subsets for "unbiased"."""
        if self.estimator == "plugin":
            return super().weights(M)
        self._check_samples(M)
        return M * self._gap_shares(M)

    def advantage(self, rewards: Tensor, baseline: Baseline = "mean") -> Tensor:
        M = rewards.shape[-1] if rewards.ndim else 0
        if self.estimator == "plugin" or baseline not in ("mean", "loo") or M < 2:
            return super().advantage(rewards, baseline)
        linear = self.linearize(rewards)
        if self.n == M:
            return self._with_finite_terms(self._of_all(rewards.detach().to(linear)), rewards)
        return self._with_finite_terms(centre_subsets(linear, self.n), rewards)

    def _value(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        if self.estimator == "plugin" or probs is not None:
            return super()._value(rewards, probs)
        self._check_samples(rewards.shape[1])
        shares = self.shares(rewards.shape[1]).to(rewards)
        ordered = rewards.sort(dim=-1).values
        return torch.where(shares == 0, 0.0, shares * ordered).sum(-1)

    def _check_samples(self, M: int) -> None:
        if self.n > M:
            raise ValueError(f"{self}: {self.n} of {M} samples have no unbiased estimate; expected M >= {self.n}.")


@dataclass(frozen=True)
class BestOfN(OfN):
    """Expected reward of the best of ``n`` samples, and its first variation.

    R[pi] = E max(r_1, .., r_n);   dR/dpi(y) = -int_{r(y)}^{r_max} n C(r)^(n-1) dr      (IAMA, Prop. 4.2, Alg. 3)

    ``n = 1`` is `Mean`. With ``estimator="unbiased"``, w_k = n C(k-1, n-1) / C(M-1, n-1). Estimators and errors: see
    `OfN`.
    """

    sign: ClassVar[int] = 1

    @property
    def name(self) -> str:
        return f"bon:{self.n}{estimator_suffix(self.estimator)}"

    def _f(self, z: Tensor) -> Tensor:
        return self.n * z ** (self.n - 1)

    def _integral(self, z: Tensor) -> Tensor:
        return z**self.n

    def shares(self, M: int) -> Tensor:
        return order_weights(M, self.n)

    def _of_all(self, rewards: Tensor) -> Tensor:
        values, places = rewards.topk(2, dim=-1)
        best = values[:, :1]
        second = values[:, 1:]
        # 0 also for two infinite rewards
        lead = torch.where(best == second, 0.0, best - second)
        return torch.zeros_like(rewards).scatter(-1, places[:, :1], self.n * lead)


@dataclass(frozen=True)
class WorstOfN(OfN):
    """Expected reward of the worst of ``n`` samples: robustness against repeated attempts to make the model fail.

    R[pi] = E min(r_1, .., r_n);   f(z) = n (1 - z)^(n-1);   F(z) = 1 - (1 - z)^n      (InfAlign, Lemma 5)

    It equals -`BestOfN` of -r, and ``n = 1`` is `Mean`. With ``estimator="unbiased"``,
    w_k = n C(M-k-1, n-1) / C(M-1, n-1). Estimators and errors: see `OfN`.
    """

    sign: ClassVar[int] = -1

    @property
    def name(self) -> str:
        return f"wor:{self.n}{estimator_suffix(self.estimator)}"

    def _f(self, z: Tensor) -> Tensor:
        return self.n * (1 - z) ** (self.n - 1)

    def _integral(self, z: Tensor) -> Tensor:
        return 1 - (1 - z) ** self.n

    def shares(self, M: int) -> Tensor:
        return order_weights(M, self.n).flip(0)

    def _gap_shares(self, M: int) -> Tensor:
        # the k-th gap from below of r is the k-th from above of -r
        mirrored = order_weights(M, self.n)[:-1].flip(0)
        return torch.nn.functional.pad(mirrored, (0, 1))

    def _of_all(self, rewards: Tensor) -> Tensor:
        return -BestOfN(self.n, self.estimator)._of_all(-rewards)

    def _uncentred(self, rewards: Tensor, probs: Tensor | None = None) -> Tensor:
        return -BestOfN(self.n, self.estimator)._uncentred(-rewards, probs)


@dataclass(frozen=True)
class BestOfPoisson(RankBased):
    """Expected reward of the best of K samples, where K is Poisson with mean ``rate``; 0 if K = 0.

        R[pi] = E[max(r_1, .., r_K); K >= 1],  K ~ Poisson(rate)
        f(z) = rate e^{rate (z-1)};   F(z) = e^{rate (z-1)} - e^{-rate}      (IAMA, 5.3)

    f integrates to 1 - e^{-rate} = P(K >= 1): adding a constant c to the rewards adds (1 - e^{-rate}) c to R and leaves
    the first variation unchanged. rate -> 0 gives rate times `Mean`. On a group it is a plug-in estimate with a bias of
    order 1/M.

    Raises ValueError for a rate that is not positive and finite.
    """

    rate: float

    def __post_init__(self) -> None:
        if not (is_number(self.rate) and self.rate > 0):
            raise ValueError(
                f"BestOfPoisson(rate={self.rate!r}): expected a finite number > 0, the mean number of samples."
            )

    @property
    def name(self) -> str:
        return f"bop:{self.rate!r}"

    def _f(self, z: Tensor) -> Tensor:
        return self.rate * (self.rate * (z - 1)).exp()

    def _integral(self, z: Tensor) -> Tensor:
        chance_of_none = torch.exp(torch.tensor(-self.rate, dtype=torch.float64)).to(z)
        return (self.rate * (z - 1)).exp() - chance_of_none


@dataclass(frozen=True)
class CVaR(RankBased):
    """Conditional value at risk of the lower tail: expected reward of the worst fraction ``alpha`` of responses.

    R[pi] = 1/alpha int_0^alpha C^{-1}(z) dz;   f(z) = 1[z <= alpha] / alpha;   F(z) = min(z, alpha) / alpha   (IAMA, C)

    alpha = 1 is `Mean`, alpha -> 0 gives the minimum. On M samples, w_k is the average of f over ((k-1)/M, k/M], with a
    bias of order 1/M. f(k/M) itself would be 0 for every k, and so would the gradient, if alpha M < 1. With ``probs``
    w_k is f(C_k), the exact first variation.

    Raises ValueError for an alpha that is not in (0, 1].
    """

    alpha: float

    def __post_init__(self) -> None:
        if not (is_number(self.alpha) and 0 < self.alpha <= 1):
            raise ValueError(f"CVaR(alpha={self.alpha!r}): expected a number in (0, 1], the size of the lower tail.")

    @property
    def name(self) -> str:
        return f"cvar:{self.alpha!r}"

    @property
    def jumps(self) -> tuple[float, ...]:
        return (self.alpha,) if self.alpha < 1 else ()

    def weights(self, M: int) -> Tensor:
        """Return M times the integral of f over ((k-1)/M, k/M], for k = 1 .. M, (M,) in float64."""
        return M * self.masses(M)

    def _linearize_weighted(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        """As for samples, w_k is the average of f over (C_{k-1}, C_k]."""
        if probs is None:
            return self._linearize(rewards, None)
        order = rewards.argsort(dim=-1, stable=True)
        cdf = torch.nn.functional.pad(_cdf(probs.gather(-1, order)), (1, 0))
        widths = cdf.diff(dim=-1)
        averages = self._masses(cdf) / widths.where(widths > 0, 1.0)
        return reference.linearize(rewards, torch.where(widths > 0, averages, self._f(cdf[:, 1:])))

    def _f(self, z: Tensor) -> Tensor:
        return (z <= self.alpha).to(z.dtype) / self.alpha

    def _integral(self, z: Tensor) -> Tensor:
        return z.clamp(max=self.alpha) / self.alpha


@dataclass(frozen=True)
class Distortion(RankBased):
    """Custom rank-based objective: ``f`` is a function of ranks z in [0, 1], or a table of its values.

    A function maps a float tensor of any shape to one of the same shape. Its integral need not be 1, and f may be
    negative. R integrates f over each atom's part of [0, 1] by 32-point Gauss-Legendre quadrature. This is exact for
    polynomials up to degree 63, and less accurate where f jumps or has an infinite slope, as sqrt(z) at 0. A table of K
    numbers is a step function, f(z) = table_k for (k-1)/K < z <= k/K; with K = M it contains the weights w_k. On a
    group the bias is of order 1/M for a smooth f.

    ``named``: the function's name in `name`, by default its ``__qualname__``. A table is named by its numbers.

    Raises ValueError for a table that is empty or not finite, and for a function that does not return a finite tensor
    of the same shape.
    """

    f: Callable[[Tensor], Tensor] | Sequence[float]
    named: str = ""

    def __post_init__(self) -> None:
        if not callable(self.f):
            table = tuple(self.f)
            if not table or not all(map(is_number, table)):
                raise ValueError(f"Distortion(f={self.f!r}): expected a function, or a table of finite numbers.")
            object.__setattr__(self, "f", tuple(map(float, table)))
        self._f(torch.linspace(0, 1, 5, dtype=torch.float64))

    @property
    def name(self) -> str:
        if not callable(self.f):
            return f"distortion:{','.join(map(repr, self.f))}"
        return f"distortion:{self.named or getattr(self.f, '__qualname__', type(self.f).__name__)}"

    @property
    def jumps(self) -> tuple[float, ...]:
        if callable(self.f):
            return ()
        K = len(self.f)
        return tuple(k / K for k in range(1, K) if self.f[k - 1] != self.f[k])

    def _f(self, z: Tensor) -> Tensor:
        if not callable(self.f):
            table = torch.tensor(self.f, dtype=z.dtype, device=z.device)
            rounding = 4 * torch.finfo(z.dtype).eps
            # z = k/K belongs to step k despite rounding
            step = ((z - rounding) * len(table)).ceil().long()
            return table[(step - 1).clamp(0, len(table) - 1)]
        with torch.no_grad():
            values = self.f(z)
        if not isinstance(values, Tensor) or values.shape != z.shape or not values.isfinite().all():
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"Distortion: f of a tensor {tuple(z.shape)} in [0, 1] must be a finite tensor of that shape, "
                f"got {got}."
            )
        return values.to(z)

    def _integral(self, z: Tensor) -> Tensor:
        return self._masses(torch.stack((torch.zeros_like(z), z), -1))[..., 0]

    def _masses(self, cdf: Tensor) -> Tensor:
        if not callable(self.f):
            # F at 0, 1/K, .., 1, and linear between
            K = len(self.f)
            F = torch.tensor((0.0, *np.cumsum(self.f)), dtype=cdf.dtype, device=cdf.device) / K
            step = (cdf * K).floor().clamp(max=K - 1)
            share = cdf * K - step
            low = F[step.long()]
            high = F[step.long() + 1]
            return (low + share * (high - low)).diff(dim=-1)
        x, w = np.polynomial.legendre.leggauss(32)
        nodes = torch.from_numpy(x).to(cdf)
        weights = torch.from_numpy(w).to(cdf)
        begin = cdf[..., :-1, None]
        width = cdf.diff(dim=-1)
        z = begin + width[..., None] * (nodes + 1) / 2
        return width * (self._f(z) * weights).sum(-1) / 2


def order_weights(n: int, best_of: int) -> Tensor:
    """Probability that the k-th smallest of ``n`` samples is the largest of a random subset of N = ``best_of``, (n,).

    w_k = C(k-1, N-1) / C(n, N), k = 1..n

    Computed from the top by w_n = N/n, w_(k-1) = w_k (k-N)/(k-1): no factorial overflows, and weights that underflow
    are negligible. The relative error is about n eps (lgamma: log C(n, N) eps).
    """
    k = torch.arange(n, 1, -1, dtype=torch.float64)
    first = torch.ones(1, dtype=torch.float64)
    ratios = ((k - best_of) / (k - 1)).clamp(min=0)
    from_the_top = best_of / n * torch.cat((first, ratios)).cumprod(0)
    return from_the_top.flip(0)


def _best_of_others(rewards: Tensor, weights: Tensor) -> Tensor:
    """Largest reward of the other samples with a weight, (P, M); NaN where there is none."""
    weighted = rewards.where(weights > 0, -torch.inf)
    # a further sample without weight, so that there are two
    padded = torch.nn.functional.pad(weighted, (0, 1), value=-torch.inf)
    values, places = padded.topk(2, dim=-1)
    is_best = torch.arange(rewards.shape[1], device=rewards.device) == places[:, :1]
    others = torch.where(is_best, values[:, 1:], values[:, :1])
    return others.masked_fill(others == -torch.inf, torch.nan)


def _steps(M: int) -> Tensor:
    """Return C_0 = 0, C_1 = 1/M, .., C_M = 1, (M + 1,) in float64."""
    return torch.arange(M + 1, dtype=torch.float64) / M


def _cdf(masses: Tensor) -> Tensor:
    """Return the running sum of the last dimension, scaled to end at exactly 1, where f and F may be steep."""
    total = running_sums(masses)
    return total / total[..., -1:]
