"""Independent truths of objectives: functionals by their definition, enumeration of all draws and groups, autograd.

Nothing here calls the objectives' methods. Legend: A letters, G groups of M letters; ``values`` are the rewards (A,) of
the letters, their kernel matrix (A, A), or their rewards and answers (A, 2).
"""

import itertools
import math
from collections import Counter

import torch
from scipy.optimize import minimize

from nlgrpo.objectives import (
    BestOfPoisson,
    CVaR,
    Distortion,
    DPPDiversity,
    EntropicRisk,
    MajorityVote,
    RaoDiversity,
    SoftBestOfN,
    WorstOfN,
)


def float64(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit_kernel(letters, seed=0, width=4):
    """Cosine similarities of random features, (letters, letters)."""
    features = normal(letters, width, seed=seed)
    features = features / features.norm(dim=1, keepdim=True)
    return features @ features.T


def all_draws(A, n):
    """All sequences of n of A letters, (A^n, n)."""
    return torch.tensor(list(itertools.product(range(A), repeat=n)))


# --- functionals ------------------------------------------------------------------------------------------------------


def hump(z):
    """A distortion that prefers responses of middle rank: 3 times best of 2 minus 2 times best of 3."""
    return 6 * z * (1 - z)


def best_of(rewards, probs, n):
    """E max of n, from P(max <= r) = C(r)^n."""
    r = rewards.sort().values
    at_most = torch.stack([(probs * (rewards <= x)).sum() for x in r])
    return r[-1] - (at_most[:-1] ** n * r.diff()).sum()


def lower_tail(rewards, probs, share):
    """Integral of the quantile function from 0 to ``share``: max_t share t - E (t - r)_+, reached at an atom
    (Rockafellar and Uryasev, 2000)."""
    return torch.stack([share * t - (probs * (t - rewards).clamp(min=0)).sum() for t in rewards]).max()


def voted(draws, rewards, answers):
    """Mean reward of the response that the vote of these draws chooses, over all their orders."""
    counts = Counter(answers[j] for j in draws if answers[j] >= 0)
    if not counts:
        return sum(rewards[j] for j in draws) / len(draws)
    most = max(counts.values())
    winners = [answer for answer, votes in counts.items() if votes == most]
    of_winners = [sum(rewards[j] for j in draws if answers[j] == answer) / most for answer in winners]
    return sum(of_winners) / len(of_winners)


def functional(objective, values, probs):
    """R of the distribution ``probs`` (A,) by its definition, differentiable in it."""
    match objective:
        case SoftBestOfN(tau):
            tilted = probs * ((values - values.max()) / tau).exp()
            return (tilted * values).sum() / tilted.sum()
        case EntropicRisk(beta):
            return torch.logsumexp(beta * values + probs.log(), 0) / beta
        case BestOfPoisson(rate):  # K = 0 contributes 0
            chances = [math.exp(k * math.log(rate) - rate - math.lgamma(k + 1)) for k in range(60)]
            return sum(chances[k] * best_of(values, probs, k) for k in range(1, 60))
        case CVaR(alpha):
            return lower_tail(values, probs, alpha) / alpha
        case Distortion(f):
            if f is hump:
                return 3 * best_of(values, probs, 2) - 2 * best_of(values, probs, 3)
            # a table: the weight of each part of [0, 1]
            ends = [k / len(f) for k in range(1, len(f) + 1)]
            tails = [0.0, *(lower_tail(values, probs, end) for end in ends)]
            return sum(weight * (tails[k + 1] - tails[k]) for k, weight in enumerate(f))
        case RaoDiversity():
            return -(probs[:, None] * probs * values).sum()
        case DPPDiversity(n, eps):
            draws = all_draws(len(probs), n)
            minors = values[draws[:, :, None], draws[:, None, :]] + eps * torch.eye(n, dtype=values.dtype)
            return (probs[draws].prod(-1) * torch.logdet(minors)).sum()
        case MajorityVote(n):
            draws = all_draws(len(probs), n)
            chosen = [voted(row, *values.T.tolist()) for row in draws.tolist()]
            return (probs[draws].prod(-1) * float64(*chosen)).sum()
    draws = all_draws(len(probs), getattr(objective, "n", 1))
    chosen = values[draws].amin(-1) if isinstance(objective, WorstOfN) else values[draws].amax(-1)
    return (probs[draws].prod(-1) * chosen).sum()


# --- gradients --------------------------------------------------------------------------------------------------------


def gradient(objective, values, logits):
    """Gradient of R at a softmax policy with respect to its logits, (A,), and R."""
    logits = logits.clone().requires_grad_()
    value = functional(objective, values, logits.softmax(0))
    return torch.autograd.grad(value, logits)[0], value.detach()


def slope(f, here, there, h=1e-4):
    """d/de f(pi + e (pi' - pi)) at e = 0, by central differences."""
    step = there - here
    return (f(here + h * step) - f(here - h * step)) / (2 * h)


def maximum(f, start, **options):
    """Largest value of a function of logits, and the logits, by L-BFGS from ``start``."""

    def loss(logits):
        logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
        value = -f(logits)
        value.backward()
        return value.item(), logits.grad.numpy()

    found = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    return -found.fun, torch.from_numpy(found.x)


# --- groups -----------------------------------------------------------------------------------------------------------


def all_groups(probs, M):
    """All groups of M letters, (A^M, M), and their probabilities, (A^M,)."""
    letters = all_draws(len(probs), M)
    return letters, probs[letters].prod(-1)


def counted_groups(probs, M):
    """As `all_groups`, for three letters and larger M: one group for each (a, b, c) of a + b + c = M letters."""
    counts = [(a, b, M - a - b) for a in range(M + 1) for b in range(M + 1 - a)]
    letters = torch.tensor([[0] * a + [1] * b + [2] * c for a, b, c in counts])
    orders = [math.lgamma(M + 1) - sum(math.lgamma(n + 1) for n in count) for count in counts]
    return letters, (float64(*orders) + probs.log()[letters].sum(1)).exp()


def inputs(objective, values, letters):
    """What an objective takes for groups of letters (G, M)."""
    if objective.pairwise:
        return values[letters[:, :, None], letters[:, None, :]]
    return values[letters]


def expected_gradient(logits, letters, chance, coefficients):
    """E (1/M) sum_j c_j d log pi(y_j) / d logits, the trainer's expected gradient, (A,), for coefficients (G, M)."""
    pi = logits.softmax(0)
    scores = torch.eye(len(pi), dtype=pi.dtype)[letters] - pi
    return (chance[:, None, None] * coefficients[..., None] * scores).mean(1).sum(0)
