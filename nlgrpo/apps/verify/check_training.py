"""Checks of training: convergence of exact non-linear GRPO to known optima.

Two opposed rewards on [0, 1], r_1 = 1 - y^2 and r_2 = 1 - (1 - y)^2 (IAMA, 3.1), on K cells. First variations are
those of the trainer's objectives, values those of `exact`. Shapes: P policies, K cells, m rewards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nlgrpo.apps.verify import exact, tabular
from nlgrpo.apps.verify.check_shape import lipschitz
from nlgrpo.apps.verify.claims import Proof, Result
from nlgrpo.objectives.aggregation import Aggregate, SmoothMin, WeightedSum, combine
from nlgrpo.objectives.registry import BestOfN, Mean, Objective


def opposed(K: int) -> Tensor:
    """r_1 and r_2 on the midpoints of K cells, (2, K)."""
    y = tabular.cells(K)
    return torch.stack((1 - y**2, 1 - (1 - y) ** 2))


def variation(objective: Objective, rewards: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
    """sum_i weights_i dR_i/dpi for rewards (m, K), policies (P, K) and weights (m,) or (m, P): (P, K)."""
    return combine(torch.stack([objective.linearize(r.expand_as(probs), probs) for r in rewards]), weights)


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
    middle = edges.square().mul(3 - 2 * edges).diff()  # masses of 6 y (1 - y)
    results: list[Result] = []
    densities: dict[str, tuple[Tensor, Tensor | None]] = {}
    paths: dict[str, tuple[Tensor, Tensor]] = {}
    for n in (2, 4, 8):
        optimum = closed_form_cdf(edges, n).diff()
        gaps, distances, last = _climb(n, optimum, middle if n == 2 else uniform, steps)
        densities[f"N = {n}"] = (last * K, optimum * K)
        paths[f"N = {n}"] = (gaps, distances)
        results += _optimum_results(n, optimum, gaps, distances, _divergence(optimum, middle if n == 2 else uniform))
    rise = max(gaps.diff().max().item() for gaps, _ in paths.values())
    results.append(
        Result("No update increases the gap", "App. H.1", "largest increase of the gap", rise, at_most=1e-13)
    )
    naive = _train_mean(uniform)
    densities["mean"] = (naive * K, None)
    away = naive[(tabular.cells(K) - 0.5).abs() > 2 / K].sum().item()
    gain = values(opposed(K), naive[None], 4).mean().item() - values(opposed(K), uniform[None], 4).mean().item()
    note = f"its best-of-4 value minus that of the uniform policy: {gain:+.4f}"
    claim = "Plain GRPO converges to a point mass at 0.5"
    results.append(Result(claim, "Sec. 3.1", "mass more than two cells away", away, at_most=1e-6, note=note))
    return Proof(results, {"densities": densities, "paths": paths})


STEP_L = 0.3  # L of updates without KL: the objective never decreases, 10 to 50 times faster than with L_f r_max


def _climb(n: int, optimum: Tensor, start: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gap of the objective and sup distance of CDFs before each update and at the end, and the last policy."""
    rewards = opposed(len(start))
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    best = values(rewards, optimum[None], n).mean()
    log_pi = start.log()[None]
    gaps = []
    distances = []
    for _ in range(steps + 1):
        probs = log_pi.exp()
        gaps.append(best - values(rewards, probs, n).mean())
        distances.append((probs - optimum).cumsum(-1).abs().max())
        linear = variation(BestOfN(n), rewards, probs, half)
        log_pi = tabular.proximal_step(log_pi, linear, log_pi, L=STEP_L, beta=0.0)
    return torch.stack(gaps), torch.stack(distances), probs[0]


def _optimum_results(n: int, optimum: Tensor, gaps: Tensor, distances: Tensor, divergence: float) -> list[Result]:
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    linear = variation(BestOfN(n), opposed(len(optimum)), optimum[None], half)
    steps = torch.arange(1, len(gaps), dtype=torch.float64)
    share = (gaps[1:] * steps / (STEP_L * divergence)).max().item()
    left = (gaps[-1] / gaps[0]).item()
    off = (distances[-1] / distances[0]).item()
    spread = (linear.max() - linear.min()).item()
    note = f"after {len(gaps) - 1} updates the gap is {left:.1e} of the start's"
    source = "Prop. 3.1"
    cells = f"{len(optimum)} cells"
    slow = "slow because the optimum's density has poles" if n > 2 else ""
    return [
        Result(
            f"N = {n}: the closed form is stationary", source, "spread of dR/dpi", spread, at_most=1e-12, note=cells
        ),
        Result(f"N = {n}: the gap is O(1/T)", source, "gap T / (L KL[pi*|pi_0])", share, at_most=1.0, note=note),
        Result(
            f"N = {n}: the policy approaches the optimum",
            source,
            "sup|C - C*|, last / first",
            off,
            at_most=0.9,
            note=slow,
        ),
    ]


