"""What a run is made of: nested dataclasses, a line under each field, and how files are laid over them."""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro

from nlgrpo.objectives.advantages import Baseline

AnyConfig = TypeVar("AnyConfig")  # of a run of any kind: a dataclass whose fields are sections


@dataclass
class ModelConfig:
    path: str = "story-lm"
    """A Hugging Face model directory, a hub name, or the embedded "story-lm"."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Type the model computes in; auto: bfloat16 on a GPU (float32 master weights), float32 on a CPU."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""


@dataclass
class DataConfig:
    source: str = "story-prompts"
    """A .jsonl, .json, .parquet, .csv or .txt file (.gz too), a `datasets` name, or the embedded "story-prompts"."""
    evaluation: str = ""
    """Prompts of the evaluation before and after, read the same way; empty: the last ones of `source`, held out."""
    split: str = "train"
    """Split of a `datasets` name or folder."""
    evaluation_split: str = ""
    """That of `evaluation`; empty: the same."""
    prompt_column: str = "prompt"
    """Column with a text, or with a conversation for the model's chat template."""
    template: str = "{prompt}"
    """Text around the columns, such as "Question: {question}\\nAnswer:"."""
    cut_after: str | None = None
    """The prompt is the text up to the last occurrence of this one, such as "\\n\\nAssistant:"."""
    separator: str | None = None
    """What parts the documents of a plain text; without it every line is one."""
    first_words: int | None = None
    """Keep so many words of the prompt column."""
    limit: int | None = None
    """Read the first so many examples only."""
    max_prompt_tokens: int | None = None
    """Drop longer prompts; none: those that leave the context no room for a completion."""
    shuffle: bool = True
    """Visit the prompts in a new order every epoch."""
    add_bos: bool | None = None
    """Begin each prompt with BOS; none: as the tokenizer does."""


@dataclass
class RolloutConfig:
    prompts: int = 6
    """P, prompts a step, over all ranks."""
    samples: int = 8
    """M, completions a prompt (the group)."""
    max_new_tokens: int = 128
    """Longest completion."""
    temperature: float = 1.0
    """Divides the logits, in sampling and in the loss."""
    top_k: int = 0
    """Keep the k most likely tokens; 0: all. Like the next two, it samples from another policy than the trained one."""
    top_p: float = 1.0
    """Keep the most likely tokens that hold this much probability."""
    min_p: float = 0.0
    """Keep the tokens that have this share of the likeliest one's probability."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end a completion besides the model's own EOS."""
    max_rows: int = 256
    """Completions decoded together on a rank, which bounds the cache."""


@dataclass
class RewardConfig:
    function: str = ""
    """`length(target=25, scale=128)`, `lexicon(path=..)`, `regex(pattern=..)`, `gsm8k()`, `classifier(path=..)`,
    `module:function` or `file.py:function`; for a diversity objective a kernel: `ngrams(n=2, of="words")`,
    `length(width=16)`, `equal(pattern=..)` or a function."""
    objective: str = "bon:4"
    """How completions are chosen at inference time, or what is asked of their rewards: "mean", "bon:N", "wor:N" (the
    worst of N), "bop:RATE" (the best of a Poisson number), "cvar:ALPHA" (lower tail), "soft:TAU", "erm:BETA",
    "distortion:" and a table or function of ranks; "bon:N:unbiased", "wor:N:unbiased"; ":kde" behind a rank-based one
    smooths the group's rewards. Of a kernel: "rao", "dpp:N", which ask for unlike completions."""
    weight: float = 1.0
    """Its share w_i in the aggregate of the objectives; 0: computed and logged only."""
    scale: float = 1.0
    """Multiplies what the function returns, before the objective; -1 for users who want it low."""
    transform: str = ""
    """What the objective sees instead of the reward, by samples of the reference (section `calibration`).
    InfAlign-CTRL: "identity", "log", "exp:T", "bon_fp:N", "won_fp:N", or a function of the rank; variational
    best-of-N: "vbon:N", "vbon:N:bound". Mostly with the objective "mean"."""
    timeout: float = 600.0
    """Seconds that one call may take."""
    on_error: Literal["stop", "skip"] = "stop"
    """skip: drop the groups that it failed on and count them."""


