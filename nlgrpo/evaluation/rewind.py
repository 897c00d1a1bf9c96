"""Rewind-and-repeat, an inference procedure of adaptive cost: draw until a response is good enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RewindAndRepeat:
    """Responses are drawn one by one until one reaches a reward, ``most`` times at most; the last one is the answer.

    The reward to reach is the ``quantile`` of the reference's at the same prompt, the smallest that so large a share of
    its samples does not exceed (InfAlign, appendix G: 0.85 and 32). Written "rewind:0.85:32".

    Raises ValueError for a quantile outside of (0, 1] and for most < 1.
    """

    quantile: float
    most: int

    def __post_init__(self) -> None:
        if not 0 < self.quantile <= 1:
            raise ValueError(f"RewindAndRepeat(quantile={self.quantile}): expected a share in (0, 1].")
        if self.most < 1:
            raise ValueError(f"RewindAndRepeat(most={self.most}): expected at least one draw.")

    def threshold(self, reference: Tensor) -> Tensor:
        """(P,) from the reference's rewards (P, n)."""
        n = reference.shape[1]
        place = max(1, math.ceil(self.quantile * n - 1e-9))  # 0.85 * 20 is a little above 17
        return reference.sort(dim=1).values[:, place - 1]

    def chosen(self, rewards: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
        """The chance of each sample to be the answer (P, n), and the expected number of draws (P,), float64.

            P(none of m draws is good) = C(b, m) / C(n, m),   b of the n samples are below the threshold

        are drawn without replacement, so that both are means over all orders of the n samples, without bias for
        independent ones where the threshold is given. Against its own samples per model's is a little high.

        Raises ValueError for rewards that are not (P, n), NaN, and fewer samples than ``most``.
        """
        for name, given in (("rewards", rewards), ("reference", reference)):
            if given.ndim != 2 or given.isnan().any() or not given.numel():
                raise ValueError(f"expected {name} (P, n) without NaN, got {tuple(given.shape)}.")
        n = rewards.shape[1]
        if self.most > n:
            raise ValueError(f"{self}: needs {self.most} samples per prompt, and there are {n}; draw more.")
        good = rewards >= self.threshold(reference)[:, None]
        bad = (~good).sum(1).double()
        failed = [torch.ones_like(bad)]  # that the first m draws all failed, for m = 0, 1, ..
        for m in range(self.most):
            failed.append(failed[-1] * ((bad - m) / (n - m)).clamp(min=0))
        share_good = (1 - failed[-1]) / good.sum(1).clamp(min=1)
        share_bad = failed[-1] / bad.clamp(min=1)
        return torch.where(good, share_good[:, None], share_bad[:, None]), torch.stack(failed[:-1]).sum(0)

    def __str__(self) -> str:
        return f"rewind:{self.quantile:g}:{self.most}"


def parse(text: str) -> RewindAndRepeat | None:
    """ "rewind:QUANTILE:MOST"; None for the name of something else. Raises ValueError for other arguments."""
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
