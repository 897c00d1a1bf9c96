"""From the text of a reward in a config to its function: ``"length(target=25)"``, ``"my_rewards.py:polite"``."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from nlgrpo.errors import UserError, did_you_mean, nearest
from nlgrpo.rewards.processes.user_functions import bind, imported
from nlgrpo.rewards.reward_functions import Reward
from nlgrpo.runtime import secrets, user_code

# name: (module in this folder, class); a module is imported when one of its rewards is used
REWARDS = {
    "length": ("builtin", "Length"),
    "overlong": ("builtin", "Overlong"),
    "lexicon": ("builtin", "Lexicon"),
    "regex": ("builtin", "Regex"),
    "gsm8k": ("builtin", "Gsm8k"),
    "countdown": ("countdown", "Countdown"),
    "math": ("processes.math_answers", "Math"),
    "maze": ("maze", "Maze"),
    "code": ("processes.code_execution", "Code"),
    "classifier": ("classifiers", "Classifier"),
    "ensemble": ("classifiers", "Ensemble"),
    "judge": ("judge", "Judge"),
    "reward_server": ("reward_server", "RewardServer"),
    "environment": ("environment", "EnvironmentReward"),
    "weighted": ("composite", "Weighted"),
    "gated": ("composite", "Gated"),
}
KERNELS = {
    "ngrams": ("similarity_kernels", "Ngrams"),
    "length": ("similarity_kernels", "LengthKernel"),
    "equal": ("similarity_kernels", "Equal"),
}
COMPOSITE = ("weighted", "gated")


def load_reward(
    name: str,
    spec: str,
    *,
    timeout: float = 600.0,
    on_error: Literal["stop", "skip"] = "stop",
    scale: float = 1.0,
    device: str | torch.device = "cpu",
    pairwise: bool = False,
    voted: bool = False,
    process: bool = False,
) -> Reward:
    """Load a reward from a ``spec``: ``target`` or ``target(key=value, ...)`` with Python literals as values.

    Targets: a built-in (``length overlong lexicon regex gsm8k countdown math maze code classifier ensemble judge
    reward_server environment weighted gated``; with ``pairwise`` the kernels ``ngrams length equal``), a function
    ``package.module:function`` or ``path/to/file.py:function`` (relative to the current folder), or a model folder,
    which means ``classifier(path=...)``. A function gets the arguments at every call, where they override a column of
    the same name. A class is called with them once; its instance is the reward. ``device``: device of classifiers.
    ``process``: load and call it in a process of its own; the others are those of `Reward`.

    Raises UserError for an unknown target, and for arguments that the target does not take or that it rejects.
    """
    try:
        if process:
            from nlgrpo.rewards.processes.function_process import FunctionProcess

            function: Callable[..., Any] = FunctionProcess.made_by(_maker(spec, device, pairwise))
        else:
            function = function_of(spec, device=device, pairwise=pairwise)
    except ValueError as error:
        raise UserError(f"reward {name!r} = {secrets.hide(repr(spec))}: {error}") from error
    return Reward(name, function, timeout, on_error, scale, pairwise, voted, process)


def _maker(spec: str, device: str | torch.device, pairwise: bool) -> Callable[[], Callable[..., Any]]:
    """Return a function without arguments that does in another process what `function_of` does."""
    target, arguments = parse_spec(spec)
    known = KERNELS if pairwise else REWARDS
    if target in known or not user_code.is_name(target) or secrets.found(spec):
        return functools.partial(function_of, spec, device=device, pairwise=pairwise)
    return functools.partial(imported, target, arguments)  # it needs no PyTorch


def function_of(spec: str, *, device: str | torch.device = "cpu", pairwise: bool = False) -> Callable[..., Any]:
    """Return the function of a ``spec``, or the kernel with ``pairwise``; see `load`.

    Raises UserError for an unknown target, and for arguments that the target does not take or that it rejects.
    """
    target, arguments = parse_spec(spec)
    if kind := secrets.found(spec):
        raise UserError(f"it seems to hold {kind}; rewards are saved and shown: use environment variables for secrets")
    if pairwise:
        return bind(target, _resolve(target, KERNELS, "kernel"), arguments)
    target, arguments = _as_classifier(target, arguments, device)
    if target in COMPOSITE:
        parts = _class_of(REWARDS[target]).PARTS
        arguments = {name: _part(x, device) if name in parts else x for name, x in arguments.items()}
    return bind(target, _resolve(target, REWARDS, "reward"), arguments)


def _part(value: Any, device: str | torch.device) -> Any:
    """Replace a spec by its function, and a dict of weights by spec by pairs; other values stay."""
    if isinstance(value, str):
        return function_of(value, device=device)
    if isinstance(value, dict):
        return [(_part(spec, device), weight) for spec, weight in value.items()]
    return value


def _as_classifier(target: str, arguments: dict[str, Any], device: str | torch.device) -> tuple[str, dict[str, Any]]:
    """Rewrite a model folder to ``classifier(path=...)``, and add the device of classifiers."""
    if target not in REWARDS and os.path.isfile(Path(os.path.expanduser(target)) / "config.json"):
        arguments = {"path": target, **arguments}
        target = "classifier"
    on_device = target in ("classifier", "ensemble")
    return target, {"device": str(device), **arguments} if on_device else arguments


def models(spec: str) -> list[tuple[str, str]]:
    """Path and dtype of each model that a reward ``spec`` would load, without loading it. Raises UserError as `load`.

    Models that a user's own function loads are not known.
    """
    target, arguments = _as_classifier(*parse_spec(spec), "cpu")
    if target in COMPOSITE:
        return [found for part in _parts(arguments) for found in models(part)]
    paths = {"classifier": [arguments.get("path")], "ensemble": arguments.get("paths")}.get(target) or []
    return [(path, str(arguments.get("dtype", "float32"))) for path in paths if isinstance(path, str)]


def may_hang(spec: str) -> bool:
    """Whether a reward ``spec`` runs code of the user, or a regular expression of the user, in this process.

    Raises UserError as `load`.
    """
    target, arguments = _as_classifier(*parse_spec(spec), "cpu")
    if target in COMPOSITE:
        return any(map(may_hang, _parts(arguments)))
    return target not in REWARDS or target == "regex"


def _parts(arguments: Mapping[str, Any]) -> list[str]:
    """Specs of the parts of a composite."""
    found = [part for value in arguments.values() for part in (value if isinstance(value, dict) else [value])]
    return [part for part in found if isinstance(part, str)]


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Parse ``"length(target=25)"`` into ``("length", {"target": 25})``. Values are literals; nothing is evaluated.

    Raises UserError for anything else.
    """
    if not isinstance(spec, str):
        raise UserError(f"expected a string such as 'length(target=25, scale=128)', got {type(spec).__name__}")
    match = re.fullmatch(r"\s*([^(]+?)\s*\((.*)\)\s*", spec, re.DOTALL)
    if match is None:
        return spec.strip(), {}
    target, inside = match.groups()
    try:
        return target, _parse_arguments(inside)
    except (SyntaxError, ValueError, TypeError) as error:
        advice = "Write name=value, ..., with Python literals as values and strings in quotes"
        raise UserError(f"cannot read the arguments ({inside}): {error}. {advice}.") from error


