"""nlgrpo's engine: it samples from the decoder that is trained, which is always up to date."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from nlgrpo.engine import decoding_memory
from nlgrpo.engine.backends.base import Engine
from nlgrpo.engine.generation import ModelLimits, Rollout, RolloutRequest, sample_rollout
from nlgrpo.model import lora
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.fsdp import gathered
from nlgrpo.runtime.device import free_memory

if TYPE_CHECKING:
    from nlgrpo.engine.transformers_backend import TransformersModel


@dataclass
class NativeEngine:
    """Samples with `nlgrpo.engine.generate`. A sharded model is gathered meanwhile, so `generate` is then collective.

    ``by_block``: how it is gathered (`fsdp.gathered`).
    """

    model: Decoder
    by_block: bool = False
    version: int | None = None

    @property
    def shape(self) -> ModelLimits:
        return self.model.shape

    def generate(self, request: RolloutRequest) -> Rollout:
        with gathered(self.model, by_block=self.by_block), self._merged():
            rollout = sample_rollout(self.model, request)
        return replace(rollout, version=self.version)

    def _merged(self) -> AbstractContextManager[None]:
        """Context in which adapters cost no launches on a GPU: they are merged into copies of the weights.

        Not if the copies do not fit, not on a CPU, where a seed keeps its draws, and not by block, where the weights
        exist only while a block computes.
        """
        device = self.model.embed.weight.device
        if device.type != "cuda" or self.by_block:
            return nullcontext()
        fits = lora.adapted_bytes(self.model) <= decoding_memory.COPIES * free_memory(device)
        return lora.merged_for_sampling(self.model) if fits else nullcontext()

    def take(self, model: Decoder, version: int) -> None:
        self.model = model
        self.version = version

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass


def engine_of(model: Decoder | TransformersModel | Engine) -> Engine:
    """Return the engine of a model: nlgrpo's for a decoder; other models sample themselves."""
    return NativeEngine(model) if isinstance(model, Decoder) else cast(Engine, model)
