"""What a model gave on the evaluation prompts, and the file that keeps it.

A run keeps the samples of its reference and of its trained model in ``evaluation.json``, and `nlgrpo evaluate` those of
all its models, so that a report or a comparison can be made later. Shapes: P prompts, n samples a prompt.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nlgrpo.metrics import atomic_write

FILE = "evaluation.json"


@dataclass
class Sampled:
    """What one model gave on the evaluation prompts.

    ``rewards[name]`` is (P, n) with NaN where the reward abstained; of a kernel, each completion's share in the
    diversity of its group. ``lengths`` (P, n) counts tokens. ``objectives`` and ``weights`` have an entry for each
    reward, such as ``"bon:4"`` and 0.5. ``prompts`` and ``completions`` show the first few prompts only.

    Raises ValueError where shapes or names do not agree, and for infinite rewards.
    """

    rewards: dict[str, Tensor]
    lengths: Tensor
    objectives: dict[str, str]
    weights: dict[str, float]
    max_length: int
    prompts: list[str] = field(default_factory=list)
    completions: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.rewards or any(set(d) != set(self.rewards) for d in (self.objectives, self.weights)):
            raise ValueError(
                f"every reward needs an objective and a weight: rewards {sorted(self.rewards)}, "
                f"objectives {sorted(self.objectives)}, weights {sorted(self.weights)}"
            )
        for name, values in self.rewards.items():
            if values.dim() != 2 or values.shape != self.lengths.shape:
                raise ValueError(
                    f"reward {name!r} is {tuple(values.shape)}, lengths {tuple(self.lengths.shape)}: not (P, n)"
                )
            if values.isinf().any():
                raise ValueError(f"reward {name!r} holds infinite values; a reward is finite or NaN")

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain lists for ``json.dump``; NaN becomes None."""
        rewards = {
            name: [[None if math.isnan(r) else r for r in row] for row in values.tolist()]
            for name, values in self.rewards.items()
        }
        return {**vars(self), "rewards": rewards, "lengths": self.lengths.tolist()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Sampled:
        """The inverse of `to_json`; rewards come back as float64."""
        rewards = {
            name: torch.tensor([[math.nan if r is None else r for r in row] for row in values], dtype=torch.float64)
            for name, values in data["rewards"].items()
        }
        return cls(**{**data, "rewards": rewards, "lengths": torch.tensor(data["lengths"], dtype=torch.int64)})


def write_evaluation(run: Path, **sampled: Sampled) -> None:
    """Write ``evaluation.json``: ``write_evaluation(run, before=..., after=...)``, no ``after`` in training."""
    atomic_write(run / FILE, json.dumps({name: s.to_json() for name, s in sampled.items()}, allow_nan=False))


def read_evaluation(run: Path) -> dict[str, Sampled]:
    """``{"before": ..., "after": ...}`` of a run. Raises ValueError where the file is missing or damaged."""
    path = run / FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing: the run was stopped before its evaluation; resume it to finish")
    try:
        return {name: Sampled.from_json(data) for name, data in json.loads(path.read_text("utf-8")).items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} cannot be read ({error}); resume the run to evaluate again") from error
