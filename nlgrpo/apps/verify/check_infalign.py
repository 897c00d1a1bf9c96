"""Checks of InfAlign: calibrated rewards, win rates and KL of a transform, and the best transform for best-of-N.

Win rates are computed from their definition, by densities in `calibrated` or over all draws in `exact`, never by the
integrals of Theorem 3. Shapes: P prompts, M samples, K samples of the reference, or K responses; u = calibrated reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from scipy.stats import kstwo
from torch import Tensor

from nlgrpo.apps.verify import exact, tabular
from nlgrpo.apps.verify.calibrated import Density, points
from nlgrpo.apps.verify.check_estimators import THREE, THREE_REWARDS
from nlgrpo.apps.verify.claims import Proof, Result
from nlgrpo.calibration import alignment, fixed_point
from nlgrpo.calibration.transforms import parse_transform
from nlgrpo.objectives.rank_based import OfN
from nlgrpo.objectives.registry import BestOfN, WorstOfN

# --- calibration (Lemmas 3 and 6) -------------------------------------------------------------------------------------

INCREASING: Sequence[Callable[[Tensor], Tensor]] = (torch.exp, torch.atan, lambda r: r**3, lambda r: 1000 * r - 7)
LEVELS = (0.5, 0.2, 0.1, 0.05, 0.01)  # delta of Lemma 6


def calibration(quick: bool) -> Proof:
    """Check Eq. 12 by counting pairs, its invariance (Lemma 3), and its error (Lemma 6)."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randint(-16, 17, (50, 20), generator=generator).double() / 8
    reference = torch.randint(-16, 17, (50, 30), generator=generator).double() / 8
    ours = alignment.calibrate(rewards, reference)
    shares = exact.wins(rewards[:, :, None], reference[:, None, :]).mean(-1)
    off = (ours - shares).abs().max().item()

    moved = []
    for f in INCREASING:
        moved.append((alignment.calibrate(f(rewards), f(reference)) - ours).abs().max().item())
    joined = alignment.calibrate(rewards.floor(), reference.floor())
    moved_by_floor = (joined - ours).abs().max().item()
    largest = "largest difference"
    return Proof(
        [
            Result(
                "Calibrated rewards are shares of pairs",
                "Eq. 12",
                largest,
                off,
                at_most=1e-15,
                note="50 prompts, 20 rewards, K = 30, with ties",
            ),
            Result(
                "No increasing function changes them",
                "Lemma 3",
                largest,
                max(moved),
                at_most=0.0,
                note="exp, atan, cube and an affine function",
            ),
            Result(
                "A function that is not strictly increasing does",
                "not in Lemma 3",
                largest,
                moved_by_floor,
                at_least=0.05,
                note="floor, which joins rewards",
            ),
            _dkw_finite(quick),
            *_dkw_continuous(quick, generator),
        ]
    )


def _bound(delta: float, K: int) -> float:
    return math.sqrt(math.log(2 / delta) / (2 * K))


def _dkw_finite(quick: bool) -> Result:
    """P(largest error > bound) / delta, exactly, over all groups of K samples of three responses."""
    sizes = [4, 16] if quick else [2, 4, 8, 16, 32, 64]
    share = 0.0
    for K in sizes:
        atoms, chance = tabular.all_counts(THREE, K)
        for rewards in THREE_REWARDS:
            truth = (exact.wins(rewards[:, None], rewards[None, :]) * THREE).sum(1)
            found = alignment.calibrate(rewards.expand(len(atoms), -1), rewards[atoms])
            error = (found - truth).abs().amax(1)
            for delta in LEVELS:
                rate = chance[error > _bound(delta, K) + 1e-12].sum().item()
                share = max(share, rate / delta)
    return Result(
        "The error exceeds the bound at most at rate delta: 3 responses",
        "Lemma 6",
        "rate / delta, largest",
        share,
        at_most=1.0,
        note=f"delta = {', '.join(map(str, LEVELS))}; K = {', '.join(map(str, sizes))}",
    )


