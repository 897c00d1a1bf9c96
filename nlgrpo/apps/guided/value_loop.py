"""The loop of ``nlgrpo iro``: trains one value model per iteration for a frozen model (IRO, Alg. 3; SPI, Alg. 1)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nlgrpo.apps.guided import value_training
from nlgrpo.apps.guided.options import LoopOptions
from nlgrpo.apps.guided.value_config import (
    CompressConfig,
    RegressionConfig,
    RolloutsConfig,
    ValueConfig,
    ValueEvaluationConfig,
    ValueTrainConfig,
)
from nlgrpo.apps.rollout.job import Job, build_job, open_folder, roll_out
from nlgrpo.config.schema import Config, OptimConfig
from nlgrpo.data.prompt_dataset import Batch
from nlgrpo.engine import guided_search, guides
from nlgrpo.engine.backends import Engine, NativeEngine
from nlgrpo.engine.decoding_memory import ROWS
from nlgrpo.engine.generation import Rollout
from nlgrpo.engine.guided_search import Candidate, Value
from nlgrpo.engine.guides import Guide
from nlgrpo.engine.rollouts import convert, reference_rollouts
from nlgrpo.engine.rollouts.collect import Scorer
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.engine.rollouts.store import digest_of_prompt, digest_of_text, digests_of_columns
from nlgrpo.engine.transformers_backend import TransformersModel
from nlgrpo.model.decoder import Decoder
from nlgrpo.objectives.aggregation import sum_of_applicable
from nlgrpo.runtime.work_queue import WorkQueue
from nlgrpo.training import run_folder

RESULTS = "iro.json"
ADVICE = "another folder with --out"


@dataclass(frozen=True, kw_only=True)
class GuidedSampler(Sampler):
    """Samples the U = K B final candidates of each search of a prompt; a candidate that ended early is repeated.

    With ``scorers``, only the candidate of each search with the largest weighted sum of rewards (IRO, Alg. 4, line 9).
    """

    guide: Guide
    searches: int
    scorers: Sequence[tuple[Scorer, float]]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def values(self) -> list[tuple[Value, float]]:
        paths = self.guide.values
        betas = self.guide.betas
        return guides.load_values(paths, betas, self.tokenizer, self.sampling, dtype=self.dtype, device=self.device)

    def draw(self, engine: Engine, batch: Batch) -> Rollout:
        """Search with the model of nlgrpo's engine, or with a model of transformers, whose engine it is."""
        model = engine.model if isinstance(engine, NativeEngine) else engine
        assert isinstance(model, Decoder | TransformersModel)
        found: list[list[Candidate]] = [[] for _ in batch.ids]
        for number in range(self.searches):
            candidates, _ = guided_search.search(
                model, batch.ids, self.guide.search, self.sampling, self.values,
                seed=self.seed ^ (number << 32), index=batch.index, max_rows=self.max_rows or ROWS,
            )  # fmt: skip
            candidates = self._best(batch, candidates) if self.scorers else candidates
            found = [[*kept, *more] for kept, more in zip(found, candidates, strict=True)]
        return convert.as_rollout(batch.ids, found)

    def _best(self, batch: Batch, found: Sequence[Sequence[Candidate]]) -> list[list[Candidate]]:
        """Return the candidate of each prompt with the largest reward; the first one where all rewards abstain."""
        samples = self.guide.search.candidates
        rewards = [scorer.reward for scorer, _ in self.scorers]
        scorer = dataclasses.replace(self, samples=samples, rewards=rewards)
        scored = scorer.score(batch, convert.as_rollout(batch.ids, found), first_prompt=batch.index[0])
        weights = {scorer.name: weight for scorer, weight in self.scorers}
        total = sum_of_applicable(torch.stack(list(scored.values.values())), [weights[name] for name in scored.values])
        best = total.nan_to_num(nan=-math.inf).argmax(1).tolist()
        repeated = [[one for one in candidates for _ in range(one.places)] for candidates in found]
        return [[dataclasses.replace(own[i], places=1)] for own, i in zip(repeated, best, strict=True)]


