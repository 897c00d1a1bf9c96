"""Sample and score completions file by file, and store them; used by evaluation and by rollouts of the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nlgrpo.config.schema import RewardConfig, VLLMConfig
from nlgrpo.data.prompt_dataset import Batch
from nlgrpo.engine.backends.base import Engine
from nlgrpo.engine.decoding_memory import ROWS
from nlgrpo.engine.generation import Rollout
from nlgrpo.engine.rollouts.sampler import Sampler, errors_of_user_objective
from nlgrpo.engine.rollouts.store import (
    Store,
    chunk_name,
    digest_of_function,
    digest_of_model,
    digest_of_tokenizer,
    digests_of_columns,
    from_rollout,
    score_name,
    to_rollout,
)
from nlgrpo.engine.sampling import Sampling
from nlgrpo.errors import UserError
from nlgrpo.model.architectures import read_config
from nlgrpo.model.tokenizer import count_tokens
from nlgrpo.objectives.registry import Objective, per_completion
from nlgrpo.rewards.reward_functions import Reward, RewardError
from nlgrpo.runtime.distributed import Ranks

if TYPE_CHECKING:
    from nlgrpo.engine.backends import frozen

READS = "texts behind their prompts"  # version of `encoding.decode`; part of the digests of scores


@dataclass(frozen=True)
class Scorer:
    """Reward of a configuration with its objective and a digest of its settings, code and files."""

    reward: Reward
    objective: Objective  # reduces the similarities of a kernel to one number per completion
    spec: str
    digest: str

    @property
    def name(self) -> str:
        return self.reward.name


def scorers(
    configs: Mapping[str, RewardConfig], objectives: Mapping[str, Objective], rewards: Sequence[Reward]
) -> list[Scorer]:
    """Return a scorer for each of the loaded ``rewards``."""
    found = []
    for reward in rewards:
        config = configs[reward.name]
        spec = f"{config.function} x {config.scale!r}" + f" in {config.objective}" * reward.pairwise
        digest = digest_of_function(reward.function, config.function, f"{spec} of {READS}")
        found.append(Scorer(reward, objectives[reward.name], spec, digest))
    return found


def refuse_pairwise(scorers: Sequence[Scorer]) -> None:
    """Raise UserError for a reward that compares the completions of a prompt with each other."""
    for scorer in scorers:
        if scorer.reward.pairwise:
            raise UserError(
                f"rewards.{scorer.name} compares completions with each other, but a search scores each one separately"
            )


@dataclass(frozen=True)
class Provenance:
    """Digests and options that, with the prompts and the noise, determine the completions of a model."""

    model: str
    tokenizer: str
    dtype: str
    sampling: Sampling
    guide: str = ""  # digest of the search and its value models; "" without guidance
    engine: str = ""  # "" for nlgrpo's own
    tokens: int | None = None  # number of ids that are sampled, if the head has more rows

    def identity(self) -> dict[str, Any]:
        """Fields for digests: ``tokens``, which an older version did not have, is left out if it is None."""
        known = dataclasses.asdict(self)
        if self.tokens is None:
            del known["tokens"]
        return known

    @classmethod
    def of(
        cls,
        source: Path,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype,
        sampling: Sampling,
        engine: str = "nlgrpo",
    ) -> Provenance:
        """Compute the provenance of the model in the directory ``source``. Reads all of its weights."""
        tokens = count_tokens(tokenizer)
        from nlgrpo.engine.transformers_backend import limits_of

        rows = limits_of(read_config(source)).vocab
        return cls(
            digest_of_model(source),
            digest_of_tokenizer(tokenizer),
            str(dtype),
            sampling,
            engine="" if engine == "nlgrpo" else engine,
            tokens=tokens if tokens < rows else None,
        )


def open_store(root: Path, origin: Provenance, sampler: Sampler, *, first: bool) -> Store:
    """Open the store of these completions in the folder ``root``; ``first``: see `Store.make`."""
    known = {name: value for name, value in origin.identity().items() if name not in ("guide", "engine") or value}
    identity = known | {"samples": sampler.samples, "seed": sampler.seed}
    return Store.make(root, identity, first=first)


@dataclass(frozen=True)
class RolloutCollector:
    """Samples and stores completions of the prompts in ``batch``, from the model in ``source``.

    Each file has ``per_file`` prompts, which are sampled together. The bytes of a file depend only on its prompts, not
    on the number of ranks or on interruptions. ``sampler`` has no rewards: pass scorers to `score`.
    """

    label: str  # name of the model in messages
    source: Path
    dtype: torch.dtype
    batch: Batch
    sampler: Sampler
    per_file: int
    store: Store

    @cached_property
    def chunks(self) -> list[Batch]:
        """Prompts of each file."""
        places = range(len(self.batch.ids))
        return [self.batch.only(places[start : start + self.per_file]) for start in places[:: self.per_file]]

    def drawn(self, chunk: Batch) -> bool:
        """Whether the file of these prompts exists and is complete."""
        return self.store.has(chunk_name(chunk.index, chunk.ids))

    def draw(self, engine: Engine, chunk: Batch) -> Rollout:
        """Sample the completions of a file and save them."""
        rollout = self.sampler.draw(engine, chunk)
        self.store.write(chunk_name(chunk.index, chunk.ids), from_rollout(rollout))
        return rollout

    def rollout(self, chunk: Batch) -> Rollout:
        """Load the completions that `draw` saved. Raises UserError if they are missing."""
        tensors = self.store.read(chunk_name(chunk.index, chunk.ids))
        if tensors is None:
            raise UserError(
                f"completions of {self.label} are missing from {self.store.folder}; run the same command again"
            )
        return to_rollout(tensors, chunk.ids)

    def scored(self, chunk: Batch, scorer: Scorer) -> bool:
        return self.store.has(self._name(chunk, scorer))

    def score(self, chunk: Batch, missing: Sequence[Scorer]) -> None:
        """Compute and save one number per completion and scorer. Raises UserError if a reward fails."""
        sampler = dataclasses.replace(self.sampler, rewards=[scorer.reward for scorer in missing])
        try:
            scores = sampler.score(chunk, self.rollout(chunk), first_prompt=chunk.index[0])
        except RewardError as error:
            message = f"{error}\n  Completions and scores so far are saved; run the same command again to resume."
            raise RewardError(message) from error.__cause__
        for scorer in missing:
            with errors_of_user_objective(scorer.name, scorer.objective):
                values = per_completion(scorer.objective, scores.values[scorer.name])
            self.store.write(self._name(chunk, scorer), {"values": values})

    def scores(self, chunk: Batch, scorer: Scorer) -> Tensor:
        """Load the scores (p, n) that `score` saved. Raises UserError if they are missing."""
        tensors = self.store.read(self._name(chunk, scorer))
        if tensors is None:
            raise UserError(f"scores of {self.label} are missing from {self.store.folder}; run the same command again")
        return tensors["values"]

    def _name(self, chunk: Batch, scorer: Scorer) -> str:
        columns = digests_of_columns(chunk.columns, len(chunk.ids))
        return score_name(chunk_name(chunk.index, chunk.ids), scorer.digest, columns)


@contextmanager
def loaded(
    draws: RolloutCollector, engine: frozen.Name, options: VLLMConfig, ranks: Ranks, *, missing: bool
) -> Iterator[Callable[[], Engine]]:
    """Context with a function that returns the engine of ``draws``; the engine is closed at the end.

    nlgrpo's engine is loaded by the first call. vLLM starts on all ranks together, if ``missing`` is true on any: then
    this is collective. Raises UserError as `frozen.load_engine`.
    """
    from nlgrpo.engine.backends import frozen

    context = max(map(len, draws.batch.ids), default=0) + draws.sampler.sampling.max_new_tokens
    load = cache(
        partial(
            frozen.load_engine, draws.source, draws.dtype, ranks, engine, options=options, context=context,
            max_rows=draws.sampler.max_rows or ROWS, tokens=count_tokens(draws.sampler.tokenizer),
        )
    )  # fmt: skip
    if engine != "nlgrpo" and ranks.any(missing):
        load()
    try:
        yield load
    finally:
        if load.cache_info().currsize:
            load().close()
