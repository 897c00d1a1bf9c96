"""Real vLLM servers, tiny models that vLLM takes, and the processes of a group."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

STORY = Path(__file__).parents[1] / "assets" / "story-lm-32"
SAMPLES = (
    "--tokens-only", "--skip-tokenizer-init", "--no-enable-chunked-prefill", "--logprobs-mode", "processed_logprobs",
    "--worker-extension-cls", "nlgrpo.engine.backends.vllm_worker.Worker",
)  # fmt: skip


def write_model(folder: Path, kind: str, seed: int = 0) -> Path:
    """Write a random model with heads of 32, the smallest that vLLM's CPU attention takes, and the story tokenizer."""
    sizes = {
        "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160, "initializer_range": 0.1,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": kind != "llama",
    }  # fmt: skip
    torch.manual_seed(seed)
    model = (
        Qwen3ForCausalLM(Qwen3Config(head_dim=32, **sizes))
        if kind == "qwen3"
        else LlamaForCausalLM(LlamaConfig(**sizes))
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(STORY).save_pretrained(folder)
    return folder


@dataclass
class RealServer:
    """vLLM's server in a process group of its own."""

    source: Path
    log: Path
    options: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    samples: bool = True
    """Whether it samples a policy, instead of pooling."""
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, wait: bool = True) -> None:
        if not self.port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.source), "--port",
            str(self.port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "160",
            *(SAMPLES if self.samples else ()), *self.options,
        ]  # fmt: skip
        wanted = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=os.environ | wanted | self.environment,
                cwd=self.log.parent,
            )  # fmt: skip
        if wait:
            self.wait()

    def wait(self, seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"the server does not answer: {self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """Kill the server and all processes that it started, and wait for their end.

        The operating system frees a killed process's memory first, so the engine can end seconds after the server.
        """
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + 60.0
        while (left := processes_of(self.process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"still running a minute after SIGKILL: {left}"


def processes_of(group: int) -> list[str]:
    """Command lines of the processes in a process group or session."""
    found = subprocess.run(["ps", "-eo", "pid,pgid,sess,stat,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 4) for line in found.splitlines()[1:]]
    return [row[4] for row in rows if str(group) in row[1:3] and not row[3].startswith("Z")]
