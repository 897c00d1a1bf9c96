"""nlgrpo's engine: it samples from the decoder that is trained, which is always up to date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from nlgrpo.engine import generation
from nlgrpo.engine.backends.base import Engine
from nlgrpo.engine.generation import Limits, Rollout
from nlgrpo.engine.sampling import Sampling
from nlgrpo.engine.transformers_backend import TransformersModel
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.fsdp import gathered


@dataclass
class NativeEngine:
    """Samples with `nlgrpo.engine.generate`. A sharded model is gathered meanwhile, so `generate` is then collective.

    ``by_block``: how it is gathered (`fsdp.gathered`).
    """

    model: Decoder
    by_block: bool = False
    version: int | None = None

    @property
    def shape(self) -> Limits:
        return self.model.shape

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        sampling: Sampling,
        *,
        seed: int = 0,
        index: Sequence[int] | None = None,
        max_rows: int = 256,
        first_sample: int | Sequence[int] = 0,
    ) -> Rollout:
        with gathered(self.model, by_block=self.by_block):
            rollout = generation.generate(
                self.model,
                prompts,
                samples,
                sampling,
                seed=seed,
                index=index,
                max_rows=max_rows,
                first_sample=first_sample,
            )
        return replace(rollout, version=self.version)

    def take(self, model: Decoder, version: int) -> None:
        self.model, self.version = model, version

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass


def engine_of(model: Decoder | TransformersModel | Engine) -> Engine:
    """Return the engine of a model: nlgrpo's for a decoder; other models sample themselves."""
    return NativeEngine(model) if isinstance(model, Decoder) else cast(Engine, model)
