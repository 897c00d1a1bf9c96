"""Exact optima on samples of the reference: the policy is a probability for each of a prompt's K samples.

The reference gives each sample 1/K. For an objective G of such policies, G[pi] - beta KL[pi | ref] is largest where

    pi = T(pi) = softmax(log ref + dG[pi] / beta)

with dG the first variation: the point at which the step of IAMA's Algorithm 1 stays. Shapes: P prompts, K samples, m
rewards; float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import brentq
from torch import Tensor

from nlgrpo.apps.verify.tabular import kl
from nlgrpo.objectives.aggregation import Aggregate, WeightedSum, combine
from nlgrpo.objectives.base import Objective
from nlgrpo.objectives.registry import Mean

TOLERANCE = 1e-9  # of the total variation between pi and T(pi), at each prompt
MOST_STEPS, MOST_CONJUGATE = 200, 200
FURTHEST = 5.0  # nats that one step changes a log-probability by at most
SHORTEST = 1e-8  # fraction of a step
DIFFERENCE = 1e-4  # relative change of the probabilities in central differences
REACH = 30.0  # largest |log beta|
STALLED = 1e-6  # nats by which the KL grows at least when beta falls by a factor of e^0.5


@dataclass(frozen=True)
class Goal:
    """What is maximised: g(R_1, .., R_m), with R_i the mean over prompts of an objective of ``rewards[i]`` (P, K)."""

    rewards: Sequence[Tensor]
    objectives: Sequence[Objective]
    aggregate: Aggregate

    @classmethod
    def of_one(cls, rewards: Tensor, objective: Objective | None = None) -> Goal:
        """Build the goal of one reward, by default its mean."""
        return cls([rewards], [objective or Mean()], WeightedSum([1.0]))

    def values(self, probs: Tensor) -> Tensor:
        """Return the value of each objective, (m,)."""
        return torch.stack([o.value(r, probs).mean() for o, r in zip(self.objectives, self.rewards, strict=True)])

    def value(self, probs: Tensor) -> float:
        return float(self.aggregate.value(self.values(probs)))

    def linearize(self, probs: Tensor) -> Tensor:
        """Return the first variation at each sample, (P, K), up to a constant per prompt."""
        linear = torch.stack([o.linearize(r, probs) for o, r in zip(self.objectives, self.rewards, strict=True)])
        return combine(linear, self.aggregate.gradient(self.values(probs)))


@dataclass(frozen=True)
class Optimum:
    """Policy ``log_p`` (P, K) at ``beta``, and how far it is from optimal.

    ``residual``: largest total variation between pi and T(pi) over the prompts. ``gap``: beta E KL[pi | T(pi)], by
    which a concave objective minus beta KL can be larger at most.
    """

    log_p: Tensor
    beta: float
    residual: float
    gap: float

    @property
    def probs(self) -> Tensor:
        return self.log_p.exp()

    @property
    def kl(self) -> float:
        """Mean KL to the reference, in nats per sequence."""
        return float(kl_of(self.log_p).mean())


def kl_of(log_p: Tensor) -> Tensor:
    """KL of each prompt's policy to equal probabilities, (P,)."""
    return kl(log_p, torch.full_like(log_p, -math.log(log_p.shape[1])))


def uniform(rewards: Tensor) -> Tensor:
    return torch.full_like(rewards, -math.log(rewards.shape[1]))


