"""The evaluation of a policy before and after training: the same prompts, as many samples, and the folder's file."""

from __future__ import annotations

from dataclasses import replace

from nlgrpo.data.conversations import plain_text
from nlgrpo.data.prompt_dataset import Batch
from nlgrpo.engine.backends.base import Engine
from nlgrpo.engine.rollouts import evaluation_samples
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples
from nlgrpo.runtime.progress import QUIET, progress
from nlgrpo.runtime.supervision.phases import phase
from nlgrpo.training.build import Setup
from nlgrpo.training.tracking.terminal import output


@phase("evaluation")
def evaluate(setup: Setup, engine: Engine, when: str) -> EvaluationSamples:
    """Sample and score completions of the evaluation prompts; collective, the same on all ranks.

    The seed is one that training never uses. ``when``: "before" or "after" training, which the first rank prints.
    """
    cfg = setup.config
    ranks = setup.ranks
    prompts = min(cfg.evaluation.prompts, len(setup.held_out))
    console = output(quiet=not ranks.first)
    console.print(f"evaluating {prompts} prompts x {cfg.evaluation.samples} samples {when} training", highlight=False)
    objective = setup.objective
    total = prompts * cfg.evaluation.samples
    shown = QUIET if setup.sampler.environment is not None else console  # conversations are not counted
    with progress("completions sampled", total, shown) as show:
        sampler = replace(
            setup.sampler,
            samples=cfg.evaluation.samples,
            seed=cfg.train.seed ^ (1 << 62),
            on_progress=lambda done: show(min(done * ranks.world, total)),
        )
        sampled = evaluation_samples.evaluate(
            sampler, engine, _prompts(setup), ranks, objective.objectives, objective.weights
        )
    return replace(sampled, left_out=setup.held_out.left_out)


def saved_before(setup: Setup) -> EvaluationSamples | None:
    """Load the evaluation before training from the run's folder, if it has the same prompts and number of samples."""
    if not (setup.config.run / evaluation_samples.EVALUATION_FILE).is_file():
        return None
    found = evaluation_samples.read_evaluation(setup.config.run).get("before")
    if found is None:
        return None
    batch = _prompts(setup)
    shown = [plain_text(prompt) for prompt in batch.prompts]
    same = tuple(found.lengths.shape) == (len(batch.ids), setup.config.evaluation.samples)
    return found if same and found.prompts == shown[: len(found.prompts)] else None


def write(setup: Setup, **models: EvaluationSamples) -> None:
    """Write ``evaluation.json`` into the folder of the run, on the first rank."""
    if setup.ranks.first:
        evaluation_samples.write_evaluation(setup.config.run, **models)


def _prompts(setup: Setup) -> Batch:
    return setup.held_out.take(0, min(setup.config.evaluation.prompts, len(setup.held_out)))
