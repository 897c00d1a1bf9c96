"""Recommended settings for a machine, and refusal of runs that cannot fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from nlgrpo.apps.plan import memory, roofline, sampling_memory, vllm_memory
from nlgrpo.apps.plan.machine import Machine
from nlgrpo.apps.plan.workload import FITS, Workload
from nlgrpo.errors import UserError
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime.console import duration, size

FASTER = 0.97  # other settings are recommended if they need at most this share of the time
MICRO_BATCHES = (2048, 4096, 8192, 16384, 32768, 65536)
SHARES = tuple(n / 10 for n in range(9, 0, -1))  # of a GPU for vLLM
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

    Micro-batches, ``rollout.max_rows``, activation checkpointing, replicas, the gathering for sampling and a smaller
    share of the GPU for vLLM may change; none of them changes the loss or the distribution of the samples. Of settings
    within 3% of the shortest time, those with the fewest changes are returned.
    """
    found = []
    for settings in _variants(work, machine):
        changed = {key: value for key, value in settings.items() if attrgetter(key)(work.config) != value}
        variant = with_settings(work, changed)
        if not vllm_memory.fault(variant) and (needed := peak(variant)) <= limit:
            found.append(Choice(changed, needed, sum(roofline.seconds(variant, machine).values())))
    if not found:
        return None
    whole = [c for c in found if c.settings.get("parallel.gather_for_sampling") != "block"]
    found = whole or found  # by block only where the whole model does not fit
    shortest = min(choice.seconds for choice in found)
    near = [choice for choice in found if choice.seconds * FASTER <= shortest]
    return min(near, key=lambda choice: (len(choice.settings), choice.seconds, choice.peak))


