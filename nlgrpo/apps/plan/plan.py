"""The command ``nlgrpo plan``: memory of a training run on GPUs that are not here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from nlgrpo.apps.plan import advice, ahead, memory
from nlgrpo.apps.plan.advice import Alternative, Choice
from nlgrpo.apps.plan.ahead import Ahead
from nlgrpo.apps.plan.memory import Memory
from nlgrpo.apps.plan.options import Options, read_options
from nlgrpo.apps.plan.table import adapter_row, engine_row, memory_lines
from nlgrpo.apps.plan.workload import FITS, Uses, Workload
from nlgrpo.config.recipes import from_arguments
from nlgrpo.errors import UserError
from nlgrpo.runtime.atomic_files import atomic_write
from nlgrpo.runtime.console import named_lines, size
from nlgrpo.runtime.device import GPU, gpu_named

FORMAT = 1  # of the JSON file


@dataclass(frozen=True)
class Plan:
    """Everything that the command prints."""

    options: Options
    found: Ahead
    gpu: GPU
    memory: Memory
    better: Choice | None
    """The fewest changes with which the run fits; None if no settings fit."""

    @property
    def work(self) -> Workload:
        return self.found.work

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.gpu.memory


def main(arguments: Sequence[str]) -> int:
    """Print the plan. Returns 0 if the run fits, and 1 if it does not. Raises UserError for what cannot be planned."""
    options, rest = read_options(arguments)
    gpu = gpu_named(options.gpu)
    _check(options)
    cfg, _ = from_arguments(rest)
    found = ahead.workload(cfg, gpus=options.gpus, prompt=options.prompt_tokens, gpu_memory=gpu.memory)
    plan = Plan(options, found, gpu, memory.estimate(found.work), advice.fitting(found.work, gpu.memory))
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
    cfg = work.config
    shape = work.shape
    dtype = str(work.compute).removeprefix("torch.")
    rows = {"model": f"{cfg.model.path} ({shape.family}, {shape.parameters:,} parameters, computes in {dtype})"}
    rows |= adapter_row(work.adapter, shape)
    rows["GPUs"] = _gpus(plan)
    rows |= engine_row(work)
    rows["step"] = _step(work)
    rows["memory per GPU"] = f"{memory_lines(plan.memory)}\n{_share(plan)}"
    host = sum(plan.memory.host.values())
    if host:
        ranks = min(plan.options.gpus, plan.options.gpus_per_node)
        rows["memory of a host"] = f"{size(host * ranks)} for {ranks} GPUs"
    recommended = _recommended(plan)
    if recommended:
        rows["recommended"] = recommended
    if plan.found.unknown:
        rows["not counted"] = f"reward models without a config yet: {', '.join(plan.found.unknown)}"
    return rows


def _gpus(plan: Plan) -> str:
    options = plan.options
    work = plan.work
    nodes = max(1, options.gpus // options.gpus_per_node)
    text = f"{options.gpus} x {options.gpu} ({size(plan.gpu.memory)}) in {nodes} node{'s' * (nodes > 1)}"
    text += f"; sharded over {work.shards}" if work.shards > 1 else "; not sharded"
    replicas = work.config.parallel.replicate
    if replicas > 1:
        text += f", {replicas} replicas"
    return text


def _step(work: Workload) -> str:
    cfg = work.config
    many = "es" if work.micro_batches > 1 else ""
    return (
        f"{cfg.loss.algorithm}: {cfg.rollout.prompts} prompts x {cfg.rollout.samples} samples, {work.prompt} prompt "
        f"tokens, up to {work.columns} tokens per completion; {work.micro_batches} micro-batch{many} of up to "
        f"{work.micro_batch} tokens"
    )


def _share(plan: Plan) -> str:
    share = plan.memory.peak / plan.gpu.memory
    if share > 1:
        return f"does not fit: {share:.0%} of the memory"
    if share > FITS:
        return f"fits: {share:.0%} of the memory; little is left, as the plan is an estimate"
    return f"fits: {share:.0%} of the memory"


def _recommended(plan: Plan) -> str:
    """Settings with which the run fits, or what else makes it fit; "" if it fits as it is."""
    better = plan.better
    if better is None:
        lines = [f"fits with {alternative}" for alternative in _alternatives(plan)]
        return "\n".join(["no settings fit on these GPUs", *lines])
    if not better.settings:
        return ""
    return f"{better.options}\nat most {size(better.peak)}"


def _alternatives(plan: Plan) -> list[Alternative]:
    return advice.alternatives(plan.work, plan.gpu.memory, plan.options.gpus_per_node)


def _refusal(plan: Plan) -> str:
    needed = f"the run needs about {size(plan.memory.peak)} per GPU in the phase {plan.memory.largest}"
    change = "see what is recommended" if plan.better is None else f"use {plan.better.options}"
    return f"{needed}, but {plan.options.gpu} has {size(plan.gpu.memory)}; {change}"


def _record(plan: Plan) -> dict[str, Any]:
    """The plan in JSON."""
    work = plan.work
    found = plan.memory
    recommended: dict[str, Any] | None = None
    alternatives: list[dict[str, Any]] = []
    if plan.better is not None:
        recommended = {"settings": plan.better.settings, "peak_bytes": round(plan.better.peak)}
    else:
        for other in _alternatives(plan):
            alternatives.append({"change": other.change, "options": other.options, "peak_bytes": round(other.peak)})
    return {
        "format": FORMAT,
        "model": work.config.model.path,
        "parameters": work.shape.parameters,
        "gpu": plan.options.gpu,
        "gpus": plan.options.gpus,
        "memory_bytes": round(plan.gpu.memory),
        "fits": plan.fits,
        "peak_bytes": round(found.peak),
        "largest_phase": found.largest,
        "persistent": _rounded(found.persistent),
        "phases": {name: _rounded(uses) for name, uses in found.phases.items()},
        "totals": {name: round(found.total(name)) for name in found.phases},
        "host": _rounded(found.host),
        "recommended": recommended,
        "alternatives": alternatives,
        "not_counted": list(plan.found.unknown),
    }


def _rounded(uses: Uses) -> dict[str, int]:
    return {use: round(number) for use, number in uses.items()}
