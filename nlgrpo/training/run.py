"""A training run: everything that the loop works with, and the run's folder. `build.py` makes one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nlgrpo.config import schema
from nlgrpo.config.schema import Config
from nlgrpo.data import prompt_dataset
from nlgrpo.engine.rollouts import evaluation_samples
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.model import decoder
from nlgrpo.model.architectures import Shape
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.fsdp import TOO_LARGE, check_finite, full_parameters, shard
from nlgrpo.objectives import registry
from nlgrpo.objectives.aggregation import Aggregate, moving_average
from nlgrpo.runtime import atomic_files, checkpoint
from nlgrpo.runtime.device import micro_batch_tokens
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.timing import Clock, flops_utilisation
from nlgrpo.training import critic, metrics, offline, run_folder
from nlgrpo.training.learner import Learner, learning_rate, make_optimizer
from nlgrpo.training.losses.kl import AdaptiveBeta
from nlgrpo.training.reference_rewards import ReferenceRewards

# What may differ when a run goes on: how long it is, and what it keeps and shows.
FREE = ("train.steps", "train.checkpoint_every", "train.keep_checkpoints", "train.samples_every", "train.tensorboard",
        "train.restart", "train.out", "train.micro_batch_tokens", "rollout.max_rows", "evaluation.prompts",
        "evaluation.samples", "evaluation.ns")  # fmt: skip

# What a run writes into its folder besides config.json.
WRITTEN = (
    *(
        "checkpoints",
        "model",
        "tensorboard",
        metrics.FILE,
        metrics.SAMPLES_FILE,
        evaluation_samples.FILE,
        "report.html",
    ),
    *(f"{picture}.png" for picture in ("lengths", "curves", "rewards", "best_of_n", "win_rates", "fronts")),
)


@dataclass
class Progress:
    """How far a run is: all that a checkpoint holds besides tensors and random states."""

    step: int = 0
    cursor: int = 0  # prompts taken so far
    num_tokens: int = 0  # prompt and completion tokens trained on so far
    beta: float = 0.0
    averages: list[float] = field(default_factory=list)  # moving averages of the objectives' values

    def advance(self, prompts: int, tokens: int) -> None:
        """One step on."""
        self.step, self.cursor, self.num_tokens = self.step + 1, self.cursor + prompts, self.num_tokens + tokens


@dataclass
class Run:
    """Everything that the loop works with."""

    config: Config
    ranks: Ranks
    tokenizer: PreTrainedTokenizerBase
    shape: Shape
    source: Path  # directory of the model that training starts from
    prompts: prompt_dataset.PromptSet
    held_out: prompt_dataset.PromptSet
    sampler: Sampler
    objectives: dict[str, registry.Objective]
    aggregate: Aggregate
    references: ReferenceRewards
    samples: offline.OfflineSamples | None  # of the reference, for an algorithm that draws none
    compute: torch.dtype
    progress: Progress = field(default_factory=Progress)

    @property
    def folder(self) -> Path:
        return self.config.run

    @property
    def micro_batch_tokens(self) -> int:
        return micro_batch_tokens(self.config.train.micro_batch_tokens, self.ranks.device)

    def weights(self) -> dict[str, float]:
        return {name: reward.weight for name, reward in self.config.rewards.items()}

    def aggregated(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """g at the values (m, P) of the objectives, and its gradient: at each prompt, or at the means over all of them.

        With a memory the gradient is taken at moving averages of the means, which this call moves on.
        """
        loss = self.config.loss
        if loss.aggregate_at == "batch":
            values = values.nanmean(-1)
        at = values
        if loss.aggregate_memory > 0:
            at = moving_average(self.progress.averages, values, loss.aggregate_memory)
            self.progress.averages = at.tolist()
        return self.aggregate.value(values), self.aggregate.gradient(at)

    def evaluator(self) -> Sampler:
        """The sampler with the evaluation's number of samples, and noise that training never sees."""
        evaluation_seed = self.config.train.seed ^ (1 << 62)
        return Sampler(
            self.tokenizer,
            self.sampler.sampling,
            self.config.evaluation.samples,
            self.config.rollout.max_rows,
            evaluation_seed,
            self.sampler.rewards,
        )

    def next_batch(self) -> prompt_dataset.Batch:
        """This rank's share of the step's prompts."""
        share = self.config.rollout.prompts // self.ranks.world
        return self.prompts.take(self.progress.cursor + self.ranks.rank * share, share)

    def evaluated(self) -> dict[str, evaluation_samples.EvaluationSamples]:
        """What the folder holds of an evaluation on as many prompts and samples as this configuration asks for."""
        if not (self.folder / evaluation_samples.FILE).is_file():
            return {}
        shape = (min(self.config.evaluation.prompts, len(self.held_out)), self.config.evaluation.samples)
        found = evaluation_samples.read_evaluation(self.folder)
        return {name: model for name, model in found.items() if tuple(model.lengths.shape) == shape}

    def write_evaluation(self, **models: evaluation_samples.EvaluationSamples) -> None:
        if self.ranks.first:
            evaluation_samples.write_evaluation(self.folder, **models)

    def evaluate(self, model: Decoder) -> evaluation_samples.EvaluationSamples:
        batch = self.held_out.take(0, min(self.config.evaluation.prompts, len(self.held_out)))
        return self.evaluator().evaluate(model, batch, self.ranks, self.objectives, self.weights())

    def speed(self, clock: Clock, trained: int, generated: int = 0) -> dict[str, float]:
        """``time/*``, ``perf/*`` and the tokens so far, of a step that generated and trained on so many."""
        times = clock.metrics(generated or trained)
        flops = self.shape.parameters * (6 * trained * self.config.loss.epochs + 2 * generated)
        used = flops_utilisation(self.ranks.device, flops / self.ranks.world, times["step_time"])
        return times | used | {"num_tokens": self.progress.num_tokens}

    def rates(self, step: int) -> dict[str, float]:
        """Learning rates of the policy and of PPO's critic, which begins alone."""
        optim, own, steps = self.config.optim, self.config.critic, self.config.train.steps
        if self.config.loss.algorithm != "ppo":
            return {"lr": learning_rate(optim, step, steps)}
        late = step - own.warmup_steps  # the policy's schedule begins with it
        lr = 0.0 if late < 0 else learning_rate(optim, late, steps - own.warmup_steps)
        return {"lr": lr, "critic_lr": learning_rate(replace(optim, lr=own.lr), step, steps)}

    def next_beta(self, step: int, kl: float) -> float:
        """That of the step after ``step``, which had this KL per token; a policy that waits says nothing by it."""
        beta, target = self.progress.beta, self.config.loss.target_kl
        if target is None or self.rates(step)["lr"] == 0:
            return beta
        return AdaptiveBeta(beta, target).step(kl)

    def logger(self) -> metrics.MetricsLogger:
        return metrics.MetricsLogger(
            self.folder,
            total_steps=self.config.train.steps,
            enabled=self.ranks.first,
            tensorboard=self.config.train.tensorboard,
            resume_step=self.progress.step,
            shown=metrics.SHOWN if self.samples is None else offline.SHOWN,
        )

    def learner(self) -> Learner:
        """Load the policy and, where there is one, the frozen reference."""
        cfg = self.config
        stored = torch.float32 if self.compute == torch.bfloat16 else self.compute
        sharded = partial(shard, ranks=self.ranks, compute=self.compute)
        model = decoder.load(self.source, dtype=stored, device=self.ranks.device, shard=sharded)
        check_finite(model, self.ranks, f" in {self.source}, before any training")
        model.activation_checkpointing = cfg.model.activation_checkpointing
        reference = None
        if cfg.loss.has_reference:
            reference = decoder.load(self.source, dtype=self.compute, device=self.ranks.device, shard=sharded)
            reference.requires_grad_(False)
        value = critic.make(cfg, model, self.ranks, self.compute)
        return Learner(
            model=model,
            reference=reference,
            critic=value,
            optimizer=make_optimizer(model, cfg.optim, None if value is None else value.module),
            loss=cfg.loss,
            optim=cfg.optim,
            ranks=self.ranks,
            temperature=cfg.rollout.temperature,
            max_new_tokens=cfg.rollout.max_new_tokens,
            micro_batch_tokens=self.micro_batch_tokens,
            seed=cfg.train.seed,
        )

    def save(self, learner: Learner) -> None:
        check_finite(learner.trained, self.ranks, TOO_LARGE)
        state = vars(self.progress) | {"config": schema.to_dict(self.config)}
        where = self.folder / "checkpoints"
        keep = self.config.train.keep_checkpoints
        checkpoint.save(
            where, self.progress.step, model=learner.trained, optimizer=learner.optimizer, state=state, keep=keep
        )

    def restore(self, learner: Learner) -> bool:
        """Go on from the newest whole checkpoint; False where there is none."""
        state = checkpoint.load(self.folder / "checkpoints", model=learner.trained, optimizer=learner.optimizer)
        if state is not None:
            self.progress = Progress(**{name: state[name] for name in vars(self.progress)})
        return state is not None

    def export(self, learner: Learner) -> Path:
        """Write the policy as a Hugging Face directory, in the type that it computes in; collective."""
        folder = self.folder / "model"
        check_finite(learner.model, self.ranks, TOO_LARGE)
        parameters = full_parameters(learner.model, self.compute)
        if self.ranks.first:
            with atomic_files.into(folder):
                decoder.save(learner.model, folder, tokenizer=self.tokenizer, parameters=parameters, like=self.source)
        return folder


def open_folder(run: Run) -> None:
    """Make the run's folder, or check that the run in it is this one; collective. ValueError where it is another."""
    restart = run.config.train.restart
    run_folder.claim(run.folder, run.config, run.ranks, free=_free(run.config), restart=restart, removed=WRITTEN)


def _free(cfg: Config) -> tuple[str, ...]:
    """`FREE`, but for what training depends on here.

    That is the length of a run whose learning rate falls towards its end, and the number of evaluation prompts where
    these are held out of the training data.
    """
    bound = {"train.steps": cfg.optim.schedule != "constant", "evaluation.prompts": not cfg.data.evaluation}
    return tuple(name for name in FREE if not bound.get(name, False))
