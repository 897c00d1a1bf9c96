"""Checks of training: convergence of exact non-linear GRPO to known optima.

Two opposed rewards on [0, 1], r_1 = 1 - y^2 and r_2 = 1 - (1 - y)^2 (IAMA, 3.1), on K cells. First variations are
those of the trainer's objectives, values those of `exact`. Shapes: P policies, K cells, m rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nlgrpo.apps.verify import exact, tabular
from nlgrpo.apps.verify.check_shape import lipschitz
from nlgrpo.apps.verify.claims import Proof, Result
from nlgrpo.objectives.aggregation import Aggregate, SmoothMin, WeightedSum, combine
from nlgrpo.objectives.registry import BestOfN, Mean, Objective

# weights of the mean of both rewards
HALF = torch.tensor([0.5, 0.5], dtype=torch.float64)


def opposed(K: int) -> Tensor:
    """r_1 and r_2 on the midpoints of K cells, (2, K)."""
    y = tabular.cells(K)
    return torch.stack((1 - y**2, 1 - (1 - y) ** 2))


def variation(objective: Objective, rewards: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
    """sum_i weights_i dR_i/dpi for rewards (m, K), policies (P, K) and weights (m,) or (m, P): (P, K)."""
    of_each = [objective.linearize(r.expand_as(probs), probs) for r in rewards]
    return combine(torch.stack(of_each), weights)


def values(rewards: Tensor, probs: Tensor, n: int) -> Tensor:
    """Best-of-n of each reward (m, K) under each policy (P, K), by definition: (m, P)."""
    return torch.stack([exact.best_of_cells(r, probs, n) for r in rewards])


# --- Proposition 3.1 --------------------------------------------------------------------------------------------------


def closed_form_cdf(y: Tensor, n: int) -> Tensor:
    """C(y) = y^a / (y^a + (1 - y)^a), a = 1 / (n - 1): the optimum of Prop. 3.1 (IAMA, G.1)."""
    a = 1 / (n - 1)
    return y**a / (y**a + (1 - y) ** a)


def proposition_3_1(quick: bool) -> Proof:
    """Check that the closed form of Prop. 3.1 is stationary, and that exact updates without KL converge to it.

    The objective is the mean of best-of-N of both rewards. Updates start at the uniform policy, or for N = 2, where
    that is the optimum, at the density 6 y (1 - y).
    """
    K, steps = (200, 300) if quick else (1000, 4000)
    edges = torch.arange(K + 1, dtype=torch.float64) / K
    uniform = torch.full((K,), 1 / K, dtype=torch.float64)
    # masses of 6 y (1 - y), whose CDF is y^2 (3 - 2 y)
    middle = (edges.square() * (3 - 2 * edges)).diff()

    results: list[Result] = []
    densities: dict[str, tuple[Tensor, Tensor | None]] = {}
    paths: dict[str, tuple[Tensor, Tensor]] = {}
    rise = -math.inf
    for n in (2, 4, 8):
        start = middle if n == 2 else uniform
        optimum = closed_form_cdf(edges, n).diff()
        gaps, distances, last = _climb(n, optimum, start, steps)
        results += _optimum_results(n, optimum, start, gaps, distances)
        rise = max(rise, gaps.diff().max().item())
        densities[f"N = {n}"] = (last * K, optimum * K)
        paths[f"N = {n}"] = (gaps, distances)
    results.append(
        Result("No update increases the gap", "App. H.1", "largest increase of the gap", rise, at_most=1e-13)
    )

    mean = _train_mean(uniform)
    densities["mean"] = (mean * K, None)
    rewards = opposed(K)
    gain = values(rewards, mean[None], 4).mean().item() - values(rewards, uniform[None], 4).mean().item()
    far = (tabular.cells(K) - 0.5).abs() > 2 / K
    results.append(
        Result(
            "Plain GRPO converges to a point mass at 0.5",
            "Sec. 3.1",
            "mass more than two cells away",
            mean[far].sum().item(),
            at_most=1e-6,
            note=f"its best-of-4 value minus that of the uniform policy: {gain:+.4f}",
        )
    )
    return Proof(results, {"densities": densities, "paths": paths})


# L of updates without KL: the objective never decreases, 10 to 50 times faster than with L_f r_max
STEP_L = 0.3


def _climb(n: int, optimum: Tensor, start: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gap of the objective and sup distance of CDFs before each update and at the end, and the last policy."""
    rewards = opposed(len(start))
    best = values(rewards, optimum[None], n).mean()
    log_pi = start.log()[None]
    gaps = []
    distances = []
    for _ in range(steps + 1):
        probs = log_pi.exp()
        gaps.append(best - values(rewards, probs, n).mean())
        distances.append((probs - optimum).cumsum(-1).abs().max())
        linear = variation(BestOfN(n), rewards, probs, HALF)
        log_pi = tabular.proximal_step(log_pi, linear, log_pi, L=STEP_L, beta=0.0)
    return torch.stack(gaps), torch.stack(distances), probs[0]


