"""Estimate a model's value under best-of-N and other procedures from n samples per prompt, with intervals over prompts.

Inputs are tensors, results float64. Legend: P prompts, n samples per prompt.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from numbers import Integral

import numpy as np
import torch
from scipy.special import stdtr, stdtrit
from torch import Tensor

from nlgrpo.objectives.base import Objective
from nlgrpo.objectives.rank_based import BestOfN, OfN, RankBased, WorstOfN, order_weights
from nlgrpo.objectives.tilted import SoftBestOfN


def over_present(estimate: Callable[..., Tensor], *sides: Tensor, fewest: int = 1) -> Tensor:
    """Return an estimate at each prompt from the samples that have a reward, (P,) float64; NaN where there are too few.

    ``sides``: one or more rewards (P, n), or several numbers of each sample (P, n, c), in which NaN marks a missing
    sample. ``estimate`` takes the samples that are there, (p, k) or (p, k, c) of each side, for p prompts that have the
    same k, and returns (p,). A prompt with fewer than ``fewest`` samples on a side is NaN.

    Raises ValueError for ``fewest`` below 1 or above n, and as ``estimate``.
    """
    # of each side: the number of samples that are there, and their places before the others
    counts = []
    present_first = []
    for side in sides:
        _checked_n(fewest, side.shape[1])
        absent = side.isnan()
        if side.dim() > 2:
            absent = absent.flatten(2).any(-1)
        counts.append((~absent).sum(1))
        present_first.append(absent.to(torch.uint8).argsort(dim=1, stable=True))
    counts_of_prompts = torch.stack(counts, 1)
    out = torch.full_like(sides[0].flatten(1)[:, 0], math.nan, dtype=torch.float64)
    for numbers in counts_of_prompts.unique(dim=0).tolist():
        if min(numbers) < fewest:
            continue
        same = (counts_of_prompts == counts_of_prompts.new_tensor(numbers)).all(1)
        rows = same.nonzero()
        parts = []
        for side, places, k in zip(sides, present_first, numbers, strict=True):
            columns = places[rows[:, 0], :k]
            parts.append(side[rows, columns])
        out[rows[:, 0]] = estimate(*parts).double()
    return out


def best_of_n(rewards: Tensor, ns: Sequence[int]) -> Tensor:
    """Expected reward of the best of N samples, for every N in ``ns``: rewards (P, n) -> (len(ns), P) float64.

        sum_k r_(k) C(k-1, N-1) / C(n, N),   r_(1) <= ... <= r_(n)

    This is the mean over all subsets of N of the n samples, hence unbiased for independent samples. N = 1 gives the
    mean, N = n the maximum.

    Raises ValueError for rewards that are not (P, n) or not finite, and for N < 1 or N > n.
    """
    rewards = _group(rewards, "rewards")
    if not rewards.isfinite().all():
        raise ValueError(
            f"rewards contain {rewards.isinf().sum()} infinite values, which have no mean; clamp them first"
        )
    n = rewards.shape[1]
    rows = [order_weights(n, _checked_n(best_of, n)) for best_of in _sequence(ns)]
    weights = torch.stack(rows).to(rewards.device)
    ordered = rewards.sort(dim=1).values
    return weights @ ordered.T


def worst_of_n(rewards: Tensor, ns: Sequence[int]) -> Tensor:
    """Expected reward of the worst of N samples, ``-best_of_n(-rewards, ns)``. Shapes and errors as `best_of_n`."""
    return -best_of_n(-rewards, ns)


def win_rate(a: Tensor, b: Tensor, n: int, worst: bool = False) -> Tensor:
    """Rate at which best-of-n of A beats best-of-n of B, ties counting 1/2: rewards a (P, n_a), b (P, n_b) -> (P,).

        P(max A > max B) + 1/2 P(max A = max B) = sum_i w_i (G(a_(i)-) + G(a_(i))) / 2,   G the CDF of max B

    Exact over all pairs of subsets of n samples of each side, in O(n log n), float64. The order of equal rewards does
    not matter, because G jumps at a value by the weight of all samples that have it. ``worst`` compares minima instead.
    A model against itself has 1/2; best-of-n against one sample of the same continuous distribution has n/(n+1).

    Raises ValueError for NaN, shapes that do not match, and n < 1 or above n_a or n_b. Infinite rewards are allowed.
    """
    a, b = _both(a, b)
    for samples in (a, b):
        _checked_n(n, samples.shape[1])
    objective = WorstOfN(int(n), "unbiased") if worst else BestOfN(int(n), "unbiased")
    return _win_rate(a, b, objective)


def procedure_win_rate(a: Tensor, b: Tensor, objective: Objective) -> Tensor:
    """`win_rate` if both sides choose their response by the procedure of ``objective``, (P,) float64.

    The probability of each sample is that of `chosen_weights`. Raises ValueError as `chosen_weights` and `win_rate`.
    """
    return _win_rate(*_both(a, b), objective)


def _win_rate(a: Tensor, b: Tensor, objective: Objective) -> Tensor:
    a = a.sort(dim=1).values
    b = b.sort(dim=1).values
    return _weighted_win_rate(a, chosen_weights(a, objective), b, chosen_weights(b, objective))


def weighted_win_rate(a: Tensor, weights_a: Tensor, b: Tensor, weights_b: Tensor) -> Tensor:
    """`win_rate` if each sample of A (P, n_a) and B (P, n_b) is the response with the given probability: (P,).

    Raises ValueError for NaN and shapes that do not match.
    """
    a, b = _both(a, b)
    if weights_a.shape != a.shape or weights_b.shape != b.shape:
        raise ValueError(
            f"expected a probability per sample, {tuple(a.shape)} and {tuple(b.shape)}, "
            f"got {tuple(weights_a.shape)} and {tuple(weights_b.shape)}"
        )
    order_b = b.argsort(dim=1)
    return _weighted_win_rate(a, weights_a, b.gather(1, order_b), weights_b.gather(1, order_b))


def _weighted_win_rate(a: Tensor, weights_a: Tensor, b: Tensor, weights_b: Tensor) -> Tensor:
    """As `weighted_win_rate`, with ``b`` in ascending order."""
    cdf = torch.nn.functional.pad(weights_b.cumsum(1), (1, 0))
    lower = cdf.gather(1, torch.searchsorted(b, a))
    at_most = cdf.gather(1, torch.searchsorted(b, a, right=True))
    return (weights_a * (lower + at_most) / 2).sum(1)


def chosen_weights(ordered: Tensor, objective: Objective) -> Tensor:
    """Probability that each of n samples is the response, for rewards (P, n) in ascending order: (P, n) float64.

    "bon:N" and "wor:N": over all subsets of N (unbiased). Other rank-based objectives: F(k/n) - F((k-1)/n), normalised
    if the sum is below 1 (`BestOfPoisson` may select no sample). Soft best-of-N: softmax of r/tau.

    Raises ValueError for an objective that is not a selection procedure: entropic risk, diversity, and distortions
    with f < 0.
    """
    P, n = ordered.shape
    match objective:
        case SoftBestOfN(tau):
            return ((ordered - ordered.amax(1, keepdim=True)) / tau).softmax(1)
        case OfN():
            weights = type(objective)(_checked_n(objective.n, n), "unbiased").shares(n)
        case RankBased():
            weights = objective.masses(n)
        case _:
            raise ValueError(f"{objective} chooses no response; expected best-of-N or another selection procedure.")
    if (weights < 0).any() or not weights.sum() > 0:
        raise ValueError(f"{objective} chooses no response, because it has negative weights; expected f >= 0.")
    return (weights / weights.sum()).to(ordered.device).expand(P, n)


def procedure_value(rewards: Tensor, objective: Objective) -> Tensor:
    """Value of ``objective`` at each prompt from the rewards (P, n) of samples, (P,) float64.

    Best-of-N and worst-of-N are unbiased (`best_of_n`), the others plug-in estimates. Raises ValueError as `best_of_n`
    and `Objective.value`.
    """
    if isinstance(objective, BestOfN):
        return best_of_n(rewards, [objective.n])[0]
    if isinstance(objective, WorstOfN):
        return worst_of_n(rewards, [objective.n])[0]
    return objective.value(_group(rewards, "rewards"))


def selected_value(rewards: Tensor, judged: Tensor, objective: Objective) -> Tensor:
    """Expected reward ``judged`` (P, n) of the response that ``objective`` chooses by ``rewards`` (P, n): (P,) float64.

    With a proxy as ``rewards`` this measures over-optimisation: above some N it falls while the value of the proxy
    itself rises (Gao et al. 2023). Samples of equal reward are chosen with equal probability.

    Raises ValueError as `chosen_weights` and `win_rate`.
    """
    rewards, judged = _both(rewards, judged)
    if judged.shape != rewards.shape:
        raise ValueError(f"expected judged of the shape of rewards {tuple(rewards.shape)}, got {tuple(judged.shape)}")
    ordered, order = rewards.sort(dim=1)
    weights = chosen_weights(ordered, objective)
    judged = judged.gather(1, order)
    # equal rewards share their weight
    first = torch.searchsorted(ordered, ordered)
    last = torch.searchsorted(ordered, ordered, right=True)
    total = torch.nn.functional.pad(weights.cumsum(1), (1, 0))
    shared = (total.gather(1, last) - total.gather(1, first)) / (last - first)
    return (shared * judged).sum(1)


def pass_at_k(correct: Tensor, ks: Sequence[int]) -> Tensor:
    """Probability that one of k samples is correct, for every k in ``ks``: (P, n) of 0 and 1 -> (len(ks), P) float64.

        1 - C(n - c, k) / C(n, k),   c of the n are correct      (Chen et al. 2021, Eq. 1)

    This is `best_of_n` of rewards 0 and 1.

    Raises ValueError as `best_of_n`, and for values other than 0 and 1.
    """
    return best_of_n(_zero_one(correct), ks)


def maj_at_k(correct: Tensor, answers: Tensor, ks: Sequence[int]) -> Tensor:
    """Probability that the majority answer of k samples is correct: (P, n), (P, n) -> (len(ks), P) float64.

    ``answers`` are integers that identify the answers to a prompt; -1 means no answer and no vote. ``correct`` is 0 or
    1. Ties between the most frequent answers are broken at random; without any vote the result is wrong. Exact over all
    subsets of k of the n samples, by counting (self-consistency, Wang et al. 2023).

    Raises ValueError for shapes that do not match, another ``correct``, an answer that is correct in one sample and
    wrong in another, and k < 1 or k > n.
    """
    correct = _zero_one(correct)
    if answers.shape != correct.shape or answers.is_floating_point():
        raise ValueError(f"expected integer answers {tuple(correct.shape)}, got {answers.dtype} {tuple(answers.shape)}")
    n = correct.shape[1]
    votes = [_votes(c, a) for c, a in zip(correct.tolist(), answers.tolist(), strict=True)]
    table = []
    for k in _sequence(ks):
        _checked_n(k, n)
        table.append([_majority(right, wrong, unanswered, k) for right, wrong, unanswered in votes])
    return torch.tensor(table, dtype=torch.float64)


def _votes(correct: list[float], answers: list[int]) -> tuple[list[int], list[int], int]:
    """Return the counts of each correct answer and of each wrong answer, and the number of samples without one."""
    verdicts: dict[int, float] = {}
    for verdict, answer in zip(correct, answers, strict=True):
        if answer >= 0 and verdicts.setdefault(answer, verdict) != verdict:
            raise ValueError(f"answer {answer} of a prompt is correct in one sample and wrong in another")
    counts = Counter(answer for answer in answers if answer >= 0)
    right = [counts[answer] for answer, verdict in verdicts.items() if verdict]
    wrong = [counts[answer] for answer, verdict in verdicts.items() if not verdict]
    return right, wrong, len(answers) - sum(counts.values())


def _majority(right: list[int], wrong: list[int], unanswered: int, k: int) -> float:
    """Fraction of the subsets of k in which a correct answer wins the vote; ties count fractionally."""
    n = sum(right) + sum(wrong) + unanswered
    every = [(count, True) for count in right] + [(count, False) for count in wrong]
    won = 0.0
    # votes of the winner
    for most in range(1, k + 1):
        # ways[t, u][j]: ways to draw j samples so that t correct and u wrong answers have ``most`` votes, none has more
        ways = {(0, 0): _choices(unanswered, k)}
        for count, is_right in every:
            fewer = _choices(count, k)
            fewer[most:] = 0.0
            grown: dict[tuple[int, int], np.ndarray] = {}
            for (t, u), row in ways.items():
                _add(grown, (t, u), np.convolve(row, fewer)[: k + 1])
                if count >= most and (t + u + 1) * most <= k:
                    with_most = np.concatenate((np.zeros(most), row[: k + 1 - most])) * float(math.comb(count, most))
                    state = (t + 1, u) if is_right else (t, u + 1)
                    _add(grown, state, with_most)
            ways = grown
        for (t, u), row in ways.items():
            if t:
                won += row[k] * t / (t + u)
    return won / math.comb(n, k)


def _choices(count: int, k: int) -> np.ndarray:
    """Ways to draw j = 0 .. k of ``count`` samples."""
    return np.array([float(math.comb(count, j)) for j in range(k + 1)])


def _add(table: dict[tuple[int, int], np.ndarray], key: tuple[int, int], row: np.ndarray) -> None:
    table[key] = table[key] + row if key in table else row


def distinct_n(sequences: Sequence[Sequence[Hashable]], n: int) -> float:
    """Fraction of distinct n-grams among all n-grams of tokens in the samples of a prompt (Li et al. 2016), in (0, 1].

    NaN if no sample has n tokens. Raises ValueError for n < 1.
    """
    if n < 1:
        raise ValueError(f"distinct-n needs n >= 1, got {n}")
    ngrams: list[tuple[Hashable, ...]] = []
    for row in sequences:
        for start in range(len(row) - n + 1):
            ngrams.append(tuple(row[start : start + n]))
    if not ngrams:
        return math.nan
    return len(set(ngrams)) / len(ngrams)


def paired_test(
    a: Tensor, b: Tensor, *, resamples: int = 10_000, level: float = 0.95, seed: int = 0
) -> tuple[float, float, float, float]:
    """Paired permutation test of a and b, (P,) each. Returns mean, low, high, p: mean of a - b, interval and p-value.

    The interval is that of `bootstrap`. The two-sided p-value is the fraction of random sign flips of the differences
    with a mean at least as large, including the observed one. NaN for one prompt.

    Raises ValueError for shapes that do not match, and as `bootstrap`.
    """
    if a.shape != b.shape or a.dim() != 1:
        raise ValueError(
            f"expected one value per prompt on both sides, (P,), got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    difference = a.double().cpu() - b.double().cpu()
    mean, low, high = (x.item() for x in bootstrap(difference, level=level, seed=seed))
    if len(difference) == 1:
        return mean, low, high, math.nan
    # a tolerance for the same sum in another order
    observed = difference.sum().abs() * (1 - 1e-12)
    larger = 0
    chunk = _rows_at_a_time(len(difference))
    for start in range(0, resamples, chunk):
        signs = _signs(len(difference), min(chunk, resamples - start), seed + start)
        sums = (signs @ difference).abs()
        larger += int((sums >= observed).sum())
    return mean, low, high, (1 + larger) / (1 + resamples)


def two_way_interval(values: Tensor, *, level: float = 0.95) -> tuple[float, float, float, float]:
    """Mean over seeds and prompts, both drawn at random, with its interval and test: values (S, P), S and P >= 2.

    Returns mean, low, high and the two-sided p-value of a mean of 0, as for differences of paired runs. By the mean
    squares of the two-way random-effects model y_sp = mu + a_s + b_p + e_sp (Searle, Casella and McCulloch 1992, 4.3):

        Var(mean) = (MS_seeds + MS_prompts - MS_residual) / (S P)

    and Student's t with Satterthwaite's degrees of freedom. Intervals over prompts alone say nothing about other seeds.
    The residual alone is the least variance that is assumed.

    Raises ValueError for fewer seeds or prompts, and for values that are not finite.
    """
    y = torch.as_tensor(values).double().cpu()
    if y.dim() != 2 or min(y.shape) < 2:
        raise ValueError(f"expected values (S, P) of at least 2 seeds and 2 prompts, got {tuple(y.shape)}")
    if not y.isfinite().all():
        raise ValueError(f"values contain {(~y.isfinite()).sum()} NaN or infinite values; leave those prompts out")
    seeds, prompts = y.shape
    mean = y.mean()
    of_seeds = y.mean(1, keepdim=True) - mean
    of_prompts = y.mean(0, keepdim=True) - mean
    residual = y - mean - of_seeds - of_prompts
    # mean squares of seeds, prompts and residual, with their degrees of freedom
    free = torch.tensor([seeds - 1, prompts - 1, (seeds - 1) * (prompts - 1)], dtype=torch.float64)
    sums = torch.stack([prompts * of_seeds.square().sum(), seeds * of_prompts.square().sum(), residual.square().sum()])
    squares = sums / free
    MS_seeds, MS_prompts, MS_residual = squares
    total = torch.maximum(MS_seeds + MS_prompts - MS_residual, MS_residual)
    centre = float(mean)
    all_equal = total <= 1e-24 * (1 + mean.square())
    if all_equal:
        return centre, centre, centre, float(mean.abs() <= 1e-12)
    freedom = max(1.0, float(total.square() / (squares.square() / free).sum()))
    error = float((total / (seeds * prompts)).sqrt())
    half = error * float(stdtrit(freedom, (1 + level) / 2))
    p_value = 2 * float(stdtr(freedom, -abs(centre) / error))
    return centre, centre - half, centre + half, p_value


def bootstrap(
    per_prompt: Tensor, *, resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean over prompts and its bootstrap interval (`_tails`): (..., P) -> mean, low, high, each (...).

    Prompts are resampled with replacement, the same ones for every leading index, so that rows stay paired. For a
    single prompt low and high are NaN. If all values are equal, the interval has width 0, even for few prompts. The
    same seed gives the same interval.

    Raises ValueError for no prompts, NaN or infinite values, resamples < 1 and a level outside (0, 1).
    """
    values = torch.as_tensor(per_prompt).double().cpu()
    if values.dim() == 0 or values.shape[-1] == 0:
        raise ValueError(f"per_prompt must have shape (..., P) with P >= 1, got {tuple(values.shape)}")
    if not values.isfinite().all():
        raise ValueError(
            f"per_prompt contains {(~values.isfinite()).sum()} NaN or infinite values; leave those prompts out"
        )
    if resamples < 1 or not 0 < level < 1:
        raise ValueError(f"expected resamples >= 1 and 0 < level < 1, got resamples={resamples}, level={level}")
    mean = values.mean(-1)
    if values.shape[-1] == 1:
        return mean, torch.full_like(mean, math.nan), torch.full_like(mean, math.nan)
    differ = values.amax(-1) > values.amin(-1)
    # exactly 0 for equal values despite rounding of the mean
    centred = (values - mean[..., None]) * differ[..., None]
    resampled = _resampled_means(centred, resamples, seed).sort(dim=0).values
    low, high = _tails(centred, resampled, level)
    return mean, mean + _quantile(resampled, low), mean + _quantile(resampled, high)


