"""Settings with which a run fits into a memory, and refusal of runs that do not fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from nlgrpo.apps.plan import memory, sampling_memory, vllm_memory
from nlgrpo.apps.plan.workload import FITS, Workload
from nlgrpo.errors import UserError
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime.console import size

SHARES = tuple(n / 10 for n in range(9, 0, -1))  # of a GPU for vLLM
LORA = LoraConfig(rank=16)

Settings = dict[str, Any]  # values by key, such as {"train.micro_batch_tokens": 8192}


@dataclass(frozen=True)
class Choice:
    """Settings that differ from those of the run, with the resulting peak in bytes."""

    settings: Settings
    peak: float

    @property
    def options(self) -> str:
        """The settings as command-line options."""
        return " ".join(f"--{key} {value}" for key, value in self.settings.items())


def with_settings(work: Workload, settings: Settings) -> Workload:
    """Return the workload with other settings."""
    config = work.config
    for key, value in settings.items():
        section, name = key.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return replace(work, config=config)


# --- settings that fit ------------------------------------------------------------------------------------------------


def fitting(work: Workload, limit: float) -> Choice | None:
    """Return the fewest changes with which a rank needs at most the share `FITS` of ``limit`` bytes.

    None if there are none. No change is one of the loss or of the distribution of the samples. Gathering by block while
    sampling is slowest, so it is returned only where no other changes fit.
    """
    for settings in sorted(_changes(work), key=lambda settings: (_by_block(settings), len(settings))):
        peak = memory.estimate(with_settings(work, settings)).peak
        if peak <= FITS * limit:
            return Choice(settings, peak)
    return None


def _by_block(settings: Settings) -> bool:
    return "parallel.gather_for_sampling" in settings


def _changes(work: Workload) -> Iterator[Settings]:
    """Each combination of settings that need less memory than those of the run; the first is no change."""
    cfg = work.config
    values: dict[str, tuple[Any, ...]] = {}
    if cfg.parallel.replicate > 1:
        values["parallel.replicate"] = (1,)
    if work.decodes:
        rows = sampling_memory.most_rows(work, cfg.rollout.samples)
        values["rollout.max_rows"] = tuple(n for n in (64, 16, 1) if n < rows)
    if work.engine == "vllm" and work.device != "cpu":
        if not cfg.vllm.sleep:
            values["vllm.sleep"] = (True,)
        values["vllm.gpu_memory"] = _smaller_shares(work)
    if not cfg.model.activation_checkpointing:
        values["model.activation_checkpointing"] = (True,)
    values["train.micro_batch_tokens"] = tuple(n for n in (4096, 1024) if n < work.limit.tokens)
    if work.sharded and work.decodes:
        values["parallel.gather_for_sampling"] = ("block",)
    unchanged = (None,)
    for chosen in itertools.product(*(unchanged + some for some in values.values())):
        yield {name: value for name, value in zip(values, chosen, strict=True) if value is not None}


def _smaller_shares(work: Workload) -> tuple[float, ...]:
    """Smaller shares of the GPU with which vLLM can start in this process, from the largest on."""
    smaller = [share for share in SHARES if share < work.config.vllm.gpu_memory]
    return tuple(n for n in smaller if not vllm_memory.fault(with_settings(work, {"vllm.gpu_memory": n})))


# --- runs that fit with no settings -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alternative:
    """A change with which a run fits. ``options``: what to add to the command; ``host``: bytes per GPU on the host."""

    change: str
    options: str
    peak: float
    host: float = 0.0

    def __str__(self) -> str:
        host = f", and {size(self.host)} per GPU in the memory of the host" if self.host else ""
        return f"{self.change}: {self.options} ({size(self.peak)}{host})"


def alternatives(work: Workload, limit: float, per_node: int) -> list[Alternative]:
    """Ways to fit into GPUs of ``limit`` bytes, ``per_node`` in each node: more of them, adapters, offloading."""
    found = [_on_more_gpus(work, limit, per_node)]
    if work.adapter is None:
        adapted = replace(work, adapter=LORA)
        found.append(_alternative("adapters (LoRA)", f"--lora.rank {LORA.rank}", adapted, limit))
    if not work.config.parallel.offload:
        offloaded = with_settings(work, {"parallel.offload": True})
        found.append(_alternative("shards on the host", "--parallel.offload True", offloaded, limit))
    return [alternative for alternative in found if alternative is not None]


def _alternative(change: str, options: str, work: Workload, limit: float) -> Alternative | None:
    choice = fitting(work, limit)
    if choice is None:
        return None
    host = sum(memory.estimate(with_settings(work, choice.settings)).host.values())
    return Alternative(change, f"{options} {choice.options}".strip(), choice.peak, host)


def _on_more_gpus(work: Workload, limit: float, per_node: int) -> Alternative | None:
    """The smallest number of GPUs that fits, of the present one times 2, 4, 8, ..; with prompts for all of them."""
    rollout = work.config.rollout
    evaluation = work.config.evaluation
    for doublings in range(1, 13):
        world = work.world * 2**doublings
        if world > per_node and world % per_node:
            continue
        settings: Settings = {}
        if rollout.prompts % world:
            settings["rollout.prompts"] = -(-rollout.prompts // world) * world
        if 0 < evaluation.prompts < world:
            settings["evaluation.prompts"] = world
        options = " ".join([f"--gpus {world}", *(f"--{key} {value}" for key, value in settings.items())])
        grown = replace(with_settings(work, settings), world=world)
        found = _alternative(f"{world} GPUs", options, grown, limit)
        if found is not None:
            return found
    return None


# --- refusal ----------------------------------------------------------------------------------------------------------


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
    uses = plan.persistent | plan.phases[plan.largest]
    most = max(uses, key=lambda use: uses[use])
    raise UserError(
        f"the run needs about {size(plan.peak)} per rank in the phase {plan.largest} (most of it for {most}, "
        f"{size(uses[most])}), but {where} has {size(limit)}; {remedies(work, limit)}, or set train.check_memory = "
        "false to start anyway"
    )


def check_host(work: Workload, limit: float) -> None:
    """Raise UserError if a rank needs more than ``limit`` bytes of the host beside its GPU, as in `check_fits`."""
    needed = sum(memory.estimate(work).host.values())
    if work.config.train.check_memory and needed > limit:
        cause = "parallel.offload" if work.offloaded else "vllm.sleep"
        raise UserError(
            f"{cause} needs {size(needed)} per rank in the memory of the host, which has {size(limit)} for "
            "each; use more ranks or adapters (lora.rank), or set train.check_memory = false to start anyway"
        )


def remedies(work: Workload, limit: float) -> str:
    """Settings that make a run fit into ``limit`` bytes, or what else may help. Offloading comes last: it is slow."""
    choice = fitting(work, limit)
    if choice is None and work.device != "cpu":
        offload = {"parallel.offload": True}
        choice = fitting(with_settings(work, offload), limit)
        if choice is not None:
            choice = replace(choice, settings=choice.settings | offload)
    if choice is None:
        return "use more ranks, adapters (lora.rank) or a smaller model"
    return f"it fits with {choice.options}"
