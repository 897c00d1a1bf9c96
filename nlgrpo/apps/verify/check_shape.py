"""Checks of the shape of objectives (IAMA, 5.3): concavity, smoothness, and the error of a group's first variation.

Shapes: A atoms, M samples per group, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from nlgrpo.apps.verify import tabular
from nlgrpo.apps.verify.check_estimators import THREE, THREE_REWARDS, hump
from nlgrpo.apps.verify.claims import Proof, Result
from nlgrpo.objectives.aggregation import Aggregate, Min, SmoothMin, WeightedSum
from nlgrpo.objectives.registry import (
    BestOfN,
    BestOfPoisson,
    CVaR,
    Distortion,
    EntropicRisk,
    Mean,
    Objective,
    RankBased,
    RaoDiversity,
    SoftBestOfN,
    WorstOfN,
)

RANKED = (BestOfN(2), BestOfN(4), BestOfN(8), BestOfPoisson(4.0))


def lipschitz(objective: RankBased) -> float:
    """L_f, the maximum of |f'| on [0, 1]: N (N - 1) for N z^(N-1), rate^2 for rate e^{rate (z-1)}."""
    match objective:
        case BestOfN(n) | WorstOfN(n):
            return n * (n - 1)
        case BestOfPoisson(rate):
            return rate**2
    raise ValueError(f"no Lipschitz constant is known for {objective}; expected BestOfN, WorstOfN or BestOfPoisson.")


# --- Lemmas 5.4 and 5.5 -----------------------------------------------------------------------------------------------


def rising(z: Tensor) -> Tensor:
    """An increasing f other than those of best-of-N and best-of-Poisson."""
    return 0.5 + z**2


def _pairs(count: int, A: int = 6) -> tuple[Tensor, Tensor]:
    """Pairs of random policies (count, A), from nearly uniform to nearly deterministic."""
    generator = torch.Generator().manual_seed(0)
    sharpness = torch.rand(2, count, 1, generator=generator, dtype=torch.float64) * 5
    logits = torch.randn(2, count, A, generator=generator, dtype=torch.float64) * sharpness
    here, there = logits.softmax(-1)
    return here, there


ATOMS = torch.tensor([[0.0, 0.2, 0.2, 0.5, 0.9, 1.0], [0.7, 1.0, 0.0, 0.1, 0.4, 0.4]], dtype=torch.float64)


def lemma_5_4(quick: bool) -> Proof:
    """Check R[l pi + (1 - l) pi'] >= l R[pi] + (1 - l) R[pi'] for increasing f, and their sums and (smooth) minima.

    Objectives that the lemma excludes must violate it; the largest violation is measured.
    """
    here, there = _pairs(2_000 if quick else 20_000)
    rewards = ATOMS[0]
    concave = [Mean(), BestOfN(2), BestOfN(8), BestOfPoisson(4.0), Distortion(rising), EntropicRisk(3.0)]
    excluded = [WorstOfN(4), CVaR(0.3), Distortion(hump), SoftBestOfN(0.1), EntropicRisk(-3.0)]
    results = []
    for objective in concave:
        source = "App. C" if isinstance(objective, EntropicRisk) else "Lemma 5.4"
        violation = _violation(partial(_value, objective, rewards), here, there)
        results.append(_concave(objective.name, source, violation))

    kernel = tabular.similarity(rewards)
    violation = _violation(partial(_value, RaoDiversity(), kernel), here, there)
    results.append(_concave("rao with a positive kernel", "App. C", violation))

    for aggregate in (WeightedSum((0.3, 0.7)), Min(), SmoothMin(8.0, (0.3, 0.7))):
        violation = _violation(partial(_joint, aggregate, BestOfN(4)), here, there)
        results.append(_concave(f"{type(aggregate).__name__} of two bon:4", "Sec. 5.3", violation))

    for objective in excluded:
        value = partial(_value, objective, rewards)
        violation = _violation(value, here, there)
        convex = _violation(partial(_negative, value), here, there) < 1e-12
        results.append(
            Result(
                f"{objective.name} is not concave",
                "not in Lemma 5.4",
                "largest violation",
                violation,
                at_least=1e-3,
                note="convex" if convex else "neither concave nor convex",
            )
        )
    return Proof(results)


