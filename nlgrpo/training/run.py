"""A training run: the objects that the training loop uses. `build.py` builds one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nlgrpo.config import schema
from nlgrpo.config.schema import Config
from nlgrpo.data import prompt_dataset
from nlgrpo.data.conversations import plain_text
from nlgrpo.engine.backends import NativeEngine
from nlgrpo.engine.backends.base import Engine, PolicyEngine
from nlgrpo.engine.decoding_memory import ROWS
from nlgrpo.engine.generation import Rollout
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.errors import UserError
from nlgrpo.losses.kl import AdaptiveBeta
from nlgrpo.model import decoder
from nlgrpo.model.architectures import Shape
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.fsdp import TOO_LARGE, check_finite, prepare
from nlgrpo.model.lora import LoraConfig
from nlgrpo.model.tokenizer import count_tokens, save_tokenizer
from nlgrpo.objectives import registry
from nlgrpo.objectives.aggregation import Aggregate, moving_average
from nlgrpo.rewards.reward_functions import Scores
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.device import MicroBatchLimit, master_dtype, micro_batch_limit
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.seeding import seed_everything
from nlgrpo.runtime.supervision.divergence import Detector, Diverged
from nlgrpo.runtime.supervision.phases import phase
from nlgrpo.runtime.timing import Clock, every, flops_utilisation
from nlgrpo.training import run_folder
from nlgrpo.training.learner import Learner, learning_rate, make_optimizer
from nlgrpo.training.tracking import run_files, terminal
from nlgrpo.training.tracking.logger import MetricsLogger
from nlgrpo.training.tracking.run_files import FILE, read_jsonl

if TYPE_CHECKING:
    from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples
    from nlgrpo.engine.rollouts.run_inputs import RunInputs
    from nlgrpo.runtime.checkpoint import Saver
    from nlgrpo.training.offline import OfflineSamples
    from nlgrpo.training.reference_rewards import ReferenceRewards


@dataclass
class Progress:
    """State of a run that a checkpoint holds besides tensors and random states."""

    step: int = 0
    cursor: int = 0  # prompts used so far
    num_tokens: int = 0  # prompt and completion tokens trained on so far
    beta: float = 0.0
    averages: list[float] = field(default_factory=list)  # moving averages of the objectives' values
    rollbacks: int = 0
    empty_steps: int = 0  # in a row, until now: no completion had a reward

    def advance(self, prompts: int, tokens: int, *, empty: bool = False) -> None:
        """Count one finished step with its prompts and tokens."""
        self.step, self.cursor, self.num_tokens = self.step + 1, self.cursor + prompts, self.num_tokens + tokens
        self.empty_steps = self.empty_steps + 1 if empty else 0


@dataclass
class Run:
    """The objects that the training loop uses."""

    config: Config
    ranks: Ranks
    tokenizer: PreTrainedTokenizerBase
    shape: Shape
    source: Path  # directory of the initial model
    prompts: prompt_dataset.Prompts
    held_out: prompt_dataset.PromptSet
    sampler: Sampler
    objectives: dict[str, registry.Objective]
    aggregate: Aggregate
    references: ReferenceRewards | None  # samples of the reference that rank rewards with a transform
    samples: OfflineSamples | None  # samples of the reference, for an offline algorithm
    compute: torch.dtype
    adapter: LoraConfig | None = None  # settings of the policy's adapters
    progress: Progress = field(default_factory=Progress)
    detector: Detector | None = None  # of divergence
    base_digest: str = ""  # of the weights in ``source``, on the first rank once `inputs` has read them

    @property
    def folder(self) -> Path:
        return self.config.run

    @property
    def micro_batch_limit(self) -> MicroBatchLimit:
        return micro_batch_limit(self.config.train.micro_batch_tokens, self.ranks.device)

    def weights(self) -> dict[str, float]:
        return {name: reward.weight for name, reward in self.config.rewards.items()}

    def aggregated(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return g(R_1, .., R_m) and its gradient, given the objectives' ``values`` (m, P).

        With loss.aggregate_at = "prompt", shapes are (P,) and (m, P); with "batch", the means over prompts are
        aggregated, and shapes are () and (m,). With loss.aggregate_memory, the gradient is taken at moving averages
        of the means, which this call updates.
        """
        loss = self.config.loss
        if loss.aggregate_at == "batch":
            values = values.nanmean(-1)
        point = values
        if loss.aggregate_memory > 0:
            point = moving_average(self.progress.averages, values, loss.aggregate_memory)
            self.progress.averages = point.tolist()
        return self.aggregate.value(values), self.aggregate.gradient(point)

    @property
    def longest(self) -> int:
        """Largest number of tokens of a prompt with its completion."""
        environment = self.config.environment
        if environment.id:
            return min(self.shape.context, environment.max_tokens or self.shape.context)
        return max(self.prompts.longest, self.held_out.longest) + self.config.rollout.max_new_tokens

    def evaluator(self) -> Sampler:
        """Build the sampler for evaluation, with evaluation.samples and a seed that training never uses."""
        return replace(self.sampler, samples=self.config.evaluation.samples, seed=self.config.train.seed ^ (1 << 62))

    def next_batch(self, later: int = 0) -> prompt_dataset.Batch:
        """This rank's share of the prompts of the step that is ``later`` steps after the current one."""
        prompts = self.config.rollout.prompts
        share = prompts // self.ranks.world
        return self.prompts.take(self.progress.cursor + later * prompts + self.ranks.rank * share, share)

    def score(self, batch: prompt_dataset.Batch, rollout: Rollout, step: int, sampler: Sampler | None = None) -> Scores:
        """Score this rank's completions of the prompts of ``step`` with the rewards of ``sampler``. Raises RewardError.

        ``sampler``: that of the run, with all rewards, if it is None.
        """
        first = self.ranks.rank * len(batch.ids)  # number of the first prompt among those of the step
        chosen = sampler or self.sampler
        return chosen.score(batch, rollout, step=step, total_steps=self.config.train.steps, first_prompt=first)

    def evaluated(self) -> dict[str, EvaluationSamples]:
        """Load the saved evaluations of the same prompts and number of samples; {} if there are none."""
        from nlgrpo.engine.rollouts import evaluation_samples

        if not (self.folder / evaluation_samples.FILE).is_file():
            return {}
        shape = (len(self._evaluation_batch.ids), self.config.evaluation.samples)
        shown = [plain_text(prompt) for prompt in self._evaluation_batch.prompts]
        saved = evaluation_samples.read_evaluation(self.folder)
        return {
            name: model
            for name, model in saved.items()
            if tuple(model.lengths.shape) == shape and model.prompts == shown[: len(model.prompts)]
        }

    @property
    def _evaluation_batch(self) -> prompt_dataset.Batch:
        return self.held_out.take(0, min(self.config.evaluation.prompts, len(self.held_out)))

    def write_evaluation(self, **models: EvaluationSamples) -> None:
        if self.ranks.first:
            from nlgrpo.engine.rollouts import evaluation_samples

            evaluation_samples.write_evaluation(self.folder, **models)

    @phase("evaluation")
    def evaluate(self, engine: Engine) -> EvaluationSamples:
        from nlgrpo.engine.rollouts import evaluation_samples

        sampled = evaluation_samples.evaluate(
            self.evaluator(), engine, self._evaluation_batch, self.ranks, self.objectives, self.weights()
        )
        return replace(sampled, left_out=self.held_out.left_out)

    @contextmanager
    def engine(self, learner: Learner, stopping: Callable[[], bool] = lambda: False) -> Iterator[PolicyEngine]:
        """Context with the engine that samples completions of the policy; collective. Raises EngineError.

        ``stopping``: whether the user wants the run to stop, so that it does not wait for servers that are down.
        """
        if self.config.rollout.engine == "nlgrpo" or self.config.loss.offline:
            by_block = self.config.parallel.gather_for_sampling == "block"
            yield NativeEngine(learner.model, by_block)
            return
        if self.ranks.first and not self.config.vllm.folder:
            atomic_files.remove(self.folder / "engine")  # what a killed trainer left
        from nlgrpo.engine.backends import frozen

        engine = frozen.of_policy(
            self.source,
            self.shape,
            ranks=self.ranks,
            compute=self.compute,
            options=self.config.vllm,
            context=self.longest,
            max_rows=self.config.rollout.max_rows or ROWS,
            adapter=self.adapter,
            folder=Path(self.config.vllm.folder or self.folder / "engine"),
            pauses=self.folder / "paused-servers",
            stopping=stopping,
            tokens=count_tokens(self.tokenizer),
        )
        try:
            yield engine
        finally:
            engine.close()

    def speed(self, clock: Clock, trained: int, generated: int = 0) -> dict[str, float]:
        """Metrics ``time/*``, ``perf/*`` and ``num_tokens`` of a step, from its numbers of tokens."""
        times = clock.metrics(generated or trained)
        training = 6 if self.adapter is None else 4  # frozen weights have no gradient
        flops = self.shape.parameters * (training * trained * self.config.loss.epochs + 2 * generated)
        utilisation = flops_utilisation(self.ranks.device, flops / self.ranks.world, times["step_time"])
        return times | utilisation | {"num_tokens": self.progress.num_tokens}

    def rates(self, step: int) -> dict[str, float]:
        """Learning rates of the policy and of PPO's critic, which trains alone during its warm-up."""
        optim, critic_cfg, steps = self.config.optim, self.config.critic, self.config.train.steps
        if self.config.loss.algorithm != "ppo":
            return {"lr": learning_rate(optim, step, steps)}
        policy_step = step - critic_cfg.warmup_steps  # the policy's schedule starts after the critic's warm-up
        lr = 0.0 if policy_step < 0 else learning_rate(optim, policy_step, steps - critic_cfg.warmup_steps)
        return {"lr": lr, "critic_lr": learning_rate(replace(optim, lr=critic_cfg.lr), step, steps)}

    def next_beta(self, step: int, kl: float) -> float:
        """Beta of the next step, given the KL per token of ``step``; unchanged while the policy is not trained."""
        beta, target = self.progress.beta, self.config.loss.target_kl
        if target is None or self.rates(step)["lr"] == 0:
            return beta
        return AdaptiveBeta(beta, target).step(kl)

    def needs_reference(self, step: int) -> bool:
        """Whether the completions of ``step`` are scored under the reference: for the penalty, or to log the KL."""
        loss = self.config.loss
        return loss.has_reference and (loss.beta > 0 or every(loss.log_kl_every, step + 1))

    def open_folder(self) -> None:
        """Create the folder, or check that it holds this run; collective. Raises UserError as `run_folder.claim`."""
        train = self.config.train
        run_folder.claim(
            self.folder,
            self.config,
            self.ranks,
            free=run_folder.free(self.config),
            restart=train.restart,
            removed=run_folder.WRITTEN,
            steps=train.steps,
            inputs=self.inputs,
            allowed=train.allow_changed,
        )

    def inputs(self) -> RunInputs:
        """Return digests of what the run reads: data, rewards and model.

        Raises UserError if lora.path is an adapter of other weights than those of model.path.
        """
        from nlgrpo.engine.rollouts.collect import scorers
        from nlgrpo.engine.rollouts.run_inputs import digests_of
        from nlgrpo.engine.rollouts.store import digest_of_weights

        if self.config.lora.path:
            from nlgrpo.engine import as_trained

            as_trained.check_base(self.config.lora.path, self.source)
        self.base_digest = digest_of_weights(self.source)
        scored = scorers(self.config.rewards, self.objectives, self.sampler.rewards)
        return digests_of(
            self.config,
            self.source,
            self.tokenizer,
            self.prompts,
            self.held_out,
            scored,
            self.sampler.sampling.stop_ids,
        )

    def logger(self) -> MetricsLogger:
        tracked = None
        if self.config.train.track:
            from nlgrpo.training.tracking.trackers import TrackedRun

            tracked = TrackedRun.of(self.config, self.folder)
        return MetricsLogger(
            self.folder,
            total_steps=self.config.train.steps,
            enabled=self.ranks.first,
            tracked=tracked,
            resume_step=self.progress.step,
            shown=terminal.SHOWN if self.samples is None else terminal.SHOWN_OFFLINE,
        )

    def learner(self) -> Learner:
        """Load the policy, the frozen reference if there is one, and PPO's critic."""
        cfg = self.config
        model = self._policy()
        check_finite(model, self.ranks, f" in {self.source}, before any training")
        model.configure(cfg.model.activation_checkpointing, cfg.model.compile)
        reference = None
        if cfg.loss.has_reference and self.adapter is not None:
            reference = model
        elif cfg.loss.has_reference:
            sharded = self._sharded(None)
            reference = decoder.load(self.source, dtype=self.compute, device=self.ranks.device, shard=sharded)
            reference.limit_vocabulary(count_tokens(self.tokenizer))
            reference.requires_grad_(False).configure(compiled=cfg.model.compile)
        value = None
        if cfg.loss.algorithm == "ppo":
            from nlgrpo.training import critic

            value = critic.make(cfg, model, self.ranks, self.compute, self.adapter)
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
            micro_batch_limit=self.micro_batch_limit,
            seed=cfg.train.seed,
        )

    def _sharded(self, adapter: LoraConfig | None) -> Callable[[Decoder], Decoder]:
        parallel = self.config.parallel
        return partial(prepare, adapter=adapter, ranks=self.ranks, compute=self.compute, parallel=parallel)

    def _policy(self) -> Decoder:
        """Load the policy, and give its adapters their first values."""
        sharded = self._sharded(self.adapter)
        stored = master_dtype(self.compute)
        model = decoder.load(self.source, dtype=stored, device=self.ranks.device, shard=sharded)
        model.limit_vocabulary(count_tokens(self.tokenizer))
        if self.adapter is not None:
            from nlgrpo.model import adapters

            adapters.begin(model, self.adapter, self.config.train.seed)
        return model

    @cached_property
    def saver(self) -> Saver:
        """Saves the checkpoints; created by all ranks together."""
        return run_folder.saver(self.folder, self.config.train, self.ranks, adapters=self.adapter is not None)

    @phase("checkpoint")
    def save(self, learner: Learner, *, wait: bool = True) -> None:
        """Save a checkpoint; collective. Unless ``wait``, training may continue while it is written."""
        check_finite(learner.trained, self.ranks, TOO_LARGE)
        state = vars(self.progress) | {"config": schema.to_dict(self.config)}
        run_files.sync(self.folder, self.ranks)
        self.saver.save(self.progress.step, learner.trained, learner.optimizer, state, wait=wait)

    def restore(self, learner: Learner) -> bool:
        """Load the newest complete checkpoint; returns False if there is none."""
        from nlgrpo.runtime import checkpoint

        state = checkpoint.load(self.folder / "checkpoints", model=learner.trained, optimizer=learner.optimizer)
        if state is not None:
            self.progress = Progress(**{key.name: state[key.name] for key in fields(Progress) if key.name in state})
            self._seed_samples()
        return state is not None

    def watch(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn if the run diverges at ``step``, or raise Diverged on all ranks; see `divergence.action`."""
        action = self.config.divergence.action
        if self.detector is None:
            self.detector = self._detector(step)
        fault = None if action == "none" else self.detector.look(step, metrics)
        if action in ("stop", "rollback") and self.ranks.any(fault is not None):
            raise fault or Diverged("another rank has diverged", step)
        if fault is not None and self.ranks.first:
            print(f"warning: {fault} (divergence.action)", file=sys.stderr, flush=True)

    def watch_rewards(self, step: int, why: Callable[..., str]) -> None:
        """Warn if no completion of a step had a reward, at the first of several such steps.

        ``why(objectives, rewards)`` says which rewards abstained or failed. Raises UserError on all ranks after
        train.max_empty_steps of them in a row.
        """
        empty, limit = self.progress.empty_steps, self.config.train.max_empty_steps
        ends = 0 < limit <= empty
        if empty != 1 and not ends:
            return
        reason = why(self.objectives, self.config.rewards)
        advice = "None and an error with on_error = 'skip' count nowhere, so nothing is learned: correct the reward"
        if ends:
            raise UserError(
                f"no completion has had a reward for {empty} step{'s' * (empty > 1)} in a row, until step {step + 1}. "
                f"In the last one: {reason}. {advice}, or increase train.max_empty_steps = {limit} (0: never ends)"
            )
        if self.ranks.first:
            after = f"; train.max_empty_steps = {limit} such steps in a row end the run" * (limit > 0)
            print(f"warning: no completion of step {step + 1} has a reward: {reason}. {advice}{after}",
                  file=sys.stderr, flush=True)  # fmt: skip

    def _detector(self, begun: int) -> Detector:
        """Return a detector that has followed the metrics that were logged before the step ``begun``; collective."""
        detector = Detector(self.config.divergence, groups=self.config.rollout.samples > 1)
        rows = read_jsonl(self.folder / FILE)[-20 * self.config.divergence.window :] if self.ranks.first else []
        for row in self.ranks.gather_objects([row for row in rows if row["step"] < begun])[0]:
            detector.look(row["step"], row)
        return detector

    def roll_back(self, learner: Learner, diverged: Diverged) -> None:
        """Load the newest checkpoint from before ``diverged``, and sample with another seed from there; collective.

        Later checkpoints are removed. Raises ``diverged`` if there is none, or after too many rollbacks.
        """
        from nlgrpo.runtime import checkpoint

        rollbacks = self.progress.rollbacks + 1
        self.saver.wait()
        if rollbacks > self.config.divergence.rollbacks:
            raise UserError(f"{diverged}; this after {rollbacks - 1} rollbacks (divergence.rollbacks)")
        self.ranks.agree(lambda: checkpoint.drop(self.saver.folder, diverged.onset) if self.ranks.first else None)
        if not self.restore(learner):
            raise UserError(f"{diverged}; there is no checkpoint from before step {diverged.onset + 1}")
        self.progress.rollbacks = rollbacks
        self._seed_samples()
        seed_everything(self.config.train.seed + self.ranks.rank + 7919 * rollbacks)
        self.detector = None  # the steps that were rolled back are forgotten
        if self.ranks.first:
            print(f"warning: {diverged}", file=sys.stderr, flush=True)

    def _seed_samples(self) -> None:
        """Give the samples the seed of the run, and another one after each rollback."""
        self.sampler = replace(self.sampler, seed=self.config.train.seed ^ (self.progress.rollbacks << 48))

    @phase("export")
    def export(self, learner: Learner) -> Path:
        """Write the policy as a Hugging Face directory, in the compute dtype; collective, complete on return.

        Model and adapter have what training assumed: tokenizer, stop ids, sampling and prompts (`AsTrained`).
        """
        from nlgrpo.engine.as_trained import AsTrained
        from nlgrpo.model import adapters

        model = learner.model
        check_finite(model, self.ranks, TOO_LARGE)
        assumed = AsTrained.of(self.config, self.sampler.sampling)

        def beside(folder: Path) -> None:
            assumed.write(folder, self.tokenizer, self.shape.vocab, self.base_digest)

        def write(folder: Path, parameters: Iterator[tuple[str, Tensor]]) -> None:
            decoder.save(
                model, folder, tokenizer=self.tokenizer, parameters=parameters, dtype=self.compute, like=self.source
            )
            beside(folder)

        def write_beside_adapter() -> None:
            if self.ranks.first and self.adapter is not None:
                folder = self.folder / "adapter"
                with atomic_files.into(folder):
                    save_tokenizer(self.tokenizer, folder)
                    beside(folder)

        exported = adapters.export(
            model,
            self.folder,
            write,
            config=self.adapter,
            compute=self.compute,
            ranks=self.ranks,
            base=self.config.model.path,
        )
        self.ranks.agree(write_beside_adapter)
        return exported
