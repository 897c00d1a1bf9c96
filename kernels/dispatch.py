"""Which implementation of an op runs: the one place where that is decided."""

from __future__ import annotations

import torch
from torch import Tensor

from . import extension


def choose(impl: str, op: str) -> str:
    """Name of the implementation of ``op`` to run for the caller's ``impl``: so far always "torch".

    Raises ValueError for an ``impl`` that does not exist, or that this op does not have.
    """
    if impl in ("auto", "torch"):
        return "torch"
    if impl == "triton":
        raise ValueError(f"impl='triton': this build has no Triton version of {op}; use impl='auto' or 'torch'.")
    raise ValueError(f"impl={impl!r} is not known to {op}; expected 'auto', 'triton' or 'torch'.")


def use_cpp(impl: str, op: str, *tensors: Tensor) -> bool:
    """Whether the compiled ``op`` runs on ``tensors``; "auto": where it can.

    It can for float32 on a CPU, without a gradient to follow, outside ``torch.compile`` (which fuses the plain version
    itself), and in an install that has it. Raises ValueError for an unknown ``impl``, and for "cpp" where it cannot.
    """
    if impl == "torch":
        return False
    if impl not in ("auto", "cpp"):
        raise ValueError(f"impl={impl!r} is not known to {op}; expected 'auto', 'cpp' or 'torch'.")
    if torch.compiler.is_compiling():
        why = "inside torch.compile"
    elif torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        why = "with a gradient to follow"
    elif not all(x.is_cpu and x.dtype == torch.float32 for x in tensors):
        why = "for these tensors, as not all are float32 on a CPU"
    elif not extension.available():
        why = "in this install, which has no compiled ops"
    else:
        return True
    if impl == "cpp":
        raise ValueError(f"impl='cpp': {op} cannot run {why}; use impl='auto' or 'torch'.")
    return False
