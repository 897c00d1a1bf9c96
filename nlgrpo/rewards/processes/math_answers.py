"""The reward ``math``: whether an answer equals a reference as a mathematical expression."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nlgrpo.data.conversations import text_of
from nlgrpo.errors import UserError
from nlgrpo.rewards.processes.workers import Workers

SCRIPT = Path(__file__).with_name("math_worker.py")


class Math:
    r"""1.0 if the answer of the completion equals that of ``column``, else 0.0, by math-verify.

    Equal are expressions, not texts: \frac{1}{2} and 0.5, x(x+1) and x^2+x, {1,2} and {2,1}. The answer is LaTeX, of
    which \boxed{..} counts first; with ``boxed=False`` also a plain expression ("the answer is 1/2"). Abstains (None)
    if the column has no answer.

    Answers are checked in ``workers`` processes of their own (0: one per two cores, at most 8). One that takes longer
    than ``seconds`` counts as wrong. Metric ``math/timeouts``; the column ``answer_parsed`` of the samples.

    Raises UserError for invalid arguments, if math-verify is not installed, and for data without the column.
    """

    def __init__(self, column: str = "answer", boxed: bool = True, seconds: float = 15.0, workers: int = 0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("math needs the package math-verify: run pip install nlgrpo[math]")
        if not seconds > 0:
            raise UserError(f"seconds must be above 0, got {seconds!r}")
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
            raise UserError(f"workers must be a whole number of at least 0, got {workers!r}")
        self.column = column
        self.boxed = boxed
        self.data_columns = (column,)
        self._known: dict[str, str] = {}  # answers of the completions of the last call, for `answer`
        self.workers = Workers(SCRIPT, workers or max(1, min(8, (os.cpu_count() or 1) // 2)), seconds)

    def __call__(
        self,
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        golds = [str(gold) for gold in columns[self.column]]
        texts = [text_of(completion) for completion in completions]
        answers = self._check(list(zip(golds, texts, strict=True)))
        self._known = {text: x["answer"] for text, x in zip(texts, answers, strict=True) if x is not None and x["gold"]}
        if log_metric is not None:
            log_metric("math/timeouts", float(sum(answer is None for answer in answers)))
        if log_extra is not None:
            log_extra("answer_parsed", ["" if answer is None else answer["answer"] for answer in answers])
        return [0.0 if x is None else float(x["right"]) if x["gold"] else None for x in answers]

    def answer(self, text: str) -> str | None:
        """Return the answer of a completion for majority voting, as the text of its normal form."""
        if text not in self._known:
            [found] = self._check([("1", text)])
            return found["answer"] or None if found else None
        return self._known[text] or None

    def _check(self, pairs: Sequence[tuple[str, str]]) -> list[Any | None]:
        """Answers of the workers; equal pairs are checked once."""
        different = list(dict.fromkeys(pairs))
        asked = [{"gold": gold, "text": text, "boxed": self.boxed} for gold, text in different]
        found = dict(zip(different, self.workers.ask(asked), strict=True))
        return [found[pair] for pair in pairs]
