"""Samples and scores completions of the reference for every prompt, file by file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from time import perf_counter

import torch

from nlgrpo.config.schema import Config
from nlgrpo.data.prompt_dataset import Batch, PromptSet
from nlgrpo.engine import transformers_backend
from nlgrpo.engine.rollouts import reference_rollouts
from nlgrpo.engine.rollouts.collect import Provenance, RolloutCollector, Scorer, open_store, scorers
from nlgrpo.engine.rollouts.reference_rollouts import Index
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.engine.transformers_backend import TransformersModel
from nlgrpo.model import decoder, hf_weights
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.tokenizer import load_tokenizer
from nlgrpo.rewards import reward_functions
from nlgrpo.runtime.device import compute_dtype
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.work_queue import WorkQueue
from nlgrpo.training.build import load_rewards, prompts_of, sampling_of


@dataclass(frozen=True)
class Job:
    """All that the command works with; nothing is written yet."""

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


def build(cfg: Config, queue: WorkQueue, folder: Path, *, samples: int, prompts: int | None = None) -> Job:
    """Read tokenizer, prompts and rewards; the weights are loaded when something has to be sampled.

    ``samples``: K, completions per prompt. ``prompts``: use the first ones of the source only; None uses all.
    Raises ValueError for a configuration that cannot be run.
    """
    source = hf_weights.locate(cfg.model.path)
    tokenizer = load_tokenizer(source)
    in_order = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, shuffle=False))
    limits = transformers_backend.limits_of(decoder.read_config(source))
    available = prompts_of(in_order, cfg.data.source, cfg.data.split, tokenizer, limits)
    objectives, loaded = load_rewards(cfg, queue.ranks.device)
    reward_functions.check_columns(loaded, available.names)
    dtype = compute_dtype(cfg.model.dtype, queue.ranks.device)
    origin = Provenance.of(source, tokenizer, dtype, sampling_of(cfg, tokenizer, source))
    seed = cfg.train.seed ^ (1 << 61)  # neither a run's own nor its evaluation's: no noise is met twice
    return Job(
        cfg=cfg,
        folder=folder,
        source=source,
        dtype=dtype,
        origin=origin,
        prompts=available,
        batch=available.take(0, min(prompts or len(available), len(available))),
        sampler=Sampler(tokenizer, origin.sampling, samples, cfg.rollout.max_rows, seed, []),
        scorers=scorers(cfg.rewards, objectives, loaded),
        queue=queue,
    )


def prompts_per_file(job: Job) -> int:
    """What is decoded together is kept together."""
    return max(1, job.sampler.max_rows // job.sampler.samples)


def open_folder(job: Job) -> RolloutCollector:
    """Write down what the folder is going to hold. Raises ValueError where it holds other rollouts."""
    _refuse_others(job)
    store = open_store(job.folder / reference_rollouts.SAMPLES, job.origin, job.sampler, first=job.queue.ranks.first)
    draws = RolloutCollector(
        job.cfg.model.path, job.source, job.dtype, job.batch, job.sampler, prompts_per_file(job), store
    )
    if job.queue.ranks.first:
        Index.of(draws, job.origin, job.scorers, job.cfg.train.seed).write(job.folder)
    return draws


def _refuse_others(job: Job) -> None:
    """Other prompts and rewards are no fault: the completions that they share are kept by content."""
    try:
        known = reference_rollouts.read_index(job.folder)
    except ValueError:  # none yet, or damaged: it is written anew
        return
    found = reference_rollouts.differences(known, job.origin)
    settings = {
        "samples a prompt": (known.samples, job.sampler.samples),
        "train.seed": (known.seed, job.cfg.train.seed),
        "type computed in": (known.origin.dtype, job.origin.dtype),
    }
    found += [f"{name}: {old} there, {new} asked for" for name, (old, new) in settings.items() if old != new]
    if found:
        lines = [f"{job.folder} holds other rollouts:", *found, "Choose another folder with --out"]
        raise ValueError("\n  ".join(lines))


@dataclass
class Drawn:
    """How much this process has drawn, and how long that took."""

    tokens: int = 0
    seconds: float = 0.0

    def over(self, ranks: Ranks) -> Drawn:
        """Of all ranks, which draw side by side; collective."""
        each = ranks.gather_objects(self)
        return Drawn(sum(drawn.tokens for drawn in each), max(drawn.seconds for drawn in each))


def roll_out(job: Job, draws: RolloutCollector) -> Drawn | None:
    """Draw and score what is missing; None where a signal ended it early. Collective.

    A file is scored as soon as it is drawn, so that a reward that fails does so before all is drawn.
    """
    own, model = Drawn(), cache(partial(draws.load, job.queue.ranks.device))
    missing = job.queue.missing(draws.chunks, lambda chunk: draws.drawn(chunk) and not _unscored(job, draws, chunk))
    if len(missing) < len(draws.chunks):
        job.queue.console.print(f"{len(draws.chunks) - len(missing)} of {len(draws.chunks)} files are there")
    what = "completions and rewards, files"
    finished = job.queue.work(what, missing, lambda chunk: _draw_and_score(job, draws, model, chunk, own))
    total = own.over(job.queue.ranks)
    return total if finished else None


def _draw_and_score(
    job: Job, draws: RolloutCollector, model: Callable[[], Decoder | TransformersModel], chunk: Batch, own: Drawn
) -> None:
    if not draws.drawn(chunk):
        loaded, began = model(), perf_counter()
        own.tokens += int(draws.draw(loaded, chunk).lengths.sum())
        own.seconds += perf_counter() - began
    draws.score(chunk, _unscored(job, draws, chunk))


def _unscored(job: Job, draws: RolloutCollector, chunk: Batch) -> list[Scorer]:
    return [scorer for scorer in job.scorers if not draws.scored(chunk, scorer)]
