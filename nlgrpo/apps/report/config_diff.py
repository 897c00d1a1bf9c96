"""Differences between the configurations of several runs, and the lines that join runs in figures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nlgrpo.apps.report.evaluation_figures import Place
from nlgrpo.config.comparing import flat

IGNORED = ("train.out", "recipe")  # keys that do not affect the result
OBJECTIVE = re.compile(r"rewards\..+\.objective")
WEIGHT = re.compile(r"rewards\..+\.weight")

Flat = Mapping[str, Any]


def shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def columns(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return ``{key: {label: value}}`` of the keys that differ. Keys with the same values everywhere are joined."""
    flats = {label: flat(config) for label, config in configs.items() if config}
    found: dict[tuple[str, ...], list[str]] = {}
    for key in dict.fromkeys(key for values in flats.values() for key in values):
        values = tuple(shown(its[key]) if key in its else "" for its in flats.values())
        if len(set(values)) > 1 and key not in IGNORED:
            found.setdefault(values, []).append(key)
    return {", ".join(keys): dict(zip(flats, values, strict=True)) for values, keys in found.items()}


def places(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Place]:
    """Return the place of each model on a line, by label.

    Lines run over one setting: N (or another number of the objective), beta, target_kl or the weight of the first
    reward, whichever has the most values. Models that agree in everything else, apart from the weights of the other
    rewards, are on the same line.
    """
    flats = {label: flat(config) for label, config in configs.items() if config}
    differing = [key for keys in columns(configs) for key in keys.split(", ")]
    axes = {label: _numbers(its) for label, its in flats.items()}
    names = list(dict.fromkeys(name for its in axes.values() for name in its))
    counts = {name: len({its.get(name) for its in axes.values()}) for name in names}
    along = max(names, key=lambda name: counts[name], default="")
    if counts.get(along, 0) < 2:
        return {}
    found = {label: _place(its, axes[label], along, differing) for label, its in flats.items() if along in axes[label]}
    whole = {name: {line for line, its, _ in found.values() if its == name} for _, name, _ in found.values()}
    return {
        label: replace(place, line=name if len(whole[name]) == 1 else line)
        for label, (line, name, place) in found.items()
    }


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


def _place(its: Flat, numbers: Mapping[str, float], along: str, differing: Sequence[str]) -> tuple[str, str, Place]:
    """Return the line's full name with all settings its models share, its short name, and the place on it."""
    objectives = [shown(text) for text in dict.fromkeys(v for key, v in its.items() if OBJECTIVE.fullmatch(key))]
    families = list(dict.fromkeys(text.partition(":")[0] for text in objectives))
    rest = [
        f"{key}={shown(its[key])}"
        for key in differing
        if key in its
        and not (OBJECTIVE.fullmatch(key) or key == f"loss.{along}" or (along == "weight" and WEIGHT.fullmatch(key)))
    ]
    over = along if along != "N" else "N" if families == ["bon"] else "its parameter"
    name = f"{'+'.join(families if along == 'N' else objectives)} over {over}"
    text = "+".join(objectives) if along == "N" else f"{along} {numbers[along]:g}"
    return ", ".join([name, *rest]), name, Place("", numbers[along], text)
