"""What the training of a value model is made of; files and the command line are laid over it as over any run's."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import tyro

from nlgrpo.config.overrides import from_file
from nlgrpo.config.schema import EpochsConfig, ModelConfig, OptimConfig
from nlgrpo.config.validate import need_of, optim_faults, refuse, train_faults
from nlgrpo.model.value_model import Kind

ABOUT = """Fit a value model to what completions came to, on every prefix. Before the options may stand a .toml file
with the keys below; what is written here comes on top. --dry-run prints the plan and trains nothing.

The model begins at a reward model, a causal model, an earlier value model, or a run of one of these. runs/NAME/model is
a Hugging Face classifier with one output; `nlgrpo.engine.guided_search` searches with it."""
COMPRESS = """Fit one value model to the weighted sum of several, sum_i V_i / beta_i, on every prefix of completions.
The keys are those of `nlgrpo value train`, and compress.values names the models."""


@dataclass
class RolloutsConfig:
    rollouts: tuple[str, ...] = ()
    """Folders that `nlgrpo rollout` has written."""
    rewards: tuple[str, ...] = ()
    """Names of the rewards whose weighted sum is predicted; none: all that were scored."""
    weights: tuple[float, ...] = ()
    """Of these rewards, in their order; none: 1 each."""
    max_length: int | None = None
    """Longest prompt with its completion in tokens; longer ones are left out. None: the model's context."""


@dataclass
class RegressionConfig:
    kind: Kind = "mse"
    """Squared error, or cross-entropy for rewards in [0, 1], whose values are sigmoids of what the model gives."""
    lam: float = 1.0
    """Of the lambda-return that is the target: 1 the reward, 0 the next prefix's value (TD), between them GAE."""
    gamma: float = 1.0
    """Discount of a token."""


@dataclass
class CompressConfig:
    values: tuple[str, ...] = ()
    """Value models whose sum is the target: folders as `model.path`."""
    betas: tuple[float, ...] = ()
    """Of each, sum_i V_i / beta_i; none: 1 each."""


@dataclass
class ValueTrainConfig(EpochsConfig):
    completions: int = 64
    """Completions of a step, over all ranks."""
    seed: int = 0
    """Of a new head and of the order of the completions."""


@dataclass
class ValueEvaluationConfig:
    prompts: int = 32
    """Prompts that are held out, at most half of them; 0: no evaluation."""
    every: int = 0
    """Steps between evaluations while it trains; 0: only before and after."""


@dataclass
class ValueConfig:
    """The training of a value model."""

    name: tyro.conf.Fixed[str] = "value"
    """What the run is called."""
    model: ModelConfig = field(default_factory=ModelConfig)
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
    """How each value model of a loop (`nlgrpo iro`) is fitted."""

    path: str = ""
    """What the first begins at: a reward model, a causal model or a value model; none: the frozen model."""
    kind: Kind = "mse"
    """Squared error, or "bce" for rewards in [0, 1]."""
    lam: float = 1.0
    """Of the lambda-return that is the target: 1 the reward, 0 the next prefix's value (TD), between them GAE."""
    gamma: float = 1.0
    """Discount of a token."""
    epochs: float = 3.0
    """Passes over the completions of an iteration."""
    completions: int = 64
    """Of a step, over all ranks."""
    lr: float = 1e-4
    """Learning rate, with a cosine schedule."""
    held_out: int = 16
    """Prompts of an iteration that are held out, to say how well its values predict."""

    def faults(self) -> list[str]:
        """What is out of range."""
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
    """``[file.toml] [--section.key value ...]`` of `nlgrpo value train`, or of `compress`.

    Raises ValueError where one is asked for what the other does.
    """
    program = f"nlgrpo value {'compress' if compress else 'train'}"
    start = ValueConfig(name="compressed") if compress else ValueConfig()
    cfg = from_file(start, arguments, program=program, about=COMPRESS if compress else ABOUT)
    if bool(cfg.compress.values) != compress:
        raise ValueError(
            "compress.values is empty: name the value models that one is to stand for"
            if compress
            else "compress.values is of `nlgrpo value compress`; `value train` fits rewards"
        )
    return cfg


def check(cfg: ValueConfig) -> None:
    """Refuse values out of range. Raises ValueError with every fault: what was given and what is allowed."""
    need, data, loss, compress = partial(need_of, cfg), cfg.data, cfg.loss, cfg.compress
    plain = loss.kind == "mse" and loss.lam == loss.gamma == 1
    refuse(
        [
            need("data.rollouts", "one folder of `nlgrpo rollout` or more", bool(data.rollouts)),
            need("data.weights", "none without data.rewards, which they weigh", bool(data.rewards or not data.weights)),
            _as_many("data.weights", data.weights, "data.rewards", data.rewards),
            need(
                "data.rewards", "none: a compressed model is fitted to values", not (data.rewards and compress.values)
            ),
            need("data.max_length", ">= 2 or none", data.max_length is None or data.max_length >= 2),
            need("loss.lam", "in [0, 1]", 0 <= loss.lam <= 1),
            need("loss.gamma", "in [0, 1]", 0 <= loss.gamma <= 1),
            need("compress.betas", "numbers > 0", all(beta > 0 and math.isfinite(1 / beta) for beta in compress.betas)),
            _as_many("compress.betas", compress.betas, "compress.values", compress.values),
            ""
            if plain or not compress.values
            else "loss: the sum of values is fitted with kind mse, lam 1 and gamma 1",
            *optim_faults(cfg.optim, need),
            need("train.epochs", "> 0", cfg.train.epochs > 0),
            need("train.completions", ">= 1", cfg.train.completions >= 1),
            *train_faults(cfg.train, need),
            need("evaluation.prompts", ">= 0 (0: no evaluation)", cfg.evaluation.prompts >= 0),
            need("evaluation.every", ">= 0 (0: before and after only)", cfg.evaluation.every >= 0),
        ]
    )


def _as_many(name: str, values: Sequence[float], of: str, names: Sequence[str]) -> str:
    """The fault of weights that are not as many as what they weigh; none at all is 1 each."""
    if not values or not names or len(values) == len(names):
        return ""
    return f"{name} has {len(values)} numbers and {of} {len(names)} names: give one each, or none for 1 each"
