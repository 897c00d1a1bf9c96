"""Builds a run from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nlgrpo.config import validate
from nlgrpo.config.schema import Config
from nlgrpo.engine.rollouts.inputs import find_columns, load_environment, load_prompts, load_rewards, sampling_of
from nlgrpo.engine.rollouts.sampler import ENVIRONMENT, Sampler
from nlgrpo.model import decoder, hf_weights
from nlgrpo.model.architectures import check_causal, shape_of
from nlgrpo.model.tokenizer import load_tokenizer
from nlgrpo.objectives import aggregation
from nlgrpo.rewards import reward_functions
from nlgrpo.runtime.device import compute_dtype
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.run import Progress, Run

if TYPE_CHECKING:
    from nlgrpo.engine.rollouts.collect import Provenance


def build(cfg: Config, ranks: Ranks) -> Run:
    """Build a run: load the tokenizer, data and rewards. `Run.learner` loads the weights later.

    Raises UserError for a configuration that cannot be run.
    """
    validate.check(cfg, world=ranks.world)
    source = hf_weights.locate(cfg.model.path)
    model_config = decoder.read_config(source)
    check_causal(model_config)
    shape = shape_of(model_config)
    tokenizer = load_tokenizer(source)
    environment = load_environment(cfg, tokenizer, shape, ranks)
    prompts, held_out = load_prompts(cfg, tokenizer, shape, environment)
    objectives, rewards = load_rewards(cfg, ranks.device)
    find_columns(cfg, rewards, prompts, held_out)
    for scored in (*([] if cfg.loss.offline else [prompts]), *([held_out] if cfg.evaluation.prompts else [])):
        reward_functions.check_columns(rewards, [*scored.names, *([ENVIRONMENT] if environment else [])])
        examples = scored.all()  # those of a stream are not known yet
        reward_functions.check_rows(rewards, examples.prompts, examples.rows)
    sampling = sampling_of(cfg, tokenizer, source)
    compute = compute_dtype(cfg.model.dtype, ranks.device)
    rows, seed = cfg.rollout.max_rows, cfg.train.seed
    sampler = Sampler(tokenizer, sampling, cfg.rollout.samples, rows, seed, rewards, environment)

    def origin() -> Provenance:
        """The model and the sampling that rollouts of the reference must have."""
        from nlgrpo.engine.rollouts.collect import Provenance

        return Provenance.of(source, tokenizer, compute, sampling)

    known = prompts.all()
    samples = None
    if cfg.loss.offline or cfg.loss.jeffreys:
        from nlgrpo.training import offline

        samples = offline.make(cfg, rewards, objectives, known, origin)
    adapter = None
    if cfg.lora.enabled:
        from nlgrpo.model import adapters

        adapter = adapters.resolve(cfg.lora, shape)
    references = None
    if any(reward.transform for reward in cfg.rewards.values()) and not cfg.loss.offline:
        from nlgrpo.training import reference_rewards

        references = reference_rewards.make(cfg, sampler, objectives, known, origin, ranks)
    run = Run(
        config=cfg,
        ranks=ranks,
        tokenizer=tokenizer,
        shape=shape,
        source=source,
        prompts=prompts if samples is None else samples.prompts,
        held_out=held_out,
        sampler=sampler,
        objectives=objectives,
        aggregate=aggregation.parse(cfg.loss.aggregate, [r.weight for r in cfg.rewards.values()]),
        references=references,
        samples=samples,
        compute=compute,
        adapter=adapter,
        progress=Progress(beta=cfg.loss.beta),
    )
    if cfg.loss.algorithm == "ppo":
        from nlgrpo.training import critic

        critic.check(cfg, shape, longest=run.longest)
    return run
