"""A grid of configurations: which values the command line gives an option, which points they make, and their names.

One rule parts values: a comma that stands outside of brackets and quotes. ``length(target=25, scale=128)`` is one value
for its brackets, and so is ``'distortion:0,1,2'`` for its quotes, which are taken off. A key that is a list, such as
``evaluation.ns``, takes every one of several values in brackets: ``[1,4],[1,8]``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nlgrpo.config.overrides import LISTS
from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import Config, dashed

OBJECTIVE = "objective"  # the option for the objectives of all rewards
SHORT = {"seed": "train.seed"}
NOT_SWEPT = {
    "train.out": "every point has a folder of its own; the sweep's is named by --out",
    "train.restart": "a point begins anew when its folder is removed",
}
LONGEST_PART, LONGEST_NAME = 60, 120  # characters in a folder's name: of one key with its value, and of all


# --- the command line -------------------------------------------------------------------------------------------------


def split(text: str) -> list[str]:
    """The values in ``text``, parted by commas outside of brackets and quotes; without a comma it is one as it stands.

    A quote counts inside brackets and at the beginning of a value, so that an apostrophe is none. Raises ValueError for
    brackets or quotes that are left open, and for an empty value.
    """
    if "," not in text:
        return [text]
    parts, start, depth, quote = [], 0, 0, ""
    for found in re.finditer(r"\\.|[,'\"()\[\]{}]", text, re.DOTALL):
        mark, at = found[0], found.start()
        if quote:
            quote = "" if mark == quote else quote
        elif mark in ("'", '"') and (depth > 0 or not text[start:at].strip()):
            quote = mark
        elif mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
        elif mark == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
        if depth < 0:
            break
    if quote or depth:
        raise ValueError(f"{text}: {'a quote' if quote else 'a bracket'} has no partner; put such a value in quotes")
    values = [part.strip() for part in (*parts, text[start:])]
    if not all(values):
        raise ValueError(f"{text}: a value between its commas is empty; an empty text is ''")
    return [_unquoted(value) for value in values]


def _unquoted(value: str) -> str:
    whole = re.fullmatch(r"""'((?:\\.|[^'\\])*)'|"((?:\\.|[^"\\])*)\"""", value, re.DOTALL)
    return value if whole is None else whole[1] if whole[1] is not None else whole[2]


@dataclass(frozen=True)
class Command:
    """What a sweep's command line says: ``start`` goes to every point as it is, ``options`` have a value or several."""

    start: list[str]
    options: dict[str, list[str]]

    def axes(self, known: Collection[str] = ()) -> list[str]:
        """The options with several values, and those with one that an earlier command gave several."""
        before = {dashed(name) for name in known}
        return [key for key, values in self.options.items() if len(values) > 1 or dashed(key) in before]

    def rows(self) -> list[dict[str, str]]:
        """The options of every point: the cross product, in which the last option changes fastest."""
        return [dict(zip(self.options, values, strict=True)) for values in itertools.product(*self.options.values())]


