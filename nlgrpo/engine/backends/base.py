"""The interface of engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from nlgrpo.engine.generation import ModelLimits, Rollout, RolloutRequest
from nlgrpo.errors import UserError
from nlgrpo.model.decoder import Decoder

UNKNOWN = "unknown"  # name of weights that no rollout may have


class EngineError(UserError):
    """An engine cannot sample, or returned something that is not a sample of the policy."""


@dataclass(frozen=True)
class Completion:
    """A completion as another engine returned it."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[str] = field(default_factory=list)
    """Names of the weights that sampled its tokens, in their order."""


class Engine(Protocol):
    """Samples completions from a model."""

    @property
    def shape(self) -> ModelLimits:
        """Context length and vocabulary of the model."""

    def generate(self, request: RolloutRequest) -> Rollout:
        """Sample completions with their log-probs.

        The same seed and index give the same completions with the same engine on the same machine, as far as its
        arithmetic allows; another engine gives other ones. Raises UserError as `nlgrpo.engine.generate`, and
        EngineError.
        """

    def close(self) -> None:
        """End the engine and its processes."""


class PolicyEngine(Engine, Protocol):
    """Samples completions of the policy that is trained."""

    version: int | None
    """That of the last `take`."""

    def take(self, model: Decoder, version: int) -> None:
        """Sample from the weights of ``model`` from now on; collective. Their ``version`` is in every rollout."""

    def sleep(self) -> None:
        """Give memory back until the next `take`."""
