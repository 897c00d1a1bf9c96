"""Checks of InfAlign: calibrated rewards, win rates and KL of a transform, and the best transform for best-of-N.

Win rates are computed from their definition, by densities in `calibrated` or over all draws in `exact`, never by the
integrals of Theorem 3. Shapes: P prompts, M samples, K samples of the reference, or K responses; u = calibrated reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

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
    rewards, reference = (torch.randint(-16, 17, (50, K), generator=generator).double() / 8 for K in (20, 30))
    ours = alignment.calibrate(rewards, reference)
    pairs = (rewards[..., None] > reference[:, None]).double() + (rewards[..., None] == reference[:, None]) / 2
    moved = [(alignment.calibrate(m(rewards), m(reference)) - ours).abs().max().item() for m in INCREASING]
    flat = (alignment.calibrate(rewards.floor(), reference.floor()) - ours).abs().max().item()
    largest = "largest difference"
    note = "50 prompts, 20 rewards, K = 30, with ties"
    return Proof([
        Result("Calibrated rewards are shares of pairs", "Eq. 12", largest, (ours - pairs.mean(-1)).abs().max().item(),
               at_most=1e-15, note=note),
        Result("No increasing function changes them", "Lemma 3", largest, max(moved), at_most=0.0,
               note="exp, atan, cube and an affine function"),
        Result("A function that is not strictly increasing does", "not in Lemma 3", largest, flat, at_least=0.05,
               note="floor, which joins rewards"),
        *_dkw_finite(quick),
        *_dkw_continuous(quick, generator),
    ])  # fmt: skip


def _bound(delta: float, K: int) -> float:
    return math.sqrt(math.log(2 / delta) / (2 * K))


def _dkw_finite(quick: bool) -> list[Result]:
    """P(largest error > bound) / delta, exactly, over all groups of K samples of three responses."""
    sizes = [4, 16] if quick else [2, 4, 8, 16, 32, 64]
    share = 0.0
    for K in sizes:
        atoms, chance = tabular.all_counts(THREE, K)
        for rewards in THREE_REWARDS:
            truth = ((rewards[:, None] > rewards) * THREE + (rewards[:, None] == rewards) * THREE / 2).sum(1)
            found = alignment.calibrate(rewards.expand(len(atoms), -1), rewards[atoms])
            error = (found - truth).abs().amax(1)
            share = max(share, *(chance[error > _bound(d, K) + 1e-12].sum().item() / d for d in LEVELS))
    note = f"delta = {', '.join(map(str, LEVELS))}; K = {', '.join(map(str, sizes))}"
    claim = "The error exceeds the bound at most at rate delta"
    return [Result(f"{claim}: 3 responses", "Lemma 6", "rate / delta, largest", share, at_most=1.0, note=note)]


def _dkw_continuous(quick: bool, generator: torch.Generator) -> list[Result]:
    """The same for continuous rewards, where the error has Kolmogorov's exact distribution."""
    trials = 2_000 if quick else 20_000
    share = 0.0
    off = 0.0
    nearest = 0.0
    for K in (10, 100):
        reference = torch.rand(trials, K, generator=generator, dtype=torch.float64)
        beside = torch.cat((reference - 1e-9, reference + 1e-9), 1)  # where the error is largest
        error = (alignment.calibrate(beside, reference) - beside).abs().amax(1)
        for delta in LEVELS:
            rate = (error > _bound(delta, K)).double().mean().item()
            law = float(kstwo.sf(_bound(delta, K), K))
            share = max(share, rate / delta)
            nearest = max(nearest, law / delta)
            off = max(off, abs(rate - law) / math.sqrt(law * (1 - law) / trials))
    claim = "The error exceeds the bound at most at rate delta: continuous"
    return [
        Result(claim, "Lemma 6", "rate / delta, largest", share, at_most=1.0, note=f"exactly: {nearest:.3f}"),
        Result("Its rate is that of Kolmogorov's distribution", "Lemma 6", "largest error, in standard errors", off,
               at_most=4.5, note=f"K = 10 and 100, {trials:,} groups"),
    ]  # fmt: skip


