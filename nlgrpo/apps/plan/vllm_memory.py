"""Memory of vLLM in the processes of the trainer, and of handing over the weights to it or to servers."""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import torch

from nlgrpo.apps.plan.workload import Uses, Workload
from nlgrpo.errors import UserError
from nlgrpo.model.architectures import Shape
from nlgrpo.model.decoder import Decoder
from nlgrpo.runtime.console import size

GIB = 2**30
LIBRARIES = 270 * 2**20  # of vLLM 0.32 for a CPU: what importing it and starting an engine add
CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"  # GiB of the KV cache on a CPU, of each rank


def share(work: Workload) -> float:
    """Bytes of a GPU that vLLM takes while it samples, with its weights and KV cache."""
    return work.config.vllm.gpu_memory * work.gpu_memory


def lasting(work: Workload) -> Uses:
    """What vLLM holds in all phases: all of its memory on a CPU, where it cannot sleep, or without vllm.sleep."""
    if work.engine != "vllm":
        return {}
    if work.device != "cpu":
        return {} if work.config.vllm.sleep else {"vLLM": share(work)}
    packed = 2 * work.shape.vocab * work.shape.width  # copies of embedding and head, as its matrix products read them
    return {
        "vLLM libraries": float(LIBRARIES),
        "vLLM weights": weights(work) + _part(work, packed),
        "vLLM KV cache": _cache_on_cpu(),
    }


def sampling(work: Workload) -> Uses:
    """What is added while vLLM samples, or takes new weights."""
    return {
        "vLLM": share(work) if _sleeps(work) else 0.0,
        "gathered parameter": _handed_over(work),
    }


def on_host(work: Workload) -> Uses:
    """What vLLM needs of the memory of the host.

    One that sleeps on a GPU keeps the weights there, if it gets adapters only. Servers on this machine read two
    versions of the weights from the shared memory, which the ranks have once.
    """
    if work.engine == "servers":
        from nlgrpo.engine.backends.servers import on_this_machine

        if takes_adapters(work) or work.config.vllm.folder or not on_this_machine(work.config.vllm.servers):
            return {}
        return {"weights for the servers": 2.0 * work.shape.parameters * work.compute.itemsize / work.world}
    if _sleeps(work) and takes_adapters(work):
        return {"vLLM weights": weights(work)}
    return {}


def _sleeps(work: Workload) -> bool:
    return work.engine == "vllm" and work.device != "cpu" and work.config.vllm.sleep


def takes_adapters(work: Workload) -> bool:
    """Whether vLLM gets adapters as such, and not merged weights; some architectures have none in vLLM."""
    return work.config.vllm.adapters and work.adapter is not None and not work.adapter.modules_to_save


def weights(work: Workload) -> float:
    """Bytes of the weights that an engine has on each of its ranks."""
    return _part(work, work.shape.parameters)


def cache_per_token(work: Workload) -> float:
    """Bytes that a token needs in the KV cache of each rank of an engine."""
    shape = work.shape
    return _part(work, 2 * shape.kv_heads * shape.head_dim * shape.layers)


def fault(work: Workload) -> str:
    """Return why vLLM cannot start with its share of the GPU; "" if it can, or if the GPU is unknown."""
    if work.engine != "vllm" or not work.gpu_memory:
        return ""
    needed = weights(work) + (work.prompt + work.columns) * cache_per_token(work)
    if needed <= share(work):
        return ""
    return (
        f"vllm.gpu_memory = {work.config.vllm.gpu_memory:g} is {size(share(work))} of the GPU, but vLLM needs at least "
        f"{size(needed)} for its weights and the KV cache of one completion; raise it, or vllm.tensor_parallel"
    )


def _part(work: Workload, numbers: float) -> float:
    return numbers * work.compute.itemsize / work.config.vllm.tensor_parallel


def _cache_on_cpu() -> float:
    """Bytes of vLLM's KV cache on a CPU. Raises UserError for a value that vLLM does not take."""
    from nlgrpo.engine.backends.vllm_library import ENVIRONMENT_ON_CPU

    text = os.environ.get(CACHE_SPACE) or ENVIRONMENT_ON_CPU[CACHE_SPACE]
    try:
        return float(int(text) * GIB)
    except ValueError:
        raise UserError(f"{CACHE_SPACE}={text!r}: expected a whole number of GiB") from None


def _handed_over(work: Workload) -> float:
    """Bytes of the largest parameter on its way to vLLM; one is gathered at a time."""
    outer, block = _largest(work.shape)
    size = work.compute.itemsize
    adapter = work.adapter
    each = _bytes_on_the_way(work)
    if adapter is None or (work.engine == "servers" and work.device != "cpu"):
        return max(outer, block) * each
    merged = size + 3 * 4  # a copy, and two products and their sum in float32
    retrained = size + 2 * work.stored.itemsize if adapter.modules_to_save else 0
    return max(outer * (each + retrained), block * (each + merged))


def _bytes_on_the_way(work: Workload) -> float:
    """Bytes per value of a parameter that is handed over, beside those that the run and vLLM hold.

    For servers, rank 0 gathers it in the memory of the host, for which each rank casts its shard. Otherwise every rank
    gathers it in its own memory and casts it, and vLLM in this process builds its layer anew, and on a CPU packs it.
    """
    size = work.compute.itemsize
    if work.engine == "servers":
        return size if work.device == "cpu" else size / work.shards
    kept = size if work.adapter is not None else work.stored.itemsize
    gathered = kept if work.sharded else 0
    cast = size if kept != size else 0
    built = 2 * size if work.device == "cpu" else size
    return gathered + cast + built


@functools.lru_cache(maxsize=64)
def _largest(shape: Shape) -> tuple[int, int]:
    """Number of values of the largest parameter outside of the blocks, and of the largest in a block."""
    one = replace(shape, layers=1, windows=shape.windows[:1], scales=shape.scales[:1])
    with torch.device("meta"):
        sizes = {name: parameter.numel() for name, parameter in Decoder(one).named_parameters()}
    outside = [number for name, number in sizes.items() if not name.startswith("blocks.")]
    inside = [number for name, number in sizes.items() if name.startswith("blocks.")]
    return max(outside), max(inside)
