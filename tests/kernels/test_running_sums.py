"""Running sums by blocks, which a GPU computes in deterministic mode, against PyTorch's."""

import pytest
import torch

from nlgrpo.kernels.reference import BLOCK, running_sums, sums_by_blocks


@pytest.mark.parametrize("n", [0, 1, 7, BLOCK, BLOCK + 1, 3 * BLOCK, BLOCK**2 + BLOCK + 1])
def test_sums_by_blocks(n):
    """Whole numbers, whose sums are exact in any order."""
    x = torch.randint(-9, 10, (2, 3, n), generator=torch.Generator().manual_seed(0)).double()
    assert torch.equal(sums_by_blocks(x), x.cumsum(-1))


def test_the_gradient_is_that_of_cumsum():
    x = torch.randn(3, 2 * BLOCK + 5, dtype=torch.float64, requires_grad=True)
    upstream = torch.randint(-9, 10, x.shape).double()
    gradients = [torch.autograd.grad(f(x), x, upstream)[0] for f in (sums_by_blocks, lambda x: x.cumsum(-1))]
    assert torch.equal(*gradients)


def test_elsewhere_it_is_cumsum():
    x = torch.rand(3, 1000)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(running_sums(x, torch.float64), x.cumsum(-1, dtype=torch.float64))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(running_sums(x), x.cumsum(-1))
