"""Checks of single objectives: first variations, and their estimators from groups of M samples.

Exact values never come from the objective that is checked: they are autograd through the definitions in `exact`, or
sums over all possible groups. Shapes: A atoms, M samples per group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from nlgrpo.apps.verify import exact, tabular
from nlgrpo.apps.verify.claims import Proof, Result
from nlgrpo.objectives.advantages import Baseline
from nlgrpo.objectives.registry import (
    BestOfN,
    BestOfPoisson,
    CVaR,
    Distortion,
    DPPDiversity,
    EntropicRisk,
    Mean,
    Objective,
    RaoDiversity,
    SoftBestOfN,
    WorstOfN,
)


@dataclass(frozen=True)
class Case:
    """An objective, its functional, and the rewards (A,) or kernels (A, A) to test it on."""

    objective: Objective
    truth: Callable[[Tensor, Tensor], Tensor]
    values: Sequence[Tensor]

    def gradient(self, values: Tensor, probs: Tensor) -> Tensor:
        """Gradient of the functional at a softmax policy with respect to its logits, (A,)."""
        logits = probs.log().requires_grad_()
        return torch.autograd.grad(self.truth(values, logits.softmax(0)), logits)[0]


def _tensors(*rows: Sequence[float]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


THREE, FOUR = _tensors((0.75, 0.1, 0.15), (0.3, 0.15, 0.45, 0.1))  # probabilities of the atoms
THREE_REWARDS = _tensors((0.3, -1.0, 2.0), (0.3, 0.3, 2.0), (1.0, -2.0, -2.0))
FOUR_REWARDS = _tensors((0.3, -1.0, 0.7, 2.0), (0.3, -1.0, 0.3, 2.0), (2.0, -1.0, 0.3, 2.0))


def _kernels(*places: Tensor) -> list[Tensor]:
    """Gaussian similarities of atoms with these coordinates; equal coordinates are the same response."""
    return [(-(x[:, None] - x[None, :]).square()).exp() for x in places]


FOUR_KERNELS = _kernels(*FOUR_REWARDS[:2])


def hump(z: Tensor) -> Tensor:
    """Density that prefers responses of middle rank."""
    return 6 * z * (1 - z)


def cases(values: Sequence[Tensor]) -> list[Case]:
    """All objectives with their definitions. CVaR's alpha is no value of the CDF, where it has no first variation."""
    pairs: list[tuple[Objective, Callable[[Tensor, Tensor], Tensor]]] = [
        (Mean(), exact.expectation),
        *((BestOfN(n), partial(exact.best_of, n=n)) for n in (2, 4)),
        *((WorstOfN(n), partial(exact.worst_of, n=n)) for n in (2, 4)),
        (BestOfPoisson(2.0), partial(exact.best_of_poisson, rate=2.0)),
        (CVaR(0.5), partial(exact.lower_tail, alpha=0.5)),
        (Distortion(hump), exact.hump),
        (SoftBestOfN(1.0), partial(exact.tilted, tau=1.0)),
        (EntropicRisk(1.0), partial(exact.certainty_equivalent, beta=1.0)),
        (EntropicRisk(-0.7), partial(exact.certainty_equivalent, beta=-0.7)),
    ]
    return [Case(objective, truth, values) for objective, truth in pairs]


def diversities() -> list[Case]:
    """All objectives on kernel matrices with their definitions."""
    eps = 0.1
    dpp = [Case(DPPDiversity(n, eps), partial(exact.log_volume, n=n, eps=eps), FOUR_KERNELS) for n in (2, 3)]
    return [Case(RaoDiversity(), exact.rao, FOUR_KERNELS), *dpp]


# --- estimators -------------------------------------------------------------------------------------------------------

SIZES = ((2, 3), (2, 5), (3, 4), (3, 6), (4, 6), (3, 3), (4, 4))  # N, M
BASELINES: tuple[Baseline, ...] = ("mean", "loo", "none")


