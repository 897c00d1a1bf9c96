"""Packaging: a wheel that works outside the repository, and an editable install that maps ``nlgrpo.kernels``."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ASSETS = {
    path.relative_to(ROOT).as_posix() for path in (ROOT / "nlgrpo" / "data" / "assets").rglob("*") if path.is_file()
}
ASSETS.add("nlgrpo/apps/plan/measured.json")  # constants of measured GPUs
ASSETS.add("nlgrpo/py.typed")
MODULES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "nlgrpo").rglob("*.py")}
KERNELS = {path.name for path in (ROOT / "kernels").glob("*.py")} | {"py.typed"}
# Without the compiled ops, which take most of a minute; test_extension_build.py tests them.
ENVIRONMENT = {
    **os.environ,
    "NLGRPO_BUILD_EXT": "0",
    "OMP_NUM_THREADS": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
}
ENVIRONMENT.pop("PYTHONPATH", None)

LOOK = """
import json, nlgrpo, nlgrpo.kernels, torch
import nlgrpo.integrations.trl
from nlgrpo import cli
print(json.dumps([nlgrpo.__file__, nlgrpo.kernels.__file__]))
print(nlgrpo.kernels.linearize(torch.tensor([[1.0, 2.0]]), torch.ones(2)).tolist())
print(cli.main(["train", "--dry-run"]), cli.main(["generate", "Once", "--max-new-tokens", "3"]))
"""


def run(*command, folder):
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the files that a build reads, because a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    for name in ("nlgrpo", "kernels", "csrc", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return folder


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q")
    run(*pip, "-w", str(folder), str(tree), folder=folder)
    (path,) = folder.glob("*.whl")
    return path


def installed(wheel, folder):
    """Python of a new virtual environment with the wheel; other packages are those of this Python."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), folder=folder.parent)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "-q")
    run(*pip, str(wheel), folder=folder)
    # A path in a .pth file adds a folder without its own .pth files, so an editable install there is not found.
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("-packages")))
    return python


def test_the_wheel_holds_the_package_and_its_assets(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: info for info in archive.infolist()}
        held = {name for name in files if ".dist-info/" not in name}
        entry = archive.read(next(name for name in files if name.endswith("entry_points.txt"))).decode()
        assert "nlgrpo = nlgrpo.cli:main" in entry
    assert held == MODULES | {f"nlgrpo/kernels/{name}" for name in KERNELS} | ASSETS
    needed = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
    for model in ("maze-lm", "story-lm"):
        assert {f"nlgrpo/data/assets/{model}/{name}" for name in needed} < ASSETS
    assert "nlgrpo/data/assets/maze-grpo.json" in ASSETS
    assert {"nlgrpo/data/assets/prompts.jsonl", "nlgrpo/data/assets/eval_prompts.jsonl"} < ASSETS
    assert sum(files[name].file_size for name in held if "/story-lm/" in name) <= 3e6
    assert any(name.endswith("licenses/LICENSE") for name in files)


def test_the_source_archive_holds_all_files_of_a_wheel(tree, tmp_path):
    code = f"import setuptools.build_meta as b; b.build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", code, folder=tree)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert held >= MODULES | {f"kernels/{name}" for name in KERNELS} | ASSETS
    assert held >= {"setup.py", "pyproject.toml", "LICENSE"}


def test_the_installed_command_works_in_any_folder(wheel, tmp_path):
    python = installed(wheel, tmp_path / "venv")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    first, values, *shown = run(str(python), "-c", LOOK, folder=elsewhere).splitlines()
    assert first.count(str(tmp_path / "venv" / "lib")) == 2
    assert str(ROOT) not in first
    assert values == "[[-1.0, 0.0]]"
    assert shown[-1] == "0 0"
    assert "    [3 tokens, length]" in shown
    listed = run(str(tmp_path / "venv" / "bin" / "nlgrpo"), "recipes", folder=elsewhere)
    assert listed.startswith("maze ")
    assert not list(elsewhere.iterdir())


def test_the_installed_package_trains_mazes(wheel, tmp_path):
    """The model, the mazes and the recorded figures of GRPO come with the wheel."""
    installed(wheel, tmp_path / "venv")
    small = ["--train.steps", "2", "--rollout.prompts", "2", "--evaluation.samples", "8", "--evaluation.ns", "1", "8"]
    command = str(tmp_path / "venv" / "bin" / "nlgrpo")
    shown = run(command, "train", "maze", *small, "--train.seed", "3", folder=tmp_path)
    table = " ".join(shown[shown.index("solved, trained for bon:8:unbiased (128 prompts x 8 samples") :].split())
    assert "GRPO, recorded: nlgrpo train maze-grpo, 5 seeds" in table
    assert "pass@1" in table
    assert "pass@8" in table
    assert (tmp_path / "runs" / "maze" / "report.html").is_file()


def test_an_editable_install_maps_the_kernels(tree, tmp_path):
    code = f"import setuptools.build_meta as b; print(b.build_editable({str(tmp_path)!r}))"
    name = run(sys.executable, "-c", code, folder=tree).splitlines()[-1]
    python = installed(tmp_path / name, tmp_path / "venv")
    marker = tree / "kernels" / "marker.py"
    marker.write_text("value = 7\n")  # a new file in the tree is found without another install
    code = "import nlgrpo.kernels as k, nlgrpo.kernels.marker as m; print(k.__file__, k.linearize.__module__, m.value)"
    shown = run(str(python), "-c", code, folder=tmp_path).split()
    assert shown == [str(tree / "kernels" / "__init__.py"), "nlgrpo.kernels.linearize", "7"]