def _parse_arguments(inside: str) -> dict[str, Any]:
    call = ast.parse(f"f({inside}\n)", mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise UserError("every argument needs a name")
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise UserError("** is not supported" if keyword.arg is None else f"{keyword.arg} is given twice")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return arguments


def _class_of(place: tuple[str, str]) -> Any:
    """Import the class of a built-in reward or kernel."""
    module, name = place
    return getattr(importlib.import_module(f"nlgrpo.rewards.{module}"), name)


def _resolve(target: str, builtin: Mapping[str, tuple[str, str]], kind: str) -> Callable[..., Any]:
    if target in builtin:
        found: Callable[..., Any] = _class_of(builtin[target])
        return found
    if not user_code.is_name(target):
        raise UserError(_unknown(target, builtin, kind))
    return user_code.function(target)


def _unknown(target: str, builtin: Mapping[str, tuple[str, str]], kind: str) -> str:
    forms = []
    for name, place in builtin.items():
        arguments = inspect.signature(_class_of(place)).parameters
        forms.append(f"{name}({', '.join(arguments)})")
    forms += ["package.module:function", "path/to/file.py:function"]
    forms += ["a folder with a config.json (a classifier)"] * (kind == "reward")
    hint = did_you_mean(nearest(target, builtin))
    return f"there is no {kind} {target!r}{hint} Supported:\n  " + "\n  ".join(forms)