def _dkw_continuous(quick: bool, generator: torch.Generator) -> list[Result]:
    """The same for continuous rewards, where the error has Kolmogorov's exact distribution."""
    trials = 2_000 if quick else 20_000
    share = 0.0
    exact_share = 0.0
    off = 0.0
    for K in (10, 100):
        reference = torch.rand(trials, K, generator=generator, dtype=torch.float64)
        # where the error is largest
        beside = torch.cat((reference - 1e-9, reference + 1e-9), 1)
        error = (alignment.calibrate(beside, reference) - beside).abs().amax(1)
        for delta in LEVELS:
            bound = _bound(delta, K)
            rate = (error > bound).double().mean().item()
            exact_rate = float(kstwo.sf(bound, K))
            standard_error = math.sqrt(exact_rate * (1 - exact_rate) / trials)
            share = max(share, rate / delta)
            exact_share = max(exact_share, exact_rate / delta)
            off = max(off, abs(rate - exact_rate) / standard_error)
    return [
        Result(
            "The error exceeds the bound at most at rate delta: continuous",
            "Lemma 6",
            "rate / delta, largest",
            share,
            at_most=1.0,
            note=f"exactly: {exact_share:.3f}",
        ),
        Result(
            "Its rate is that of Kolmogorov's distribution",
            "Lemma 6",
            "largest error, in standard errors",
            off,
            at_most=4.5,
            note=f"K = 10 and 100, {trials:,} groups",
        ),
    ]


# --- Theorem 3 --------------------------------------------------------------------------------------------------------

# name: definition, values of beta
PHI: Mapping[str, tuple[Callable[[Tensor], Tensor], Sequence[float]]] = {
    "identity": (lambda u: u, (0.5, 0.1, 0.05)),
    "log": (lambda u: u.log(), (2.0, 0.5, 0.2)),
    "exp:10": (lambda u: (10 * u).exp(), (2e4, 5e3, 2e3)),
    "exp:-10": (lambda u: -(-10 * u).exp(), (0.5, 0.1, 0.05)),
}
SIZES = (2, 4, 8)  # N


def theorem_3(quick: bool) -> Proof:
    """Compare the curves of Theorem 3 with win rates and KL by definition, for continuous and for finite policies."""
    u, _ = points()
    # largest errors
    kl = 0.0
    best = 0.0
    worst = 0.0
    single = 0.0
    for name, (phi, betas) in PHI.items():
        for n in SIZES:
            curve = alignment.alignment_curve(name, betas, n)
            for i, beta in enumerate(betas):
                policy = Density.of(phi(u) / beta)
                kl = max(kl, abs(float(curve.kl[i]) - policy.kl))
                best = max(best, abs(float(curve.bon_win_rate[i]) - policy.win_rate(n)))
                worst = max(worst, abs(float(curve.won_win_rate[i]) - policy.win_rate(n, worst=True)))
                single = max(single, abs(float(curve.win_rate[i]) - policy.win_rate(1)))
    note = f"{', '.join(PHI)}; N = {', '.join(map(str, SIZES))}"
    quantity = "largest error"
    results = [
        Result("KL of the optimum", "Thm 3, Eq. 10", quantity, kl, at_most=1e-9, note=note),
        Result("Best-of-N win rate of the optimum", "Thm 3, Eq. 8", quantity, best, at_most=1e-9),
        Result("Worst-of-N win rate of the optimum", "Thm 3, Eq. 9", quantity, worst, at_most=1e-9),
        Result("Win rate of one sample", "Thm 3, Def. 3", quantity, single, at_most=1e-9),
        _finite_policies(100 if quick else 800),
    ]
    return Proof(results, _curves(0.5 if quick else 0.1))


def _finite(name: str, beta: float, n: int, K: int) -> tuple[float, float]:
    """KL and best-of-n win rate of pi ~ e^{Phi(C) / beta} over K responses that are equally likely at first.

    C = (k + 1/2) / K is the calibrated reward of response k, its own tie counting 1/2.
    """
    C = tabular.cells(K)
    log_pi = (parse_transform(name)(C) / beta).log_softmax(-1)
    pi = log_pi.exp()
    uniform = torch.full_like(pi, 1 / K)
    kl = (pi * (log_pi + math.log(K))).sum().item()
    return kl, _won(pi, uniform, n)


def _finite_policies(K: int) -> Result:
    """The win rate's error of K responses decreases with 1/K^2."""
    orders = {}
    for name in ("identity", "exp:10", "exp:-10"):
        betas = PHI[name][1][:2]
        curve = alignment.alignment_curve(name, betas, 4)
        for i, beta in enumerate(betas):
            limit = float(curve.bon_win_rate[i])
            _, few = _finite(name, beta, 4, K)
            _, many = _finite(name, beta, 4, 2 * K)
            orders[f"{name}, beta = {beta:g}"] = math.log2(abs(few - limit) / abs(many - limit))
    where, order = max(orders.items(), key=lambda item: abs(item[1] - 2))
    return Result(
        "A policy over K responses approaches the theorem",
        "Thm 3",
        f"p of K^-p, K = {K} to {2 * K}",
        order,
        at_least=1.9,
        at_most=2.1,
        note=f"farthest from 2: {where}; N = 4",
    )