# --- Theorem 3 --------------------------------------------------------------------------------------------------------

PHI: Mapping[str, tuple[Callable[[Tensor], Tensor], Sequence[float]]] = {  # name: definition, values of beta
    "identity": (lambda u: u, (0.5, 0.1, 0.05)),
    "log": (lambda u: u.log(), (2.0, 0.5, 0.2)),
    "exp:10": (lambda u: (10 * u).exp(), (2e4, 5e3, 2e3)),
    "exp:-10": (lambda u: -(-10 * u).exp(), (0.5, 0.1, 0.05)),
}
SIZES = (2, 4, 8)  # N


def theorem_3(quick: bool) -> Proof:
    """Compare the curves of Theorem 3 with win rates and KL by definition, for continuous and for finite policies."""
    u = points()[0]
    errors: dict[str, float] = dict.fromkeys(("kl", "win_rate", "bon_win_rate", "won_win_rate"), 0.0)
    for name, (phi, betas) in PHI.items():
        for n in SIZES:
            curve = alignment.alignment_curve(name, betas, n)
            for i, beta in enumerate(betas):
                truth = _by_definition(Density.of(phi(u) / beta), n)
                errors = {
                    key: max(error, abs(float(getattr(curve, key)[i]) - truth[key])) for key, error in errors.items()
                }
    text = f"{', '.join(PHI)}; N = {', '.join(map(str, SIZES))}"
    rows = (
        ("KL of the optimum", "Eq. 10", "kl", text),
        ("Best-of-N win rate of the optimum", "Eq. 8", "bon_win_rate", ""),
        ("Worst-of-N win rate of the optimum", "Eq. 9", "won_win_rate", ""),
        ("Win rate of one sample", "Def. 3", "win_rate", ""),
    )
    results = [
        Result(claim, f"Thm 3, {source}", "largest error", errors[key], at_most=1e-9, note=note)
        for claim, source, key, note in rows
    ]
    return Proof([*results, _finite_policies(100 if quick else 800)], _curves(0.5 if quick else 0.1))


def _by_definition(policy: Density, n: int) -> dict[str, float]:
    return {
        "kl": policy.kl,
        "win_rate": policy.win_rate(1),
        "bon_win_rate": policy.win_rate(n),
        "won_win_rate": policy.win_rate(n, worst=True),
    }


def _finite(name: str, beta: float, n: int, K: int) -> tuple[float, float]:
    """KL and best-of-n win rate of pi ~ e^{Phi(C) / beta} over K responses that are equally likely at first.

    C = (k + 1/2) / K is the calibrated reward of response k, its own tie counting 1/2.
    """
    log_pi = (parse_transform(name)(tabular.cells(K)) / beta).log_softmax(-1)
    uniform = torch.full_like(log_pi, 1 / K)
    return (log_pi.exp() * (log_pi + math.log(K))).sum().item(), _won(log_pi.exp(), uniform, n)


def _finite_policies(K: int) -> Result:
    orders = {}
    for name in ("identity", "exp:10", "exp:-10"):
        curve = alignment.alignment_curve(name, PHI[name][1][:2], 4)
        for i, beta in enumerate(PHI[name][1][:2]):
            truth = float(curve.kl[i]), float(curve.bon_win_rate[i])
            for side in (0, 1):
                few, many = (abs(_finite(name, beta, 4, size)[side] - truth[side]) for size in (K, 2 * K))
                orders[f"{name}, beta = {beta:g}"] = math.log2(few / many)
    where, order = max(orders.items(), key=lambda item: abs(item[1] - 2))
    return Result("A policy over K responses approaches the theorem", "Thm 3", f"p of K^-p, K = {K} to {2 * K}", order,
                  at_least=1.9, at_most=2.1, note=f"farthest from 2: {where}; N = 4")  # fmt: skip


