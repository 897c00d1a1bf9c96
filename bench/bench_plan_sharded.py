"""Compare the plan's estimate of memory with PyTorch's memory tracker, for 7B and 70B models on up to 64 ranks.

    python bench/bench_plan_sharded.py [--quick] [--only NAME ..] [--save]

Tensors are fake (``FakeTensorMode``) and so is the process group, so no memory is allocated and one process is rank 0
of all ranks. It trains for two steps; ``FSDPMemTracker`` (``MemTracker`` without FSDP2) counts the bytes of the second,
in which optimizer states exist. "Plan" is `apps.plan.memory.estimate` without the process and the allocator's overhead,
which no tracker sees. The tensors are those of a CPU that computes in bfloat16 without compiled ops.

The fused head is one op, whose temporary tensors a tracker does not see. `Head` runs its blocks of logits one by one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from common import machine, one_line, save
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from nlgrpo.apps.plan import memory
from nlgrpo.apps.plan.workload import Workload
from nlgrpo.config.recipes import recipe
from nlgrpo.kernels import Segments, epilogue_torch
from nlgrpo.kernels.head import BLOCK_BYTES, Gradients, block_logits
from nlgrpo.model import fsdp
from nlgrpo.model.architectures import Shape
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.learner import make_optimizer

GIB = 2**30
COMPUTE, STORED, CPU = torch.bfloat16, torch.float32, torch.device("cpu")


def llama(layers: int, heads: int, kv_heads: int, ffn: int, *, vocab: int = 32000, head_dim: int = 128) -> Shape:
    """Shape of a Llama model."""
    return Shape(
        "llama", vocab, heads * head_dim, layers, heads, kv_heads, head_dim, ffn, context=4096, rotary_dim=head_dim,
        windows=(None,) * layers, scales=(head_dim**-0.5,) * layers,
    )  # fmt: skip


LLAMA_7B, LLAMA_70B = llama(32, 32, 32, 11008), llama(80, 64, 8, 28672)


@dataclass(frozen=True)
class Configuration:
    """A model on ``ranks`` ranks, and what one rank computes in a step."""

    shape: Shape
    ranks: int
    replicate: int = 1
    rank: int = 0
    """Rank of the adapters; 0: all parameters are trained."""
    checkpointing: bool = False
    micro_batches: int = 1
    prompt: int = 512
    samples: int = 8
    columns: int = 449

    @property
    def adapter(self) -> LoraConfig | None:
        return LoraConfig(rank=self.rank) if self.rank else None

    def segments(self) -> Segments:
        """One prompt and its completions; the last token of a completion is a target only."""
        return Segments([self.prompt] + [self.columns - 1] * self.samples, [None] + [0] * self.samples)

    def workload(self) -> Workload:
        cfg = recipe("length-bon")
        cfg.loss.beta = 0.0  # without a reference
        cfg.parallel.replicate = self.replicate
        cfg.model.activation_checkpointing = self.checkpointing
        cfg.rollout.samples, cfg.rollout.max_new_tokens = self.samples, self.columns
        cfg.rollout.prompts = self.ranks * self.micro_batches
        cfg.train.micro_batch_tokens = sum(self.segments().lengths)
        return Workload(cfg, self.shape, self.adapter, COMPUTE, "cpu", self.ranks, self.prompt)


CONFIGURATIONS: dict[str, Configuration] = {
    "7B, 8 ranks": Configuration(LLAMA_7B, 8),
    "7B, 8 ranks, 2 micro-batches": Configuration(LLAMA_7B, 8, micro_batches=2),
    "7B, 8 ranks, checkpointing": Configuration(LLAMA_7B, 8, checkpointing=True),
    "70B, 8 x 8 ranks, checkpointing": Configuration(LLAMA_70B, 64, replicate=8, checkpointing=True),
    "70B, 64 ranks, checkpointing": Configuration(LLAMA_70B, 64, checkpointing=True),
    "7B, LoRA, 1 rank": Configuration(LLAMA_7B, 1, rank=16),
    "7B, LoRA, 2 ranks": Configuration(LLAMA_7B, 2, rank=16),
}


def quick(configuration: Configuration, layers: int = 4) -> Configuration:
    """The same with few layers; narrow ones would not be faster, as no operation computes anything."""
    shape = configuration.shape
    shape = replace(shape, layers=layers, windows=shape.windows[:layers], scales=shape.scales[:layers])
    return replace(configuration, shape=shape)


# --- the tracker ------------------------------------------------------------------------------------------------------


class Head(torch.autograd.Function):
    """`kernels.linear_policy_loss` block by block: the same tensors, for the sum of the targets' log-probs.

    The epilogue runs on chunks of 1 MiB; one chunk of each block stands for all, which are alike.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        size = max(64, BLOCK_BYTES["cpu"] // (len(weight) * hidden.itemsize))
        parts = [slice(i, i + size) for i in range(0, len(targets), size)]
        gradients = Gradients(hidden, weight, [hidden.requires_grad, weight.requires_grad, False], len(parts))
        total = hidden.new_zeros((), dtype=torch.float32)
        chunk = max(1, epilogue_torch.CHUNK // len(weight))
        for rows in parts:
            logits = block_logits(hidden[rows], weight, None, emulate_bf16=False)
            first, tokens = logits[:chunk], targets[rows][:chunk]
            logprob, entropy, kept = epilogue_torch.statistics(first, tokens, 1.0)
            total += logprob.sum()
            epilogue_torch.gradient(first, tokens, kept, entropy, torch.ones_like(logprob), None, 1.0, first)
            gradients.add(rows, logits, hidden[rows], weight)
        ctx.save_for_backward(*gradients.results()[:2])
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True)
        return *((x * grad).to(x.dtype) if need else None for x, need in needed), None


@contextmanager
def fake_ranks(world: int) -> Iterator[Ranks]:
    """Context in which this process is rank 0 of ``world``, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield Ranks(0, world, CPU)
    finally:
        dist.destroy_process_group()


def track(configuration: Configuration) -> dict[str, dict[str, int]]:
    """Bytes of rank 0 in the second step, by moment and the tracker's category.

    Moments: the peaks of the update and of the optimizer step, and after the optimizer step.
    """
    work = configuration.workload()
    with torch.device("meta"):
        model = Decoder(configuration.shape, torch.empty(configuration.shape.rotary_dim // 2))
    model.configure(activation_checkpointing=configuration.checkpointing)
    with fake_ranks(configuration.ranks) as ranks:
        fsdp.prepare(model, adapter=configuration.adapter, ranks=ranks, compute=COMPUTE, parallel=work.config.parallel)
        with FakeTensorMode(allow_non_fake_inputs=True), _propagation_untracked():
            model.to_empty(device=CPU)
            return _steps(model, configuration.segments(), work)


@contextmanager
def _propagation_untracked() -> Iterator[None]:
    """Context in which trackers do not see DTensor propagate shapes, on tensors of full size and without memory.

    From torch 2.12 the trackers leave these tensors out themselves.
    """
    if torch.__version__ >= "2.12":  # compared as versions
        yield
        return
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def untracked(self: ShardingPropagator, schema: Any) -> Any:
        with _disable_current_modes():
            return propagate(self, schema)

    with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", untracked):
        yield


class _PlainTracker(MemTracker):
    """`MemTracker` without its statistics of modules, which are slow, and whose hooks fail on frozen parameters."""

    def _pre_fw_hook(self, *_: Any) -> None: ...
    def _post_fw_hook(self, *_: Any) -> None: ...
    def _pre_bw_hook(self, *_: Any) -> None: ...
    def _post_bw_hook(self, *_: Any) -> None: ...


def _steps(model: Decoder, segments: Segments, work: Workload) -> dict[str, dict[str, int]]:
    optimizer = make_optimizer(model, work.config.optim)
    tracker = FSDPMemTracker(model, optimizer) if isinstance(model, FSDPModule) else _PlainTracker()
    tracker.track_external(model)  # FSDPMemTracker ignores it, and finds the parameters itself
    lengths = (work.micro_batch, work.targets, work.targets)
    tokens, select, targets = (torch.zeros(length, dtype=torch.int64) for length in lengths)
    found = {}
    for _ in range(2):
        with tracker:
            for _ in range(work.micro_batches):
                model(tokens, segments, select, lambda hidden, weight: Head.apply(hidden, weight, targets)).backward()
                tracker.reset_mod_stats()  # else it refuses a second forward pass
        found["update"] = _snapshot(tracker, "peak")
        tracker.track_external(model)  # the gradients
        with tracker:
            optimizer.step()
        found["optimizer step"], found["after"] = _snapshot(tracker, "peak"), _snapshot(tracker, "current")
        optimizer.zero_grad()
    return found


def _snapshot(tracker: MemTracker, kind: str) -> dict[str, int]:
    """Bytes by category; FSDPMemTracker has more of them, and writes "OptState" where MemTracker writes "Optstate"."""
    categories = tracker.get_tracker_snapshot(kind)[CPU].items()
    return {str(getattr(name, "value", name)).lower(): size for name, size in categories}


# --- the comparison ---------------------------------------------------------------------------------------------------

PARTS = {  # part: moment, the tracker's categories
    "parameters": ("after", ("parameter", "sharded param")),
    "gradients": ("after", ("gradient", "sharded grad")),
    "optimizer state": ("after", ("optstate",)),
    "unsharded": ("update", ("unsharded param", "unsharded grad", "all gather", "reduce scatter")),
    "activations": ("update", ("activation", "temp")),
    "peak of the update": ("update", ("total",)),
    "peak of the optimizer step": ("optimizer step", ("total",)),
}


def compare(configuration: Configuration) -> dict[str, tuple[float, int]]:
    """Planned and tracked bytes of each part.

    "activations" includes the logits and the gradient of the head; both are those at the peak of the update.
    """
    found, plan = track(configuration), memory.estimate(configuration.workload())
    update = plan.phases["update"]
    state = plan.phases["optimizer step"]
    planned = {
        "parameters": plan.persistent["parameters"],
        "gradients": state["gradients"],
        "optimizer state": state["optimizer"],
        "unsharded": sum(size for name, size in update.items() if name.startswith("unsharded")),
        "activations": update.get("activations", 0.0) + update.get("logits", 0.0),
        "peak of the update": plan.total("update") - plan.overhead["update"],
        "peak of the optimizer step": plan.total("optimizer step") - plan.overhead["optimizer step"],
    }
    tracked = {
        part: sum(found[moment].get(name, 0) for name in categories) for part, (moment, categories) in PARTS.items()
    }
    return {part: (planned[part], tracked[part]) for part in PARTS}


def rows_of(name: str, configuration: Configuration) -> list[dict[str, Any]]:
    """One row per part."""
    rows = []
    for part, (planned, tracked) in compare(configuration).items():
        row: dict[str, Any] = {"name": name, "part": part}
        row |= {"planned_gib": round(planned / GIB, 4), "tracked_gib": round(tracked / GIB, 4)}
        rows.append(row | {"ratio": round(planned / tracked, 4) if tracked else None})
    return rows


def main() -> None:
    args, started = arguments(), time.perf_counter()
    facts, rows = machine(), []
    print(f"{'configuration':32s} {'part':27s} {'plan, GiB':>10s} {'tracker, GiB':>13s} {'ratio':>7s}")
    for name in args.only:
        configuration = CONFIGURATIONS[name]
        for row in rows_of(name, quick(configuration) if args.quick else configuration):
            rows.append(row)
            ratio = "" if row["ratio"] is None else f"{row['ratio']:7.3f}"
            sizes = f"{row['planned_gib']:10.3f} {row['tracked_gib']:13.3f}"
            print(f"{name:32s} {row['part']:27s} {sizes} {ratio}", flush=True)
    worst = max((row for row in rows if row["part"].startswith("peak")), key=lambda row: abs(row["ratio"] - 1))
    seconds = time.perf_counter() - started
    print(f"largest error of a peak {worst['ratio'] - 1:+.1%} ({worst['name']}); {seconds:.0f} s; {one_line(facts, 1)}")
    result = {"bench": "plan_sharded", "quick": args.quick, "seconds": round(seconds), "rows": rows, "machine": facts}
    if args.save:
        print(f"saved {save('bench_plan_sharded', result)}")
    print(json.dumps(result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CONFIGURATIONS, nargs="+", default=list(CONFIGURATIONS), help="default: all")
    parser.add_argument("--quick", action="store_true", help="only the first 4 layers of each model")
    parser.add_argument("--save", action="store_true", help="write bench/results/cpu/bench_plan_sharded.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
