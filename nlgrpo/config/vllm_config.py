"""The section ``vllm``: vLLM as the engine of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

LONGEST = 1200.0  # seconds; PyTorch ends a process that waits for others for half an hour


@dataclass
class VLLMConfig:
    """vLLM, if rollout.engine = "vllm"."""

    servers: tuple[str, ...] = ()
    """URLs of vLLM servers, such as "http://node7:8000". Prompts are spread over them by load. Empty: vLLM runs in the
    processes of the trainer."""
    transfer: Literal["directory", "nccl", "ipc"] = "directory"
    """How servers get the weights: from a directory on a shared disk, or by vLLM's weight transfer over NCCL (other
    GPUs) or CUDA IPC (the same GPUs)."""
    folder: str = ""
    """Directory for the weights. Empty: the run's folder."""
    timeout: float = 600.0
    """Seconds that a server may take for the completions of a prompt, and that all servers may be unreachable."""
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
        found = [
            f"vllm.servers: {url!r} is not a URL such as 'http://node7:8000'"
            for url in self.servers
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname
        ]
        if self.transfer != "directory" and not self.servers:
            found.append(f"vllm.transfer = {self.transfer!r}: only for vllm.servers")
        if not self.timeout > 0 or (world > 1 and self.timeout > LONGEST):
            most = f" and at most {LONGEST:g} with several ranks, which wait for each other" * (world > 1)
            found.append(f"vllm.timeout = {self.timeout}: allowed is > 0{most}")
        if not 0 < self.gpu_memory <= 1:
            found.append(f"vllm.gpu_memory = {self.gpu_memory}: allowed is in (0, 1]")
        if self.tensor_parallel < 1 or world % self.tensor_parallel:
            found.append(
                f"vllm.tensor_parallel = {self.tensor_parallel}: allowed is a divisor of the number of ranks, {world}"
            )
        return found
