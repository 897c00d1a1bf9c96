"""The interface of environments."""

from __future__ import annotations

from typing import Literal, Protocol, overload

from nlgrpo.data.prompt_dataset import Batch, PromptSet
from nlgrpo.engine.backends.base import Engine
from nlgrpo.engine.generation import Rollout
from nlgrpo.engine.sampling import Sampling


class Environment(Protocol):
    """Gives prompts, answers the policy's messages, and rates the conversations."""

    @property
    def description(self) -> str:
        """Name and settings, for the plan of a run."""

    @overload
    def prompts(
        self, *, max_new_tokens: int, seed: int = 0, shuffle: bool = True, limit: int | None = None
    ) -> PromptSet: ...

    @overload
    def prompts(self, *, evaluation: Literal[True], max_new_tokens: int) -> PromptSet | None: ...

    def prompts(
        self,
        *,
        evaluation: bool = False,
        max_new_tokens: int,
        seed: int = 0,
        shuffle: bool = True,
        limit: int | None = None,
    ) -> PromptSet | None:
        """Return the prompts of the environment; None if it has none for evaluation.

        Those that leave no room for an answer of ``max_new_tokens`` are dropped and counted. ``limit``: number of
        prompts to read.
        """

    def draw(
        self, engine: Engine, batch: Batch, samples: int, sampling: Sampling, *, seed: int, max_rows: int | None
    ) -> Rollout:
        """Sample ``samples`` conversations for each prompt of ``batch``, with what the environment made of them.

        Collective if there are several ranks. Raises EngineError on all ranks if the environment fails on one.
        """
