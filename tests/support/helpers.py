"""Helpers of the tests: a tiny random model, and training runs in separate processes."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import resource
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

from nlgrpo.apps.report import report
from nlgrpo.engine.generation import Rollout
from nlgrpo.model import decoder, hf_weights

REPOSITORY = Path(__file__).resolve().parents[2]
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(28))]
BOS, EOS = 1, 2


def run_ranks(work: Callable[..., None], *arguments: Any, ranks: int = 2) -> None:
    """Call ``work(rank, *arguments)`` on each rank of a gloo group, in processes forked from this one."""
    gc.collect()  # a fork that collects this process's garbage would wait for threads that it does not have, or abort
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_on_rank, (work, folder, ranks, arguments), nprocs=ranks, start_method="fork")


def _on_rank(rank: int, work: Callable[..., None], folder: str, ranks: int, arguments: tuple[Any, ...]) -> None:
    gc.freeze()
    faulthandler.enable(file=2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    work(rank, *arguments)
    gc.collect()  # cycles that keep the group alive, as in `process_group.start`
    dist.destroy_process_group()


@contextmanager
def counted_sums() -> Iterator[dict[str, int]]:
    """Count FSDP's sums of gradients over replicas, one per group of parameters, and the backward passes."""
    counts, all_reduce, backward = {"sums": 0, "backward": 0}, dist.all_reduce, torch.Tensor.backward

    def summed(*arguments: Any, **options: Any) -> Any:
        counts["sums"] += "group" in options  # the collectives of `Ranks` are over all ranks
        return all_reduce(*arguments, **options)

    def differentiated(loss: torch.Tensor) -> None:
        counts["backward"] += 1
        backward(loss)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_reduce", summed)
        patched.setattr(torch.Tensor, "backward", differentiated)
        yield counts


def full_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Full parameters by name, gathered by DTensor on every rank, in float64."""
    found = {name: getattr(p.detach(), "full_tensor", p.detach)() for name, p in model.named_parameters()}
    return {name: value.double() for name, value in found.items()}


def as_exported(model: decoder.Decoder, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``values`` of the model's parameters under Hugging Face names and in its layouts."""
    places, shape = decoder.tensor_map(model.shape), model.shape
    stored = [part for name, value in values.items() for part in hf_weights.as_stored(value, places[name], shape)]
    return {name: view.reshape(size) for name, size, view in stored}


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


def training_folder(folder: Path, rewards: str) -> Path:
    """Write a model, ten prompts and the file ``rewards.py``; return the folder."""
    tiny_model(folder / "model")
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "w{i} w{i + 1}"}}\n' for i in range(10)))
    (folder / "rewards.py").write_text(rewards)
    return folder


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
    """One run of a command. At call number ``at`` of ``function`` ("module:name") it sends itself ``signal`` or, with
    a ``limit``, no file can grow beyond ``limit`` bytes from then on.
    """

    arguments: list[str]
    function: str = ""
    at: int = 1
    signal: int = signal.SIGKILL
    limit: int | None = None
    main: str = "nlgrpo.train:main"


@dataclass
class Ended:
    """Result of a run: exit status (negative: the signal that killed it) and printed output."""

    status: int
    output: str


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


class Forked:
    """``main()`` in a process forked from this one, which saves the imports; its result is the exit status."""

    def __init__(self, main: Callable[[], int], **environment: str) -> None:
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.environ |= environment
            status = 70
            try:
                os.dup2(writer, 1)
                os.dup2(writer, 2)
                sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
                torch.set_num_threads(1)
                status = main()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        os.close(writer)
        self.printed = ""

    def lines(self) -> Iterator[str]:
        """Yield the lines that the process prints, as they come."""
        with os.fdopen(self._reader, errors="replace") as pipe:
            for line in pipe:
                self.printed += line
                yield line

    def end(self) -> Ended:
        """Wait for the end of the process."""
        for _ in self.lines():
            pass
        return Ended(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), self.printed)


def fork_ranks(main: Callable[[], int], ranks: int = 2) -> list[Ended]:
    """Run ``main()`` once per rank with the environment that torchrun sets; return how they ended, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    started = [Forked(main, RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(ranks)]
    return [process.end() for process in started]


def run_all(jobs: list[Job]) -> list[Ended]:
    """Run the jobs one after another, each in a process forked from this one."""
    return [Forked(partial(_run, job), COLUMNS="200").end() for job in jobs]


def _run(job: Job) -> int:
    report.write_report = lambda folder: folder / "report.html"  # figures take longer than the runs
    module, _, name = job.main.partition(":")
    main = getattr(importlib.import_module(module), name)
    if job.function:
        _disturb_at(job)
    return main(job.arguments)


def _disturb_at(job: Job) -> None:
    """Make the run send the signal to itself, or limit the size of files, just before the call."""
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


def children(pid: int | None = None) -> list[int]:
    """Process ids of the children of a process, by default of this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = path.read_text("utf-8", "replace").rpartition(")")[2].split()[1]
            found += [int(path.parent.name)] if int(parent) == (pid or os.getpid()) else []
    return found
