"""Configuration of `nlgrpo reward-model train`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import tyro

from nlgrpo.config.overrides import from_file
from nlgrpo.config.schema import FREE, EpochsConfig, ModelConfig, OptimConfig, free
from nlgrpo.config.validate import SPLIT, lora_faults, need_of, optim_faults, profile_faults, refuse, train_faults
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime import secrets
from nlgrpo.runtime.distributed import ParallelConfig

ABOUT = """Train a reward model on preference pairs: nlgrpo reward-model train [file.toml] [--section.key value ...]

The file sets the keys below, and the options override it. --dry-run prints the plan and trains nothing.

The model is a Hugging Face causal model or classifier, a run of nlgrpo (its folder, or one of its checkpoints), or a
hub name. runs/NAME/model loads in AutoModelForSequenceClassification, and in the reward classifier(path=...)."""


@dataclass
class PairsConfig:
    source: str = ""
    """Pairs: a .jsonl, .json, .parquet or .csv file (.gz too), or a `datasets` name, with the columns below."""
    evaluation: str = ""
    """Held-out pairs, in the same formats. Empty: the last pairs of `source`."""
    split: str = "train"
    """Split of a `datasets` name or folder."""
    evaluation_split: str = ""
    """Split of `evaluation`. Empty: the same as `split`."""
    prompt_column: str = "prompt"
    """Column with the prompt. Without a column "prompt", or with "", the common beginning of both answers up to the
    last "\\n\\nAssistant:". A prompt with which both answers begin is read once."""
    chosen_column: str = "chosen"
    """Column with the preferred answer, a text or a conversation for the model's chat template."""
    rejected_column: str = "rejected"
    """Column with the other answer."""
    margin_column: str | None = None
    """Column with a margin for each pair, added to loss.margin."""
    limit: int | None = None
    """Read only this many pairs."""
    max_length: int | None = None
    """Maximum tokens of a text; longer ones lose the beginning of their prompt. None: the model's context."""


@dataclass
class PreferenceLossConfig:
    margin: float = 0.0
    """Required lead of the preferred answer: -log sigmoid(r_chosen - r_rejected - margin)."""
    centering: float = 0.0
    """Weight of (r_chosen + r_rejected)^2, which keeps scores near 0."""


@dataclass
class PairTrainConfig(EpochsConfig):
    pairs: int = 64
    """Pairs per step, over all ranks."""
    seed: int = 0
    """Random seed of a new head and of the order of the pairs. Vary it to train an ensemble."""


@dataclass
class PairEvaluationConfig:
    pairs: int = 256
    """Number of held-out pairs of `data.source`, at most half of them; 0: none. With data.evaluation, all of those."""
    every: int = free(0)
    """Steps between evaluations during training. 0: only before and after."""


@dataclass
class RewardModelConfig:
    """Configuration of the training of a reward model."""

    name: tyro.conf.Fixed[str] = "reward-model"
    """Name of the run."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig, metadata={FREE: True})
    data: PairsConfig = field(default_factory=PairsConfig)
    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5, schedule="cosine"))
    train: PairTrainConfig = field(default_factory=PairTrainConfig)
    evaluation: PairEvaluationConfig = field(default_factory=PairEvaluationConfig)

    @property
    def run(self) -> Path:
        return Path(os.path.expanduser(self.train.out) or f"runs/{self.name}")


def from_arguments(arguments: Sequence[str]) -> RewardModelConfig:
    """Parse ``[file.toml] [--section.key value ...]``."""
    return from_file(RewardModelConfig(), arguments, program="nlgrpo reward-model train", about=ABOUT)


def check_reward_model_config(cfg: RewardModelConfig) -> None:
    """Check a configuration. Raises UserError that lists every fault with the value and what is allowed."""
    need = partial(need_of, cfg)
    data = cfg.data
    train = cfg.train
    columns = (data.prompt_column, data.chosen_column, data.rejected_column)
    refuse(
        [
            need("data.source", "a file of pairs or the name of a data set", data.source != ""),
            need("data.evaluation_split", SPLIT, bool(data.evaluation or not data.evaluation_split)),
            need("data.limit", ">= 1 or none", data.limit is None or data.limit >= 1),
            need("data.max_length", ">= 2 or none", data.max_length is None or data.max_length >= 2),
            "" if len(set(columns)) == 3 else f"data: {', '.join(columns)}: the three columns need different names",
            need("loss.margin", "a finite number", True),
            need("loss.centering", ">= 0", cfg.loss.centering >= 0),
            *secrets.faults(asdict(cfg)),
            *lora_faults(cfg.lora, cfg.optim),
            *optim_faults(cfg.optim, need),
            need("train.epochs", "> 0", train.epochs > 0),
            need("train.pairs", ">= 1", train.pairs >= 1),
            *train_faults(train, need),
            *profile_faults(train.profile),
            need("evaluation.pairs", ">= 0 (0: no evaluation)", cfg.evaluation.pairs >= 0),
            need("evaluation.every", ">= 0 (0: only before and after)", cfg.evaluation.every >= 0),
        ]
    )
