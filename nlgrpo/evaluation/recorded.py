"""Figures of plain GRPO that were recorded once for the recipe ``maze``, to be shown beside those of a run.

`scripts/maze_record.py --recorded` writes the file. See docs/experiments/mazes.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

FILE = "maze-grpo.json"
Interval = tuple[float, float, float]  # value, low, high


@dataclass(frozen=True)
class Recorded:
    """pass@k of models that were trained once: value and 95% interval for each k, and how they were made."""

    label: str
    about: str
    values: Mapping[int, Interval]


def beside(config: Mapping[str, Any]) -> Recorded | None:
    """Return the recorded figures that may be compared with a run of this configuration, as a dictionary.

    None unless the run trains the same model from the same weights, and evaluates it on the same prompts with the same
    reward.
    """
    content = json.loads((files("nlgrpo.data") / "assets" / FILE).read_text("utf-8"))
    if any(value_of(config, key) != value for key, value in content["same"].items()):
        return None
    rewards = config.get("rewards")
    rewards = rewards if isinstance(rewards, Mapping) else {}
    if [value_of(rewards, f"{name}.function") for name in rewards] != [content["reward"]]:
        return None
    values = {int(k): (value, low, high) for k, (value, low, high) in content["pass_at_k"].items()}
    return Recorded(content["label"], content["about"], values)


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """Value of a key such as ``"model.path"``; None if the configuration, read from a file, does not have it."""
    section, _, name = key.partition(".")
    found = config.get(section)
    return found.get(name) if isinstance(found, Mapping) else None