def _variants(work: Workload, machine: Machine) -> Iterator[Settings]:
    cfg = work.config
    group = work.prompt + work.samples * (work.columns - 1)
    budgets = sorted({cfg.train.micro_batch_tokens, *MICRO_BATCHES, _power(group)}, key=lambda n: n or 0)
    rows = {cfg.rollout.max_rows, *_numbers_of_rows(work)}
    nodes = max(1, work.world // machine.per_node)
    replicas = {cfg.parallel.replicate} | ({1, nodes} if work.world % nodes == 0 else {1})
    gathers = ("model", "block") if work.sharded and work.decodes else (cfg.parallel.gather_for_sampling,)
    checkpointing = {cfg.model.activation_checkpointing, False, True}
    names = (
        "train.micro_batch_tokens",
        "model.activation_checkpointing",
        "rollout.max_rows",
        "parallel.replicate",
        "parallel.gather_for_sampling",
        "vllm.gpu_memory",
    )
    shares = (cfg.vllm.gpu_memory, *_smaller_shares(work))
    ordered = sorted(rows, key=lambda n: n or 0)
    for values in itertools.product(budgets, sorted(checkpointing), ordered, sorted(replicas), gathers, shares):
        yield dict(zip(names, values, strict=True))


def _numbers_of_rows(work: Workload) -> set[int | None]:
    """Values of ``rollout.max_rows`` to try: on a GPU whose memory is known, None takes as many as fit."""
    rollout = work.config.rollout
    if work.config.loss.offline or (work.engine == "servers" and not work.draws):
        return set()
    if work.engine == "nlgrpo" and work.device != "cpu" and work.gpu_memory:
        return {None}
    most = max(rollout.samples, -(-rollout.prompts // work.world) * rollout.samples)
    return {rollout.samples * 2**i for i in range(12) if 2**i * rollout.samples <= _power(most)}


def _smaller_shares(work: Workload) -> tuple[float, ...]:
    """Smaller shares of the GPU with which vLLM can start in this process, from the largest on."""
    if work.engine != "vllm" or work.device == "cpu":
        return ()
    smaller = [share for share in SHARES if share < work.config.vllm.gpu_memory]
    return tuple(n for n in smaller if not vllm_memory.fault(with_settings(work, {"vllm.gpu_memory": n})))


def _power(number: int) -> int:
    """Round up to a power of 2."""
    return 2 ** math.ceil(math.log2(max(1, number)))


# --- runs that do not fit ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alternative:
    """A change with which a run fits. ``options``: what to add to the command; ``host``: bytes per GPU on the host."""

    change: str
    options: str
    choice: Choice
    host: float = 0.0

    def __str__(self) -> str:
        host = f", and {size(self.host)} per GPU in the memory of the host" if self.host else ""
        numbers = f"{size(self.choice.peak)}{host}; about {duration(self.choice.seconds)} per step"
        return f"{self.change}: {self.options} ({numbers})"


def alternatives(work: Workload, machine: Machine) -> list[Alternative]:
    """Ways to fit a workload that does not fit with any settings: more GPUs, adapters, offloading."""
    found = [_on_more_gpus(work, machine)]
    if work.adapter is None:
        adapters = f"--lora.rank {LORA.rank}"
        found.append(_alternative("adapters (LoRA)", adapters, replace(work, adapter=LORA), machine))
    if not work.config.parallel.offload:
        offloaded = with_settings(work, {"parallel.offload": True})
        found.append(_alternative("shards on the host", "--parallel.offload True", offloaded, machine))
    return [alternative for alternative in found if alternative is not None]


def _alternative(change: str, options: str, work: Workload, machine: Machine) -> Alternative | None:
    choice = best(work, machine, FITS * machine.gpu.memory)
    if choice is None:
        return None
    host = sum(memory.estimate(with_settings(work, choice.settings)).host.values())
    return Alternative(change, f"{options} {choice.options}".strip(), choice, host)


def _on_more_gpus(work: Workload, machine: Machine) -> Alternative | None:
    """The smallest number of GPUs that fits, of the present one times 2, 4, 8, ..; with prompts for all of them."""
    rollout = work.config.rollout
    evaluation = work.config.evaluation
    for world in (work.world * 2**i for i in range(1, 13)):
        if world > machine.per_node and world % machine.per_node:
            continue
        changed = {"rollout.prompts": -(-rollout.prompts // world) * world}
        if evaluation.prompts:
            changed["evaluation.prompts"] = max(evaluation.prompts, world)
        changed = {key: value for key, value in changed.items() if attrgetter(key)(work.config) != value}
        options = " ".join([f"--gpus {world}", *(f"--{key} {value}" for key, value in changed.items())])
        grown = replace(with_settings(work, changed), world=world)
        if (found := _alternative(f"{world} GPUs", options, grown, machine)) is not None:
            return found
    return None


def check_fits(work: Workload, limit: float, where: str) -> None:
    """Raise UserError if the run needs more than ``limit`` bytes per rank; ``where`` names the memory.

    Also raised if vLLM's share of a GPU is too small for vLLM. Set ``train.check_memory = false`` to start such a run.
    """
    if not work.config.train.check_memory:
        return
    if fault := vllm_memory.fault(work):
        raise UserError(f"{fault}, or set train.check_memory = false to start anyway")
    plan = memory.estimate(work)
    if plan.peak <= limit:
        return
    use, most = max((plan.persistent | plan.phases[plan.largest]).items(), key=lambda item: item[1])
    raise UserError(
        f"the run needs about {size(plan.peak)} per rank in the phase {plan.largest} (most of it for {use}, "
        f"{size(most)}), but {where} has {size(limit)}; {remedies(work, limit)}, or set train.check_memory = false to "
        "start anyway"
    )


def check_host(work: Workload, limit: float) -> None:
    """Raise UserError if a rank needs more than ``limit`` bytes of the host beside its GPU, as in `check`."""
    needed = sum(memory.estimate(work).host.values())
    if work.config.train.check_memory and needed > limit:
        cause = "parallel.offload" if work.offloaded else "vllm.sleep"
        raise UserError(
            f"{cause} needs {size(needed)} per rank in the memory of the host, which has {size(limit)} for "
            "each; use more ranks or adapters (lora.rank), or set train.check_memory = false to start anyway"
        )


def remedies(work: Workload, limit: float) -> str:
    """Settings that make a run fit into ``limit`` bytes, or what else may help."""
    cfg = work.config
    fitting = []
    rows = sampling_memory.most_rows(work, cfg.rollout.samples)
    changes: dict[str, tuple[Any, ...]] = {
        "rollout.max_rows": tuple(n for n in (64, 16, 1) if n < rows) if work.decodes else (),
        "vllm.sleep": (True,) if work.engine == "vllm" and work.device != "cpu" and not cfg.vllm.sleep else (),
        "vllm.gpu_memory": _smaller_shares(work),
        "model.activation_checkpointing": () if cfg.model.activation_checkpointing else (True,),
        "train.micro_batch_tokens": tuple(n for n in (4096, 1024) if n < work.limit.tokens),
        "parallel.gather_for_sampling": ("block",) if work.sharded and work.decodes else (),
        "parallel.offload": (True,) if work.device != "cpu" else (),
    }
    for values in itertools.product(*((None, *some) for some in changes.values())):
        settings = {name: value for name, value in zip(changes, values, strict=True) if value is not None}
        if peak(with_settings(work, settings)) <= FITS * limit:
            fitting.append(settings)
    if fitting:  # offloading is slowest, and gathering by block next
        slow = ("parallel.offload", "parallel.gather_for_sampling")
        first = min(fitting, key=lambda s: (*(key in s for key in slow), len(s)))
        return f"it fits with {Choice(first, 0.0, 0.0).options}"
    return "use more ranks, adapters (lora.rank) or a smaller model"
