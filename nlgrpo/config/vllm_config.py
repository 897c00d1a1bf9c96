"""The section ``vllm``: vLLM as the engine of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class VLLMConfig:
    """vLLM, if rollout.engine = "vllm"."""

    tensor_parallel: int = 1
    """Ranks that share one engine, which has a part of each weight on each of them."""
    gpu_memory: float = 0.4
    """Share of a GPU's memory for the engine, with its weights and KV cache."""
    sleep: bool = True
    """On a GPU: give that memory back during the update."""
    adapters: bool = True
    """With LoRA: give the engine the adapters, if it supports them for the model. false: merged weights."""

    def faults(self, world: int) -> list[str]:
        """List the values that do not fit ``world`` ranks."""
        found = []
        if not 0 < self.gpu_memory <= 1:
            found.append(f"vllm.gpu_memory = {self.gpu_memory}: allowed is in (0, 1]")
        if self.tensor_parallel < 1 or world % self.tensor_parallel:
            found.append(
                f"vllm.tensor_parallel = {self.tensor_parallel}: allowed is a divisor of the number of ranks, {world}"
            )
        return found
