"""How far results of a GPU are from the truth."""

import torch
from torch import Tensor


def error(found: Tensor, truth: Tensor) -> float:
    """Norm of ``found - truth`` relative to that of ``truth``, in float64."""
    found, truth = found.detach().cpu().double(), truth.detach().cpu().double()
    assert found.shape == truth.shape, (found.shape, truth.shape)
    assert found.isfinite().all()
    return float((found - truth).norm() / truth.norm())


def check(found: Tensor, truth: Tensor, bound: float, *, planted: Tensor) -> None:
    """Assert that the error is below ``bound``, and that of results with a planted fault is not."""
    assert error(found, truth) < bound
    assert error(planted, truth) > bound, "the bound does not notice the planted fault"


FLOAT32 = 2e-5  # of results in float32: the order of sums differs between devices
BFLOAT16 = 0.01  # a number is rounded by up to 0.4%, and several roundings follow each other
assert torch.finfo(torch.bfloat16).eps == 2**-7
