"""The reward that an environment gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nlgrpo.errors import UserError


@dataclass(frozen=True)
class EnvironmentReward:
    """The reward of the environment of the run (``environment.id``), or one of its metrics.

    Without ``metric`` it is the weighted sum of the environment's reward functions. A metric is the value of one of
    them, by its name, so that each can have an objective of its own. Conversations in which the environment failed have
    no reward.
    """

    metric: str | None = None

    def __call__(self, environment: Sequence[Mapping[str, Any]], **_: Any) -> list[float | None]:
        return [None if outcome["error"] is not None else self._of(outcome) for outcome in environment]

    def _of(self, outcome: Mapping[str, Any]) -> float | None:
        if self.metric is None:
            return outcome["reward"]
        if self.metric not in outcome["metrics"]:
            raise UserError(f"the environment has no metric {self.metric!r}; it has {', '.join(outcome['metrics'])}")
        return outcome["metrics"][self.metric]
