"""Measure the host memory that exporting a sharded model and reading a reward model take, on two gloo ranks.

    python bench/bench_export.py [--quick] [--save]

A random Llama of about 100 million parameters in float32 is sharded with FSDP2. The sides are nlgrpo's code ("stream"),
and plain code that gathers the whole model on every rank, or reads it whole and then shards it ("whole"). Each rank of
each side is a new process. The memory is the peak during the work above the state before it, without the shard itself;
the bound is the largest tensor, in the dtype that is written or kept, plus 50 MiB.

The peak is that of anonymous memory (RssAnon of /proc/self/status, which a thread samples every millisecond): what the
process has allocated. safetensors maps the file that it reads, so pages of the file count as resident too (RssFile),
but the system drops them when it needs memory. ``total`` is the peak of all resident memory, which the kernel records
(VmHWM).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import MIB, forget_peak, machine, one_line, peak_resident, resident, save
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig

from nlgrpo.model import decoder, fsdp, reward_model
from nlgrpo.model.decoder import Decoder
from nlgrpo.runtime import checkpoint
from nlgrpo.runtime.distributed import Ranks

CPU = torch.device("cpu")
RANKS, SLACK = 2, 50 * MIB
SIDES = ("stream", "whole")
WORK = ("export", "export in bfloat16", "read a reward model", "read a checkpoint")
SIZES = {
    "100M": (32000, 640, 1792, 12),
    "quick": (20000, 512, 1408, 12),
}  # vocabulary, width, feed-forward, layers


def config(size: str) -> LlamaConfig:
    vocab, width, ffn, layers = SIZES[size]
    return LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=512,
    )  # fmt: skip


def make(_: int, folder: Path, size: str) -> None:
    """Write a random model, and a run of a reward model with its checkpoint."""
    model = decoder.build(config(size))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    decoder.save(model, folder / "model")
    scorer = reward_model.with_score_head(model)
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text(json.dumps({"model": {"path": str(folder / "model")}}))
    optimizer = torch.optim.SGD(scorer.parameters())
    checkpoint.save(folder / "run" / "checkpoints", 1, model=scorer, optimizer=optimizer, state={})


def anonymous() -> int:
    """Anonymous resident memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: this benchmark needs Linux")


class Peak:
    """Context that records the peaks of anonymous and of all resident memory, above the state at its begin."""

    def __enter__(self) -> Peak:
        forget_peak()
        self.before, self.before_total = anonymous(), resident()
        self.highest, self.done = self.before, threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()
        self.begin = time.perf_counter()
        return self

    def _sample(self) -> None:
        while not self.done.wait(0.001):
            self.highest = max(self.highest, anonymous())

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.begin
        self.done.set()
        self.thread.join()
        self.highest = max(self.highest, anonymous())
        self.anonymous, self.total = self.highest - self.before, peak_resident() - self.before_total


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _shard_bytes(model: Decoder) -> int:
    return sum(_bytes(p.to_local() if isinstance(p, DTensor) else p) for p in model.parameters())


def _export(side: str, model: Decoder, ranks: Ranks, folder: Path, dtype: torch.dtype) -> None:
    fsdp.check_finite(model, ranks, "")
    if side == "stream":
        write = partial(decoder.save, model, folder, dtype=dtype)
        fsdp.save_on_first(model, dtype, ranks, folder, lambda parameters: write(parameters=parameters))
        return
    full = {name: cast(DTensor, p.detach()).full_tensor().to(dtype) for name, p in model.named_parameters()}
    if ranks.first:
        decoder.save(model, folder, parameters=full.items(), dtype=dtype)
    ranks.any(False)


def _read(side: str, path: Path, sharded: Callable[[Decoder], object]) -> Decoder:
    if side == "stream":
        return reward_model.load_reward_model(str(path), shard=sharded)[0]
    model, _ = reward_model.load_reward_model(str(path))
    sharded(model)
    return model


def measure(rank: int, folder: Path, work: str, side: str) -> None:
    """Do the work on one rank and write what it took as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    ranks = Ranks(rank, RANKS, CPU)
    sharded = partial(fsdp.shard, ranks=ranks, compute=torch.float32)
    if work.startswith("export"):
        dtype = torch.bfloat16 if work.endswith("bfloat16") else torch.float32
        model = decoder.load(folder / "model", shard=sharded)
        with Peak() as peak:
            _export(side, model, ranks, folder / "out", dtype)
        kept = 0
    else:
        dtype = torch.float32
        path = folder / "run" / "checkpoints" / "step-00000001" if work == "read a checkpoint" else folder / "model"
        with Peak() as peak:
            model = _read(side, path, sharded)
        kept = _shard_bytes(model)
    largest = max(p.numel() for p in model.parameters()) * dtype.itemsize
    found = {
        "rank": rank,
        "peak_mib": round((peak.anonymous - kept) / MIB, 1),
        "total_mib": round((peak.total - kept) / MIB, 1),
        "shard_mib": round(_shard_bytes(model) / MIB, 1),
        "largest_mib": round(largest / MIB, 1),
        "bound_mib": round((largest + SLACK) / MIB, 1),
        "seconds": round(peak.seconds, 2),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    del model
    dist.destroy_process_group()


def in_processes(function: Callable[..., None], *arguments: Any, count: int) -> None:
    """Call the function in processes forked from this one, which has imported all packages and computed nothing."""
    mp.start_processes(function, arguments, nprocs=count, start_method="fork")


def rows(folder: Path, work: str, side: str) -> list[dict[str, Any]]:
    """Measure one side on all ranks."""
    (folder / "store").unlink(missing_ok=True)
    in_processes(measure, folder, work, side, count=RANKS)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return [{"work": work, "side": side, "held": row["peak_mib"] <= row["bound_mib"], **row} for row in found]


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['work']:20s} {row['side']:7s} rank {row['rank']}  {row['peak_mib']:6.1f} MiB above the shard "
        f"(total {row['total_mib']:6.1f}), bound {row['bound_mib']:6.1f}, {row['seconds']:.1f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=list(SIDES), help="default: both")
    parser.add_argument("--quick", action="store_true", help="a model of half the size")
    parser.add_argument("--save", action="store_true", help="write bench/results/cpu/export.json")
    args = parser.parse_args()
    size = "quick" if args.quick else "100M"
    found = []
    with tempfile.TemporaryDirectory() as name:
        in_processes(make, Path(name), size, count=1)
        for work in WORK:
            for side in args.sides:
                for row in rows(Path(name), work, side):
                    found.append(row)
                    show(row)
    facts = machine("nlgrpo", "safetensors")
    parameters = decoder.shape_of(config(size)).parameters
    model = f"random Llama, {parameters / 1e6:.0f}M parameters, shards of {found[0]['shard_mib']:.0f} MiB"
    print(f"{model}, {RANKS} gloo ranks; {one_line(facts, 1)}")
    result = {"bench": "export", "parameters": parameters, "ranks": RANKS, "rows": found, "machine": facts}
    if args.save:
        print(f"saved {save('export', result)}")
    print(json.dumps(result))
    if not all(row["held"] for row in found if row["side"] == "stream"):
        sys.exit("the bound does not hold")


if __name__ == "__main__":
    main()
