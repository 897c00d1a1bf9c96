"""The evaluation sets of a run: the evaluation prompts of [data], and those of [evaluation.sets.NAME]."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nlgrpo.config.schema import Config
from nlgrpo.data.prompt_dataset import Batch, Prompts, PromptSet, read_all
from nlgrpo.engine.rollouts.inputs import reader_of, sampling_of
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.errors import UserError
from nlgrpo.model.architectures import Shape
from nlgrpo.rewards import reward_functions
from nlgrpo.training.evaluation_entries import expanded

if TYPE_CHECKING:
    from nlgrpo.config.evaluation_sets import SetConfig

MAIN = ""  # name of the set of the evaluation prompts of [data]
SEED = 1 << 62  # the seeds of evaluations and of training differ in this bit


@dataclass(frozen=True)
class EvaluationSet:
    """Prompts, how many completions of each are sampled and how, and what is measured on them."""

    name: str
    prompts: PromptSet
    batch: Batch
    """Those that are evaluated."""
    sampler: Sampler
    ns: tuple[int, ...]
    procedures: tuple[str, ...]
    gold: tuple[str, ...]

    @property
    def longest(self) -> int:
        """Largest number of tokens of a prompt with its completion."""
        return self.prompts.longest + self.sampler.sampling.max_new_tokens

    @property
    def digest(self) -> str:
        """Digest of what is sampled: prompts, sampling and rewards by name."""
        rewards = [reward.name for reward in self.sampler.rewards]
        sampled = [self.batch.ids, self.sampler.samples, self.sampler.seed, repr(self.sampler.sampling), rewards]
        return hashlib.sha256(json.dumps(sampled).encode()).hexdigest()

    @property
    def left_out(self) -> dict[str, int]:
        """Numbers of prompts of the source that could not be evaluated, by reason."""
        return self.prompts.left_out

    def metric(self, name: str) -> str:
        """Name of a metric of this set: "aime/objective/solved"; of the main set "objective/solved"."""
        return f"{self.name}/{name}" if self.name else name


def evaluation_sets(
    cfg: Config, source: Path, shape: Shape, prompts: Prompts, held_out: PromptSet, sampler: Sampler, world: int
) -> dict[str, EvaluationSet]:
    """Load the sets of a run, {} without evaluation. ``sampler``: that of training; ``world``: number of ranks.

    Raises UserError for a set that is empty, cannot be scored, or has prompts that are trained on.
    """
    found = {}
    if cfg.evaluation.prompts > 0:
        found[MAIN] = _set(MAIN, cfg, held_out, sampler, list(cfg.rewards), shape, world)
    for name in cfg.evaluation.sets:
        from nlgrpo.config.evaluation_sets import SetConfig

        own = SetConfig.of(cfg, name)
        try:
            chosen = _prompts(own, shape, prompts, sampler) if own.has_source else held_out
            sampling = sampling_of(own.config, sampler.tokenizer, source)
            of_set = dataclasses.replace(sampler, sampling=sampling)
            found[name] = _set(name, own.config, chosen, of_set, own.rewards, shape, world)
        except UserError as error:
            raise UserError(f"evaluation.sets.{name}: {error}") from error
    return found


def _prompts(own: SetConfig, shape: Shape, trained: Prompts, sampler: Sampler) -> PromptSet:
    """Read the prompts of a set with a source of its own, in the same order for every train.seed."""
    data = own.config.data
    found = read_all(reader_of(own.config, data, sampler.tokenizer, shape), shuffle=data.shuffle)
    rewards = [reward for reward in sampler.rewards if reward.name in own.rewards]
    reward_functions.check_columns(rewards, found.names)
    reward_functions.check_rows(rewards, found.prompts, found.rows)
    in_training = {tuple(ids) for ids in trained.all().ids}  # those of a stream are not known
    count = sum(tuple(ids) in in_training for ids in found.ids)
    if count and not own.shared:
        raise UserError(
            f"{count:,} of {len(found):,} prompts are trained on too; remove them from one of both, make this set "
            "data.evaluation, whose prompts are left out of the training data, or set shared = true"
        )
    return found


def _set(
    name: str, cfg: Config, prompts: PromptSet, sampler: Sampler, rewards: Sequence[str], shape: Shape, world: int
) -> EvaluationSet:
    """Make a set of ``cfg.evaluation.prompts`` of the prompts."""
    evaluation = cfg.evaluation
    count = min(evaluation.prompts, len(prompts))
    if count < world:
        raise UserError(f"there are {count} evaluation prompts; allowed is >= {world}, one per rank")
    if name and prompts.longest + sampler.sampling.max_new_tokens > shape.context:
        raise UserError(
            f"prompts of up to {prompts.longest} tokens and max_new_tokens = {sampler.sampling.max_new_tokens} exceed "
            f"the context of {shape.context}"
        )
    procedures = expanded(
        evaluation.procedures, evaluation.ns, evaluation.samples, "procedures:", "the number of samples"
    )
    own = dataclasses.replace(
        sampler,
        samples=evaluation.samples,
        seed=cfg.train.seed ^ SEED,
        rewards=[reward for reward in sampler.rewards if reward.name in rewards],
    )
    return EvaluationSet(
        name, prompts, prompts.take(0, count), own, evaluation.ns, tuple(procedures), tuple(evaluation.gold)
    )
