"""Advantages compared with NumPy and exact cases."""

import numpy as np
import pytest
import torch

from nlgrpo.objectives.advantages import advantages, effective_sample_size


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_advantages_equal_numpy(scale):
    linear = np.random.default_rng(0).normal(size=(6, 5)) * [[1], [10], [0.1], [3], [1], [1]]
    centred = linear - linear.mean(1, keepdims=True)
    std = {"none": 1.0 - 1e-4, "group": linear.std(1, ddof=1, keepdims=True), "batch": centred.std(ddof=1)}[scale]
    ours = advantages(torch.tensor(linear), scale=scale)
    np.testing.assert_allclose(ours, centred / (std + 1e-4), rtol=1e-10)


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_a_constant_per_group_changes_nothing(scale):
    linear = torch.randn(4, 6, dtype=torch.float64)
    shifted = linear + torch.tensor([[5.0], [-3.0], [0.0], [100.0]], dtype=torch.float64)
    torch.testing.assert_close(advantages(shifted, scale=scale), advantages(linear, scale=scale))


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("M", [1, 2, 3, 7])
def test_equal_values_give_exact_zeros(scale, M):
    linear = torch.full((3, M), 0.1) * torch.tensor([[1.0], [3.0], [-1e30]])
    assert (advantages(linear, scale=scale) == 0).all()
    mixed = torch.stack([torch.full((M,), 0.1), torch.arange(M).float()])
    assert (advantages(mixed, scale=scale)[0] == 0).all()
    assert advantages(mixed, scale=scale).isfinite().all()


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_baseline_none_subtracts_nothing(scale):
    centred = torch.tensor([[0.0, 3.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    std = {"none": 1.0 - 1e-4, "group": centred.std(1, keepdim=True), "batch": centred.std()}[scale]
    torch.testing.assert_close(advantages(centred, scale=scale, baseline="none"), centred / (std + 1e-4))
    with pytest.raises(ValueError, match="baseline='median' is not known; expected 'mean', 'loo' or 'none'"):
        advantages(centred, baseline="median")


def test_leave_one_out_subtracts_the_mean_of_the_others():
    linear = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    others = torch.stack([linear[:, [k for k in range(5) if k != j]].mean(1) for j in range(5)], 1)
    torch.testing.assert_close(advantages(linear, baseline="loo"), linear - others)
    assert (advantages(torch.ones(2, 1), baseline="loo") == 0).all()
    assert (advantages(torch.full((2, 3), 0.1), baseline="loo") == 0).all()


def test_advantages_without_groups():
    assert advantages(torch.ones(0, 4), scale="batch").shape == (0, 4)


@pytest.mark.parametrize(
    ("linear", "scale", "message"),
    [
        (torch.ones(2, 3), "std", "'none', 'group' or 'batch'"),
        (torch.ones(3), "none", r"\(P, M\)"),
        (torch.tensor([[1.0, 2.0], [0.0, torch.nan]]), "none", "group 1, sample 1 is nan"),
        (torch.tensor([[1.0, -torch.inf]]), "group", "group 0, sample 1 is -inf"),
    ],
)
def test_advantages_refuse(linear, scale, message):
    with pytest.raises(ValueError, match=message):
        advantages(linear, scale=scale)


def test_effective_sample_size():
    rows = [
        ([1.0, -1.0, 1.0, -1.0], 4.0),
        ([3.0, 0.0, 0.0, 0.0], 1.0),
        ([0.0] * 4, 0.0),
        ([1.0, 1.0, -2.0, 0.0], 16 / 6),
    ]
    for row, size in rows:
        assert effective_sample_size(torch.tensor([row])).item() == pytest.approx(size)
        assert effective_sample_size(1e-30 * torch.tensor([row])).item() == pytest.approx(size), "scale does not count"
        assert effective_sample_size(1e30 * torch.tensor([row])).item() == pytest.approx(size)
    together = effective_sample_size(torch.tensor([row for row, _ in rows]))
    assert together.item() == pytest.approx(sum(size for _, size in rows) / 4)
