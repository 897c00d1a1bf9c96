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
    values: Iterable[Tensor]

    def gradient(self, values: Tensor, probs: Tensor) -> Tensor:
        """Gradient of the functional at a softmax policy with respect to its logits, (A,)."""
        logits = probs.log().requires_grad_()
        value = self.truth(values, logits.softmax(0))
        (gradient,) = torch.autograd.grad(value, logits)
        return gradient


# probabilities of the atoms, and their rewards without and with ties
THREE = torch.tensor([0.75, 0.1, 0.15], dtype=torch.float64)
THREE_REWARDS = torch.tensor([[0.3, -1.0, 2.0], [0.3, 0.3, 2.0], [1.0, -2.0, -2.0]], dtype=torch.float64)
FOUR = torch.tensor([0.3, 0.15, 0.45, 0.1], dtype=torch.float64)
FOUR_REWARDS = torch.tensor([[0.3, -1.0, 0.7, 2.0], [0.3, -1.0, 0.3, 2.0], [2.0, -1.0, 0.3, 2.0]], dtype=torch.float64)
# atoms with equal coordinates are the same response
FOUR_KERNELS = [tabular.similarity(places) for places in FOUR_REWARDS[:2]]


def hump(z: Tensor) -> Tensor:
    """Density that prefers responses of middle rank."""
    return 6 * z * (1 - z)


def cases(values: Iterable[Tensor]) -> list[Case]:
    """All objectives with their definitions. CVaR's alpha is no value of the CDF, where it has no first variation."""
    return [
        Case(Mean(), exact.expectation, values),
        Case(BestOfN(2), partial(exact.best_of, n=2), values),
        Case(BestOfN(4), partial(exact.best_of, n=4), values),
        Case(WorstOfN(2), partial(exact.worst_of, n=2), values),
        Case(WorstOfN(4), partial(exact.worst_of, n=4), values),
        Case(BestOfPoisson(2.0), partial(exact.best_of_poisson, rate=2.0), values),
        Case(CVaR(0.5), partial(exact.lower_tail, alpha=0.5), values),
        Case(Distortion(hump), exact.hump, values),
        Case(SoftBestOfN(1.0), partial(exact.tilted, tau=1.0), values),
        Case(EntropicRisk(1.0), partial(exact.certainty_equivalent, beta=1.0), values),
        Case(EntropicRisk(-0.7), partial(exact.certainty_equivalent, beta=-0.7), values),
    ]


def diversities() -> list[Case]:
    """All objectives on kernel matrices with their definitions."""
    eps = 0.1
    return [
        Case(RaoDiversity(), exact.rao, FOUR_KERNELS),
        Case(DPPDiversity(2, eps), partial(exact.log_volume, n=2, eps=eps), FOUR_KERNELS),
        Case(DPPDiversity(3, eps), partial(exact.log_volume, n=3, eps=eps), FOUR_KERNELS),
    ]


def relative_error(ours: Tensor, truth: Tensor) -> float:
    """|ours - truth| / |truth|."""
    return ((ours - truth).norm() / truth.norm()).item()


# --- estimators -------------------------------------------------------------------------------------------------------

# N, M
SIZES = ((2, 3), (2, 5), (3, 4), (3, 6), (4, 6), (3, 3), (4, 4))
BASELINES: tuple[Baseline, ...] = ("mean", "loo", "none")


def unbiased(quick: bool) -> Proof:
    """Compare the expected gradient and value of unbiased estimators, over all groups of M, with the functional's."""
    sizes = [(n, M) for n, M in SIZES if not quick or M < 5]
    best = [(Case(BestOfN(n, "unbiased"), partial(exact.best_of, n=n), FOUR_REWARDS), M) for n, M in sizes]
    worst = [(Case(WorstOfN(n, "unbiased"), partial(exact.worst_of, n=n), FOUR_REWARDS), M) for n, M in sizes]
    diverse = []
    for case in diversities():
        fewest = case.objective.fewest
        diverse.append((case, fewest))
        diverse.append((case, fewest + 1))
    note = f"(N, M) = {', '.join(f'({n}, {M})' for n, M in sizes)}, all baselines"
    return Proof(
        [
            *_unbiased_results("BestOfN", best, note),
            *_unbiased_results("WorstOfN", worst),
            *_unbiased_results("Rao and DPP diversity", diverse),
        ]
    )


