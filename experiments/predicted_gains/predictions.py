"""Parts of predict_gain.py: what the exact optima on samples of the reference show about a comparison.

Shapes: P prompts, K samples of the reference, m rewards, M completions of a group; float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from experiments.predicted_gains.exact_optimum import Goal, Optimum, at_kl, kl_of, of_kl, uniform
from nlgrpo.calibration import alignment, variational
from nlgrpo.calibration.transforms import FixedPoint, Transform, parse_transform
from nlgrpo.estimators import bootstrap, weighted_win_rate
from nlgrpo.objectives.aggregation import WeightedSum
from nlgrpo.objectives.registry import BestOfN, Mean

RANK = "rank"  # rank:N, the objective bon:N on u^N (InfAlign, Def. 5)
Row = dict[str, Any]


def correlations(rewards: Mapping[str, Tensor]) -> dict[str, float]:
    """Correlation of each pair of rewards within a prompt: its mean over the prompts where both vary."""
    centred = {name: x - x.mean(1, keepdim=True) for name, x in rewards.items()}
    found = {}
    for one, other in itertools.combinations(centred, 2):
        a, b = centred[one], centred[other]
        found[f"{one}, {other}"] = float(((a * b).mean(1) / (a.std(1, False) * b.std(1, False))).nanmean())
    return found


# --- gains of an objective over the mean ------------------------------------------------------------------------------


def for_mean(goal: Goal) -> Goal:
    return replace(goal, objectives=[Mean() for _ in goal.objectives])


def optima(goal: Goal, kl: float) -> tuple[Optimum, Optimum]:
    """Return the policies trained for the goal and for the mean of its rewards, at the same KL."""
    return at_kl(goal, kl), at_kl(for_mean(goal), kl)


def gain(goal: Goal, kl: float, samples: int) -> Row:
    """What training for ``goal`` gains over training for the mean at this KL, and what it takes to see it.

    ``samples``: M of a group. The interval is over prompts; it is NaN if the aggregate is not a sum.
    """
    own, plain = optima(goal, kl)
    row = {"kl": kl, "gain": goal.value(own.probs) - goal.value(plain.probs), "low": math.nan, "high": math.nan}
    if isinstance(goal.aggregate, WeightedSum):
        _, low, high = bootstrap(per_prompt(goal, own) - per_prompt(goal, plain))
        row |= {"low": float(low), "high": float(high)}
    single = for_mean(goal)
    row |= {"value": goal.value(own.probs), "value_mean": goal.value(plain.probs)}
    row |= {"single": single.value(own.probs), "single_mean": single.value(plain.probs)}
    row |= {"beta": own.beta, "beta_mean": plain.beta, "residual": max(own.residual, plain.residual)}
    return row | {"gap": max(own.gap, plain.gap)} | signal(goal, plain, own, samples)


def per_prompt(goal: Goal, at: Optimum) -> Tensor:
    """Return the weighted sum of the objectives' values at each prompt, (P,)."""
    values = [o.value(r, at.probs) for o, r in zip(goal.objectives, goal.rewards, strict=True)]
    return goal.aggregate.value(torch.stack(values))


def front(goal: Goal, kl: float, weights: Sequence[float], n: int) -> list[Row]:
    """Both rewards of one sample and of the best of ``n``, trained for the goal and for the mean, at each weight."""
    rows = []
    for weight in weights:
        aggregate = WeightedSum([weight, 1 - weight])
        for mine, policy in zip((True, False), optima(replace(goal, aggregate=aggregate), kl), strict=True):
            row = {"weight": weight, "own": float(mine)}
            for i, reward in enumerate(goal.rewards):
                row[f"single_{i}"] = float(Mean().value(reward, policy.probs).mean())
                row[f"best_{i}"] = float(BestOfN(n).value(reward, policy.probs).mean())
            rows.append(row)
    return rows


