"""Sections of a configuration that rooms below `config` take.

Like `config`, this module does not import PyTorch, which takes seconds: ``nlgrpo train --help`` needs none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Baseline = Literal["mean", "loo", "none"]
Kind = Literal["mse", "bce"]  # of a value model
ALL_LINEAR = "all-linear"  # PEFT's name for all linear layers but the head


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA) that are trained instead of the weights; the reference is the model without them."""

    rank: int = 0
    """Rank r of the adapters. 0: all weights are trained, without adapters."""
    alpha: float = 32.0
    """An adapter is scaled by alpha / rank."""
    dropout: float = 0.0
    """Dropout on the input of the adapters, in the loss only."""
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    """Linear layers with an adapter, by their Hugging Face names such as "q_proj", or "all-linear": attention and
    feed-forward of every layer."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA), which suits large ranks."""
    modules_to_save: tuple[str, ...] = ()
    """Embeddings and head that are trained in full, by their Hugging Face names such as "embed_tokens", "lm_head"."""
    path: str = ""
    """Adapter in PEFT's format to continue. It defines the keys above; leave rank at 0."""

    @property
    def enabled(self) -> bool:
        return self.rank > 0 or bool(self.path)

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def faults(self) -> list[str]:
        """List the values that are out of range."""
        allowed = {
            "rank": (">= 0 (0: no adapters)", self.rank >= 0),
            "alpha": ("> 0", 0 < self.alpha < math.inf),
            "dropout": ("in [0, 1)", 0 <= self.dropout < 1),
            "target_modules": ("one or more names", len(self.target_modules) > 0),
        }
        faults = [
            f"lora.{k} = {getattr(self, k)!r}: allowed is {what}" for k, (what, good) in allowed.items() if not good
        ]
        if self.path and self.rank:
            faults.append(
                f"lora.rank = {self.rank} with lora.path = {self.path!r}: the adapter defines its rank; leave 0"
            )
        return faults


@dataclass
class ParallelConfig:
    """How models are sharded over the ranks."""

    replicate: int = 1
    """Number of replicas of the sharded models (HSDP), such as the number of nodes: each replica is sharded over
    ranks / replicate ranks, so parameters are gathered within a replica, and only gradients are summed over replicas.
    1: every model is sharded over all ranks."""
    reshard_after_forward: bool = True
    """Free the gathered parameters of a block after its forward pass, and gather them again in the backward pass. false
    keeps them: less communication, and the memory of the whole model in the compute dtype."""
    gather_for_sampling: Literal["model", "block"] = "model"
    """Parameters that are gathered for sampling. "model": the whole model once, which is fastest. "block": each block
    for each token, for a model that is larger than a GPU."""
    offload: bool = False
    """Keep the shards of parameters, gradients and optimizer states in the memory of the host, where the optimizer runs
    too, and copy each block to the GPU while it computes. It is slower; on a CPU it saves nothing."""

    def faults(self, world: int) -> list[str]:
        """List the values that do not fit ``world`` ranks."""
        if self.replicate >= 1 and world % self.replicate == 0:
            return []
        return [f"parallel.replicate = {self.replicate}: allowed is a divisor of the number of ranks, {world}"]