def _curves(step: float) -> dict[str, object]:
    """Win rates over KL for N = 4: curves of the theorem, and exact ones of policies over 50 responses."""
    names = ("identity", "log", "exp:10", "bon_fp:4")
    kls = [step * i for i in range(1, round(2.5 / step) + 1)]
    curves = {name: alignment.at_kl(name, kls, 4) for name in names}
    exact_ones = {
        name: [_finite(name, beta, 4, 50) for beta in curves[name].beta[1::3].tolist()] for name in names[::2]
    }
    return {
        "curves": {name: (curve.kl, curve.bon_win_rate) for name, curve in curves.items()},
        "finite": {name: torch.tensor(values) for name, values in exact_ones.items()},
        "n": 4,
    }


# --- Corollary 2 ------------------------------------------------------------------------------------------------------


def corollary_2(quick: bool) -> Proof:
    """Check that the fixed points solve the equations of Corollary 2, and that no other transform wins more."""
    return Proof([*(_both_equations(worst, quick) for worst in (False, True)), *_no_transform_is_better(quick)])


def _both_equations(worst: bool, quick: bool) -> Result:
    """Largest difference of the two sides for f ~ e^{Phi / beta}, by Simpson's rule."""
    w = points()[1]
    pairs = [(n, beta) for n in SIZES for beta in ((0.1, 1.0) if quick else (0.02, 0.1, 1.0, 10.0))]
    errors = {}
    for n, beta in pairs:
        phi = fixed_point.solve(n, beta, worst)(w)
        again = Density.of(phi / beta).corollary_2(n, worst=worst)
        errors[n, beta] = (torch.from_numpy(again) - phi).abs().max().item()
    (n, beta), error = max(errors.items(), key=lambda item: item[1])
    name = "won_fp" if worst else "bon_fp"
    return Result(f"{name} solves both equations", "Cor. 2", "largest difference", error, at_most=1e-9,
                  note=f"{len(pairs)} pairs of N and beta; largest at N = {n}, beta = {beta:g}")  # fmt: skip


def _no_transform_is_better(quick: bool) -> list[Result]:
    kls = [1.0] if quick else [0.1, 0.5, 1.0, 2.0]
    best = {"win_rate": "identity", "bon_win_rate": "bon_fp:4", "won_win_rate": "won_fp:4"}
    texts = {"win_rate": "one sample", "bon_win_rate": "best-of-4", "won_win_rate": "worst-of-4"}
    others = ("identity", "log", "exp:5", "exp:10", "exp:-5", "exp:-10", "bon_fp:4", "won_fp:4")
    found = {name: alignment.at_kl(name, [kl for kl in kls if kl <= 1.0 or name != "won_fp:4"], 4) for name in others}
    results = []
    for key, name in best.items():
        top = getattr(found[name], key)
        margins = {other: (top[: len(r)] - r[: len(top)]).min().item() for other in others if other != name
                   for r in (getattr(found[other], key),)}  # fmt: skip
        nearest = min(margins, key=partial(dict.__getitem__, margins))
        results.append(
            Result(f"{name} has the highest win rate of {texts[key]} at equal KL", "Cor. 1, Fig. 2, App. F",
                   "margin to the next", margins[nearest], at_least=0.0, note=f"next: {nearest}; KL up to {kls[-1]:g}")
        )  # fmt: skip
    return results


# --- Definition 5 -----------------------------------------------------------------------------------------------------


def definition_5(quick: bool) -> Proof:
    """Check that bon:N on the reward u^N is the objective of Definition 5, and that its optimum is the fixed point."""
    policies, K, steps = (20, 200, 150) if quick else (200, 1000, 400)
    results = [_equals_win_rate(make, policies) for make in (BestOfN, WorstOfN)]
    results += [_trained(n, worst, K, steps) for n, worst in ((2, False), (4, False), (8, False), (4, True))]
    return Proof([*results, _on_the_rank(K, steps)])