def _concave(name: str, source: str, violation: float) -> Result:
    return Result(f"{name} is concave", source, "largest violation", violation, at_most=1e-12)


def _value(objective: Objective, values: Tensor, probs: Tensor) -> Tensor:
    """Value of an objective for rewards (A,) or a kernel (A, A) at policies (P, A): (P,)."""
    return objective.value(values.expand(len(probs), *values.shape), probs)


def _negative(value: Callable[[Tensor], Tensor], probs: Tensor) -> Tensor:
    return -value(probs)


def _joint(aggregate: Aggregate, objective: Objective, probs: Tensor) -> Tensor:
    """Aggregate of an objective of both rewards at policies (P, A): (P,)."""
    of_each = [_value(objective, rewards, probs) for rewards in ATOMS]
    return aggregate.value(torch.stack(of_each))


def _violation(value: Callable[[Tensor], Tensor], here: Tensor, there: Tensor) -> float:
    """Largest l R[pi] + (1 - l) R[pi'] - R[l pi + (1 - l) pi']: at most 0 for a concave R."""
    start = value(here)
    end = value(there)
    largest = []
    for s in (0.1, 0.3, 0.5, 0.7, 0.9):
        chord = s * start + (1 - s) * end
        between = value(s * here + (1 - s) * there)
        largest.append((chord - between).max())
    return torch.stack(largest).max().item()


def lemma_5_5(quick: bool) -> Proof:
    """Check R[pi] + <dR[pi], pi' - pi> - R[pi'] <= L_f r_max KL[pi' | pi] for near and far pairs.

    L_f r_max / 4 suffices: |C' - C| is at most the total variation, half of the L1 distance used in the proof.
    """
    here, far = _pairs(2_000 if quick else 20_000)
    pairs = [(here, here + s * (far - here)) for s in (0.05, 0.3, 1.0)]
    # where the bound is tight for best-of-2
    tight = torch.tensor([[0.5, 0, 0, 0, 0, 0.5]], dtype=torch.float64)
    near = torch.tensor([[0.49, 0, 0, 0, 0, 0.51]], dtype=torch.float64)
    pairs.append((tight, near))

    # L / (L_f r_max)
    shares = {}
    for objective in RANKED:
        needed = max(_smoothness(objective, pi, other) for pi, other in pairs)
        shares[objective.name] = needed / lipschitz(objective)
    share = max(shares.values())
    note = ", ".join(f"{name} {share:.3f}" for name, share in shares.items())
    quantity = "largest required L / (L_f r_max)"
    quarter = "Also with a quarter of the lemma's constant"
    return Proof(
        [
            Result("Smooth relative to the KL", "Lemma 5.5", quantity, share, at_most=1.0, note=note),
            Result(quarter, "`lemma_5_5`", quantity, share, at_most=0.25 + 1e-9),
        ]
    )


def _smoothness(objective: Objective, here: Tensor, there: Tensor) -> float:
    """Smallest L that is valid for all pairs: distance from the tangent divided by KL[pi' | pi]; rewards of range 1."""
    rewards = ATOMS[0]
    linear = objective.linearize(rewards.expand_as(here), here)
    tangent = _value(objective, rewards, here) + (linear * (there - here)).sum(-1)
    distance = tangent - _value(objective, rewards, there)
    divergence = tabular.kl(there.log(), here.log())
    return (distance / divergence)[divergence > 1e-8].max().item()


# --- a group's first variation (Lemma 5.6) ----------------------------------------------------------------------------


