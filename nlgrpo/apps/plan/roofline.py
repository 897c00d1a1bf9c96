"""Time of a training step on a GPU: the roofline of each phase, at the shares of the peaks that kernels reach.

    seconds = max(operations / (share x peak), bytes / (share x bandwidth), bytes between GPUs / link, launches)

Operations are those of matrix products and attention, and the peak is that of bfloat16. What kernels reach, and how
long a launch takes, is measured by card or estimated (`machine.Costs`). Rewards and evaluations are not counted, nor
what vLLM servers do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from nlgrpo.apps.plan import decoding_time, sampling_memory, vllm_memory
from nlgrpo.apps.plan.decoding_time import attention_flops, pairs
from nlgrpo.apps.plan.machine import Machine
from nlgrpo.apps.plan.workload import Workload
from nlgrpo.model import lora
from nlgrpo.model.architectures import Shape

# kernels of a layer in a micro-batch at least: about as in decoding, and twice with more
FORWARD = 45
BACKWARD = 105
HOST_BANDWIDTH = 40e9  # bytes per second of the host's memory, per GPU: a node of 8 GPUs has several hundred GB/s
ATTENTION_BACKWARD = 2.5  # of the forward pass: five matrix products, one of them computed again, instead of two


def seconds(work: Workload, machine: Machine) -> dict[str, float]:
    """Seconds of each phase of a step, for the longest prompt and completions of the maximal length.

    vLLM servers have other GPUs: there is no "sampling" then.
    """
    sampling = {"nlgrpo": _sampling, "vllm": _sampling_by_vllm}.get(work.engine)
    found = {
        "sampling": 0.0 if work.config.loss.offline or sampling is None else sampling(work, machine),
        "scoring": _scoring(work, machine),
        "update": _update(work, machine),
        "optimizer step": _optimizer(work, machine),
    }
    return {phase: value for phase, value in found.items() if value}


def tokens_per_second(work: Workload, machine: Machine) -> float:
    """Completion tokens of all ranks per second."""
    return work.world * work.completions * work.columns / sum(seconds(work, machine).values())


# --- operations -------------------------------------------------------------------------------------------------------


def _of_groups(work: Workload, shape: Shape) -> float:
    """Operations of the attention over all groups of a step."""
    tail = work.columns - 1
    group = work.parts * attention_flops(shape, 0, work.prompt)
    return work.groups * (group + work.samples * attention_flops(shape, work.prompt, tail))


def forward_flops(work: Workload, shape: Shape, outputs: int) -> float:
    """Operations of a forward pass over a step. ``outputs``: number of outputs of the head."""
    targets = work.completions * work.columns
    return 2 * shape.matrices * work.tokens + _of_groups(work, shape) + 2 * outputs * shape.width * targets


def update_flops(work: Workload, shape: Shape, outputs: int) -> float:
    """Operations of the forward and backward passes over a step.

    A matrix product has two in its backward pass, for the gradients of input and weight; one if the weight is frozen.
    """
    attention = _of_groups(work, shape)
    total = forward_flops(work, shape, outputs)
    products = total - attention
    head = 2 * outputs * shape.width * work.completions * work.columns
    adapters = 2 * _adapter_parameters(work, shape) * work.tokens
    if work.adapter is None:
        flops = 3 * products
    else:
        flops = 2 * products + 3 * adapters + (head if lora.HEAD in work.adapter.modules_to_save else 0)
    flops += (1 + ATTENTION_BACKWARD) * attention
    if work.config.model.activation_checkpointing:
        flops += products - head + adapters + attention
        if not adapters or not _ends_with_adapter(work, shape):  # then the last product of a block is not needed
            flops -= 2 * shape.layers * shape.ffn * shape.width * work.tokens
    return flops


def _adapter_parameters(work: Workload, shape: Shape) -> int:
    """Number of parameters of the low-rank adapters."""
    if work.adapter is None:
        return 0
    return lora.count(replace(work.adapter, modules_to_save=()), shape)


def _ends_with_adapter(work: Workload, shape: Shape) -> bool:
    """Whether the last linear layer of a block has an adapter."""
    assert work.adapter is not None
    return set(lora.parts_of(shape, "blocks.0.down")) <= set(lora.targets(work.adapter, shape))


def _outputs(work: Workload) -> list[tuple[Shape, int]]:
    """Trained models with the number of outputs of their heads."""
    return [(work.shape, work.shape.vocab)] + ([(work.critic, 1)] if work.critic is not None else [])


# --- phases -----------------------------------------------------------------------------------------------------------


def _gather(work: Workload, shape: Shape, machine: Machine) -> float:
    """Seconds to gather the parameters of a model over its shards, which offloading copies from the host first."""
    copied = work.shard_bytes(shape) / machine.gpu.host if work.offloaded else 0.0
    if work.shards == 1:
        return copied
    size = shape.parameters * work.compute.itemsize * (1 - 1 / work.shards)
    return copied + size / machine.link(work.shards)


def _sampling(work: Workload, machine: Machine) -> float:
    """Prompts are decoded in waves of those that fit together."""
    samples = work.config.rollout.samples
    together, rows = sampling_memory.rows(work, work.config.rollout.prompts, samples)
    gather = _gather(work, work.shape, machine)
    passes = -(-work.groups // together) * work.columns
    decoding = _waves(work.groups * samples, rows, partial(decoding_time.seconds, work, machine))
    if work.config.parallel.gather_for_sampling == "block":
        return max(decoding, passes * gather)
    return decoding + gather


def _sampling_by_vllm(work: Workload, machine: Machine) -> float:
    """An engine has the completions of all its ranks, each of which computes a part of every product."""
    ranks = work.config.vllm.tensor_parallel
    rows = work.groups * work.config.rollout.samples * ranks
    wave = partial(_wave_of_vllm, work, machine, ranks)
    return _taking(work, machine) + _waves(rows, vllm_memory.rows(work), wave)


def _taking(work: Workload, machine: Machine) -> float:
    """Seconds to gather the weights for vLLM in their own dtype, or the adapters."""
    shard = work.shard_bytes(work.shape)
    if vllm_memory.takes_adapters(work):
        shard = work.trained(work.shape) * work.stored.itemsize / work.shards
    copied = shard / machine.gpu.host if work.offloaded else 0.0
    return copied + shard * (work.shards - 1) / machine.link(work.shards)


def _waves(rows: int, together: int, wave: Callable[[int], float]) -> float:
    """Seconds to sample ``rows`` completions, ``together`` at a time, where ``wave`` gives those of some rows."""
    full, rest = divmod(rows, min(rows, together))
    return full * wave(min(rows, together)) + (wave(rest) if rest else 0.0)


def _wave_of_vllm(work: Workload, machine: Machine, ranks: int, rows: int) -> float:
    """Seconds in which vLLM samples ``rows`` completions together: a prefill, and a pass for each further token.

    ``ranks`` share the work. A prompt is computed once for all its completions, and no scores are in the memory.
    """
    shape = work.shape
    size = work.compute.itemsize
    prompts = rows / work.config.rollout.samples
    steps = work.columns - 1
    flops = machine.flops * ranks
    bandwidth = machine.bandwidth * ranks
    scheduling = machine.costs.vllm_seconds
    head = 2 * shape.vocab * shape.width
    prefill = prompts * (2 * shape.matrices * work.prompt + attention_flops(shape, 0, work.prompt) + head)
    decode = rows * ((2 * shape.matrices + head) * steps + attention_flops(shape, work.prompt, steps))
    weights = (shape.matrices + shape.vocab * shape.width) * size
    columns = steps * prompts * work.prompt + rows * pairs(0, steps)  # read over all steps; a prompt is read once
    cache = columns * 2 * shape.kv_heads * shape.head_dim * shape.layers * size
    return max(prefill / flops, weights / bandwidth, scheduling) + max(
        decode / flops, (weights * steps + cache) / bandwidth, steps * scheduling
    )


def _scoring(work: Workload, machine: Machine) -> float:
    """Log-probs of the reference, those of the policy before several optimizer steps, and the critic's values."""
    return sum(
        max(
            forward_flops(work, shape, outputs) / machine.update_flops,
            work.micro_batches * _gather(work, shape, machine),
            work.micro_batches * shape.layers * FORWARD * machine.costs.launch_seconds,
        )
        for shape, outputs in work.passes
    )


