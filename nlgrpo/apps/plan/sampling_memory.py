"""Memory of sampling with nlgrpo's engine: the rows that are decoded together, and what they need.

The numbers of a row are those of `engine.decoding_memory`, by which the engine itself chooses its rows.
"""

from __future__ import annotations

import torch

from nlgrpo.apps.plan import update, vllm_memory
from nlgrpo.apps.plan.workload import FITS, Uses, Workload
from nlgrpo.engine import decoding_memory
from nlgrpo.engine.decoding_memory import ROWS, USABLE, Sampler
from nlgrpo.kernels import dispatch
from nlgrpo.model import lora
from nlgrpo.model.architectures import Shape

ROUNDING = 1.05  # of PyTorch's allocator on a GPU: blocks are rounded up, and split
BY_OTHERS = ("process", "vLLM")  # uses whose bytes PyTorch's allocator does not hand out


def sampling(work: Workload, prompts: int, samples: int, *, adapted: bool = True) -> Uses:
    """What sampling ``samples`` completions of each of ``prompts`` adds. ``adapted``: with adapters, if there are any.

    ``prompts`` are those of all ranks.
    """
    together, number = rows(work, prompts, samples)
    size = work.compute.itemsize
    peak = decoding_memory.peak_bytes(
        work.shape,
        prompts=together,
        rows=number,
        prompt_tokens=work.prompt,
        columns=work.columns,
        itemsize=size,
        sampler=sampler(work),
    )
    cached = together * work.prompt + number * work.columns
    cache = decoding_memory.cache_bytes(work.shape, cached, size)
    return {
        "unsharded parameters": unsharded(work),
        "merged adapters": merged(work) if adapted else 0.0,
        "KV cache": cache,
        "decoding": peak - cache,
    }


def rows(work: Workload, prompts: int, samples: int) -> tuple[int, int]:
    """Prompts and rows that are decoded together, of ``prompts`` on all ranks with ``samples`` each."""
    together = max(1, most_rows(work, samples) // samples)
    together = min(together, max(1, -(-prompts // work.world)))
    return together, together * samples


def most_rows(work: Workload, samples: int) -> int:
    """Rows that ``rollout.max_rows`` allows; by default those that fit into the free memory of a known GPU."""
    most = work.config.rollout.max_rows
    if most is not None:
        return most
    if work.device == "cpu" or not work.gpu_memory:
        return ROWS
    return decoding_memory.rows_that_fit(
        work.shape,
        prompt_tokens=work.prompt,
        columns=work.columns,
        samples=samples,
        itemsize=work.compute.itemsize,
        free=USABLE * free(work),
        sampler=sampler(work),
    )


def free(work: Workload) -> float:
    """Bytes of a GPU beside what a rank holds while it samples, from the second step on."""
    return _beside(work, merged(work))


def _beside(work: Workload, copies: float) -> float:
    """The same, where adapters are merged into copies of ``copies`` bytes."""
    held = persistent(work) | update.state(work, gradients=False)
    others = sum(size for use, size in held.items() if use in BY_OTHERS)
    allocated = sum(held.values()) - others + unsharded(work) + copies
    return FITS * work.gpu_memory - others - ROUNDING * allocated


def sampler(work: Workload) -> Sampler:
    """What draws the tokens: Triton's kernel on a GPU, and the compiled op on a CPU, where they can."""
    rollout = work.config.rollout
    on_gpu = not dispatch.DISABLED and work.compute != torch.float64
    return decoding_memory.sampler_of(
        filtered=rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0,
        top_p=rollout.top_p,
        fused=update.in_place(work) if work.device == "cpu" else on_gpu,
    )


# --- parameters -------------------------------------------------------------------------------------------------------


def persistent(work: Workload) -> Uses:
    """What a rank holds in all phases."""
    found = {"process": float(work.process)}
    if not work.offloaded:
        found |= shards(work)
    found["reward models"] = float(work.reward_models)
    return found | vllm_memory.lasting(work)


def shards(work: Workload) -> Uses:
    """Shards of the trained models and of the reference."""
    reference = 0.0
    if work.reference:
        reference = work.shape.parameters * work.compute.itemsize / work.shards
    return {"parameters": sum(map(work.shard_bytes, work.models)), "reference": reference}


def of_a_pass(work: Workload) -> float:
    """Gathered parameters of a forward pass: two blocks, this one and the next, and what is not in blocks.

    In the first block, the buffer from which the latter was gathered still exists.
    """
    models = [work.shape]
    found = update.gathered(work, models, 2)
    if work.shards > 1:
        found += update.gathered(work, models, 0)
    return found


def unsharded(work: Workload) -> float:
    """Gathered parameters while sampling: the whole model, or one block after another."""
    if work.config.parallel.gather_for_sampling == "block":
        return of_a_pass(work)
    if not work.sharded:
        return 0.0
    return float(work.shape.parameters * work.compute.itemsize)


def merged(work: Workload) -> float:
    """Copies of the adapted weights with the adapters in them, as in `engine.backends.NativeEngine`.

    On a GPU, if the share `COPIES` of what is free holds them, and not if parameters are gathered by block.
    """
    if work.adapter is None or work.device == "cpu" or work.config.parallel.gather_for_sampling == "block":
        return 0.0
    targets = set(lora.targets(work.adapter, work.shape))
    of_a_block = 0
    for name, number in _projections(work.shape).items():
        if targets & set(lora.parts_of(work.shape, f"blocks.0.{name}")):
            of_a_block += number
    retrained = len(work.adapter.modules_to_save) * work.shape.vocab * work.shape.width
    numbers = work.shape.layers * of_a_block + retrained
    size = float(numbers * work.compute.itemsize)
    if work.gpu_memory and size > decoding_memory.COPIES * _beside(work, 0.0):
        return 0.0
    return size


def _projections(shape: Shape) -> dict[str, int]:
    """Numbers of each linear layer of a block, in which q, k and v are one, and gate and up."""
    return {
        "qkv": shape.width * (shape.heads + 2 * shape.kv_heads) * shape.head_dim,
        "out": shape.width * shape.heads * shape.head_dim,
        "up": shape.width * shape.ffn * (2 if shape.gated else 1),
        "down": shape.width * shape.ffn,
    }
