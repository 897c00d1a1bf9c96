"""The compiled CPU ops are built on demand; an install without them says so and works."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LIBRARY = "nlgrpo/kernels/_ext.abi3.so"


@pytest.fixture
def tree(tmp_path):
    folder = tmp_path / "tree"
    folder.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    for name in ("nlgrpo", "kernels", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return folder


def build(tree, **environment):
    """Build a wheel; return its exit status, output, and files."""
    env = {k: v for k, v in os.environ.items() if k not in ("NLGRPO_BUILD_EXT", "CC", "CXX")} | environment
    code = "import setuptools.build_meta as b; b.build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, env=env, capture_output=True, text=True, check=False)
    held = [name for path in tree.glob("dist/*.whl") for name in zipfile.ZipFile(path).namelist()]
    return done.returncode, done.stdout + done.stderr, held


def imported(library):
    """Undefined symbols of a library, without versioned ones (of the C and C++ runtimes)."""
    shown = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True).stdout
    return {name for kind, name in map(str.split, shown.splitlines()) if kind == "U" and "@" not in name}


def test_the_wheel_has_the_ops_and_they_load(tree, tmp_path):
    """``python -m build`` builds the wheel from the source archive, so this checks the archive too."""
    command = (sys.executable, "-m", "build", "--no-isolation")
    env = os.environ | {"NLGRPO_BUILD_EXT": "1"}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tree.glob("dist/*.whl")
    assert "-cp311-abi3-" in wheel.name
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    # One file for all versions of torch and Python: it uses C functions of torch's stable ABI, no C++ of torch, and
    # nothing of Python. Some symbols of the C++ library have no version, because torch's libraries contain copies.
    names = imported(tmp_path / "site" / LIBRARY)
    assert "torch_library_impl" in names
    assert {name for name in names if not re.fullmatch(r"(aoti_)?torch_\w+|_ZN[KRO]*St\w+", name)} == set()
    code = (
        "import torch, sys; from nlgrpo import kernels; print(kernels.__file__);"
        "print(kernels.swiglu(torch.zeros(1, 2), impl='cpp').tolist())"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    env.pop("NLGRPO_EXT", None)
    code = f"import sys; sys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in repr(f)]; {code}"
    shown = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert shown.stdout.splitlines() == [str(tmp_path / "site" / "nlgrpo" / "kernels" / "__init__.py"), "[[0.0]]"]


@pytest.mark.parametrize("environment", [{"CC": "/bin/false", "CXX": "/bin/false"}, {"PYTHONPATH": "no-torch"}])
def test_without_a_compiler_or_torch_the_install_says_so_and_succeeds(tree, environment):
    (tree / "no-torch" / "torch").mkdir(parents=True)
    (tree / "no-torch" / "torch" / "__init__.py").write_text("raise ImportError('no torch here')\n")
    status, shown, held = build(tree, **environment)
    assert status == 0, shown
    assert [line for line in shown.splitlines() if line.startswith("nlgrpo: installing without the compiled CPU ops (")]
    assert LIBRARY not in held
    assert "nlgrpo/kernels/decode.py" in held
    assert [path.name for path in tree.glob("dist/*.whl")] == ["nlgrpo-0.1.0-py3-none-any.whl"]
    assert ("pip --no-build-isolation or build --no-isolation)" in shown) == ("PYTHONPATH" in environment)
    shutil.rmtree(tree / "dist")
    status, shown, held = build(tree, NLGRPO_BUILD_EXT="1", **environment)
    assert status != 0
    assert not held


def test_a_file_that_does_not_load_gives_one_warning(tree):
    (tree / "kernels" / "_ext.abi3.so").write_text("not a library")
    code = (
        "import importlib.util as u, sys, torch;"
        "s = u.spec_from_file_location('k', 'kernels/__init__.py', submodule_search_locations=['kernels']);"
        "sys.modules['k'] = m = u.module_from_spec(s); s.loader.exec_module(m);"
        "print(m.swiglu(torch.zeros(1, 2)).tolist(), m.swiglu(torch.zeros(1, 2)).tolist())"
    )
    env = {k: v for k, v in os.environ.items() if k != "NLGRPO_EXT"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[[0.0]] [[0.0]]"
    assert done.stderr.count("cannot load the compiled CPU ops, using plain PyTorch instead") == 1
