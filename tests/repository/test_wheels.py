"""Wheels: one with compiled ops for Python 3.11 and later, in clean environments; the configuration of its build."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LOOK = Path(__file__).with_name("look_at_wheel.py")
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "NLGRPO_EXT", "CC", "CXX")}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "NLGRPO_BUILD_EXT": "1"}


def run(*command, folder):
    done = subprocess.run(list(map(str, command)), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree)
    for name in ("nlgrpo", "kernels", "csrc"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", out, tree, folder=out)
    (path,) = out.glob("*.whl")
    return path


def python_of(version):
    """Path of a Python of this version, or None. A shim of pyenv may be there without its version."""
    for name in (f"python{version}", *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")):
        found = shutil.which(name)
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    return None


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_pip_installs_it_without_a_compiler(wheel, tmp_path, version):
    """Everything is tried where torch is installed, which is the Python of the tests; elsewhere what needs no torch."""
    python = python_of(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    run(python, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    inside = tmp_path / "venv" / "bin"
    ENVIRONMENT["CC"] = ENVIRONMENT["CXX"] = "/bin/false"
    run(inside / "python", "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel, folder=tmp_path)
    assert "nlgrpo train" in run(inside / "nlgrpo", "--help", folder=tmp_path)
    (packages,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    assert (packages / "nlgrpo" / "kernels" / "_ext.abi3.so").is_file()
    run(inside / "python", "-m", "compileall", "-q", packages / "nlgrpo", folder=tmp_path)
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        (packages / "others.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("-packages")))
        shown = run(inside / "python", LOOK, folder=tmp_path)
        assert f"in {packages}/nlgrpo/__init__.py" in shown


def test_the_ops_use_the_stable_abi_of_python_3_11(wheel):
    report = json.loads(run(sys.executable, "-m", "abi3audit", "--strict", "--report", wheel, folder=wheel.parent))
    ((_, spec),) = report["specs"].items()
    (audited,) = spec["wheel"]
    assert audited["name"] == "_ext.abi3.so"
    assert audited["result"]["baseline"] == "3.11"
    assert audited["result"]["is_abi3_baseline_compatible"]
    assert audited["result"]["non_abi3_symbols"] == []


def test_cibuildwheel_builds_one_wheel_per_platform():
    """Its configuration is read; the build itself needs containers."""
    command = (sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--archs", "x86_64")
    assert run(*command, "--platform", "linux", ROOT, folder=ROOT).split() == ["cp311-manylinux_x86_64"]
    assert run(*command, "--platform", "macos", ROOT, folder=ROOT).split() == ["cp311-macosx_x86_64"]