def _divergence(p: Tensor, q: Tensor) -> float:
    return tabular.kl(p.log(), q.log()).item()


def _train_mean(start: Tensor) -> Tensor:
    """Train with plain GRPO. Its first variation is constant, so the step size is not limited."""
    log_pi = start.log()[None]
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    for _ in range(1000):
        linear = variation(Mean(), opposed(len(start)), log_pi.exp(), half)
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
    generator = torch.Generator().manual_seed(0)
    reference, start = torch.randn(2, 1, K, generator=generator, dtype=torch.float64).log_softmax(-1)
    paper = float(lipschitz(BestOfN(n)))  # times r_max, which is 1
    results: list[Result] = []
    residuals = []
    lines = {}
    for L, beta in ((paper, 0.3), (paper, 1.0), (paper, 4.0), (paper / 4, 1.0)):
        optimum, residual = _regularised_optimum(n, beta, reference)
        gaps = _regularised_gaps(n, beta, reference, start, optimum, L, steps)
        T = torch.arange(1, steps + 1, dtype=torch.float64)
        bound = beta * tabular.kl(optimum, start) / ((1 + beta / L) ** T - 1)
        results += _rate_results(beta, L, gaps, bound)
        residuals.append(residual)
        lines[L, beta] = (gaps[1:], bound)
    rise = max(gaps.diff().max().item() for gaps, _ in lines.values())
    stationary = "The computed optima are stationary"
    results += [
        Result("No update increases the gap", "App. H.1", "largest increase of the gap", rise, at_most=1e-13),
        Result(stationary, "autograd", "|gradient / pi|, largest", max(residuals), at_most=1e-10),
    ]
    return Proof(results, {"lines": lines, "n": n})


def _rate_results(beta: float, L: float, gaps: Tensor, bound: Tensor) -> list[Result]:
    size = gaps.abs()  # a negative gap means a wrong optimum, which another claim checks
    exact_enough = (bound > 1e-12) & (size[1:] > 1e-12)  # smaller gaps are rounding errors of float64
    share = torch.where(exact_enough, size[1:] / bound, 0.0).max().item()
    updates = max(1, int(exact_enough.sum()))
    rate = ((size[updates] / size[0]) ** (1 / updates)).item()
    theory = L / (L + beta)
    source = "Thm 5.2"
    setting = f"beta = {beta:g}, L = {L:g}"
    note = f"at each of {updates} updates, until the gap is {gaps[updates]:.0e}"
    return [
        Result(f"{setting}: the gap is below the bound", source, "gap / bound, largest", share, at_most=1.0, note=note),
        Result(f"{setting}: rate", source, "factor per update", rate, at_most=theory, note="required: L / (L + beta)"),
    ]


def regularised(rewards: Tensor, log_pi: Tensor, n: int, beta: float, reference: Tensor) -> Tensor:
    """R[pi] - beta KL[pi | ref] of policies (P, K), by definition: (P,)."""
    return values(rewards, log_pi.exp(), n).mean(0) - beta * tabular.kl(log_pi, reference)


def _regularised_optimum(n: int, beta: float, reference: Tensor) -> tuple[Tensor, float]:
    """Return log pi* (1, K) of a concave objective, and the size of its gradient by autograd: 0 at the optimum.

    Computed by many small updates; the gradient is that of the definition and independent of them.
    """
    rewards = opposed(reference.shape[-1])
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    log_pi = reference
    for _ in range(400):
        linear = variation(BestOfN(n), rewards, log_pi.exp(), half)
        log_pi = tabular.proximal_step(log_pi, linear, reference, L=1.0, beta=beta)
    logits = log_pi.clone().requires_grad_()
    value = regularised(rewards, logits.log_softmax(-1), n, beta, reference).sum()
    (slope,) = torch.autograd.grad(value, logits)
    return log_pi, (slope / log_pi.exp()).abs().max().item()


def _regularised_gaps(
    n: int, beta: float, reference: Tensor, start: Tensor, optimum: Tensor, L: float, steps: int
) -> Tensor:
    """L[pi_T] - L[pi*] for T = 0 .. steps."""
    rewards = opposed(start.shape[-1])
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    best = regularised(rewards, optimum, n, beta, reference)
    log_pi = start
    gaps = []
    for _ in range(steps + 1):
        gaps.append(best - regularised(rewards, log_pi, n, beta, reference))
        linear = variation(BestOfN(n), rewards, log_pi.exp(), half)
        log_pi = tabular.proximal_step(log_pi, linear, reference, L=L, beta=beta)
    return torch.cat(gaps)


