"""Import user functions by their names in a config: ``package.module:function`` or ``path/to/file.py:function``."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from nlgrpo.errors import UserError, did_you_mean, nearest

PREFIX = "_nlgrpo_user_"  # of the names of modules that are imported from a file
NLGRPO = Path(__file__).parents[1]


def is_name(target: str) -> bool:
    """Whether ``target`` has the form ``module:function`` or ``file.py:function``."""
    place, _, attribute = target.rpartition(":")
    return bool(place and attribute)


def function(target: str) -> Callable[..., Any]:
    """Import the function or class that ``target`` names; the path of a file is relative to the current folder.

    Raises UserError for a missing module, file or function (with the most similar name), and for a module that raises
    on import.
    """
    place, _, attribute = target.rpartition(":")
    module = _import_file(Path(os.path.expanduser(place))) if place.endswith(".py") else _import_module(place)
    if not hasattr(module, attribute):
        functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise UserError(f"{place} has no {attribute!r}{did_you_mean(nearest(attribute, functions))}")
    value = getattr(module, attribute)
    if not callable(value):
        raise UserError(f"{attribute!r} in {place} is not a function; its type is {type(value).__name__}")
    return value


def parameters(function: Callable[..., Any]) -> tuple[list[str], set[str], bool]:
    """Return the argument names of a function, the required ones, and whether it takes ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return [p.name for p in named], {p.name for p in named if p.default is p.empty}, takes_all


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"{name!r} is not a module name. For a file, write its path: path/to/file.py:function")
    _look_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"{error}. For a file, write its path: path/to/file.py:function") from error
    except (Exception, SystemExit) as error:
        raise UserError(_cannot_import(name, error)) from error


def _cannot_import(name: str, error: BaseException) -> str:
    """Message for a user module that raised on import, with the file and line."""
    frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if not f.filename.startswith("<frozen")]
    user_frames = [f for f in frames if f.filename == os.path.abspath(name)] or frames
    last = user_frames[-1] if user_frames and not isinstance(error, SyntaxError) else None
    where = f" ({last.filename}, line {last.lineno})" if last else ""
    return f"{name} cannot be imported, {type(error).__name__}: {error}{where}"


def _look_in(folder: Path) -> None:
    """Append ``folder`` to the import path, also for later imports of the function."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import_file(path: Path) -> ModuleType:
    """Import a file once, under a private module name, so that it shadows no other module."""
    if not os.path.isfile(path):
        raise UserError(f"there is no file {str(path)!r} (looked from {Path.cwd()})")
    _look_in(path.resolve().parent)
    name = PREFIX + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # before the code runs, because dataclasses and pickle look it up
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception | SystemExit):
            raise UserError(_cannot_import(str(path), error)) from error
        raise
    return module


def files_of(file: Path) -> list[Path]:
    """Return a file of Python code, and the files beside it that it imports, directly or through others.

    Files beside it are those of its folder, of the subfolders of it, and of its package. Imports of installed packages,
    of the standard library and of nlgrpo are not followed.
    """
    found = [file.absolute()]
    if _is_installed(file.absolute()):
        return found
    for path in found:  # it grows
        for imported in _imports_of(path):
            if imported.is_file() and imported not in found:
                found.append(imported)
    return found


def _is_installed(file: Path) -> bool:
    """Whether a file belongs to an installed package, the standard library or nlgrpo."""
    if {"site-packages", "dist-packages"} & set(file.parts):
        return True
    return file.is_relative_to(NLGRPO) or file.is_relative_to(sysconfig.get_path("stdlib"))


def _imports_of(file: Path) -> Iterator[Path]:
    """Yield the places beside a file where Python would look for the modules that it imports."""
    try:
        code = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # not Python; a file that is broken is refused when it is imported
        return
    package = file.parent
    while (package / "__init__.py").is_file():
        package = package.parent
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            folders = {file.parent, package}
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            folders = {file.parent, package} if node.level == 0 else {file.parents[node.level - 1]}
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}".strip(".") for alias in node.names)]
        else:
            continue
        for name in names:
            for folder in sorted(folders):
                yield from _places_of(folder, name)


def _places_of(folder: Path, name: str) -> Iterator[Path]:
    """Yield the possible files of the module ``name`` in a folder, and of the packages that it is in."""
    place = folder
    for part in name.split("."):
        place = place / part
        yield place / "__init__.py"
    if place != folder:
        yield place.parent / f"{place.name}.py"
