"""A grid of configurations: the values of each option, the points of the grid, and their names.

Commas outside of brackets and quotes separate values. ``length(target=25, scale=128)`` is one value because of its
brackets, and ``'distortion:0,1,2'`` because of its quotes, which are removed. A key that is a list, such as
``evaluation.ns``, takes each of several values in brackets: ``[1,4],[1,8]``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nlgrpo.config.overrides import LISTS, canonical
from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import Config, dashed
from nlgrpo.errors import UserError

OBJECTIVE = "objective"  # sets the objective of all rewards
SHORT = {"seed": "train.seed"}
NOT_SWEPT = {
    "train.out": "every point has its own folder; --out names the folder of the sweep",
    "train.restart": "remove the folder of a point to restart it",
}
# maximum characters of one key=value, and of a folder's name
LONGEST_PART = 60
LONGEST_NAME = 120


# --- the command line -------------------------------------------------------------------------------------------------


def split(text: str) -> list[str]:
    """Split ``text`` into values at commas outside of brackets and quotes.

    A quote counts only inside brackets and at the start of a value, so an apostrophe is not one. Raises UserError for
    unbalanced brackets or quotes, and for an empty value.
    """
    if "," not in text:
        return [text]
    parts = []
    start = 0
    depth = 0
    quote = ""
    for found in re.finditer(r"\\.|[,'\"()\[\]{}]", text, re.DOTALL):
        mark = found[0]
        at = found.start()
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
        raise UserError(f"{text}: unbalanced {'quote' if quote else 'bracket'}; put such a value in quotes")
    values = [part.strip() for part in (*parts, text[start:])]
    if not all(values):
        raise UserError(f"{text}: empty value between commas; write an empty text as ''")
    return [_unquoted(value) for value in values]


def _unquoted(value: str) -> str:
    whole = re.fullmatch(r"""'((?:\\.|[^'\\])*)'|"((?:\\.|[^"\\])*)\"""", value, re.DOTALL)
    if whole is None:
        return value
    single, double = whole.groups()
    return double if single is None else single


@dataclass(frozen=True)
class Command:
    """A parsed command line: ``start`` is passed to every point, ``options`` have one or more values each."""

    start: list[str]
    options: dict[str, list[str]]

    def axes(self, known: Collection[str] = ()) -> list[str]:
        """Return the options with several values, and those in ``known``, which had several in an earlier command."""
        before = {dashed(name) for name in known}
        return [key for key, values in self.options.items() if len(values) > 1 or dashed(key) in before]

    def rows(self) -> list[dict[str, str]]:
        """Return the options of every point: the cross product, where the last option changes fastest."""
        return [dict(zip(self.options, values, strict=True)) for values in itertools.product(*self.options.values())]


def read_grid(arguments: Sequence[str]) -> Command:
    """Parse ``[recipe] [file.toml] [--key value[,value ...] ...]``, with short forms ``--objective`` and ``--seed``.

    Raises UserError for an option that is given twice, also as a switch, and for values not separated by commas.
    """
    start = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    switches = list[str]()
    options = dict[str, list[str]]()
    seen = set[str]()
    for key, parts in _options(arguments[len(start) :]):
        if canonical(key) in seen:
            raise UserError(f"--{key} is given twice; give it once, with commas between its values")
        seen.add(canonical(key))
        if parts:
            options[key] = _values(key, parts)
        else:
            switches.append(f"--{key}")
    return Command([*start, *switches], options)


