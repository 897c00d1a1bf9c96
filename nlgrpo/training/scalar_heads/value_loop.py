"""The loop that learns value models for a frozen model, one per iteration (IRO, Alg. 3; SPI, Alg. 1)."""

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

from nlgrpo.config.schema import Config, OptimConfig
from nlgrpo.config.value_config import (
    CompressConfig,
    RegressionConfig,
    RolloutsConfig,
    TrainerOptions,
    ValueConfig,
    ValueEvaluationConfig,
    ValueTrainConfig,
)
from nlgrpo.data.prompt_dataset import Batch
from nlgrpo.engine import guided_search
from nlgrpo.engine.generation import Rollout
from nlgrpo.engine.guided_search import Search, Value
from nlgrpo.engine.rollouts import guided_responses, reference_rollouts
from nlgrpo.engine.rollouts.guided_responses import Guide
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.engine.rollouts.store import digest_of_prompt, digest_of_text, digests_of_columns
from nlgrpo.engine.transformers_backend import TransformersModel
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.fsdp import gathered
from nlgrpo.runtime.work_queue import WorkQueue
from nlgrpo.training import run_folder
from nlgrpo.training.rollout_job import Job, build, open_folder, roll_out
from nlgrpo.training.scalar_heads import trainer, value_training

RESULTS = "iro.json"
ADVICE = "another folder with --out"


@dataclass
class LoopOptions:
    """What the loop takes besides the keys of a configuration."""

    out: Path | None = None
    """Folder of everything; none: runs/<recipe>-iro."""
    iterations: int = 3
    """T, value models."""
    samples: int = 16
    """K, completions of a prompt in the first iteration; the others have beams x successors."""
    prompts: int | None = None
    """Of an iteration, the next ones of the source each time; none: all of them, every time."""
    beams: int = 4
    """K of the search."""
    successors: int = 4
    """B, chunks that are drawn behind each beam."""
    chunk: int = 16
    """L, tokens of a chunk."""
    search_temperature: float = 0.0
    """Above 0, beams are drawn in proportion to e^(V / temperature); 0: the best ones."""
    diverse: bool = True
    """Keep different candidates before the same ones."""
    betas: tuple[float, ...] = ()
    """Of the value models, V = sum_t V_t / beta_t; none: 1 each."""
    value: TrainerOptions = field(default_factory=TrainerOptions)
    compress: bool = True
    """Fit one value model to the sum of all at the end."""
    dry_run: bool = False
    """Say what there is to do; do nothing."""

    @property
    def search(self) -> Search:
        return Search(self.beams, self.successors, self.chunk, self.search_temperature, self.diverse)

    @property
    def weights(self) -> tuple[float, ...]:
        return self.betas or (1.0,) * self.iterations


@dataclass(frozen=True)
class GuidedSampler(Sampler):
    """Draws the U = K B candidates of a search for each prompt; one that ended early fills the places it takes."""

    guide: Guide
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def values(self) -> list[tuple[Value, float]]:
        paths, betas = self.guide.values, self.guide.betas
        return guided_responses.load_values(
            paths, betas, self.tokenizer, self.sampling, dtype=self.dtype, device=self.device
        )

    def draw(self, model: Decoder | TransformersModel, batch: Batch) -> Rollout:
        with gathered(model):
            found, _ = guided_search.search(
                model, batch.ids, self.guide.search, self.sampling, self.values,
                seed=self.seed, index=batch.index, max_rows=self.max_rows,
            )  # fmt: skip
        return guided_responses.as_rollout(batch.ids, found)