def unbiased(quick: bool) -> Proof:
    """Compare the expected gradient and value of unbiased estimators, over all groups of M, with the functional's."""
    sizes = [(n, M) for n, M in SIZES if not quick or M < 5]
    tested = {
        make.__name__: [(Case(make(n, "unbiased"), partial(truth, n=n), FOUR_REWARDS), M) for n, M in sizes]
        for make, truth in ((BestOfN, exact.best_of), (WorstOfN, exact.worst_of))
    }
    tested["Rao and DPP diversity"] = [
        (case, case.objective.fewest + more) for case in diversities() for more in (0, 1)
    ]
    results = []
    text = f"(N, M) = {', '.join(f'({n}, {M})' for n, M in sizes)}, all baselines"
    for name, pairs in tested.items():
        errors = [_biases(case, values, FOUR, M) for case, M in pairs for values in case.values]
        for what, error in zip(("gradient", "value"), map(max, zip(*errors, strict=True)), strict=True):
            claim = f"{name}: the {what} is unbiased"
            note = text if name == "BestOfN" and what == "gradient" else ""
            results.append(
                Result(claim, "max@k, U-statistics", "largest relative bias", error, at_most=1e-12, note=note)
            )
    return Proof(results)


def _biases(case: Case, values: Tensor, probs: Tensor, M: int) -> tuple[float, float]:
    """Relative bias of the gradient (of the worst baseline) and of the value, over all groups."""
    atoms, chance = tabular.all_groups(probs, M)
    seen = tabular.seen(values, atoms)
    advantages = [case.objective.advantage(seen, baseline) for baseline in BASELINES]
    truth = case.gradient(values, probs)
    value = case.truth(values, probs)
    steps = [_relative(tabular.expected_gradient(atoms, chance, A, probs), truth) for A in advantages]
    expected = (chance * case.objective.value(seen)).sum()
    return max(steps), (abs(expected - value) / abs(value)).item()


def _relative(ours: Tensor, truth: Tensor) -> float:
    return ((ours - truth).norm() / truth.norm()).item()


def plugin(quick: bool) -> Proof:
    """Measure the bias of the plug-in gradient over all groups of M, and its order of decay in M at the largest M."""
    sizes = [16, 32, 64] if quick else [8, 16, 32, 64, 128]
    counted = {M: tabular.all_counts(THREE, M) for M in sizes}
    results = []
    drawn = {}
    for case in cases(THREE_REWARDS):
        # skip functionals with zero gradient, such as CVaR if the lowest value has more mass than alpha
        moving = [values for values in case.values if case.gradient(values, THREE).norm() > 1e-12]
        biases = [[_bias(case, values, *counted[M]) for M in sizes] for values in moving]
        orders = [math.log2(bias[-2] / bias[-1]) for bias in biases]
        order = max(orders, key=lambda p: abs(p - 1))
        drawn[case.objective.name] = biases[0]
        note = f"largest bias at M = {sizes[-1]}: {100 * max(bias[-1] for bias in biases):.2g}%"
        claim = f"{case.objective}: the gradient's bias is O(1/M)"
        quantity = f"p of M^-p, M = {sizes[-2]} to {sizes[-1]}"
        results.append(Result(claim, "Alg. 1", quantity, order, at_least=0.85, at_most=1.15, note=note))
    return Proof(results, {"sizes": sizes, "biases": drawn})


def _bias(case: Case, values: Tensor, atoms: Tensor, chance: Tensor) -> float:
    advantages = case.objective.advantage(tabular.seen(values, atoms))
    return _relative(tabular.expected_gradient(atoms, chance, advantages, THREE), case.gradient(values, THREE))


# --- first variations -------------------------------------------------------------------------------------------------