def lemma_5_6(quick: bool) -> Proof:
    """Check E |dR[pi^] - dR[pi]|_sp^2 <= L_f^2 r_max^2 / M, with |.|_sp half the span over all responses, drawn or not.

    Uses all groups from three atoms, and random groups from 200 cells: the bound does not depend on the number of
    responses. For best-of-2 and two atoms of probability 1/2 the error is exactly 1/16 of the bound, because
    E (C^ - C)^2 = 1 / (4 M).
    """
    sizes = [16, 32, 64] if quick else [8, 16, 32, 64, 128]
    trials = 2_000 if quick else 10_000

    all_of_three = [_frequencies(*tabular.all_counts(THREE, M)) for M in sizes]
    where = "3 atoms, all groups"
    shares = _shares_of_bound(THREE_REWARDS[0], THREE, sizes, all_of_three)
    results = _error_results(where, sizes, shares)
    drawn = {where: shares}

    uniform = torch.full((200,), 1 / 200, dtype=torch.float64)
    random = [_drawn_frequencies(200, M, trials) for M in sizes]
    where = "200 cells, random groups"
    shares = _shares_of_bound(tabular.cells(200), uniform, sizes, random)
    results += _error_results(where, sizes, shares)
    drawn[where] = shares

    two = torch.tensor([0.0, 1.0], dtype=torch.float64)
    fair = torch.tensor([0.5, 0.5], dtype=torch.float64)
    off = 0.0
    for M in sizes:
        share = _share_of_bound(BestOfN(2), two, fair, M, *_frequencies(*tabular.all_counts(fair, M)))
        off = max(off, abs(share - 1 / 16))
    claim = "bon:2, two equal atoms: 1/16 of the bound"
    results.append(Result(claim, "Lemma 5.6", "|error / bound - 1/16|, largest", off, at_most=1e-12))
    return Proof(results, {"sizes": sizes, "shares": drawn})


def _error_results(where: str, sizes: Sequence[int], shares: dict[str, list[float]]) -> list[Result]:
    largest = max(max(share) for share in shares.values())
    orders = [1 + math.log2(share[-2] / share[-1]) for share in shares.values()]
    order = max(orders, key=lambda p: abs(p - 1))
    return [
        Result(
            f"Error within the bound: {where}",
            "Lemma 5.6",
            "error / bound, largest",
            largest,
            at_most=1.0,
            note=f"{', '.join(shares)}; M = {sizes[0]} to {sizes[-1]}",
        ),
        Result(
            f"Error is O(1/M): {where}",
            "Lemma 5.6",
            f"p of M^-p, M = {sizes[-2]} to {sizes[-1]}",
            order,
            at_least=0.8,
            at_most=1.2,
        ),
    ]


def _frequencies(atoms: Tensor, chance: Tensor) -> tuple[Tensor, Tensor]:
    """Empirical distributions (G, A) of groups, and their probabilities."""
    return torch.nn.functional.one_hot(atoms).double().mean(1), chance


def _drawn_frequencies(A: int, M: int, trials: int) -> tuple[Tensor, Tensor]:
    """The same for random groups of M equally likely atoms."""
    atoms = torch.randint(A, (trials, M), generator=torch.Generator().manual_seed(M))
    ones = torch.ones(trials, M, dtype=torch.float64)
    counts = torch.zeros(trials, A, dtype=torch.float64).scatter_add(1, atoms, ones)
    chance = torch.full((trials,), 1 / trials, dtype=torch.float64)
    return counts / M, chance


def _shares_of_bound(
    rewards: Tensor, probs: Tensor, sizes: Sequence[int], groups: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, list[float]]:
    """Name of an objective: `_share_of_bound` at each M."""
    shares = {}
    for objective in RANKED:
        of_each = []
        for M, (frequencies, chance) in zip(sizes, groups, strict=True):
            of_each.append(_share_of_bound(objective, rewards, probs, M, frequencies, chance))
        shares[objective.name] = of_each
    return shares


def _share_of_bound(
    objective: RankBased, rewards: Tensor, probs: Tensor, M: int, frequencies: Tensor, chance: Tensor
) -> float:
    """E |dR[pi^] - dR[pi]|_sp^2 over the groups, divided by L_f^2 r_max^2 / M."""
    truth = objective.linearize(rewards[None], probs)
    error = objective.linearize(rewards.expand_as(frequencies), frequencies) - truth
    half_span = (error.amax(1) - error.amin(1)) / 2
    expected = (chance * half_span.square()).sum().item()
    r_max = (rewards.max() - rewards.min()).item()
    return expected * M / (lipschitz(objective) * r_max) ** 2
