"""One side of a kernel benchmark in its own process: measures its time and memory, or the rates of the floor.

A process warms up (compilation and imports are not timed), then repeats forward and backward; short ones are repeated
more often. Memory is the peak of the process, or of the GPU's allocator, minus what was held before the repeats: it
includes gradients but not arguments.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from common import forget_peak, peak_resident, resident
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN = "plain torch"
SEE_OUT = 0.5  # seconds for which a short step is repeated
MOST = 500  # maximum number of repeats
FLUSH = 2**30  # bytes written between repeats on a GPU: many times its L2, and a third of a millisecond

Forward = Callable[[SimpleNamespace], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    ``arguments(generator, device)`` creates the inputs of the sides. Gradients are computed for the inputs named in
    ``wanted``; if it is empty there is no backward. A side returns the results to differentiate. ``work``: minimum
    bytes or operations of forward and backward, in ``unit`` "B" or "FLOP"; ``floors``: other floors by name.
    """

    op: str
    sizes: dict[str, int]
    dtype: torch.dtype
    arguments: Callable[[torch.Generator, str], SimpleNamespace]
    sides: dict[str, Forward]
    work: tuple[float, float]
    unit: str = "B"
    wanted: tuple[str, ...] = ()
    label: str = ""
    floors: dict[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        sizes = ", ".join(f"{name} = {size:,}" for name, size in self.sizes.items())
        dtype = str(self.dtype).removeprefix("torch.")
        return ", ".join(part for part in (self.op, self.label, sizes, dtype) if part)

    @property
    def rate_kind(self) -> str:
        """Cases of one kind share a floor: rates of products depend on the dtype, those of copies do not."""
        return "B" if self.unit == "B" else str(self.dtype)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call: loading the compiler takes seconds, which processes of other sides avoid."""
    load = cache(partial(torch.compile, function))
    return lambda *args, **options: load()(*args, **options)


class OwnOps(TorchDispatchMode):
    """Records which operators of nlgrpo run; none do if an op is plain PyTorch on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "nlgrpo":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


class Step:
    """Forward of a side, and backward to the wanted inputs."""

    def __init__(self, case: Case, side: str, device: str) -> None:
        self.inputs = case.arguments(torch.Generator().manual_seed(0), device)
        self.leaves = [getattr(self.inputs, name).requires_grad_() for name in case.wanted]
        self.side = case.sides[side]
        self.upstream: list[Tensor] = []

    def forward(self) -> tuple[Tensor, ...]:
        return self.side(self.inputs)

    def backward(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(results, self.leaves, self.upstream) if self.leaves else ()

    def warm_up(self) -> list[float]:
        """Run once; return the norms of results and gradients, which must be equal on all sides."""
        results = self.forward()
        generator = torch.Generator().manual_seed(1)
        for x in results:  # the upstream gradient of a loss is 1
            noise = torch.randn(x.shape, generator=generator) if x.ndim else torch.ones(())
            self.upstream.append(noise.to(x))
        tensors = (*results, *self.backward(results))
        wide = torch.float64 if tensors[0].is_cpu else torch.float32  # on a GPU float64 would copy all of x first
        return [torch.linalg.vector_norm(x.detach(), dtype=wide).item() for x in tensors]

    def own_ops(self) -> list[str]:
        with OwnOps() as ops, torch.no_grad():
            self.forward()
        return sorted(ops.names)


def seconds_cpu(step: Step) -> tuple[float, float]:
    """Seconds of one forward and one backward."""
    start = time.perf_counter()
    results = step.forward()
    middle = time.perf_counter()
    step.backward(results)
    return middle - start, time.perf_counter() - middle


def seconds_cuda(step: Step, repeats: int, flush: Tensor) -> list[tuple[float, float]]:
    """Seconds of ``repeats`` forwards and backwards by the GPU's clock, each after overwriting the L2 cache.

    The host queues the op while the flush runs, so the time is that of the kernels without their launches. If an op
    waits for the device (to check data), the launches after that are included.
    """
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(repeats)]
    for begin, middle, end in marks:
        flush.zero_()
        begin.record()
        results = step.forward()
        middle.record()
        step.backward(results)
        end.record()
        del results
    torch.cuda.synchronize()
    return [(begin.elapsed_time(middle) / 1e3, middle.elapsed_time(end) / 1e3) for begin, middle, end in marks]


def number_of_repeats(once: float, args: argparse.Namespace) -> int:
    return args.repeats if args.quick else min(MOST, max(args.repeats, int(SEE_OUT / once)))


def time_cpu(step: Step, args: argparse.Namespace) -> dict[str, Any]:
    repeats = number_of_repeats(sum(seconds_cpu(step)), args)
    forget_peak()
    before = resident()
    seconds = [seconds_cpu(step) for _ in range(repeats)]
    return {"seconds": seconds, "bytes": max(0, peak_resident() - before)}


def time_cuda(step: Step, args: argparse.Namespace) -> dict[str, Any]:
    flush = torch.empty(FLUSH, dtype=torch.int8, device="cuda")
    once = statistics.median(sum(s) for s in seconds_cuda(step, 3, flush))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = seconds_cuda(step, number_of_repeats(once, args), flush)
    return {"seconds": seconds, "bytes": torch.cuda.max_memory_allocated() - before}


def child(case: Case, side: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one side in this process; an error if it runs out of memory."""
    try:
        step = Step(case, side, args.device)
        norms = step.warm_up()
        own = step.own_ops() if side.startswith("ours") else []
        measured = time_cpu(step, args) if args.device == "cpu" else time_cuda(step, args)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    return measured | {"norms": norms, "own_ops": own}


def measure_floor(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the bytes/s of a large copy (read and written), or the FLOP/s of a large product."""
    on_gpu = args.device == "cuda"
    side = 256 if args.quick else 8192 if on_gpu else 2048
    if case.unit == "B":
        source = torch.ones(side**2 * (16 if on_gpu else 64), dtype=torch.uint8, device=args.device)  # 1 GiB, 256 MiB
        run, amount = partial(torch.empty_like(source).copy_, source), 2 * source.numel()
    else:
        a, b = (torch.randn(side, side, device=args.device).to(case.dtype) for _ in range(2))
        run, amount = partial(torch.mm, a, b), 2 * side**3
    return {"rates": [amount / seconds for seconds in _repeats_of(run, args.device)]}


def _repeats_of(run: Callable[[], object], device: str) -> Iterator[float]:
    for repeat in range(8):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if repeat >= 3:
            yield time.perf_counter() - start
