"""The evaluations of a run: before, during and after training, on the same prompts, and their files in its folder.

evaluation.json           samples of the main set before and after training
evaluation/SET.json       those of the other sets, and SET.digest, by which a run that resumes knows them
evaluations.jsonl         the numbers of each evaluation with intervals, a line each
best/                     the best policy, with train.keep_best
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from nlgrpo.config.schema import to_dict
from nlgrpo.data.conversations import plain_text
from nlgrpo.engine.backends.base import Engine, PolicyEngine
from nlgrpo.engine.rollouts import evaluation_samples
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples
from nlgrpo.errors import UserError
from nlgrpo.model.decoder import Decoder
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.progress import QUIET, progress
from nlgrpo.runtime.seeding import random_state, set_random_state
from nlgrpo.runtime.supervision.phases import phase
from nlgrpo.runtime.timing import every
from nlgrpo.training import best_model, evaluation_summary, evaluation_values
from nlgrpo.training.best_model import Best, Selection
from nlgrpo.training.build import Setup
from nlgrpo.training.evaluation_sets import MAIN, EvaluationSet
from nlgrpo.training.evaluation_summary import Estimate
from nlgrpo.training.tracking import run_files
from nlgrpo.training.tracking.terminal import output

if TYPE_CHECKING:
    from nlgrpo.training.tracking.logger import MetricsLogger

FOLDER = "evaluation"  # of the samples of the sets but the main one
Samples = dict[str, EvaluationSamples]  # of each set
Values = dict[str, Estimate]  # of all sets, each with the name of its set in front


@phase("evaluation")
def evaluate(setup: Setup, engine: Engine, when: str) -> Samples:
    """Sample and score completions of all evaluation sets; collective, the same on all ranks.

    The seed is one that training never uses. ``when``: such as "before training", which the first rank prints.
    """
    return {name: _sample(setup, one, engine, when) for name, one in setup.evaluation_sets.items()}


def _sample(setup: Setup, chosen: EvaluationSet, engine: Engine, when: str) -> EvaluationSamples:
    ranks = setup.ranks
    console = output(quiet=not ranks.first)
    prompts = len(chosen.batch.ids)
    samples = chosen.sampler.samples
    title = f"{chosen.name}: " if chosen.name else ""
    console.print(f"{title}evaluating {prompts} prompts x {samples} samples {when}", highlight=False)
    total = prompts * samples
    shown = QUIET if chosen.sampler.environment is not None else console  # conversations are not counted
    rewards = [reward.name for reward in chosen.sampler.rewards]
    joint = setup.objective
    with progress("completions sampled", total, shown) as show:
        sampler = replace(chosen.sampler, on_progress=lambda done: show(min(done * ranks.world, total)))
        sampled = evaluation_samples.evaluate(
            sampler,
            engine,
            chosen.batch,
            ranks,
            {name: joint.objectives[name] for name in rewards},
            {name: joint.weights[name] for name in rewards},
        )
    return replace(sampled, left_out=chosen.left_out)


def values_of(setup: Setup, sampled: Samples, start: Samples) -> tuple[Values, dict[str, float]]:
    """Return the numbers of an evaluation, and as trackers get them. ``start``: of the initial policy."""
    values: Values = {}
    logged: dict[str, float] = {}
    for name, samples in sampled.items():
        chosen = setup.evaluation_sets[name]
        found = evaluation_values.values_of(
            samples, start[name], setup.objective, chosen.ns, chosen.procedures, chosen.gold
        )
        values |= {chosen.metric(key): estimate for key, estimate in found.items()}
        for key, number in evaluation_values.metrics(found, samples).items():
            logged[f"eval_{chosen.metric(key.removeprefix('eval_'))}"] = number
    return values, logged


# --- files ------------------------------------------------------------------------------------------------------------


def file_of(name: str) -> str:
    """File with the samples of a set."""
    return evaluation_samples.EVALUATION_FILE if name == MAIN else f"{FOLDER}/{name}.json"


def saved_before(setup: Setup) -> Samples:
    """Load the evaluations before training from the run's folder: of the sets that are as they were then."""
    run = setup.config.run
    found = {}
    for name, chosen in setup.evaluation_sets.items():
        path = run / file_of(name)
        if not path.is_file():
            continue
        samples = evaluation_samples.read_samples(path).get("before")
        if samples is None:
            continue
        shown = [plain_text(prompt) for prompt in chosen.batch.prompts]
        same = tuple(samples.lengths.shape) == (len(chosen.batch.ids), chosen.sampler.samples)
        same = same and set(samples.rewards) == {reward.name for reward in chosen.sampler.rewards}
        same = same and samples.prompts == shown[: len(samples.prompts)]
        if same and (name == MAIN or _read_digest(run, name) == chosen.digest):
            found[name] = samples
    return found


