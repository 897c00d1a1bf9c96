"""Helpers of the tests: a tiny random model, and training runs in separate processes."""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

from nlgrpo.engine.generation import Rollout

REPOSITORY = Path(__file__).resolve().parents[1]
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(28))]
BOS, EOS = 1, 2


def leave_group() -> None:
    """Destroy the process group, after collecting cycles that keep it alive, as `distributed.start` does."""
    gc.collect()
    dist.destroy_process_group()


def tiny_config(family: str = "llama", **changes):
    """Config with about 10,000 parameters. GPT-2's norms run in the dtype of the weights, Llama's always in float32."""
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 0}
    if family == "gpt2":
        sizes = {"vocab_size": len(WORDS), "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2Config(**(sizes | dropout | ids | changes))
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**({"vocab_size": len(WORDS)} | sizes | heads | ids | changes))


def tiny_model(folder: Path, family: str = "llama", *, seed: int = 0, scale: float = 0.2, **changes):
    """Write a random model with a tokenizer of 32 words; return it as a transformers model in float64."""
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(scale * noise + (1.0 if parameter.dim() == 1 else 0.0))
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return model.double()


def random_rollout(lengths: torch.Tensor, prompt_lengths: list[int], seed: int = 0) -> Rollout:
    """Return a rollout of random tokens, with completions of ``lengths (P, M)``."""
    generator = torch.Generator().manual_seed(seed)
    longest = int(lengths.max())
    tokens = torch.randint(3, len(WORDS), (*lengths.shape, longest), generator=generator)
    tokens[torch.arange(longest) >= lengths[..., None]] = 0
    prompts = [torch.randint(3, len(WORDS), (n,), generator=generator).tolist() for n in prompt_lengths]
    return Rollout(prompts, tokens, torch.full(tokens.shape, -1.0), lengths, lengths < longest)


@dataclass
class Job:
    """One run of a command. At call number ``at`` of ``function`` ("module:name") it sends itself ``signal``; with a
    ``limit``, no file can grow beyond that many bytes from then on.
    """

    arguments: list[str]
    function: str = ""
    at: int = 1
    signal: int = signal.SIGKILL
    limit: int | None = None
    main: str = "nlgrpo.train:main"


@dataclass
class Ended:
    """Result of a run: its exit status (negative: the signal that killed it) and what it printed."""

    status: int
    output: str


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


def run_all(jobs: list[Job]) -> list[Ended]:
    """Run the jobs one after another, each in a process forked from one that has imported everything."""
    orders = json.dumps([asdict(job) for job in jobs])
    done = subprocess.run(
        [sys.executable, __file__], input=orders, capture_output=True, text=True, env=environment(), timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [Ended(**ended) for ended in json.loads(done.stdout)]


def _serve() -> None:
    importlib.import_module("nlgrpo.train")  # once, before the runs are forked
    from nlgrpo.evaluation import report

    report.write_report = lambda folder: folder / "report.html"  # figures take longer than the runs
    results = []
    for order in json.load(sys.stdin):
        job, (reader, writer) = Job(**order), os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            os.close(reader)
            _run(job)
        os.close(writer)
        with os.fdopen(reader, errors="replace") as pipe:
            output = pipe.read()
        results.append({"status": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "output": output})
    print(json.dumps(results))


def _run(job: Job) -> None:
    status = 70
    module, _, name = job.main.partition(":")
    main = getattr(importlib.import_module(module), name)
    try:
        if job.function:
            _disturb_at(job)
        status = main(job.arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _disturb_at(job: Job) -> None:
    """Make the run send itself the signal, or limit the size of files, just before the call."""
    module, _, names = job.function.partition(":")
    *path, name = names.split(".")
    owner = importlib.import_module(module)
    for part in path:
        owner = getattr(owner, part)
    function, calls = getattr(owner, name), 0

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == job.at and job.limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job.limit, job.limit))  # every writer raises "File too large"
        elif calls == job.at:
            os.kill(os.getpid(), job.signal)
        return function(*args, **kwargs)

    setattr(owner, name, counted)


if __name__ == "__main__":
    _serve()
