"""Configurations as dictionaries: flattened, compared, and without defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nlgrpo.config.schema import Config, RewardConfig, to_dict


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"loss": {"beta": 0.1}}`` -> ``{"loss.beta": 0.1}``."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List the differences of two configurations (as dictionaries) as lines ``section.key: old -> new``."""
    lines = []
    for key in dict.fromkeys([*old, *new]):
        a = old.get(key)
        b = new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{prefix}{key}.")
        elif _plain(a) != _plain(b):
            lines.append(f"{prefix}{key}: {a!r} -> {b!r}")
    return lines


def without_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a `Config`, as a dictionary, that differ from the defaults; for each reward too."""
    defaults = to_dict(Config())
    kept = dict[str, Any]()
    for name, value in config.items():
        if name == "rewards":
            own = to_dict(Config(rewards={"x": RewardConfig(function="")}))["rewards"]["x"]
            kept[name] = {reward: _different(keys, own) for reward, keys in value.items()}
        elif isinstance(value, Mapping):
            if different := _different(value, defaults.get(name, {})):
                kept[name] = different
        elif value != defaults.get(name):
            kept[name] = value
    return kept


def _different(keys: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in defaults or _plain(value) != _plain(defaults[key])}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
