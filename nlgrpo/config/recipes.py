"""Recipes: functions that return a whole configuration. ``nlgrpo train NAME`` runs the recipe NAME."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from nlgrpo.config.overrides import override
from nlgrpo.config.schema import (
    Config,
    DataConfig,
    EvaluationConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
    read_toml,
)
from nlgrpo.data.folders import SUFFIXES
from nlgrpo.errors import UserError, did_you_mean, nearest


def maze() -> Config:
    """Mazes, trained for pass@8: the model keeps several ways to try, so more mazes are solved in several samples."""
    return _maze("maze", "bon:8:unbiased", lr=1e-4)


def maze_grpo() -> Config:
    """The same mazes by GRPO, which divides by the group's standard deviation: fewer are solved in several samples."""
    plain = _maze("maze-grpo", "mean", lr=3e-5)
    return dataclasses.replace(plain, loss=dataclasses.replace(plain.loss, scale="group"))


def _maze(recipe: str, objective: str, lr: float) -> Config:
    """Mazes of 4 x 4 rooms, a verifier as the reward, no KL penalty and no clipping of gradients.

    The learning rates were chosen for each objective on validation mazes (experiments/mazes/README.md).
    """
    return Config(
        recipe=recipe,
        model=ModelConfig("maze-lm"),
        data=DataConfig(source="maze-train", evaluation="maze-test"),
        rollout=RolloutConfig(prompts=16, samples=16, max_new_tokens=40),
        rewards={"solved": RewardConfig("maze()", objective)},
        loss=LossConfig(beta=0.0, log_kl_every=10),
        optim=OptimConfig(lr=lr, schedule="linear", warmup_steps=10, max_grad_norm=0.0),
        train=TrainConfig(steps=300, checkpoint_every=100, samples_every=100),
        evaluation=EvaluationConfig(prompts=128, samples=256, ns=(1, 8, 64, 256)),
    )


def length_bon() -> Config:
    """Two conflicting length rewards, each under best-of-4 (IAMA, 6.1): the model learns to write short and long."""
    return _length("length-bon", "bon:4")


def length_mean() -> Config:
    """The same two rewards in expectation (plain GRPO): the trained model writes medium lengths."""
    return _length("length-mean", "mean")


def _length(recipe: str, objective: str) -> Config:
    """IAMA's L1 = 50, L2 = 150 of 256 tokens, halved for the embedded model's completions of 128; beta of Table 2."""
    limit = 128
    return Config(
        recipe=recipe,
        data=DataConfig(evaluation="story-evaluation"),
        rollout=RolloutConfig(prompts=6, samples=8, max_new_tokens=limit),
        rewards={
            "short": RewardConfig(f"length(target=25, scale={limit})", objective, 0.5),
            "long": RewardConfig(f"length(target=75, scale={limit})", objective, 0.5),
        },
        loss=LossConfig(beta=1e-4),
        optim=OptimConfig(lr=3e-4, betas=(0.9, 0.98)),
        train=TrainConfig(steps=400, checkpoint_every=200, samples_every=200),
    )


def story_mix() -> Config:
    """Three rewards with an objective each: joy under best-of-4, length under worst-of-4, diversity of the stories."""
    plain = _length("story-mix", "mean")
    return dataclasses.replace(
        plain,
        rewards={
            "joy": RewardConfig(r"regex(pattern=r'\b(happy|glad|smiled|laughed|fun)\b')", "bon:4", 1.0),
            "length": RewardConfig("length(target=60, scale=128)", "wor:4", 4.0),
            "diversity": RewardConfig("ngrams(n=1, of='words')", "rao", 1.0),
        },
        loss=dataclasses.replace(plain.loss, beta=0.1),  # at 1e-4 the stories become diverse by losing their words
        train=dataclasses.replace(plain.train, steps=300),
    )


def length_iama() -> Config:
    """The length rewards at the paper's size: Mistral 7B, best-of-4, 3000 steps; for 6 GPUs (IAMA, 6.1)."""
    return _length_iama("length-iama", "bon:4")


def length_iama_bon8() -> Config:
    """`length-iama` under best-of-8, where N = M (IAMA, J.2)."""
    return _length_iama("length-iama-bon8", "bon:8")


