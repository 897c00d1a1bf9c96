"""Sharded models (FSDP2): sharding, gathering and saving parameters, and checks over all shards."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nlgrpo.errors import UserError
from nlgrpo.model import lora, shards
from nlgrpo.model.decoder import Block, Decoder
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.sections import ParallelConfig

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

Batch = TypeVar("Batch")


def _mesh(device: str, replicate: int, world: int) -> DeviceMesh:
    """Mesh of the ranks; those of one replica are consecutive, as the ranks of a node are. Collective."""
    if replicate == 1:
        return init_device_mesh(device, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (replicate, world // replicate), mesh_dim_names=("replicate", "shard"))


def shard(model: Decoder, ranks: Ranks, compute: torch.dtype, parallel: ParallelConfig | None = None) -> Decoder:
    """Shard parameters, gradients and optimiser state over the ranks, block by block, in place.

    The sharded parameters keep their dtype: they are the master weights of a model that computes in ``compute``.
    Frozen weights may have the dtype ``compute`` beside adapters in float32.
    Reductions run in float32 (float64 for float64 parameters). A single rank that computes in the dtype of its
    parameters is left unsharded, unless they are offloaded.
    """
    stored = model.embed.weight.dtype
    parallel = parallel or ParallelConfig()
    if ranks.world == 1 and compute == stored and not parallel.offload:
        return model
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard  # takes a second

    reduce = torch.float64 if stored == torch.float64 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    mesh = _mesh(ranks.device.type, parallel.replicate, ranks.world)
    apply = partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=parallel.reshard_after_forward)
    if parallel.offload:
        apply = partial(apply, offload_policy=CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda"))
        model.offloaded = True
    for block in model.blocks:
        apply(block)
    apply(model)
    return model


def prepare(
    model: Decoder, *, adapter: LoraConfig | None, ranks: Ranks, compute: torch.dtype, parallel: ParallelConfig
) -> Decoder:
    """Attach adapters, if any, and shard, in place: what is done to the blueprint of a model that is trained."""
    if adapter is not None:
        lora.attach(model, adapter, compute)
    return shard(model, ranks, compute, parallel)


def _sharded(model: nn.Module) -> list[FSDPModule]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported if any module is sharded
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


@contextmanager
def gathered(model: nn.Module, *, by_block: bool = False) -> Iterator[None]:
    """Context in which generation finds full parameters in their compute dtype on every rank. Collective.

    ``by_block``: the embedding, the norm and the head stay gathered, and `Decoder.each_block` gathers each block while
    it computes. Ranks may run different numbers of passes over the blocks: at the end of the context, also after an
    exception, a rank gathers with the others until all are done. Such contexts of several models must not overlap.
    """
    sharded = _sharded(model)
    passes = _BlockPasses(model) if by_block and sharded else None
    for module in sharded:
        if passes is None or not isinstance(module, Block):
            module.unshard()
    try:
        yield
    finally:
        if passes is not None:
            passes.finish()
        for module in sharded:
            module.reshard()


class _BlockPasses:
    """Gathers the blocks of a model one after another, in passes that all ranks run together.

    A flag precedes each pass: whether any rank needs it. Flags are on the CPU (gloo), so none waits for a GPU.
    """

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, Decoder)
        self.model = model
        self.running = iter(list[Block]())
        self.ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
        model.each_gathered = self.begin

    def begin(self) -> Iterator[Block]:
        """Begin a pass of this rank."""
        self.ranks.any(True)
        self.running = self._each()
        return self.running

    def finish(self) -> None:
        """Complete a pass that an exception interrupted, and take part in those of other ranks until all are done."""
        self.model.each_gathered = None
        deque(self.running, maxlen=0)
        while self.ranks.any(False):
            deque(self._each(), maxlen=0)

    @torch.inference_mode(False)  # FSDP's buffers of a block are made here, and training uses them too
    @torch.no_grad()
    def _each(self) -> Iterator[Block]:
        """Yield the blocks; the next one is gathered while one computes, so at most two are gathered at a time."""
        blocks = cast("Sequence[FSDPModule]", self.model.blocks)
        ahead = blocks[0].unshard(async_op=True)
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            assert ahead is not None
            ahead.wait()
            if following is not None:
                ahead = following.unshard(async_op=True)
            yield cast(Block, block)
            block.reshard()


def accumulated(model: nn.Module, batches: Sequence[Batch]) -> Iterator[Batch]:
    """Yield micro-batches whose gradients add up: replicas (HSDP) are all-reduced in the last backward pass only.

    Gradients are reduce-scattered within a replica in each one. Replicas of an offloaded model are reduced in each one
    too, because FSDP2 would keep the sums on the GPU until the last.
    """
    offloaded = any(getattr(module, "offloaded", False) for module in model.modules())
    sharded = _sharded(model)
    for number, batch in enumerate(batches, 1):
        for module in sharded:
            module.set_requires_all_reduce(offloaded or number == len(batches), recurse=False)
        yield batch


def each_full(
    model: nn.Module, dtype: torch.dtype | None, *, only: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the name of each parameter and, on rank 0, the full one on the CPU in ``dtype``; elsewhere None.

    ``dtype``: None keeps that of each parameter. ``only``: which names to yield. Collective: all ranks must take all
    pairs. A full tensor is valid until the next pair is requested, because all lie in one buffer, which is as large as
    the largest. (The C library keeps freed memory, which could be as much again.)
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    wanted = [(name, p.detach(), dtype or p.dtype) for name, p in model.named_parameters() if only(name)]
    sizes = [value.numel() * kind.itemsize for _, value, kind in wanted if shards.is_sharded(value)]
    buffer = torch.empty(max(sizes, default=0) if first else 0, dtype=torch.uint8)
    for name, value, kind in wanted:
        if shards.is_sharded(value):
            full = buffer[: value.numel() * kind.itemsize].view(kind).view(value.shape) if first else None
            _collect(value, full, kind)
        else:
            full = value.to("cpu", kind) if first else None
        yield name, full
        del full  # else a copy would live until the next one is there


def each_replicated(model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each parameter and the full one on every rank, on the device of its shards, in ``dtype``.

    ``dtype``: None keeps that of each parameter. Collective: all ranks must take all pairs. One full parameter exists
    at a time, unless the caller keeps them.
    """
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        yield name, (value.full_tensor() if shards.is_sharded(value) else value).to(dtype or value.dtype)