def _curves(step: float) -> dict[str, object]:
    """Win rates over KL for N = 4: curves of the theorem, and exact ones of policies over 50 responses."""
    kls = [step * i for i in range(1, round(2.5 / step) + 1)]
    curves = {}
    finite = {}
    for name in ("identity", "log", "exp:10", "bon_fp:4"):
        curve = alignment.at_kl(name, kls, 4)
        curves[name] = (curve.kl, curve.bon_win_rate)
        if name in ("identity", "exp:10"):
            exact_ones = [_finite(name, beta, 4, 50) for beta in curve.beta[1::3].tolist()]
            finite[name] = torch.tensor(exact_ones)
    return {"curves": curves, "finite": finite, "n": 4}


# --- Corollary 2 ------------------------------------------------------------------------------------------------------


def corollary_2(quick: bool) -> Proof:
    """Check that the fixed points solve the equations of Corollary 2, and that no other transform wins more."""
    betas = (0.1, 1.0) if quick else (0.02, 0.1, 1.0, 10.0)
    return Proof(
        [
            _both_equations("bon_fp", betas, worst=False),
            _both_equations("won_fp", betas, worst=True),
            *_no_transform_is_better(quick),
        ]
    )


def _both_equations(name: str, betas: Sequence[float], *, worst: bool) -> Result:
    """Largest difference of the two sides for f ~ e^{Phi / beta}, by Simpson's rule."""
    _, w = points()
    errors = {}
    for n in SIZES:
        for beta in betas:
            phi = fixed_point.solve(n, beta, worst)(w)
            again = Density.of(phi / beta).corollary_2(n, worst=worst)
            errors[n, beta] = (torch.from_numpy(again) - phi).abs().max().item()
    (n, beta), error = max(errors.items(), key=lambda item: item[1])
    return Result(
        f"{name} solves both equations",
        "Cor. 2",
        "largest difference",
        error,
        at_most=1e-9,
        note=f"{len(errors)} pairs of N and beta; largest at N = {n}, beta = {beta:g}",
    )


def _no_transform_is_better(quick: bool) -> list[Result]:
    kls = [1.0] if quick else [0.1, 0.5, 1.0, 2.0]
    curves: dict[str, alignment.Curve] = {}
    for name in ("identity", "log", "exp:5", "exp:10", "exp:-5", "exp:-10", "bon_fp:4", "won_fp:4"):
        if name == "won_fp:4":
            curves[name] = alignment.at_kl(name, [kl for kl in kls if kl <= 1.0], 4)
        else:
            curves[name] = alignment.at_kl(name, kls, 4)
    results = []
    for best, column, procedure in (
        ("identity", "win_rate", "one sample"),
        ("bon_fp:4", "bon_win_rate", "best-of-4"),
        ("won_fp:4", "won_win_rate", "worst-of-4"),
    ):
        ours = getattr(curves[best], column)
        margins = {}
        for other, curve in curves.items():
            if other != best:
                theirs = getattr(curve, column)
                # curves of the same first KLs
                shared = min(len(ours), len(theirs))
                margins[other] = (ours[:shared] - theirs[:shared]).min().item()
        nearest, margin = min(margins.items(), key=lambda item: item[1])
        results.append(
            Result(
                f"{best} has the highest win rate of {procedure} at equal KL",
                "Cor. 1, Fig. 2, App. F",
                "margin to the next",
                margin,
                at_least=0.0,
                note=f"next: {nearest}; KL up to {kls[-1]:g}",
            )
        )
    return results


# --- Definition 5 -----------------------------------------------------------------------------------------------------


def definition_5(quick: bool) -> Proof:
    """Check that bon:N on the reward u^N is the objective of Definition 5, and that its optimum is the fixed point."""
    policies, K, steps = (20, 200, 150) if quick else (200, 1000, 400)
    return Proof(
        [
            _equals_win_rate("bon:N", "u^N", policies, worst=False),
            _equals_win_rate("wor:N", "1 - (1 - u)^N", policies, worst=True),
            _trained_for_best(2, K, steps),
            _trained_for_best(4, K, steps),
            _trained_for_best(8, K, steps),
            _trained_for_worst(4, K, steps),
            _on_the_rank(K, steps),
        ]
    )