def _read_digest(run: Path, name: str) -> str:
    path = run / FOLDER / f"{name}.digest"
    return path.read_text("utf-8").strip() if path.is_file() else ""


def of_start(setup: Setup, engine: PolicyEngine, model: Decoder) -> Samples:
    """Evaluate the initial policy, or load that evaluation from the run's folder; collective.

    Sets that are new, or have other prompts, rewards or sampling than before, are evaluated. What is known of other
    versions of them is forgotten.
    """
    before = saved_before(setup)
    missing = {name: one for name, one in setup.evaluation_sets.items() if name not in before}
    if not missing:
        return before
    engine.take(model, 0)
    before |= {name: _sample(setup, one, engine, "before training") for name, one in missing.items()}
    before = {name: before[name] for name in setup.evaluation_sets}
    if setup.ranks.first:
        _forget(setup, list(missing))
    write(setup, before)
    return before


def _forget(setup: Setup, names: Sequence[str]) -> None:
    """Remove the numbers of these sets from earlier evaluations, and the record of a policy that is best by one."""
    run = setup.config.run
    rows = run_files.read_jsonl(run / run_files.EVALUATIONS_FILE)
    kept = []
    for row in rows:
        values = {name: x for name, x in row["values"].items() if _set_of(setup, name) not in names}
        kept.append(row | {"values": values})
    if kept != rows:
        changed = ", ".join(name or "the evaluation prompts" for name in names)
        text = f"note: earlier evaluations of {changed} are forgotten, as they had other prompts, rewards or sampling"
        print(text, file=sys.stderr, flush=True)
        run_files.write(run / run_files.EVALUATIONS_FILE, kept)
    selection = Selection.of(setup.config.train.keep_best)
    if kept and _set_of(setup, selection.metric) in names:
        atomic_files.remove(run / best_model.FOLDER / best_model.RECORD)


def _set_of(setup: Setup, metric: str) -> str:
    """Name of the set of a metric."""
    named = [name for name in setup.evaluation_sets if name and metric.startswith(f"{name}/")]
    return named[0] if named else MAIN


def write(setup: Setup, before: Samples, after: Samples | None = None) -> None:
    """Write the samples of all sets into the folder of the run, on the first rank."""
    if not setup.ranks.first:
        return
    for name, samples in before.items():
        models = {"before": samples} | ({} if after is None else {"after": after[name]})
        path = setup.config.run / file_of(name)
        with atomic_files.into(path.parent):
            path.parent.mkdir(exist_ok=True)
        evaluation_samples.write_samples(path, models)
        if name != MAIN:
            atomic_files.atomic_write(path.parent / f"{name}.digest", setup.evaluation_sets[name].digest + "\n")


def print_changes(setup: Setup, before: Samples, after: Samples, console: Console) -> None:
    """Print a table of each set, before and after training, and a line of what changed."""
    for name, chosen in setup.evaluation_sets.items():
        recorded = evaluation_summary.recorded_for(to_dict(setup.config)) if name == MAIN else None
        if name != MAIN:
            console.print(f"evaluation set {name}", highlight=False)
        console.print(evaluation_summary.before_after_table(before[name], after[name], chosen.ns, recorded))
        changed = evaluation_summary.what_changed(before[name], after[name], chosen.ns)
        console.print(f"changed {changed}", highlight=False, soft_wrap=True)


# --- during training --------------------------------------------------------------------------------------------------


