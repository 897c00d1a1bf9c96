"""Fixtures for the tests of the ops."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Let PyTorch fill new memory with NaN (it does so for deterministic algorithms), to detect unwritten results."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["torch", "triton"])
def impl(request):
    """Implementation of an op; `device` skips combinations that cannot run."""
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param
