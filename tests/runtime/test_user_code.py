"""User functions are found relative to the user's folder, not to the package."""

import subprocess
import sys

import pytest
from helpers import REPOSITORY, environment

REWARD = """
import neighbour
from {package}later import where

def reward(completions, **_):
    return [neighbour.ONE] * len(completions)
"""


def project(folder):
    """Write a package, two files in one folder, and a module with the name of one in the package nlgrpo."""
    for name, package in (("alone", ""), ("mine", "mine.")):
        (folder / name).mkdir()
        (folder / name / "reward.py").write_text(REWARD.format(package=package))
        (folder / name / "later.py").write_text("where = 'here'")
    (folder / "alone" / "neighbour.py").write_text("ONE = 1.0")
    (folder / "neighbour.py").write_text("import config\nONE = config.ONE")
    (folder / "config.py").write_text("ONE = 1.0")


def run(folder, command):
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    return done.returncode, done.stderr


def test_modules_are_found_in_the_current_folder_and_next_to_a_file(tmp_path):
    project(tmp_path)
    code = (
        "import sys; sys.path[0] = '/'; from nlgrpo.runtime import user_code as u; print(u.function(sys.argv[1])([1]))"
    )
    for name in ("mine.reward:reward", "alone/reward.py:reward"):
        assert run(tmp_path, [sys.executable, "-c", code, name]) == (0, "")


@pytest.mark.slow
def test_train_does_not_put_the_package_on_the_import_path(tmp_path):
    project(tmp_path)
    program = str(REPOSITORY / "nlgrpo" / "train.py")
    options = ["length-bon", "--dry-run", "--rewards.mine.function", "mine.reward:reward"]
    status, output = run(tmp_path, [sys.executable, program, *options])
    assert status == 0, output