def _collect(value: DTensor, full: Tensor | None, dtype: torch.dtype) -> None:
    """Fill ``full``, which only rank 0 passes.

    Rows are sent by gloo from CPU to CPU, straight to their place: a gather of NCCL would need the full tensor on the
    GPU, and one of gloo needs equal parts.
    """
    part = value.to_local()
    for rank, rows in shards.holders(value):
        if full is not None and rank == 0:
            full[rows].copy_(part)
        elif full is not None and rows.start < rows.stop:
            dist.recv(full[rows], rank)
        elif dist.get_rank() == rank and rows.start < rows.stop:
            dist.send(part.to("cpu", dtype).contiguous(), 0)


def save_on_first(
    model: nn.Module,
    dtype: torch.dtype | None,
    ranks: Ranks,
    folder: Path,
    write: Callable[[Iterator[tuple[str, Tensor]]], object],
    *,
    only: Callable[[str], bool] = lambda name: True,
) -> None:
    """Call ``write`` on rank 0 with the pairs of `each_full`. Collective; everything is written on return.

    Raises UserError on all ranks if rank 0 cannot write into ``folder``.
    """
    pairs = each_full(model, dtype, only=only)

    def work() -> None:
        try:
            if ranks.first:
                with atomic_files.into(folder):
                    write(cast(Iterator[tuple[str, Tensor]], pairs))
        finally:
            deque(pairs, maxlen=0)  # send the shards, and after a failure receive those that the other ranks still send

    ranks.agree(work)


def check_finite(model: nn.Module, ranks: Ranks, why: str) -> None:
    """Raise UserError on all ranks if a parameter is NaN or infinite, before it is saved. Collective.

    ``why`` is the end of the message.
    """
    bad = None
    for name, parameter in model.named_parameters():
        part = shards.local(parameter.detach())
        if part.numel():
            low, high = part.aminmax()  # without temporary tensors
            if not (low.isfinite() and high.isfinite()):
                bad = name
                break
    names = [name for name in ranks.gather_objects(bad) if name is not None]
    if names:
        raise UserError(f"{names[0]} has NaN or infinite values{why}")


TOO_LARGE = "; nothing was saved. The rewards, the weight decay or the learning rate may be too large"


def clip_gradients(model: nn.Module, max_norm: float, *, finite: bool = True) -> float:
    """Clip the gradient to the norm ``max_norm`` (0: no clipping) and return its norm before, over all shards.

    Raises UserError if the norm is not finite and ``finite`` is true.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm if max_norm > 0 else float("inf"))
    total = float(norm.full_tensor() if shards.is_sharded(norm) else norm)
    if finite and not math.isfinite(total):
        raise UserError(
            f"the norm of the gradient is {total}: the rewards, the weights or the learning rate are too large for the "
            "compute dtype. The gradient was not applied; the last checkpoint is from before it"
        )
    return total
