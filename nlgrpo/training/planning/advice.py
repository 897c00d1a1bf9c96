"""Recommended settings for a machine, and refusal of runs that cannot fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime.console import duration, size
from nlgrpo.training.planning import memory, roofline
from nlgrpo.training.planning.roofline import Machine
from nlgrpo.training.planning.workload import Workload

FITS = 0.95  # share of the memory that recommended settings may need: the plan is an estimate
FASTER = 0.97  # other settings are recommended if they need at most this share of the time
MICRO_BATCHES = (2048, 4096, 8192, 16384, 32768, 65536)
LORA = LoraConfig(rank=16)

Settings = dict[str, Any]  # values by key, such as {"train.micro_batch_tokens": 8192}


@dataclass(frozen=True)
class Choice:
    """Settings that differ from those of the run, with the resulting peak in bytes and seconds per step."""

    settings: Settings
    peak: float
    seconds: float

    @property
    def options(self) -> str:
        """The settings as command-line options."""
        return " ".join(f"--{key} {value}" for key, value in self.settings.items())


def peak(work: Workload) -> float:
    """Bytes of one rank in the phase that needs most."""
    return memory.estimate(work).peak


def with_settings(work: Workload, settings: Settings) -> Workload:
    """Return the workload with other settings."""
    config = work.config
    for key, value in settings.items():
        section, name = key.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return replace(work, config=config)


def best(work: Workload, machine: Machine, limit: float) -> Choice | None:
    """Return the settings with the shortest step that need at most ``limit`` bytes; None if no settings fit.

    Micro-batches, ``rollout.max_rows``, activation checkpointing, replicas and the gathering for sampling may change;
    none of them changes the samples or the loss. Of settings within 3% of the shortest time, those with the fewest
    changes are returned.
    """
    found = []
    for settings in _variants(work, machine):
        changed = {key: value for key, value in settings.items() if attrgetter(key)(work.config) != value}
        variant = with_settings(work, changed)
        if (needed := peak(variant)) <= limit:
            found.append(Choice(changed, needed, sum(roofline.seconds(variant, machine).values())))
    if not found:
        return None
    shortest = min(choice.seconds for choice in found)
    near = [choice for choice in found if choice.seconds * FASTER <= shortest]
    return min(near, key=lambda choice: (len(choice.settings), choice.seconds, choice.peak))


def _variants(work: Workload, machine: Machine) -> Iterator[Settings]:
    cfg = work.config
    group = work.prompt + work.samples * (work.columns - 1)
    budgets = sorted({cfg.train.micro_batch_tokens, *MICRO_BATCHES, _power(group)}, key=lambda n: n or 0)
    rows = {cfg.rollout.max_rows}
    if not cfg.loss.offline:
        most = max(cfg.rollout.samples, -(-cfg.rollout.prompts // work.world) * cfg.rollout.samples)
        rows |= {cfg.rollout.samples * 2**i for i in range(12) if 2**i * cfg.rollout.samples <= _power(most)}
    nodes = max(1, work.world // machine.per_node)
    replicas = {cfg.parallel.replicate} | ({1, nodes} if work.world % nodes == 0 else {1})
    gathers = ("model", "block") if work.sharded and work.shards > 1 else (cfg.parallel.gather_for_sampling,)
    checkpointing = {cfg.model.activation_checkpointing, False, True}
    names = (
        "train.micro_batch_tokens",
        "model.activation_checkpointing",
        "rollout.max_rows",
        "parallel.replicate",
        "parallel.gather_for_sampling",
    )
    for values in itertools.product(budgets, sorted(checkpointing), sorted(rows), sorted(replicas), gathers):
        yield dict(zip(names, values, strict=True))


def _power(number: int) -> int:
    """Round up to a power of 2."""
    return 2 ** math.ceil(math.log2(max(1, number)))


# --- runs that do not fit ---------------------------------------------------------------------------------------------


def alternatives(work: Workload, machine: Machine) -> list[str]:
    """One line for each way to fit a workload that does not fit with any settings: more GPUs, adapters, offloading."""
    limit, lines = FITS * machine.gpu.memory, []
    for world in (work.world * 2**i for i in range(1, 13)):
        grown = replace(work.config.rollout, prompts=max(work.config.rollout.prompts, world))
        choice = best(replace(work, world=world, config=replace(work.config, rollout=grown)), machine, limit)
        if choice is not None:
            lines.append(_line(f"{world} GPUs", choice))
            break
    if work.adapter is None and (choice := best(replace(work, adapter=LORA), machine, limit)) is not None:
        lines.append(_line(f"adapters (LoRA): --lora.rank {LORA.rank}", choice))
    offloaded = {"parallel.offload": True}
    if not work.config.parallel.offload:
        choice = best(with_settings(work, offloaded), machine, limit)
        if choice is not None:
            lines.append(_line("shards in the memory of the host: --parallel.offload True", choice))
    return lines


def _line(how: str, choice: Choice) -> str:
    return f"{f'{how} {choice.options}'.strip()} ({size(choice.peak)}, at least {duration(choice.seconds)} per step)"


def check(work: Workload, limit: float, where: str) -> None:
    """Raise ValueError if the run needs more than ``limit`` bytes per rank; ``where`` names the memory.

    Set ``train.check_memory = false`` to start such a run.
    """
    plan = memory.estimate(work)
    if not work.config.train.check_memory or plan.peak <= limit:
        return
    use, most = max((plan.persistent | plan.phases[plan.largest]).items(), key=lambda item: item[1])
    raise ValueError(
        f"the run needs about {size(plan.peak)} per rank in the phase {plan.largest} (most of it for {use}, "
        f"{size(most)}), but {where} has {size(limit)}; {remedies(work, limit)}, or set train.check_memory = false to "
        "start anyway"
    )


def remedies(work: Workload, limit: float) -> str:
    """Settings that make a run fit into ``limit`` bytes, or what else may help."""
    cfg, fitting = work.config, []
    rows = [n for n in (64, 16, 1) if n < cfg.rollout.max_rows]
    budgets = [n for n in (4096, 1024) if n < work.limit.tokens]
    changes = itertools.product((None, *rows), (None, True), (None, *budgets))
    for values in changes:
        names = ("rollout.max_rows", "model.activation_checkpointing", "train.micro_batch_tokens")
        settings = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        if peak(with_settings(work, settings)) <= FITS * limit:
            fitting.append(settings)
    if fitting:
        return f"it fits with {Choice(min(fitting, key=len), 0.0, 0.0).options}"
    return "use more ranks, adapters (lora.rank) or a smaller model"
