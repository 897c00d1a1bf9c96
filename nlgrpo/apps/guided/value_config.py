"""Configuration of `nlgrpo value train` and `nlgrpo value compress`, and of the values that `nlgrpo iro` fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import tyro

from nlgrpo.config import command_line
from nlgrpo.config.overrides import from_file
from nlgrpo.config.schema import LARGEST, EpochsConfig, HeldOutConfig, ScalarHeadConfig, bounded, dashed, out_of_bounds
from nlgrpo.errors import UserError
from nlgrpo.sections import Kind

MODES = ("train", "compress")
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
    weights: tuple[float, ...] = bounded(())
    """Weights of these rewards, in the same order. None: 1 each."""
    drop_equal: bool = False
    """Do not train on prompts whose completions all have the same reward, such as all right or all wrong."""
    max_length: int | None = bounded(None, ge=2)
    """Maximum tokens of a prompt with its completion; longer ones are skipped. None: the model's context."""


@dataclass
class RegressionConfig:
    kind: Kind = "mse"
    """mse: squared error. bce: cross-entropy for rewards in [0, 1]; the value is the sigmoid of the output."""
    lam: float = bounded(1.0, ge=0, le=1)
    """Lambda of the return that is the target. 1: the final reward; 0: the value of the next prefix (TD)."""
    gamma: float = bounded(1.0, ge=0, le=1)
    """Discount factor per token."""


@dataclass
class CompressConfig:
    values: tuple[str, ...] = ()
    """Value models whose weighted sum is the target: folders, as for `model.path`."""
    betas: tuple[float, ...] = ()
    """beta_i of each value model in sum_i V_i / beta_i. None: 1 each."""


@dataclass
class ValueTrainConfig(EpochsConfig):
    completions: int = bounded(64, ge=1)
    """Completions per step, over all ranks."""
    head_only: bool = False
    """Train the head alone; all other weights stay those of the initial model."""
    seed: int = bounded(0, ge=0)
    """Random seed of a new head and of the order of the completions."""


@dataclass
class ValueEvaluationConfig(HeldOutConfig):
    prompts: int = bounded(32, ge=0, note="0: no evaluation")
    """Number of held-out prompts, at most half of them. 0: no evaluation."""


@dataclass
class ValueConfig(ScalarHeadConfig):
    """Configuration of the training of a value model."""

    name: tyro.conf.Fixed[str] = "value"
    """Name of the run."""
    train: ValueTrainConfig = field(default_factory=ValueTrainConfig)
    evaluation: ValueEvaluationConfig = field(default_factory=ValueEvaluationConfig)
    data: RolloutsConfig = field(default_factory=RolloutsConfig)
    loss: RegressionConfig = field(default_factory=RegressionConfig)
    compress: CompressConfig = field(default_factory=CompressConfig)


@dataclass
class TrainerOptions(RegressionConfig):
    """How `nlgrpo iro` fits each value model."""

    path: str = ""
    """Initial model of the first value model: a reward, causal or value model. Empty: the frozen model."""
    epochs: float = bounded(3.0, gt=0)
    """Epochs over the completions of an iteration."""
    completions: int = bounded(64, ge=1)
    """Completions per step, over all ranks."""
    lr: float = bounded(1e-4, gt=0)
    """Learning rate, with a cosine schedule."""
    held_out: int = bounded(16, ge=0)
    """Held-out prompts per iteration, on which the values are evaluated."""
    drop_equal: bool = False
    """Do not train on prompts whose completions all have the same reward, such as all right or all wrong (IRO, H.4)."""
    head_only: bool = False
    """Train the heads alone: all value models share the other weights of the initial model (SPI, Remark 3.2)."""

    def faults(self) -> list[str]:
        """List the options that are out of range."""
        return [f"--value.{dashed(name)} {value:g}: allowed is {what}" for name, value, what in out_of_bounds(self)]


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


def show_help(arguments: Sequence[str]) -> None:
    """Print the help of `nlgrpo value train`, or of ``compress``, and exit. Raises UserError for another word."""
    from_arguments(["--help"], compress=command_line.mode_of(arguments, "value", MODES) == "compress")


def check_value_config(cfg: ValueConfig) -> None:
    """Check a configuration. Raises UserError that lists every fault with the value and what is allowed."""
    from nlgrpo.config.validate import refuse, shared_faults  # PyTorch, which --help does not need

    data = cfg.data
    loss = cfg.loss
    compress = cfg.compress
    faults = shared_faults(cfg)
    if not data.rollouts:
        faults.append("data.rollouts = (): allowed is one or more folders of `nlgrpo rollout`")
    if data.weights and not data.rewards:
        faults.append(f"data.weights = {data.weights!r}: allowed is empty without data.rewards")
    faults += _length_faults("data.weights", data.weights, "data.rewards", data.rewards)
    faults += _length_faults("compress.betas", compress.betas, "compress.values", compress.values)
    if not all(0 < beta < LARGEST and math.isfinite(1 / beta) for beta in compress.betas):
        faults.append(f"compress.betas = {compress.betas!r}: allowed is numbers > 0")
    if compress.values:
        if data.rewards:
            faults.append(f"data.rewards = {data.rewards!r}: allowed is empty: a compressed model is fitted to values")
        if data.drop_equal:
            faults.append("data.drop_equal = True: allowed is false: a compressed model reads no rewards")
        if loss.kind != "mse" or loss.lam != 1 or loss.gamma != 1:
            faults.append("loss: compress needs kind = 'mse', lam = 1 and gamma = 1")
    if cfg.train.head_only and cfg.optim.algorithm != "adamw":
        # Muon is for the matrices of the blocks
        faults.append(f"optim.algorithm = {cfg.optim.algorithm!r}: allowed is 'adamw' with train.head_only")
    if cfg.train.head_only and cfg.lora.enabled:
        faults.append("train.head_only = True: allowed is false with adapters")
    refuse(faults)


def _length_faults(name: str, values: Sequence[float], of: str, names: Sequence[str]) -> list[str]:
    """Return the fault of a list of weights whose length differs from that of ``names``."""
    if not values or not names or len(values) == len(names):
        return []
    return [f"{name} has {len(values)} numbers for {len(names)} names in {of}: give one each, or none for 1 each"]
