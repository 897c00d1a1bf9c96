"""Functions of the user, by their names in a config: ``package.module:function`` or ``path/to/file.py:function``."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def is_name(target: str) -> bool:
    """Whether ``target`` has the form of such a name."""
    place, _, attribute = target.rpartition(":")
    return bool(place and attribute)


def function(target: str) -> Callable[..., Any]:
    """The function, or class, that ``target`` names; a file's path is relative to the current folder.

    Raises ValueError for a module, file or function that is not there, with the nearest one that is, and for a module
    that raises when it is imported.
    """
    place, _, attribute = target.rpartition(":")
    module = _import_file(Path(os.path.expanduser(place))) if place.endswith(".py") else _import_module(place)
    if not hasattr(module, attribute):
        functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ValueError(f"{place} has no {attribute!r}{nearest(attribute, functions)}")
    found = getattr(module, attribute)
    if not callable(found):
        raise ValueError(f"{attribute!r} in {place} is not a function but of type {type(found).__name__}")
    return found


def nearest(name: str, known: Sequence[str]) -> str:
    """The end of a sentence that says that ``name`` is not known."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else "."


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r} is not the name of a module. For a file, write its path: path/to/file.py:function")
    _look_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}. For a file, write its path: path/to/file.py:function") from error
    except (Exception, SystemExit) as error:
        raise ValueError(_cannot_import(name, error)) from error


def _cannot_import(name: str, error: BaseException) -> str:
    """What a module that is not ours raised when it was imported, and where."""
    frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if not f.filename.startswith("<frozen")]
    own = [f for f in frames if f.filename == os.path.abspath(name)] or frames
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own and not isinstance(error, SyntaxError) else ""
    return f"{name} cannot be imported, {type(error).__name__}: {error}{where}"


def _look_in(folder: Path) -> None:
    """Modules that are nowhere else are found in ``folder``, now and when the function imports more."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import_file(path: Path) -> ModuleType:
    """The file as a module of a private name, so that no other module is shadowed; loaded once."""
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {str(path)!r} (looked from {Path.cwd()})")
    _look_in(path.resolve().parent)
    name = "_nlgrpo_user_" + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # before the code runs: dataclasses and pickle look their module up
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception | SystemExit):
            raise ValueError(_cannot_import(str(path), error)) from error
        raise
    return module