def read(arguments: Sequence[str]) -> Command:
    """``[recipe] [file.toml] [--key value[,value ...] ...]``, with ``--objective`` and ``--seed`` as short forms.

    Raises ValueError for an option that is given twice, and for values that are not parted by commas.
    """
    first = next((i for i, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    start, options = list(arguments[:first]), dict[str, list[str]]()
    for key, parts in _options(arguments[first:]):
        if not parts:
            start.append(f"--{key}")
            continue
        if dashed(key) in map(dashed, options):
            raise ValueError(f"--{key} is given twice; give it once, with commas between its values")
        options[key] = _values(key, parts)
    return Command(start, options)


def _options(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The options by their names without dashes, each with the arguments up to the next one."""
    found: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            key, equals, value = argument[2:].partition("=")
            found.append((SHORT.get(key, key), [value] if equals else []))
        elif found:
            found[-1][1].append(argument)
        else:
            raise ValueError(f"{argument} is no option; the keys are listed by `nlgrpo train --help`")
    return found


def _values(key: str, parts: Sequence[str]) -> list[str]:
    is_list = dashed(f"--{key}") in LISTS
    if len(parts) > 1 and not is_list:
        raise ValueError(f"--{key} {' '.join(parts)}: values are parted by commas, without spaces: {','.join(parts)}")
    if len(parts) > 1:  # one list, as `nlgrpo train` takes it
        return [f"[{','.join(parts)}]"]
    values = split(parts[0])
    if is_list and len(values) > 1 and not all(value[0] + value[-1] in ("[]", "()") for value in values):
        one, several = f"[{','.join(values)}]", ",".join(f"[{value}]" for value in values)
        raise ValueError(f"--{key} is a list: write {one} for one value, {several} for {len(values)}")
    return values


# --- the points -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A point: its values of what varies, by dotted names, the arguments of `nlgrpo train`, and what they make."""

    overrides: dict[str, Any]
    arguments: list[str]
    config: Config


def settings(start: Sequence[str], rows: Sequence[Mapping[str, str]], axes: Sequence[str]) -> list[Setting]:
    """A point for each of ``rows``, which have the same options; ``axes`` are those by which points differ.

    Raises ValueError for options that a sweep sets itself, and for rows that make the same configuration.
    """
    for key in [*(argument.lstrip("-").split("=")[0] for argument in start), *rows[0]]:
        if key in NOT_SWEPT:
            raise ValueError(f"--{key} cannot be given to a sweep: {NOT_SWEPT[key]}")
    rewards = from_arguments([*start, *_arguments(rows[0], [])])[0].rewards
    if OBJECTIVE in rows[0] and not rewards:
        raise ValueError("--objective is that of all rewards, and there is none; add one with --rewards.NAME.function")
    found: dict[str, Setting] = {}
    for row in rows:
        arguments = [*start, *_arguments(row, rewards)]
        config, _ = from_arguments(arguments)
        setting = Setting(dict(_override(config, key, row[key]) for key in axes), arguments, config)
        twin = found.setdefault(repr(config), setting)
        if twin is not setting:
            raise ValueError(f"two points are one configuration: {twin.overrides} and {setting.overrides}")
    return list(found.values())


def _arguments(options: Mapping[str, str], rewards: Collection[str]) -> list[str]:
    """The options as `nlgrpo train` takes them; one reward's own objective comes after that of all, and prevails."""
    arguments = [f"--rewards.{name}.objective={options[OBJECTIVE]}" for name in rewards if OBJECTIVE in options]
    for key, text in options.items():
        if dashed(f"--{key}") in LISTS:
            inner = re.sub(r"^[\[(](.*)[\])]$", r"\1", text.strip(), flags=re.DOTALL)
            arguments += [f"--{key}", *(item.strip() for item in inner.split(",") if item.strip())]
        elif key != OBJECTIVE:
            arguments.append(f"--{key}={text}")
    return arguments


def _override(config: Config, key: str, text: str) -> tuple[str, Any]:
    """A key's name as the configuration has it, and its value there, as JSON has it."""
    if key == OBJECTIVE:
        return OBJECTIVE, text
    names, at = [], config
    for part in key.split("."):
        inner = at if isinstance(at, dict) else vars(at)
        names.append(next(name for name in inner if dashed(name) == dashed(part)))
        at = inner[names[-1]]
    return ".".join(names), list(at) if isinstance(at, tuple) else at


# --- names ------------------------------------------------------------------------------------------------------------


def short_names(keys: Sequence[str]) -> list[str]:
    """The ends of dotted names that tell them apart; a reward's key keeps the reward's name."""
    found = []
    for key in keys:
        parts, others = key.split("."), [f".{other}" for other in keys if other != key]
        ends = [".".join(parts[i:]) for i in range(len(parts) - (2 if parts[0] == "rewards" else 1), -1, -1)]
        found.append(next((end for end in ends if not any(other.endswith(f".{end}") for other in others)), key))
    return found


def shown(value: Any) -> str:
    """A value of a configuration as a person would write it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return ", ".join(map(shown, value)) if isinstance(value, list) else str(value)


def folder_name(overrides: Mapping[str, Any], taken: Collection[str] = ()) -> str:
    """``beta=0.01,objective=bon-4``: the same for the same values, whatever other points there are.

    Where a value is long or has characters that do not belong in a name, or the name is ``taken`` (in any case of
    letters, which some file systems do not tell apart), a digest of the values ends it.
    """
    texts = [
        f"{key}={'+'.join(map(shown, value)) if isinstance(value, list) else shown(value)}".replace(":", "-")
        for key, value in zip(short_names(list(overrides)), overrides.values(), strict=True)
    ]
    names = [_cut(re.sub(r"[^A-Za-z0-9_=.+-]+", "-", text).rstrip("-")) for text in texts]
    name = ",".join(names)
    if names == texts and len(name) <= LONGEST_NAME and name.casefold() not in map(str.casefold, taken):
        return name
    digest = hashlib.sha256(json.dumps(overrides, sort_keys=True).encode()).hexdigest()[:8]
    return f"{name[:LONGEST_NAME]},{digest}"


def _cut(text: str) -> str:
    """Without its middle where it is long: it is the end that tells paths apart."""
    return text if len(text) <= LONGEST_PART else text[: LONGEST_PART // 2] + text[-LONGEST_PART // 2 :]