def _optimum_results(n: int, optimum: Tensor, start: Tensor, gaps: Tensor, distances: Tensor) -> list[Result]:
    linear = variation(BestOfN(n), opposed(len(optimum)), optimum[None], HALF)
    spread = (linear.max() - linear.min()).item()

    divergence = tabular.kl(optimum.log(), start.log()).item()
    T = torch.arange(1, len(gaps), dtype=torch.float64)
    share = (gaps[1:] * T / (STEP_L * divergence)).max().item()

    left = (gaps[-1] / gaps[0]).item()
    distance_left = (distances[-1] / distances[0]).item()
    source = "Prop. 3.1"
    return [
        Result(
            f"N = {n}: the closed form is stationary",
            source,
            "spread of dR/dpi",
            spread,
            at_most=1e-12,
            note=f"{len(optimum)} cells",
        ),
        Result(
            f"N = {n}: the gap is O(1/T)",
            source,
            "gap T / (L KL[pi*|pi_0])",
            share,
            at_most=1.0,
            note=f"after {len(gaps) - 1} updates the gap is {left:.1e} of the start's",
        ),
        Result(
            f"N = {n}: the policy approaches the optimum",
            source,
            "sup|C - C*|, last / first",
            distance_left,
            at_most=0.9,
            note="slow because the optimum's density has poles" if n > 2 else "",
        ),
    ]


def _train_mean(start: Tensor) -> Tensor:
    """Train with plain GRPO. Its first variation is constant, so the step size is not limited."""
    rewards = opposed(len(start))
    log_pi = start.log()[None]
    for _ in range(1000):
        linear = variation(Mean(), rewards, log_pi.exp(), HALF)
        log_pi = tabular.proximal_step(log_pi, linear, log_pi, L=1e-4, beta=0.0)
    return log_pi[0].exp()


# --- Theorem 5.2 ------------------------------------------------------------------------------------------------------


def theorem_5_2(quick: bool, n: int = 4) -> Proof:
    """Check L[pi_T] - L[pi*] <= beta KL[pi*|pi_0] / (((L + beta) / L)^T - 1) at every T, for L = L_f r_max (Lemma 5.5).

    Also for a quarter of this L, which suffices (`check_shape.lemma_5_5`). The objective is the mean of best-of-n of
    both rewards on 40 cells; reference and start are different random policies.
    """
    K = 40
    steps = 60 if quick else 300
    reference, start = tabular.reference_and_start(K, torch.Generator().manual_seed(0))
    L_of_lemma = float(lipschitz(BestOfN(n)))  # times r_max, which is 1
    results: list[Result] = []
    slopes = []
    rises = []
    lines = {}
    for L, beta in ((L_of_lemma, 0.3), (L_of_lemma, 1.0), (L_of_lemma, 4.0), (L_of_lemma / 4, 1.0)):
        optimum = _regularised_optimum(n, beta, reference)
        slopes.append(_slope(n, beta, reference, optimum))
        gaps = _regularised_gaps(n, beta, reference, start, optimum, L, steps)
        rises.append(gaps.diff().max().item())
        T = torch.arange(1, steps + 1, dtype=torch.float64)
        bound = beta * tabular.kl(optimum, start) / ((1 + beta / L) ** T - 1)
        results += _rate_results(beta, L, gaps, bound)
        lines[L, beta] = (gaps[1:], bound)
    results += [
        Result("No update increases the gap", "App. H.1", "largest increase of the gap", max(rises), at_most=1e-13),
        Result(
            "The computed optima are stationary", "autograd", "|gradient / pi|, largest", max(slopes), at_most=1e-10
        ),
    ]
    return Proof(results, {"lines": lines, "n": n})


