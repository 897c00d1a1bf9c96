"""Sample and score completions of the reference for every prompt, file by file (``nlgrpo rollout``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from nlgrpo.config.schema import Config
from nlgrpo.data.prompt_dataset import Batch, PromptSet
from nlgrpo.engine import transformers_backend
from nlgrpo.engine.backends import Engine, frozen
from nlgrpo.engine.decoding_memory import ROWS
from nlgrpo.engine.rollouts import reference_rollouts
from nlgrpo.engine.rollouts.collect import Provenance, RolloutCollector, Scorer, loaded, open_store, scorers
from nlgrpo.engine.rollouts.inputs import all_prompts, load_rewards, refuse_environment, sampling_of
from nlgrpo.engine.rollouts.reference_rollouts import Index
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.errors import UserError
from nlgrpo.model import decoder, hf_weights
from nlgrpo.model.tokenizer import load_tokenizer
from nlgrpo.rewards import reward_functions
from nlgrpo.runtime.device import compute_dtype
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.work_queue import WorkQueue


@dataclass(frozen=True)
class Job:
    """The objects that the command uses; building it writes nothing."""

    cfg: Config
    folder: Path
    source: Path
    dtype: torch.dtype
    origin: Provenance
    prompts: PromptSet
    batch: Batch
    sampler: Sampler
    scorers: list[Scorer]
    queue: WorkQueue

    @property
    def engine(self) -> frozen.Name:
        """Engine that samples; a guided search needs nlgrpo's."""
        return "nlgrpo" if self.origin.guide else self.cfg.rollout.engine


def build_job(cfg: Config, queue: WorkQueue, folder: Path, *, samples: int, prompts: int | None = None) -> Job:
    """Load tokenizer, prompts and rewards. The weights are loaded when the first file is sampled.

    ``samples``: K, completions per prompt. ``prompts``: number of prompts to use from the start of the source; None
    uses all. Raises UserError for a configuration that cannot be run.
    """
    refuse_environment(cfg, "nlgrpo rollout")
    source = hf_weights.locate(cfg.model.path)
    tokenizer = load_tokenizer(source)
    limits = transformers_backend.limits_of(decoder.read_config(source))
    available = all_prompts(cfg, tokenizer, limits)
    objectives, loaded = load_rewards(cfg, queue.ranks.device)
    reward_functions.check_columns(loaded, available.names)
    reward_functions.check_rows(loaded, available.prompts, available.rows)
    dtype = compute_dtype(cfg.model.dtype, queue.ranks.device)
    origin = Provenance.of(source, tokenizer, dtype, sampling_of(cfg, tokenizer, source), cfg.rollout.engine)
    seed = cfg.train.seed ^ (1 << 61)  # differs from the seeds of training and evaluation, so no sample repeats
    sampler = Sampler(
        tokenizer=tokenizer,
        sampling=origin.sampling,
        samples=samples,
        max_rows=cfg.rollout.max_rows,
        seed=seed,
        rewards=[],
    )
    return Job(
        cfg=cfg,
        folder=folder,
        source=source,
        dtype=dtype,
        origin=origin,
        prompts=available,
        batch=available.take(0, min(prompts or len(available), len(available))),
        sampler=sampler,
        scorers=scorers(cfg.rewards, objectives, loaded),
        queue=queue,
    )


def prompts_per_file(job: Job) -> int:
    """Number of prompts that are sampled together and saved in one file."""
    return max(1, (job.sampler.max_rows or ROWS) // job.sampler.samples)


def open_folder(job: Job) -> RolloutCollector:
    """Create or open the folder and write its index. Raises UserError if it holds other rollouts."""
    _refuse_others(job)
    store = open_store(job.folder / reference_rollouts.SAMPLES, job.origin, job.sampler, first=job.queue.ranks.first)
    draws = RolloutCollector(
        job.cfg.model.path,
        job.source,
        job.dtype,
        job.batch,
        job.sampler,
        prompts_per_file(job),
        store,
    )
    if job.queue.ranks.first:
        Index.of(draws, job.origin, job.scorers, job.cfg.train.seed).write(job.folder)
    return draws


def _refuse_others(job: Job) -> None:
    """Raise UserError if the folder has other settings. Other prompts or rewards are allowed."""
    try:
        saved = reference_rollouts.read_index(job.folder)
    except ValueError:  # missing or damaged: `open_folder` writes a new one
        return
    changed = reference_rollouts.differences(saved, job.origin)
    settings = {
        "samples per prompt": (saved.samples, job.sampler.samples),
        "train.seed": (saved.seed, job.cfg.train.seed),
        "compute dtype": (saved.origin.dtype, job.origin.dtype),
        "rollout.engine": (saved.origin.engine or "nlgrpo", job.origin.engine or "nlgrpo"),
    }
    changed += [f"{name}: {old} in the folder, {new} requested" for name, (old, new) in settings.items() if old != new]
    if changed:
        lines = [f"{job.folder} holds other rollouts:", *changed, "Choose another folder with --out"]
        raise UserError("\n  ".join(lines))


@dataclass
class Throughput:
    """Number of sampled tokens, and the time that took."""

    tokens: int = 0
    seconds: float = 0.0

    def over(self, ranks: Ranks) -> Throughput:
        """Combine all ranks: the sum of tokens and the longest time; collective."""
        all_ranks = ranks.gather_objects(self)
        return Throughput(sum(drawn.tokens for drawn in all_ranks), max(drawn.seconds for drawn in all_ranks))


def roll_out(job: Job, draws: RolloutCollector) -> Throughput | None:
    """Sample and score the missing files; returns None if a signal stopped it early. Collective.

    Each file is scored right after it is sampled, so a failing reward is noticed early.
    """
    drawn = Throughput()
    missing = job.queue.missing(draws.chunks, lambda chunk: draws.drawn(chunk) and not _unscored(job, draws, chunk))
    if len(missing) < len(draws.chunks):
        job.queue.console.print(f"{len(draws.chunks) - len(missing)} of {len(draws.chunks)} files are already done")
    title = "completions and rewards, files"
    ranks = job.queue.ranks
    undrawn = any(not draws.drawn(chunk) for chunk in missing)
    with loaded(draws, job.engine, job.cfg.vllm, ranks, missing=undrawn) as engine:
        finished = job.queue.work(title, missing, lambda chunk: _draw_and_score(job, draws, engine, chunk, drawn))
    total = drawn.over(job.queue.ranks)
    return total if finished else None


def _draw_and_score(
    job: Job, draws: RolloutCollector, engine: Callable[[], Engine], chunk: Batch, drawn: Throughput
) -> None:
    if not draws.drawn(chunk):
        loaded = engine()
        start = perf_counter()
        drawn.tokens += int(draws.draw(loaded, chunk).lengths.sum())
        drawn.seconds += perf_counter() - start
    draws.score(chunk, _unscored(job, draws, chunk))


def _unscored(job: Job, draws: RolloutCollector, chunk: Batch) -> list[Scorer]:
    return [scorer for scorer in job.scorers if not draws.scored(chunk, scorer)]
