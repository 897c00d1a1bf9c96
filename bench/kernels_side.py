"""One side of a benchmark of a kernel, in its own process: what it runs, its time and memory, and the floor's rates.

A process warms up (compilation and imports are not timed), then repeats forward and backward. Where a repeat is short
there are more of them. Memory is what the process, or the GPU's allocator, held at most beyond what it held before the
repeats: gradients included, arguments not.
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
SEE_OUT = 0.5  # seconds of repeats in a process, where one is short
MOST = 500  # repeats
FLUSH = 2**30  # bytes written between repeats on a GPU: many times its L2, and a third of a millisecond

Forward = Callable[[SimpleNamespace], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    ``arguments(generator, device)`` makes what the sides take; the inputs named in ``wanted`` get a gradient, and
    without any there is no backward. A side returns the results that are differentiated. ``work``: the least bytes or
    operations of forward and backward, in ``unit`` "B" or "FLOP"; ``floors``: others worth a line, by their name.
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
        """Cases of one kind have one floor: rates of products depend on the type, those of copies do not."""
        return "B" if self.unit == "B" else str(self.dtype)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile at the first call: to load the compiler takes seconds, which other sides' processes need not."""
    made = cache(partial(torch.compile, function))
    return lambda *args, **options: made()(*args, **options)


class OwnOps(TorchDispatchMode):
    """Notes which of nlgrpo's own operators run; none do where an op is plain PyTorch on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "nlgrpo":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


class Step:
    """One repeat of a side: its forward, and the gradients of the wanted inputs."""

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
        """Run once; the norms of results and gradients, which all sides must have in common."""
        results = self.forward()
        generator = torch.Generator().manual_seed(1)
        for x in results:  # a loss has the upstream gradient 1
            noise = torch.randn(x.shape, generator=generator) if x.ndim else torch.ones(())
            self.upstream.append(noise.to(x))
        tensors = (*results, *self.backward(results))
        wide = torch.float64 if tensors[0].is_cpu else torch.float32  # on a GPU that would copy all of x first
        return [torch.linalg.vector_norm(x.detach(), dtype=wide).item() for x in tensors]

    def own_ops(self) -> list[str]:
        with OwnOps() as ops, torch.no_grad():
            self.forward()
        return sorted(ops.names)


def seconds_cpu(step: Step) -> tuple[float, float]:
    """Of one forward and one backward."""
    start = time.perf_counter()
    results = step.forward()
    middle = time.perf_counter()
    step.backward(results)
    return middle - start, time.perf_counter() - middle


def seconds_cuda(step: Step, repeats: int, flush: Tensor) -> list[tuple[float, float]]:
    """Of ``repeats`` forwards and backwards, on the GPU's clock, each after the L2 has been written over.

    While the flush runs the host queues the op: this is the time of its kernels, not of their launches. Where an op
    waits for the device in between (a check of the data), the launches after that are in the time.
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
    """What one process measures."""
    try:
        step = Step(case, side, args.device)
        norms = step.warm_up()
        own = step.own_ops() if side.startswith("ours") else []
        measured = time_cpu(step, args) if args.device == "cpu" else time_cuda(step, args)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    return measured | {"norms": norms, "own_ops": own}


def measure_floor(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Bytes/s of a large copy (read and written), or FLOP/s of a large product."""
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
