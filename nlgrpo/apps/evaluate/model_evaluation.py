"""Evaluation of models on held-out prompts: sample completions, score them, and measure the KL to the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from nlgrpo.apps.evaluate.named_models import NamedModel
from nlgrpo.config.schema import Config
from nlgrpo.data.conversations import plain_text
from nlgrpo.data.prompt_dataset import Batch
from nlgrpo.engine import logprobs
from nlgrpo.engine.rollouts.collect import Provenance, RolloutCollector, Scorer, loaded, open_store, scorers
from nlgrpo.engine.rollouts.evaluation_samples import KEPT_PROMPTS, KEPT_SAMPLES, EvaluationSamples
from nlgrpo.engine.rollouts.inputs import find_columns, load_rewards, read_prompts, refuse_environment, sampling_of
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.engine.rollouts.store import chunk_name
from nlgrpo.errors import UserError
from nlgrpo.estimators import distinct_n
from nlgrpo.losses import kl
from nlgrpo.model import decoder
from nlgrpo.model.architectures import shape_of
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.packing import pack
from nlgrpo.model.tokenizer import count_tokens, load_tokenizer
from nlgrpo.objectives.registry import Objective, is_voted
from nlgrpo.rewards.reward_functions import Reward, check_columns, check_rows, final_answers
from nlgrpo.runtime.device import compute_dtype, micro_batch_limit
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.work_queue import WorkQueue
from nlgrpo.training.tracking import terminal

REFERENCE = "reference"
CHUNK = 4  # prompts per file of completions


@dataclass(frozen=True)
class EvaluationOptions:
    """Options in addition to the configuration."""

    models: tuple[NamedModel, ...]
    reference: str
    out: Path
    procedures: tuple[str, ...]
    ns: tuple[int, ...]
    gold: tuple[str, ...]
    kl: bool = True
    """Whether to estimate each model's KL to the reference, which is one forward pass of the reference."""


@dataclass(frozen=True)
class Evaluation:
    """Prompts, models, rewards and options of an evaluation."""

    cfg: Config
    options: EvaluationOptions
    ranks: Ranks
    candidates: list[RolloutCollector]  # the reference first; each has the prompts in its own tokens
    left_out: dict[str, int]  # prompts that could not be evaluated, by reason
    objectives: dict[str, Objective]
    scorers: list[Scorer]
    console: Console = field(default_factory=Console)

    @property
    def samples(self) -> int:
        return self.cfg.evaluation.samples

    @property
    def queue(self) -> WorkQueue:
        return WorkQueue(self.ranks, self.console)


def build_evaluation(options: EvaluationOptions, cfg: Config, ranks: Ranks) -> Evaluation:
    """Load tokenizers, prompts and rewards; `draw` loads the weights, one model at a time."""
    refuse_environment(cfg, "nlgrpo evaluate")
    if any(model.label == REFERENCE for model in options.models):
        raise UserError(f"the label {REFERENCE!r} is that of the reference; set another one with LABEL=PATH")
    models = [NamedModel(REFERENCE, Path(options.reference)), *options.models]
    objectives, loaded = load_rewards(cfg, ranks.device)
    found = [_candidate(model, options, cfg, ranks, loaded) for model in models]
    candidates = [candidate for candidate, _ in found]
    first = candidates[0]
    for other in candidates[1:]:
        if other.batch.prompts != first.batch.prompts:
            raise UserError(
                f"{other.label} and {first.label} have different prompts after the length filter: their contexts or "
                "tokenizers differ. Lower rollout.max_new_tokens, or choose prompts that fit all models."
            )
    check_columns(loaded, list(first.batch.columns))
    console = terminal.output(width=terminal.TABLE_WIDTH, quiet=not ranks.first)
    scoring = scorers(cfg.rewards, objectives, loaded)
    return Evaluation(cfg, options, ranks, candidates, found[0][1], objectives, scoring, console)