# --- two rewards at once (Fig. 3b) ------------------------------------------------------------------------------------


BUDGET = 0.1  # KL to the reference, in nats, as in IAMA 6.2


def pareto(quick: bool, n: int = 4) -> Proof:
    """Compare the fronts of two opposed rewards, trained for weighted sum or smooth-min of best-of-n, or for the mean.

    Each policy is the optimum of its objective under the same KL budget to the uniform reference, as in IAMA 6.2.
    """
    K, steps = (40, 60) if quick else (100, 200)
    shares = torch.linspace(0, 1, 9 if quick else 33, dtype=torch.float64)
    rewards = opposed(K)
    reference = torch.full((1, K), 1 / K, dtype=torch.float64).log()
    sums = [WeightedSum((w, 1 - w)) for w in shares.tolist()]
    minima = [SmoothMin(8.0, (w, 1 - w)) for w in shares.tolist()]
    trained = {
        "weighted sum": _front(BestOfN(n), sums, rewards, reference, steps),
        "smooth-min": _front(BestOfN(n), minima, rewards, reference, steps),
        "mean": _front(Mean(), sums, rewards, reference, steps),
    }
    policies = trained | {"untrained": reference}
    with_bon = {name: values(rewards, log_pi.exp(), n).T for name, log_pi in policies.items()}
    alone = {name: values(rewards, log_pi.exp(), 1).T for name, log_pi in policies.items()}
    budgets = torch.cat([tabular.kl(log_pi, reference) for log_pi in trained.values()])
    worst = torch.cat(list(with_bon.values())).amin(0)
    area = {name: hypervolume(points, worst) for name, points in with_bon.items()}
    gains = {name: _gain_alone(alone[name], alone["mean"], shares) for name in ("weighted sum", "smooth-min")}
    middle = with_bon["mean"][len(shares) // 2].mean()
    untrained = with_bon["untrained"].mean()
    note = (
        f"average of both rewards, best-of-{n}: {middle:.3f} with equal weights of the mean, {untrained:.3f} untrained"
    )
    results = []
    source = "Fig. 3b"
    for name, gain in gains.items():
        over = margin(with_bon[name], with_bon["mean"])
        ratio = area[name] / area["mean"]
        results += [
            Result(f"{name}: dominates the front of the mean", source, "margin in both rewards", over, at_least=1e-3,
                   note=f"{len(shares)} weights, best-of-{n}"),
            Result(f"{name}: larger area under the front", source, "ratio to the mean", ratio, at_least=1.1, note=note),
            Result(f"{name}: no gain for single samples", source, "gain over the mean", gain, at_most=1e-9),
        ]  # fmt: skip
    spent = (budgets - BUDGET).abs().max().item()
    results.append(Result("All policies use the same KL", "Sec. 6.2", f"|KL - {BUDGET}|, largest", spent, at_most=1e-6))
    return Proof(results, {"n": n, "with_bon": with_bon, "alone": alone})


def _front(
    objective: Objective, aggregates: Sequence[Aggregate], rewards: Tensor, reference: Tensor, steps: int
) -> Tensor:
    """Train by exact updates within the budget: log-probabilities of the policies (P, K), one per aggregate."""
    log_pi = reference.expand(len(aggregates), -1)
    for _ in range(steps):
        probs = log_pi.exp()
        reached = torch.stack([objective.value(r.expand_as(probs), probs) for r in rewards])
        weights = torch.stack([g.gradient(v) for g, v in zip(aggregates, reached.T, strict=True)], 1)
        linear = variation(objective, rewards, probs, weights)
        log_pi = tabular.budget_step(log_pi, linear, reference, L=1.0, budget=BUDGET)
    return log_pi


def margin(ours: Tensor, theirs: Tensor) -> float:
    """Smallest margin by which points of ``ours`` (P, 2) exceed each point of ``theirs`` (Q, 2) in both coordinates."""
    return (ours[None] - theirs[:, None]).amin(-1).amax(1).min().item()


def hypervolume(points: Tensor, worst: Tensor) -> float:
    """Area dominated by points (P, 2), measured from the corner ``worst``."""
    area = 0.0
    height = worst[1].item()
    for x, y in sorted(points.tolist(), reverse=True):
        area += (x - worst[0].item()) * max(y - height, 0.0)
        height = max(height, y)
    return area


def _gain_alone(ours: Tensor, mean: Tensor, shares: Tensor) -> float:
    """Largest excess of max w . ours over max w . mean, over all weights w; positive only beyond the mean's front."""
    weights = torch.stack((shares, 1 - shares))
    return ((ours @ weights).amax(0) - (mean @ weights).amax(0)).max().item()