def _options(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the options, named without leading dashes, each with the arguments up to the next option."""
    found: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            key, equals, value = argument[2:].partition("=")
            found.append((SHORT.get(key, key), [value] if equals else []))
        elif found:
            found[-1][1].append(argument)
        else:
            raise UserError(f"{argument} is not an option; `nlgrpo train --help` lists the keys")
    return found


def _values(key: str, parts: Sequence[str]) -> list[str]:
    is_list = dashed(f"--{key}") in LISTS
    if len(parts) > 1 and not is_list:
        raise UserError(f"--{key} {' '.join(parts)}: separate values by commas, without spaces: {','.join(parts)}")
    if len(parts) > 1:  # one list, as `nlgrpo train` takes it
        return [f"[{','.join(parts)}]"]
    values = split(parts[0])
    if is_list and len(values) > 1:
        bracketed = [value[:1] + value[-1:] in ("[]", "()") for value in values]
        if not all(bracketed):
            one = f"[{','.join(values)}]"
            several = ",".join(f"[{value}]" for value in values)
            raise UserError(f"--{key} is a list: write {one} for one value, {several} for {len(values)}")
    return values


# --- the points -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A point: the values of the varied keys, the arguments of `nlgrpo train`, and the resulting configuration."""

    overrides: dict[str, Any]
    arguments: list[str]
    config: Config


def settings(start: Sequence[str], rows: Sequence[Mapping[str, str]], axes: Sequence[str]) -> list[Setting]:
    """Return a point for each of ``rows``, which have the same options; points differ in the ``axes``.

    Raises UserError for options that a sweep sets itself or in ``start`` that ``rows`` override, for rows with
    different options, and for rows with the same configuration.
    """
    given = [argument[2:].partition("=")[0] for argument in start if argument.startswith("--")]
    _check_rows(rows)
    for key in [*given, *rows[0]]:
        if key in NOT_SWEPT:
            raise UserError(f"--{key} cannot be given to a sweep: {NOT_SWEPT[key]}")
    rewards = from_arguments([*start, *_arguments(rows[0], [])])[0].rewards
    if OBJECTIVE in rows[0] and not rewards:
        raise UserError("--objective needs a reward, and there is none; add one with --rewards.NAME.function")
    found: dict[str, Setting] = {}
    for row in rows:
        arguments = [*start, *_arguments(row, rewards)]
        config, _ = from_arguments(arguments)
        overrides = dict(_override(config, key, row[key]) for key in axes)
        setting = Setting(overrides, arguments, config)
        twin = found.setdefault(repr(config), setting)
        if twin is not setting:
            raise UserError(f"two points have the same configuration: {twin.overrides} and {setting.overrides}")
    _check_used(start, given, rows[0], list(found.values()))
    return list(found.values())


def _check_rows(rows: Sequence[Mapping[str, str]]) -> None:
    for i, row in enumerate(rows):
        if differing := sorted(row.keys() ^ rows[0].keys()):
            raise UserError(
                f"point {i + 1} of the grid and the first one differ in the options {', '.join(differing)}; give every "
                "point the same ones"
            )


def _check_used(start: Sequence[str], given: Sequence[str], row: Mapping[str, str], found: Sequence[Setting]) -> None:
    """Raise UserError for an option of all points that the options of the grid override in each of them."""
    base = from_arguments(start)[0]
    varied = {canonical(key) for key in row}
    for key in map(canonical, given):
        objective = OBJECTIVE in row and re.fullmatch(r"rewards\..*\.objective", key) is not None
        if key not in varied and not objective:
            continue
        name, value = _override(base, key, "")
        if all(_override(setting.config, key, "")[1] != value for setting in found):
            other = f"--{OBJECTIVE}" if objective else f"--{key}"
            raise UserError(f"{name} = {shown(value)} is given for all points, and {other} of the grid overrides it")


def _arguments(options: Mapping[str, str], rewards: Collection[str]) -> list[str]:
    """Return the options as arguments of `nlgrpo train`; the objective of a single reward overrides ``--objective``."""
    own = {dashed(key) for key in options}
    arguments = []
    if OBJECTIVE in options:
        for name in rewards:
            key = f"rewards.{name}.objective"
            if dashed(key) not in own:
                arguments.append(f"--{key}={options[OBJECTIVE]}")
    for key, text in options.items():
        if dashed(f"--{key}") in LISTS:
            inner = re.sub(r"^[\[(](.*)[\])]$", r"\1", text.strip(), flags=re.DOTALL)
            items = [item.strip() for item in inner.split(",")]
            arguments += [f"--{key}", *filter(None, items)]
        elif key != OBJECTIVE:
            arguments.append(f"--{key}={text}")
    return arguments


def _override(config: Config, key: str, text: str) -> tuple[str, Any]:
    """Return a key's name in the configuration, and its value as JSON stores it."""
    if key == OBJECTIVE:
        return OBJECTIVE, text
    names = []
    value: Any = config
    for part in key.split("."):
        section = value if isinstance(value, dict) else vars(value)
        name = next(name for name in section if dashed(name) == dashed(part))
        names.append(name)
        value = section[name]
    if isinstance(value, tuple):
        value = list(value)
    return ".".join(names), value


# --- names ------------------------------------------------------------------------------------------------------------


def short_names(keys: Sequence[str]) -> list[str]:
    """Shorten dotted names to distinct endings; a reward's key keeps the reward's name."""
    found = []
    for key in keys:
        parts = key.split(".")
        others = [f".{other}" for other in keys if other != key]
        count = 2 if parts[0] == "rewards" else 1
        end = ".".join(parts[-count:])
        while count < len(parts) and any(other.endswith(f".{end}") for other in others):
            count += 1
            end = ".".join(parts[-count:])
        found.append(end)
    return found


def shown(value: Any) -> str:
    """Format a value of a configuration for people."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return ", ".join(map(shown, value)) if isinstance(value, list) else str(value)


def folder_name(overrides: Mapping[str, Any], taken: Collection[str] = ()) -> str:
    """Return a name such as ``beta=0.01,objective=bon-4``, which depends on the values only, not on other points.

    A digest of the values is appended if a value is long or has characters that do not belong in a name, or if the name
    is ``taken`` (ignoring case, as some file systems do).
    """
    names = []
    exact = True
    for key, value in zip(short_names(list(overrides)), overrides.values(), strict=True):
        values = value if isinstance(value, list) else [value]
        text = f"{key}={'+'.join(map(shown, values))}".replace(":", "-")
        names.append(_cut(re.sub(r"[^A-Za-z0-9_=.+-]+", "-", text).rstrip("-")))
        exact = exact and names[-1] == text
    name = ",".join(names)
    if exact and len(name) <= LONGEST_NAME and name.casefold() not in map(str.casefold, taken):
        return name
    digest = hashlib.sha256(json.dumps(overrides, sort_keys=True).encode()).hexdigest()[:8]
    return f"{name[:LONGEST_NAME]},{digest}"


def _cut(text: str) -> str:
    """Cut the middle out of a long text: paths differ at their ends."""
    return text if len(text) <= LONGEST_PART else text[: LONGEST_PART // 2] + text[-LONGEST_PART // 2 :]
