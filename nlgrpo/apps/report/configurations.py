"""Configurations of runs as read from their files: what differs between them, and runs that differ in the seed only.

A file may be damaged, or of another version, so that nothing is known about the content of a configuration.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nlgrpo.config.comparing import flat

FILES = ("config.json", "config.toml")
IGNORED = ("train.out", "recipe")  # keys that do not affect the result
OBJECTIVE = re.compile(r"rewards\..+\.objective")
WEIGHT = re.compile(r"rewards\..+\.weight")
TARGET = re.compile(r"\blength\([^)]*?\btarget\s*=\s*([0-9.]+)")

Flat = Mapping[str, Any]  # of `flat`


def read(run: Path, notes: list[str]) -> dict[str, Any]:
    """Read the configuration of a run. If it is missing or damaged, return an empty one and add a note."""
    for name in FILES:
        path = run / name
        if not path.is_file():
            continue
        try:
            text = path.read_text("utf-8")
            config = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except ValueError as error:
            notes.append(f"{name} cannot be read ({error}).")
            return {}
        if not isinstance(config, dict):
            notes.append(f"{name} cannot be read (its content is not a table).")
            return {}
        return config
    notes.append(f"{' or '.join(FILES)} is missing; the settings are left out.")
    return {}


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a configuration; empty if it is missing or not a table."""
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def objectives(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the objectives of a configuration by reward, such as ``{"short": "bon:4"}``; empty if it names none."""
    rewards = section(config, "rewards")
    found = {}
    for name, reward in rewards.items():
        objective = reward.get("objective") if isinstance(reward, Mapping) else None
        if isinstance(objective, str):
            found[name] = objective
    return found


def length_targets(config: Any) -> list[float]:
    """Return the targets of all ``length(target=..)`` rewards in a configuration, sorted."""
    if isinstance(config, Mapping):
        config = list(config.values())
    if isinstance(config, list):
        return sorted({target for item in config for target in length_targets(item)})
    if isinstance(config, str):
        return [float(target) for target in TARGET.findall(config)]
    return []


# --- runs that differ in the seed only --------------------------------------------------------------------------------


def seed_of(config: Mapping[str, Any]) -> Any:
    """Return the seed of a run; None if its configuration has none."""
    return section(config, "train").get("seed")


def without_seed(config: Mapping[str, Any]) -> str:
    """Return the configuration without the seed and the folder, as text: equal for runs of one setting."""
    train = {key: value for key, value in section(config, "train").items() if key not in ("seed", "out")}
    return json.dumps({**config, "train": train}, sort_keys=True, default=str)


def grouped(runs: Sequence[tuple[str, Any]]) -> list[list[int]]:
    """Group the indices of runs, given their settings and seeds: one group per setting, in the order of the first run.

    A run without a seed, or with one that the group has already, begins a group of its own.
    """
    groups: list[list[int]] = []
    for number, (setting, seed) in enumerate(runs):
        for group in groups:
            seeds = [runs[other][1] for other in group]
            if runs[group[0]][0] == setting and seed is not None and None not in seeds and seed not in seeds:
                group.append(number)
                break
        else:
            groups.append([number])
    return groups


# --- what differs between runs ----------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """Return a value as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def differing(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return ``{key: {label: value}}`` of the keys that differ. Keys with the same values everywhere are joined."""
    flats = {label: flat(config) for label, config in configs.items() if config}
    every = dict.fromkeys(key for its in flats.values() for key in its)
    keys_of: dict[tuple[str, ...], list[str]] = {}  # by their values in all configurations
    for key in every:
        values = tuple(shown(its[key]) if key in its else "" for its in flats.values())
        if len(set(values)) > 1 and key not in IGNORED:
            keys_of.setdefault(values, []).append(key)
    return {", ".join(keys): dict(zip(flats, values, strict=True)) for values, keys in keys_of.items()}


@dataclass(frozen=True)
class Place:
    """Place of a model on a line that joins models: the line's name, the model's order on it, and the point's text."""

    line: str
    along: float = math.nan
    text: str = ""


def places(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Place]:
    """Return the place of each model on a line, by label.

    Lines run over one setting: N (or another number of the objective), beta, target_kl or the weight of the first
    reward, whichever has the most values. Models that agree in everything else, apart from the weights of the other
    rewards, are on the same line.
    """
    flats = {label: flat(config) for label, config in configs.items() if config}
    numbers = {label: _numbers(its) for label, its in flats.items()}
    values: dict[str, set[float | None]] = {}
    for of_model in numbers.values():
        for name in of_model:
            values.setdefault(name, {its.get(name) for its in numbers.values()})
    along = max(values, key=lambda name: len(values[name]), default="")
    if len(values.get(along, ())) < 2:
        return {}

    keys = [key for joined in differing(configs) for key in joined.split(", ")]
    short = {}
    full = {}
    for label, its in flats.items():
        if along in numbers[label]:
            short[label] = _line(its, along)
            full[label] = ", ".join([short[label], *_rest(its, along, keys)])
    lines: dict[str, set[str]] = {}  # the full names of each short name
    for label, name in short.items():
        lines.setdefault(name, set()).add(full[label])

    found = {}
    for label, name in short.items():
        line = name if len(lines[name]) == 1 else full[label]
        number = numbers[label][along]
        text = "+".join(_objectives(flats[label])) if along == "N" else f"{along} {number:g}"
        found[label] = Place(line, number, text)
    return found


def _numbers(its: Flat) -> dict[str, float]:
    """Settings of a configuration that a line can run over."""
    found: dict[str, float] = {}
    for key, value in its.items():
        if OBJECTIVE.fullmatch(key) and isinstance(value, str):
            number = re.match(r"\w+:([0-9.eE+-]+)", value)
            if number and "N" not in found:
                found["N"] = _float(number[1])
        elif WEIGHT.fullmatch(key) and "weight" not in found:
            found["weight"] = _float(value)
        elif key in ("loss.beta", "loss.target_kl") and value is not None:
            found[key.removeprefix("loss.")] = _float(value)
    return {name: number for name, number in found.items() if not math.isnan(number)}


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _objectives(its: Flat) -> list[str]:
    different = dict.fromkeys(value for key, value in its.items() if OBJECTIVE.fullmatch(key))
    return [shown(value) for value in different]


def _line(its: Flat, along: str) -> str:
    """Name of the line over the setting ``along``: ``bon over N``, ``bon:4 over beta``."""
    objectives = _objectives(its)
    if along != "N":
        return f"{'+'.join(objectives)} over {along}"
    families = list(dict.fromkeys(text.partition(":")[0] for text in objectives))
    return f"{'+'.join(families)} over {'N' if families == ['bon'] else 'its parameter'}"


def _rest(its: Flat, along: str, keys: Sequence[str]) -> list[str]:
    """The other settings that differ between runs, which all models of a line share."""
    rest = []
    for key in keys:
        on_the_line = (
            OBJECTIVE.fullmatch(key) or key == f"loss.{along}" or (along == "weight" and WEIGHT.fullmatch(key))
        )
        if key in its and not on_the_line:
            rest.append(f"{key}={shown(its[key])}")
    return rest
