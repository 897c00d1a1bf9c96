"""The choice of an implementation, which an environment variable can restrict."""

import importlib
import importlib.util
import sys

import pytest
import torch

from nlgrpo import kernels
from nlgrpo.kernels import dispatch


def load(monkeypatch, value):
    """A second copy of the module, loaded with NLGRPO_TRITON=``value``, as if Triton were installed."""
    monkeypatch.setenv("NLGRPO_TRITON", value)
    monkeypatch.setitem(sys.modules, "triton", sys.modules.get("triton", sys))  # any module that has a spec
    spec = importlib.util.spec_from_file_location("nlgrpo.kernels._copy_of_dispatch", dispatch.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class OnGpu:
    """What `choose` reads of a tensor on a GPU."""

    is_cpu, is_cuda, dtype = False, True, torch.bfloat16


@pytest.mark.parametrize(("value", "chosen"), [("", "triton"), ("1", "triton"), ("0", "torch")])
def test_a_variable_disables_triton(value, chosen, monkeypatch):
    module = load(monkeypatch, value)
    assert module.choose("auto", "policy_loss", OnGpu()) == chosen
    assert module.choose("torch", "policy_loss", OnGpu()) == "torch"
    if value == "0":
        with pytest.raises(ValueError, match="cannot run as NLGRPO_TRITON=0 is set; use impl='auto' or 'torch'"):
            module.choose("triton", "policy_loss", OnGpu())


class TooMuch(Exception):
    """An error of a kernel's launch, whose message has several lines."""


def fails(error):
    def launch(*_, **__):
        raise error

    return launch


@pytest.mark.parametrize(
    ("module", "launch", "op"),
    [
        ("linearize", "_launch_small", "linearize"),
        ("epilogue", "_block", "token_logprob"),
        ("policy_loss", "triton", "policy_loss"),
    ],
)
def test_a_kernel_that_cannot_be_launched_is_named_with_what_avoids_it(module, launch, op, monkeypatch):
    pytest.importorskip("triton")
    error = TooMuch("out of resource: shared memory\nRequired: 300000")
    broken = type("broken", (), {"cdiv": staticmethod(fails(error))}) if launch == "triton" else fails(error)
    monkeypatch.setattr(importlib.import_module(f"nlgrpo.kernels.{module}_triton"), launch, broken)
    x = torch.randn(4, 8)
    calls = {
        "linearize": lambda impl: kernels.linearize(x, torch.ones(8), impl=impl),
        "token_logprob": lambda impl: kernels.token_logprob(x, torch.zeros(4, dtype=torch.int64), impl=impl),
        "policy_loss": lambda impl: kernels.policy_loss(x[0], x[1], x[2], impl=impl),
    }
    with pytest.raises(dispatch.KernelError) as raised:
        calls[op]("triton")
    message = str(raised.value)
    assert "TooMuch: out of resource: shared memory." in message
    assert "\n" not in message
    assert op in message
    assert 'impl = "torch" avoids it for one call, and NLGRPO_TRITON=0 for all' in message
    assert raised.value.__cause__ is error
    calls[op]("torch")


def test_too_little_memory_is_no_fault_of_a_kernel(monkeypatch):
    pytest.importorskip("triton")
    from nlgrpo.kernels import linearize_triton

    monkeypatch.setattr(linearize_triton, "_launch_small", fails(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        kernels.linearize(torch.randn(4, 8), torch.ones(8), impl="triton")
