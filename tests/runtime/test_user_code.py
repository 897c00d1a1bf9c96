"""Functions of the user, found where the user is and not where the package is."""

import subprocess
import sys

from helpers import REPOSITORY, environment

REWARD = """
import neighbour
from {package}later import where

def reward(completions, **_):
    return [neighbour.ONE] * len(completions)
"""


def project(folder):
    """A package, a file beside another, and a module of a name that the package nlgrpo has too."""
    for name, package in (("alone", ""), ("mine", "mine.")):
        (folder / name).mkdir()
        (folder / name / "reward.py").write_text(REWARD.format(package=package))
        (folder / name / "later.py").write_text("where = 'here'")
    (folder / "alone" / "neighbour.py").write_text("ONE = 1.0")
    (folder / "neighbour.py").write_text("import config\nONE = config.ONE")
    (folder / "config.py").write_text("ONE = 1.0")


def answer(folder, command):
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    return done.returncode, done.stderr


def test_modules_of_the_current_folder_and_beside_a_file(tmp_path):
    project(tmp_path)
    code = (
        "import sys; sys.path[0] = '/'; from nlgrpo.runtime import user_code as u; print(u.function(sys.argv[1])([1]))"
    )
    for name in ("mine.reward:reward", "alone/reward.py:reward"):
        assert answer(tmp_path, [sys.executable, "-c", code, name]) == (0, "")


def test_the_main_job_does_not_show_the_packages_own_modules(tmp_path):
    project(tmp_path)
    program = str(REPOSITORY / "nlgrpo" / "train.py")
    options = ["length-bon", "--dry-run", "--rewards.mine.function", "mine.reward:reward"]
    status, said = answer(tmp_path, [sys.executable, program, *options])
    assert status == 0, said
