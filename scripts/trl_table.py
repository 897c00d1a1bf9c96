"""The tables of TRL's options, a page of the documentation, from nlgrpo/apps/convert/trl_options.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from nlgrpo.apps.convert import trl_options
from nlgrpo.apps.convert.trl_options import Option
from nlgrpo.config import comparing
from nlgrpo.config.schema import Config, RewardConfig, to_dict

GROUPS: dict[str, Mapping[str, Option]] = {
    "": trl_options.GRPO,
    "RLOOConfig": trl_options.RLOO,
    "TRL's script": trl_options.SCRIPT,
    "the trainer": trl_options.TRAINER,
    "LoraConfig": trl_options.LORA,
    "earlier versions, other recipes": trl_options.OTHERS,
}


def tables() -> str:
    """Return both tables: options that set keys of nlgrpo, and those that are not carried over."""
    lines = ["| option of TRL (default) | nlgrpo (default) | |", "|---|---|---|"]
    for group, options in GROUPS.items():
        of = f", {group}" * bool(group)
        for name, option in options.items():
            if option.keys:
                lines.append(f"| `{name}` ({_value(option.default)}{of}) | {_keys(option.keys)} | {option.note} |")
    lines += ["", "| not carried over | because |", "|---|---|"]
    return "\n".join([*lines, *_without()]) + "\n"


def _without() -> Iterator[str]:
    for group, options in GROUPS.items():
        names: dict[str, list[str]] = {}
        for name, option in options.items():
            if not option.keys:
                names.setdefault(option.note, []).append(f"`{name}`")
        of = f" ({group})" * bool(group)
        yield from (f"| {', '.join(several)}{of} | {note} |" for note, several in names.items())


def _keys(keys: str) -> str:
    """Keys with their defaults; other texts, such as "section lora", as they are."""
    defaults = comparing.flat(to_dict(Config())) | comparing.flat({"rewards": {"NAME": asdict(RewardConfig())}})
    shown = [f"`{key}` ({_value(defaults[key])})" if key in defaults else key for key in keys.split(", ")]
    return ", ".join(shown)


def _value(value: Any) -> str:
    return "None" if value is None else json.dumps(list(value) if isinstance(value, tuple) else value)


def page() -> str:
    """Return the page of the documentation."""
    about = (
        "Every option of TRL 1.16 and of PEFT's `LoraConfig`, and the key of nlgrpo that it becomes. "
        "[Migrating from TRL](../migrating-from-trl.md) explains `nlgrpo from-trl`, which reads them."
    )
    return f"# Options of TRL\n\n{about}\n\n{tables()}"
