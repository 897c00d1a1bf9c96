"""Estimate of the memory of a rank, by phase of a run.

    peak = max over phases of (what the run holds in all phases + what the phase adds)

Parameters, gradients, optimizer states and caches are counted exactly from shapes. Activations are traced
(`activations`), for the largest micro-batch that the packing allows. ``bench/bench_plan.py`` compares the estimate with
measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nlgrpo.apps.plan import sampling_memory, update, vllm_memory
from nlgrpo.apps.plan.sampling_memory import BY_OTHERS, ROUNDING
from nlgrpo.apps.plan.workload import Uses, Workload

# A C library keeps part of the memory that was freed for later use: a share of the temporary memory of a phase, and a
# multiple of what one block keeps. Fitted to measured peaks of Linux with glibc (experiments/plan_memory/README.md).
KEPT_SHARE = 0.1
KEPT_BLOCKS = 2.0
CODE = 60 * 2**20  # pages of libraries that a CPU run maps when it first uses them
LASTING = ("optimizer", "gradients", "file")  # uses of a phase that are no temporary memory


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. ``persistent``: in all phases, by use. ``phases``: what each phase adds, by use."""

    persistent: Uses
    phases: dict[str, Uses]
    overhead: Uses
    """What the allocator adds in each phase."""
    host: Uses = field(default_factory=dict)
    """Bytes of this rank in the memory of the host, beside a GPU: what is offloaded, and what a sleeping vLLM keeps."""

    def total(self, phase: str) -> float:
        return sum(self.persistent.values()) + sum(self.phases[phase].values()) + self.overhead[phase]

    @property
    def largest(self) -> str:
        """The phase with the peak."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> float:
        return self.total(self.largest)


def estimate(work: Workload) -> Memory:
    """Estimate the memory of one rank."""
    # from the second step on, the optimizer has its state in the phases before the update too
    state = update.state(work, gradients=False)
    phases = {"load": _load(work)}
    for name, uses in _completions(work).items():
        phases[name] = uses | state
    if work.scores:
        phases["scoring"] = _scoring(work) | state
    phases["update"] = update.largest_moment(work)
    phases["optimizer step"] = update.state(work, gradients=True)

    persistent = _without_zeros(sampling_memory.persistent(work))
    phases = {name: _without_zeros(uses) for name, uses in phases.items()}
    overhead = {name: _overhead(work, name, persistent, uses) for name, uses in phases.items()}
    return Memory(persistent, phases, overhead, _on_host(work))


def _on_host(work: Workload) -> Uses:
    found = Uses()
    if work.offloaded:
        found |= _without_zeros(sampling_memory.shards(work))
        found |= _without_zeros(update.whole_state(work, gradients=True))
    return found | vllm_memory.on_host(work)


def _without_zeros(uses: Uses) -> Uses:
    return {name: size for name, size in uses.items() if size}


def _load(work: Workload) -> Uses:
    """Pages of the file that a rank reads its rows from; they count as memory of the process while it is open."""
    if work.device != "cpu":
        return {}
    return {"file": work.shape.parameters * work.compute.itemsize / work.shards}


def _completions(work: Workload) -> dict[str, Uses]:
    """Phases that need completions. vLLM servers sample elsewhere, but get the weights from here."""
    cfg = work.config
    found = dict[str, Uses]()
    if work.engine == "servers":
        found["hand-over"] = vllm_memory.sampling(work)
    else:
        if not cfg.loss.offline:
            found["sampling"] = _by_engine(work, cfg.rollout.prompts, cfg.rollout.samples)
        if cfg.evaluation.prompts:
            found["evaluation"] = _by_engine(work, cfg.evaluation.prompts, cfg.evaluation.samples)
        for name in cfg.evaluation.sets:
            from nlgrpo.config.evaluation_sets import SetConfig

            own = SetConfig.of(cfg, name).config
            of_set = replace(work, config=own, prompt=work.prompts_of_sets.get(name, work.prompt))
            found[f"evaluation {name}"] = _by_engine(of_set, own.evaluation.prompts, own.evaluation.samples)
    if work.draws:
        samples = cfg.calibration.samples
        found["reference samples"] = sampling_memory.sampling(work, cfg.rollout.prompts, samples, adapted=False)
    return found


def _by_engine(work: Workload, prompts: int, samples: int) -> Uses:
    if work.engine == "nlgrpo":
        return sampling_memory.sampling(work, prompts, samples)
    return vllm_memory.sampling(work)


def _scoring(work: Workload) -> Uses:
    hidden = 2 * work.micro_batch * work.shape.width * work.compute.itemsize
    return {
        "unsharded parameters": sampling_memory.of_a_pass(work),
        "activations": work.micro_batch * work.block.forward + hidden,
        "logits": update.logits(work),
    }


def _overhead(work: Workload, phase: str, persistent: Uses, uses: Uses) -> float:
    """What the allocator needs beyond ``persistent`` and the ``uses`` of a phase."""
    if work.device != "cpu":
        allocated = sum(size for name, size in (persistent | uses).items() if name not in BY_OTHERS)
        return (ROUNDING - 1) * allocated
    temporary = sum(size for name, size in uses.items() if name not in LASTING)
    overhead = CODE + KEPT_SHARE * temporary
    if "activations" in uses:
        overhead += min(KEPT_BLOCKS * work.micro_batch * work.block.saved, temporary)
    if work.sharded and phase in ("update", "optimizer step"):
        # models gathered for sampling or vLLM and for the reference: freed, but a part stays with the process
        gathered = work.shape.parameters * work.compute.itemsize
        if work.engine != "servers" or work.draws:
            overhead += gathered
        if work.reference:
            overhead += gathered
    return overhead
