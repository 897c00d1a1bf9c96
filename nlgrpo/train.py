"""Train a policy: ``torchrun nlgrpo/train.py [recipe] [file.toml] [--section.key value ...] [--dry-run]``.

Non-linear GRPO (IAMA, Alg. 1 and 2): sample M completions per prompt, score them, replace each reward by the first
variation of its objective at the group's empirical distribution, and take a GRPO step with the result. The offline
algorithms (BoN-SFT, DPO, IPO, BoNBoN) share this loop and replace the step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from transformers.utils.logging import disable_progress_bar

from nlgrpo import errors
from nlgrpo.config import command_line
from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import Config, to_dict
from nlgrpo.engine.backends.base import PolicyEngine
from nlgrpo.objectives.advantages import subtract_baseline
from nlgrpo.objectives.aggregation import combine
from nlgrpo.runtime import cpu_threads, host_memory
from nlgrpo.runtime.atomic_files import disk_errors
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.profiling import StepProfiler, steps_of
from nlgrpo.runtime.seeding import deterministic_algorithms, seed_everything
from nlgrpo.runtime.supervision import process_group
from nlgrpo.runtime.supervision.divergence import Diverged
from nlgrpo.runtime.supervision.stop_signal import StopSignal
from nlgrpo.runtime.timing import Clock, every
from nlgrpo.training.build import build
from nlgrpo.training.global_batch import GlobalBatch
from nlgrpo.training.learner import Learner
from nlgrpo.training.rollouts import Rollouts
from nlgrpo.training.run import Run
from nlgrpo.training.tracking import terminal
from nlgrpo.training.tracking.logger import MetricsLogger
from nlgrpo.training.tracking.run_files import FILE, read_jsonl

if TYPE_CHECKING:
    from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples
    from nlgrpo.training.offline import OfflineSamples


def train(run: Run, learner: Learner, rollouts: Rollouts, stop: StopSignal, log: MetricsLogger) -> bool:
    """Run the training loop from the current step. Returns False if a signal stopped it early, after a checkpoint."""
    cfg, saver = run.config.train, run.saver
    with StepProfiler(steps_of(cfg.profile), run.folder, run.ranks.rank) as profiler:
        for step in range(run.progress.step, cfg.steps):
            profiler.begin(step)
            if run.samples is not None and run.config.loss.offline:
                offline_step(run, run.samples, learner, log)
            else:
                online_step(run, learner, rollouts, log)
            host_memory.release()  # the activations
            saver.poll(run.ranks)
            stopping = run.ranks.any(stop.received) or step + 1 == cfg.steps
            if stopping or every(cfg.checkpoint_every, step + 1):
                run.save(learner, wait=stopping)
            if stopping:
                return step + 1 == cfg.steps
    return True


# fmt: off
def online_step(run: Run, learner: Learner, rollouts: Rollouts, log: MetricsLogger) -> None:
    """One step of GRPO or PPO."""
    cfg, ranks, progress, step = run.config, run.ranks, run.progress, run.progress.step
    clock   = Clock(ranks.device, step)
    clock.phase("generate")
    drawn   = rollouts.draw()                                    # M completions of each prompt, and log-probs
    batch, rollout = drawn.batch, drawn.rollout                  # this rank's share of the P prompts
    clock.phase("reference")
    ref     = learner.reference_logprobs(rollout) if run.needs_reference(step) else None  # (P M, L)
    ratios  = learner.corrected(rollout)                         # policy / sampler, or None: loss.correction = "none"
    clock.phase("rewards")
    scores, calibrated = rollouts.score(drawn, ref)    # {name: (P, M)}, NaN where a reward abstains
    clock.phase("linearize")
    weights = None if ratios is None else ratios.completions     # (P, M), or None: weights of tokens only
    groups  = GlobalBatch.gather(ranks, scores, rollout, calibrated, weights)  # from here on: all P prompts
    values  = groups.values(run.objectives)                      # R_i at every prompt             (m, P)
    terms   = groups.linearize(run.objectives, cfg.loss.baseline)  # dR_i/dpi minus a baseline     (m, P, M)
    value, gradient = run.aggregated(values)                     # g(R_1, .., R_m) and dg/dR_i     (m,)
    linear  = combine(terms, gradient)                           # sum_i dg/dR_i dR_i/dpi          (P, M)
    scored  = groups.has_reward(run.objectives, gradient)        # False where the rewards abstain (P, M)
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
    other = None
    if run.samples is not None:                                  # loss.jeffreys: the best of the reference's samples
        from nlgrpo.training import offline

        chosen = run.samples.choose(progress.cursor, cfg.rollout.prompts, ranks)
        other  = partial(offline.add_likelihood, learner, chosen)
    stats   = learner.update(
        rollout, adv[groups.own], step=step, **run.rates(step),
        beta=progress.beta, ref_logprobs=ref, dropped=dropped, corrected=ratios, other=other,
    )
    clock.stop()
    shown   = groups.scores(run.objectives)                      # {name: (P, M)}, one number per completion
    stats |= {"beta": progress.beta} | groups.metrics(value, values, shown, run.weights(), linear, adv, scored)
    progress.advance(cfg.rollout.prompts, groups.tokens, empty=not scored.any())
    stats["rewards/empty_steps"] = float(progress.empty_steps)   # in a row
    if "kl" in stats:                                            # absent if all groups were dropped
        progress.beta = run.next_beta(step, stats["kl"])
    stats |= run.speed(clock, groups.packed_tokens, int(groups.lengths.sum())) | rollouts.metrics(drawn, step, stats)
    log.log(step, groups.with_logged(stats))                     # plus the metrics that rewards logged
    run.watch(step, stats)
    run.watch_rewards(step, groups.without_reward)
    if every(cfg.train.samples_every, step):
        log.table(step, groups.samples(batch, run.sampler.texts(batch.prompts, rollout), shown, terms, adv))


def offline_step(run: Run, samples: OfflineSamples, learner: Learner, log: MetricsLogger) -> None:
    """One step of BoN-SFT, DPO, IPO or BoNBoN."""
    from nlgrpo.training import offline

    cfg, progress, step = run.config, run.progress, run.progress.step
    clock  = Clock(run.ranks.device, step)
    clock.phase("choose")
    chosen = samples.choose(progress.cursor, cfg.rollout.prompts, run.ranks)  # this rank's best samples or pairs
    clock.phase("update")
    stats  = offline.update(learner, chosen, samples.config, **run.rates(step))
    clock.stop()
    tokens = int(stats.pop("tokens"))                            # on all ranks
    progress.advance(cfg.rollout.prompts, tokens)
    log.log(step, stats | run.speed(clock, tokens))
    run.watch(step, stats)
# fmt: on


def evaluate_before(run: Run, learner: Learner, engine: PolicyEngine) -> EvaluationSamples | None:
    """Evaluate the model before training, or load that evaluation from the run's folder if it is saved there."""
    if run.config.evaluation.prompts == 0:
        return None
    found = run.evaluated().get("before")
    if found is None:
        engine.take(learner.model, 0)
        found = run.evaluate(engine)
        run.write_evaluation(before=found)
    return found


