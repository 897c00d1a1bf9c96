"""What a model gave on the evaluation prompts, and the file that keeps it.

A run keeps the samples of its reference and of its trained model in ``evaluation.json``, and `nlgrpo evaluate` those of
all its models, so that a report or a comparison can be made later. Shapes: P prompts, n samples per prompt.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nlgrpo.runtime.atomic_files import atomic_write

FILE = "evaluation.json"


@dataclass
class EvaluationSamples:
    """What one model gave on the evaluation prompts.

    ``rewards[name]`` is (P, n) with NaN where the reward abstained; of a kernel, each completion's share in the
    diversity of its group. ``lengths`` (P, n) counts tokens. ``objectives`` and ``weights`` have an entry for each
    reward, such as ``"bon:4"`` and 0.5. ``prompts`` and ``completions`` show the first few prompts only.

    Where they were measured: ``kl``, by estimator ("k1", "k3"), is that of each completion to the reference, (P, n) in
    nats; ``distinct["2"]`` (P,) the share of different pairs of tokens among a prompt's completions; ``answers`` of a
    reward that reads one, (P, n), numbers that are equal where answers of a prompt are, -1 for none.

    Raises ValueError where shapes or names do not agree, and for infinite rewards.
    """

    rewards: dict[str, Tensor]
    lengths: Tensor
    objectives: dict[str, str]
    weights: dict[str, float]
    max_length: int
    prompts: list[str] = field(default_factory=list)
    completions: list[list[str]] = field(default_factory=list)
    kl: dict[str, Tensor] = field(default_factory=dict)
    distinct: dict[str, Tensor] = field(default_factory=dict)
    answers: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.rewards or any(set(d) != set(self.rewards) for d in (self.objectives, self.weights)):
            raise ValueError(
                f"every reward needs an objective and a weight: rewards {sorted(self.rewards)}, "
                f"objectives {sorted(self.objectives)}, weights {sorted(self.weights)}"
            )
        for name, values in (self.rewards | self.kl | self.answers).items():
            if values.dim() != 2 or values.shape != self.lengths.shape:
                raise ValueError(
                    f"reward {name!r} is {tuple(values.shape)}, lengths {tuple(self.lengths.shape)}: not (P, n)"
                )
        for name, values in self.rewards.items():
            if values.isinf().any():
                raise ValueError(f"reward {name!r} holds infinite values; a reward is finite or NaN")

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain lists for ``json.dump``; NaN becomes None."""
        measured = {part: {name: _plain(x) for name, x in getattr(self, part).items()} for part in MEASURED}
        return {**vars(self), **measured, "lengths": self.lengths.tolist()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EvaluationSamples:
        """The inverse of `to_json`; numbers come back as float64, lengths and answers as integers."""
        measured = {part: {name: _tensor(x) for name, x in data.get(part, {}).items()} for part in MEASURED}
        measured["answers"] = {name: x.long() for name, x in measured["answers"].items()}
        return cls(**{**data, **measured, "lengths": torch.tensor(data["lengths"], dtype=torch.int64)})


MEASURED = ("rewards", "kl", "distinct", "answers")


def _plain(values: Tensor) -> Any:
    if values.dim() > 1:
        return [_plain(row) for row in values]
    return [None if isinstance(x, float) and math.isnan(x) else x for x in values.tolist()]


def _tensor(values: Any) -> Tensor:
    rows = [[math.nan if x is None else x for x in row] if isinstance(row, list) else row for row in values]
    return torch.tensor([math.nan if row is None else row for row in rows], dtype=torch.float64)


def write_evaluation(run: Path, /, **sampled: EvaluationSamples) -> None:
    """Write ``evaluation.json``: ``write_evaluation(run, before=..., after=...)``, no ``after`` in training."""
    atomic_write(run / FILE, json.dumps({name: s.to_json() for name, s in sampled.items()}, allow_nan=False))


def read_evaluation(run: Path) -> dict[str, EvaluationSamples]:
    """``{"before": ..., "after": ...}`` of a run. Raises ValueError where the file is missing or damaged."""
    path = run / FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing: the run was stopped before its evaluation; resume it to finish")
    try:
        return {name: EvaluationSamples.from_json(data) for name, data in json.loads(path.read_text("utf-8")).items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} cannot be read ({error}); resume the run to evaluate again") from error