@dataclass
class Evaluations:
    """Evaluates a run while it trains, logs what it finds, and exports the best policy (train.keep_best)."""

    setup: Setup
    start: Samples
    """Of the initial policy."""
    engine: PolicyEngine
    model: Decoder
    """The policy."""
    settle: Callable[[], None]
    """Waits until the engine and the rewards are free."""
    save: Callable[[], None]
    """Saves a checkpoint; collective."""
    export: Callable[[Path], Path]
    """Writes the current policy into a folder; collective."""
    last: tuple[int, Samples] | None = None
    """Of the last evaluation, with its step."""

    def during(self, step: int, log: MetricsLogger) -> bool | None:
        """Evaluate the policy after ``step`` steps if it is time to, log it, and print what has changed; collective.

        Returns whether evaluations have stopped improving (evaluation.patience); None: it was not time to. A UserError
        is raised on all ranks, after a checkpoint.
        """
        if step == 0 or not every(self.setup.config.evaluation.every, step):
            return None
        self.settle()
        try:
            sampled = self.evaluate(step, f"after step {step}")
            self.record(step, sampled, log)
        except UserError:
            self.save()
            raise
        if self.setup.ranks.first:
            self.show(sampled, log.console)
        return self.exhausted()

    def evaluate(self, step: int, when: str) -> Samples:
        """Evaluate the policy after ``step`` steps; collective. The generators of random numbers are then as before."""
        if self.last is not None and self.last[0] == step:
            return self.last[1]
        generators = random_state()
        try:
            self.engine.take(self.model, step)
            sampled = evaluate(self.setup, self.engine, when)
            self.engine.sleep()
        finally:
            set_random_state(generators)
        self.last = step, sampled
        return sampled

    def record(self, step: int, sampled: Samples, log: MetricsLogger) -> None:
        """Log an evaluation, and export the policy if it is the best; collective. The first one is of step 0.

        Raises UserError on all ranks if train.keep_best has no value; the evaluation is then not logged.
        """
        ranks = self.setup.ranks
        best = ranks.agree(lambda: self._log(step, sampled, log) if ranks.first else None)
        if ranks.any(best is not None):
            run = self.setup.config.run
            self.export(run / best_model.UNFINISHED)
            ranks.agree(lambda: best_model.publish(run, run / best_model.UNFINISHED, best) if best else None)

    def _log(self, step: int, sampled: Samples, log: MetricsLogger) -> Best | None:
        """Log an evaluation, unless it has been. Returns what it is if its policy is to be exported."""
        run = self.setup.config.run
        if step == 0:
            best_model.recover(run)
        values, metrics = values_of(self.setup, sampled, self.start)
        numbers = {name: (x.value, x.low, x.high) for name, x in values.items()}
        keep_best = self.setup.config.train.keep_best
        selection = Selection.of(keep_best)
        value = math.nan
        if keep_best:
            value = selection.value(numbers, f"after step {step}" if step else "before training")
        known = {row["step"]: row for row in self.rows()}
        if step not in known:
            log.evaluation(step, numbers, metrics)
        elif known[step]["values"].keys() != numbers.keys():  # a run that resumes measures something else
            known[step]["values"] = numbers
            run_files.write(run / run_files.EVALUATIONS_FILE, list(known.values()))
        if not keep_best or step == 0 or not selection.better(value, self._best().value):
            return None
        return Best(step, keep_best, value)

    def show(self, sampled: Samples, console: Console) -> None:
        """Print what has changed since the initial policy."""
        for name, chosen in self.setup.evaluation_sets.items():
            changed = evaluation_summary.what_changed(self.start[name], sampled[name], chosen.ns)
            title = f"{name}: " if name else ""
            console.print(f"{title}changed {changed}", highlight=False, soft_wrap=True)

    def rows(self) -> list[dict[str, Any]]:
        rows = run_files.read_jsonl(self.setup.config.run / run_files.EVALUATIONS_FILE)
        return sorted(rows, key=lambda row: row["step"])

    def best(self) -> Best | None:
        """Return what is known of the best policy, None without train.keep_best; the same on all ranks."""
        if not self.setup.config.train.keep_best:
            return None
        found: Best = self.setup.ranks.gather_objects(self._best() if self.setup.ranks.first else None)[0]
        return found

    def _best(self) -> Best:
        """The policy in RUN/best, or the initial one."""
        keep_best = self.setup.config.train.keep_best
        exported = best_model.read_exported(self.setup.config.run, keep_best)
        if exported is not None:
            return exported
        return Best(0, keep_best, Selection.of(keep_best).value(self.rows()[0]["values"], "before training"))

    def exhausted(self) -> bool:
        """Whether evaluation.patience evaluations have brought nothing better; the same on all ranks."""
        best = self.best()
        if best is None:
            return False
        patience = self.setup.config.evaluation.patience
        return self.setup.ranks.any(self.setup.ranks.first and best_model.exhausted(self.rows(), best, patience))