def length_iama_soft() -> Config:
    """`length-iama` under soft best-of-N with tau = 0.09 (IAMA, 6.1)."""
    return _length_iama("length-iama-soft", "soft:0.09")


def _length_iama(recipe: str, objective: str) -> Config:
    """Sec. 6.1, Table 2 and appendix I: L1 = 50, L2 = 150, L = 256 tokens; M = 8 and 48 completions per step.

    3000 steps, a constant learning rate of 1e-6, beta = 1e-4, no scaling of rewards. The paper says "Ultra-Feedback"
    and "Mistral 7B Instruct"; the names on the hub, and prompts of up to 512 tokens, are ours.
    """
    limit = 256
    source = "trl-lib/ultrafeedback-prompt"
    return Config(
        recipe=recipe,
        model=ModelConfig("mistralai/Mistral-7B-Instruct-v0.1", activation_checkpointing=True),
        data=DataConfig(source=source, evaluation=source, evaluation_split="test", max_prompt_tokens=512),
        rollout=RolloutConfig(prompts=6, samples=8, max_new_tokens=limit),
        rewards={
            "short": RewardConfig(f"length(target=50, scale={limit})", objective, 0.5),
            "long": RewardConfig(f"length(target=150, scale={limit})", objective, 0.5),
        },
        loss=LossConfig(beta=1e-4),
        optim=OptimConfig(lr=1e-6),
        train=TrainConfig(steps=3000, checkpoint_every=100, samples_every=100),
    )


def helpful_harmless() -> Config:
    """Helpful and harmless answers of a 7B model, each under best-of-4, at a fixed KL; for 6 GPUs (IAMA, 6.2)."""
    return _helpful_harmless("helpful-harmless", "bon:4")


def helpful_harmless_bon8() -> Config:
    """`helpful-harmless` under best-of-8, where N = M (IAMA, J.3)."""
    return _helpful_harmless("helpful-harmless-bon8", "bon:8")


def _helpful_harmless(recipe: str, objective: str) -> Config:
    """Table 2 and appendix I: M = 8, 48 completions per step, 8 per device, so that 6 ranks have one prompt each.

    1000 steps, a learning rate that falls linearly from 1e-6, beta from 1e-2 with a controller that keeps the KL per
    token at 0.1, no scaling of rewards; evaluated on the first 1000 prompts of the test split. The weights of the two
    rewards are swept. Both reward models are Qwen3 4B models that `nlgrpo reward-model train` trained on the helpful
    and harmless pairs of hh-rlhf. experiments/configs/helpful_harmless.toml is the same experiment on a CPU.
    """
    source = "Anthropic/hh-rlhf"
    return Config(
        recipe=recipe,
        model=ModelConfig("PKU-Alignment/alpaca-7b-reproduced", activation_checkpointing=True),
        data=DataConfig(
            source=source,
            evaluation=source,
            evaluation_split="test",
            prompt_column="chosen",
            cut_after="\n\nAssistant:",
            max_prompt_tokens=512,
        ),
        rollout=RolloutConfig(prompts=6, samples=8, max_new_tokens=256, max_rows=128),
        rewards={
            name: RewardConfig(f"classifier(path='runs/{name}/model', dtype='bfloat16', batch_size=16)", objective, 0.5)
            for name in ("helpful", "harmless")
        },
        loss=LossConfig(beta=1e-2, target_kl=0.1),
        optim=OptimConfig(lr=1e-6, schedule="linear"),
        train=TrainConfig(steps=1000, checkpoint_every=100, samples_every=100),
        evaluation=EvaluationConfig(prompts=1000),
    )


def blank() -> Config:
    """Only defaults (learning rate of IAMA, Table 2): bring your own model, data and rewards."""
    return Config(data=DataConfig(source=""))


RECIPES: dict[str, Callable[[], Config]] = {
    "maze": maze,
    "maze-grpo": maze_grpo,
    "length-bon": length_bon,
    "length-mean": length_mean,
    "story-mix": story_mix,
    "length-iama": length_iama,
    "length-iama-bon8": length_iama_bon8,
    "length-iama-soft": length_iama_soft,
    "helpful-harmless": helpful_harmless,
    "helpful-harmless-bon8": helpful_harmless_bon8,
    "blank": blank,
}
DEFAULT = "maze"


