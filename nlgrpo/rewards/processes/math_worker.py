"""The process behind the reward ``math``: checks answers with math-verify. Run by `workers`; imports nothing of nlgrpo.

math-verify limits its own time by alarms, which work in a main thread only; its limits are below that of `workers`.
"""

import json
import logging
import os
import sys
from typing import Any


def check(gold: str, text: str, boxed: bool) -> dict[str, Any]:
    """Compare the answer in ``text`` with ``gold``. Returns whether gold has an answer, whether they are equal, and it.

    As TRL's ``accuracy_reward``: the prediction must be LaTeX, and what is boxed counts first. ``boxed`` = false also
    takes plain expressions such as "the answer is 1/2".
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    wanted = parse(gold, parsing_timeout=5)
    if not wanted:
        return {"gold": False, "right": False, "answer": ""}
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    kinds = [latex] if boxed else [latex, ExprExtractionConfig()]
    found = parse(text, extraction_config=kinds, extraction_mode="first_match", parsing_timeout=5)
    right = bool(verify(wanted, found, timeout_seconds=5))
    return {"gold": True, "right": right, "answer": normal_form(found[0]) if found else ""}


def normal_form(answer: Any) -> str:
    """Return an answer as text, the same for 0.5, 0.50 and 1/2, so that equal answers can be counted."""
    import sympy

    return str(sympy.nsimplify(answer, rational=True) if isinstance(answer, sympy.Number) else answer)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not be read as an answer
    logging.disable(logging.CRITICAL)
    check("1", "$1$", True)  # imports
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        print(json.dumps(check(**json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
