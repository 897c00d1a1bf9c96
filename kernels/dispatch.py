"""Which implementation of an op runs: the one place where that is decided."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import extension

HAS_TRITON = importlib.util.find_spec("triton") is not None


def choose(impl: str, op: str, *tensors: Tensor, limit: tuple[str, int, int] | None = None, cpp: bool = False) -> str:
    """The implementation of ``op`` to run for the caller's ``impl`` on ``tensors``: "torch", "triton" or "cpp".

    "auto" is "triton" on a GPU where Triton is installed, and, for an op that has it (``cpp``), "cpp" on a CPU where it
    was compiled. Raises ValueError for an ``impl`` that does not exist, and for one that cannot run: "triton" without
    Triton, in float64, on a CPU outside of Triton's interpreter, or past a ``limit``, given as (name, size, largest);
    "cpp" off the CPU and in an install without it.
    """
    known = ("auto", "triton", "cpp", "torch") if cpp else ("auto", "triton", "torch")
    if impl not in known:
        raise ValueError(f"impl={impl!r} is not known to {op}; expected {', '.join(map(repr, known))}.")
    if impl == "torch":
        return "torch"
    on_cpu = all(x.is_cpu for x in tensors)
    if cpp and (impl == "cpp" or (impl == "auto" and on_cpu)):
        if on_cpu and extension.available():
            return "cpp"
        why = "in this install, which has no compiled ops" if on_cpu else "off the CPU"
    elif any(x.dtype == torch.float64 for x in tensors):
        why = "in float64"
    elif limit is not None and limit[1] > limit[2]:
        why = f"with {limit[0]} = {limit[1]}, above {limit[2]}"
    elif not HAS_TRITON:
        why = "as Triton is not installed"
    elif not all(x.is_cuda for x in tensors) and not (impl == "triton" and interpreted()):
        why = "on a CPU, unless TRITON_INTERPRET=1 is set before Triton is imported"
    else:
        return "triton"
    if impl != "auto":
        raise ValueError(f"impl={impl!r}: {op} cannot run {why}; use impl='auto' or 'torch'.")
    return "torch"


def scalar(number: float) -> Tensor:
    """A number in the form in which torch.compile does not compile an op anew for each of its values.

    A product, because a number that a tensor is made from becomes a constant of the graph. It stays on the CPU, where
    reading it waits for nothing.
    """
    return torch.ones((), dtype=torch.float64, device="cpu") * number


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def implementation(name: str, impl: str) -> ModuleType:
    """The module ``name_impl``: "epilogue" of a block of logits, or "policy_loss" of a block of tokens."""
    return importlib.import_module(f".{name}_{impl}", __package__)


def on_its_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``launch(tensor, ...)`` with the tensor's GPU as the current one, which is where Triton launches."""

    @functools.wraps(launch)
    def guarded(tensor: Tensor, *args: Any) -> Any:
        with torch.cuda.device_of(tensor):
            return launch(tensor, *args)

    return guarded


def use_cpp(impl: str, op: str, *tensors: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """Whether the compiled ``op`` runs on ``tensors``; "auto": where it can.

    It can for tensors of ``dtypes`` on a CPU, without a gradient to follow, outside ``torch.compile`` (which fuses the
    plain version itself), and in an install that has it. Raises ValueError for an unknown ``impl``, and for "cpp" where
    it cannot.
    """
    if impl == "torch":
        return False
    if impl not in ("auto", "cpp"):
        raise ValueError(f"impl={impl!r} is not known to {op}; expected 'auto', 'cpp' or 'torch'.")
    if torch.compiler.is_compiling():
        why = "inside torch.compile"
    elif torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        why = "with a gradient to follow"
    elif not all(x.is_cpu and x.dtype in dtypes for x in tensors):
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        why = f"for these tensors, as not all are {names} on a CPU"
    elif not extension.available():
        why = "in this install, which has no compiled ops"
    else:
        return True
    if impl == "cpp":
        raise ValueError(f"impl='cpp': {op} cannot run {why}; use impl='auto' or 'torch'.")
    return False