def solve(goal: Goal, beta: float, start: Tensor | None = None) -> Optimum:
    """Return the optimum at ``beta``, found from ``start`` (P, K) or from the reference, by Newton's method in log pi.

        (I - T') d = log T(pi) - log pi,    T' d = dG'[pi] (pi d) / beta, centred

    The left side is symmetric and positive for a concave G in the inner product of pi, so that conjugate gradients
    solve it; dG' is a central difference. A step is halved until the objective minus beta KL rises, or the residual
    falls. Raises ValueError if the residual is not below `TOLERANCE` in the end.
    """
    log_ref = uniform(goal.rewards[0])
    log_p = log_ref if start is None else start
    change, away, merit = _state(goal, beta, log_p)
    for _ in range(MOST_STEPS):
        if away <= TOLERANCE:
            return Optimum(log_p, beta, away, beta * float(kl(log_p, log_p + change).mean()))
        d = _newton_direction(goal, beta, log_p.exp(), change, min(0.1, away))
        step = min(1.0, FURTHEST / float(d.abs().max()))
        while step > SHORTEST:
            there = (log_p + step * d).log_softmax(1)
            state = _state(goal, beta, there)
            if state[1] < 0.9 * away or state[2] > merit:
                break
            step /= 2
        else:
            break
        log_p, (change, away, merit) = there, state
    raise ValueError(f"no optimum at beta {beta:g}: a residual of {away:.1e} is left; use a smaller KL")


def _state(goal: Goal, beta: float, log_p: Tensor) -> tuple[Tensor, float, float]:
    """Return log T(pi) - log pi, the largest total variation between both, and the objective minus beta KL."""
    probs = log_p.exp()
    target = (goal.linearize(probs) / beta).log_softmax(1)
    away = (probs - target.exp()).abs().sum(1) / 2
    return target - log_p, float(away.max()), goal.value(probs) - beta * float(kl_of(log_p).mean())


def _newton_direction(goal: Goal, beta: float, probs: Tensor, change: Tensor, tolerance: float) -> Tensor:
    """Solve (I - T') d = ``change`` up to a relative ``tolerance``, by conjugate gradients."""

    def centred(x: Tensor) -> Tensor:
        return x - (probs * x).sum(1, keepdim=True)

    def inner(x: Tensor, y: Tensor) -> float:
        return float((probs * x * y).sum())

    def apply(d: Tensor) -> Tensor:
        small = DIFFERENCE / float(d.abs().max())
        above, below = (goal.linearize(probs * (1 + side * small * d)) for side in (1, -1))
        return d - centred(above - below) / (2 * small * beta)

    rest = centred(change)
    d, direction, size = torch.zeros_like(rest), rest, inner(rest, rest)
    enough = tolerance**2 * size
    for _ in range(MOST_CONJUGATE):
        image = apply(direction)
        curvature = inner(direction, image)
        if curvature <= 0:  # only for objectives that are not concave
            break
        d, rest = d + size / curvature * direction, rest - size / curvature * image
        before, size = size, inner(rest, rest)
        if size <= enough:
            break
        direction = rest + size / before * direction
    return d if bool(d.any()) else centred(change)


def at_kl(goal: Goal, target: float) -> Optimum:
    """Return the optimum with a mean KL of ``target`` nats. Raises ValueError for a KL that is out of reach."""
    last = solve(goal, 1.0)

    def at(beta: float) -> Optimum:
        nonlocal last
        last = solve(goal, beta, last.log_p)
        return last

    return of_kl(at, target)


def of_kl(at: Callable[[float], Optimum], target: float) -> Optimum:
    """Return ``at(beta)`` for the beta at which its KL, which falls with beta, is ``target``.

    Raises ValueError for a KL that is not positive, and for one that is out of reach.
    """
    if not (math.isfinite(target) and target > 0):
        raise ValueError(f"KL {target}: expected a number > 0, in nats per sequence")
    log_beta, excess = 0.0, at(1.0).kl - target
    step = 0.5 if excess > 0 else -0.5
    while abs(log_beta) < REACH:
        further = at(math.exp(log_beta + step)).kl - target
        if further * excess <= 0:
            root = brentq(lambda x: at(math.exp(x)).kl - target, log_beta, log_beta + step, xtol=1e-8, rtol=1e-12)
            return at(math.exp(root))
        if step < 0 and further + target > 1e-4 and further - excess < STALLED:
            break  # a smaller beta changes nothing: the objective is largest at a finite KL
        log_beta, excess = log_beta + step, further
    raise ValueError(f"KL {target:g} is out of reach, the furthest is {target + excess:.3f}: use a smaller one")
