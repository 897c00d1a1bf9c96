"""Memory of the update phase: the largest of moments that never coincide.

A micro-batch begins with no activations and all its gathered parameters, and ends with gradients and no activations.
The sum of what exists is largest in the first block's forward pass, in the loss, in the backward pass of a block, or
where FSDP2 reduces the gradient of the embedding and the head. ``bench/bench_plan_sharded.py`` compares these moments
with PyTorch's memory tracker.
"""

from __future__ import annotations

from nlgrpo.apps.plan.workload import Uses, Workload
from nlgrpo.kernels import extension
from nlgrpo.kernels.epilogue_torch import CHUNK
from nlgrpo.kernels.head import BLOCK_BYTES
from nlgrpo.model.architectures import Shape


def largest_moment(work: Workload) -> Uses:
    """What the update adds to the memory of all phases, where that is most."""
    layers = _layers(work)
    moments = [_first_block(work), _loss(work), _last_reduction(work)]
    # between the first and the last blocks, the sum is linear in the number of those that are done
    for done in sorted({0, min(1, layers - 1), max(0, layers - 2), layers - 1}):
        moments.append(_backward(work, done))
    return max(moments, key=lambda uses: sum(uses.values()))


def state(work: Workload, *, gradients: bool) -> Uses:
    """Gradients and optimizer state of all trained models, in the memory that computes: none if they are offloaded."""
    return {} if work.offloaded else whole_state(work, gradients=gradients)


def whole_state(work: Workload, *, gradients: bool) -> Uses:
    """Gradients and optimizer state of all trained models."""
    trained = sum(map(work.trained, work.models))
    moments = 2 * trained
    if work.config.optim.algorithm == "muon":
        moments -= sum(shape.matrices for shape in work.models)  # Muon has one moment, Adam two
    size = work.stored.itemsize / work.shards
    return {"gradients": trained * size if gradients else 0.0, "optimizer": moments * size}


# --- parameters -------------------------------------------------------------------------------------------------------


def outer_parameters(shape: Shape) -> int:
    """Number of parameters that are not in a block: embedding and head."""
    return shape.vocab * shape.width * (1 if shape.tied else 2)


def block_parameters(shape: Shape) -> float:
    """Number of parameters of a block."""
    return (shape.parameters - outer_parameters(shape)) / shape.layers


def gathered(work: Workload, shapes: list[Shape], blocks: int) -> float:
    """Bytes of gathered parameters: what is not in blocks, and ``blocks`` blocks of the largest model."""
    if not work.sharded:
        return 0.0
    blocks = min(blocks, 1) if work.shards == 1 else blocks  # one rank needs no buffer to gather into
    count = sum(map(outer_parameters, shapes)) + blocks * max(map(block_parameters, shapes))
    return count * work.compute.itemsize


def _gathered(work: Workload, blocks: int) -> float:
    """The same in an update, which keeps gathered blocks without ``parallel.reshard_after_forward``."""
    if work.sharded and not work.config.parallel.reshard_after_forward:
        ahead = max(map(block_parameters, work.models)) if blocks else 0
        return (sum(shape.parameters for shape in work.models) + ahead) * work.compute.itemsize
    return gathered(work, work.models, blocks)


def _trained_block(work: Workload) -> float:
    """Number of trained parameters of the block with most of them."""
    if work.adapter is None:
        return max(map(block_parameters, work.models))
    return max(work.trained(shape) / shape.layers for shape in work.models)


def _trained_head(work: Workload) -> int:
    """Number of parameters of the language-model head, if it is trained."""
    trained = work.adapter is None or bool(work.adapter.modules_to_save)
    return work.shape.vocab * work.shape.width if trained else 0


def _layers(work: Workload) -> int:
    """The losses of the policy and of a separate critic are one sum, so both keep their activations."""
    return sum(shape.layers for shape in work.models)


# --- moments ----------------------------------------------------------------------------------------------------------


def _kept(work: Workload) -> tuple[float, float]:
    """Bytes per token that a block keeps for its backward pass, and that its backward pass needs beyond them."""
    if work.config.model.activation_checkpointing:  # a block keeps its input, and runs again in the backward pass
        return float(work.shape.width * work.compute.itemsize), work.block.saved + work.block.backward
    return work.block.saved, work.block.backward


