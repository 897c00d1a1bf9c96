"""Command lines with an option twice, and environment variables that nlgrpo does not know."""

import re
import subprocess
import sys

import pytest
from support.helpers import REPOSITORY

from nlgrpo import cli
from nlgrpo.config import command_line
from nlgrpo.config.command_line import PREFIX, VARIABLES, check_arguments


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--optim.lr", "1e-5", "--loss.beta", "0", "--optim.lr", "1e-4"], "--optim.lr"),
        (["--optim.lr=1e-5", "--optim.lr", "1e-4"], "--optim.lr"),
        (["--max_rows", "1", "--max-rows", "2"], "--max-rows"),
        (["--data.shuffle", "--data.no-shuffle"], "--data.no-shuffle"),
        (["--no-json", "--json"], "--json"),
    ],
)
def test_an_option_that_is_given_twice_is_named(arguments, option, capsys):
    check_arguments(arguments, {})
    assert capsys.readouterr().err == f"note: {option} is given twice; only the last one counts\n"
    with pytest.raises(ValueError, match=f"^{re.escape(option)} is given twice; give it once, with commas"):
        check_arguments(arguments, {}, grid=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--optim.lr", "1e-5", "--critic.lr", "1e-5"],
        ["a text", "--samples", "2", "--", "--samples", "3"],
        ["--rewards.a.weight", "-1", "--rewards.b.weight", "-1"],
        ["--rewards.emoji.weight", "1", "--rewards.no-emoji.weight", "1"],
        [],
    ],
)
def test_other_command_lines_are_not(arguments, capsys):
    check_arguments(arguments, {}, grid=True)
    assert capsys.readouterr().err == ""


def test_the_last_one_counts_and_the_note_says_so(capsys):
    assert cli.main(["generate", "Once", "--max-new-tokens", "4", "--samples", "3", "--samples", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("[4 tokens, length]") == 2
    assert captured.err.startswith("note: --samples is given twice; only the last one counts\n")


@pytest.mark.slow
def test_torchrun_s_entry_says_so_too():
    given = ["--train.steps", "1", "--train.steps", "2", "--loss.beta", "-1"]
    line = [sys.executable, "nlgrpo/train.py", "length-bon", *given]
    done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "note: --train.steps is given twice; only the last one counts" in done.stderr


def test_a_misspelled_environment_variable_has_the_nearest_name():
    for name, value, message in (
        ("NLGRPO_ATENTION", "packed", "NLGRPO_ATENTION is not known; did you mean 'NLGRPO_ATTENTION'"),
        ("NLGRPO_APIKEY", "x", "NLGRPO_APIKEY is not known; did you mean 'NLGRPO_API_KEY'"),
        ("NLGRPO_TRITON", "off", r"NLGRPO_TRITON = 'off': expected 0 \(without Triton\) or 1"),
    ):
        with pytest.raises(ValueError, match=message):
            check_arguments([], {name: value})


def test_another_one_is_noted_on_the_first_rank(capsys):
    check_arguments([], {"NLGRPO_JOB_NAME": "x", "RANK": "1"})
    assert capsys.readouterr().err == ""
    check_arguments([], {"NLGRPO_JOB_NAME": "x", "HOME": "/"})
    assert capsys.readouterr().err == "note: nlgrpo does not read the environment variable NLGRPO_JOB_NAME\n"
    check_arguments([], dict.fromkeys(VARIABLES, "0"))
    assert capsys.readouterr().err == ""


def test_the_known_variables_are_those_of_the_repository():
    code = ("nlgrpo/**/*.py", "kernels/*.py", "tests/**/*.py", "experiments/**/*.py", "bench/*", "setup.py")
    places = (*code, "scripts/**/*", "Makefile")
    texts = [
        path.read_text("utf-8")
        for pattern in places
        for path in REPOSITORY.glob(pattern)
        if path.suffix in (".py", ".sh", "") and path.is_file() and path.name != "test_command_line.py"
    ]
    found = {name for text in texts for name in re.findall(rf"\b{PREFIX}[A-Z_]+", text)}
    assert found == set(VARIABLES)
    assert command_line.PREFIX not in found
