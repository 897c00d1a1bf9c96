"""Checks of variational best-of-N: the distribution of best-of-N, and the objective with its two lower bounds.

The truth is the distribution of the best of all A^N draws (`exact.chosen`), or the sum of Eq. 4 in rational numbers.
Policies have probabilities that are multiples of 1/M, so that a sample of M with these frequencies has the expected
value as its mean. Shapes: P policies, A atoms.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import torch
from torch import Tensor

from nlgrpo.apps.verify import exact
from nlgrpo.apps.verify.claims import Proof, Result
from nlgrpo.calibration import variational

REFERENCE = torch.tensor([0.1, 0.3, 0.05, 0.35, 0.2], dtype=torch.float64)
SIZES = (1, 2, 3, 4)  # N


def strictly_below(order: Tensor, probs: Tensor) -> Tensor:
    """F of each atom: the probability of a lower one (Eq. 4 and 12)."""
    lower = order[:, None] > order
    return (lower * probs).sum(1)


# --- Proposition 1 ----------------------------------------------------------------------------------------------------


def proposition_1(quick: bool) -> Proof:
    """Compare log pi_bon with the best of all draws, for rewards without and with ties, and with Eq. 4 for large N."""
    rewards = torch.tensor([0.3, -1.0, 2.0, 0.7, 0.0], dtype=torch.float64)
    tied = torch.tensor([0.3, -1.0, 0.3, 0.3, 0.0], dtype=torch.float64)
    # the order of (reward, key), by Python's tuples
    keys = variational.string_keys([[a] for a in range(5)])
    pairs = list(zip(tied.tolist(), keys.tolist(), strict=True))
    order = torch.tensor([sorted(pairs).index(pair) for pair in pairs])
    ours = variational.strict_order(tied[None], keys[None])[0]
    missing = max(1 - _density(tied, n).sum().item() for n in SIZES)
    quantity = "largest relative error"
    return Proof(
        [
            Result(
                "pi_bon is the distribution of the best of N",
                "Prop. 1",
                quantity,
                _error(rewards, rewards),
                at_most=1e-12,
                note=f"5 strings, N = {', '.join(map(str, SIZES))}",
            ),
            Result(
                "Also with ties, in the order of rewards and keys",
                "App. C",
                quantity,
                _error(ours, order),
                at_most=1e-12,
                note="three of five rewards are equal",
            ),
            Result(
                "With ties and without an order it is no distribution",
                "not in Prop. 1",
                "missing mass",
                missing,
                at_least=0.05,
                note="0 for N = 1; the strings with equal rewards lose the draws in which they meet",
            ),
            Result(
                "log pi_bon equals the sum of Eq. 4",
                "Prop. 1",
                quantity,
                _rational_error(quick),
                at_most=1e-12,
                note="in rational numbers, N up to 64, p from 1/2 to 1e-12",
            ),
        ]
    )


def _density(order: Tensor, n: int) -> Tensor:
    """pi_bon of each atom."""
    F = strictly_below(order, REFERENCE)
    return variational.log_bon_density(F.log(), REFERENCE.log(), n).exp()


def _error(ours: Tensor, theirs: Tensor) -> float:
    """Largest relative error of pi_bon by the order ``ours``; the best of all draws is that of the order ``theirs``."""
    largest = 0.0
    for n in SIZES:
        ratio = _density(ours, n) / exact.chosen(theirs, REFERENCE, n)
        largest = max(largest, (ratio - 1).abs().max().item())
    return largest


def _rational_error(quick: bool) -> float:
    sizes = (2, 16) if quick else (2, 16, 64)
    errors = []
    for n, p, F in itertools.product(sizes, (0.5, 1e-3, 1e-12), (0.0, 1e-9, 0.1, 0.5)):
        total = Fraction(0)
        for i in range(1, n + 1):
            total += math.comb(n, i) * Fraction(F) ** (n - i) * Fraction(p) ** i
        truth = float(total)
        # below float64's range
        if truth <= 1e-300:
            continue
        log_F, log_p = torch.tensor([F, p], dtype=torch.float64).log()
        ours = variational.log_bon_density(log_F, log_p, n).exp().item()
        errors.append(abs(ours / truth - 1))
    return max(errors)


# --- Theorems 2 to 4 --------------------------------------------------------------------------------------------------

# probabilities are multiples of 1/M
M = 24


def policies(count: int) -> Tensor:
    """Random samples (count, M) of all strings but the lowest, for which log F = -inf; sharp and flat ones."""
    generator = torch.Generator().manual_seed(0)
    sharpness = torch.rand(count, 1, generator=generator) * 4
    probs = (torch.randn(count, len(REFERENCE) - 1, generator=generator) * sharpness).softmax(-1)
    return torch.multinomial(probs, M, replacement=True, generator=generator) + 1


def lower_bounds(quick: bool) -> Proof:
    """Compare J and L with their definitions, and check J >= L >= L_1 for random policies."""
    samples = policies(200 if quick else 5000)
    order = torch.arange(len(REFERENCE), dtype=torch.float64)  # the lowest string is the first
    F = strictly_below(order, REFERENCE)
    probs = torch.nn.functional.one_hot(samples, len(REFERENCE)).double().mean(1)
    log_pi = probs.gather(1, samples).log()
    log_ref = REFERENCE.log()[samples]
    log_F = F.log()[samples]
    errors_J = []
    errors_L = []
    # smallest differences, by N
    J_above_L = {}
    J_above_L_1 = {}
    L_above_L_1 = {}
    drawn = {}
    for n in SIZES:
        J = variational.objective(log_pi, log_ref, log_F, n)
        L = variational.bound(log_pi, log_ref, log_F, n)
        L_1 = looser_bound(probs, REFERENCE, F, n)
        drawn[n] = (J, L, L_1)

        true_J = -exact.divergence(probs, exact.chosen(order, REFERENCE, n))
        true_L = (n - 1) * torch.special.xlogy(probs, F).sum(-1) - exact.divergence(probs, REFERENCE)
        errors_J.append((J - true_J).abs().max().item())
        errors_L.append((L - true_L).abs().max().item())

        J_above_L[n] = (J - L).min().item() - math.log(n)
        if n == 1:
            # all are equal
            J_above_L_1[n] = -abs(J - L_1).max().item()
            L_above_L_1[n] = -abs(L - L_1).max().item()
        else:
            J_above_L_1[n] = (J - L_1).min().item()
            L_above_L_1[n] = (L - L_1).min().item()
    results = [
        Result(
            "J is -KL(pi | pi_bon)",
            "Eq. 5",
            "largest error",
            max(errors_J),
            at_most=1e-12,
            note=f"{len(samples):,} policies over 5 strings, N = {', '.join(map(str, SIZES))}",
        ),
        Result("L is its lower bound by log F", "Eq. 8", "largest error", max(errors_L), at_most=1e-12),
        Result(
            "J >= L + log N",
            "Thm 2",
            "smallest J - L - log N",
            min(J_above_L.values()),
            at_least=-1e-12,
            note="the theorem says J >= L; its Eq. 14e drops log N. Equal for N = 1",
        ),
        Result(
            "J >= L_1",
            "Thm 3",
            "smallest J - L_1",
            min(J_above_L_1.values()),
            at_least=-1e-12,
            note=f"equal for N = 1; for N = 2 at least {J_above_L_1[2]:.3g}. Eq. 17c holds as each term is a "
            "probability, not by Jensen's inequality",
        ),
        Result(
            "L >= L_1",
            "Thm 4",
            "smallest L - L_1",
            min(L_above_L_1.values()),
            at_least=-1e-12,
            note=f"equal for N = 1; for N = 2 at least {L_above_L_1[2]:.3g}",
        ),
    ]
    return Proof(results, {"values": drawn})


def looser_bound(probs: Tensor, reference: Tensor, F: Tensor, n: int) -> Tensor:
    """L_1 of Theorem 3: gamma E log F - alpha H(pi) - beta KL(pi | pi_ref), for policies (P, A)."""
    alpha = (n + 2) * (n - 1) / 2
    beta = n * (n + 1) / 2
    gamma = n * (n - 1) / 2
    entropy = -torch.special.xlogy(probs, probs).sum(-1)
    of_F = torch.special.xlogy(gamma * probs, F).sum(-1)
    return of_F - alpha * entropy - beta * exact.divergence(probs, reference)
