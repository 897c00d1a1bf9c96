"""The table of Kolmogorov-Smirnov tests compared with SciPy, the nominal level, and vBoN, Table 1."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import binom, ks_2samp
from support.truths import normal

from nlgrpo.calibration.kolmogorov_smirnov import COLUMNS, ks_table


def test_each_prompt_is_compared_with_its_own_samples():
    """The chosen samples are not returned, so the mean distance must equal that of some choice per prompt."""
    rewards = normal(4, 8).round(decimals=1)  # with ties
    (row,) = ks_table(rewards, (3, 8), nested=True)
    seen = [[ks_2samp(three, x).statistic for three in itertools.combinations(x, 3)] for x in rewards.tolist()]
    sums = {round(sum(choice), 9) for choice in itertools.product(*map(set, seen))}
    assert round(4 * row.distance, 9) in sums
    (same,) = ks_table(rewards[:, :1].expand(4, 12), (6, 6))
    assert (same.rejected, same.distance) == (0, 0)


def test_rows_equal_scipy(monkeypatch):
    """Without shuffling, the test of each prompt equals SciPy's."""
    monkeypatch.setattr("nlgrpo.calibration.kolmogorov_smirnov._shuffled", lambda rewards, seed: rewards)
    rewards = normal(60, 90)
    rewards[:, :25] += torch.linspace(0, 1.5, 60)[:, None]
    rewards[::3] = rewards[::3].round()
    rows = ks_table(rewards, (50, 25, 40), 0.1)
    assert [(row.smaller, row.larger) for row in rows] == [(25, 40), (25, 50), (40, 50)]
    for row in rows:
        m, n = row.smaller, row.larger
        truth = [ks_2samp(x[:m], x[m : m + n], method="exact") for x in rewards.numpy()]
        few = [t for t in truth if t.pvalue <= 0.1]
        assert row.rejected == len(few) > 0
        assert row.rate == len(few) / 60
        assert row.statistic == pytest.approx(np.mean([t.statistic for t in few]))
        assert row.p_value == pytest.approx(np.mean([t.pvalue for t in few]), rel=1e-9)
        assert row.distance == pytest.approx(np.mean([t.statistic for t in truth]))


def critical_distance(m, n, alpha):
    """Smallest distance with a p-value <= ``alpha``, times lcm(m, n), and that p-value: the exact level of the test.

    Counts the orders of m + n samples with a smaller distance. An order is a path from (0, 0) to (m, n); its distance
    is a multiple of 1/lcm(m, n), so p-values are discrete.
    """
    orders, least = math.comb(m + n, n), math.lcm(m, n)
    for distance in range(least + 1):
        near = [[1] + n * [0] for _ in range(m + 1)]
        for i, j in itertools.product(range(m + 1), range(n + 1)):
            if i + j:
                ways = (near[i - 1][j] if i else 0) + (near[i][j - 1] if j else 0)
                near[i][j] = ways if abs(i * n - j * m) * least < distance * m * n else 0
        level = 1 - near[m][n] / orders
        if level <= alpha:
            return distance, level


def exact_nested_level(m, n, alpha):
    """Exact rejection rate of m of n samples against the n: counts the choices of m of n with a smaller distance.

    The i-th smallest of the m may have each rank among the n at which both CDFs are near before and after it.
    """
    distance, _ = critical_distance(m, n, alpha)
    near = distance * m * n // math.lcm(m, n)
    ways = [1] + n * [0]  # of placing the first i, the last of them at rank x
    for i in range(m):
        before = list(itertools.accumulate(ways))
        ways = [0] + [
            before[x] if abs((i + 1) * n - (x + 1) * m) < near and abs(i * n - x * m) < near else 0 for x in range(n)
        ]
    return 1 - sum(ways) / math.comb(n, m)


def test_the_rejection_rate_equals_the_level():
    P = 3000
    rewards = normal(P, 90)
    for alpha in (0.05, 0.2):
        (row,) = ks_table(rewards, (30, 60), alpha)
        _, level = critical_distance(30, 60, alpha)
        assert alpha / 2 < level <= alpha
        assert binom.ppf(1e-4, P, level) <= row.rejected <= binom.ppf(1 - 1e-4, P, level)