def _equals_win_rate(make: type[OfN], policies: int) -> Result:
    """Largest |bon:n of the reward calibrated under BoN of the reference - win rate over all draws of both|.

    Four responses, equally likely under the reference, two of them with equal rewards. For many responses this reward
    is u^n.
    """
    rewards = torch.tensor([0.3, -1.0, 0.3, 2.0], dtype=torch.float64)
    uniform = torch.full((4,), 0.25, dtype=torch.float64)
    errors = []
    worst = make is WorstOfN
    generator = torch.Generator().manual_seed(0)
    for probs in torch.randn(policies, 4, generator=generator, dtype=torch.float64).mul(2).softmax(-1):
        for n in (2, 3):
            draws = torch.cartesian_prod(*[rewards] * n)
            calibrated = alignment.calibrate(rewards[None], (draws.amin(1) if worst else draws.amax(1))[None])
            ours = make(n).value(calibrated, probs)[0]
            errors.append(abs(ours - exact.win_rate(rewards, probs, uniform, n, worst=worst)).item())
    name, note = ("wor", "1 - (1 - u)^N") if worst else ("bon", "u^N")
    return Result(f"{name}:N on the calibrated reward is the win rate", "Def. 5, Eq. 2", "largest difference",
                  max(errors), at_most=1e-14, note=f"4 responses; with a density this reward is {note}")  # fmt: skip


BUDGET = 1.0  # KL to the reference, in nats


def _cells(K: int) -> tuple[Tensor, Tensor]:
    """Middles and widths of K cells of [0, 1], narrower towards 1, where the density is high."""
    edges = 1 - (1 - torch.arange(K + 1, dtype=torch.float64) / K) ** 3
    return (edges[1:] + edges[:-1]) / 2, edges.diff()


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
    at_most = reference.cumsum(0)
    ours = exact.best_of_masses(probs.cumsum(0), n)
    theirs = exact.best_of_masses(at_most, n)
    return (ours * (at_most**n - theirs / 2)).sum().item()


def _trained(n: int, worst: bool, K: int, steps: int) -> Result:
    """Compare the policy trained for bon:n on u^n within a KL of 1 with the fixed point's win rate at this KL.

    The worst of u wins where the best of v = 1 - u loses; the cells of worst-of-n are those of v.
    """
    (v, widths), budget = _cells(K), BUDGET / 2 if worst else BUDGET
    if worst:
        probs = _train(WorstOfN(n), 1 - v**n, widths, budget, steps)
        ours = 1 - _won(probs, widths, n)
        name = f"won_fp:{n}"
        what = "1 - (1 - u)^N"
    else:
        ours = _won(_train(BestOfN(n), v**n, widths, budget, steps), widths, n)
        name = f"bon_fp:{n}"
        what = "u^N"
    curve = alignment.at_kl(name, [budget], n)
    theirs = float(curve.won_win_rate if worst else curve.bon_win_rate)
    return Result(f"{'wor' if worst else 'bon'}:{n} on {what} wins what {name} wins", "Def. 5, Cor. 2",
                  "difference of win rates", abs(ours - theirs), at_most=2 / K**2,
                  note=f"{ours:.5f} and {theirs:.5f} at KL {budget:g}; {K} cells")  # fmt: skip


def _on_the_rank(K: int, steps: int, n: int = 4) -> Result:
    """On u itself, bon:n wins less at the same KL: its optimum is another."""
    u, widths = _cells(K)
    on_power, on_rank = (_won(_train(BestOfN(n), r, widths, BUDGET, steps), widths, n) for r in (u**n, u))
    return Result(f"bon:{n} on u wins less than on u^{n}", "not in the paper", "difference of win rates",
                  on_power - on_rank, at_least=1e-4, note=f"{on_rank:.5f} at KL {BUDGET:g}")  # fmt: skip
