"""Fixtures for the tests of the ops."""

import os

import pytest
import torch

from nlgrpo.kernels import extension


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Let PyTorch fill new memory with NaN (it does so for deterministic algorithms), to detect unwritten results."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["torch", "triton", "cpp"])
def impl(request):
    """Implementation of an op; `device` skips combinations that cannot run."""
    if request.param == "triton":
        pytest.importorskip("triton")
    if request.param == "cpp":
        arguments = request.node.callspec.params
        if arguments.get("device", "cpu") != "cpu" or arguments.get("dtype", torch.float32) != torch.float32:
            pytest.skip("the compiled ops take float32 on a CPU")
        if not extension.available() and os.environ.get("NLGRPO_BUILD_EXT") != "1":
            pytest.skip("this install has no compiled ops")
    return request.param