def _rate_results(beta: float, L: float, gaps: Tensor, bound: Tensor) -> list[Result]:
    # a negative gap means a wrong optimum, which another claim checks
    size = gaps.abs()
    # smaller gaps are rounding errors of float64
    exact_enough = (bound > 1e-12) & (size[1:] > 1e-12)
    share = torch.where(exact_enough, size[1:] / bound, 0.0).max().item()
    updates = max(1, int(exact_enough.sum()))
    rate = ((size[updates] / size[0]) ** (1 / updates)).item()
    setting = f"beta = {beta:g}, L = {L:g}"
    return [
        Result(
            f"{setting}: the gap is below the bound",
            "Thm 5.2",
            "gap / bound, largest",
            share,
            at_most=1.0,
            note=f"at each of {updates} updates, until the gap is {gaps[updates]:.0e}",
        ),
        Result(
            f"{setting}: rate",
            "Thm 5.2",
            "factor per update",
            rate,
            at_most=L / (L + beta),
            note="required: L / (L + beta)",
        ),
    ]


def regularised(rewards: Tensor, log_pi: Tensor, n: int, beta: float, reference: Tensor) -> Tensor:
    """R[pi] - beta KL[pi | ref] of policies (P, K), by definition: (P,)."""
    R = values(rewards, log_pi.exp(), n).mean(0)
    return R - beta * tabular.kl(log_pi, reference)


def _regularised_optimum(n: int, beta: float, reference: Tensor) -> Tensor:
    """log pi* (1, K) of a concave objective, by many small updates."""
    rewards = opposed(reference.shape[-1])
    log_pi = reference
    for _ in range(400):
        linear = variation(BestOfN(n), rewards, log_pi.exp(), HALF)
        log_pi = tabular.proximal_step(log_pi, linear, reference, L=1.0, beta=beta)
    return log_pi


def _slope(n: int, beta: float, reference: Tensor, log_pi: Tensor) -> float:
    """Largest |gradient / pi| of the objective by its logits, 0 at the optimum: by autograd through the definition."""
    rewards = opposed(reference.shape[-1])
    logits = log_pi.clone().requires_grad_()
    value = regularised(rewards, logits.log_softmax(-1), n, beta, reference).sum()
    (gradient,) = torch.autograd.grad(value, logits)
    return (gradient / log_pi.exp()).abs().max().item()


def _regularised_gaps(
    n: int, beta: float, reference: Tensor, start: Tensor, optimum: Tensor, L: float, steps: int
) -> Tensor:
    """L[pi_T] - L[pi*] for T = 0 .. steps."""
    rewards = opposed(start.shape[-1])
    best = regularised(rewards, optimum, n, beta, reference)
    log_pi = start
    gaps = []
    for _ in range(steps + 1):
        gaps.append(best - regularised(rewards, log_pi, n, beta, reference))
        linear = variation(BestOfN(n), rewards, log_pi.exp(), HALF)
        log_pi = tabular.proximal_step(log_pi, linear, reference, L=L, beta=beta)
    return torch.cat(gaps)


# --- two rewards at once (Fig. 3b) ------------------------------------------------------------------------------------


# KL to the reference, in nats, as in IAMA 6.2
BUDGET = 0.1