def _around(work: Workload) -> int:
    """Bytes per token of the embedding, the last norm, the hidden states of the targets and their gradient."""
    return 4 * work.shape.width * work.compute.itemsize


def _first_block(work: Workload) -> Uses:
    """The first block is gathered while the buffer from which embedding and head were gathered still exists."""
    buffer = gathered(work, work.models, 0) if work.shards > 1 else 0.0
    return {
        **state(work, gradients=work.micro_batches > 1),
        "unsharded parameters": _gathered(work, 2) + buffer,
        "activations": float(work.micro_batch * work.shape.width * work.compute.itemsize),
    }


def _loss(work: Workload) -> Uses:
    """The head computes the loss and its gradient: all activations exist, and gradients of earlier micro-batches."""
    kept, _ = _kept(work)
    return {
        **state(work, gradients=work.micro_batches > 1),
        "unsharded parameters": _gathered(work, 1),  # the buffer of the last block still exists
        "activations": work.micro_batch * (_layers(work) * kept + _around(work)),
        "logits": _in_the_head(work),
    }


def _in_the_head(work: Workload) -> float:
    """A block of logits, and the gradient of the head: that of several blocks is summed in float32."""
    size = work.compute.itemsize
    head = _trained_head(work)
    rows = logits_rows(work)
    wide = max(4, size) if rows < work.targets else size
    in_block = head * wide + logits(work)
    if work.device == "cpu" and wide > size and head:
        # the gradient of the logits is cast for the product
        in_block += rows * work.shape.vocab * wide
    # at the end, the sum is cast to the result
    at_end = head * (wide + size)
    return max(in_block, at_end)


def _backward(work: Workload, done: int) -> Uses:
    """The backward pass of a block after that of ``done`` others."""
    size = work.compute.itemsize
    stored = work.stored.itemsize
    tokens = work.micro_batch
    kept, running = _kept(work)
    left = _layers(work) - done - 1
    block = _trained_block(work)
    head = _trained_head(work)
    lasting = state(work, gradients=True)
    if work.micro_batches == 1 and not work.offloaded:
        # only the blocks that are done have gradients, and without shards the head
        blocks_done = done * block * stored / work.shards
        head_done = 0 if work.sharded else head * stored
        lasting["gradients"] = min(lasting["gradients"], head_done + blocks_done)
    unsharded = 0.0
    if work.sharded:
        unsharded = float(head * size)
        if done:
            # those of the block before are reduced meanwhile
            unsharded += block * max(4, size)
    # a block has its activations at the beginning, and its gradients at the end
    beginning = tokens * (kept + running)
    end = block * (size if work.sharded else stored)
    activations = tokens * (left * kept + _around(work)) + max(beginning, end)
    return {
        **lasting,
        "unsharded parameters": _gathered(work, 2 if left else 1),
        "unsharded gradients": unsharded,
        "activations": activations,
    }


def _last_reduction(work: Workload) -> Uses:
    """The gradient of embedding and head, and the buffer in which it is summed over ranks."""
    size = work.compute.itemsize
    outer = outer_parameters(work.shape) if work.adapter is None else _trained_head(work)
    return {
        **state(work, gradients=True),
        "unsharded gradients": outer * (size + max(4, size)) if work.sharded else 0.0,
    }


# --- the head ---------------------------------------------------------------------------------------------------------


def in_place(work: Workload) -> bool:
    """Whether the compiled ops of a CPU or Triton's kernels compute the head, in the memory of the logits."""
    return work.device != "cpu" or (work.compute.itemsize == 4 and extension.available())


def logits_rows(work: Workload) -> int:
    """Targets whose logits the head computes at a time."""
    return min(work.targets, max(64, BLOCK_BYTES[work.device] // (work.shape.vocab * work.compute.itemsize)))


def logits(work: Workload) -> float:
    """A block of logits, and in plain PyTorch the temporary tensors of one chunk of it."""
    size = work.compute.itemsize
    numbers = logits_rows(work) * work.shape.vocab
    if in_place(work):
        return float(numbers * size)
    chunk = min(numbers, CHUNK)
    return float(numbers * size + 3 * chunk * max(4, size))
