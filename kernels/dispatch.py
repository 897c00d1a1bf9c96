"""Choice of the implementation of each op."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import extension

# NLGRPO_TRITON=0 makes every op run without Triton. Evaluated at import, like `extension.available`.
DISABLED = os.environ.get("NLGRPO_TRITON") == "0"
HAS_TRITON = importlib.util.find_spec("triton") is not None and not DISABLED


def choose(
    impl: str,
    op: str,
    *tensors: Tensor,
    limit: tuple[str, int, int] | None = None,
    float64: bool = False,
    cpp: tuple[torch.dtype, ...] = (),
) -> str:
    """Return the implementation of ``op`` for the requested ``impl`` and ``tensors``: "torch", "triton" or "cpp".

    "auto" is "triton" on a GPU with Triton installed, and "cpp" on a CPU with the compiled ops, if the op has a
    compiled version for these dtypes (``cpp``). Raises ValueError for an unknown ``impl``, and for one that cannot run:
    "triton" without Triton or with NLGRPO_TRITON=0, in float64 unless the op's Triton kernel takes it (``float64``), on
    a CPU outside Triton's interpreter, or above a ``limit`` (name, size, largest); "cpp" for other dtypes, off the CPU,
    or without the compiled ops.
    """
    known = ("auto", "triton", "cpp", "torch") if cpp else ("auto", "triton", "torch")
    if impl not in known:
        raise ValueError(f"impl={impl!r} is not known to {op}; expected {', '.join(map(repr, known))}.")
    if impl == "torch" or (impl == "auto" and _in_torch):
        return "torch"
    on_cpu = all(map(is_cpu, tensors))
    if cpp and (impl == "cpp" or (impl == "auto" and on_cpu)):
        problem = _no_cpp(tensors, cpp)
        if problem is None:
            return "cpp"
        why = problem
    elif not float64 and any(x.dtype == torch.float64 for x in tensors):
        why = "in float64"
    elif limit is not None and limit[1] > limit[2]:
        why = f"with {limit[0]} = {limit[1]}, above {limit[2]}"
    elif not HAS_TRITON:
        why = "as NLGRPO_TRITON=0 is set" if DISABLED else "as Triton is not installed"
    elif not all(x.is_cuda for x in tensors) and not (impl == "triton" and interpreted()):
        why = "on a CPU, unless TRITON_INTERPRET=1 is set before Triton is imported"
    else:
        return "triton"
    if impl != "auto":
        raise ValueError(f"impl={impl!r}: {op} cannot run {why}; use impl='auto' or 'torch'.")
    return "torch"


_traced_as_cpu = False
_in_torch = False


@contextmanager
def in_torch() -> Iterator[None]:
    """Context in which ``impl="auto"`` is "torch", for few small tensors: a custom op's first call takes seconds."""
    global _in_torch
    before, _in_torch = _in_torch, True
    try:
        yield
    finally:
        _in_torch = before


@contextmanager
def traced_as_cpu() -> Iterator[None]:
    """Context in which ops on "meta" tensors take the implementations of a CPU, to count their memory."""
    global _traced_as_cpu
    before, _traced_as_cpu = _traced_as_cpu, True
    try:
        yield
    finally:
        _traced_as_cpu = before


def is_cpu(x: Tensor) -> bool:
    """Whether the implementations of a CPU compute on ``x``."""
    return x.is_cpu or (_traced_as_cpu and x.is_meta)


def scalar(number: float) -> Tensor:
    """Return a number as a tensor, so that torch.compile does not recompile an op for each value.

    It is a product, because a number passed to ``torch.tensor`` becomes a constant of the graph. It stays on the CPU,
    where reading it needs no synchronization.
    """
    return torch.ones((), dtype=torch.float64, device="cpu") * number


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def implementation(name: str, impl: str) -> ModuleType:
    """Import the module ``name_impl``, where ``name`` is "epilogue" or "policy_loss" (which has no version in C++)."""
    impl = "torch" if (name, impl) == ("policy_loss", "cpp") else impl
    return importlib.import_module(f".{name}_{impl}", __package__)


class KernelError(RuntimeError):
    """A Triton kernel could not be compiled or launched. The message names the ops and the options that avoid it."""


# The ops that launch the kernels of a module; a module that is not listed has the name of its only op.
KERNELS_OF = {"epilogue": "linear_logprob, token_logprob and linear_policy_loss", "sample": "sample_tokens"}


def on_its_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: run ``launch(tensor, ...)`` with the tensor's GPU as the current device, on which Triton launches.

    A kernel that cannot be compiled or launched (no C compiler, too much shared memory, a GPU that Triton does not
    know) raises KernelError. Running out of memory is no fault of a kernel and raises torch.OutOfMemoryError.
    """
    module = launch.__module__.rpartition(".")[2].removesuffix("_triton")
    ops = KERNELS_OF.get(module, module)

    @functools.wraps(launch)
    def guarded(tensor: Tensor, *args: Any) -> Any:
        try:
            with torch.cuda.device_of(tensor):
                return launch(tensor, *args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # those of Triton, of the driver and of the C compiler have no common base class
            where = torch.cuda.get_device_name(tensor.device) if tensor.is_cuda else "a CPU"
            raise KernelError(
                f"the Triton kernel {module}_triton.{launch.__name__} failed on {where}: {_first_line(error)}. It is "
                f'part of {ops}; impl = "torch" avoids it for one call, and NLGRPO_TRITON=0 for all.'
            ) from error

    return guarded


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


def requires_grad(*tensors: Tensor) -> bool:
    """Whether autograd records an op on ``tensors``."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def use_cpp(
    impl: str,
    op: str,
    *tensors: Tensor,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    differentiable: bool = False,
) -> bool:
    """Whether to run the compiled ``op`` on ``tensors``. "auto": if possible.

    It needs tensors of ``dtypes`` on a CPU, which do not require a gradient unless the op is ``differentiable``, and an
    install with the compiled ops. It does not run inside ``torch.compile``, which fuses the plain version itself.
    Raises ValueError for an unknown ``impl``, and for "cpp" if it cannot run.
    """
    if impl == "torch":
        return False
    if impl not in ("auto", "cpp"):
        raise ValueError(f"impl={impl!r} is not known to {op}; expected 'auto', 'cpp' or 'torch'.")
    if torch.compiler.is_compiling():
        why = "inside torch.compile"
    elif not differentiable and requires_grad(*tensors):
        why = "on tensors that require a gradient"
    else:
        problem = _no_cpp(tensors, dtypes)
        if problem is None:
            return True
        why = problem
    if impl == "cpp":
        raise ValueError(f"impl='cpp': {op} cannot run {why}; use impl='auto' or 'torch'.")
    return False


def _no_cpp(tensors: tuple[Tensor, ...], dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Return why a compiled op of ``dtypes`` cannot run on ``tensors``, or None if it can."""
    if not all(is_cpu(x) and x.dtype in dtypes for x in tensors):
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"for these tensors, as not all are {names} on a CPU"
    return None if extension.available() else "in this install, which has no compiled ops"
