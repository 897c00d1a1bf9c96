"""The main job: ``torchrun nlgrpo/train.py [recipe] [file.toml] [--section.key value ...] [--dry-run]``.

Non-linear GRPO (IAMA, Alg. 1 and 2): draw M completions a prompt, score them, replace each reward by the first
variation of its objective at the group's empirical distribution, and take a GRPO step on that. Baselines that draw
nothing (BoN-SFT, DPO, IPO, BoNBoN) take steps of their own in the same loop.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from functools import partial

from rich.console import Console
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import Config
from nlgrpo.data.prompt_dataset import Batch
from nlgrpo.engine.generation import Rollout
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples
from nlgrpo.evaluation import results
from nlgrpo.objectives.advantages import subtract_baseline
from nlgrpo.objectives.aggregation import combine
from nlgrpo.rewards.reward_functions import RewardError, Scores
from nlgrpo.runtime import distributed
from nlgrpo.runtime.seeding import random_state, seed_everything, set_random_state
from nlgrpo.runtime.timing import Clock, StopSignal
from nlgrpo.training import offline, plan
from nlgrpo.training.build import build
from nlgrpo.training.global_batch import GlobalBatch
from nlgrpo.training.learner import Learner
from nlgrpo.training.metrics import FILE, MetricsLogger, read_jsonl
from nlgrpo.training.offline import OfflineSamples
from nlgrpo.training.reference_rewards import CalibratedReward
from nlgrpo.training.run import Run, open_folder


def train(run: Run, learner: Learner, stop: StopSignal, log: MetricsLogger) -> bool:
    """The loop, from where the run stands. Returns False where a signal ended it early, after a checkpoint."""
    cfg = run.config.train
    for step in range(run.progress.step, cfg.steps):
        if run.samples is None:
            online_step(run, learner, log)
        else:
            offline_step(run, run.samples, learner, log)
        stopping = run.ranks.any(stop.received)
        if stopping or step + 1 == cfg.steps or every(cfg.checkpoint_every, step + 1):
            run.save(learner)
        if stopping:
            return step + 1 == cfg.steps
    return True


# fmt: off
def online_step(run: Run, learner: Learner, log: MetricsLogger) -> None:
    """A step of GRPO or PPO."""
    cfg, ranks, progress, step = run.config, run.ranks, run.progress, run.progress.step
    clock   = Clock(ranks.device)
    batch   = run.next_batch()                                   # this rank's share of P prompts
    rollout = ranks.agree(lambda: run.sampler.draw(learner.model, batch))  # x M completions, with their log-probs
    clock.lap("generate")
    ref     = learner.reference_logprobs(rollout)                # (P M, L), None where beta is 0
    clock.lap("reference")
    scores, calibrated = score(run, learner, batch, rollout, ref)      # {name: (P, M)}, NaN where a reward abstains
    clock.lap("rewards")
    groups  = GlobalBatch.gather(ranks, scores, rollout, calibrated)        # from here on all ranks, all P
    values  = groups.values(run.objectives)                      # R_i at every prompt             (m, P)
    each    = groups.linearize(run.objectives, cfg.loss.baseline)  # dR_i/dpi less a baseline      (m, P, M)
    value, gradient = run.aggregated(values)                     # g(R_1, .., R_m) and dg/dR_i     (m,)
    linear  = combine(each, gradient)                            # sum_i dg/dR_i dR_i/dpi          (P, M)
    if ref is not None and cfg.loss.kl_in == "reward" and learner.critic is None:  # with one, token by token
        penalty = learner.kl_reward(rollout, ref, progress.beta)
        linear += ranks.gather(subtract_baseline(penalty, cfg.loss.baseline))
    adv     = groups.advantages(linear, cfg.loss.scale)          # divided, where that is wanted   (P, M)
    clock.lap("linearize")
    dropped = scores.skipped
    if learner.critic is not None:                               # which would take an abstention for a reward of 0
        dropped = ~groups.has_reward(run.objectives, run.weights())[groups.own]
    stats   = learner.update(
        rollout, adv[groups.own], step=step, **run.rates(step),
        beta=progress.beta, ref_logprobs=ref, dropped=dropped,
    )
    clock.lap("update")
    shown   = groups.scores(run.objectives)                      # {name: (P, M)}, kernels as numbers too
    stats |= {"beta": progress.beta} | groups.metrics(value, values, shown, run.weights(), adv)
    progress.advance(cfg.rollout.prompts, groups.tokens)
    if "kl" in stats:                                            # not where all groups were dropped
        progress.beta = run.next_beta(step, stats["kl"])
    stats |= run.speed(clock, groups.tokens, int(groups.lengths.sum()))
    log.log(step, groups.with_logged(stats))                   # with what rewards log
    if every(cfg.train.samples_every, step):
        log.table(step, groups.samples(batch, run.sampler.texts(batch.prompts, rollout), shown, each, adv))


def offline_step(run: Run, samples: OfflineSamples, learner: Learner, log: MetricsLogger) -> None:
    """A step of BoN-SFT, DPO, IPO or BoNBoN."""
    cfg, progress, step = run.config, run.progress, run.progress.step
    clock  = Clock(run.ranks.device)
    chosen = samples.choose(progress.cursor, cfg.rollout.prompts, run.ranks)  # this rank's winners or pairs
    clock.lap("choose")
    stats  = offline.update(learner, chosen, cfg.offline, **run.rates(step))
    clock.lap("update")
    tokens = int(stats.pop("tokens"))                            # of all ranks
    progress.advance(cfg.rollout.prompts, tokens)
    log.log(step, stats | run.speed(clock, tokens))
# fmt: on


def every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


def score(
    run: Run, learner: Learner, batch: Batch, rollout: Rollout, ref: Tensor | None
) -> tuple[Scores, dict[str, CalibratedReward]]:
    """The rewards of this rank's completions, and those that are held against the reference's samples.

    Where one fails on any rank, all save the state before it and stop.
    """
    generators = random_state()
    try:
        scores = _scored(run, batch, rollout)
        return scores, run.references.calibrate(scores.values, batch, rollout, ref, learner.reference)
    except RewardError:
        set_random_state(generators)
        run.save(learner)
        raise


def _scored(run: Run, batch: Batch, rollout: Rollout) -> Scores:
    """Collective; raises RewardError on all ranks where a reward failed on one."""
    step, total, first = run.progress.step, run.config.train.steps, batch.index[0] - run.progress.cursor
    score = partial(run.sampler.score, batch, rollout, step=step, total_steps=total, first_prompt=first)
    return run.ranks.agree(score, RewardError)


def evaluate_before(run: Run, learner: Learner) -> EvaluationSamples | None:
    """What the untrained model is worth; taken from the folder where an earlier start of the run has measured it."""
    if run.config.evaluation.prompts == 0:
        return None
    before = run.evaluated().get("before")
    if before is None:
        before = run.evaluate(learner.model)
        run.write_evaluation(before=before)
    return before


def finish(run: Run, learner: Learner, before: EvaluationSamples | None, console: Console) -> None:
    """Export the model, evaluate it, and write the report."""
    exported = run.export(learner)
    if before is not None:
        after = run.evaluate(learner.model)
        run.write_evaluation(before=before, after=after)
        if run.ranks.first:
            console.print(results.before_after_table(before, after, run.config.evaluation.ns))
    if run.ranks.first:
        from nlgrpo.evaluation import report  # with matplotlib, which would add a second to the start of every run

        page = report.write_report(run.folder)
        console.print(f"model   {exported}\nreport  {page}", highlight=False, soft_wrap=True)


def launch(cfg: Config, *, dry_run: bool = False) -> None:
    """Run a configuration on the ranks that the launcher started, from its newest checkpoint if there is one."""
    stop = StopSignal()
    disable_progress_bar()  # transformers' own, of every reward model that is read
    with distributed.start() as ranks:
        _launch(cfg, ranks, stop, dry_run)  # whose model, and with it the group's handles, is gone on return


def _launch(cfg: Config, ranks: distributed.Ranks, stop: StopSignal, dry_run: bool) -> None:
    console = Console(quiet=not ranks.first)
    seed_everything(cfg.train.seed + ranks.rank)
    run = build(cfg, ranks)
    console.print(plan.show(run))
    if dry_run:
        return
    open_folder(run)
    learner = run.learner()
    before = evaluate_before(run, learner)
    if run.restore(learner):
        console.print(f"going on from step {run.progress.step}")
    elif logged := len(read_jsonl(run.folder / FILE)):
        console.print(f"begins anew, without the {logged} steps logged: no checkpoint in {run.folder / 'checkpoints'}")
    with run.logger() as log:
        finished = train(run, learner, stop, log)
    if finished:
        finish(run, learner, before, console)
    else:
        console.print(f"stopped and saved at step {run.progress.step}; the same command goes on from there")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 when done, or saved on SIGTERM; 1, with a message, for what the user can mend."""
    try:
        cfg, dry_run = from_arguments(sys.argv[1:] if arguments is None else arguments)
        launch(cfg, dry_run=dry_run)
    except (ValueError, RewardError) as error:
        if error.__cause__ is not None and isinstance(error, RewardError):
            traceback.print_exception(error.__cause__)
        if os.environ.get("RANK", "0") == "0":  # all ranks have the message
            print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as with -m: the package's own folder would show its modules by their bare names
    sys.exit(main())