def recipe(name: str) -> Config:
    """Return the recipe of this name. Raises UserError with the nearest name if there is none."""
    if name not in RECIPES:
        known = f"; recipes: {', '.join(RECIPES)}, or a file whose name ends in .toml"
        raise UserError(f"unknown recipe {name!r}{did_you_mean(nearest(name, RECIPES), known)}")
    return RECIPES[name]()


def from_arguments(arguments: Sequence[str]) -> tuple[Config, bool]:
    """Parse ``[recipe] [file.toml] [--tiny] [--dry-run] [--section.key value ..]``; each part overrides the one before.

    A TOML file may name its recipe (``recipe = "length-bon"``). Otherwise it starts from ``blank``, and the run is
    named after the file. ``--tiny`` lays the file's table ``[tiny]`` over it, and the run is named ``NAME-tiny``.
    Returns the configuration, and whether ``--dry-run`` was given.
    """
    for argument in arguments:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise UserError(f"{argument!r} is not valid UTF-8")
    dry_run = "--dry-run" in arguments
    tiny = "--tiny" in arguments
    rest = [argument for argument in arguments if argument not in ("--dry-run", "--tiny")]
    named: list[str] = []
    while rest and not rest[0].startswith("-"):
        named.append(rest.pop(0))
    files = [Path(name) for name in named if name.endswith(".toml")]
    names = [name for name in named if not name.endswith(".toml")]
    if len(names) > 1 or len(files) > 1:
        raise UserError(f"expected at most one recipe and one .toml file, got {' '.join(named)}")
    if tiny and not files:
        raise UserError("--tiny needs a .toml file with a table [tiny], such as examples/gsm8k_qwen.toml")
    if files:
        cfg = _of_file(files[0], names[0] if names else None, tiny)
    else:
        cfg = recipe(names[0] if names else _without_a_name(rest))
    cfg = override(cfg, rest)
    if files:
        _check_paths(cfg, files[0])
    return cfg, dry_run


def _without_a_name(arguments: Sequence[str]) -> str:
    """Return the recipe of a command that names none: ``--help`` shows the defaults that a file starts from."""
    return "blank" if {"-h", "--help"} & set(arguments) else DEFAULT


def _of_file(path: Path, name: str | None, tiny: bool) -> Config:
    """Lay the file over the recipe ``name``, over the recipe that the file names, or over ``blank``."""
    cfg = read_toml(path, recipe(name) if name else dataclasses.replace(recipe("blank"), recipe=""), tiny=tiny)
    if name and cfg.recipe != name:
        raise UserError(f"{path} names the recipe {cfg.recipe!r}, but {name!r} was given; name only one of them")
    if not name and cfg.recipe:
        cfg = read_toml(path, recipe(cfg.recipe), tiny=tiny)
    elif not name:
        cfg = dataclasses.replace(cfg, recipe=path.stem)
    if not tiny:
        return cfg
    full = read_toml(path, recipe("blank")).train.out
    out = f"{full}-tiny" if full and cfg.train.out == full else cfg.train.out  # a folder of its own
    return dataclasses.replace(cfg, recipe=f"{cfg.recipe}-tiny", train=dataclasses.replace(cfg.train, out=out))


def _check_paths(cfg: Config, file: Path) -> None:
    """Raise UserError for a file that is beside the configuration file, but not in the working directory."""
    named = {"data.source": cfg.data.source, "data.evaluation": cfg.data.evaluation}
    for name, reward in cfg.rewards.items():
        named[f"rewards.{name}.function"] = reward.function
    for key, value in named.items():
        path = Path(value.rpartition(".py:")[0] + ".py" if ".py:" in value else value)
        if path.suffix in (".py", ".gz", *SUFFIXES) and not os.path.isfile(path) and os.path.isfile(file.parent / path):
            raise UserError(
                f"{file}: {key} = {value!r} is beside this file, but paths are relative to the working directory: "
                f"write {str(file.parent / value)!r}, or start nlgrpo in {file.parent}"
            )
