"""Configuration of `nlgrpo reward-model train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tyro

from nlgrpo.config import command_line
from nlgrpo.config.overrides import from_file
from nlgrpo.config.schema import EpochsConfig, HeldOutConfig, ScalarHeadConfig, bounded

MODES = ("train",)
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
    limit: int | None = bounded(None, ge=1)
    """Read only this many pairs."""
    max_length: int | None = bounded(None, ge=2)
    """Maximum tokens of a text; longer ones lose the beginning of their prompt. None: the model's context."""


@dataclass
class PreferenceLossConfig:
    margin: float = bounded(0.0)
    """Required lead of the preferred answer: -log sigmoid(r_chosen - r_rejected - margin)."""
    centering: float = bounded(0.0, ge=0)
    """Weight of (r_chosen + r_rejected)^2, which keeps scores near 0."""


@dataclass
class PairTrainConfig(EpochsConfig):
    pairs: int = bounded(64, ge=1)
    """Pairs per step, over all ranks."""
    seed: int = bounded(0, ge=0)
    """Random seed of a new head and of the order of the pairs. Vary it to train an ensemble."""


@dataclass
class PairEvaluationConfig(HeldOutConfig):
    pairs: int = bounded(256, ge=0, note="0: no evaluation")
    """Number of held-out pairs of `data.source`, at most half of them; 0: none. With data.evaluation, all of those."""


@dataclass
class RewardModelConfig(ScalarHeadConfig):
    """Configuration of the training of a reward model."""

    name: tyro.conf.Fixed[str] = "reward-model"
    """Name of the run."""
    train: PairTrainConfig = field(default_factory=PairTrainConfig)
    evaluation: PairEvaluationConfig = field(default_factory=PairEvaluationConfig)
    data: PairsConfig = field(default_factory=PairsConfig)
    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)


def from_arguments(arguments: Sequence[str]) -> RewardModelConfig:
    """Parse ``[file.toml] [--section.key value ...]``."""
    return from_file(RewardModelConfig(), arguments, program="nlgrpo reward-model train", about=ABOUT)


def show_help(arguments: Sequence[str]) -> None:
    """Print the help of `nlgrpo reward-model train`, and exit. Raises UserError for another word."""
    command_line.mode_of(arguments, "reward-model", MODES)
    from_arguments(["--help"])


def check_reward_model_config(cfg: RewardModelConfig) -> None:
    """Check a configuration. Raises UserError that lists every fault with the value and what is allowed."""
    from nlgrpo.config.validate import refuse, shared_faults, split_fault  # PyTorch, which --help does not need

    data = cfg.data
    columns = (data.prompt_column, data.chosen_column, data.rejected_column)
    faults = shared_faults(cfg)
    if not data.source:
        faults.append("data.source = '': allowed is a file of pairs or the name of a data set")
    if data.evaluation_split and not data.evaluation:
        faults.append(split_fault(data.evaluation_split))
    if len(set(columns)) < 3:
        faults.append(f"data: {', '.join(columns)}: the three columns need different names")
    refuse(faults)