def _equals_win_rate(name: str, reward: str, policies: int, *, worst: bool) -> Result:
    """Largest |bon:n of the reward calibrated under BoN of the reference - win rate over all draws of both|.

    Four responses, equally likely under the reference, two of them with equal rewards. For many responses this reward
    is u^n.
    """
    rewards = torch.tensor([0.3, -1.0, 0.3, 2.0], dtype=torch.float64)
    uniform = torch.full((4,), 0.25, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(policies, 4, generator=generator, dtype=torch.float64)
    errors = []
    for probs in logits.softmax(-1):
        for n in (2, 3):
            draws = rewards[exact.all_draws(4, n)]
            chosen = draws.amin(1) if worst else draws.amax(1)
            calibrated = alignment.calibrate(rewards[None], chosen[None])
            objective = WorstOfN(n) if worst else BestOfN(n)
            ours = objective.value(calibrated, probs)[0]
            errors.append(abs(ours - exact.win_rate(rewards, probs, uniform, n, worst=worst)).item())
    return Result(
        f"{name} on the calibrated reward is the win rate",
        "Def. 5, Eq. 2",
        "largest difference",
        max(errors),
        at_most=1e-14,
        note=f"4 responses; with a density this reward is {reward}",
    )


# KL to the reference, in nats
BUDGET = 1.0


def _cells(K: int) -> tuple[Tensor, Tensor]:
    """Middles and widths of K cells of [0, 1], narrower towards 1, where the density is high."""
    edges = 1 - (1 - torch.arange(K + 1, dtype=torch.float64) / K) ** 3
    middles = (edges[1:] + edges[:-1]) / 2
    return middles, edges.diff()


def _train(objective: OfN, reward: Tensor, reference: Tensor, budget: float, steps: int) -> Tensor:
    """Probabilities (K,) after exact updates within the budget, from the reference (K,)."""
    log_ref = reference.log()[None]
    log_pi = log_ref
    for _ in range(steps):
        linear = objective.linearize(reward[None], log_pi.exp())
        log_pi = tabular.budget_step(log_pi, linear, log_ref, L=0.5, budget=budget)
    return log_pi[0].exp()


def _won(probs: Tensor, reference: Tensor, n: int) -> float:
    """Best-of-n win rate of a policy over K ordered responses against the reference, by definition."""
    cdf = probs.cumsum(0)
    reference_cdf = reference.cumsum(0)
    ours = exact.best_of_masses(cdf, n)
    theirs = exact.best_of_masses(reference_cdf, n)
    # the best of the reference is lower, or the same response
    wins = reference_cdf**n - theirs / 2
    return (ours * wins).sum().item()


def _trained_for_best(n: int, K: int, steps: int) -> Result:
    """Compare the policy trained for bon:n on u^n within a KL of 1 with the fixed point's win rate at this KL."""
    u, widths = _cells(K)
    probs = _train(BestOfN(n), u**n, widths, BUDGET, steps)
    ours = _won(probs, widths, n)
    theirs = float(alignment.at_kl(f"bon_fp:{n}", [BUDGET], n).bon_win_rate)
    return _same_win_rate(f"bon:{n} on u^N wins what bon_fp:{n} wins", ours, theirs, BUDGET, K)


def _trained_for_worst(n: int, K: int, steps: int) -> Result:
    """The same for worst-of-n, within half of the KL.

    The worst of u wins where the best of v = 1 - u loses; the cells are those of v.
    """
    v, widths = _cells(K)
    budget = BUDGET / 2
    probs = _train(WorstOfN(n), 1 - v**n, widths, budget, steps)
    ours = 1 - _won(probs, widths, n)
    theirs = float(alignment.at_kl(f"won_fp:{n}", [budget], n).won_win_rate)
    return _same_win_rate(f"wor:{n} on 1 - (1 - u)^N wins what won_fp:{n} wins", ours, theirs, budget, K)


def _same_win_rate(claim: str, ours: float, theirs: float, budget: float, K: int) -> Result:
    return Result(
        claim,
        "Def. 5, Cor. 2",
        "difference of win rates",
        abs(ours - theirs),
        at_most=2 / K**2,
        note=f"{ours:.5f} and {theirs:.5f} at KL {budget:g}; {K} cells",
    )


def _on_the_rank(K: int, steps: int, n: int = 4) -> Result:
    """On u itself, bon:n wins less at the same KL: its optimum is another."""
    u, widths = _cells(K)
    on_power = _won(_train(BestOfN(n), u**n, widths, BUDGET, steps), widths, n)
    on_rank = _won(_train(BestOfN(n), u, widths, BUDGET, steps), widths, n)
    return Result(
        f"bon:{n} on u wins less than on u^{n}",
        "not in the paper",
        "difference of win rates",
        on_power - on_rank,
        at_least=1e-4,
        note=f"{on_rank:.5f} at KL {BUDGET:g}",
    )
