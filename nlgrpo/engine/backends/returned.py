"""What another engine returns: a completion, or an error."""

from __future__ import annotations

from dataclasses import dataclass, field

from nlgrpo.errors import UserError

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