@dataclass
class CalibrationConfig:
    """The reference's samples: those that a reward with a transform is held against, and what `offline` learns from."""

    rollouts: str = ""
    """Folder of `nlgrpo rollout`."""
    missing: Literal["error", "draw"] = "error"
    """Of a prompt without rollouts: an error before training, or samples are drawn when the prompt comes."""
    samples: int = 100
    """K of a prompt that is drawn so; with rollouts theirs."""
    smoother: Literal["add-half", "exponential"] = "add-half"
    """Of log F in vbon, which is -inf below the least sample: (count + 1/2) / (K + 1), or a fitted curve."""


@dataclass
class OfflineConfig:
    """Of bon_sft, dpo, ipo and bonbon: how a step's samples, of calibration.rollouts, become winners and pairs."""

    n: int = 2
    """N. A prompt's samples of a step are cut at random into sets of N, each of which gives its best one or a pair."""
    rejected: Literal["worst", "random"] = "worst"
    """What the best of a set is paired with: the worst of it, or any other one."""
    alpha: float = 0.005
    """Of bonbon: weight of the likelihood of the best; that of the pairs is 1 - alpha."""


@dataclass
class LossConfig:
    algorithm: Literal["grpo", "ppo", "bon_sft", "dpo", "ipo", "bonbon"] = "grpo"
    """grpo and ppo take the linearised rewards of completions that the policy draws; in PPO they come with the last
    token, and a critic (section `critic`) tells the others apart. The rest are baselines that draw nothing: they learn
    from the reference's samples in calibration.rollouts (section `offline`), by the weighted sum of the rewards:
    likelihood of the best of N, and losses on pairs."""
    aggregate: str = "sum"
    """Of the objectives by their weights: "sum", "min" (of those with a weight), "smooth_min:GAMMA"."""
    aggregate_at: Literal["batch", "prompt"] = "batch"
    """Aggregate the means over all prompts (IAMA), or the values at each prompt, which is another objective."""
    aggregate_memory: float = 0.0
    """Share of its past that the moving average of a mean keeps in a step; 0: this step's prompts only."""
    baseline: Baseline = "mean"
    """Of a group's linearised rewards: their mean, the mean of the others (loo, without a bias of 1/M), or none."""
    normalization: Literal["grpo", "bnpo", "dapo", "dr_grpo"] = "dapo"
    """What the token losses are divided by: their sequence's length, the tokens of the step (bnpo) or of the rollout
    (dapo), or a constant."""
    surrogate: Literal["ppo", "cispo", "reinforce"] = "ppo"
    """The clipped ratio (PPO, GRPO), log-probs weighed by the ratio that eps_high caps (CISPO), or without a ratio."""
    level: Literal["token", "sequence"] = "token"
    """Ratio of every token (GRPO) or of the whole sequence (GSPO)."""
    eps_low: float = 0.2
    """The ratio is clipped below at 1 - eps_low."""
    eps_high: float = 0.2
    """And above at 1 + eps_high."""
    dual_clip: float | None = None
    """Of ppo: where the advantage is negative, a ratio above this gets no gradient (TRL's delta); none: any does."""
    beta: float = 1e-4
    """Weight of the KL divergence to the model that training starts from; 0 keeps no reference. It is DPO's and IPO's
    beta; bon_sft and bonbon have none."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence in the loss, in metrics and for target_kl; in the reward it is k1."""
    kl_in: Literal["loss", "reward"] = "loss"
    """In the loss token by token, or as -beta log(pi/pi_ref) of a completion in its linearised reward; in PPO's
    reward that of a token comes with it."""
    kl_importance: bool = False
    """Weigh k3 in the loss by the ratio (TRL's use_bias_correction_kl), exact in the gradient off-policy too."""
    target_kl: float | None = None
    """Adapt beta so that the KL per token stays near this value; none: beta is constant."""
    scale: Literal["none", "group", "batch"] = "none"
    """Divide advantages by the deviation of the group or batch, which undoes the scale of the linearisation."""
    epochs: int = 1
    """Passes over each rollout."""
    minibatches: int = 1
    """Optimiser steps in a pass."""

    @property
    def offline(self) -> bool:
        """Whether nothing is drawn, and a step learns from the reference's samples."""
        return self.paired or self.algorithm == "bon_sft"

    @property
    def paired(self) -> bool:
        return self.algorithm in ("dpo", "ipo", "bonbon")

    @property
    def has_reference(self) -> bool:
        """Whether the frozen model is needed."""
        return self.paired if self.offline else self.beta > 0