def pareto(quick: bool, n: int = 4) -> Proof:
    """Compare the fronts of two opposed rewards, trained for weighted sum or smooth-min of best-of-n, or for the mean.

    Each policy is the optimum of its objective under the same KL budget to the uniform reference, as in IAMA 6.2.
    """
    K, steps = (40, 60) if quick else (100, 200)
    rewards = opposed(K)
    reference = torch.full((1, K), 1 / K, dtype=torch.float64).log()
    shares = torch.linspace(0, 1, 9 if quick else 33, dtype=torch.float64)
    sums = [WeightedSum((w, 1 - w)) for w in shares.tolist()]
    minima = [SmoothMin(8.0, (w, 1 - w)) for w in shares.tolist()]
    # log-probabilities, one row per weight
    policies = {
        "weighted sum": _front(BestOfN(n), sums, rewards, reference, steps),
        "smooth-min": _front(BestOfN(n), minima, rewards, reference, steps),
        "mean": _front(Mean(), sums, rewards, reference, steps),
        "untrained": reference,
    }

    # both rewards of each policy, (P, 2)
    with_bon = {}
    alone = {}
    for name, log_pi in policies.items():
        with_bon[name] = values(rewards, log_pi.exp(), n).T
        alone[name] = values(rewards, log_pi.exp(), 1).T
    worst = torch.cat(list(with_bon.values())).amin(0)
    area_of_mean = hypervolume(with_bon["mean"], worst)
    equal_weights = with_bon["mean"][len(shares) // 2].mean()
    untrained = with_bon["untrained"].mean()
    averages = (
        f"average of both rewards, best-of-{n}: {equal_weights:.3f} with equal weights of the mean, "
        f"{untrained:.3f} untrained"
    )

    source = "Fig. 3b"
    results = []
    for name in ("weighted sum", "smooth-min"):
        over = margin(with_bon[name], with_bon["mean"])
        ratio = hypervolume(with_bon[name], worst) / area_of_mean
        gain = _gain_alone(alone[name], alone["mean"], shares)
        results += [
            Result(
                f"{name}: dominates the front of the mean",
                source,
                "margin in both rewards",
                over,
                at_least=1e-3,
                note=f"{len(shares)} weights, best-of-{n}",
            ),
            Result(
                f"{name}: larger area under the front", source, "ratio to the mean", ratio, at_least=1.1, note=averages
            ),
            Result(f"{name}: no gain for single samples", source, "gain over the mean", gain, at_most=1e-9),
        ]
    spent = []
    for name in ("weighted sum", "smooth-min", "mean"):
        spent.append((tabular.kl(policies[name], reference) - BUDGET).abs().max().item())
    quantity = f"|KL - {BUDGET}|, largest"
    results.append(Result("All policies use the same KL", "Sec. 6.2", quantity, max(spent), at_most=1e-6))
    return Proof(results, {"n": n, "with_bon": with_bon, "alone": alone})


def _front(
    objective: Objective, aggregates: Sequence[Aggregate], rewards: Tensor, reference: Tensor, steps: int
) -> Tensor:
    """Train by exact updates within the budget: log-probabilities of the policies (P, K), one per aggregate."""
    log_pi = reference.expand(len(aggregates), -1)
    for _ in range(steps):
        probs = log_pi.exp()
        # values R_i and dg/dR_i of each policy, (m, P)
        reached = torch.stack([objective.value(r.expand_as(probs), probs) for r in rewards])
        weights = torch.stack([g.gradient(R) for g, R in zip(aggregates, reached.T, strict=True)], 1)
        linear = variation(objective, rewards, probs, weights)
        log_pi = tabular.budget_step(log_pi, linear, reference, L=1.0, budget=BUDGET)
    return log_pi


def margin(ours: Tensor, theirs: Tensor) -> float:
    """Smallest margin by which points of ``ours`` (P, 2) exceed each point of ``theirs`` (Q, 2) in both coordinates."""
    excess = (ours[None] - theirs[:, None]).amin(-1)
    return excess.amax(1).min().item()


def hypervolume(points: Tensor, worst: Tensor) -> float:
    """Area dominated by points (P, 2), measured from the corner ``worst``."""
    left, height = worst.tolist()
    area = 0.0
    for x, y in sorted(points.tolist(), reverse=True):
        area += (x - left) * max(y - height, 0.0)
        height = max(height, y)
    return area


def _gain_alone(ours: Tensor, mean: Tensor, shares: Tensor) -> float:
    """Largest excess of max w . ours over max w . mean, over all weights w; positive only beyond the mean's front."""
    weights = torch.stack((shares, 1 - shares))
    best_of_ours = (ours @ weights).amax(0)
    best_of_mean = (mean @ weights).amax(0)
    return (best_of_ours - best_of_mean).max().item()
