"""Loss and evaluation of scores on preference pairs: accuracy with an interval, calibration, margins.

The margin of a pair is m = r_chosen - r_rejected, and the model's probability that the preferred answer wins is
sigmoid(m) (Bradley and Terry 1952).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
Z95 = 1.959963984540054  # 97.5% quantile of the normal distribution


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, *, centering: float = 0.0
) -> Tensor:
    """Loss of each pair, (n,), from the scores (n,) of the chosen and the rejected answer.

        -log sigmoid(r_chosen - r_rejected - margin) + centering (r_chosen + r_rejected)^2

    The first term is the negative log-likelihood of Bradley and Terry (1952), in which an answer wins with probability
    sigmoid(r_chosen - r_rejected), as in InstructGPT (Ouyang et al. 2022, eq. 1, with two answers per prompt); with a
    margin it is that of Llama 2 (Touvron et al. 2023, eq. 2). It does not change when a constant is added to all scores
    of a prompt; the second term (Eisenstein et al. 2023, "Helping or herding?", 3) keeps that constant near zero.
    """
    loss = F.softplus(margin - (chosen - rejected))
    return loss if centering == 0 else loss + centering * (chosen + rejected).square()


def evaluate_pairs(chosen: Tensor, rejected: Tensor, *, bins: int = 10) -> dict[str, Any]:
    """Evaluate the scores (n,) of both sides. Returns plain numbers and lists, computed in float64:

    ``accuracy``    fraction of pairs with m > 0, ties counting 1/2; ``low`` and ``high``: `wilson`'s 95% interval
    ``log_loss``    mean of -log sigmoid(m), in nats; log 2 for constant scores
    ``brier``       mean of (1 - sigmoid(m))^2; 1/4 for constant scores
    ``ece``, ``reliability``  see `reliability`
    ``margin``      mean, std (with Bessel's correction) and quantiles of m
    ``reward``      mean and std of the scores of both sides

    Raises ValueError for no pairs, sides of unequal length, and scores that are not finite.
    """
    chosen, rejected = (torch.as_tensor(x).double().cpu() for x in (chosen, rejected))
    if chosen.shape != rejected.shape or chosen.dim() != 1 or not len(chosen):
        raise ValueError(
            f"expected scores (n,) of both sides, n >= 1, got {tuple(chosen.shape)} and {tuple(rejected.shape)}"
        )
    margin = chosen - rejected
    if not margin.isfinite().all():
        bad = int((~margin.isfinite()).sum())
        raise ValueError(f"{bad} of {len(margin)} pairs have scores that are not finite; has training diverged?")
    right = _right(margin)
    low, high = wilson(float(right.mean()), len(margin))
    table = reliability(margin, bins)
    gaps = [row["pairs"] * abs(row["accuracy"] - row["confidence"]) for row in table]
    return {
        "pairs": len(margin),
        "accuracy": float(right.mean()),
        "low": low,
        "high": high,
        "log_loss": float(F.softplus(-margin).mean()),
        "brier": float((1 - margin.sigmoid()).square().mean()),
        "ece": sum(gaps) / len(margin),
        "reliability": table,
        "margin": _spread(margin) | {"quantiles": _quantiles(margin)},
        "reward": _spread(torch.cat([chosen, rejected])),
    }


def wilson(share: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval (1927) for a success rate ``share`` in n independent trials; 95% for the default z.

        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Used instead of a bootstrap because it keeps its coverage for few pairs and for rates near 0 and 1, where a
    bootstrap interval shrinks to a point.
    """
    if n < 1 or not 0 <= share <= 1:
        raise ValueError(f"expected a share in [0, 1] of n >= 1 trials, got {share} of {n}")
    center = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (center - half) / scale), min(1.0, (center + half) / scale)


def reliability(margin: Tensor, bins: int = 10) -> list[dict[str, float]]:
    """Confidence and accuracy in ``bins`` of equal width over [1/2, 1]; empty bins are left out.

    The model predicts that the answer with the higher score wins, with confidence sigmoid(|m|), and is right if m > 0.
    (sigmoid(m) against "chosen wins" would show nothing, because "chosen" always wins.) For a calibrated model both are
    equal. ECE, the expected calibration error, is the mean over pairs of |accuracy - confidence| of their bin (Naeini
    et al. 2015; Guo et al. 2017, eq. 3).
    """
    confidence = margin.abs().sigmoid()
    right = _right(margin)
    bin_of = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    rows = []
    for number in bin_of.unique().tolist():
        members = bin_of == number
        rows.append(
            {
                "from": 0.5 + number / (2 * bins),
                "to": 0.5 + (number + 1) / (2 * bins),
                "pairs": int(members.sum()),
                "confidence": float(confidence[members].mean()),
                "accuracy": float(right[members].mean()),
            }
        )
    return rows


def _right(margin: Tensor) -> Tensor:
    return ((margin > 0).double() + (margin >= 0).double()) / 2


def _spread(values: Tensor) -> dict[str, Any]:
    return {"mean": float(values.mean()), "std": float(values.std()) if len(values) > 1 else 0.0}


def _quantiles(values: Tensor) -> dict[str, float]:
    quantiles = torch.quantile(values, torch.tensor(QUANTILES, dtype=torch.float64))
    return {f"{q:.0%}": float(value) for q, value in zip(QUANTILES, quantiles, strict=True)}
