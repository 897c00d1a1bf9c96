"""Train a policy: ``torchrun nlgrpo/train.py [recipe] [file.toml] [--section.key value ...] [--dry-run]``.

Non-linear GRPO (IAMA, Alg. 1 and 2): sample M completions per prompt, score them, replace each reward by the first
variation of its objective at the group's empirical distribution, and take a GRPO step with the result. The offline
algorithms (BoN-SFT, DPO, IPO, BoNBoN) share the run and replace the step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from nlgrpo import errors
from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import Config
from nlgrpo.engine.backends.base import PolicyEngine
from nlgrpo.errors import UserError
from nlgrpo.objectives.advantages import subtract_baseline
from nlgrpo.objectives.aggregation import combine
from nlgrpo.runtime.atomic_files import disk_errors
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.seeding import seed_everything
from nlgrpo.runtime.supervision.phases import phase
from nlgrpo.runtime.supervision.stop_signal import StopSignal
from nlgrpo.runtime.timing import Clock, every
from nlgrpo.training import policy, run_folder, trainer
from nlgrpo.training.build import Setup, build_setup
from nlgrpo.training.divergence import Diverged, DivergenceWatch
from nlgrpo.training.global_batch import GlobalBatch
from nlgrpo.training.learner import Learner
from nlgrpo.training.rollouts import Rollouts
from nlgrpo.training.schedules import learning_rates, next_beta
from nlgrpo.training.tracking import terminal
from nlgrpo.training.trainer import Progress, Trainer

if TYPE_CHECKING:
    from nlgrpo.engine.rollouts.run_inputs import RunInputs
    from nlgrpo.training.binary_rewards import BinaryRewards
    from nlgrpo.training.evaluation import Evaluations, Samples
    from nlgrpo.training.tracking.logger import MetricsLogger


@dataclass(kw_only=True)
class PolicyTrainer(Trainer):
    """Trains a policy. `loaded` gives it a learner and an engine, `begin` the rollouts."""

    config: Config
    setup: Setup
    watch: DivergenceWatch
    learner: Learner = field(init=False)
    engine: PolicyEngine = field(init=False)
    rollouts: Rollouts = field(init=False)
    binary: BinaryRewards = field(init=False)
    evaluations: Evaluations | None = None
    base_digest: str = ""  # of the initial weights, on the first rank once `inputs` has read them

    @classmethod
    def build(cls, cfg: Config, ranks: Ranks) -> PolicyTrainer:
        """Load what a run needs besides its weights. Raises UserError for a configuration that cannot be run."""
        seed_everything(cfg.train.seed + ranks.rank)
        setup = build_setup(cfg, ranks)
        return cls(
            config=cfg,
            ranks=ranks,
            adapter=setup.adapter,
            progress=Progress(beta=cfg.loss.beta),
            setup=setup,
            watch=DivergenceWatch(cfg, ranks),
        )

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self, log: MetricsLogger) -> None:
        if self.config.loss.offline:
            self.offline_step(log)
        else:
            self.online_step(log)

    # fmt: off
    def online_step(self, log: MetricsLogger) -> None:
        """One step of GRPO or PPO."""
        cfg     = self.config
        ranks   = self.ranks
        learner = self.learner
        joint   = self.setup.objective                               # R_1, .., R_m and g
        progress = self.progress
        step    = progress.step
        clock   = Clock(ranks.device, step)
        clock.phase("generate")
        drawn   = self.rollouts.draw()                               # M completions of this rank's share of P prompts
        rollout = drawn.rollout                                      # tokens and log-probs            (P, M, L)
        clock.phase("reference")
        ref     = learner.reference_logprobs(rollout) if self.needs_reference(step) else None  # (P M, L)
        ratios  = learner.corrected(rollout)                         # policy / sampler, or None without loss.correction
        clock.phase("rewards")
        scores, calibrated = self.rollouts.score(drawn, ref)         # {name: (P, M)}, NaN where a reward abstains
        clock.phase("linearize")
        weights = None if ratios is None else ratios.completions     # (P, M), or None: weights of tokens only
        groups  = GlobalBatch.gather(ranks, scores, rollout, calibrated, weights)  # from here on: all P prompts
        values  = groups.values(joint.objectives)                    # R_i at every prompt             (m, P)
        terms   = groups.linearize(joint.objectives, cfg.loss.baseline)  # dR_i/dpi minus a baseline      (m, P, M)
        value, gradient = joint.aggregated(values, progress.averages)  # g(R_1, .., R_m) and dg/dR_i     (m,)
        linear  = combine(terms, gradient)                           # sum_i dg/dR_i dR_i/dpi          (P, M)
        scored  = groups.has_reward(joint.objectives, gradient)      # False where the rewards abstain (P, M)
        gain    = linear
        in_reward = cfg.loss.kl_in == "reward" and progress.beta > 0
        if ref is not None and in_reward and learner.critic is None:  # with a critic: per token
            penalty = learner.kl_reward(rollout, ref, progress.beta)
            gain = linear + ranks.gather(subtract_baseline(penalty, cfg.loss.baseline))
        adv     = groups.advantages(gain, cfg.loss.scale, scored)    # divided by a std, if requested  (P, M)
        clock.phase("update")
        dropped = scores.skipped
        if learner.critic is not None:                               # a critic would take an abstention for reward 0
            dropped = ~scored[groups.own]
        stats   = learner.update(
            rollout, adv[groups.own], step=step, **learning_rates(cfg, step), beta=progress.beta, ref_logprobs=ref,
            dropped=dropped, corrected=ratios, other=self.likelihood(),
        )
        clock.stop()
        shown   = groups.scores(joint.objectives)                    # {name: (P, M)}, one number per completion
        stats |= {"beta": progress.beta}
        stats |= groups.metrics(value, values, shown, joint.weights, linear, adv, scored)
        progress.advance(groups.tokens, prompts=cfg.rollout.prompts, empty=not scored.any())
        stats["rewards/empty_steps"] = float(progress.empty_steps)   # in a row
        if "kl" in stats:                                            # absent if all groups were dropped
            progress.beta = next_beta(cfg, step, progress.beta, stats["kl"])
        completions = int(groups.lengths.sum())
        stats |= self.speed(clock, groups.packed_tokens, completions, passes=cfg.loss.epochs)
        stats |= self.rollouts.metrics(drawn, step, stats)
        log.log(step, groups.with_logged(stats))                     # plus the metrics that rewards logged
        self.watch.look(step, stats)
        self.binary.warn(groups.rewards, ranks)
        why     = partial(groups.without_reward, joint.objectives, cfg.rewards)
        self.watch.check_rewards(step, progress.empty_steps, why)
        if every(cfg.train.samples_every, step):
            texts = self.rollouts.sampler.texts(drawn.batch.prompts, rollout)
            log.table(step, groups.samples(drawn.batch, texts, shown, terms, adv))
    # fmt: on

    def offline_step(self, log: MetricsLogger) -> None:
        """One step of BoN-SFT, DPO, IPO or BoNBoN."""
        from nlgrpo.training import offline

        cfg = self.config
        progress = self.progress
        step = self.progress.step
        samples = self.setup.samples
        assert samples is not None
        clock = Clock(self.ranks.device, step)
        clock.phase("choose")
        chosen = samples.choose(progress.cursor, cfg.rollout.prompts, self.ranks)  # this rank's best samples or pairs
        clock.phase("update")
        stats = offline.update(self.learner, chosen, samples.config, **learning_rates(cfg, step))
        clock.stop()
        tokens = int(stats.pop("tokens"))  # on all ranks
        progress.advance(tokens, prompts=cfg.rollout.prompts)
        log.log(step, stats | self.speed(clock, tokens, passes=cfg.loss.epochs))
        self.watch.look(step, stats)

    def needs_reference(self, step: int) -> bool:
        """Whether the completions of ``step`` are scored under the reference: for the penalty, or to log the KL."""
        loss = self.config.loss
        return loss.has_reference and (loss.beta > 0 or every(loss.log_kl_every, step + 1))

    def likelihood(self) -> Callable[[], None] | None:
        """Return what adds the gradient of loss.jeffreys at this step, on the best of the reference's samples."""
        if self.setup.samples is None:
            return None
        from nlgrpo.training import offline

        chosen = self.setup.samples.choose(self.progress.cursor, self.config.rollout.prompts, self.ranks)
        return partial(offline.add_likelihood, self.learner, chosen)

    # --- before and after the steps -----------------------------------------------------------------------------------

    def print_plan(self, console: Console) -> None:
        from nlgrpo.apps.plan import table

        console.print(table.show(self.setup))
        self.ranks.agree(partial(table.check_memory, self.setup))  # nodes may differ

    def inputs(self) -> RunInputs:
        self.base_digest = policy.base_digest(self.setup)
        return policy.inputs(self.setup)

    @contextmanager
    def loaded(self, stop: StopSignal) -> Iterator[None]:
        self.learner = policy.load_learner(self.setup)
        self.trained = self.learner.trained
        self.optimizer = self.learner.optimizer
        with policy.policy_engine(self.setup, self.learner.model, lambda: stop.received) as self.engine:
            yield

    def evaluate_before(self) -> Samples | None:
        before = None
        if self.setup.evaluation_sets:
            from nlgrpo.training import evaluation

            before = evaluation.of_start(self.setup, self.engine, self.learner.model)
        # Rewards may have drawn random numbers in the evaluation, which a run that resumes does not repeat.
        seed_everything(self.config.train.seed + self.ranks.rank)
        return before

    def begin(self, before: Samples | None, log: MetricsLogger) -> None:
        from nlgrpo.training.binary_rewards import BinaryRewards

        # After a rollback, the samples have another seed.
        seed = self.config.train.seed ^ (self.progress.rollbacks << 48)
        sampler = replace(self.setup.sampler, seed=seed)
        self.rollouts = Rollouts(self.setup, sampler, self.learner, self.engine, self.progress, self.save)
        self.watch.begin(self.progress.step)
        self.binary = BinaryRewards.of(self.config, self.setup.objective.objectives)
        if before is not None:
            from nlgrpo.training.evaluation import Evaluations

            self.evaluations = Evaluations(
                self.setup, before, self.engine, self.learner.model, self.rollouts.settle, self.save, self.export
            )
            self.evaluations.record(0, before, log)

    def evaluate_during(self, log: MetricsLogger) -> bool | None:
        return None if self.evaluations is None else self.evaluations.during(self.progress.step, log)

    def finish(self, before: Samples | None, log: MetricsLogger) -> None:
        """Export the model, evaluate it, and write the report."""
        exported = self.export(self.folder)
        if before is not None and self.evaluations is not None:
            from nlgrpo.training import evaluation

            step = self.progress.step
            after = self.evaluations.evaluate(step, "after training")
            evaluation.write(self.setup, before, after)
            self.evaluations.record(step, after, log)
            if self.ranks.first:
                evaluation.print_changes(self.setup, before, after, log.console)
        best = None if self.evaluations is None else self.evaluations.best()
        if self.ranks.first:
            from nlgrpo.apps.report import end_of_run  # matplotlib takes a second

            end_of_run.conclude(self.config, exported, best, log.console, evaluated=before is not None)

    @phase("export")
    def export(self, folder: Path) -> Path:
        return policy.export(self.setup, self.learner.model, self.base_digest, folder)

    def roll_back(self, diverged: Diverged) -> None:
        """Restore the newest checkpoint from before ``diverged``, and continue with other samples; collective.

        Later checkpoints are removed. Raises ``diverged`` unless divergence.action is "rollback", and UserError if
        there is no such checkpoint, or after too many rollbacks.
        """
        from nlgrpo.runtime import checkpoint

        divergence = self.config.divergence
        if divergence.action != "rollback":
            raise diverged
        rollbacks = self.progress.rollbacks + 1
        self.saver.wait()
        if rollbacks > divergence.rollbacks:
            raise UserError(f"{diverged}; this after {rollbacks - 1} rollbacks (divergence.rollbacks)")
        self.ranks.agree(lambda: checkpoint.drop(self.saver.folder, diverged.onset) if self.ranks.first else None)
        if not self.restore():
            raise UserError(f"{diverged}; there is no checkpoint from before step {diverged.onset + 1}")
        self.progress.rollbacks = rollbacks
        seed_everything(self.config.train.seed + self.ranks.rank + 7919 * rollbacks)
        if self.ranks.first:
            print(f"warning: {diverged}", file=sys.stderr, flush=True)

    # --- what the run is ----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        return self.config.train.steps

    @property
    def parameters(self) -> int:
        return self.setup.shape.parameters

    @property
    def shown(self) -> Sequence[tuple[str, str]]:
        return terminal.SHOWN if self.setup.samples is None else terminal.SHOWN_OFFLINE

    def free_keys(self) -> tuple[str, ...]:
        """Also how rewards are called, which a run that a reward has stopped may need.

        Not the number of steps if the learning rate depends on it, and not that of evaluation prompts that are held
        out of the training data.
        """
        cfg = self.config
        keys = set(run_folder.free_keys(cfg))
        if cfg.optim.schedule != "constant":
            keys.discard("train.steps")
        if not cfg.data.evaluation:
            keys.discard("evaluation.prompts")
        for name in cfg.rewards:
            keys |= {f"rewards.{name}.timeout: ", f"rewards.{name}.process: "}
        return tuple(keys)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 when done or stopped by a signal, 2 after a UserError, 1 after another exception."""
    if arguments is None:  # started by torchrun
        return errors.run(_checked, sys.argv[1:])
    return errors.run(_main, arguments)


def _checked(arguments: Sequence[str]) -> int:
    from nlgrpo.config import command_line  # else `nlgrpo.cli` has checked them

    command_line.check_arguments(arguments)
    return _main(arguments)


def _main(arguments: Sequence[str]) -> int:
    with disk_errors():
        cfg, dry_run = from_arguments(arguments)
        trainer.launch(cfg, PolicyTrainer.build, limits=cfg.limits(), dry_run=dry_run)
    return 0


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as with -m; else nlgrpo/ itself would be on the path
    sys.exit(main())
