"""Diversity objectives: how unlike each other the responses to a prompt are, by a kernel k(y, y') of two responses.

They take kernel matrices (P, M, M), the similarities of the atoms of each prompt, where other objectives take rewards.
Legend: P prompts, M atoms per prompt, usually the M samples of a group; n responses that are compared at a time.
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
from nlgrpo.objectives.advantages import Baseline, centre
from nlgrpo.objectives.base import Objective, is_number, masses

DEFAULT_EPS = 1e-3
MOST_MULTISETS = 2**17  # what is enumerated for atoms with probabilities


class Diversity(Objective):
    """Expectation of a symmetric function h of n independent responses, which the kernel matrix of these determines.

        R[pi] = E h(y_1, .., y_n);      dR/dpi(y) = n E[h(y_1, .., y_n) | y_1 = y]

    On M samples both are means over subsets of n different ones (a U-statistic), so both are without bias, and so is
    the policy gradient by

        advantage_j = M / (M - n) (r~_j - mean r~),      M > n

    because the mean holds n/M of what a sample adds. Atoms with ``probs`` are compared with themselves too: that is R
    itself. Raises ValueError for kernels that are not (P, M, M), symmetric and finite, and for M < n.
    """

    pairwise: ClassVar[bool] = True

    @property
    @abstractmethod
    def order(self) -> int:
        """n."""

    @property
    def fewest(self) -> int:
        return self.order + 1

    def advantage(self, rewards: Tensor, baseline: Baseline = "mean") -> Tensor:
        """See `Diversity`; the same with "mean" and "loo". "none" leaves r~_j as it is, which is without bias too.

        Raises ValueError as `linearize`, and for M = n unless ``baseline`` is "none": all samples are alike then.
        """
        if baseline not in ("mean", "loo"):
            return super().advantage(rewards, baseline)
        linear = self.linearize(rewards)
        M = linear.shape[1]
        if self.order >= M:
            raise ValueError(
                f"{self}: a group of {M} gives all its samples one advantage; expected M >= {self.fewest}."
            )
        return M / (M - self.order) * centre(linear)

    def contributions(self, kernel: Tensor) -> Tensor:
        """Each sample's share in the value, (P, M): the mean of h over the subsets that it is in; their mean is R."""
        return self.linearize(kernel) / self.order

    def _value(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        linear = self._linearize(rewards, probs)
        return (linear.mean(-1) if probs is None else (probs * linear).sum(-1)) / self.order

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
            raise ValueError(f"{self}: {self.order} of {M} samples cannot be compared; expected M >= {self.order}.")
        return kernel, None if probs is None else masses(probs, kernel[:, 0])


@dataclass(frozen=True)
class RaoDiversity(Diversity):
    """Rao's quadratic entropy, up to a constant: how unlike two responses are on average.

        R[pi] = -E k(y, y');      dR/dpi(y) = -2 E k(y, y')      (IAMA, App. C)

    On M samples r~_j = -2 mean_{l != j} k(y_j, y_l), without bias. With k(y, y') = 1[y = y'] it is the Gini-Simpson
    index less 1, -sum_y pi(y)^2. Advantages and errors: `Diversity`, with n = 2.
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


@dataclass(frozen=True)
class DPPDiversity(Diversity):
    """Log-volume that ``n`` responses span, the log-likelihood of a determinantal point process up to a constant.

        R[pi] = E log det(K + eps I),   K_ij = k(y_i, y_j);      dR/dpi(y) = n E[log det(K + eps I) | y_1 = y]

    (IAMA, App. C; Chen et al. 2025.) For a kernel with k(y, y) = 1, n responses without likeness have
    R = n log(1 + eps), and two that are equal bring it to about log(2 eps): ``eps`` says what a repetition costs.

    On a group all subsets of n samples are taken, where there are at most ``subsets``. Otherwise at least as many are
    drawn, with ``seed``: the M runs of n neighbours on a circle, of as many random orders as are needed. Each sample is
    in equally many, which keeps r~, value and advantages without bias. Atoms with ``probs`` are compared in all
    C(M + n - 1, n) ways. Advantages and errors: `Diversity`; also for an n that is no integer >= 2, an eps that is not
    above 0, ``subsets`` < 1, a kernel that is not positive semidefinite, and too many atoms with ``probs``.
    """

    n: int
    eps: float = DEFAULT_EPS
    subsets: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is_integer(self.n) or self.n < 2:
            raise ValueError(f"DPPDiversity(n={self.n!r}): expected an integer >= 2, the responses that are compared.")
        if not (is_number(self.eps) and self.eps > 0):
            raise ValueError(f"DPPDiversity(eps={self.eps!r}): expected a finite number > 0, in units of the kernel.")
        if not _is_integer(self.subsets) or self.subsets < 1:
            raise ValueError(f"DPPDiversity(subsets={self.subsets!r}): expected an integer >= 1.")
        if not _is_integer(self.seed):
            raise ValueError(f"DPPDiversity(seed={self.seed!r}): expected an integer.")

    @property
    def name(self) -> str:
        return f"dpp:{self.n}" + (f":{self.eps!r}" if self.eps != DEFAULT_EPS else "")

    @property
    def order(self) -> int:
        return self.n

    def _linearize(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        M = rewards.shape[1]
        if probs is not None:
            return self._of_atoms(rewards, probs)
        chosen = _subsets(M, self.n, self.subsets, self.seed).to(rewards.device)  # (S, n)
        volumes = self._log_det(rewards, chosen)
        each = volumes[:, :, None].expand(-1, -1, self.n).flatten(1)
        total = torch.zeros_like(rewards[:, 0]).index_add(1, chosen.flatten(), each)
        return total * (M / len(chosen))  # n / (how many subsets hold a sample, which is S n / M)

    def _of_atoms(self, kernel: Tensor, probs: Tensor) -> Tensor:
        """n sum over all others y_2 .. y_n of their probability times log det."""
        M, others = kernel.shape[1], self.n - 1
        if M * math.comb(M + others - 1, others) > MOST_MULTISETS:
            raise ValueError(f"{self} over {M} atoms with probs: too many to enumerate; draw samples of them.")
        multisets = torch.tensor(list(itertools.combinations_with_replacement(range(M), others)), device=kernel.device)
        orders = torch.tensor([_orders(row) for row in multisets.tolist()]).to(kernel)
        chance = orders * probs[:, multisets].prod(-1)  # (P, S)
        tuples = torch.cat(
            (torch.arange(M, device=kernel.device).repeat_interleave(len(multisets))[:, None], multisets.repeat(M, 1)),
            dim=1,
        )
        volumes = self._log_det(kernel, tuples).view(len(kernel), M, -1)
        return self.n * (volumes * chance[:, None]).sum(-1)

    def _log_det(self, kernel: Tensor, chosen: Tensor) -> Tensor:
        """log det(K + eps I) of ``chosen`` (S, n) atoms of each prompt, (P, S)."""
        minors = kernel[:, chosen[:, :, None], chosen[:, None, :]]
        minors = minors + self.eps * torch.eye(self.n, dtype=kernel.dtype, device=kernel.device)
        factor, fault = torch.linalg.cholesky_ex(minors)
        if fault.any():
            group, subset = fault.nonzero()[0].tolist()
            least = torch.linalg.eigvalsh(minors[group, subset])[0] - self.eps
            raise ValueError(
                f"{self}: the kernel of group {group} is not positive semidefinite: samples {chosen[subset].tolist()} "
                f"have an eigenvalue of {least:.3g}. Take another kernel, or a greater eps."
            )
        return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def check_kernel(kernel: Tensor, name: str, advice: str = "") -> None:
    """Refuse a kernel (P, M, M) that is not finite or not symmetric, with a ValueError; ``advice`` if not finite."""
    bad = ~kernel.isfinite()
    what = f"is not finite{advice}"
    if not bad.any():
        size = kernel.abs().amax((-2, -1), keepdim=True)
        bad = (kernel - kernel.mT).abs() > 1e-4 * size
        what = "differs from that of the same two in the other order"
    if bad.any():
        group, j, i = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: the kernel of group {group}, samples {j} and {i} is {kernel[group, j, i].item():g} and {what}."
        )


@functools.lru_cache(maxsize=64)
def _subsets(M: int, n: int, most: int, seed: int) -> Tensor:
    """Subsets of n of M samples, (S, n): all of them, or at least ``most``; every sample is in S n / M of them."""
    if math.comb(M, n) <= most:
        return torch.tensor(list(itertools.combinations(range(M), n)))
    generator = torch.Generator().manual_seed(seed)
    orders = torch.stack([torch.randperm(M, generator=generator) for _ in range(-(-most // M))])
    circle = torch.cat((orders, orders[:, : n - 1]), dim=1)
    return circle.unfold(1, n, 1).flatten(0, 1)


def _orders(multiset: list[int]) -> int:
    """How many sequences have these members."""
    counts = [multiset.count(member) for member in set(multiset)]
    return math.factorial(len(multiset)) // math.prod(map(math.factorial, counts))


def _is_integer(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)
