"""The update: 0.5B with all weights under FSDP2, and 7B with LoRA. Share of the peak rate, kernels, memory."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from random_models import save_prompts

from gpu_kit import operations
from gpu_kit.child import Kit, Skip
from gpu_kit.measuring import need, peak, profiled, release, seconds
from gpu_kit.models import config_of, fill, save_blank
from nlgrpo.apps.plan import memory, table
from nlgrpo.apps.plan.workload import Workload
from nlgrpo.config.schema import Config, from_dict
from nlgrpo.engine.generation import Rollout
from nlgrpo.runtime.device import gpu_of_device
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.supervision import process_group
from nlgrpo.training import policy
from nlgrpo.training.build import Setup, build_setup


@dataclass(frozen=True)
class Case:
    """An update. All prompts and completions have their full length, as the plan counts them."""

    title: str
    model: str
    prompts: int
    prompt: int
    tokens: int
    samples: int = 8
    lora: int = 0
    checkpointing: bool = False


CASES = (
    Case("0.5B, FSDP2", "0.5B", prompts=64, prompt=256, tokens=256),
    Case("7B, LoRA, checkpointing", "7B", prompts=16, prompt=256, tokens=256, lora=16, checkpointing=True),
)
REHEARSED = (
    Case("tiny, FSDP2", "tiny", prompts=2, prompt=8, tokens=8),
    Case("tiny, LoRA, checkpointing", "tiny, untied", prompts=2, prompt=8, tokens=8, lora=4, checkpointing=True),
)


def run(kit: Kit) -> None:
    with process_group.start() as ranks:
        for case in kit.pick(CASES, REHEARSED):
            try:
                measure(kit, case, ranks)
            except Skip as reason:
                kit.put(**{case.title: f"skipped: {reason}"})
            release(kit.device)


def measure(kit: Kit, case: Case, ranks: Ranks) -> None:
    """Time, profile and size one update."""
    setup = build_setup(from_dict(settings(kit, case), Config()), ranks)
    work = table.workload(setup)
    plan = memory.estimate(work)
    planned = plan.total("update") - work.process
    need(planned, kit.device)
    learner = policy.load_learner(setup)
    fill(learner.model)
    rollout, advantages = samples(case, setup)

    def update() -> None:
        learner.update(rollout, advantages, step=0, lr=1e-6, beta=0.0)

    update()  # compiles, and makes the optimizer's state
    with peak(kit.device) as largest:
        took = seconds(update, kit.device, repeats=kit.pick(3, 1), warmup=0)
        measured_peak = largest()
    found: dict[str, Any] = {"seconds": took, "peak_bytes": measured_peak, "planned_bytes": planned}
    found |= {"tokens": work.tokens, "micro_batches": work.micro_batches} | rate(work, took)
    kit.put(**{case.title: found})
    few = max(1, min(case.prompts, 16_384 // (case.prompt + case.samples * case.tokens)))  # prompts of a micro-batch
    rollout, advantages = samples(replace(case, prompts=few), setup)
    profile = profiled(update, kit.device)
    found |= {"profiled_prompts": few, "kernel_seconds": profile.seconds, "launches": profile.launches}
    found |= {"top": profile.top}
    kit.put(**{case.title: found})


def settings(kit: Kit, case: Case) -> dict[str, Any]:
    """Write the model and the prompts; return the configuration."""
    folder = kit.folder / "".join(c for c in case.title if c.isalnum())
    config = config_of(case.model)
    save_blank(config, folder / "model")
    draw = random.Random(0)
    prompts = [[draw.randrange(3, config.vocab_size) for _ in range(case.prompt)] for _ in range(case.prompts)]
    save_prompts(prompts, folder / "prompts.jsonl")
    return {
        "model": {
            "path": str(folder / "model"),
            "dtype": "bfloat16",
            "activation_checkpointing": case.checkpointing,
        },
        "data": {"source": str(folder / "prompts.jsonl")},
        "rollout": {"prompts": case.prompts, "samples": case.samples, "max_new_tokens": case.tokens},
        "rewards": {"length": {"function": "length(target=30, scale=128)"}},
        "lora": {"rank": case.lora},
        "train": {"out": str(folder / "run")},
        "evaluation": {"prompts": 0},
    }


def samples(case: Case, setup: Setup) -> tuple[Rollout, torch.Tensor]:
    """Random completions of the full length and their advantages (P, M)."""
    device, shape = setup.ranks.device, (case.prompts, case.samples, case.tokens)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, setup.shape.vocab, shape, generator=generator).to(device)
    lengths = torch.full(shape[:2], case.tokens, device=device)
    batch = setup.prompts.take(0, case.prompts)
    rollout = Rollout([list(ids) for ids in batch.ids], tokens, torch.zeros(shape, device=device), lengths, lengths < 0)
    return rollout, torch.randn(shape[:2], generator=generator).to(device)


def rate(work: Workload, took: float) -> dict[str, float]:
    """Operations per second, and their share of the card's peak in bfloat16."""
    flops = operations.of_update(work)
    found = {"flops_per_second": flops / took}
    gpu = gpu_of_device(torch.cuda.get_device_name()) if work.device == "cuda" else None
    if gpu is not None:
        found["share_of_peak"] = flops / took / gpu.flops
    return found
