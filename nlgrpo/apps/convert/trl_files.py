"""Reading the options of a TRL run from a YAML file, a file with a command line, or a Python script."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nlgrpo.apps.convert import trl_options
from nlgrpo.apps.convert.trl_script import EVALUATION, KIND, NEEDED, Script
from nlgrpo.errors import UserError

OTHER_TRAINERS = ("sft", "dpo", "kto", "reward", "distillation", "ppo", "cpo", "orpo", "online_dpo", "gkd", "prm")


def read(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Read options from a YAML file, a Python script, or a file with a command line.

    Returns the options, and notes about what could not be read. Besides those of TRL there may be `KIND` ("grpo" or
    "rloo"), `PEFT` (the arguments of a LoraConfig) and `EVALUATION` (a data set). Raises UserError for a file that
    cannot be read or has no options.
    """
    if not path.is_file():
        raise UserError(f"there is no file {str(path)!r}")
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if path.suffix in (".yaml", ".yml"):
        options, notes = _of_yaml(path, text)
    elif path.suffix == ".py":
        options, notes = Script(path, text).read()
    else:
        options, notes = _of_command(path, text)
    if not options.keys() - {KIND, EVALUATION}:
        raise UserError(f"{path} has no options; {NEEDED}")
    return options, notes


def _of_yaml(path: Path, text: str) -> tuple[dict[str, Any], list[str]]:
    import yaml

    try:
        node = yaml.compose(text, yaml.SafeLoader)
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        where = f"{path}, line {mark.line + 1}" if mark is not None else str(path)
        raise UserError(f"{where}: not YAML: {' '.join(problem.split())}") from error
    except (ValueError, RecursionError) as error:  # a date such as 2026-13-40; too many brackets
        raise UserError(f"{path}: not YAML: {error}") from error
    _refuse_repeated(path, node)
    if found is None:
        raise UserError(f"{path} has no options; {NEEDED}")
    if not isinstance(found, dict):
        raise UserError(f"{path} has no options: it is a {type(found).__name__}; TRL reads lines such as 'beta: 0.1'")
    options = {str(key): value for key, value in found.items()}
    notes = list[str]()
    if "env" in options:
        names = options.pop("env")
        shown = ", ".join(map(str, names)) if isinstance(names, Mapping) else "its"
        notes.append(f"env: TRL sets the environment variables {shown}; set them yourself")
    return options, notes


def _refuse_repeated(path: Path, node: Any) -> None:
    """Raise UserError for a key that is given twice: PyYAML would read the last one."""
    seen = set[str]()
    for key, _ in node.value if node is not None and node.id == "mapping" else []:
        if str(key.value) in seen:
            raise UserError(f"{path}, line {key.start_mark.line + 1}: {key.value} is given twice; give it once")
        seen.add(str(key.value))


# --- a command line ---------------------------------------------------------------------------------------------------


def _of_command(path: Path, text: str) -> tuple[dict[str, Any], list[str]]:
    try:
        tokens = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UserError(f"{path} is not a command line: {error}") from error
    options = dict[str, Any]()
    notes = list[str]()
    key = ""
    for token in tokens:
        if token.startswith("--"):
            key, given, value = token[2:].partition("=")
            key = key.replace("-", "_")
            if key in options:
                notes.append(f"{key} is given twice; the last one was read, as TRL does")
            options[key] = _literal(value) if given else True
            key = "" if given else key
        elif token.endswith(".py") or (token.startswith("-") and not _is_number(token)):  # the launcher's options end
            key = ""
        elif key:
            value = _literal(token)
            before = options[key]
            if before is True:
                options[key] = value
            elif isinstance(before, list):
                options[key] = [*before, value]
            else:
                options[key] = [before, value]
    if trainer := _trainer_of(path, tokens):
        options[KIND] = trainer
    for name, value in list(options.items()):
        if isinstance(value, str) and "$" in value:
            del options[name]
            notes.append(f"{name} = {value} is a variable of the shell and was not read")
    options = _positive(options)
    if "config" in options:
        of_file, more = _of_yaml_beside(path, options.pop("config"))
        options = {**of_file, **options}
        notes = [*more, *notes]
    return options, notes


def _positive(options: Mapping[str, Any]) -> dict[str, Any]:
    """Write a switch such as ``--no_shuffle_dataset`` as its option."""
    switches = {f"no_{name}": name for name, own in trl_options.known("grpo").items() if own.kind is bool}
    found = {}
    for name, value in options.items():
        if name in switches:
            found[switches[name]] = False if value is True else value
        else:
            found[name] = value
    return found


def _of_yaml_beside(path: Path, name: Any) -> tuple[dict[str, Any], list[str]]:
    """Read the YAML file of ``--config``, from the current folder as TRL does, or from that of the command line."""
    for file in (Path(str(name)), path.parent / str(name)):
        if file.is_file():
            return _of_yaml(file, file.read_text("utf-8-sig"))
    raise UserError(f"{path} has --config {name}, and there is no such file here or next to it")


def _trainer_of(path: Path, tokens: list[str]) -> str:
    """The trainer that a command line starts: ``trl rloo``, ``.../rloo.py`` or ``-m trl.scripts.rloo``."""
    first = [tokens[i + 1] for i, token in enumerate(tokens[:-1]) if Path(token).name == "trl"]
    scripts = [Path(token).stem for token in tokens if token.endswith(".py")]
    modules = [token.rpartition(".")[2] for token in tokens if token.startswith("trl.scripts.")]
    for name in (*first, *scripts, *modules):
        if name in ("grpo", "rloo"):
            return name
        if name in OTHER_TRAINERS:
            raise UserError(f"{path} runs {name!r} of TRL; from-trl converts runs of GRPOTrainer and RLOOTrainer")
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _literal(text: str) -> Any:
    known = {"true": True, "false": False, "none": None, "null": None}
    try:
        return known[text.lower()] if text.lower() in known else ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
