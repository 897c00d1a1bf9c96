"""Configuration of `nlgrpo value train` and `nlgrpo value compress`, and of the values that `nlgrpo iro` fits."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import tyro

from nlgrpo.config.overrides import from_file
from nlgrpo.config.schema import FREE, EpochsConfig, ModelConfig, OptimConfig, free
from nlgrpo.config.validate import lora_faults, need_of, optim_faults, profile_faults, refuse, train_faults
from nlgrpo.errors import UserError
from nlgrpo.model.lora import LoraConfig
from nlgrpo.model.value_model import Kind
from nlgrpo.runtime import secrets
from nlgrpo.runtime.distributed import ParallelConfig

ABOUT = """Fit a value model to the final rewards of completions, on every prefix: nlgrpo value train [file.toml] ..

The file sets the keys below, and the options override it. --dry-run prints the plan and trains nothing. The initial
model is a reward model, a causal model, an earlier value model, or a run of one of these. runs/NAME/model is a Hugging
Face classifier with one output; `nlgrpo generate --guide runs/NAME` decodes with it."""
COMPRESS = """Fit one value model to the weighted sum of several, sum_i V_i / beta_i, on every prefix of completions.
The keys are those of `nlgrpo value train`; compress.values names the models."""


@dataclass
class RolloutsConfig:
    rollouts: tuple[str, ...] = ()
    """Folders written by `nlgrpo rollout`."""
    rewards: tuple[str, ...] = ()
    """Rewards whose weighted sum is predicted. None: all rewards of the rollouts."""
    weights: tuple[float, ...] = ()
    """Weights of these rewards, in the same order. None: 1 each."""
    drop_equal: bool = False
    """Do not train on prompts whose completions all have the same reward, such as all right or all wrong."""
    max_length: int | None = None
    """Maximum tokens of a prompt with its completion; longer ones are skipped. None: the model's context."""


@dataclass
class RegressionConfig:
    kind: Kind = "mse"
    """mse: squared error. bce: cross-entropy for rewards in [0, 1]; the value is the sigmoid of the output."""
    lam: float = 1.0
    """Lambda of the return that is the target. 1: the final reward; 0: the value of the next prefix (TD)."""
    gamma: float = 1.0
    """Discount factor per token."""


@dataclass
class CompressConfig:
    values: tuple[str, ...] = ()
    """Value models whose weighted sum is the target: folders, as for `model.path`."""
    betas: tuple[float, ...] = ()
    """beta_i of each value model in sum_i V_i / beta_i. None: 1 each."""


@dataclass
class ValueTrainConfig(EpochsConfig):
    completions: int = 64
    """Completions per step, over all ranks."""
    head_only: bool = False
    """Train the head alone; all other weights stay those of the initial model."""
    seed: int = 0
    """Random seed of a new head and of the order of the completions."""


@dataclass
class ValueEvaluationConfig:
    prompts: int = 32
    """Number of held-out prompts, at most half of them. 0: no evaluation."""
    every: int = free(0)
    """Steps between evaluations during training. 0: only before and after."""