def _update(work: Workload, machine: Machine) -> float:
    cfg = work.config
    replicas = work.config.parallel.replicate
    gathers = 2 if cfg.parallel.reshard_after_forward else 1
    compute = exchange = launches = 0.0
    for shape, outputs in _outputs(work):
        compute += update_flops(work, shape, outputs) / machine.update_flops
        launches += work.micro_batches * shape.layers * (FORWARD + BACKWARD) * machine.costs.launch_seconds
        exchange += work.micro_batches * gathers * _gather(work, shape, machine)
        reduced = work.trained(shape) * max(4, work.stored.itemsize)
        if work.shards > 1:
            exchange += work.micro_batches * reduced * (1 - 1 / work.shards) / machine.link(work.shards)
        if work.offloaded:
            exchange += work.micro_batches * reduced / work.shards / machine.gpu.host
        # Once per optimizer step, each of the replicas' ranks sends and receives its shard twice.
        between = machine.link(work.world) * work.shards
        sums = work.micro_batches if work.offloaded else cfg.loss.minibatches
        exchange += sums * 2 * reduced * (1 - 1 / replicas) / between
    return cfg.loss.epochs * max(compute, exchange, launches)


def _optimizer(work: Workload, machine: Machine) -> float:
    """Adam reads and writes the parameters and two moments, and reads the gradients."""
    moved = 7 * sum(map(work.trained, work.models)) * work.stored.itemsize / work.shards
    return work.updates * moved / (HOST_BANDWIDTH if work.offloaded else machine.bandwidth)
