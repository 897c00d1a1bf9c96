"""What the training of a reward model is made of; files and the command line are laid over it as over any run's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import tyro

from nlgrpo.config.overrides import from_file
from nlgrpo.config.schema import EpochsConfig, ModelConfig, OptimConfig
from nlgrpo.config.validate import SPLIT, need_of, optim_faults, refuse, train_faults

ABOUT = """Train a reward model on preference pairs. Before the options may stand a .toml file with the keys below; what
is written here comes on top. --dry-run prints the plan and trains nothing.

The model is a Hugging Face causal model or classifier, a run of nlgrpo (its folder, or one of its checkpoints), or a
hub name. runs/NAME/model loads in AutoModelForSequenceClassification, and its path is a reward of nlgrpo."""


@dataclass
class PairsConfig:
    source: str = ""
    """Pairs: a .jsonl, .json, .parquet or .csv file (.gz too), or a `datasets` name, with the columns below."""
    evaluation: str = ""
    """Pairs that are held out, read the same way; empty: the last ones of `source`."""
    split: str = "train"
    """Split of a `datasets` name or folder."""
    evaluation_split: str = ""
    """That of `evaluation`; empty: the same."""
    prompt_column: str = "prompt"
    """Column with the prompt; where there is none, what both answers begin with, up to the last "\\n\\nAssistant:"."""
    chosen_column: str = "chosen"
    """Column with the preferred answer, a text or a conversation for the model's chat template."""
    rejected_column: str = "rejected"
    """Column with the other answer."""
    margin_column: str | None = None
    """Column with a margin for each pair, added to loss.margin."""
    limit: int | None = None
    """Read the first so many pairs only."""
    max_length: int | None = None
    """Longest text in tokens; longer ones lose the beginning of their prompt. None: the model's context."""


@dataclass
class PreferenceLossConfig:
    margin: float = 0.0
    """Required lead of the preferred answer: -log sigmoid(r_chosen - r_rejected - margin)."""
    centering: float = 0.0
    """Weight of (r_chosen + r_rejected)^2, which keeps scores near 0."""


@dataclass
class PairTrainConfig(EpochsConfig):
    pairs: int = 64
    """Pairs of a step, over all ranks."""
    seed: int = 0
    """Of the new head and of the order of the pairs; members of an ensemble differ in it."""


@dataclass
class PairEvaluationConfig:
    pairs: int = 256
    """Pairs of `data.source` that are held out, at most half of them; 0: no evaluation. Of data.evaluation: all."""
    every: int = 0
    """Steps between evaluations while it trains; 0: only before and after."""


@dataclass
class RewardModelConfig:
    """The training of a reward model."""

    name: tyro.conf.Fixed[str] = "reward-model"
    """What the run is called."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: PairsConfig = field(default_factory=PairsConfig)
    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5, schedule="cosine"))
    train: PairTrainConfig = field(default_factory=PairTrainConfig)
    evaluation: PairEvaluationConfig = field(default_factory=PairEvaluationConfig)

    @property
    def run(self) -> Path:
        return Path(os.path.expanduser(self.train.out) or f"runs/{self.name}")


def from_arguments(arguments: Sequence[str]) -> RewardModelConfig:
    """``[file.toml] [--section.key value ...]``."""
    return from_file(RewardModelConfig(), arguments, program="nlgrpo reward-model train", about=ABOUT)


def check(cfg: RewardModelConfig) -> None:
    """Refuse values out of range. Raises ValueError with every fault: what was given and what is allowed."""
    need, data, train = partial(need_of, cfg), cfg.data, cfg.train
    columns = (data.prompt_column, data.chosen_column, data.rejected_column)
    refuse(
        [
            need("data.source", "a file of pairs or the name of a data set", data.source != ""),
            need("data.evaluation_split", SPLIT, bool(data.evaluation or not data.evaluation_split)),
            need("data.limit", ">= 1 or none", data.limit is None or data.limit >= 1),
            need("data.max_length", ">= 2 or none", data.max_length is None or data.max_length >= 2),
            "" if len(set(columns)) == 3 else f"data: {', '.join(columns)}: three columns with three names are needed",
            need("loss.margin", "a finite number", True),
            need("loss.centering", ">= 0", cfg.loss.centering >= 0),
            *optim_faults(cfg.optim, need),
            need("train.epochs", "> 0", train.epochs > 0),
            need("train.pairs", ">= 1", train.pairs >= 1),
            *train_faults(train, need),
            need("evaluation.pairs", ">= 0 (0: no evaluation)", cfg.evaluation.pairs >= 0),
            need("evaluation.every", ">= 0 (0: before and after only)", cfg.evaluation.every >= 0),
        ]
    )