@dataclass
class CriticConfig:
    """Of PPO."""

    path: str = ""
    """What it begins as: a causal model, whose values are 0 at first, or a reward model; empty: as the policy."""
    trunk: Literal["own", "shared"] = "own"
    """A model of its own, or a head on the policy's last hidden states."""
    lr: float = 1e-5
    """Its learning rate; of a shared trunk, that of the head. It follows optim's schedule."""
    warmup_steps: int = 0
    """Steps in which the critic learns alone: the policy's learning rate is 0, and its schedule begins after them."""
    gamma: float = 1.0
    """Discount of what comes a token later."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation; 1: the return less the value."""
    clip: float = 0.2
    """A value that moves further than this from that of the rollout gains nothing; inf: no limit."""
    coef: float = 0.5
    """Weight of the value loss beside the policy's."""
    whiten: bool = True
    """Bring the advantages of all tokens to mean 0 and deviation 1. A KL in the loss then weighs beta times that
    deviation; one in the reward (loss.kl_in) is divided with it."""


@dataclass
class OptimConfig:
    lr: float = 1e-6
    """Learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up."""
    warmup_steps: int = 0
    """Training steps in which the learning rate rises from 0."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """The gradient's norm is clipped here; 0: never."""


@dataclass
class LoopConfig:
    """What every training loop has: how its work is cut, and what it keeps."""

    seed: int = 0
    """Of all that is drawn."""
    micro_batch_tokens: int | None = None
    """Tokens that one forward and backward takes; gradients accumulate over as many as are needed. None: 16384 on a
    GPU; 1024 on a CPU, whose caches then hold them."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    tensorboard: bool | None = None
    """None: where it is installed."""
    restart: bool = False
    """Begin anew in a folder that holds a run, whose files are removed."""


@dataclass
class EpochsConfig(LoopConfig):
    epochs: float = 1.0
    """Passes over the examples."""
    out: str = ""
    """Folder of the run; empty: runs/<name of the .toml file>, or what the command is called."""


@dataclass
class TrainConfig(LoopConfig):
    steps: int = 100
    """Rollouts to train on."""
    seed: int = 0
    """Of prompts, samples and minibatches."""
    out: str = ""
    """Folder of the run; empty: runs/<recipe>."""
    checkpoint_every: int = 50
    """Steps between checkpoints; 0: only at the end."""
    samples_every: int = 50
    """Steps between tables of sampled completions; 0: never."""


@dataclass
class EvaluationConfig:
    prompts: int = 64
    """Prompts sampled before and after training; 0: no evaluation."""
    samples: int = 16
    """n, completions of each."""
    ns: tuple[int, ...] = (1, 4)
    """N of the best-of-N values that are printed; 1 is the mean."""


@dataclass
class Config:
    """A whole run."""

    recipe: tyro.conf.Fixed[str] = "blank"
    """Name of the recipe that it began as."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    offline: OfflineConfig = field(default_factory=OfflineConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    @property
    def run(self) -> Path:
        return Path(os.path.expanduser(self.train.out) or f"runs/{self.recipe}")


# --- files and the command line ---------------------------------------------------------------------------------------


