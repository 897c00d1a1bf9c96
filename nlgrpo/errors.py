"""How a command ends: a `UserError` is printed in one line, and any other exception is a bug, with its traceback.

Pure functions (objectives, calibration, losses, estimators, kernels) raise ValueError. Where a value of the user can
cause one, the code that reads the value checks it first and raises UserError.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

DEBUG = "NLGRPO_DEBUG"  # environment variable that ``--debug`` sets, also for the processes of a command
# exit statuses
OF_A_USER = 2
OF_A_BUG = 1
REPORT = "This is a bug in nlgrpo. Please report it with the lines above and the command."


class UserError(ValueError):
    """An error that the user can fix. The message says what came, what was expected and what to do."""

    elsewhere = False
    """Whether another rank raised it first, and shows it."""


class UserCodeError(UserError):
    """Code of the user failed, such as a reward or an environment. ``__cause__`` is what it raised."""


class Shown(RuntimeError):
    """An exception that has ended one of several ranks, and that a rank has shown."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.status = exit_status(error)


def nearest(word: str, known: Iterable[str], *, n: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known names, at most ``n``, that are most similar to ``word``."""
    return difflib.get_close_matches(word, list(known), n, cutoff)


def did_you_mean(names: Sequence[str], otherwise: str = ".") -> str:
    """End a sentence about an unknown name: "; did you mean 'A' or 'B'?", or ``otherwise`` without names."""
    return f"; did you mean {' or '.join(map(repr, names))}?" if names else otherwise


@contextmanager
def as_user_error() -> Iterator[None]:
    """Context that turns a ValueError, of a pure function that gets values of the user, into a UserError."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error


def run(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run ``command`` and return its exit status: 2 after a UserError, and 1 after any other exception.

    Both are shown. ``--debug`` among the arguments, before a "--", shows the traceback of a UserError too. If a
    launcher started several processes on this machine, all raise the same UserError before they join, and the first of
    them shows it.
    """
    options = list(arguments)
    literal = options.index("--") if "--" in options else len(options)
    before = os.environ.get(DEBUG)
    if "--debug" in options[:literal]:
        os.environ[DEBUG] = "1"
    try:
        return command([option for option in options[:literal] if option != "--debug"] + options[literal:])
    except BrokenPipeError:  # the reader of the output is gone
        raise
    except Shown as error:
        return error.status
    except Exception as error:
        if not isinstance(error, UserError) or not _first_process_shows_it():
            show(error)
        return exit_status(error)
    finally:
        if before is None:
            os.environ.pop(DEBUG, None)
        else:
            os.environ[DEBUG] = before


def _first_process_shows_it() -> bool:
    """Whether a launcher started this process, but not as the first one on this machine."""
    launched = "MASTER_ADDR" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    return launched and os.environ.get("LOCAL_RANK", "0") != "0"


def exit_status(error: BaseException) -> int:
    return OF_A_USER if isinstance(error, UserError) else OF_A_BUG


def show(error: BaseException) -> None:
    """Print ``error`` to standard error: one line for a UserError, else a traceback and where to report it."""
    is_bug = not isinstance(error, UserError)
    if is_bug or os.environ.get(DEBUG) == "1":
        traceback.print_exception(error)
    elif isinstance(error, UserCodeError):
        show_traceback(error.__cause__)
    text = REPORT if is_bug else f"error: {error}"
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        text = f"\033[31m{text}\033[0m"  # red
    print(text, file=sys.stderr)


def show_traceback(cause: BaseException | None) -> None:
    """Print the traceback of what code of the user raised, from its first frame outside of nlgrpo on."""
    if cause is None:
        return
    frames = cause.__traceback__
    package = str(Path(__file__).parent)
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename.startswith(package):
        frames = frames.tb_next
    traceback.print_exception(type(cause), cause, frames, file=sys.stderr)
