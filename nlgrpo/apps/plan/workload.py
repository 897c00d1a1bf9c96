"""The numbers of a run that decide its memory, known before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from nlgrpo.apps.plan import activations
from nlgrpo.apps.plan.activations import BlockBytes
from nlgrpo.config.schema import Config
from nlgrpo.model import lora
from nlgrpo.model.architectures import Shape
from nlgrpo.model.attention import implementation
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime.device import MicroBatchLimit, master_dtype, micro_batch_limit

Uses = dict[str, float]  # bytes by use

CONTEXT = int(1.5 * 2**30)  # of a GPU: the CUDA context, workspaces of cuBLAS, buffers of NCCL
FITS = 0.95  # share of the memory that a run should need: the plan is an estimate


@dataclass(frozen=True)
class Workload:
    """What one of ``world`` ranks computes.

    ``prompt``: tokens of the longest prompt. ``device``: "cpu" or "cuda", which need not be that of this process.
    """

    config: Config
    shape: Shape
    adapter: LoraConfig | None
    compute: torch.dtype
    device: str
    world: int
    prompt: int
    prompts_of_sets: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the longest prompt of each evaluation set; of one that is not here: ``prompt``."""
    critic: Shape | None = None
    """Shape of PPO's separate critic."""
    reward_models: int = 0
    """Bytes of all reward models, which every rank holds."""
    process: int = 0
    """Bytes of the process before it loads a model: libraries and data, and on a GPU the CUDA context."""
    gpu_memory: float = 0.0
    """Bytes of the GPU, of which vLLM takes a share, and rows the rest. 0: unknown."""

    # --- what samples -------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Literal["nlgrpo", "vllm", "servers"]:
        """What samples the policy: nlgrpo's engine or vLLM in this process, or vLLM servers."""
        if self.config.rollout.engine == "nlgrpo" or self.config.loss.offline:
            return "nlgrpo"
        return "servers" if self.config.vllm.servers else "vllm"

    @property
    def draws(self) -> bool:
        """Whether nlgrpo's engine samples the reference, to calibrate rewards of prompts without rollouts."""
        cfg = self.config
        transformed = any(reward.transform for reward in cfg.rewards.values()) and not cfg.loss.offline
        return transformed and cfg.calibration.missing == "draw"

    @property
    def decodes(self) -> bool:
        """Whether nlgrpo's engine samples anything in this process."""
        return self.engine == "nlgrpo" or self.draws

    # --- parameters ---------------------------------------------------------------------------------------------------

    @property
    def shards(self) -> int:
        """Ranks over which a model is sharded."""
        return self.world // self.config.parallel.replicate

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 gathers the parameters before they are used (see `model.fsdp.shard`).

        On one rank it casts them to the compute dtype, which the frozen weights beside adapters have already.
        """
        cast = self.compute != self.stored and self.adapter is None
        return self.world > 1 or cast or self.config.parallel.offload

    @property
    def offloaded(self) -> bool:
        """Whether shards, gradients and optimizer states are in the memory of the host, and not in that of a GPU."""
        return self.device != "cpu" and self.config.parallel.offload

    @property
    def stored(self) -> torch.dtype:
        return master_dtype(self.compute)

    def trained(self, shape: Shape) -> int:
        """Number of trained parameters of a model."""
        return shape.parameters if self.adapter is None else lora.count(self.adapter, shape)

    def shard_bytes(self, shape: Shape) -> float:
        """Bytes of this rank's shard of a trained model: the trained parameters, and the frozen ones of LoRA."""
        frozen = 0 if self.adapter is None else shape.parameters * self.compute.itemsize
        return (self.trained(shape) * self.stored.itemsize + frozen) / self.shards

    @property
    def reference(self) -> bool:
        """Whether there is a copy of the model as reference; with adapters it is the model without them."""
        return self.config.loss.has_reference and self.adapter is None

    @property
    def models(self) -> list[Shape]:
        """Shapes of the trained models: the policy, and PPO's separate critic."""
        return [self.shape, *([] if self.critic is None else [self.critic])]

    # --- tokens -------------------------------------------------------------------------------------------------------

    @property
    def limit(self) -> MicroBatchLimit:
        return micro_batch_limit(self.config.train.micro_batch_tokens, torch.device(self.device))

    @property
    def columns(self) -> int:
        """Tokens of the longest completion: all ranks reserve for it, whether or not a stop id comes earlier."""
        environment = self.config.environment
        room = max(1, self.shape.context - self.prompt)
        if environment.id:  # a conversation of several turns
            return max(1, min(room, (environment.max_tokens or self.shape.context) - self.prompt))
        return min(self.config.rollout.max_new_tokens, room)

    @property
    def samples(self) -> int:
        """Completions per prompt in a micro-batch's group: M, or the two of a pair, or one."""
        loss = self.config.loss
        if loss.offline:
            return 2 if loss.paired else 1
        return self.config.rollout.samples

    @property
    def completions(self) -> int:
        """Completions of a step on this rank."""
        prompts = max(1, self.config.rollout.prompts // self.world)
        loss = self.config.loss
        offline = self.config.offline
        if not loss.offline:
            return prompts * self.samples
        sets = self.config.rollout.samples // offline.n
        if loss.paired and offline.rejected == "all":
            sets *= offline.n * (offline.n - 1) // 2
        return prompts * sets * self.samples

    @property
    def micro_batch(self) -> int:
        """Tokens T of the largest micro-batch, by the rules of `packing.pack`."""
        group = self.prompt + self.samples * (self.columns - 1)
        one = self.prompt + self.columns - 1
        limit = self.limit
        if group > limit.tokens:
            return max(one, min(group, max(limit)))
        groups = min(limit.tokens // group, max(1, self.completions // self.samples))
        return groups * group

    @property
    def targets(self) -> int:
        """Completion tokens S of the largest micro-batch."""
        return min(self.micro_batch, self.completions * self.columns)

    @property
    def groups(self) -> int:
        """Prompts of a step on this rank, each with ``samples`` completions."""
        return max(1, self.completions // self.samples)

    @property
    def parts(self) -> int:
        """Parts into which a group is split because it does not fit into a micro-batch; each repeats the prompt."""
        together = max(1, (self.micro_batch - self.prompt) // max(1, self.columns - 1))
        return -(-self.samples // together)

    @property
    def tokens(self) -> int:
        """Tokens of a step on this rank. The last token of a completion is not an input."""
        return self.groups * (self.parts * self.prompt + self.samples * (self.columns - 1))

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, at most."""
        return max(1, -(-self.tokens // self.micro_batch))

    @property
    def scores(self) -> bool:
        """Whether the completions are scored before the update.

        By the reference, by the policy for importance weights or before several optimizer steps, or by PPO's critic.
        """
        loss = self.config.loss
        updates = loss.epochs * loss.minibatches
        by_policy = updates > 1 or loss.correction != "none"
        return loss.has_reference or by_policy or loss.algorithm == "ppo"

    # --- activations --------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """How a block runs: the attention on a GPU, or "cpu"."""
        return "cpu" if self.device == "cpu" else implementation(self.device, self.compute)

    @cached_property
    def block(self) -> BlockBytes:
        checkpointing = self.config.model.activation_checkpointing
        return activations.per_token(self.shape, self.adapter, self.compute, self.kind, checkpointing=checkpointing)