@dataclass(frozen=True)
class Loop:
    """The stages of a loop, and their folders."""

    options: LoopOptions
    cfg: Config
    queue: WorkQueue
    folder: Path

    def rollouts(self, t: int) -> Path:
        return self.folder / f"iteration-{t}" / "rollouts"

    def value(self, t: int) -> Path:
        return self.folder / f"iteration-{t}" / "value"

    @property
    def compressed(self) -> Path:
        return self.folder / f"compressed-{self.options.iterations}"

    def guide(self, t: int) -> Guide:
        """Guide with the first t value models."""
        return Guide([self.value(i + 1) for i in range(t)], list(self.options.weights[:t]), self.options.search)

    def job(self, t: int) -> Job:
        """Job for the rollouts of iteration t; the value models 1 .. t-1 must exist."""
        job = build_job(self.cfg, self.queue, self.rollouts(t), samples=self.options.samples)
        source = job.prompts.take(0, len(job.prompts))
        batch = source.only(self._prompts(t, source.ids[: self.training_prompts(job)]))
        job = dataclasses.replace(job, batch=batch, sampler=dataclasses.replace(job.sampler, seed=self._seed(t)))
        if t == 1:
            return job
        guide = self.guide(t - 1)
        kept = self._weighted(job) if self.options.keep == "best" else []
        chosen_by = [[scorer.digest, weight] for scorer, weight in kept]
        searched = guide.digest() + f"-{digest_of_text(json.dumps(chosen_by))}" * bool(kept)
        origin = dataclasses.replace(job.origin, guide=searched)
        sampler = GuidedSampler(
            tokenizer=job.sampler.tokenizer,
            sampling=job.sampler.sampling,
            samples=self.options.guided_samples,
            max_rows=job.sampler.max_rows,
            seed=job.sampler.seed,
            rewards=job.sampler.rewards,
            guide=guide,
            searches=self.options.searches,
            scorers=kept,
            dtype=job.dtype,
            device=self.queue.ranks.device,
        )
        return dataclasses.replace(job, origin=origin, sampler=sampler)

    def _weighted(self, job: Job) -> list[tuple[Scorer, float]]:
        """Scorers of the rewards with a weight other than 0, with their weights."""
        weights = [(scorer, self.cfg.rewards[scorer.name].weight) for scorer in job.scorers]
        return [(scorer, weight) for scorer, weight in weights if weight != 0]

    def _prompts(self, t: int, ids: Sequence[Sequence[int]]) -> list[int]:
        """Indices of the prompts of iteration t: new training prompts, then the held-out ones, always the same."""
        count = min(self.options.prompts or len(ids), len(ids))
        last = {tuple(ids[i]): i for i in range(len(ids))}  # the last index of a repeated prompt
        distinct = sorted(last.values())
        first = len(distinct) - min(self._held_out(count), len(distinct) // 2)
        train = {*distinct[:first]}
        held_out = distinct[first:]
        pool = [i for i in range(len(ids)) if last[tuple(ids[i])] in train]
        new = count - len(held_out)
        return [pool[((t - 1) * new + i) % len(pool)] for i in range(new)] + held_out

    def _held_out(self, prompts: int) -> int:
        """Number of held-out prompts of an iteration with ``prompts`` prompts."""
        return min(self.options.value.held_out, prompts // 2)

    def training_prompts(self, job: Job) -> int:
        """Number of prompts that ``nlgrpo train`` would train on; its evaluation prompts come after them."""
        all_prompts = self.cfg.data.evaluation or self.cfg.evaluation.prompts == 0
        return len(job.prompts) if all_prompts else len(job.prompts.split(self.cfg.evaluation.prompts)[0])

    def _seed(self, t: int) -> int:
        """Seed of iteration t, different in every iteration."""
        return self.cfg.train.seed ^ (1 << 61) ^ (t << 48)

    def fit(self, t: int) -> ValueConfig:
        start = str(self.value(t - 1)) if t > 1 else self.options.value.path or self.cfg.model.path
        return self._fit(self.value(t), start, [self.rollouts(t)])

    def compression(self) -> ValueConfig:
        T = self.options.iterations
        values = tuple(str(self.value(t + 1)) for t in range(T))
        rollouts = [self.rollouts(t + 1) for t in range(T)]
        cfg = self._fit(self.compressed, values[-1], rollouts)
        data = RolloutsConfig(tuple(map(str, rollouts)))  # no rewards: the teachers' values are the targets
        teachers = CompressConfig(values, self.options.weights)
        train = dataclasses.replace(cfg.train, head_only=False)  # one head does not have the values of several
        return dataclasses.replace(cfg, data=data, compress=teachers, loss=RegressionConfig(), train=train)

    def _fit(self, folder: Path, start: str, rollouts: Sequence[Path]) -> ValueConfig:
        options = self.options.value
        train = self.cfg.train
        prompts = len(reference_rollouts.read_index(rollouts[0]).prompts)  # the same number in every iteration
        weights = {name: reward.weight for name, reward in self.cfg.rewards.items() if reward.weight != 0}
        return ValueConfig(
            name=folder.name,
            model=dataclasses.replace(self.cfg.model, path=start),
            data=RolloutsConfig(
                tuple(map(str, rollouts)), tuple(weights), tuple(weights.values()), drop_equal=options.drop_equal
            ),
            loss=RegressionConfig(kind=options.kind, lam=options.lam, gamma=options.gamma),
            optim=OptimConfig(lr=options.lr, schedule="cosine"),
            train=ValueTrainConfig(
                epochs=options.epochs,
                completions=options.completions,
                head_only=options.head_only,
                seed=train.seed,
                out=str(folder),
                micro_batch_tokens=train.micro_batch_tokens,
                checkpoint_every=train.checkpoint_every,
                keep_checkpoints=train.keep_checkpoints,
                track=train.track,
                project=train.project,
                run_name=train.run_name and f"{train.run_name}-{folder.name}",
            ),
            evaluation=ValueEvaluationConfig(prompts=self._held_out(prompts)),
        )

    def claim(self, job: Job) -> None:
        """Create the loop's folder, or check that it holds this loop; the number of iterations may change.

        ``job``: job of any iteration. The digests of its model, prompts and rewards identify the loop. Raises
        UserError if the folder holds something else.
        """
        identity = _Identity(_kept(self.options), self.cfg, _contents(job))
        free = (
            "iro.iterations",
            "iro.betas",
            "iro.compress",
            *(f"config.{name}" for name in run_folder.free_keys(ValueConfig())),
        )
        run_folder.claim(self.folder, identity, self.queue.ranks, free=free, restart=False, advice=ADVICE)

    def run(self) -> bool:
        """Run all stages in turn. Returns False if a signal stopped it early. Collective."""
        for t in range(1, self.options.iterations + 1):
            self.queue.console.rule(f"iteration {t}: rollouts")
            if not self._rolled_out(t):
                return False
            self.queue.console.rule(f"iteration {t}: value")
            if not self._fitted(self.fit(t)):
                return False
        if not self.options.compress:
            return True
        self.queue.console.rule("compressed")
        return self._fitted(self.compression())

    def _rolled_out(self, t: int) -> bool:
        """Sample and score the rollouts of iteration t. Its models are freed on return, before training."""
        job = self.job(t)
        if t == 1:
            self.claim(job)
        return roll_out(job, open_folder(job)) is not None

    def _fitted(self, cfg: ValueConfig) -> bool:
        results = cfg.run / value_training.ValueTrainer.RESULTS
        done = results.is_file() and "after" in json.loads(results.read_text("utf-8"))
        if self.queue.ranks.any(not done):
            assert self.queue.stop is not None
            return value_training.build_value_trainer(cfg, self.queue.ranks).fit(self.queue.stop)
        advice = ADVICE + ", or --no-compress" * bool(cfg.compress.values)
        run_folder.claim(cfg.run, cfg, self.queue.ranks, free=run_folder.free_keys(cfg), restart=False, advice=advice)
        self.queue.console.print(f"{cfg.run} is already done", highlight=False, soft_wrap=True)
        return True


@dataclass(frozen=True)
class _Identity:
    """Content of ``config.json`` in the loop's folder."""

    iro: dict[str, Any] = field(default_factory=lambda: _kept(LoopOptions()))
    config: Config = field(default_factory=Config)
    contents: dict[str, Any] = field(default_factory=dict)


def _kept(options: LoopOptions) -> dict[str, Any]:
    """Options that the loop's results depend on."""
    return {name: value for name, value in vars(options).items() if name not in ("out", "dry_run")}


def _contents(job: Job) -> dict[str, Any]:
    """Digests of the files and the data that the configuration names."""
    source = job.prompts.take(0, len(job.prompts))
    return {
        "model": job.origin.model,
        "tokenizer": job.origin.tokenizer,
        "prompts": digest_of_text(*map(digest_of_prompt, source.ids)),
        "columns": digest_of_text(*digests_of_columns(source.columns, len(source.ids))),
        "rewards": {scorer.name: scorer.digest for scorer in job.scorers},
    }


def results(loop: Loop) -> list[dict[str, Any]]:
    """Return one row per iteration: rewards of its rollouts, held-out explained variance of its value model, beta."""
    rows = []
    for t in range(1, loop.options.iterations + 1):
        rollouts = reference_rollouts.load_rollouts(loop.rollouts(t))
        weights = [(name, reward.weight) for name, reward in loop.cfg.rewards.items() if reward.weight != 0]
        values = torch.stack([rollouts.reward(name) for name, _ in weights])
        rewards = sum_of_applicable(values, [weight for _, weight in weights])
        completions = [own for _, own in rollouts.tokens()]
        quarters = [math.ceil(rollouts.index.origin.sampling.max_new_tokens * i / 4) for i in (1, 2, 3, 4)]
        evaluation = json.loads((loop.value(t) / value_training.ValueTrainer.RESULTS).read_text("utf-8"))["after"]
        rows.append(
            {
                "iteration": t,
                "prompts": len(rewards),
                "samples": rewards.shape[1],
                "scored": int((~rewards.isnan()).sum()),
                "mean": _mean(rewards.nanmean(1)),
                "best": _mean(rewards.nan_to_num(nan=-math.inf).amax(1)),
                "explained_variance": evaluation.get("explained_variance"),
                "value": str(loop.value(t).relative_to(loop.folder)),
                "beta": loop.options.weights[t - 1],
                "distinct_prefixes": {str(length): distinct_prefixes(completions, length) for length in quarters},
            }
        )
    return rows


def distinct_prefixes(completions: Sequence[Sequence[Sequence[int]]], length: int) -> float:
    """Mean number of different prefixes of up to ``length`` tokens among the completions of a prompt."""
    return sum(len({tuple(ids[:length]) for ids in own}) for own in completions) / len(completions)


def _mean(values: Tensor) -> dict[str, float | None]:
    """Mean and standard error over the prompts with a finite value, and their number; the mean is None without any."""
    finite = values[values.isfinite()]
    error = finite.std().item() / math.sqrt(len(finite)) if len(finite) > 1 else 0.0
    return {"value": finite.mean().item() if len(finite) else None, "error": error, "prompts": len(finite)}
