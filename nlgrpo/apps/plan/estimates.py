"""How far the expected gradient of a run's estimators is from the gradient of its objectives."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from nlgrpo.config.schema import RewardConfig
from nlgrpo.kernels.dispatch import in_torch
from nlgrpo.objectives import estimator_bias
from nlgrpo.objectives.advantages import Baseline
from nlgrpo.objectives.estimator_bias import PROBABILITIES
from nlgrpo.objectives.functional import Functional
from nlgrpo.objectives.kde import Smoothed
from nlgrpo.objectives.rank_based import OfN, RankBased
from nlgrpo.objectives.registry import Objective
from nlgrpo.objectives.tilted import EntropicRisk, SoftBestOfN
from nlgrpo.training.binary_rewards import exact_alternative, factor

SAME = 1e-6  # relative difference below which an estimator is the same at all success probabilities
FAINT = 0.1  # weight of the last gap below which a group has nearly no gradient; 1 in an estimate of the mean
LARGEST_SMOOTHED = 16  # samples in a group of a smoothed objective, whose memory grows with their square
SMOOTHED = 2**15  # simulated groups of one, times the square of the samples: 0.3 GiB


def lines(
    objectives: Mapping[str, Objective], rewards: Mapping[str, RewardConfig], M: int, baseline: Baseline
) -> list[str]:
    """One line for each objective of the update whose estimate from groups of M is biased; [] if all are exact.

    An estimate whose expected gradient is the exact one times a constant, as that of the mean with the group's mean as
    baseline, is not biased here: the constant acts like another learning rate. Objectives of pairs and of votes are
    left out, and so are a user's function, which may be defined for its own rewards only, and large smoothed groups.
    """
    if M == 1:
        return []
    names: dict[tuple[Objective, bool], list[str]] = {}
    for name, reward in rewards.items():
        objective = objectives[name]
        left_out = objective.pairwise or objective.voted or isinstance(objective, Functional)
        left_out = left_out or (isinstance(objective, Smoothed) and M > LARGEST_SMOOTHED)
        if not left_out and reward.weight != 0:
            names.setdefault((objective, not reward.transform), []).append(name)
    found = []
    with in_torch():
        for (objective, binary), those in names.items():
            text = _gains(objective, M, baseline, binary=binary)
            if text:
                found.append(f"{', '.join(those)}: {text}{_faint(objective, M)}{_advice(objective, M)}")
    return found


def _gains(objective: Objective, M: int, baseline: Baseline, *, binary: bool) -> str:
    """Factors of the expected gradient; "" if they are all the same.

    ``binary``: the objective gets the reward itself, which may be 0 or 1, and not a rank.
    """
    gains = estimator_bias.gain_for_binary(objective, M, baseline=baseline)
    known = gains[~gains.isnan()]
    if len(known) > 1 and float(known.max() - known.min()) <= SAME * float(known.abs().max()):
        return ""
    parts = []
    if binary and len(known):
        factors = ", ".join(map(factor, known.tolist()))
        with_gradient = torch.tensor(PROBABILITIES)[~gains.isnan()]
        places = ", ".join(f"{100 * p:g}" for p in with_gradient.tolist())
        parts.append(f"{factors} for rewards of 0 and 1 where {places}% of the samples succeed")
    if not isinstance(objective, SoftBestOfN | EntropicRisk):  # which depend on the scale of rewards
        groups = SMOOTHED // M**2 if isinstance(objective, Smoothed) else estimator_bias.GROUPS
        normal = estimator_bias.gain_for_normal(objective, M, baseline, groups=groups)
        cosine = f" (cosine {normal.cosine:.2f})" if math.isfinite(normal.cosine) else ""
        parts.append(f"{factor(normal.size)}{cosine} for normally distributed rewards")
    if not parts:
        return ""
    return f"the expected gradient of {objective} in groups of {M} is the exact one times {', and times '.join(parts)}"


def _faint(objective: Objective, M: int) -> str:
    """What a plug-in estimate hardly sees for N far above M: all but the best sample of the group."""
    if not isinstance(objective, RankBased):
        return ""
    weights = objective.weights(M)
    last_gap = float(weights[-2])  # between the best sample and the second
    if last_gap > FAINT or float(weights[-1]) < 1:
        return ""
    return f". The last gap, between the best two samples, weighs {last_gap:.2g}: groups have nearly no gradient"


def _advice(objective: Objective, M: int) -> str:
    if isinstance(objective, OfN):
        return f". {exact_alternative(objective, M)}"
    return ". A larger rollout.samples lowers the bias"
