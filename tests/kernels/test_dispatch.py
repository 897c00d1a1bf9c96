"""The choice of an implementation, which an environment variable can restrict."""

import importlib.util
import sys

import pytest
import torch

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
