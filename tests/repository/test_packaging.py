"""Packaging: one source archive and one wheel with compiled ops, clean environments, and builds without a compiler."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LOOK = Path(__file__).with_name("look_at_wheel.py")
LIBRARY = "nlgrpo/kernels/_ext.abi3.so"
ASSETS = {
    path.relative_to(ROOT).as_posix() for path in (ROOT / "nlgrpo" / "data" / "assets").rglob("*") if path.is_file()
}
ASSETS.add("nlgrpo/py.typed")
TEMPLATES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "nlgrpo/apps/report/templates").iterdir()}
ASSETS |= TEMPLATES
MODULES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "nlgrpo").rglob("*.py")}
KERNELS = {path.name for path in (ROOT / "kernels").glob("*.py")} | {"py.typed"}
NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}
ENVIRONMENT = {
    k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "NLGRPO_EXT", "NLGRPO_BUILD_EXT", "CC", "CXX")
}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def run(*command, folder, **environment):
    env = ENVIRONMENT | environment
    done = subprocess.run(list(map(str, command)), cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_tree(folder):
    """Copy the files that a build reads, because a build leaves folders behind."""
    folder.mkdir(exist_ok=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    for name in ("nlgrpo", "kernels", "csrc", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return folder


@pytest.fixture
def tree(tmp_path):
    return copy_tree(tmp_path / "tree")


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The source archive and the wheel. `python -m build` builds the wheel from the archive, so it checks that too."""
    tree = copy_tree(tmp_path_factory.mktemp("archives") / "tree")
    run(sys.executable, "-m", "build", "--no-isolation", folder=tree, NLGRPO_BUILD_EXT="1")
    (source,) = tree.glob("dist/*.tar.gz")
    (wheel,) = tree.glob("dist/*.whl")
    return source, wheel


@pytest.fixture(scope="module")
def source(archives):
    return archives[0]


@pytest.fixture(scope="module")
def wheel(archives):
    return archives[1]


def install(wheel, folder, python=sys.executable):
    """Make a virtual environment with the wheel alone, without a compiler; return its folder of packages."""
    run(python, "-m", "venv", "--without-pip", folder, folder=folder.parent)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel, folder=folder, **NO_COMPILER)
    (packages,) = folder.glob("lib/python3*/site-packages")
    return packages


def add_others(packages):
    """Make the packages of this Python visible.

    A path in a .pth file adds a folder without its own .pth files, so an editable install there is not found.
    """
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("-packages")))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The ``bin`` of an environment with the wheel and the packages of this Python."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    add_others(install(wheel, folder))
    return folder / "bin"


# --- what the archives hold -------------------------------------------------------------------------------------------


def test_the_wheel_holds_the_package_and_its_assets(wheel):
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: info for info in archive.infolist()}
        held = {name for name in files if ".dist-info/" not in name}
        entry = archive.read(next(name for name in files if name.endswith("entry_points.txt"))).decode()
        assert "nlgrpo = nlgrpo.cli:main" in entry
    assert held == MODULES | {f"nlgrpo/kernels/{name}" for name in KERNELS} | ASSETS | {LIBRARY}
    needed = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
    for model in ("maze-lm", "numbers-lm", "story-lm"):
        assert {f"nlgrpo/data/assets/{model}/{name}" for name in needed} < ASSETS
    assert "nlgrpo/data/assets/maze-grpo.json" in ASSETS
    assert {f"nlgrpo/apps/report/templates/{name}" for name in ("report.html", "report.css", "tables.js")} < TEMPLATES
    assert {"nlgrpo/data/assets/prompts.jsonl", "nlgrpo/data/assets/eval_prompts.jsonl"} < ASSETS
    assert sum(files[name].file_size for name in held if "/story-lm/" in name) <= 3e6
    assert any(name.endswith("licenses/LICENSE") for name in files)


def test_the_source_archive_holds_all_files_of_a_wheel(source):
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert held >= MODULES | {f"kernels/{name}" for name in KERNELS} | ASSETS
    assert held >= {"setup.py", "pyproject.toml", "LICENSE"}


