"""Wording that readers of PyTorch's and TRL's documentation would have to read twice does not come back."""

import re
from pathlib import Path

import pytest
from helpers import REPOSITORY

# What was written before, and what to write instead.
PHRASES = {
    r"parted by": "separated by",
    r"going on from|goes on from": "resuming from, resumes",
    r"the same command goes on": "run the same command again to resume",
    r"begins? anew|begun anew": "restarts",
    r"draws? nothing\b|draw none\b": "offline",
    r"whole or not there|not there or whole": "atomic, complete or absent",
    r"held against": "compared with, calibrated on",
    r"(?:is|are|was|were) told\b": "the message says, is reported",
    r"what (?:it|they|this|these) comes? to|is going to come to|came to\b": "result, value, expected final reward",
    r"(?:is|are|be|was|were) worth\b|what .{1,30} worth\b": "value",
    r"(?<!lambda )(?<!of )\ba rank\b(?! of| in| and|,? which)(?=[,;.)]|$)": "per rank",
    r"\bin step\b(?! \d|\.)": "in lockstep, together",
    r"ways? to decode": "decoding method",
    r"words~|~ of the reward": "linearized reward",
    r"whatever (?:it|they) (?:is|are)\b": "name it",
    r"no(?:body|thing) of (?:it|them) is": "say the condition",
    r"\bof whom\b|\bof which (?:the|no|none|each)\b": "a sentence of its own",
    r"\b(?:samples|completions|tokens|prompts|rows|values?|files?|seconds|candidates|numbers?) an? "
    r"(?:prompt|rank|step|group|completion|row|pair|second|block|chunk|iteration)\b": "per prompt, per rank, ...",
    r"\basked for\b": "requested, needed",
    r"\b(?:is|are|was|were) said\b": "is reported",
    r"\blies? (?:beside|behind)\b|\bstands? (?:beside|there)\b": "is stored next to, is",
    r"\b(?:come|came) to (?:its|their) ends?\b|\bto their ends?\b": "has finished",
    r"\bnothing to say\b": "abstains, has no score",
    r"\bso many (?:rows|tokens|prompts|new|numbers)\b": "the number",
}
FILES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "nlgrpo/**/*.py", "kernels/*.py", "csrc/*", "scripts/**/*.py", "bench/*.py",
                    "examples/*", "setup.py", "Makefile", "tests/**/*.py")
    for path in sorted(REPOSITORY.glob(pattern))
    if path.is_file() and path.name != Path(__file__).name
]  # fmt: skip


@pytest.mark.parametrize(("phrase", "instead"), PHRASES.items())
def test_no_text_has_the_phrase(phrase, instead):
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search(phrase, line, re.IGNORECASE)
    ]
    assert not found, f"write {instead!r}:\n" + "\n".join(found)


def test_the_texts_are_there():
    assert len(FILES) > 200
    assert re.search(next(iter(PHRASES)), "Parted by commas", re.IGNORECASE)
