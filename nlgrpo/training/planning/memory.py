"""Estimate of the memory of a rank, by phase of a run.

    peak = max over phases of (what the run holds in all phases + what the phase adds)

Parameters, gradients, optimizer states and caches are counted exactly from shapes. Activations are traced
(`activations`), for the largest micro-batch that the packing allows. ``bench/bench_plan.py`` compares the estimate with
measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass

from nlgrpo.kernels import extension
from nlgrpo.kernels.head import BLOCK_BYTES
from nlgrpo.model.architectures import Shape
from nlgrpo.training.planning.workload import Workload

# A C library keeps part of the memory that was freed for later use: a share of the temporary memory of a phase, and a
# multiple of what one block keeps. Fitted to measured peaks of Linux with glibc (docs/experiments/plan-memory.md).
KEPT_SHARE, KEPT_BLOCKS = 0.1, 2.0
CODE = 60 * 2**20  # pages of libraries that a CPU run maps when it first uses them
ROUNDING = 1.05  # of PyTorch's allocator on a GPU: blocks are rounded up, and split


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. ``persistent``: in all phases, by use. ``phases``: what each phase adds, by use."""

    persistent: dict[str, float]
    phases: dict[str, dict[str, float]]
    overhead: dict[str, float]
    """What the allocator adds in each phase."""

    def total(self, phase: str) -> float:
        return sum(self.persistent.values()) + sum(self.phases[phase].values()) + self.overhead[phase]

    @property
    def largest(self) -> str:
        """The phase with the peak."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> float:
        return self.total(self.largest)


def estimate(work: Workload) -> Memory:
    """Estimate the memory of one rank."""
    persistent = {
        "process": work.process,
        "parameters": sum(map(work.shard_bytes, work.models)),
        "reference": work.shape.parameters * work.compute.itemsize / work.shards if work.reference else 0.0,
        "reward models": float(work.reward_models),
    }
    phases = {"load": _load(work)}
    if not work.config.loss.offline:
        phases["sampling"] = _sampling(work, work.config.rollout.prompts, work.config.rollout.samples)
    if work.config.evaluation.prompts:
        phases["evaluation"] = _sampling(work, work.config.evaluation.prompts, work.config.evaluation.samples)
    if work.config.loss.has_reference or work.config.loss.epochs * work.config.loss.minibatches > 1:
        phases["scoring"] = _scoring(work)
    phases["update"] = _update(work)
    phases["optimizer step"] = _state(work, gradients=True)
    for name, uses in phases.items():
        if name in ("sampling", "evaluation", "scoring"):  # from the second step on
            uses["optimizer"] = _state(work, gradients=False)["optimizer"]
    persistent, phases = _clean(persistent), {name: _clean(uses) for name, uses in phases.items()}
    return Memory(persistent, phases, {name: _overhead(work, name, persistent, uses) for name, uses in phases.items()})


def _clean(uses: dict[str, float]) -> dict[str, float]:
    return {name: size for name, size in uses.items() if size}


def _state(work: Workload, *, gradients: bool) -> dict[str, float]:
    """Gradients and optimizer state of all trained models."""
    trained = sum(map(work.trained, work.models))
    moments = 2 * trained
    if work.config.optim.algorithm == "muon":
        moments -= sum(shape.matrices for shape in work.models)  # Muon has one moment, Adam two
    size = work.stored.itemsize / work.shards
    return {"gradients": trained * size if gradients else 0.0, "optimizer": moments * size}


def _load(work: Workload) -> dict[str, float]:
    """Pages of the file that a rank reads its rows from; they count as memory of the process while it is open."""
    if work.device != "cpu":
        return {}
    return {"file": work.shape.parameters * work.compute.itemsize / work.shards}


def _sampling(work: Workload, prompts: int, samples: int) -> dict[str, float]:
    shape, size = work.shape, work.compute.itemsize
    together, rows = work.rows(prompts, samples)
    cached = together * work.prompt + rows * work.columns
    per_token = 2 * shape.kv_heads * shape.head_dim * size
    noise = rows * work.columns * (8 + 8 + 8 + 4)  # uniform numbers and their bits, tokens, log-probs
    logits = rows * shape.vocab * (size + (0 if _compiled(work) else 3 * 4))
    prefill = together * work.prompt * (work.block.forward + 2 * shape.width * size)
    growing = rows * work.columns * per_token * 3 / 2  # one layer at a time: the old cache and the new one
    return {
        "unsharded parameters": _unsharded_to_sample(work),
        "KV cache": cached * per_token * shape.layers,
        "decoding": max(logits + growing, prefill) + noise,
    }


def _unsharded_to_sample(work: Workload) -> float:
    """Gathered parameters while sampling: the whole model, or as in `_unsharded`."""
    if work.sharded and work.config.parallel.gather_for_sampling == "block":
        return _unsharded(work, work.shape, gradients=False)
    return work.shape.parameters * work.compute.itemsize if work.sharded else 0.0


def _scoring(work: Workload) -> dict[str, float]:
    hidden = 2 * work.micro_batch * work.shape.width * work.compute.itemsize
    return {
        "unsharded parameters": _unsharded(work, work.shape, gradients=False),
        "activations": work.micro_batch * work.block.forward + hidden,
        "logits": _logits(work),
    }


def _update(work: Workload) -> dict[str, float]:
    shape, tokens, size = work.shape, work.micro_batch, work.compute.itemsize
    kept, running = work.block.saved, work.block.backward
    if work.config.model.activation_checkpointing:  # a block keeps its input, and runs again in the backward pass
        kept, running = float(shape.width * size), work.block.saved + work.block.backward
    # The losses of the policy and of a separate critic are one sum, so both keep their activations.
    layers = shape.layers + (work.critic.layers if work.critic is not None else 0)
    around = 4 * shape.width * size  # the embedding, the last norm, the hidden states of the targets and their gradient
    head = shape.vocab * shape.width * size if _head_is_trained(work) else 0
    unsharded = sum(_unsharded(work, model, gradients=True) for model in work.models)
    state = _state(work, gradients=True)
    activations = tokens * layers * kept
    if work.micro_batches == 1:  # the backward pass frees the activations of a block where it makes its gradients
        activations -= min(activations, max(0.0, state["gradients"] - head))
    return {
        **state,
        "unsharded parameters": unsharded,
        "activations": activations + tokens * (running + around),
        "logits": _logits(work) + 2 * head,  # the head's gradient, and its product with that of the loss
    }


def _head_is_trained(work: Workload) -> bool:
    return work.adapter is None or bool(work.adapter.modules_to_save)


def _unsharded(work: Workload, shape: Shape, *, gradients: bool) -> float:
    """Gathered parameters of a sharded model: the embedding and head, and two blocks, this one and the next."""
    if not work.sharded:
        return 0.0
    size = work.compute.itemsize
    outer = shape.vocab * shape.width * (1 if shape.tied else 2)
    block = (shape.parameters - outer) / shape.layers
    keeps = gradients and not work.config.parallel.reshard_after_forward
    gathered = (shape.parameters if keeps else outer + 2 * block) * size
    if not gradients:
        return gathered
    trained = 1.0 if work.adapter is None else work.trained(shape) / shape.parameters
    reduced = size + max(4, size)  # a block's gradient, and the buffer in which it is summed over ranks
    return gathered + max(2 * block, outer) * trained * reduced


def _compiled(work: Workload) -> bool:
    """Whether the compiled ops of a CPU or Triton's kernels compute the head, in the memory of the logits."""
    return work.device != "cpu" or (work.compute.itemsize == 4 and extension.available())


def _logits(work: Workload) -> float:
    """The block of logits that the head holds at a time."""
    size, vocab = work.compute.itemsize, work.shape.vocab
    rows = min(work.targets, max(64, BLOCK_BYTES[work.device] // (vocab * size)))
    return rows * vocab * (size if _compiled(work) else size + 3 * max(4, size))


def _overhead(work: Workload, phase: str, persistent: dict[str, float], uses: dict[str, float]) -> float:
    if work.device != "cpu":
        return (ROUNDING - 1) * (sum(persistent.values()) - persistent.get("process", 0) + sum(uses.values()))
    lasting = ("optimizer", "gradients", "file")
    temporary = sum(size for name, size in uses.items() if name not in lasting)
    churned = KEPT_BLOCKS * work.micro_batch * work.block.saved if "activations" in uses else 0.0
    gathered = 0.0  # by FSDP2 on a CPU, for sampling and for the reference: freed, but not returned to the system
    if work.sharded and phase in ("update", "optimizer step"):
        gathered = work.shape.parameters * work.compute.itemsize * (2 if work.reference else 1)
    return CODE + KEPT_SHARE * temporary + min(churned, temporary) + gathered
