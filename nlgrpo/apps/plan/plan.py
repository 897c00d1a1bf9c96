"""The command ``nlgrpo plan``: memory and time of a training run on GPUs that are not here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console

from nlgrpo.apps.plan import advice, ahead, machine, memory, roofline
from nlgrpo.apps.plan.advice import Choice
from nlgrpo.apps.plan.ahead import Ahead
from nlgrpo.apps.plan.machine import CONSTANTS, Costs, Machine
from nlgrpo.apps.plan.memory import Memory
from nlgrpo.apps.plan.table import adapter_row, engine_row, memory_lines
from nlgrpo.apps.plan.workload import FITS, Workload
from nlgrpo.config.recipes import from_arguments
from nlgrpo.errors import UserError
from nlgrpo.runtime.atomic_files import atomic_write
from nlgrpo.runtime.console import duration, named_lines, size

ABOUT = """Plan a training run on GPUs: nlgrpo plan [recipe] [file.toml] --gpus 8 --gpu h100 [--section.key value ...]

Estimates the memory and the time of each phase of a step, and recommends settings. Recipe, file and keys are
those of `nlgrpo train`. Only the config.json of the model is read: no weights, data or rewards.

Exit status 1 if the run does not fit into the memory."""
FORMAT = 1  # of the JSON file


@dataclass
class Options:
    """Options in addition to the configuration keys."""

    gpu: str
    """Kind of GPU, such as a100, h100, h200, b200, l40s, rtx4090; a wrong name lists all."""
    gpus: int = 1
    """Number of GPUs in all nodes: one rank on each."""
    gpus_per_node: int = 8
    """GPUs of a node, which are connected by NVLink or PCIe."""
    prompt_tokens: int | None = None
    """Tokens of the longest prompt. None: data.max_prompt_tokens, or 512."""
    json: str = ""
    """File for the plan in JSON; - for stdout, without the table."""


@dataclass(frozen=True)
class Plan:
    """Everything that the command prints."""

    options: Options
    found: Ahead
    machine: Machine
    memory: Memory
    seconds: dict[str, float]
    better: Choice | None
    """The recommended settings; None if no settings fit."""

    @property
    def work(self) -> Workload:
        return self.found.work

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.machine.gpu.memory

    @property
    def step(self) -> float:
        """Seconds per step."""
        return sum(self.seconds.values())


def main(arguments: Sequence[str]) -> int:
    """Print the plan. Returns 0 if the run fits, and 1 if it does not. Raises UserError for what cannot be planned."""
    options, rest = tyro.cli(
        Options, args=list(arguments), prog="nlgrpo plan", description=ABOUT, return_unknown_args=True
    )
    gpus = machine.machine(options.gpu, options.gpus_per_node)
    _check(options)
    cfg, _ = from_arguments(rest)
    found = ahead.workload(cfg, gpus=options.gpus, prompt=options.prompt_tokens, gpu_memory=gpus.gpu.memory)
    plan = Plan(
        options,
        found,
        gpus,
        memory.estimate(found.work),
        roofline.seconds(found.work, gpus),
        advice.best(found.work, gpus, FITS * gpus.gpu.memory),
    )
    _write(plan)
    if not plan.fits:
        print(f"error: {_refusal(plan)}", file=sys.stderr)
        return 1
    return 0


def _check(options: Options) -> None:
    for name in ("gpus", "gpus_per_node", "prompt_tokens"):
        value = getattr(options, name)
        if value is not None and not 1 <= value < 2**31:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected a number >= 1")
    if options.gpus > options.gpus_per_node and options.gpus % options.gpus_per_node:
        raise UserError(
            f"--gpus {options.gpus} is not a multiple of --gpus-per-node {options.gpus_per_node}; all nodes have the "
            "same number of GPUs"
        )
    if options.json not in ("", "-"):
        path = Path(options.json).absolute()
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise UserError(f"--json {options.json}: expected a file in a folder that exists and can be written")


# --- what is printed --------------------------------------------------------------------------------------------------


def _write(plan: Plan) -> None:
    if plan.options.json != "-":
        Console().print(named_lines("plan", _rows(plan)))
    if plan.options.json:
        text = json.dumps(_record(plan), indent=1) + "\n"
        if plan.options.json == "-":
            print(text, end="")
        else:
            atomic_write(Path(plan.options.json), text)


def _rows(plan: Plan) -> dict[str, str]:
    work = plan.work
    options = plan.options
    gpu = plan.machine.gpu
    cfg = work.config
    shape = work.shape
    nodes = max(1, options.gpus // options.gpus_per_node)
    shards = f"sharded over {work.shards}" if work.shards > 1 else "not sharded"
    shards += f", {cfg.parallel.replicate} replicas" * (cfg.parallel.replicate > 1)
    tokens = f"{work.prompt} prompt tokens, up to {work.columns} tokens per completion"
    rows = {
        "model": f"{cfg.model.path} ({shape.family}, {shape.parameters:,} parameters, "
        f"computes in {str(work.compute).removeprefix('torch.')})",
        **adapter_row(work.adapter, shape),
        "GPUs": f"{options.gpus} x {options.gpu} ({size(gpu.memory)}) in {nodes} node{'s' * (nodes > 1)}; {shards}",
        **engine_row(work),
        "step": f"{cfg.loss.algorithm}: {cfg.rollout.prompts} prompts x {cfg.rollout.samples} samples, {tokens}; "
        f"{work.micro_batches} micro-batch{'es' * (work.micro_batches > 1)} of up to {work.micro_batch} tokens",
        "memory per GPU": f"{memory_lines(plan.memory)}\n{_share(plan)}",
        **_host(plan),
        "time per step": _time(plan),
        "recommended": _recommended(plan),
    }
    if plan.found.unknown:
        rows["not counted"] = f"reward models without a config yet: {', '.join(plan.found.unknown)}"
    return rows


def _host(plan: Plan) -> dict[str, str]:
    """Row for what is offloaded to the memory of the hosts; none without."""
    host = sum(plan.memory.host.values())
    ranks = min(plan.options.gpus, plan.options.gpus_per_node)
    return {"memory of a host": f"{size(host * ranks)} for {ranks} GPUs"} if host else {}


def _share(plan: Plan) -> str:
    share = plan.memory.peak / plan.machine.gpu.memory
    if not plan.fits:
        return f"does not fit: {share:.0%} of the memory"
    return f"fits: {share:.0%} of the memory" + "; little is left, as the plan is an estimate" * (share > FITS)


def _time(plan: Plan) -> str:
    phases = ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in plan.seconds.items())
    phases += ", sampling on the servers (not counted)" * (plan.work.engine == "servers")
    speed = roofline.tokens_per_second(plan.work, plan.machine)
    in_bfloat16 = "; the peak is in bfloat16, although the run computes in another dtype" * (
        plan.work.compute != torch.bfloat16
    )
    vllm = f", {1e3 * plan.machine.costs.vllm_seconds:g} ms for vLLM's part of a token" * (plan.work.engine == "vllm")
    return (
        f"about {duration(plan.step)}: {phases}\nabout {speed:,.0f} completion tokens per second on all GPUs\n"
        f"(seconds: {plan.machine.costs}{vllm}{in_bfloat16}; rewards and evaluations are not counted)"
    )


def _recommended(plan: Plan) -> str:
    better = plan.better
    work = plan.work
    if better is None:
        lines = advice.alternatives(work, plan.machine)
        return "\n".join(["no settings fit on these GPUs", *(f"fits with {line}" for line in lines)])
    if not better.settings:
        return "these settings; no others are faster by 3%"
    numbers = f"at most {size(better.peak)}, about {duration(better.seconds)} per step"
    return f"{better.options}\n{numbers}"


def _refusal(plan: Plan) -> str:
    needed = f"the run needs about {size(plan.memory.peak)} per GPU in the phase {plan.memory.largest}"
    change = f"; use {plan.better.options}" if plan.better is not None else "; see what is recommended"
    return f"{needed}, but {plan.options.gpu} has {size(plan.machine.gpu.memory)}{change}"


def _alternative(found: advice.Alternative) -> dict[str, Any]:
    peak = round(found.choice.peak)
    seconds = found.choice.seconds
    return {"change": found.change, "options": found.options, "peak_bytes": peak, "seconds": seconds}


def _constants(costs: Costs) -> dict[str, Any]:
    """The constants behind the seconds: which of them are estimates, and where the others were measured."""
    values = {name: getattr(costs, name) for name in CONSTANTS}
    return values | {"unmeasured": list(costs.unmeasured), "file": costs.file, "date": costs.date}


def _record(plan: Plan) -> dict[str, Any]:
    work = plan.work
    better = plan.better and {
        "settings": plan.better.settings,
        "peak_bytes": round(plan.better.peak),
        "seconds": plan.better.seconds,
    }
    return {
        "format": FORMAT,
        "model": work.config.model.path,
        "parameters": work.shape.parameters,
        "gpu": plan.options.gpu,
        "gpus": plan.options.gpus,
        "memory_bytes": round(plan.machine.gpu.memory),
        "fits": plan.fits,
        "peak_bytes": round(plan.memory.peak),
        "largest_phase": plan.memory.largest,
        "persistent": {use: round(number) for use, number in plan.memory.persistent.items()},
        "phases": {name: {use: round(n) for use, n in uses.items()} for name, uses in plan.memory.phases.items()},
        "totals": {name: round(plan.memory.total(name)) for name in plan.memory.phases},
        "host": {use: round(number) for use, number in plan.memory.host.items()},
        "seconds": plan.seconds,
        "constants": _constants(plan.machine.costs),
        "tokens_per_second": roofline.tokens_per_second(work, plan.machine),
        "recommended": better,
        "alternatives": [] if plan.better else [_alternative(a) for a in advice.alternatives(work, plan.machine)],
        "not_counted": list(plan.found.unknown),
    }
