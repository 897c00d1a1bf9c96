"""The fake device: its tensors, and how an op on them is checked, counted and computed.

A tensor of the device (`CudaTensor`) wraps a tensor of the CPU, ``host``. PyTorch's C++ code believes that it is on the
CPU, because a build without CUDA could not do anything with another one; Python code sees cuda:0. Every op on such a
tensor, and every op that names the device, arrives at `FakeCuda.run`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch._dynamo.eval_frame
from support.fake_cuda.counting import Counts, place
from support.fake_cuda.emulated import IMPLEMENTATIONS
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

DEVICE = torch.device("cuda", 0)
NAMESPACES = ("aten", "prim", "prims")  # of the ops that are no custom ops

# Ops without a kernel that are no views: they allocate, or change what a tensor is.
NO_KERNEL = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh", "resize_",
    "set_", "record_stream", "is_pinned", "is_same_size", "_local_scalar_dense",
}  # fmt: skip
# Ops that run two kernels on a GPU: they copy their input, and change the copy.
TWO_KERNELS = {"masked_fill", "index_put", "index_add", "index_copy", "index_fill", "scatter", "scatter_add"}
# Ops that wait on a GPU, because the shape of their result, or what they do next, depends on the data.
WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "unique_dim_consecutive", "_linalg_check_errors", "histc",
}  # fmt: skip
INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}


class CudaTensor(torch.Tensor):
    """A tensor of the fake device, with its numbers in ``host``."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> CudaTensor:
        assert not isinstance(host, CudaTensor)
        assert host.device.type == "cpu", host.device
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device="cpu",
        )
        wrapper.host = host
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return current().run(func, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wanted = kwargs.get("device")
        if wanted is not None and torch.device(wanted).type == "cpu":
            return _call_for_the_host(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func in (torch.rms_norm, torch.nn.functional.rms_norm):
                return rms_norm(*args, **kwargs)
            return func(*args, **kwargs)

    # What Python code reads of a tensor's device.
    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return DEVICE.index

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    # Copies to the host, which wait, and copies that C++ would skip because it believes that the tensor is there.
    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            other = args[0]
            args = (other.device, other.dtype, *args[1:])
        copy = kwargs.pop("copy", False)
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        result: Tensor = self
        if device is not None and device.type != "cuda":
            result = self.cpu()
            if device.type != "cpu":
                result = result.to(device)
        with torch._C.DisableTorchFunctionSubclass():
            options = {} if memory_format is None else {"memory_format": memory_format}
            return torch._C.TensorBase.to(result, dtype=dtype or self.dtype, copy=copy and result is self, **options)

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        current().waits("copy to the host")
        return _Download.apply(self)

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        return self

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=options.pop("device", None) or DEVICE, **options)

    def backward(self, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None):
        if isinstance(gradient, Tensor) and not isinstance(gradient, CudaTensor):
            raise RuntimeError("Expected the gradient to be on the same device as the loss, cuda:0, but it is on cpu")
        torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    # A new value needs the new numbers, too.
    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, CudaTensor):
            raise RuntimeError("fake CUDA: the data of a tensor on cuda:0 must be on cuda:0")
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.host = value.host

    def __repr__(self, **options: Any) -> str:
        return f"CudaTensor({self.host!r})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        result = self.detach().clone().requires_grad_(self.requires_grad)
        result.__dict__.update({key: value for key, value in self.__dict__.items() if key != "host"})
        memo[id(self)] = result
        return result