def _unbiased_results(name: str, tested: Sequence[tuple[Case, int]], note: str = "") -> list[Result]:
    """Largest relative bias of the gradient and of the value, over all groups of M."""
    of_gradient = []
    of_value = []
    for case, M in tested:
        atoms, chance = tabular.all_groups(FOUR, M)
        for values in case.values:
            seen = tabular.seen(values, atoms)
            gradient = case.gradient(values, FOUR)
            for baseline in BASELINES:
                advantages = case.objective.advantage(seen, baseline)
                expected_gradient = tabular.expected_gradient(atoms, chance, advantages, FOUR)
                of_gradient.append(relative_error(expected_gradient, gradient))
            value = case.truth(values, FOUR)
            expected_value = (chance * case.objective.value(seen)).sum()
            of_value.append((abs(expected_value - value) / abs(value)).item())
    source = "max@k, U-statistics"
    quantity = "largest relative bias"
    return [
        Result(f"{name}: the gradient is unbiased", source, quantity, max(of_gradient), at_most=1e-12, note=note),
        Result(f"{name}: the value is unbiased", source, quantity, max(of_value), at_most=1e-12),
    ]


def plugin(quick: bool) -> Proof:
    """Measure the bias of the plug-in gradient over all groups of M, and its order of decay in M at the largest M."""
    sizes = [16, 32, 64] if quick else [8, 16, 32, 64, 128]
    groups = [tabular.all_counts(THREE, M) for M in sizes]
    results = []
    drawn: dict[str, list[float]] = {}
    for case in cases(THREE_REWARDS):
        orders = []
        largest = []
        for values in case.values:
            truth = case.gradient(values, THREE)
            # skip functionals with zero gradient, such as CVaR if the lowest value has more mass than alpha
            if truth.norm() <= 1e-12:
                continue
            bias = []
            for atoms, chance in groups:
                advantages = case.objective.advantage(tabular.seen(values, atoms))
                bias.append(relative_error(tabular.expected_gradient(atoms, chance, advantages, THREE), truth))
            orders.append(math.log2(bias[-2] / bias[-1]))
            largest.append(bias[-1])
            drawn.setdefault(case.objective.name, bias)
        results.append(
            Result(
                f"{case.objective}: the gradient's bias is O(1/M)",
                "Alg. 1",
                f"p of M^-p, M = {sizes[-2]} to {sizes[-1]}",
                max(orders, key=lambda p: abs(p - 1)),
                at_least=0.85,
                at_most=1.15,
                note=f"largest bias at M = {sizes[-1]}: {100 * max(largest):.2g}%",
            )
        )
    return Proof(results, {"sizes": sizes, "biases": drawn})


# --- first variations -------------------------------------------------------------------------------------------------