def test_the_ops_use_the_stable_abi_of_torch(wheel, tmp_path):
    """One file for all versions of torch and Python: C functions of torch's stable ABI, no C++ of torch, no Python."""
    zipfile.ZipFile(wheel).extract(LIBRARY, tmp_path)
    shown = run("nm", "-D", "--undefined-only", tmp_path / LIBRARY, folder=tmp_path)
    # Symbols with a version are those of the C and C++ runtimes. Some of the C++ library have none, because torch's
    # libraries contain copies.
    names = {name for kind, name in map(str.split, shown.splitlines()) if kind == "U" and "@" not in name}
    assert "torch_library_impl" in names
    assert {name for name in names if not re.fullmatch(r"(aoti_)?torch_\w+|_ZN[KRO]*St\w+", name)} == set()


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


# --- an installed wheel -----------------------------------------------------------------------------------------------


def python_of(version):
    """Path of a Python of this version, or None. A shim of pyenv may be there without its version."""
    for name in (f"python{version}", *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")):
        found = shutil.which(name)
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    return None


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_pip_installs_it_without_a_compiler(wheel, tmp_path, version):
    python = python_of(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    packages = install(wheel, tmp_path / "venv", python)
    inside = tmp_path / "venv" / "bin"
    assert "nlgrpo train" in run(inside / "nlgrpo", "--help", folder=tmp_path)
    assert (packages / LIBRARY).is_file()
    run(inside / "python", "-m", "compileall", "-q", packages / "nlgrpo", folder=tmp_path)


def test_the_installed_package_works_in_any_folder(installed, tmp_path):
    """With its compiled ops, its commands and its model."""
    first = "import nlgrpo.kernels, nlgrpo.integrations.trl; print(nlgrpo.kernels.__file__)"
    code = f"{first}; import runpy; runpy.run_path({str(LOOK)!r})"
    kernels, package, *shown = run(installed / "python", "-c", code, folder=tmp_path).splitlines()
    (packages,) = installed.parent.glob("lib/python3*/site-packages")
    assert kernels == f"{packages}/nlgrpo/kernels/__init__.py"
    assert f"in {packages}/nlgrpo/__init__.py" in package
    assert "    [3 tokens, length]" in shown
    assert run(installed / "nlgrpo", "recipes", folder=tmp_path).startswith("maze ")
    assert not list(tmp_path.iterdir())


def test_the_installed_package_trains_mazes(installed, tmp_path):
    """The model, the mazes and the recorded figures of GRPO come with the wheel."""
    small = ["--train.steps", "2", "--rollout.prompts", "2", "--evaluation.samples", "8", "--evaluation.ns", "1", "8"]
    shown = run(installed / "nlgrpo", "train", "maze", *small, "--train.seed", "3", folder=tmp_path)
    table = " ".join(shown[shown.index("solved, trained for bon:8:unbiased (128 prompts x 8 samples") :].split())
    assert "GRPO, recorded: nlgrpo train maze-grpo, 5 seeds" in table
    assert "pass@1" in table
    assert "pass@8" in table
    assert (tmp_path / "runs" / "maze" / "report.html").is_file()


def test_an_editable_install_maps_the_kernels(tree, tmp_path):
    code = f"import setuptools.build_meta as b; print(b.build_editable({str(tmp_path)!r}))"
    name = run(sys.executable, "-c", code, folder=tree, NLGRPO_BUILD_EXT="0").splitlines()[-1]
    add_others(install(tmp_path / name, tmp_path / "venv"))
    marker = tree / "kernels" / "marker.py"
    marker.write_text("value = 7\n")  # a new file in the tree is found without another install
    code = "import nlgrpo.kernels as k, nlgrpo.kernels.marker as m; print(k.__file__, k.linearize.__module__, m.value)"
    shown = run(tmp_path / "venv" / "bin" / "python", "-c", code, folder=tmp_path).split()
    assert shown == [str(tree / "kernels" / "__init__.py"), "nlgrpo.kernels.linearize", "7"]


# --- builds that fail -------------------------------------------------------------------------------------------------


def build(tree, **environment):
    """Build a wheel; return its exit status, output, and files."""
    code = "import setuptools.build_meta as b; b.build_wheel('dist')"
    env = ENVIRONMENT | environment
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, env=env, capture_output=True, text=True, check=False)
    held = [name for path in tree.glob("dist/*.whl") for name in zipfile.ZipFile(path).namelist()]
    return done.returncode, done.stdout + done.stderr, held


@pytest.mark.parametrize("environment", [NO_COMPILER, {"PYTHONPATH": "no-torch"}])
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
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tree, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[[0.0]] [[0.0]]"
    assert done.stderr.count("cannot load the compiled CPU ops, using plain PyTorch instead") == 1
