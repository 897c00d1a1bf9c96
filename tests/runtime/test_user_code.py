"""User functions are found relative to the user's folder, not to the package."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.helpers import REPOSITORY, environment

from nlgrpo.rewards import builtin
from nlgrpo.runtime import user_code

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


def test_files_of_code(tmp_path):
    """A file with what it imports from its folder and package, through others and in a circle, and nothing else."""
    files = {
        "reward.py": "import os, helper\nimport package.deep.grading as g\nfrom torch import nn\nimport gone.gone",
        "helper.py": "def f():\n    from package import late, name_of_a_function\nimport reward",
        "unused.py": "",
        "package/__init__.py": "from .base import x",
        "package/base.py": "x = 1",
        "package/late.py": "from . import sibling",
        "package/sibling.py": "from ..helper import f",
        "package/unused.py": "",
        "package/deep/__init__.py": "",
        "package/deep/grading.py": "from ..other import y\nfrom package.absolute import z\nfrom .here import *",
        "package/deep/here.py": "",
        "package/other.py": "y = 1",
        "package/absolute.py": "z = 1",
    }
    for name, code in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    found = [path.relative_to(tmp_path).as_posix() for path in user_code.files_of(tmp_path / "reward.py")]
    assert found[0] == "reward.py"
    assert sorted(found) == sorted(name for name in files if "unused" not in name)
    (tmp_path / "broken.py").write_text("def (")
    assert user_code.files_of(tmp_path / "broken.py") == [tmp_path / "broken.py"]


@pytest.mark.parametrize("module", [pytest, subprocess, builtin])
def test_installed_code_is_one_file(module):
    assert [str(path) for path in user_code.files_of(Path(module.__file__))] == [module.__file__]