def log_evaluation(run: Run, log: MetricsLogger, sampled: EvaluationSamples | None) -> None:
    """Send an evaluation of the current policy to the trackers, if there are any."""
    if sampled is not None and run.ranks.first and run.config.train.track:
        from nlgrpo.training import evaluation_summary  # SciPy

        log.evaluation(max(0, run.progress.step - 1), evaluation_summary.metrics(sampled, run.config.evaluation.ns))


def finish(
    run: Run, learner: Learner, engine: PolicyEngine, before: EvaluationSamples | None, log: MetricsLogger
) -> None:
    """Export the model, evaluate it, and write the report."""
    exported = run.export(learner)
    if before is not None:
        engine.take(learner.model, run.progress.step)
        after = run.evaluate(engine)
        run.write_evaluation(before=before, after=after)
        log_evaluation(run, log, after)
        if run.ranks.first:
            from nlgrpo.training import evaluation_summary

            beside = evaluation_summary.recorded_for(to_dict(run.config))
            log.console.print(evaluation_summary.before_after_table(before, after, run.config.evaluation.ns, beside))
    if run.ranks.first:
        from nlgrpo.apps.report import hub, report  # matplotlib takes a second

        page = report.write_report(run.folder)
        log.console.print(f"model   {exported}\nreport  {page}", highlight=False, soft_wrap=True)
        if run.config.train.push:
            log.console.print(f"pushed  {hub.push(run.folder, run.config.train.push)}", highlight=False, soft_wrap=True)


