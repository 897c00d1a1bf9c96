"""Rewind-and-repeat, an inference procedure of adaptive cost: sample until a response is good enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RewindAndRepeat:
    """Sample until a response reaches a threshold reward, at most ``most`` times, and return the last response.

    The threshold is the ``quantile`` of the reference's rewards at the same prompt: the smallest of them that at least
    this fraction of its samples does not exceed (InfAlign, appendix G: 0.85 and 32). Written "rewind:0.85:32".

    Raises ValueError for a quantile outside (0, 1] and for most < 1.
    """

    quantile: float
    most: int

    def __post_init__(self) -> None:
        if not 0 < self.quantile <= 1:
            raise ValueError(f"RewindAndRepeat(quantile={self.quantile}): expected a number in (0, 1].")
        if self.most < 1:
            raise ValueError(f"RewindAndRepeat(most={self.most}): expected an integer >= 1.")

    def threshold(self, reference: Tensor) -> Tensor:
        """Return the threshold of each prompt, (P,), from the reference's rewards (P, n)."""
        n = reference.shape[1]
        k = max(1, math.ceil(self.quantile * n - 1e-9))  # 0.85 * 20 rounds to a little above 17
        return reference.sort(dim=1).values[:, k - 1]

    def chosen(self, rewards: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probability that each sample is the answer (P, n), and the expected number of draws (P,), float64.

            P(none of m draws is good) = C(b, m) / C(n, m),   b of the n samples are below the threshold

        The draws are without replacement, so that both results are means over all orders of the n samples. They are
        unbiased for independent samples and a fixed threshold. A model compared with its own samples as the reference
        gets a slightly higher value.

        Raises ValueError for rewards that are not (P, n), NaN, and fewer samples than ``most``.
        """
        for name, x in (("rewards", rewards), ("reference", reference)):
            if x.ndim != 2 or x.isnan().any() or not x.numel():
                raise ValueError(f"expected {name} (P, n) without NaN, got {tuple(x.shape)}.")
        n = rewards.shape[1]
        if self.most > n:
            raise ValueError(f"{self} needs {self.most} samples per prompt, got {n}; draw more.")
        good = rewards >= self.threshold(reference)[:, None]
        bad = (~good).sum(1).double()
        # probability that the first m draws are all bad, m = 0, 1, ..
        failed = [torch.ones_like(bad)]
        for m in range(self.most):
            failed.append(failed[-1] * ((bad - m) / (n - m)).clamp(min=0))
        per_good = (1 - failed[-1]) / good.sum(1).clamp(min=1)
        per_bad = failed[-1] / bad.clamp(min=1)
        return torch.where(good, per_good[:, None], per_bad[:, None]), torch.stack(failed[:-1]).sum(0)

    def __str__(self) -> str:
        return f"rewind:{self.quantile:g}:{self.most}"


def parse_rewind(text: str) -> RewindAndRepeat | None:
    """Parse "rewind:QUANTILE:MOST". Return None for any other name; raise ValueError for invalid arguments."""
    name, *arguments = text.split(":")
    if name != "rewind":
        return None
    try:
        quantile, most = arguments
        return RewindAndRepeat(float(quantile), int(most))
    except ValueError as error:
        raise ValueError(
            f"procedure {text!r}: expected rewind:QUANTILE:MOST, such as rewind:0.85:32 ({error})"
        ) from error
