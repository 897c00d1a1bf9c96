"""Expected first variations of groups in TRL's trainer: sums over all draws or subsets, autograd, and integrals.

A group with rewards (M,) is a distribution with probabilities p = 1/M; pairwise objectives take similarities (M, M).
"""

import functools
import itertools
import math

import torch
from scipy.stats import norm

M = 4  # completions of a prompt
numbers, zeros = (functools.partial(make, dtype=torch.float64) for make in (torch.tensor, torch.zeros))
TABLE = [2.0, 1.5, 0.5, -0.25]


def by_autograd(R, r):
    """The gradient of R(p) at p = 1/M is the first variation, up to a constant."""
    p = torch.full_like(r, 1 / len(r), requires_grad=True)
    value = R(p, r)
    (gradient,) = torch.autograd.grad(value, p)
    return gradient - gradient.mean(), value.item()


def best(n, p, r):
    draws = torch.cartesian_prod(*[torch.arange(len(r))] * n).view(-1, n)
    return (p[draws].prod(-1) * r[draws].amax(-1)).sum()


def best_of_poisson(rate, p, r):
    chances = [math.exp(-rate) * rate**k / math.factorial(k) for k in range(1, 40)]
    order = r.argsort()
    cdf = torch.cat((zeros(1), p[order].cumsum(0)))
    return sum(chance * (r[order] * (cdf**k).diff()).sum() for k, chance in enumerate(chances, 1))


def tilted(tau, p, r):
    e = p * (r / tau).exp()
    return (e * r).sum() / e.sum()


def by_subsets(n, h, data):
    """Mean of h over all subsets of n samples (the value), and over those that contain sample j (first variation)."""
    size = len(data)
    mean = lambda chosen: sum(h(data, list(s)) for s in chosen) / len(chosen)  # noqa: E731
    every = list(itertools.combinations(range(size), n))
    containing = numbers([n * mean([s for s in every if j in s]) for j in range(size)])
    return size / (size - n) * (containing - containing.mean()), mean(every)


def log_det(kernel, s):
    return (kernel[s][:, s] + 1e-3 * torch.eye(len(s), dtype=kernel.dtype)).logdet().item()


def worst_half(r):
    """-(q - r)^+ / 0.5 at the quantile q (Rockafellar and Uryasev); the value is the mean of the two worst."""
    ordered = r.sort().values
    linear = -(ordered[2] - r).clamp(min=0) / 0.5
    return linear - linear.mean(), ordered[:2].mean().item()


def smoothed_best(n, r):
    low, high = r.quantile(numbers([0.25, 0.75]))
    h = 0.9 * (min(r.std(), (high - low) / 1.34) if high > low else r.std()) * len(r) ** -0.2
    at = torch.cat((torch.linspace(float(r.min() - 9 * h), float(r.max() + 9 * h), 100_001, dtype=r.dtype), r))
    at = at.sort().values
    cdf = torch.from_numpy(norm.cdf(((at[:, None] - r) / h).numpy())).mean(-1) if h > 0 else torch.ones_like(at)
    below = torch.cat((zeros(1), torch.cumulative_trapezoid(n * cdf ** (n - 1), at)))
    linear = below[torch.searchsorted(at, r)]
    return linear - linear.mean(), float(at[-1] - torch.trapezoid(cdf**n, at))


def by_table(table, r):
    ordered, places = r.sort()
    linear = zeros(len(r))
    for j, place in enumerate(places):
        linear[place] = -sum(table[k] * (ordered[k + 1] - ordered[k]) for k in range(j, len(r) - 1))
    return linear - linear.mean(), sum(w * x for w, x in zip(table, ordered.tolist(), strict=True)) / len(r)


def worst(n, r):
    linear, value = by_autograd(functools.partial(best, n), -r)
    return -linear, -value


TRUTH = {
    "mean": lambda r: (r - r.mean(), r.mean().item()),
    "bon:3": functools.partial(by_autograd, functools.partial(best, 3)),
    "bon:4": functools.partial(by_autograd, functools.partial(best, 4)),
    "bon:2:unbiased": functools.partial(by_subsets, 2, lambda r, s: r[s].max().item()),
    "wor:3": functools.partial(worst, 3),
    "bop:2": functools.partial(by_autograd, functools.partial(best_of_poisson, 2.0)),
    "cvar:0.5": worst_half,
    "soft:0.5": functools.partial(by_autograd, functools.partial(tilted, 0.5)),
    "erm:1": functools.partial(by_autograd, lambda p, r: (p * r.exp()).sum().log()),
    "bon:4:kde": functools.partial(smoothed_best, 4),
    "distortion:2,1.5,0.5,-0.25": functools.partial(by_table, TABLE),
    "rao": functools.partial(by_subsets, 2, lambda kernel, s: -kernel[s[0], s[1]].item()),
    "dpp:2": functools.partial(by_subsets, 2, log_det),
}
PAIRWISE = ("rao", "dpp:2")


def with_absent(objective, values, size=M):
    """First variations (P * size,) of groups in which None abstains, 0 there, and the mean value of the others.

    Pairwise objectives take the similarities of the values as numbers.
    """
    out, group_values = zeros(len(values)), []
    for start in range(0, len(values), size):
        present = [j for j in range(start, start + size) if values[j] is not None]
        if len(present) > (objective in PAIRWISE) * 2:
            data = numbers([values[j] for j in present])
            data = (-(data[:, None] - data).abs()).exp() if objective in PAIRWISE else data
            out[present], value = TRUTH[objective](data)
            group_values.append(value)
    return out, sum(group_values) / max(1, len(group_values))


def of_aggregate(g, pairs):
    """sum_i dg/dR_i (first variation of R_i) at the values over the batch, and g, from pairs of the two."""
    R = numbers([value for _, value in pairs], requires_grad=True)
    aggregate = g(R)
    (gradient,) = torch.autograd.grad(aggregate, R)
    return sum(w * x for w, (x, _) in zip(gradient, pairs, strict=True)), aggregate.item()
