"""Reading the options of a TRL run from a Python script.

Nothing of the script is run: literals, names that are assigned once, and calls with literal arguments are read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nlgrpo.apps.convert import trl_options
from nlgrpo.data import folders
from nlgrpo.errors import UserError

TRAINERS = {"GRPOTrainer": "grpo", "GRPOConfig": "grpo", "RLOOTrainer": "rloo", "RLOOConfig": "rloo"}
BUILDERS = ("json", "csv", "parquet", "text")  # of load_dataset, with data_files
NEEDED = "give a YAML file, a script with GRPOConfig(..) or RLOOConfig(..), or a command line"
# Keys of the options that are none of TRL's.
KIND = "@trainer"
PEFT = "@peft_config"
EVALUATION = "@eval_dataset"


class Code(str):
    """Source text that stands for its value, in messages."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Reward:
    """A reward function of a script: its name, its ``function`` in nlgrpo, and what is left to do for it."""

    name: str
    function: str
    note: str = ""


class Script:
    """The calls of a script, its imports, and the names that it assigns."""

    def __init__(self, path: Path, text: str) -> None:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise UserError(f"{path} is not a Python script: {error}") from error
        self.path = path
        self.notes = list[str]()
        self.imports: dict[str, str] = {}  # "short" -> "my_rewards.short"
        self.assigned: dict[str, list[tuple[int, ast.expr]]] = {}
        self.uncertain: set[str] = set()  # names whose value depends on what the script does
        self.functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                module = f"{node.module}." if node.module else ""
                self.imports |= {alias.asname or alias.name: f"{module}{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                self.imports |= {alias.asname or alias.name: alias.name for alias in node.names}
            elif isinstance(node, ast.arg):
                self.uncertain.add(node.arg)
            elif isinstance(node, ast.ClassDef):
                self._derive(node)
        self._assign(tree.body, certain=True)
        calls = sorted((node for node in ast.walk(tree) if isinstance(node, ast.Call)), key=lambda node: node.lineno)
        self.calls = [(self.name(node.func), node) for node in calls]

    def _assign(self, body: list[ast.stmt], *, certain: bool) -> None:
        for statement in body:
            value = getattr(statement, "value", None)
            targets = list(_targets(statement))
            for name in targets:
                if certain and value is not None and _is_plain(statement):
                    self.assigned.setdefault(name, []).append((statement.lineno, value))
                else:
                    self.uncertain.add(name)
            function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
            inside = certain and (function or _is_main(statement))
            for part in ("body", "orelse", "handlers", "finalbody"):
                for child in getattr(statement, part, []):
                    self._assign([child] if isinstance(child, ast.stmt) else child.body, certain=inside)

    def _derive(self, node: ast.ClassDef) -> None:
        """Read a class that derives from one of TRL's as that one, with a note."""
        for base in map(self.name, node.bases):
            if base in TRAINERS:
                self.imports[node.name] = base
                self.notes.append(f"class {node.name} on line {node.lineno} was read as {base}, without its changes")

    def name(self, node: ast.expr) -> str:
        """The last name of a function, as the module that it is imported from calls it; empty for other nodes."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, node.id).rpartition(".")[2]
        return node.attr if isinstance(node, ast.Attribute) else ""

    def resolved(self, node: ast.expr, *, latest: bool = False) -> ast.expr:
        """Follow names to what is assigned to them once, or with ``latest`` last before their line."""
        for _ in range(20):
            if not isinstance(node, ast.Name) or node.id in self.uncertain:
                return node
            found = [value for line, value in self.assigned.get(node.id, []) if line < node.lineno]
            if not found or (len(self.assigned[node.id]) > 1 and not latest):
                return node
            node = found[-1]
        return node

    def value(self, node: ast.expr) -> Any:
        """The value of a literal, of a name for one, or of a dtype such as torch.bfloat16. Raises UserError."""
        node = self.resolved(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return node.attr
        try:
            return ast.literal_eval(node)
        except (TypeError, SyntaxError, MemoryError, RecursionError) as error:
            raise UserError(str(error)) from error

    def read(self) -> tuple[dict[str, Any], list[str]]:
        options: dict[str, Any] = {EVALUATION: {}}
        trainer = self._last("GRPOTrainer", "RLOOTrainer")
        arguments = {} if trainer is None else dict(self._arguments(trainer, tuple(trl_options.TRAINER)))
        config = self._given(arguments.get("args"), "GRPOConfig", "RLOOConfig")
        if config is None and trainer is None:
            others = [name for name, _ in self.calls if name.endswith(("Config", "Trainer")) and name != "LoraConfig"]
            has = f"; it has {', '.join(dict.fromkeys(others))}" if others else ""
            raise UserError(f"{self.path} has no options of GRPOTrainer or RLOOTrainer{has}; {NEEDED}")
        if config is not None:
            options[KIND] = TRAINERS[self.name(config.func)]
            self._literals(config, ("output_dir",), options)
        elif not _is_none(arguments.get("args")):
            self.notes.append(
                f"args = {ast.unparse(arguments['args'])} is not a literal GRPOConfig(..) or RLOOConfig(..) and was "
                "not read, so its options are TRL's defaults here; convert the YAML file or command line that sets "
                "them"
            )
        if trainer is not None:
            options[KIND] = TRAINERS[self.name(trainer.func)]
            self._trainer(arguments, options)
        made = any(name == "get_peft_model" for name, _ in self.calls)
        if made or trainer is None or not _is_none(arguments.get("peft_config")):
            self._lora(arguments.get("peft_config"), options)
        return options, self.notes

    def _last(self, *names: str) -> ast.Call | None:
        found = [call for name, call in self.calls if name in names]
        if len(found) > 1:
            lines = ", ".join(str(call.lineno) for call in found)
            self.notes.append(
                f"the script calls {' or '.join(names)} on lines {lines}; only line {found[-1].lineno} was read"
            )
        return found[-1] if found else None

    def _given(self, node: ast.expr | None, *names: str) -> ast.Call | None:
        """The call that an argument is or names; without one the last call of these ``names``."""
        call = None if node is None else self.resolved(node, latest=True)
        return call if isinstance(call, ast.Call) and self.name(call.func) in names else self._last(*names)

    def _lora(self, node: ast.expr | None, options: dict[str, Any]) -> None:
        call = self._given(node, "LoraConfig")
        if call is not None:
            options[PEFT] = {}
            self._literals(call, (), options[PEFT])
        if node is not None and self.resolved(node, latest=True) is not call:
            read = "" if call is None else f"; the LoraConfig of line {call.lineno} was read"
            self.notes.append(f"peft_config = {ast.unparse(node)} is not a literal LoraConfig{read}")

    def _arguments(self, call: ast.Call, positions: tuple[str, ...]) -> Iterator[tuple[str, ast.expr]]:
        """Yield the arguments of a call by name, those of a literal ``**`` too."""
        of = self.name(call.func)
        for i, node in enumerate(call.args):
            if isinstance(node, ast.Starred) or i >= len(positions):
                self.notes.append(f"argument {i + 1} of {of}, {ast.unparse(node)}, was not read")
            else:
                yield positions[i], node
        for keyword in call.keywords:
            if keyword.arg is not None:
                yield keyword.arg, keyword.value
                continue
            options = self.resolved(keyword.value)
            if isinstance(options, ast.Dict) and all(isinstance(key, ast.Constant) for key in options.keys):
                for key, value in zip(options.keys, options.values, strict=True):
                    if isinstance(key, ast.Constant):
                        yield str(key.value), value
            elif isinstance(options, ast.Call) and self.name(options.func) == "dict":
                yield from self._arguments(options, ())
            else:
                self.notes.append(f"** = {ast.unparse(keyword.value)} of {of} is not a literal and was not read")

    def _literals(self, call: ast.Call, positions: tuple[str, ...], options: dict[str, Any]) -> None:
        for name, node in self._arguments(call, positions):
            try:
                options[name] = self.value(node)
            except ValueError:
                self.notes.append(f"{name} = {ast.unparse(node)} is not a literal and was not read")

    def _trainer(self, arguments: Mapping[str, ast.expr], options: dict[str, Any]) -> None:
        for name, node in arguments.items():
            if name == "model":
                self._model(node, options)
            elif name == "reward_funcs":
                listed = self.resolved(node)
                several = listed.elts if isinstance(listed, ast.List | ast.Tuple) else [node]
                options["reward_funcs"] = [self._reward(one) for one in several]
            elif name == "train_dataset":
                options |= self._data_set(node, name)
            elif name == "eval_dataset" and not _is_none(node):
                options[EVALUATION] = self._data_set(node, name)
            elif name not in trl_options.READ_APART and not _is_none(node):
                options[name] = Code(ast.unparse(node))

    def _model(self, node: ast.expr, options: dict[str, Any]) -> None:
        """A name, or a call ``from_pretrained(name, ..)``; its dtype is read, too."""
        found = self.resolved(node, latest=True)
        try:
            if isinstance(found, ast.Call) and self.name(found.func) == "from_pretrained" and found.args:
                options["model"] = self.value(found.args[0])
                for keyword in found.keywords:
                    if keyword.arg in ("dtype", "torch_dtype"):
                        options["dtype"] = self.value(keyword.value)
                    else:
                        self.notes.append(
                            f"model: from_pretrained(.., {keyword.arg}={ast.unparse(keyword.value)}) was not read"
                        )
            else:
                options["model"] = self.value(found)
        except ValueError:
            self.notes.append(f"model = {ast.unparse(found)} is not a literal and was not read")

    def _reward(self, node: ast.expr) -> Reward:
        """A function by its name, a reward model by its path, or a note for what is built by the script."""
        found = self.resolved(node)
        if isinstance(found, ast.Constant) and isinstance(found.value, str):
            return Reward("classifier", f"classifier(path={found.value!r})")
        written = ast.unparse(found)
        if isinstance(found, ast.Name | ast.Attribute):
            return self._named_reward(written)
        name = "reward"
        if isinstance(node, ast.Name):
            name = node.id
        elif isinstance(found, ast.Call):
            name = self.name(found.func) or name
        if isinstance(found, ast.Call):
            if self.name(found.func) == "from_pretrained" and found.args and isinstance(found.args[0], ast.Constant):
                return Reward(name, f"classifier(path={found.args[0].value!r})")
            if self.name(found.func) == "get_soft_overlong_punishment":
                given = dict[str, Any]()
                self._literals(found, ("max_completion_len", "soft_punish_cache"), given)
                if len(given) == 2:
                    arguments = f"limit={given['max_completion_len']}, margin={given['soft_punish_cache']}"
                    return Reward("overlong", f"overlong({arguments})")
        return Reward(name, f"rewards.py:{name}", f"write {name} = {written} into rewards.py, with what it needs")

    def _named_reward(self, written: str) -> Reward:
        first, _, rest = written.partition(".")
        imported = self.imports.get(first)
        if imported is None or (imported == first and not rest):
            name = written.rpartition(".")[2]
            todo = "move it there from the script" if name in self.functions else f"write {name} there"
            return Reward(name, f"rewards.py:{name}", f"the file of {name}: {todo}")
        full = f"{imported}.{rest}" if rest else imported
        return Reward(full.rpartition(".")[2], full)

    def _data_set(self, node: ast.expr, what: str) -> dict[str, Any]:
        """Options of a data set that ``load_dataset`` or ``load_from_disk`` opens; methods after it are noted."""
        found = self.resolved(node, latest=True)
        split = ""
        options = dict[str, Any]()
        while not (isinstance(found, ast.Call) and self.name(found.func) in ("load_dataset", "load_from_disk")):
            if isinstance(found, ast.Subscript) and isinstance(found.slice, ast.Constant):
                split = str(found.slice.value)
                inner = found.value
            elif isinstance(found, ast.Call) and isinstance(found.func, ast.Attribute):
                inner = found.func.value
                method = found.func.attr
                names = [argument.value for argument in found.args if isinstance(argument, ast.Constant)]
                if method == "rename_column" and names[1:] == ["prompt"]:
                    options["dataset_prompt_column"] = names[0]
                else:
                    text = ast.unparse(found).removeprefix(ast.unparse(inner))
                    self.notes.append(f"{what}: {text} is not carried over; prepare the data, or see data.template")
            else:
                self.notes.append(f"{what} = {ast.unparse(node)} is not a literal load_dataset(..) and was not read")
                return {}
            found = self.resolved(inner, latest=True)
        return options | self._loaded(found, what, split)

    def _loaded(self, call: ast.Call, what: str, split: str) -> dict[str, Any]:
        values = dict[str, Any]()
        self._literals(call, ("path", "name"), values)
        path = values.pop("path", None)
        config = values.pop("name", None)
        if path in BUILDERS and isinstance(values.get("data_files"), str):
            path = values.pop("data_files")
        if not isinstance(path, str):
            self.notes.append(f"{what} = {ast.unparse(call)} was not read")
            return {}
        split = values.pop("split", None) or split or "train"
        if path.removesuffix(".gz").endswith(folders.SUFFIXES) and split != "train":
            self.notes.append(f"data.split: {path} is read as a whole, not its split {split!r}; see data.limit")
            split = "train"
        found = {"dataset_name": path, "dataset_config": config, "dataset_train_split": split}
        if values.pop("streaming", False):
            found["dataset_streaming"] = True
        for name, value in values.items():
            self.notes.append(f"{what}: {name} = {value!r} of load_dataset is not carried over")
        return found


def _targets(statement: ast.stmt) -> Iterator[str]:
    """Names to which a statement itself assigns."""
    match statement:
        case ast.Assign(targets=targets):
            nodes: list[ast.expr] = list(targets)
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target) | ast.For(target=target):
            nodes = [target]
        case ast.With(items=items):
            nodes = [item.optional_vars for item in items if item.optional_vars is not None]
        case _:
            nodes = []
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Tuple | ast.List):
            yield from (part.id for part in node.elts if isinstance(part, ast.Name))


def _is_plain(statement: ast.stmt) -> bool:
    """Whether a statement assigns one value to one name."""
    if isinstance(statement, ast.Assign):
        return all(isinstance(target, ast.Name) for target in statement.targets)
    return isinstance(statement, ast.AnnAssign)


def _is_main(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)


def _is_none(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)