@dataclass
class ValueConfig:
    """Configuration of the training of a value model."""

    name: tyro.conf.Fixed[str] = "value"
    """Name of the run."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig, metadata={FREE: True})
    data: RolloutsConfig = field(default_factory=RolloutsConfig)
    loss: RegressionConfig = field(default_factory=RegressionConfig)
    compress: CompressConfig = field(default_factory=CompressConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5, schedule="cosine"))
    train: ValueTrainConfig = field(default_factory=ValueTrainConfig)
    evaluation: ValueEvaluationConfig = field(default_factory=ValueEvaluationConfig)

    @property
    def run(self) -> Path:
        return Path(os.path.expanduser(self.train.out) or f"runs/{self.name}")


@dataclass
class TrainerOptions:
    """How `nlgrpo iro` fits each value model."""

    path: str = ""
    """Initial model of the first value model: a reward, causal or value model. Empty: the frozen model."""
    kind: Kind = "mse"
    """mse: squared error. bce: cross-entropy, for rewards in [0, 1]."""
    lam: float = 1.0
    """Lambda of the return that is the target. 1: the final reward; 0: the value of the next prefix (TD)."""
    gamma: float = 1.0
    """Discount factor per token."""
    epochs: float = 3.0
    """Epochs over the completions of an iteration."""
    completions: int = 64
    """Completions per step, over all ranks."""
    lr: float = 1e-4
    """Learning rate, with a cosine schedule."""
    held_out: int = 16
    """Held-out prompts per iteration, on which the values are evaluated."""
    drop_equal: bool = False
    """Do not train on prompts whose completions all have the same reward, such as all right or all wrong (IRO, H.4)."""
    head_only: bool = False
    """Train the heads alone: all value models share the other weights of the initial model (SPI, Remark 3.2)."""

    def faults(self) -> list[str]:
        """List the options that are out of range."""
        allowed = {
            "epochs": ("> 0", 0 < self.epochs < math.inf),
            "completions": (">= 1", self.completions >= 1),
            "lr": ("> 0", 0 < self.lr < math.inf),
            "held_out": (">= 0", self.held_out >= 0),
            "lam": ("in [0, 1]", 0 <= self.lam <= 1),
            "gamma": ("in [0, 1]", 0 <= self.gamma <= 1),
        }
        return [
            f"--value.{name.replace('_', '-')} {getattr(self, name):g}: allowed is {what}"
            for name, (what, met) in allowed.items()
            if not met
        ]


def from_arguments(arguments: Sequence[str], *, compress: bool = False) -> ValueConfig:
    """Parse ``[file.toml] [--section.key value ...]`` of `nlgrpo value train` or `compress`.

    Raises UserError if `compress` has no compress.values, or `train` has some.
    """
    program = f"nlgrpo value {'compress' if compress else 'train'}"
    start = ValueConfig(name="compressed") if compress else ValueConfig()
    cfg = from_file(start, arguments, program=program, about=COMPRESS if compress else ABOUT)
    if bool(cfg.compress.values) != compress:
        raise UserError(
            "compress.values is empty: name the value models to compress"
            if compress
            else "compress.values is for `nlgrpo value compress`; `nlgrpo value train` fits rewards"
        )
    return cfg


def check_value_config(cfg: ValueConfig) -> None:
    """Check a configuration. Raises UserError that lists every fault with the value and what is allowed."""
    need = partial(need_of, cfg)
    data = cfg.data
    loss = cfg.loss
    compress = cfg.compress
    head_only = cfg.train.head_only  # Muon is for the matrices of the blocks
    plain = loss.kind == "mse" and loss.lam == loss.gamma == 1
    refuse(
        [
            *secrets.faults(asdict(cfg)),
            need("data.rollouts", "one or more folders of `nlgrpo rollout`", bool(data.rollouts)),
            need("data.weights", "empty without data.rewards", bool(data.rewards or not data.weights)),
            _length_fault("data.weights", data.weights, "data.rewards", data.rewards),
            need(
                "data.rewards", "empty: a compressed model is fitted to values", not (data.rewards and compress.values)
            ),
            need(
                "data.drop_equal",
                "false: a compressed model reads no rewards",
                not (data.drop_equal and compress.values),
            ),
            need("data.max_length", ">= 2 or none", data.max_length is None or data.max_length >= 2),
            need("loss.lam", "in [0, 1]", 0 <= loss.lam <= 1),
            need("loss.gamma", "in [0, 1]", 0 <= loss.gamma <= 1),
            need("compress.betas", "numbers > 0", all(beta > 0 and math.isfinite(1 / beta) for beta in compress.betas)),
            _length_fault("compress.betas", compress.betas, "compress.values", compress.values),
            "" if plain or not compress.values else "loss: compress needs kind = 'mse', lam = 1 and gamma = 1",
            *lora_faults(cfg.lora, cfg.optim),
            *optim_faults(cfg.optim, need),
            need("optim.algorithm", "'adamw' with train.head_only", cfg.optim.algorithm == "adamw" or not head_only),
            need("train.epochs", "> 0", cfg.train.epochs > 0),
            need("train.completions", ">= 1", cfg.train.completions >= 1),
            need("train.head_only", "false with adapters", not (cfg.train.head_only and cfg.lora.enabled)),
            *train_faults(cfg.train, need),
            *profile_faults(cfg.train.profile),
            need("evaluation.prompts", ">= 0 (0: no evaluation)", cfg.evaluation.prompts >= 0),
            need("evaluation.every", ">= 0 (0: only before and after)", cfg.evaluation.every >= 0),
        ]
    )


def _length_fault(name: str, values: Sequence[float], of: str, names: Sequence[str]) -> str:
    """Return the fault of a list of weights whose length differs from that of ``names``, or ""."""
    if not values or not names or len(values) == len(names):
        return ""
    return f"{name} has {len(values)} numbers for {len(names)} names in {of}: give one each, or none for 1 each"
