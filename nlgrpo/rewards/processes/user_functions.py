"""Functions of the user with arguments of their own, here and in another process, which need not import PyTorch."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from nlgrpo.errors import UserError, did_you_mean, nearest
from nlgrpo.runtime import user_code
from nlgrpo.runtime.user_code import parameters


def imported(target: str, arguments: dict[str, Any]) -> Callable[..., Any]:
    """Import the function that ``target`` names, and bind the arguments. Raises UserError as `bind`."""
    return bind(target, user_code.function(target), arguments)


def bind(target: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Callable[..., Any]:
    """Bind arguments to a function, or build an object of a class with them.

    Raises UserError for arguments that it does not take or that are missing, and for a class that rejects them.
    """
    taken, required, takes_all = parameters(function)
    unknown = [name for name in arguments if not takes_all and name not in taken]
    missing = sorted(required - arguments.keys()) if isinstance(function, type) else []
    if unknown:
        hint = did_you_mean(nearest(unknown[0], taken))
        raise UserError(f"{target} does not take {unknown[0]!r}{hint} It takes: {', '.join(taken)}")
    if missing:
        raise UserError(f"{target} needs {', '.join(missing)}; it takes: {', '.join(taken)}")
    if not isinstance(function, type):
        return functools.partial(function, **arguments)
    try:
        instance: Callable[..., Any] = function(**arguments)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        raise UserError(f"{target} cannot be built, {type(error).__name__}: {error}") from error
    return instance


def maker(function: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """Return a function without arguments that returns ``function`` in another process, if it can be pickled."""
    name = getattr(function, "__module__", None) or ""
    file = getattr(sys.modules.get(name), "__file__", None)
    # The other process has another __main__, and knows no module that was imported from a file.
    if inspect.isfunction(function) and file and (name == "__main__" or name.startswith(user_code.PREFIX)):
        return functools.partial(user_code.function, f"{os.path.abspath(file)}:{function.__qualname__}")
    return functools.partial(_itself, function)


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