def to_dict(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(values: Mapping[str, Any], base: Config | None = None, where: str = "the configuration") -> Config:
    """``base`` with ``values`` laid over it; a [rewards] table replaces the rewards as a whole.

    Raises ValueError for a key that does not exist, with the nearest one that does, and for a value of another type.
    """
    return overlay(base or Config(), values, where)


def read_toml(path: Path, base: AnyConfig) -> AnyConfig:
    """``base`` with a TOML file laid over it. Raises ValueError as `from_dict`, and for a file that cannot be read."""
    if not path.is_file():
        raise ValueError(f"there is no configuration file {path}")
    try:
        values = tomllib.loads(path.read_text("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return overlay(base, values, str(path))


def overlay(base: AnyConfig, values: Mapping[str, Any], where: str) -> AnyConfig:
    """`from_dict` for a configuration of any kind."""
    return _overlay(base, values, where, "", type(base))


def _overlay(base: Any, values: Mapping[str, Any], where: str, prefix: str, root: type) -> Any:
    hints = typing.get_type_hints(type(base))
    changes = {}
    for key, value in values.items():
        name = prefix + key
        if key not in hints:
            raise ValueError(f"{where}: unknown key {name!r}{_hint(key, hints, prefix, root)}")
        current = getattr(base, key)
        if dataclasses.is_dataclass(current) or hints[key] == dict[str, RewardConfig]:
            if not isinstance(value, Mapping):
                raise ValueError(f"{where}: {name} is a table, and {value!r} came")
            if dataclasses.is_dataclass(current):
                changes[key] = _overlay(current, value, where, f"{name}.", root)
            else:
                tables = {k: v if isinstance(v, Mapping) else {"function": v} for k, v in value.items()}
                changes[key] = {k: _overlay(RewardConfig(), v, where, f"{name}.{k}.", root) for k, v in tables.items()}
        else:
            changes[key] = _coerce(value, hints[key], where, name)
    return dataclasses.replace(base, **changes)


def _coerce(value: Any, kind: Any, where: str, name: str) -> Any:
    """``value`` as the annotated type: an int serves as a float and a list as a tuple, nothing else is converted."""
    options = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
    for option in options:
        if typing.get_origin(option) is Literal and value in typing.get_args(option):
            return value
        if typing.get_origin(option) is tuple and isinstance(value, (list, tuple)):
            inner = typing.get_args(option)[0]
            return tuple(_coerce(item, inner, where, name) for item in value)
        if option is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if option in (int, str, bool, type(None)) and type(value) is option:
            return value
    raise ValueError(f"{where}: {name} = {value!r}: expected {' or '.join(map(_describe, options))}")


def _describe(kind: Any) -> str:
    """A type in the words of a TOML file."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, arguments))
    if typing.get_origin(kind) is tuple:
        return f"a list of {arguments[0].__name__}"
    return "none" if kind is type(None) else kind.__name__


def _hint(key: str, known: Mapping[str, Any], prefix: str, root: type) -> str:
    """What may have been meant: a key of this name in another section, or the nearest one in this section."""
    sections = {name: kind for name, kind in typing.get_type_hints(root).items() if dataclasses.is_dataclass(kind)}
    meant = [f"{name}.{key}" for name, kind in sections.items() if key in kind.__dataclass_fields__]
    meant = meant or [prefix + near for near in difflib.get_close_matches(key, known, n=1, cutoff=0.5)]
    if meant:
        return f"; did you mean {' or '.join(map(repr, meant))}?"
    return f"; known are: {', '.join(prefix + k for k in known)}"


def dashed(name: str) -> str:
    """A name as the command line has it."""
    return name.replace("_", "-")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Lines ``section.key: old -> new`` for what differs between two configurations as dictionaries."""
    lines = []
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{prefix}{key}.")
        elif _plain(a) != _plain(b):
            lines.append(f"{prefix}{key}: {a!r} -> {b!r}")
    return lines


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
