"""What is carried to a GPU machine: which wheels, how much, and that the tree is importable there."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from gpu_kit import wheels
from gpu_kit.plan import ROOT


def metadata(name, version="1.0", requires=""):
    """The METADATA of a wheel. An empty file is not valid: `importlib_metadata` refuses it where it is installed."""
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"


FILES = {
    "datasets/__init__.py": "",
    "datasets-5.0.dist-info/METADATA": metadata("datasets", "5.0", "Requires-Dist: dill<0.4.2\n"),
}


def fake(contents):
    """A download that writes a wheel for each requirement, and what it was called with."""
    calls = []

    def download(requirements, folder):
        calls.append(list(requirements))
        for requirement in requirements:
            name = requirement.partition("=")[0].partition("<")[0].partition(">")[0].replace("-", "_")
            files = contents.get(name, {f"{name}/__init__.py": "", f"{name}-1.0.dist-info/METADATA": metadata(name)})
            with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
                for path, text in files.items():
                    archive.writestr(path, text)

    return download, calls


def test_wheels_are_unpacked_in_the_versions_of_the_constraints(tmp_path):
    extra = {
        "tyro/__init__.py": "x = 1",
        "tyro-1.0.dist-info/METADATA": metadata("tyro"),
        "tyro-1.0.data/scripts/tyro": "run",
    }
    download, calls = fake({"datasets": FILES, "tyro": extra})
    shown = wheels.prepare(tmp_path / "carried", download)
    first, second = calls
    assert "trl==1.16.0" in first
    assert "docstring-parser" in first  # which constraints.txt does not list
    assert second == ["dill<0.4.2", "multiprocess"]  # what the wheel of datasets requires
    assert (tmp_path / "carried/tyro/__init__.py").read_text() == "x = 1"
    assert not (tmp_path / "carried/tyro-1.0.data").exists()
    assert "datasets 5.0, " in shown
    assert "tyro 1.0\n0.0 MiB" in shown
    assert "copy this folder to the GPU machine" in shown


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tyro/data.bin": "x" * 5000}, "expected at most 0"),
        ({"torch/__init__.py": ""}, "holds torch, which is the machine's"),
        ({"../outside.py": ""}, "a path outside of its folder"),
    ],
)
def test_a_wheel_that_is_too_large_or_replaces_a_package_is_refused(tmp_path, files, message, monkeypatch):
    monkeypatch.setattr(wheels, "MOST", 4000)
    (tmp_path / "carried").mkdir()
    (tmp_path / "carried/old.py").write_text("kept")
    download, _ = fake({"tyro": files | {"tyro-1.0.dist-info/METADATA": metadata("tyro")}, "datasets": FILES})
    with pytest.raises(ValueError, match=message):
        wheels.prepare(tmp_path / "carried", download)
    assert [path.name for path in (tmp_path / "carried").iterdir()] == ["old.py"]
    assert not (tmp_path / "outside.py").exists()


def test_a_package_of_the_machine_is_refused_by_its_name(tmp_path):
    path = tmp_path / "torch-2.11.0-cp312-cp312-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w"):
        pass
    with pytest.raises(ValueError, match="torch is the machine's"):
        wheels.unpack(path, tmp_path)


# --- imports without an installation ----------------------------------------------------------------------------------

LOOK = """
import subprocess, sys
import nlgrpo, nlgrpo.kernels, nlgrpo.kernels.linearize, carried_only, both
print(nlgrpo.__file__, nlgrpo.kernels.__file__, carried_only.__file__, both.__file__, sep="\\n")
if len(sys.argv) == 1:  # a process of this process finds the same
    subprocess.run([sys.executable, __file__, "again"], check=True)
"""


@pytest.mark.slow
def test_the_tree_is_imported_without_an_installation_and_wheels_come_last(tmp_path):
    copy = tmp_path / "tree"
    for name in ("nlgrpo", "kernels", "scripts/gpu_kit"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "assets", "kernels" if name == "nlgrpo" else "")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    machine, carried = tmp_path / "machine", tmp_path / "carried"
    for folder, names in ((machine, ["both"]), (carried, ["both", "carried_only"])):
        folder.mkdir()
        for name in names:
            (folder / f"{name}.py").write_text("")
    (machine / "sitecustomize.py").write_text("print('the one of the machine')")
    (tmp_path / "look.py").write_text(LOOK)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(copy / "scripts/gpu_kit/importing"), str(copy), str(machine)]),
        "NLGRPO_KIT_WHEELS": str(carried),
    }
    command = [sys.executable, str(tmp_path / "look.py")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = ["the one of the machine", copy / "nlgrpo/__init__.py", copy / "kernels/__init__.py"]
    expected += [carried / "carried_only.py", machine / "both.py"]
    lines = done.stdout.splitlines()
    assert sorted(map(Path, lines)) == sorted(map(Path, 2 * [str(line) for line in expected]))
