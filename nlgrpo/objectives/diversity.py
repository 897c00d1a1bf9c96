"""Diversity objectives: dissimilarity of the responses to a prompt, measured by a kernel k(y, y') of two responses.

They take kernel matrices (P, M, M), the similarities of the atoms of each prompt, where other objectives take rewards.
Legend: P prompts, M atoms per prompt, usually the M samples of a group; n responses compared at a time.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nlgrpo.kernels import reference
from nlgrpo.objectives.advantages import Baseline, centre_subsets
from nlgrpo.objectives.base import Objective, is_integer, is_number, masses
from nlgrpo.objectives.reweighted import Subsets

DEFAULT_EPS = 1e-3
MOST_MULTISETS = 2**17  # enumerated for atoms with probabilities


class Diversity(Objective):
    """Base class: expectation of a symmetric function h of the kernel matrix of n independent responses.

        R[pi] = E h(y_1, .., y_n);      dR/dpi(y) = n E[h(y_1, .., y_n) | y_1 = y]

    On M samples both are means over subsets of n different samples (a U-statistic), hence unbiased. The policy gradient
    with

        advantage_j = M / (M - n) (r~_j - mean r~),      M > n

    is unbiased too: the factor corrects for the baseline, which contains n/M of each sample's own contribution. With
    ``probs``, tuples may contain an atom more than once, and the result is exact. Raises ValueError for kernels that
    are not (P, M, M), symmetric and finite, and for M < n.
    """

    pairwise: ClassVar[bool] = True

    @property
    @abstractmethod
    def order(self) -> int:
        """Number n of responses compared at a time."""

    @property
    def fewest(self) -> int:
        return self.order + 1

    def _subsets(self, rewards: Tensor) -> Subsets:
        return Subsets(self.order, functools.partial(self._means, rewards))

    @abstractmethod
    def _means(self, kernel: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return `Subsets.means` for the ``weights`` (P, M) of the samples."""

    def advantage(self, rewards: Tensor, baseline: Baseline = "mean") -> Tensor:
        """Return the advantages of `Diversity`, which are the same for "mean" and "loo". "none" returns r~_j itself.

        All are unbiased. Raises ValueError as `linearize`, and for M = n unless ``baseline`` is "none": then all
        samples have the same r~_j.
        """
        if baseline not in ("mean", "loo"):
            return super().advantage(rewards, baseline)
        linear = self.linearize(rewards)
        M = linear.shape[1]
        if self.order >= M:
            raise ValueError(
                f"{self}: all samples of a group of {M} have the same advantage; expected M >= {self.fewest}."
            )
        return centre_subsets(linear, self.order)

    def contributions(self, kernel: Tensor) -> Tensor:
        """Return the mean of h over the subsets that contain each sample, (P, M). The mean over samples is R."""
        return self.linearize(kernel) / self.order

    def _value(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        linear = self._linearize(rewards, probs)
        expected = linear.mean(-1) if probs is None else (probs * linear).sum(-1)
        return expected / self.order

    def _checked(self, rewards: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        kernel = rewards
        if kernel.ndim != 3 or kernel.shape[1] != kernel.shape[2] or kernel.shape[1] == 0:
            raise ValueError(
                f"{self}: expected a kernel matrix per prompt, (P, M, M) with M >= 1, got {tuple(rewards.shape)}."
            )
        kernel = reference.widen(kernel.detach())
        check_kernel(kernel, str(self), "; groups with missing samples go through linearize_present and value_present")
        M = kernel.shape[1]
        if probs is None and self.order > M:
            raise ValueError(f"{self}: {self.order} of {M} samples cannot be chosen; expected M >= {self.order}.")
        return kernel, None if probs is None else masses(probs, kernel[:, 0])


@dataclass(frozen=True)
class RaoDiversity(Diversity):
    """Rao's quadratic entropy, up to a constant: how unlike two responses are on average.

        R[pi] = -E k(y, y');      dR/dpi(y) = -2 E k(y, y')      (IAMA, App. C)

    On M samples r~_j = -2 mean_{l != j} k(y_j, y_l), which is unbiased. With k(y, y') = 1[y = y'], R is the
    Gini-Simpson index minus 1, -sum_y pi(y)^2. Advantages and errors: see `Diversity`, with n = 2.
    """

    @property
    def name(self) -> str:
        return "rao"

    @property
    def order(self) -> int:
        return 2

    def _linearize(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        if probs is not None:
            return -2 * (rewards @ probs[..., None])[..., 0]
        others = rewards.sum(-1) - rewards.diagonal(dim1=-2, dim2=-1)
        return -2 * others / (rewards.shape[1] - 1)

    def _means(self, kernel: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        M = kernel.shape[1]
        itself = torch.eye(M, dtype=torch.bool, device=weights.device)
        pairs = (weights[:, :, None] * weights[:, None, :]).masked_fill(itself, 0.0)
        count = M * (M - 1)
        return -(pairs * kernel).sum((1, 2)) / count, pairs.sum((1, 2)) / count


@dataclass(frozen=True)
class DPPDiversity(Diversity):
    """Log-volume spanned by ``n`` responses: the log-likelihood of a determinantal point process up to a constant.

        R[pi] = E log det(K + eps I),   K_ij = k(y_i, y_j);      dR/dpi(y) = n E[log det(K + eps I) | y_1 = y]

    (IAMA, App. C; Chen et al. 2025.) For a kernel with k(y, y) = 1, n orthogonal responses have R = n log(1 + eps), and
    two equal responses lower it to about log(2 eps): ``eps`` sets the cost of a repetition.

    On a group the mean runs over all subsets of n samples if there are at most ``subsets`` of them. Otherwise it runs
    over at least ``subsets`` random ones, drawn with ``seed``: the M runs of n neighbours on a circle, for as many
    random orders as needed. Each sample is in the same number of subsets, so that r~, value and advantages stay
    unbiased. With ``probs`` all C(M + n - 1, n) multisets are enumerated.

    Advantages and errors: see `Diversity`. Also raises ValueError for an n that is not an integer >= 2, eps <= 0,
    ``subsets`` < 1, a kernel that is not positive semidefinite, and too many atoms with ``probs``.
    """

    n: int
    eps: float = DEFAULT_EPS
    subsets: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_integer(self.n, 2):
            raise ValueError(f"DPPDiversity(n={self.n!r}): expected an integer >= 2, the responses compared at a time.")
        if not (is_number(self.eps) and self.eps > 0):
            raise ValueError(f"DPPDiversity(eps={self.eps!r}): expected a finite number > 0, in units of the kernel.")
        if not is_integer(self.subsets, 1):
            raise ValueError(f"DPPDiversity(subsets={self.subsets!r}): expected an integer >= 1.")
        if not is_integer(self.seed):
            raise ValueError(f"DPPDiversity(seed={self.seed!r}): expected an integer.")

    @property
    def name(self) -> str:
        return f"dpp:{self.n}" if self.eps == DEFAULT_EPS else f"dpp:{self.n}:{self.eps!r}"

    @property
    def order(self) -> int:
        return self.n

    def _linearize(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        M = rewards.shape[1]
        if probs is not None:
            return self._of_atoms(rewards, probs)
        # (S, n)
        chosen = _subsets(M, self.n, self.subsets, self.seed).to(rewards.device)
        volumes = self._log_det(rewards, chosen)
        per_member = volumes[:, :, None].expand(-1, -1, self.n).flatten(1)
        total = torch.zeros_like(rewards[:, 0]).index_add(1, chosen.flatten(), per_member)
        # n / (number of subsets that contain a sample, S n / M)
        return total * (M / len(chosen))

    def _means(self, kernel: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        chosen = _subsets(kernel.shape[1], self.n, self.subsets, self.seed).to(kernel.device)
        products = weights[:, chosen].prod(-1)
        volumes = self._log_det(kernel, chosen)
        return (products * volumes).mean(-1), products.mean(-1)

    def _of_atoms(self, kernel: Tensor, probs: Tensor) -> Tensor:
        """Return n times the sum of probability times log det over all y_2 .. y_n."""
        M = kernel.shape[1]
        others = self.n - 1
        if M * math.comb(M + others - 1, others) > MOST_MULTISETS:
            raise ValueError(f"{self} over {M} atoms with probs: too many to enumerate; use samples without probs.")
        # all (y_2, .., y_n) without their order, (S, n - 1), and their probabilities (P, S)
        rows = list(itertools.combinations_with_replacement(range(M), others))
        multisets = torch.tensor(rows, device=kernel.device)
        orders = torch.tensor([_orders(row) for row in rows]).to(kernel)
        chance = orders * probs[:, multisets].prod(-1)
        # each y_1 with each of them, (M S, n)
        first = torch.arange(M, device=kernel.device).repeat_interleave(len(rows))
        tuples = torch.cat((first[:, None], multisets.repeat(M, 1)), 1)
        volumes = self._log_det(kernel, tuples).view(len(kernel), M, -1)
        return self.n * (volumes * chance[:, None]).sum(-1)

    def _log_det(self, kernel: Tensor, chosen: Tensor) -> Tensor:
        """Return log det(K + eps I) of ``chosen`` (S, n) atoms of each prompt, (P, S)."""
        minors = kernel[:, chosen[:, :, None], chosen[:, None, :]]
        minors = minors + self.eps * torch.eye(self.n, dtype=kernel.dtype, device=kernel.device)
        factor, fault = torch.linalg.cholesky_ex(minors)
        if fault.any():
            group, subset = fault.nonzero()[0].tolist()
            least = torch.linalg.eigvalsh(minors[group, subset])[0] - self.eps
            raise ValueError(
                f"{self}: the kernel of group {group} is not positive semidefinite: samples {chosen[subset].tolist()} "
                f"have an eigenvalue of {least:.3g}. Use another kernel, or a larger eps."
            )
        return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def check_kernel(kernel: Tensor, name: str, advice: str = "") -> None:
    """Raise ValueError for a kernel (P, M, M) that is not finite or not symmetric. ``advice``: if it is not finite."""
    bad = ~kernel.isfinite()
    what = f"is not finite{advice}"
    if not bad.any():
        size = kernel.abs().amax((-2, -1), keepdim=True)
        bad = (kernel - kernel.mT).abs() > 1e-4 * size
        what = "differs from the entry of the same two samples in the other order"
    if bad.any():
        group, j, i = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: the kernel of group {group}, samples {j} and {i} is {kernel[group, j, i].item():g} and {what}."
        )


@functools.lru_cache(maxsize=64)
def _subsets(M: int, n: int, most: int, seed: int) -> Tensor:
    """Return subsets of n of M samples, (S, n): all if there are at most ``most``, else at least ``most`` random ones.

    Every sample is in S n / M of them.
    """
    if math.comb(M, n) <= most:
        return torch.tensor(list(itertools.combinations(range(M), n)))
    generator = torch.Generator().manual_seed(seed)
    rounds = math.ceil(most / M)
    orders = torch.stack([torch.randperm(M, generator=generator) for _ in range(rounds)])
    circle = torch.cat((orders, orders[:, : n - 1]), dim=1)
    return circle.unfold(1, n, 1).flatten(0, 1)


def _orders(multiset: tuple[int, ...]) -> int:
    """Number of sequences with these members."""
    orders = math.factorial(len(multiset))
    for member in set(multiset):
        orders //= math.factorial(multiset.count(member))
    return orders