def test_drifting_samples_are_shuffled():
    drifting = normal(200, 100) + torch.linspace(0, 3, 100)
    (row,) = ks_table(drifting, (50, 50))
    assert row.rate <= 0.1  # after shuffling, both sets come from one mixture
    assert row.distance < 0.25


@pytest.mark.slow
@pytest.mark.parametrize(("M", "exact", "printed"), [(5, 0.0466, 0.0614), (20, 0.0382, 0.0402), (100, 0.0104, 0.0114)])
def test_nested_samples_have_the_rates_of_table_1_except_for_5_samples(M, exact, printed):
    """Rewards of 5,000 prompts that are pure noise give the rejection rates of vBoN, Table 1, for 20 and 100 of 600."""
    (row,) = ks_table(normal(5000, 600).float(), (M, 600), nested=True)
    level = exact_nested_level(M, 600, 0.05)
    assert level == pytest.approx(exact, abs=5e-5)
    assert binom.ppf(1e-4, 5000, level) <= row.rejected <= binom.ppf(1 - 1e-4, 5000, level)
    noise = math.sqrt(level * (1 - level) / 5000)
    assert (abs(printed - level) < 2 * noise) == (M != 5)
    assert M != 5 or printed - level > 4.5 * noise


def test_the_rate_of_large_nested_samples():
    (row,) = ks_table(normal(5000, 600).float(), (200, 600), nested=True)
    arithmetic = 2 * math.exp(-2 * 1.358**2 * (600 + 200) / (600 - 200))
    assert row.rate == pytest.approx(0.0006, abs=4 * math.sqrt(2 * arithmetic / 5000))
    assert row.rate == pytest.approx(arithmetic, abs=4 * math.sqrt(arithmetic / 5000))


def test_nested_levels_equal_an_enumeration():
    for m, n in ((2, 7), (3, 8)):
        few = [
            ks_2samp(chosen, range(n), method="exact").pvalue <= 0.4 for chosen in itertools.combinations(range(n), m)
        ]
        assert 0 < sum(few) < len(few)
        assert exact_nested_level(m, n, 0.4) == pytest.approx(np.mean(few))


def test_the_choice_of_samples_depends_only_on_the_seed():
    rewards = normal(50, 30)
    first, again, other = (ks_table(rewards, (10, 15), seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert ks_table(rewards.float(), (10, 15)) == ks_table(rewards.float(), (15, 10))


def test_cells():
    rows = ks_table(torch.arange(40.0).view(2, 20), (3, 20), nested=True)
    assert len(rows[0].cells()) == len(COLUMNS)
    assert rows[0].cells()[:6] == ("3", "20", "0 of 2", "0.00%", "-", "-")
    far = ks_table(normal(400, 40), (20, 20), 0.3)[0]
    assert far.cells()[2:4] == (f"{far.rejected} of 400", f"{far.rejected / 4:.2f}%")
    assert far.cells()[4:6] == (f"{far.statistic:.2f}", f"{far.p_value:.3f}")


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        (normal(3), {"sizes": (1, 1)}, r"\(P, K\), .* got \(3,\)"),
        (normal(3, 0), {"sizes": (1, 1)}, r"got \(3, 0\)"),
        (torch.tensor([[0.0, 1.0], [2.0, math.nan]]), {"sizes": (1, 1)}, r"rewards\[1, 1\] is NaN"),
        (normal(2, 9), {"sizes": (5,)}, "two or more"),
        (normal(2, 9), {"sizes": (0, 5)}, "at least 1"),
        (normal(2, 9), {"sizes": (4, 6)}, "4 against 6 needs 10 samples per prompt, got 9; .* nested=True"),
        (normal(2, 9), {"sizes": (4, 10), "nested": True}, "4 against 10 needs 10 .* got 9; draw more"),
        (normal(2, 9), {"sizes": (4, 4), "alpha": 5}, "alpha=5"),
    ],
)
def test_invalid_arguments_are_refused(rewards, options, message):
    with pytest.raises(ValueError, match=message):
        ks_table(rewards, **options)
