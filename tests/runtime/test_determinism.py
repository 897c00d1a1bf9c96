"""PyTorch's deterministic algorithms for the time of a run, and the error of an op that has none."""

import os

import pytest
import torch

from nlgrpo.runtime.seeding import WORKSPACE, deterministic_algorithms

# What PyTorch 2.11 to 2.13 say on a GPU.
TORCH_SAYS = (
    "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation, or you can use "
    "the 'warn_only=True' option, if that's acceptable for your application."
)


def flags():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        os.environ.get(WORKSPACE),
    )


@pytest.fixture
def before(monkeypatch):
    """The flags before a test, which must be those after it."""
    monkeypatch.delenv(WORKSPACE, raising=False)
    found = flags()
    yield found
    assert flags() == found


def test_the_flags_hold_inside_and_are_restored(before):
    with deterministic_algorithms(True):
        assert flags() == (True, False, False, ":4096:8")
    assert flags() == before
    with deterministic_algorithms(False):
        assert flags() == before


def test_the_flags_of_the_caller_are_restored(monkeypatch):
    monkeypatch.setenv(WORKSPACE, ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_algorithms(True):
            assert flags() == (True, False, False, ":16:8")
        assert flags() == (True, True, True, ":16:8")
    finally:
        torch.use_deterministic_algorithms(False)


def test_another_setting_of_cublas_is_refused(monkeypatch):
    monkeypatch.setenv(WORKSPACE, ":0:0")
    with (
        pytest.raises(ValueError, match=r"CUBLAS_WORKSPACE_CONFIG=:0:0: .* expected :4096:8 or :16:8; unset it"),
        deterministic_algorithms(True),
    ):
        pytest.fail("it was entered")


def test_an_op_without_a_deterministic_version_is_named(before):
    """``Tensor.put_`` has none on a CPU either."""
    with (
        pytest.raises(ValueError, match=r"train.deterministic: .* version of put_ on this device"),
        deterministic_algorithms(True),
    ):
        torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))


def test_the_words_of_a_gpu_are_understood(before):
    with (
        pytest.raises(ValueError, match=r"version of cumsum_cuda_kernel on this device; .* = false") as raised,
        deterministic_algorithms(True),
    ):
        raise RuntimeError(TORCH_SAYS)
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_other_errors_pass(before):
    with pytest.raises(RuntimeError, match="out of memory"), deterministic_algorithms(True):
        raise RuntimeError("CUDA error: out of memory")
