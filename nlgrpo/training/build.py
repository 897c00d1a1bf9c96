"""What a run of a policy is made of, from its configuration: tokenizer, data, rewards, objectives. No weights yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from nlgrpo.config import validate
from nlgrpo.config.schema import Config
from nlgrpo.data.prompt_dataset import Prompts, PromptSet
from nlgrpo.engine.rollouts.inputs import find_columns, load_environment, load_prompts, load_rewards, sampling_of
from nlgrpo.engine.rollouts.sampler import ENVIRONMENT, Sampler
from nlgrpo.model import decoder, hf_weights
from nlgrpo.model.architectures import Shape, check_causal, shape_of
from nlgrpo.model.lora import LoraConfig
from nlgrpo.model.tokenizer import load_tokenizer
from nlgrpo.objectives import aggregation
from nlgrpo.rewards import reward_functions
from nlgrpo.runtime.device import compute_dtype
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.global_batch import JointObjective

if TYPE_CHECKING:
    from nlgrpo.engine.rollouts.collect import Provenance
    from nlgrpo.training.evaluation_sets import EvaluationSet
    from nlgrpo.training.offline import OfflineSamples
    from nlgrpo.training.reference_rewards import ReferenceRewards


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run of a policy before its weights are loaded."""

    config: Config
    ranks: Ranks
    source: Path
    """Directory of the initial model."""
    shape: Shape
    tokenizer: PreTrainedTokenizerBase
    compute: torch.dtype
    adapter: LoraConfig | None
    """Settings of the policy's adapters."""
    prompts: Prompts
    held_out: PromptSet
    """Prompts of the evaluation."""
    evaluation_sets: dict[str, EvaluationSet]
    """What is evaluated, by name; the main set is "". Empty: nothing."""
    sampler: Sampler
    objective: JointObjective
    references: ReferenceRewards | None
    """Samples of the reference, among which rewards with a transform are ranked."""
    samples: OfflineSamples | None
    """Samples of the reference that an offline algorithm, or loss.jeffreys, trains on."""

    @property
    def longest(self) -> int:
        """Largest number of tokens of a prompt with its completion, without the sets of [evaluation.sets]."""
        environment = self.config.environment
        if environment.id:
            return min(self.shape.context, environment.max_tokens or self.shape.context)
        return max(self.prompts.longest, self.held_out.longest) + self.config.rollout.max_new_tokens


def build_setup(cfg: Config, ranks: Ranks) -> Setup:
    """Load tokenizer, data and rewards. Raises UserError for a configuration that cannot be run."""
    validate.check_config(cfg, world=ranks.world)
    source = hf_weights.locate(cfg.model.path)
    model_config = decoder.read_config(source)
    check_causal(model_config)
    shape = shape_of(model_config)
    tokenizer = load_tokenizer(source)
    compute = compute_dtype(cfg.model.dtype, ranks.device)
    environment = load_environment(cfg, tokenizer, shape, ranks)
    prompts, held_out = load_prompts(cfg, tokenizer, shape, environment)
    objectives, rewards = load_rewards(cfg, ranks.device)
    find_columns(cfg, rewards, prompts, held_out)
    for scored in (*([] if cfg.loss.offline else [prompts]), *([held_out] if cfg.evaluation.prompts else [])):
        reward_functions.check_columns(rewards, [*scored.names, *([ENVIRONMENT] if environment else [])])
        examples = scored.all()  # those of a stream are not known yet
        reward_functions.check_rows(rewards, examples.prompts, examples.rows)
    sampling = sampling_of(cfg, tokenizer, source)
    sampler = Sampler(
        tokenizer, sampling, cfg.rollout.samples, cfg.rollout.max_rows, cfg.train.seed, rewards, environment
    )
    sets: dict[str, EvaluationSet] = {}
    if cfg.evaluation.prompts or cfg.evaluation.sets:
        from nlgrpo.training.evaluation_sets import evaluation_sets

        sets = evaluation_sets(cfg, source, shape, prompts, held_out, sampler, ranks.world)
    weights = {name: reward.weight for name, reward in cfg.rewards.items()}
    objective = JointObjective(
        objectives=objectives,
        weights=weights,
        aggregate=aggregation.parse_aggregate(cfg.loss.aggregate, list(weights.values())),
        at=cfg.loss.aggregate_at,
        memory=cfg.loss.aggregate_memory,
    )

    def origin() -> Provenance:
        """The model and the sampling that rollouts of the reference must have."""
        from nlgrpo.engine.rollouts.collect import Provenance

        return Provenance.of(source, tokenizer, compute, sampling)

    known = prompts.all()
    samples = None
    if cfg.loss.offline or cfg.loss.jeffreys:
        from nlgrpo.training import offline

        samples = offline.load_samples(cfg, rewards, objectives, known, origin)
    adapter = None
    if cfg.lora.enabled:
        from nlgrpo.model import adapters

        adapter = adapters.resolve(cfg.lora, shape)
    references = None
    if any(reward.transform for reward in cfg.rewards.values()) and not cfg.loss.offline:
        from nlgrpo.training import reference_rewards

        references = reference_rewards.make_reference_rewards(cfg, sampler, objectives, known, origin, ranks)
    setup = Setup(
        config=cfg,
        ranks=ranks,
        source=source,
        shape=shape,
        tokenizer=tokenizer,
        compute=compute,
        adapter=adapter,
        prompts=prompts if samples is None else samples.prompts,
        held_out=held_out,
        evaluation_sets=sets,
        sampler=sampler,
        objective=objective,
        references=references,
        samples=samples,
    )
    if cfg.loss.algorithm == "ppo":
        from nlgrpo.training import critic

        critic.check_critic(cfg, shape, longest=setup.longest)
    return setup