def _candidate(
    model: NamedModel,
    options: EvaluationOptions,
    cfg: Config,
    ranks: Ranks,
    rewards: Sequence[Reward],
) -> tuple[RolloutCollector, dict[str, int]]:
    """Return what samples a model, and the numbers of prompts that it cannot evaluate, by reason."""
    exports = options.out / "checkpoints"
    ranks.agree(lambda: model.directory(exports) if ranks.first else None)  # one rank exports a checkpoint
    source = model.directory(exports)
    tokenizer = load_tokenizer(source)
    model_cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, path=str(model.path)))
    prompts, held_out = read_prompts(model_cfg, tokenizer, shape_of(decoder.read_config(source)))
    find_columns(model_cfg, rewards, prompts, held_out)
    check_rows(rewards, held_out.prompts, held_out.rows)
    batch = held_out.take(0, min(cfg.evaluation.prompts, len(held_out)))
    seed = cfg.train.seed ^ (1 << 62)  # the seed of a run's own evaluation
    sampling = sampling_of(cfg, tokenizer, source)
    sampler = Sampler(
        tokenizer=tokenizer,
        sampling=sampling,
        samples=cfg.evaluation.samples,
        max_rows=cfg.rollout.max_rows,
        seed=seed,
        rewards=[],
    )
    dtype = compute_dtype(cfg.model.dtype, ranks.device)
    engine = cfg.rollout.engine
    origin = Provenance.of(source, tokenizer, dtype, sampling, engine)
    store = open_store(options.out / "samples", origin, sampler, first=ranks.first)
    return RolloutCollector(model.label, source, dtype, batch, sampler, CHUNK, store), held_out.left_out


def tokenize_alike(a: RolloutCollector, b: RolloutCollector) -> bool:
    """Whether both have the same vocabulary and prompt tokens, which a KL between them requires."""
    return a.batch.ids == b.batch.ids and a.sampler.tokenizer.get_vocab() == b.sampler.tokenizer.get_vocab()


def draw(e: Evaluation, candidate: RolloutCollector) -> None:
    """Draw the completions that are not saved yet."""
    missing = e.queue.missing(candidate.chunks, candidate.drawn)
    with loaded(candidate, e.cfg.rollout.engine, e.cfg.vllm, e.ranks, missing=bool(missing)) as engine:
        e.queue.work(f"{candidate.label}: completions", missing, lambda chunk: candidate.draw(engine(), chunk))


def measure_kl(e: Evaluation, candidates: Sequence[RolloutCollector]) -> None:
    """Compute and save the KL estimates "k1" and "k3" to the reference, summed over tokens, (p, n) per file."""
    first = e.candidates[0]
    tokens = count_tokens(first.sampler.tokenizer)

    @cache
    def reference() -> Decoder:
        model = decoder.load(first.source, dtype=first.dtype, device=e.ranks.device)
        model.limit_vocabulary(tokens)
        return model

    pieces = [(candidate, chunk) for candidate in candidates for chunk in candidate.chunks]
    missing = e.queue.missing(pieces, lambda piece: piece[0].store.has(kl_name(e, piece[1])))
    e.queue.work("KL to the reference", missing, lambda piece: _measure_kl(e, reference(), *piece))


def _measure_kl(e: Evaluation, reference: Decoder, candidate: RolloutCollector, chunk: Batch) -> None:
    device = e.ranks.device
    rollout = candidate.rollout(chunk)
    prompts = [prompt for prompt in rollout.prompt_ids for _ in range(e.samples)]
    limit = micro_batch_limit(None, device)
    rows = range(len(prompts))
    batches = pack(prompts, rollout.completion_ids(), rows, limit.tokens, device, group_tokens=limit.group)
    reference_logprobs = logprobs.completion_logprobs(
        reference, rollout, batches, candidate.sampler.sampling.temperature
    ).cpu()
    own = rollout.logprobs.flatten(0, 1).to(reference_logprobs)
    shape = rollout.lengths.shape
    kls = {}
    for kind in ("k1", "k3"):
        per_token = kl.estimate(own, reference_logprobs, kind)
        kls[kind] = per_token.sum(-1).view(shape)
    candidate.store.write(kl_name(e, chunk), kls)


