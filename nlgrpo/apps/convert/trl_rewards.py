"""Rewards of a TRL run as tables [rewards.NAME]."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nlgrpo.apps.convert import trl_options
from nlgrpo.apps.convert.trl_output import Converted
from nlgrpo.apps.convert.trl_script import Reward
from nlgrpo.errors import UserError

# TRL's own functions, by the names of its script.
BUILTIN = {
    "accuracy_reward": "math(column='solution')",
    "get_soft_overlong_punishment": "overlong(limit=1280, margin=256)",
    "think_format_reward": "trl.rewards:think_format_reward",
    "reasoning_accuracy_reward": "trl.rewards:reasoning_accuracy_reward",
}
WEIGHT = trl_options.Option(1.0, "", "rewards.NAME.weight", float)


def convert(given: Mapping[str, Any], out: Converted) -> None:
    """Write a table for each reward. Raises UserError for weights that are not one number for each."""
    functions = given["reward_funcs"] or []
    if not isinstance(functions, str | list | tuple):
        raise UserError(f"reward_funcs = {functions!r}: expected names of functions")
    rewards = [_reward(one) for one in ([functions] if isinstance(functions, str) else functions)]
    if path := given["reward_model_name_or_path"]:
        rewards.insert(0, Reward("classifier", f"classifier(path={path!r})"))
    weights = _weights(given["reward_weights"], len(rewards))
    for name, reward, weight in zip(_names(rewards), rewards, weights, strict=True):
        out.set(f"rewards.{name}.function", reward.function)
        out.set(f"rewards.{name}.objective", "mean")  # the expected reward
        if weight != 1:
            out.set(f"rewards.{name}.weight", weight)
        if reward.note:
            out.notes.append(f"rewards.{name}.function: {reward.note}")
    if not rewards:
        out.notes.append("rewards: a table [rewards.NAME] with function and objective")


def _weights(given: Any, rewards: int) -> list[float]:
    if given is None:
        return [1.0] * rewards
    weights = list(given) if isinstance(given, list | tuple) else [given]
    if rewards and len(weights) != rewards:
        raise UserError(f"reward_weights has {len(weights)} values for {rewards} rewards; give one for each")
    return [trl_options.typed("reward_weights", weight, WEIGHT) for weight in weights][:rewards]


def _reward(given: Any) -> Reward:
    """A reward of a script, or one named in TRL's way: a function of its own, or a dotted path."""
    reward = given if isinstance(given, Reward) else Reward(str(given).rpartition(".")[2], str(given))
    if ":" in reward.function or "(" in reward.function:
        return reward
    module, _, name = reward.function.rpartition(".")
    if name in BUILTIN and (not module or module.split(".")[0] == "trl"):
        function = BUILTIN[name]
        return Reward(function.partition("(")[0].rpartition(":")[2], function)
    if module:
        return Reward(name, f"{module}:{name}")
    return Reward(name, f"rewards.py:{name}", f"the file of {name}")


def _names(rewards: Sequence[Reward]) -> list[str]:
    """A name for each reward: that of its function; with the module or a number where several have it."""
    own = [re.sub(r"\W", "_", reward.name).strip("_") or "reward" for reward in rewards]
    names = list[str]()
    for name, reward in zip(own, rewards, strict=True):
        module = reward.function.partition("(")[0].rpartition(":")[0].removesuffix(".py")
        if own.count(name) > 1 and module:
            name = re.sub(r"\W", "_", f"{module}_{name}").strip("_")
        unique = name[-60:]
        number = 1
        while unique in names:
            number += 1
            unique = f"{name[-60:]}_{number}"
        names.append(unique)
    return names