def _tails(centred: Tensor, resampled: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Return the two probabilities whose quantiles of the ``resampled`` means (B, ...) bound the interval, (...) each.

    Each bound is the outer one of two: the percentile Phi(z), and that of BCa (Efron 1987),

        Phi(z0 + (z0 + z) / (1 - a (z0 + z))),   z = -+ sqrt(P / (P - 1)) t_{P-1}((1 + level) / 2)

    z0 is the normal quantile of the fraction of resampled means below the mean, and a = sum d^3 / (6 (sum d^2)^1.5) for
    the differences d from the mean, ``centred`` (..., P). Percentiles alone cover too rarely for skewed values and rare
    events, BCa alone if most prompts are tied and a is noise. z replaces the normal quantile: it corrects the factor
    sqrt((P - 1) / P) in the std of resampled means, and widens the interval as Student's t does (Hesterberg 2015, "What
    teachers should know about the bootstrap").
    """
    prompts = centred.shape[-1]
    std = centred.square().mean(-1).sqrt()
    std = torch.where(std > 0, std, 1.0)
    acceleration = (centred / std[..., None]).pow(3).mean(-1) / (6 * math.sqrt(prompts))
    # a tolerance for equal sums computed in another order
    tie = 1e-9 * std
    below = ((resampled < -tie).double() + (resampled <= tie).double()).mean(0) / 2
    # keeps the normal quantile finite
    least = 0.5 / len(resampled)
    z0 = torch.special.ndtri(below.clamp(least, 1 - least))
    z = math.sqrt(prompts / (prompts - 1)) * float(stdtrit(prompts - 1, (1 + level) / 2))
    percentile = torch.special.ndtr(torch.tensor(z, dtype=torch.float64))
    low = _corrected(-z, z0, acceleration).clamp(max=1 - percentile)
    high = _corrected(z, z0, acceleration).clamp(min=percentile)
    return low, high


def _corrected(z: float, z0: Tensor, acceleration: Tensor) -> Tensor:
    """Return the probability that BCa uses in place of Phi(z)."""
    # near 0 the bound is the outermost resample
    slope = (1 - acceleration * (z0 + z)).clamp(min=1e-12)
    return torch.special.ndtr(z0 + (z0 + z) / slope)


def _quantile(ordered: Tensor, share: Tensor) -> Tensor:
    """Return quantiles of (B, ...) in ascending order, at a probability ``share`` per index, interpolated: (...)."""
    place = share * (len(ordered) - 1)
    below = place.long()
    above = (below + 1).clamp(max=len(ordered) - 1)
    low = ordered.gather(0, below[None])[0]
    high = ordered.gather(0, above[None])[0]
    return torch.lerp(low, high, place - below)


def _resampled_means(values: Tensor, resamples: int, seed: int) -> Tensor:
    """Means over prompts drawn with replacement: (..., P) -> (resamples, ...)."""
    prompts = values.shape[-1]
    chunk = _rows_at_a_time(prompts)
    parts = []
    for start in range(0, resamples, chunk):
        counts = _counts(prompts, min(chunk, resamples - start), seed + start)
        parts.append(torch.tensordot(counts, values, dims=([1], [values.dim() - 1])) / prompts)
    return torch.cat(parts)


def _rows_at_a_time(prompts: int) -> int:
    # at most 32 MiB
    return max(1, 2**22 // prompts)


# Cached, as a table of results uses the same draws hundreds of times, and drawing takes longer than the rest.


@functools.lru_cache(maxsize=2)
def _counts(prompts: int, rows: int, seed: int) -> Tensor:
    """Number of times each prompt is drawn in each resample, (rows, prompts)."""
    drawn = torch.randint(prompts, (rows, prompts), generator=torch.Generator().manual_seed(seed))
    ones = torch.ones_like(drawn, dtype=torch.float64)
    return torch.zeros_like(ones).scatter_add_(1, drawn, ones)


@functools.lru_cache(maxsize=2)
def _signs(prompts: int, rows: int, seed: int) -> Tensor:
    """1 or -1 of each prompt in each resample, (rows, prompts)."""
    coins = torch.randint(2, (rows, prompts), generator=torch.Generator().manual_seed(seed))
    return coins.double() * 2 - 1


def _both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a = _group(a, "a")
    b = _group(b, "b")
    if len(a) != len(b):
        raise ValueError(f"a has {len(a)} prompts and b has {len(b)}; both sides must answer the same prompts")
    return a, b


def _zero_one(correct: Tensor) -> Tensor:
    correct = _group(correct, "correct")
    if not ((correct == 0) | (correct == 1)).all():
        raise ValueError("expected 0 for wrong and 1 for correct samples; use best_of_n for other rewards")
    return correct


def _group(rewards: Tensor, name: str) -> Tensor:
    """Return ``rewards`` in float64. Raises ValueError unless they are (P, n) with n >= 1 and without NaN."""
    if not isinstance(rewards, Tensor) or rewards.dim() != 2 or rewards.shape[1] == 0:
        got = tuple(rewards.shape) if isinstance(rewards, Tensor) else type(rewards).__name__
        raise ValueError(f"{name} must be a tensor (P prompts, n >= 1 samples), got {got}")
    rewards = rewards.double()
    if rewards.isnan().any():
        prompt, sample = rewards.isnan().nonzero()[0].tolist()
        raise ValueError(
            f"{name} contains {rewards.isnan().sum()} NaN, the first at prompt {prompt}, sample {sample}; "
            "over_present leaves out the samples on which a reward abstains"
        )
    return rewards


def _sequence(ns: Sequence[int]) -> list[int]:
    if isinstance(ns, Integral) or len(ns) == 0:
        raise ValueError(f"ns must be a non-empty sequence of integers, such as [1, 4], got {ns!r}")
    return list(ns)


def _checked_n(best_of: int, n: int) -> int:
    if not isinstance(best_of, Integral) or not 1 <= best_of <= n:
        raise ValueError(
            f"N must be an integer from 1 to {n}, the number of samples per prompt, got {best_of!r}; "
            "draw more samples or use a smaller N"
        )
    return int(best_of)
