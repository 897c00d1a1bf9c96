"""A process with the fake device: what is patched, and how tests run in one."""

from __future__ import annotations

import contextlib
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fake_cuda.device import DEVICE, CudaTensor, FakeCuda, entered
from support.helpers import Forked

MEMORY = 80 * 10**9
NAME = "NVIDIA H100 80GB HBM3"


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Context in which this process has one GPU, the fake one. Tests use it in a process of their own."""
    device = FakeCuda()
    with pytest.MonkeyPatch.context() as patched:
        _patch_torch(patched, device)
        _patch_triton(patched, device)
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # a wrapper cannot become another one
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(.., device="cuda") starts on the CPU
        try:
            with entered(device):
                yield device
        finally:
            torch._C._set_only_lift_cpu_tensors(False)
            torch.__future__.set_overwrite_module_params_on_conversion(before)


def _patch_torch(patched: pytest.MonkeyPatch, device: FakeCuda) -> None:
    """Let ``torch.cuda`` describe one H100 that has done nothing."""
    properties = SimpleNamespace(name=NAME, total_memory=MEMORY, major=9, minor=0, multi_processor_count=132)
    random_state = torch.zeros(16, dtype=torch.uint8)
    answers = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,  # a build with CUDA would ask the driver
        "device_count": 1,
        "current_device": 0,
        "get_device_name": NAME,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "mem_get_info": (MEMORY, MEMORY),
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "get_rng_state": random_state,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, answer in answers.items():
        patched.setattr(torch.cuda, name, partial(_answer, answer))
    silent = (
        "_lazy_init", "set_device", "set_rng_state", "manual_seed", "manual_seed_all", "empty_cache",
        "reset_peak_memory_stats",
    )  # fmt: skip
    for name in silent:
        patched.setattr(torch.cuda, name, partial(_answer, None))
    # The optimizers of PyTorch 2.15 ask it for the capture of a graph.
    stream = SimpleNamespace(is_capturing=lambda: False)
    patched.setattr(torch.accelerator, "current_stream", partial(_answer, stream))
    patched.setattr(torch.cuda, "synchronize", lambda *_: device.waits("torch.cuda.synchronize"))
    apply = torch.autograd.function.BackwardCFunction.apply

    def with_overrides(node: Any, *gradients: Any) -> Any:
        """Run a backward pass in Python like other Python code: autograd was called with overrides switched off."""
        with torch._C._EnableTorchFunction():
            return apply(node, *gradients)

    patched.setattr(torch.autograd.function.BackwardCFunction, "apply", with_overrides)
    patched.setattr(torch.Tensor, "to", _with_index(torch._C.TensorBase.to))
    torch.utils._device._device_constructors()  # keeps the functions that ``with torch.device(..)`` changes
    for name in ("tensor", "as_tensor"):
        patched.setattr(torch, name, _with_index(getattr(torch, name)))
    patched.setattr(torch.Tensor, "cuda", lambda x, *_, **options: x.to(DEVICE, **options))


def _answer(value: Any, *arguments: Any, **options: Any) -> Any:
    return value


def _with_index(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function of PyTorch with "cuda:0" for "cuda", because it would ask the driver for the current device."""

    def call(*arguments: Any, **options: Any) -> Any:
        if len(arguments) > 1 and isinstance(arguments[1], CudaTensor):  # x.to(other): C++ sees the wrapper's device
            arguments = (arguments[0], DEVICE, arguments[1].dtype, *arguments[2:])
        given = [DEVICE if _is_cuda(value) else value for value in arguments]
        named = {key: DEVICE if _is_cuda(value) else value for key, value in options.items()}
        return function(*given, **named)

    return call


def _is_cuda(value: Any) -> bool:
    return isinstance(value, str | torch.device) and torch.device(value).type == "cuda"


def _patch_triton(patched: pytest.MonkeyPatch, device: FakeCuda) -> None:
    """Let Triton's interpreter run kernels on tensors of the device, and count their launches."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    launch = interpreter.GridExecutor.__call__

    def counted(self: Any, *arguments: Any, **options: Any) -> None:
        given = [*arguments, *options.values()]
        if not any(isinstance(x, CudaTensor) for x in given):
            launch(self, *arguments, **options)
            return
        for number, x in enumerate(given):
            if isinstance(x, torch.Tensor) and not isinstance(x, CudaTensor):
                raise ValueError(f"Pointer argument (at {number}) cannot be accessed from Triton (cpu tensor?)")
        device.launches(f"triton::{self.fn.__name__}")
        hosts = [x.host if isinstance(x, CudaTensor) else x for x in arguments]
        named = {key: x.host if isinstance(x, CudaTensor) else x for key, x in options.items()}
        launch(self, *hosts, **named)

    patched.setattr(interpreter.GridExecutor, "__call__", counted)


def on_fake_cuda(work: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """Return ``work(device, *arguments)``, run in a process forked from this one that has the fake device.

    The result must be picklable, and tensors in it on the CPU. ``environment``: variables of the process. Raises
    AssertionError, with the traceback and the output of the process, if the work raises anything.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result")
        ended = Forked(partial(_work, path, work, arguments), **environment).end()
        if ended.status != 0:
            raise AssertionError(f"the process with the fake device failed:\n{ended.output}")
        return pickle.loads(path.read_bytes())


def _work(path: Path, work: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    try:
        with fake_cuda() as device:
            result = work(device, *arguments)
        path.write_bytes(pickle.dumps(result))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


@contextlib.contextmanager
def training_on_fake_cuda() -> Iterator[None]:
    """Context in which training commands run on the fake device.

    One rank, without NCCL. Parameters have the compute dtype, because FSDP2 cannot shard tensors of the fake device.
    Checkpoints are not written, because their code reads the memory of the tensors.
    """
    from nlgrpo.runtime import device as defaults
    from nlgrpo.training import critic, policy, scalar_heads, trainer

    begin = dist.init_process_group

    def without_nccl(backend: str, **options: Any) -> None:
        begin(backend.replace("nccl", "gloo"), **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "init_process_group", without_nccl)
        for module in (defaults, critic, policy, scalar_heads):
            patched.setattr(module, "master_dtype", lambda compute: compute)
        patched.setattr(trainer.Trainer, "save", lambda *_, **__: None)
        yield
