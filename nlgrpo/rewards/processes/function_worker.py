"""The process of a reward with ``process = true``: calls its function in its main thread. Run by `function_process`.

It reads questions and writes answers as lines of pickles in base64. The first question loads the function. What the
function prints goes to the output of the trainer. Imports no PyTorch by itself, which takes seconds.
"""

import asyncio
import base64
import contextlib
import functools
import inspect
import os
import pickle  # nosec B403  # between our own processes
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Set
from itertools import islice
from typing import Any


class Function:
    """The function that ``make``, a pickle, returns; and the event loop of all its calls, if it is async."""

    def __init__(self, make: bytes) -> None:
        self.function: Callable[..., Any] = pickle.loads(make)()  # nosec B301  # from the trainer
        self.bound = self.function.keywords if isinstance(self.function, functools.partial) else {}
        self.loop = asyncio.new_event_loop()

    def description(self) -> dict[str, Any]:
        """Return what the trainer reads off a function of its own. Arguments that are bound are left out."""
        arguments = inspect.signature(self.function).parameters.values()
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        code = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
        source = ""
        with contextlib.suppress(TypeError):  # a built-in of Python
            source = inspect.getfile(code)
        return {
            "arguments": [(a.name, a.kind, a.default is a.empty) for a in arguments if a.name not in self.bound],
            "data_columns": tuple(getattr(self.function, "data_columns", ())),
            "answers": hasattr(self.function, "answer"),
            "nbytes": int(getattr(self.function, "nbytes", 0)),
            "source_file": source,
        }

    def call(self, count: int, arguments: dict[str, Any], logs: list[str]) -> tuple[Any, Any, Any]:
        """Return what the function returned for ``count`` completions, `plain`, and what it logged.

        ``logs``: the arguments by which it logs.
        """
        from nlgrpo.rewards.calling import Log  # the path of imports comes with the first question

        log = Log(count)
        given = arguments | {name: getattr(log, name) for name in logs}
        output = self.function(**{name: value for name, value in given.items() if name not in self.bound})
        if inspect.isawaitable(output):
            output = self.loop.run_until_complete(_result_of(output))
        return plain(output, count), log.metrics, log.extra

    def answer(self, text: str) -> Any:
        """Return the final answer in a text, for majority voting."""
        return self.function.answer(text)  # type: ignore[attr-defined]


def plain(output: Any, most: int) -> Any:
    """Return an output as lists of Python's numbers; texts, dicts and sets, which are refused later, as they are.

    ``most``: items to take of an iterator, which may be endless; one more shows that it has more.
    """
    if not hasattr(output, "tolist") and hasattr(output, "to_numpy"):  # a table of pandas
        output = output.to_numpy()
    if hasattr(output, "tolist"):
        output = output.tolist()
    if isinstance(output, (str, bytes, bytearray, Mapping, Set)) or not hasattr(output, "__iter__"):
        return output
    items = islice(output, most + 1) if isinstance(output, Iterator) else output
    return [plain(item, most) for item in items]


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def main(printed: int) -> None:
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a function that reads its input must not read questions
    os.dup2(printed, 1)
    answers.write(b'"ready"\n')
    answers.flush()
    function: Function | None = None
    for line in questions:
        try:
            what, *arguments = pickle.loads(base64.b64decode(line))  # nosec B301  # from the trainer
            if what == "load":
                path, make = arguments
                sys.path[:] = path
                function = Function(make)
                result = function.description()
            else:
                result = getattr(function, what)(*arguments)
            answer = pickle.dumps(("returned", result))
        except BaseException as error:  # user code may raise anything
            shown = "".join(traceback.format_exception(error))
            answer = pickle.dumps(("raised", type(error).__name__, str(error), shown))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the function may have closed it
                stream.flush()
        answers.write(base64.b64encode(answer) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
