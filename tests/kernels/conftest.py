"""Fixtures of the ops' tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that an op did not write is NaN: PyTorch fills new tensors with it while algorithms are deterministic."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["torch", "triton"])
def impl(request):
    """An implementation; `device` leaves out what cannot run together."""
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param
