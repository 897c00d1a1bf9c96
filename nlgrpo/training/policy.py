"""The policy of a run: its weights, what samples from it, what it is exported as, and digests of what it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from nlgrpo.engine.backends import NativeEngine
from nlgrpo.engine.backends.base import PolicyEngine
from nlgrpo.engine.decoding_memory import ROWS
from nlgrpo.model import decoder
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.fsdp import TOO_LARGE, check_finite, prepare
from nlgrpo.model.lora import LoraConfig
from nlgrpo.model.tokenizer import count_tokens, save_tokenizer
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.device import master_dtype, micro_batch_limit
from nlgrpo.training.build import Setup
from nlgrpo.training.learner import Learner, make_optimizer

if TYPE_CHECKING:
    from nlgrpo.engine.rollouts.run_inputs import RunInputs


def load_learner(setup: Setup) -> Learner:
    """Load the policy, the frozen reference if there is one, and PPO's critic."""
    cfg = setup.config
    ranks = setup.ranks
    model = _load_policy(setup)
    check_finite(model, ranks, f" in {setup.source}, before any training")
    model.configure(cfg.model.activation_checkpointing, cfg.model.compile)
    reference = None
    if cfg.loss.has_reference and setup.adapter is not None:
        reference = model
    elif cfg.loss.has_reference:
        reference = decoder.load(setup.source, dtype=setup.compute, device=ranks.device, shard=_sharded(setup, None))
        reference.limit_vocabulary(count_tokens(setup.tokenizer))
        reference.requires_grad_(False).configure(compiled=cfg.model.compile)
    critic = None
    if cfg.loss.algorithm == "ppo":
        from nlgrpo.training.critic import make_critic

        critic = make_critic(cfg, model, ranks, setup.compute, setup.adapter)
    return Learner(
        model=model,
        reference=reference,
        critic=critic,
        optimizer=make_optimizer(model, cfg.optim, None if critic is None else critic.module),
        loss=cfg.loss,
        optim=cfg.optim,
        ranks=ranks,
        temperature=cfg.rollout.temperature,
        max_new_tokens=cfg.rollout.max_new_tokens,
        micro_batch_limit=micro_batch_limit(cfg.train.micro_batch_tokens, ranks.device),
        seed=cfg.train.seed,
    )


def _load_policy(setup: Setup) -> Decoder:
    """Load the policy, and give its adapters their first values."""
    stored = master_dtype(setup.compute)
    sharded = _sharded(setup, setup.adapter)
    model = decoder.load(setup.source, dtype=stored, device=setup.ranks.device, shard=sharded)
    model.limit_vocabulary(count_tokens(setup.tokenizer))
    if setup.adapter is not None:
        from nlgrpo.model import adapters

        adapters.init_adapters(model, setup.adapter, setup.config.train.seed)
    return model


def _sharded(setup: Setup, adapter: LoraConfig | None) -> Callable[[Decoder], Decoder]:
    return partial(prepare, adapter=adapter, ranks=setup.ranks, compute=setup.compute, parallel=setup.config.parallel)


@contextmanager
def policy_engine(setup: Setup, model: Decoder, stopping: Callable[[], bool] = lambda: False) -> Iterator[PolicyEngine]:
    """Context with the engine that samples completions of the policy; collective. Raises EngineError.

    ``stopping``: whether the user wants the run to stop, so that it does not wait for servers that are down.
    """
    cfg = setup.config
    run = setup.config.run
    if cfg.rollout.engine == "nlgrpo" or cfg.loss.offline:
        yield NativeEngine(model, cfg.parallel.gather_for_sampling == "block")
        return
    from nlgrpo.engine.backends import frozen

    if cfg.vllm.servers:
        from nlgrpo.engine.backends import servers

        size = setup.shape.parameters * setup.compute.itemsize
        folder = servers.weights_folder(cfg.vllm, run, setup.ranks, size)
    else:
        folder = Path(cfg.vllm.folder or run / "engine")
        if setup.ranks.first and not cfg.vllm.folder:
            atomic_files.remove(folder)  # what a killed trainer left
    engine = frozen.of_policy(
        setup.source,
        setup.shape,
        ranks=setup.ranks,
        compute=setup.compute,
        options=cfg.vllm,
        context=max([setup.longest, *(one.longest for name, one in setup.evaluation_sets.items() if name)]),
        max_rows=cfg.rollout.max_rows or ROWS,
        adapter=setup.adapter,
        folder=folder,
        pauses=run / "paused-servers",
        stopping=stopping,
        tokens=count_tokens(setup.tokenizer),
    )
    try:
        yield engine
    finally:
        engine.close()


def export(setup: Setup, model: Decoder, base_digest: str, run: Path) -> Path:
    """Write the policy as a Hugging Face directory, RUN/model, in the compute dtype; collective, complete on return.

    Model and adapter have what training assumed: tokenizer, stop ids, sampling and prompts (`AsTrained`).
    ``base_digest``: digest of the weights that training started from, needed on the first rank.
    """
    from nlgrpo.engine.as_trained import AsTrained
    from nlgrpo.model import adapters

    ranks = setup.ranks
    check_finite(model, ranks, TOO_LARGE)
    assumed = AsTrained.of(setup.config, setup.sampler.sampling)

    def beside(folder: Path) -> None:
        assumed.write(folder, setup.tokenizer, setup.shape.vocab, base_digest)

    def write(folder: Path, parameters: Iterator[tuple[str, Tensor]]) -> None:
        decoder.save(
            model,
            folder,
            tokenizer=setup.tokenizer,
            parameters=parameters,
            dtype=setup.compute,
            like=setup.source,
        )
        beside(folder)

    def write_beside_adapter() -> None:
        if ranks.first and setup.adapter is not None:
            folder = run / "adapter"
            with atomic_files.into(folder):
                save_tokenizer(setup.tokenizer, folder)
                beside(folder)

    exported = adapters.export(
        model,
        run,
        write,
        config=setup.adapter,
        compute=setup.compute,
        ranks=ranks,
        base=setup.config.model.path,
    )
    ranks.agree(write_beside_adapter)
    return exported


def base_digest(setup: Setup) -> str:
    """Digest of the weights that training starts from.

    Raises UserError if lora.path is an adapter of other weights.
    """
    from nlgrpo.engine.rollouts.store import digest_of_weights

    if setup.config.lora.path:
        from nlgrpo.engine import as_trained

        as_trained.check_base(setup.config.lora.path, setup.source)
    return digest_of_weights(setup.source)


def inputs(setup: Setup) -> RunInputs:
    """Return digests of what the run reads: data, rewards and model."""
    from nlgrpo.engine.rollouts.collect import scorers
    from nlgrpo.engine.rollouts.run_inputs import digests_of

    cfg = setup.config
    return digests_of(
        cfg,
        setup.source,
        setup.tokenizer,
        setup.prompts,
        setup.held_out,
        {name: one.prompts for name, one in setup.evaluation_sets.items() if name},
        scorers(cfg.rewards, setup.objective.objectives, setup.sampler.rewards),
        setup.sampler.sampling.stop_ids,
    )