def launch(cfg: Config, *, dry_run: bool = False) -> None:
    """Train on the ranks that the launcher started, resuming from the newest checkpoint if there is one."""
    disable_progress_bar()  # transformers shows one for every model it loads
    with (
        deterministic_algorithms(cfg.train.deterministic),  # before CUDA starts
        StopSignal(cfg.train.grace_period) as stop,
        process_group.start(cfg.limits()) as ranks,
    ):
        _launch(cfg, ranks, stop, dry_run)  # frees the model before the process group ends


def _launch(cfg: Config, ranks: Ranks, stop: StopSignal, dry_run: bool) -> None:
    from nlgrpo.apps.plan import table

    console = terminal.output(quiet=not ranks.first)
    seed_everything(cfg.train.seed + ranks.rank)
    if note := cpu_threads.use(cfg.run, ranks, restart=cfg.train.restart):
        console.print(note, highlight=False)
    run = build(cfg, ranks)
    console.print(table.show(run))
    ranks.agree(partial(table.check_memory, run))  # nodes may differ
    if dry_run:
        return
    run.open_folder()
    learner = run.learner()
    with run.engine(learner, lambda: stop.received) as engine:
        before = evaluate_before(run, learner, engine)
        seed_everything(cfg.train.seed + ranks.rank)  # rewards may have drawn in the evaluation, which is not repeated
        if run.restore(learner):
            console.print(f"resuming from step {run.progress.step}")
        elif logged := len(read_jsonl(run.folder / FILE)):
            console.print(f"no checkpoint in {run.folder}: restarting from step 0, discarding {logged} logged steps")
        while (finished := attempt(run, learner, engine, before, stop)) is None:
            console.print(f"rolled back to step {run.progress.step}, rollback {run.progress.rollbacks}")
        if not finished:
            console.print(f"stopped and saved at step {run.progress.step}; run the same command again to resume")


def attempt(
    run: Run, learner: Learner, engine: PolicyEngine, before: EvaluationSamples | None, stop: StopSignal
) -> bool | None:
    """Train from the current step to the end. Returns False if a signal stopped it, None after a rollback."""
    try:
        with run.logger() as log:
            if run.progress.step == 0:
                log_evaluation(run, log, before)
            finished = train(run, learner, Rollouts(run, learner, engine), stop, log)
            if finished:
                finish(run, learner, engine, before, log)
            return finished
    except Diverged as diverged:
        if run.config.divergence.action != "rollback":
            raise
        run.roll_back(learner, diverged)
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 when done or stopped by a signal, 2 after a UserError, 1 after another exception."""
    if arguments is None:  # started by torchrun
        return errors.run(_checked, sys.argv[1:])
    return errors.run(_main, arguments)


def _checked(arguments: Sequence[str]) -> int:
    command_line.check(arguments)
    return _main(arguments)


def _main(arguments: Sequence[str]) -> int:
    with disk_errors():
        cfg, dry_run = from_arguments(arguments)
        launch(cfg, dry_run=dry_run)
    return 0


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as with -m; else nlgrpo/ itself would be on the path
    sys.exit(main())