@dataclass(frozen=True)
class Loop:
    """The stages of a loop, and where they are kept."""

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
        """Of the first t value models."""
        return Guide([self.value(i + 1) for i in range(t)], list(self.options.weights[:t]), self.options.search)

    def job(self, t: int) -> Job:
        """The rollouts of iteration t; the values that guide them must be there."""
        job = build(self.cfg, self.queue, self.rollouts(t), samples=self.options.samples)
        whole = job.prompts.take(0, len(job.prompts))
        batch = whole.only(self._prompts(t, whole.ids[: self._training(job)]))
        job = dataclasses.replace(job, batch=batch, sampler=dataclasses.replace(job.sampler, seed=self._seed(t)))
        if t == 1:
            return job
        given = vars(job.sampler) | {"samples": self.options.search.candidates}
        guide = self.guide(t - 1)
        origin = dataclasses.replace(job.origin, guide=guide.digest())
        sampler = GuidedSampler(**given, guide=guide, dtype=job.dtype, device=self.queue.ranks.device)
        return dataclasses.replace(job, origin=origin, sampler=sampler)

    def _prompts(self, t: int, ids: Sequence[Sequence[int]]) -> list[int]:
        """Those of iteration t: others in each, and behind them always the same ones, which no value learns from."""
        count = min(self.options.prompts or len(ids), len(ids))
        last = {tuple(ids[i]): i for i in range(len(ids))}  # of a prompt that is there twice the last place
        places = sorted(last.values())
        first = len(places) - min(self._held_out(count), len(places) // 2)
        learned, held = {*places[:first]}, places[first:]
        there, new = [i for i in range(len(ids)) if last[tuple(ids[i])] in learned], count - len(held)
        return [there[((t - 1) * new + i) % len(there)] for i in range(new)] + held

    def _held_out(self, prompts: int) -> int:
        """Of an iteration, those that no value learns from."""
        return min(self.options.value.held_out, prompts // 2)

    def _training(self, job: Job) -> int:
        """How many of the prompts a run would train on: the first ones, where it holds the last ones out."""
        whole = self.cfg.data.evaluation or self.cfg.evaluation.prompts == 0
        return len(job.prompts) if whole else len(job.prompts.split(self.cfg.evaluation.prompts)[0])

    def _seed(self, t: int) -> int:
        """No noise is met in two iterations."""
        return self.cfg.train.seed ^ (1 << 61) ^ (t << 48)

    def fit(self, t: int) -> ValueConfig:
        begun = str(self.value(t - 1)) if t > 1 else self.options.value.path or self.cfg.model.path
        return self._fit(self.value(t), begun, [self.rollouts(t)])

    def compression(self) -> ValueConfig:
        T = self.options.iterations
        values = tuple(str(self.value(t + 1)) for t in range(T))
        rollouts = [self.rollouts(t + 1) for t in range(T)]
        cfg = self._fit(self.compressed, values[-1], rollouts)
        data = RolloutsConfig(tuple(map(str, rollouts)))  # and no rewards, which are in the values
        teachers = CompressConfig(values, self.options.weights)
        return dataclasses.replace(cfg, data=data, compress=teachers, loss=RegressionConfig())

    def _fit(self, folder: Path, begun: str, rollouts: Sequence[Path]) -> ValueConfig:
        how, train = self.options.value, self.cfg.train
        prompts = len(reference_rollouts.read_index(rollouts[0]).prompts)  # as many in every iteration
        counting = {name: reward.weight for name, reward in self.cfg.rewards.items() if reward.weight != 0}
        return ValueConfig(
            name=folder.name,
            model=dataclasses.replace(self.cfg.model, path=begun),
            data=RolloutsConfig(tuple(map(str, rollouts)), tuple(counting), tuple(counting.values())),
            loss=RegressionConfig(kind=how.kind, lam=how.lam, gamma=how.gamma),
            optim=OptimConfig(lr=how.lr, schedule="cosine"),
            train=ValueTrainConfig(
                epochs=how.epochs,
                completions=how.completions,
                seed=train.seed,
                out=str(folder),
                micro_batch_tokens=train.micro_batch_tokens,
                checkpoint_every=train.checkpoint_every,
                keep_checkpoints=train.keep_checkpoints,
                tensorboard=train.tensorboard,
            ),
            evaluation=ValueEvaluationConfig(prompts=self._held_out(prompts)),
        )

    def claim(self, job: Job) -> None:
        """Make the folder, or check that it is of this loop; ValueError otherwise. More iterations may be asked for.

        ``job``: of any iteration; what all of them draw from and score by is part of the loop, whose values are fitted
        to it.
        """
        own = {name: value for name, value in vars(self.options).items() if name not in ("out", "dry_run")}
        whole = _Whole(own, self.cfg, _contents(job))
        free = ("iro.iterations", "iro.betas", "iro.compress", *(f"config.{name}" for name in trainer.FREE))
        run_folder.claim(self.folder, whole, self.queue.ranks, free=free, restart=False, advice=ADVICE)

    def run(self) -> bool:
        """All stages in turn; False where a signal ended it early. Collective."""
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
        """A method, for what has drawn and scored, models among it, to be gone when values are fitted."""
        job = self.job(t)
        if t == 1:
            self.claim(job)
        return roll_out(job, open_folder(job)) is not None

    def _fitted(self, cfg: ValueConfig) -> bool:
        results = cfg.run / value_training.ValueTrainer.RESULTS
        there = results.is_file() and "after" in json.loads(results.read_text("utf-8"))
        if self.queue.ranks.any(not there):
            assert self.queue.stop is not None
            return trainer.fit(cfg, value_training.build, self.queue.ranks, self.queue.stop)
        advice = ADVICE + ", or --no-compress" * bool(cfg.compress.values)
        run_folder.claim(cfg.run, cfg, self.queue.ranks, free=trainer.FREE, restart=False, advice=advice)
        self.queue.console.print(f"{cfg.run} is there", highlight=False, soft_wrap=True)
        return True


@dataclass(frozen=True)
class _Whole:
    """What ``config.json`` of the loop's folder holds."""

    iro: dict[str, Any]
    config: Config
    contents: dict[str, Any]


def _contents(job: Job) -> dict[str, Any]:
    """Digests of the files and the data that the configuration names."""
    whole = job.prompts.take(0, len(job.prompts))
    return {
        "model": job.origin.model,
        "tokenizer": job.origin.tokenizer,
        "prompts": digest_of_text(*map(digest_of_prompt, whole.ids)),
        "columns": digest_of_text(*digests_of_columns(whole.columns, len(whole.ids))),
        "rewards": {scorer.name: scorer.digest for scorer in job.scorers},
    }


def results(loop: Loop) -> list[dict[str, Any]]:
    """Return a row per iteration: rewards of its rollouts, explained variance of its value when held out, beta."""
    found = []
    for t in range(1, loop.options.iterations + 1):
        rollouts = reference_rollouts.load(loop.rollouts(t))
        counting = [(name, reward.weight) for name, reward in loop.cfg.rewards.items() if reward.weight != 0]
        worth = torch.stack([weight * rollouts.reward(name) for name, weight in counting]).sum(0)
        fitted = json.loads((loop.value(t) / value_training.ValueTrainer.RESULTS).read_text("utf-8"))["after"]
        found.append(
            {
                "iteration": t,
                "prompts": len(worth),
                "samples": worth.shape[1],
                "mean": _mean(worth.nanmean(1)),
                "best": _mean(worth.nan_to_num(nan=-math.inf).amax(1)),
                "explained_variance": fitted.get("explained_variance"),
                "value": str(loop.value(t).relative_to(loop.folder)),
                "beta": loop.options.weights[t - 1],
            }
        )
    return found


def _mean(values: Tensor) -> dict[str, float | None]:
    """Over prompts whose completions were judged, with the standard error; None where none was."""
    judged = values[values.isfinite()]
    error = judged.std().item() / math.sqrt(len(judged)) if len(judged) > 1 else 0.0
    return {"value": judged.mean().item() if len(judged) else None, "error": error}