def first_variations(quick: bool) -> Proof:
    """Compare `linearize` and `value` with the functional: by autograd, and along mixtures of policies."""
    every = [*cases(FOUR_REWARDS), *diversities()]
    others = torch.rand(4 if quick else 20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    others = others / others.sum(1, keepdim=True)
    # errors with the names of their objectives
    by_autograd = []
    by_mixtures = []
    of_values = []
    for case in every:
        name = case.objective.name
        for values in case.values:
            by_autograd.append((_autograd_error(case, values), name))
            by_mixtures.append((max(_mixture_error(case, values, other) for other in others), name))
            value = case.objective.value(values[None], FOUR)[0]
            of_values.append((abs(value - case.truth(values, FOUR)).item(), name))
    results = []
    for claim, source, errors, bound in (
        ("linearize equals the gradient (autograd)", "Prop. 4.2, 4.3", by_autograd, 1e-11),
        ("linearize equals the slope along mixtures", "Def. 4.1", by_mixtures, 1e-8),
        ("value equals the functional", "Sec. 3, C", of_values, 1e-12),
    ):
        error, worst = max(errors)
        note = f"{len(every)} objectives, rewards or kernels with and without ties; worst: {worst}"
        results.append(Result(claim, source, "largest error", error, at_most=bound, note=note))
    return Proof(results)


def _autograd_error(case: Case, values: Tensor) -> float:
    """d R / d logit_y = pi(y) (r~(y) - E r~); relative, or absolute if the gradient is near 0."""
    linear = case.objective.linearize(values[None], FOUR)[0]
    ours = FOUR * (linear - (FOUR * linear).sum())
    truth = case.gradient(values, FOUR)
    return ((ours - truth).norm() / max(truth.norm().item(), 1e-3)).item()


def _mixture_error(case: Case, values: Tensor, other: Tensor, eps: float = 1e-3) -> float:
    """(R[pi + eps (pi' - pi)] - R[pi - eps (pi' - pi)]) / 2 eps = <r~, pi' - pi>, extrapolated to eps = 0."""
    step = other - FOUR

    def slope(h: float) -> Tensor:
        return (case.truth(values, FOUR + h * step) - case.truth(values, FOUR - h * step)) / (2 * h)

    linear = case.objective.linearize(values[None], FOUR)[0]
    extrapolated = (4 * slope(eps / 2) - slope(eps)) / 3
    return abs(extrapolated - (linear * step).sum()).item()


# --- the linearised loss (App. J.1, Fig. 4) ---------------------------------------------------------------------------


Errors = dict[int, dict[int, tuple[float, float]]]  # N: M: bias and standard deviation


def linearised_loss(quick: bool, alpha: float = 1 + 1e-4) -> Proof:
    """Compare <dR[pi^], pi_alpha - pi_1> from M samples with R[pi_alpha] - R[pi_1].

        R[pi_alpha] - R[pi_1] = alpha N / (alpha N + 1) - N / (N + 1)

    pi_alpha is Beta(alpha, 1), the rewards are the samples y, and the estimate is the group mean of
    (alpha y^(alpha-1) - 1) A with the trainer's advantages A. Errors are relative to the true difference.
    """
    trials = 5_000 if quick else 100_000
    sizes = (2, 4, 8, 16, 32)
    generator = torch.Generator().manual_seed(0)
    samples = {M: torch.rand(trials, M, generator=generator, dtype=torch.float64) for M in sizes}
    plug: Errors = {}
    free: Errors = {}
    for n in (1, 4, 8, 16):
        plug[n] = {}
        free[n] = {}
        for M in sizes:
            plug[n][M] = _loss_error(BestOfN(n), samples[M], alpha)
            if n <= M:
                free[n][M] = _loss_error(BestOfN(n, "unbiased"), samples[M], alpha)
    return Proof(_loss_results(plug, free, trials), {"sizes": sizes, "plugin": plug, "unbiased": free})


def _loss_error(objective: BestOfN, samples: Tensor, alpha: float) -> tuple[float, float]:
    """Bias and standard deviation of the estimate, relative to the true difference."""
    n = objective.n
    truth = n * alpha / (n * alpha + 1) - n / (n + 1)
    ratio_minus_1 = alpha * samples ** (alpha - 1) - 1
    found = (ratio_minus_1 * objective.advantage(samples)).mean(1) / truth
    return found.mean().item() - 1, found.std().item()


def _loss_results(plug: Errors, free: Errors, trials: int) -> list[Result]:
    # rmse / rmse at half M
    rises = []
    # bias^2 / mse where M >= N, with its N, M and bias
    shares = []
    for n, errors in plug.items():
        for half, whole in pairwise(errors.values()):
            rises.append(math.hypot(*whole) / math.hypot(*half))
        for M, (bias, std) in errors.items():
            if M >= n > 1:
                shares.append((bias**2 / (bias**2 + std**2), n, M, bias))
    share, n, M, bias = max(shares)

    # in standard errors
    off_grpo = max(abs(bias + 1 / M) / std for M, (bias, std) in plug[1].items()) * math.sqrt(trials)
    off_unbiased = 0.0
    for errors in free.values():
        for b, std in errors.values():
            off_unbiased = max(off_unbiased, abs(b) / std * math.sqrt(trials))

    source = "J.1, Fig. 4"
    off = "largest error, in standard errors"
    return [
        Result(
            "Linearised loss: the error decreases with M",
            source,
            "rmse / rmse at half M, largest",
            max(rises),
            at_most=1.0,
            note=f"N = {', '.join(map(str, plug))}; M = {', '.join(map(str, plug[1]))}; {trials:,} trials",
        ),
        Result(
            "Plug-in: small bias for M >= N",
            source,
            "bias^2 / mse, largest",
            share,
            at_most=0.15,
            note=f"at N = {n}, M = {M}, where the relative bias is {100 * bias:.0f}%; see the next line for N = 1",
        ),
        Result("Plain GRPO: the relative bias is -1/M", source, off, off_grpo, at_most=4.5),
        Result("Unbiased estimator: no bias for N <= M", source, off, off_unbiased, at_most=4.5),
    ]