def signal(goal: Goal, at: Optimum, toward: Optimum, samples: int, draws: int = 100_000) -> Row:
    """Signal and noise of the gradient at one optimum along the direction to another, estimated by ``draws`` samples.

    The direction is that of exponential tilting, p_e ~ p (p* / p)^e, with the score d = log p*/p - E log p*/p. A group
    of M samples of p estimates the slope of the goal minus beta KL (beta of ``toward``) as the trainer does,

        g = 1/M sum_j (A_j - beta (log p/ref_j - mean)) d_j,    A the sum of the objectives' advantages

    ``signal``: E g; ``exact``: the slope itself; ``noise``: the standard deviation of g over groups and prompts.
    ``prompts``: the smallest number of groups per step for which |signal| is at least the noise of their mean, and
    ``completions`` M times that.
    """
    p, log_ref = at.probs, uniform(at.log_p)
    d = toward.log_p - at.log_p
    d = d - (p * d).sum(1, keepdim=True)
    ratio = at.log_p - log_ref
    exact = float((p * (goal.linearize(p) - toward.beta * ratio) * d).sum(1).mean())
    groups = max(1, draws // (samples * len(p)))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(p, groups * samples, replacement=True, generator=generator)

    def of(x: Tensor) -> Tensor:
        return x.gather(1, drawn).view(-1, samples)

    weights = goal.aggregate.gradient(goal.values(p)).tolist()
    advantages = -toward.beta * (of(ratio) - of(ratio).mean(1, keepdim=True))
    for weight, objective, reward in zip(weights, goal.objectives, goal.rewards, strict=True):
        advantages = advantages + weight * objective.advantage(of(reward))
    slopes = (advantages * of(d)).mean(1)
    mean, noise = float(slopes.mean()), float(slopes.std())
    prompts = math.ceil((noise / mean) ** 2) if mean else math.inf
    return {"signal": mean, "exact": exact, "noise": noise, "prompts": prompts, "completions": samples * prompts}


# --- transforms of one reward -----------------------------------------------------------------------------------------


def masses(rewards: Tensor, probs: Tensor, n: int, *, worst: bool = False) -> Tensor:
    """Probability that each sample is the best, or the worst, of ``n`` draws from ``probs`` (P, K), in its order."""
    order = (-rewards if worst else rewards).argsort(dim=1, stable=True)
    cdf = torch.nn.functional.pad(probs.gather(1, order).cumsum(1).clamp(max=1), (1, 0))
    return torch.empty_like(probs).scatter_(1, order, (cdf**n).diff(dim=1))


def win_rates(rewards: Tensor, probs: Tensor, n: int) -> Row:
    """Win rates of a policy against the reference: one sample, best of n and worst of n on both sides, (ties 1/2)."""
    rewards, ref = rewards.contiguous(), torch.full_like(probs, 1 / probs.shape[1])
    rates = {
        "single": weighted_win_rate(rewards, probs, rewards, ref),
        "best": weighted_win_rate(rewards, masses(rewards, probs, n), rewards, masses(rewards, ref, n)),
        "worst": weighted_win_rate(
            rewards, masses(rewards, probs, n, worst=True), rewards, masses(rewards, ref, n, worst=True)
        ),
    }
    return {name: float(rate.mean()) for name, rate in rates.items()}


def method(name: str, rewards: Tensor, kl: float, n: int) -> tuple[Optimum, Tensor]:
    """Optimum of a method at this KL, and the reward (P, K) that it trains on.

    "raw": the reward itself; "rank:N": the objective bon:N on u^N; "vbon", "vbon:bound": vBoN, Eq. 5 and 8, for the N,
    not only integers, that has the KL; otherwise a transform of the calibrated reward u, such as "identity".
    Raises ValueError for another name, and for a KL that is out of reach.
    """
    if name == "raw":
        return tilted(lambda beta: rewards / beta, kl), rewards
    u = alignment.calibrate(rewards, rewards)
    first, _, rest = name.partition(":")
    if first == "vbon":
        if rest not in ("", "bound"):
            raise ValueError(f"method {name!r}: expected 'vbon' or 'vbon:bound'; the KL determines its N")
        optimum = of_vbon(rewards, kl, bound=rest == "bound")
        return optimum, vbon_reward(rewards, 1 + 1 / optimum.beta, bound=rest == "bound")
    if first == RANK:
        if not rest.isdecimal():
            raise ValueError(f"method {name!r}: expected 'rank:N', such as 'rank:4'")
        powers = u ** int(rest)
        return at_kl(Goal.of_one(powers, BestOfN(int(rest))), kl), powers
    transform = parse_transform(name, n=n, references=rewards.shape[1])
    optimum = tilted(lambda beta: transform.at(beta)(u) / beta, kl)
    return optimum, transform.at(optimum.beta)(u)


def tilted(logits: Callable[[float], Tensor], kl: float) -> Optimum:
    """Return softmax(logits(beta)) for the beta with this KL: the exact optimum if the reward is fixed."""
    return of_kl(lambda beta: Optimum(logits(beta).log_softmax(1), beta, 0.0, 0.0), kl)


def vbon_reward(rewards: Tensor, n: float, *, bound: bool) -> Tensor:
    """Reward of vBoN at each sample, with the exact F of the samples, all of which differ; Eq. 8 with its smoother."""
    keys = torch.arange(rewards.shape[1]).expand(rewards.shape)
    log_cdf = variational.log_strict_cdf(rewards, keys, rewards, keys, "add-half" if bound else None)
    return variational.vbon_reward(log_cdf, uniform(rewards), n, bound=bound)


def of_vbon(rewards: Tensor, kl: float, *, bound: bool) -> Optimum:
    """Optimum of vBoN for the N with this KL; its ``beta`` is 1 / (N - 1)."""

    def at(beta: float) -> Optimum:
        reward = vbon_reward(rewards, 1 + 1 / beta, bound=bound)
        return Optimum(reward.log_softmax(1), beta, 0.0, 0.0)

    return of_kl(at, kl)


def of_method(name: str, rewards: Tensor, kl: float, n: int) -> Row:
    """One row: win rates, spread of the trained reward within a prompt, and win rates for infinitely many samples.

    ``deviation``: standard deviation of the trained reward under the optimum, over its range on the samples, mean over
    prompts. ``spread_kl``: standard deviation of the KL between prompts.
    """
    optimum, trained = method(name, rewards, kl, n)
    p = optimum.probs
    mean = (p * trained).sum(1, keepdim=True)
    scale = float(trained.amax() - trained.amin())
    row: Row = {"kl": kl, "beta": optimum.beta} | win_rates(rewards, p, n)
    row |= {"deviation": float((p * (trained - mean) ** 2).sum(1).sqrt().mean()) / scale}
    row |= {"spread_kl": float(kl_of(optimum.log_p).std(correction=0))} | dict.fromkeys(
        ("inf_single", "inf_best", "inf_worst")
    )
    if (transform := closed(name, n)) is not None:
        curve = alignment.at_kl(transform, [kl], n)
        rates = (curve.win_rate, curve.bon_win_rate, curve.won_win_rate)
        row |= dict(zip(("inf_single", "inf_best", "inf_worst"), (float(rate) for rate in rates), strict=True))
    return row


def closed(name: str, n: int) -> Transform | None:
    """Transform with the same optimum for infinitely many samples; None if the prompts' KLs differ ("raw")."""
    first, _, rest = name.partition(":")
    if first == "raw":
        return None
    if first == "vbon":
        return parse_transform("log")
    return FixedPoint(int(rest)) if first == RANK else parse_transform(name, n=n)