def kl_name(e: Evaluation, chunk: Batch) -> str:
    return f"{chunk_name(chunk.index, chunk.ids)}.kl-{e.candidates[0].store.digest}"


def score(e: Evaluation, candidate: RolloutCollector, scorer: Scorer) -> None:
    """Score all completions that are not scored yet with one reward."""
    missing = e.queue.missing(candidate.chunks, lambda chunk: candidate.scored(chunk, scorer))
    e.queue.work(f"{candidate.label}: {scorer.name}", missing, lambda chunk: candidate.score(chunk, [scorer]))


def collect(e: Evaluation, candidate: RolloutCollector) -> EvaluationSamples:
    """Load all chunks of a model in the order of the prompts, from all ranks."""
    chunks = candidate.chunks
    lengths = []
    groups = []  # tokens of the completions of each prompt
    completions = []  # and their texts
    for chunk in chunks:
        rollout = candidate.rollout(chunk)
        lengths.append(rollout.lengths)
        ids = rollout.completion_ids()
        texts = candidate.sampler.texts(chunk.prompts, rollout)
        for i in range(0, len(ids), e.samples):
            groups.append(ids[i : i + e.samples])
            completions.append(texts[i : i + e.samples])
    rewards = {}
    answers = {}
    voted = any(map(is_voted, e.options.procedures))
    for scorer in e.scorers:
        reward = scorer.reward
        rewards[scorer.name] = torch.cat([candidate.scores(chunk, scorer) for chunk in chunks]).double()
        if voted or reward.voted or hasattr(reward.function, "answer"):
            answers[reward.name] = final_answers(reward, completions)
    distinct = {}
    for n in (1, 2, 3):
        shares = [distinct_n(group, n) for group in groups]
        distinct[str(n)] = torch.tensor(shares, dtype=torch.float64)
    return EvaluationSamples(
        rewards=rewards,
        lengths=torch.cat(lengths),
        objectives={name: str(objective) for name, objective in e.objectives.items()},
        weights={name: reward.weight for name, reward in e.cfg.rewards.items()},
        max_length=e.cfg.rollout.max_new_tokens,
        left_out=e.left_out,
        prompts=[plain_text(p) for p in candidate.batch.prompts][:KEPT_PROMPTS],
        completions=[rows[:KEPT_SAMPLES] for rows in completions[:KEPT_PROMPTS]],
        kl=_read_kl(e, candidate) if e.options.kl else {},
        distinct=distinct,
        answers=answers,
    )


def _read_kl(e: Evaluation, candidate: RolloutCollector) -> dict[str, Tensor]:
    """Load the KL estimates of a model; empty if they were not computed."""
    names = [kl_name(e, chunk) for chunk in candidate.chunks]
    if not all(map(candidate.store.has, names)):
        return {}
    found = [chunk for chunk in map(candidate.store.read, names) if chunk is not None]
    kinds = sorted(found[0])  # files have no fixed order of names
    return {kind: torch.cat([chunk[kind] for chunk in found]).double() for kind in kinds}


def evaluate(e: Evaluation) -> dict[str, EvaluationSamples]:
    """Draw, score and collect. Returns the samples by label on rank 0, and nothing on other ranks. Collective.

    An error on one rank is raised on all ranks.
    """
    reference, *others = e.candidates
    alike = []
    for c in others:
        if tokenize_alike(reference, c):
            alike.append(c)
            continue
        kl = "its KL is left out, " if e.options.kl else ""
        e.console.print(f"{c.label} has a different tokenizer than the reference: {kl}lengths are in its tokens")
    for c in e.candidates:
        draw(e, c)
    if e.options.kl:
        measure_kl(e, alike)
    for c in e.candidates:
        for scorer in e.scorers:
            score(e, c, scorer)

    def collected() -> dict[str, EvaluationSamples]:
        return {c.label: collect(e, c) for c in e.candidates} if e.ranks.first else {}

    return e.ranks.agree(collected)
