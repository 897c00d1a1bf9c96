"""A reward function in a process of its own (``process = true``), called like any other function."""

from __future__ import annotations

import base64
import functools
import inspect
import os
import pickle  # nosec B403  # between our own processes
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nlgrpo.errors import UserError
from nlgrpo.rewards.calling import ErrorInProcess
from nlgrpo.rewards.processes.user_functions import maker
from nlgrpo.rewards.processes.workers import NoAnswer, TooLate, Worker
from nlgrpo.runtime.supervision.time_limit import TimedOut

SCRIPT = Path(__file__).with_name("function_worker.py")
LOADING = 600.0  # seconds in which a process has to load its function
LOGS = ("log_metric", "log_extra")


class ProcessEnded(RuntimeError):
    """The process of a function ended while the function ran. The next call starts another one."""


@dataclass
class FunctionWorker(Worker):
    """The process of one function, which ``make``, a pickle, returns. Questions and answers are pickles in base64."""

    script: Path = SCRIPT
    make: bytes = b""
    owner: int = 0
    """Process that has started this one; a process that is forked from it needs one of its own."""
    description: Mapping[str, Any] = field(default_factory=dict)
    """What the process said of the function."""

    def ask(self, question: bytes, seconds: float) -> tuple[Any, ...]:
        if self.owner != os.getpid():
            self.process = None
        return super().ask(question, seconds)

    def start(self) -> None:
        self.owner = os.getpid()
        super().start()
        self.description = _result(self.exchange(_encoded("load", list(sys.path), self.make), LOADING))

    def encode(self, question: bytes) -> bytes:
        return question

    def decode(self, line: bytes) -> tuple[Any, ...]:
        try:
            return pickle.loads(base64.b64decode(line))  # nosec B301  # from its process
        except Exception as error:  # of any type: an object of a module that is not imported here
            return "raised", type(error).__name__, f"what it returned or logged cannot be read here: {error}", ""


@dataclass(eq=False)
class FunctionProcess:
    """A function in a process of its own, which is started with it, and again after a call that took too long.

    ``f(count, **arguments)`` returns what the function returns for ``count`` completions, as lists. It raises TimedOut
    after ``timeout`` seconds, which do not include the start of the process, ErrorInProcess for an error of the
    function, and ProcessEnded. Calls at the same time get a process each.
    """

    make: bytes
    description: Mapping[str, Any]
    timeout: float = 600.0
    idle: deque[FunctionWorker] = field(default_factory=deque, repr=False)

    own_process = True  # see `calling.has_own_process`

    def __post_init__(self) -> None:
        arguments = [
            inspect.Parameter(name, kind, default=inspect.Parameter.empty if needed else None)
            for name, kind, needed in self.description["arguments"]
        ]
        self.__signature__ = inspect.Signature(arguments, __validate_parameters__=False)
        self.data_columns: tuple[str, ...] = self.description["data_columns"]
        self.nbytes: int = self.description["nbytes"]
        self.source_file: str = self.description["source_file"]
        if self.description["answers"]:
            self.answer = functools.partial(self._ask, "answer")

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionProcess:
        """Start a process for a function of a module. Raises UserError for another one, such as a lambda."""
        return cls.made_by(maker(function))

    @classmethod
    def made_by(cls, make: Callable[[], Callable[..., Any]]) -> FunctionProcess:
        """Start a process for the function that ``make`` returns there. Raises UserError if it fails."""
        try:
            pickled = pickle.dumps(make)
        except Exception as error:  # of any type: it may come from the methods of an object
            raise UserError(f"it cannot be sent to a process of its own ({error}); {EXPECTED}") from error
        worker = FunctionWorker(make=pickled)
        try:
            worker.start()
        except ErrorInProcess as error:
            worker.stop()
            if error.kind in ("UserError", "ValueError"):  # of the function's name or arguments
                raise UserError(error.said) from error
            raise UserError(f"a process of its own cannot load it, {error.kind}: {error.said}; {EXPECTED}") from error
        except NoAnswer as error:
            worker.stop()
            raise UserError(f"its process did not start: {error}") from error
        return cls(pickled, worker.description, idle=deque([worker]))

    def __call__(self, count: int, /, **arguments: Any) -> Any:
        logs = {name: arguments.pop(name) for name in LOGS if name in arguments}
        output, metrics, extra = self._ask("call", count, arguments, list(logs))
        for name, value in metrics:
            logs["log_metric"](name, value)
        for column, values in extra.items():
            logs["log_extra"](column, values)
        return output

    def _ask(self, *question: Any) -> Any:
        encoded = _encoded(*question)
        worker = self.idle.popleft() if self.idle else FunctionWorker(make=self.make)
        try:
            return _result(worker.ask(encoded, self.timeout))
        except TooLate:
            raise TimedOut from None
        except NoAnswer as error:
            raise ProcessEnded(str(error)) from error
        finally:
            if self.idle:  # that of another call is back
                worker.stop()
            else:
                self.idle.append(worker)


EXPECTED = "expected a function, or an object of a class, that a module defines; or name it, as 'file.py:function'"


def _encoded(*question: Any) -> bytes:
    try:
        return base64.b64encode(pickle.dumps(question))
    except Exception as error:  # of any type: it may come from the methods of an object
        raise UserError(f"its arguments cannot be sent to a process of its own: {error}") from error


def _result(answer: tuple[Any, ...]) -> Any:
    kind, *content = answer
    if kind == "raised":
        raise ErrorInProcess(*content)
    return content[0]