def first_variations(quick: bool) -> Proof:
    """Compare `linearize` and `value` with the functional: by autograd, and along mixtures of policies."""
    every = [*cases(FOUR_REWARDS), *diversities()]
    tested = [(case, values) for case in every for values in case.values]
    others = torch.rand(4 if quick else 20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    towards = list(others / others.sum(1, keepdim=True))
    measured = {
        "linearize equals the gradient (autograd)": (_autograd_error(c, v) for c, v in tested),
        "linearize equals the slope along mixtures": (_mixture_error(c, v, towards) for c, v in tested),
        "value equals the functional": (_value_error(c, v) for c, v in tested),
    }
    bounds = (1e-11, 1e-8, 1e-12)
    sources = ("Prop. 4.2, 4.3", "Def. 4.1", "Sec. 3, C")
    results = []
    for (claim, errors), bound, source in zip(measured.items(), bounds, sources, strict=True):
        error, worst = max(zip(errors, (case.objective.name for case, _ in tested), strict=True))
        note = f"{len(every)} objectives, rewards or kernels with and without ties; worst: {worst}"
        results.append(Result(claim, source, "largest error", error, at_most=bound, note=note))
    return Proof(results)


def _autograd_error(case: Case, values: Tensor) -> float:
    """d R / d logit_y = pi(y) (r~(y) - E r~); relative, or absolute if the gradient is near 0."""
    linear = case.objective.linearize(values[None], FOUR)[0]
    ours = FOUR * (linear - (FOUR * linear).sum())
    truth = case.gradient(values, FOUR)
    return ((ours - truth).norm() / max(truth.norm().item(), 1e-3)).item()


def _mixture_error(case: Case, values: Tensor, towards: Iterable[Tensor], eps: float = 1e-3) -> float:
    """(R[pi + eps (pi' - pi)] - R[pi - eps (pi' - pi)]) / 2 eps = <r~, pi' - pi>, extrapolated to eps = 0."""
    linear = case.objective.linearize(values[None], FOUR)[0]
    errors = []
    for other in towards:
        step = other - FOUR
        slope = {h: (case.truth(values, FOUR + h * step) - case.truth(values, FOUR - h * step)) / (2 * h)
                 for h in (eps, eps / 2)}  # fmt: skip
        errors.append(abs((4 * slope[eps / 2] - slope[eps]) / 3 - (linear * step).sum()).item())
    return max(errors)


def _value_error(case: Case, values: Tensor) -> float:
    return abs(case.objective.value(values[None], FOUR)[0] - case.truth(values, FOUR)).item()


# --- the linearised loss (App. J.1, Fig. 4) ---------------------------------------------------------------------------


Errors = dict[int, dict[int, tuple[float, float]]]  # N: M: bias and standard deviation


def linearised_loss(quick: bool, alpha: float = 1 + 1e-4) -> Proof:
    """Compare <dR[pi^], pi_alpha - pi_1> from M samples with R[pi_alpha] - R[pi_1].

        R[pi_alpha] - R[pi_1] = alpha N / (alpha N + 1) - N / (N + 1)

    pi_alpha is Beta(alpha, 1), the rewards are the samples y, and the estimate is the group mean of
    (alpha y^(alpha-1) - 1) A with the trainer's advantages A. Errors are relative to the true difference.
    """
    trials = 5_000 if quick else 100_000
    ns = (1, 4, 8, 16)
    sizes = (2, 4, 8, 16, 32)
    generator = torch.Generator().manual_seed(0)
    samples = {M: torch.rand(trials, M, generator=generator, dtype=torch.float64) for M in sizes}
    plug = {n: {M: _loss_error(BestOfN(n), samples[M], alpha) for M in sizes} for n in ns}
    free = {n: {M: _loss_error(BestOfN(n, "unbiased"), samples[M], alpha) for M in sizes if n <= M} for n in ns}
    return Proof(_loss_results(plug, free, trials), {"sizes": sizes, "plugin": plug, "unbiased": free})


def _loss_results(plug: Errors, free: Errors, trials: int) -> list[Result]:
    rises = [math.hypot(*b) / math.hypot(*a) for errors in plug.values() for a, b in pairwise(errors.values())]
    share, n, M, bias = max(
        (b**2 / (b**2 + std**2), n, M, b) for n, by_M in plug.items() for M, (b, std) in by_M.items() if M >= n > 1
    )
    grpo = max(abs(b + 1 / M) / std for M, (b, std) in plug[1].items()) * math.sqrt(trials)
    unbiased = max(abs(b) / std for errors in free.values() for b, std in errors.values()) * math.sqrt(trials)
    source = "J.1, Fig. 4"
    off = "largest error, in standard errors"
    text = f"N = {', '.join(map(str, plug))}; M = {', '.join(map(str, plug[1]))}; {trials:,} trials"
    at_n = f"at N = {n}, M = {M}, where the relative bias is {100 * bias:.0f}%; see the next line for N = 1"
    return [
        Result("Linearised loss: the error decreases with M", source, "rmse / rmse at half M, largest", max(rises),
               at_most=1.0, note=text),
        Result("Plug-in: small bias for M >= N", source, "bias^2 / mse, largest", share, at_most=0.15, note=at_n),
        Result("Plain GRPO: the relative bias is -1/M", source, off, grpo, at_most=4.5),
        Result("Unbiased estimator: no bias for N <= M", source, off, unbiased, at_most=4.5),
    ]  # fmt: skip


def _loss_error(objective: Objective, samples: Tensor, alpha: float) -> tuple[float, float]:
    """Bias and standard deviation of the estimate, relative to the true difference."""
    n = getattr(objective, "n", 1)
    truth = n * alpha / (n * alpha + 1) - n / (n + 1)
    found = ((alpha * samples ** (alpha - 1) - 1) * objective.advantage(samples)).mean(1) / truth
    return found.mean().item() - 1, found.std().item()