def _call_for_the_host(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function whose caller named the CPU, such as ``torch.zeros_like(x, device="cpu")``."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """RMS norm by the fused kernel, which PyTorch chooses on a GPU for an input and a weight of one dtype."""
    if weight is not None and weight.dtype != x.dtype:
        raise NotImplementedError(f"fake CUDA: an RMS norm of {x.dtype} with a weight in {weight.dtype}")
    return _RMSNorm.apply(x, list(shape), weight, eps)


class _RMSNorm(torch.autograd.Function):
    """The fused norm. Without CUDA, autograd would differentiate through the ops that it is made of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        out, inverse = current().run(torch.ops.aten._fused_rms_norm.default, (x, shape, weight, eps), {})
        ctx.shape = shape
        ctx.save_for_backward(x, inverse, weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        arguments = (grad, x, ctx.shape, inverse, weight, wanted)
        grad_x, grad_weight = current().run(torch.ops.aten._fused_rms_norm_backward.default, arguments, {})
        return grad_x, None, grad_weight, None


class _Download(torch.autograd.Function):
    """Copy to the host; the gradient goes back to the device."""

    @staticmethod
    def forward(ctx: Any, x: CudaTensor) -> Tensor:
        return x.host.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return CudaTensor(grad.clone())


class FakeCuda(TorchDispatchMode):
    """The device: while it is entered as a context, "cuda" is a device of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.recordings: list[Counts] = []

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """Context that counts what happens on the device; such contexts can be nested."""
        counts = Counts()
        self.recordings.append(counts)
        try:
            yield counts
        finally:
            self.recordings.remove(counts)

    # --- counting -----------------------------------------------------------------------------------------------------

    def launches(self, name: str, number: int = 1) -> None:
        """Count kernel launches."""
        if self.recordings:
            at = place()
            for counts in self.recordings:
                counts.launches[name] += number
                counts.launched_at[at] += number

    def waits(self, cause: str) -> None:
        """Count a synchronization: the host waits for the work of the device."""
        if self.recordings:
            at = f"{place()} {cause}"
            for counts in self.recordings:
                counts.synchronizations[at] += 1

    def uploads(self) -> None:
        """Count a blocking copy of host memory to the device."""
        if self.recordings:
            at = place()
            for counts in self.recordings:
                counts.uploads[at] += 1

    # --- ops ----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op of PyTorch, or a custom op, with any arguments."""
        tensors = _tensors(args) + _tensors(kwargs.values())
        on_device = any(isinstance(x, CudaTensor) for x in tensors)
        named = kwargs.get("device")
        if not on_device and (named is None or torch.device(named).type == "cpu") and not _on_behalf_of_the_device():
            return func(*args, **kwargs)
        namespace, name = func._schema.name.split("::")
        if namespace not in NAMESPACES:
            return self.run_custom_op(func, args, kwargs)
        if name == "rms_norm":
            return rms_norm(*args, **kwargs)
        if _is_composite(func) and _full_name(func) not in IMPLEMENTATIONS:
            return self.decompose(func, args, kwargs)
        return self.run_kernel(func, name, args, kwargs, tensors)

    def run_custom_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the Python code of a custom op, which launches kernels. Without Python code it cannot run."""
        key = func._schema.name
        if key not in OPDEFS:
            raise NotImplementedError(f"fake CUDA: {key} has no implementation for tensors on cuda:0")
        counts = Counts()
        self.recordings.append(counts)
        try:
            with self, torch._C._EnableTorchFunction():
                result = OPDEFS[key]._init_fn(*args, **kwargs)
        finally:
            self.recordings.remove(counts)
        if not counts.launches:
            self.launches(key)
        for recording in self.recordings:
            recording.custom_ops[key] += 1
        return result

    def decompose(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op that is made of others: without gradients, PyTorch leaves that to the device."""
        with self:
            return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    def run_kernel(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Check, count and compute one op."""
        on_device = [x for x in tensors if isinstance(x, CudaTensor)]
        to_device = _result_is_on_the_device(kwargs.get("device"), bool(on_device))
        if name not in ("copy_", "_to_copy"):
            _check_devices(func, name, args, tensors)
        self.count_copies(name, args, kwargs, to_device)
        if on_device:
            self.count_waiting(name, args, kwargs)
        if name not in NO_KERNEL and not _is_view(func):
            self.launches(f"aten::{name}", 2 if name in TWO_KERNELS else 1)
        options = dict(kwargs)
        if options.get("device") is not None and torch.device(options["device"]).type == "cuda":
            options["device"] = torch.device("cpu")
        options.pop("pin_memory", None)
        compute = IMPLEMENTATIONS.get(_full_name(func), func)
        result = compute(*map(_unwrap, args), **{key: _unwrap(value) for key, value in options.items()})
        if not to_device:
            return result
        # As without the device, a view of a tensor made outside of inference mode is not one of inference mode.
        ordinary = _is_view(func) and bool(on_device) and not on_device[0].is_inference()
        with torch.inference_mode(torch.is_inference_mode_enabled() and not ordinary):
            result = _wrap(result)
        if name != "_to_copy" and on_device and any(value.alias_info is not None for value in func._schema.returns):
            return return_and_correct_aliasing(func, args, kwargs, result)
        return result

    def count_copies(self, name: str, args: Any, kwargs: dict[str, Any], to_device: bool) -> None:
        """Count copies between host and device."""
        if name == "copy_":
            target, source = args[:2]
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            if isinstance(source, CudaTensor) and not isinstance(target, CudaTensor):
                self.waits("copy to the host")
            elif isinstance(target, CudaTensor) and not isinstance(source, CudaTensor) and blocking:
                self.uploads()
        elif name == "_to_copy" and to_device and not isinstance(args[0], CudaTensor):
            if not kwargs.get("non_blocking", False):
                self.uploads()
        elif name in INDEXING:
            for index in args[1]:
                if isinstance(index, Tensor) and not isinstance(index, CudaTensor):
                    self.uploads()

    def count_waiting(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """Count the synchronizations inside of an op."""
        if name in WAITING:
            self.waits(name)
        elif name in INDEXING and any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
            # One number is written with the mask itself, without the indices.
            fills = name != "index" and isinstance(args[2], Tensor) and args[2].numel() == 1
            if not (fills and not isinstance(args[2], CudaTensor)):
                self.waits("boolean index")
        elif name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.waits("repeat_interleave without output_size")


_CURRENT: list[FakeCuda] = []


def current() -> FakeCuda:
    """The device of this process. Raises RuntimeError without one."""
    if not _CURRENT:
        raise RuntimeError("fake CUDA: a tensor is used after its device was left")
    return _CURRENT[-1]


@contextmanager
def entered(device: FakeCuda) -> Iterator[FakeCuda]:
    """Context in which ``device`` is the current one."""
    _CURRENT.append(device)
    try:
        with device:
            yield device
    finally:
        _CURRENT.remove(device)


# --- where an op was called from --------------------------------------------------------------------------------------


def _on_behalf_of_the_device() -> bool:
    """Whether C++ code called the op for tensors of the device, not Python code.

    C++ code that creates a tensor beside a `CudaTensor`, such as zeros for a gradient, believes that the CPU is meant.
    The innermost Python frame is then the one that called the C++ code: `CudaTensor.__torch_function__`, an op that is
    made of others, or autograd's engine.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _CALLERS and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    if frame is None or frame.f_code is _call_for_the_host.__code__:
        return False
    if frame.f_code is _ENGINE:
        return any(isinstance(x, CudaTensor) for x in frame.f_locals["t_outputs"])
    return frame.f_code in _CALLERS


def _result_is_on_the_device(named: torch.device | str | None, on_device: bool) -> bool:
    """Whether the result of an op is on the device, from the device that it was called with, if any."""
    if named is None:
        return on_device
    if torch.device(named).type == "cuda":
        return True
    return torch.device(named).type == "cpu" and _on_behalf_of_the_device()


_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_CALLERS = {  # of C++ code
    CudaTensor.__torch_function__.__func__.__code__,
    FakeCuda.decompose.__code__,
    _call_for_the_host.__code__,
    _ENGINE,
}
# Files with the frames between C++ code and this function: this file, and PyTorch's decorators of dispatch methods.
_BETWEEN = {__file__, torch._compile.__file__, torch._dynamo.eval_frame.__file__}


# --- properties of ops ------------------------------------------------------------------------------------------------


def _full_name(func: Any) -> str:
    overload = func._overloadname
    return func._schema.name if overload == "default" else f"{func._schema.name}.{overload}"


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether the op is made of others on every device."""
    has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), "CompositeImplicitAutograd")


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether the result of an op is a view of its input, which needs no kernel."""
    aliases = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _check_devices(func: Any, name: str, args: Any, tensors: list[Tensor]) -> None:
    """Raise RuntimeError for tensors on several devices. A number may be on the CPU, and so may indices."""
    if not any(isinstance(x, CudaTensor) for x in tensors):
        return
    elsewhere = [x for x in tensors if not isinstance(x, CudaTensor) and x.dim() > 0]
    if name in INDEXING and isinstance(args[0], CudaTensor):
        indices = [x for x in args[1] if isinstance(x, Tensor)]
        elsewhere = [x for x in elsewhere if not any(x is index for index in indices)]
    if elsewhere:
        shapes = ", ".join(str(tuple(x.shape)) for x in elsewhere)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
            f"{elsewhere[0].device}! (aten::{name}, shapes {shapes}, at {place()})"
        )


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Tensors among the arguments of an op: they are arguments, or in a list that is one."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _unwrap(value: Any) -> Any:
    """The argument of an op for the CPU."""
    if isinstance(value, CudaTensor):
        return value.host
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(map(_unwrap, value))
    return value


def _wrap(value: Any) -> Any:
    """The result of an op on the device, from that on the CPU."""
    if isinstance(value, Tensor) and not isinstance(value, CudaTensor):
        return CudaTensor(value)
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return tuple(map(_wrap, value)) if isinstance(value, tuple) else [*map(_wrap, value)]
    return value
