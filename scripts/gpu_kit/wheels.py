"""``prepare``: download the wheels that GPU machines lack, and unpack them into a folder that is carried there.

They are pure Python or for CPython 3.12 on x86-64 Linux, in the versions of constraints.txt where it lists them. Their
requirements are not resolved: PyTorch, Triton, transformers, NumPy and the like are those of the machine, and a wheel
that would bring one of them is refused. `check_versions` reports on the machine what is missing there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from gpu_kit.plan import ROOT

# What nlgrpo imports and a GPU machine may not have, and what the steps compare with.
PACKAGES = (
    "tyro", "docstring-parser", "typeguard", "shtab",
    "datasets", "dill", "multiprocess",
    "trl", "liger-kernel",
)  # fmt: skip
OF_THE_MACHINE = ("torch", "triton", "numpy", "transformers", "pyarrow", "pandas", "scipy")
MOST = 64 * 2**20  # bytes of the unpacked folder, which travels to the machine
TARGET = ("--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")

Download = Callable[[Sequence[str], Path], None]


def by_pip(requirements: Sequence[str], folder: Path) -> None:
    """Download one wheel for each requirement. Raises ValueError, with pip's last line, if one cannot be had."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *TARGET]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    command += ["--dest", str(folder), *requirements]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"pip download: {last}")


def prepare(folder: Path, download: Download = by_pip) -> str:
    """Fill ``folder`` with the unpacked wheels, all or nothing; return what to do with it.

    Raises ValueError if a wheel cannot be had, belongs to the machine, or if all take more than `MOST` bytes.
    """
    with tempfile.TemporaryDirectory() as name:
        wheels, unpacked = Path(name) / "wheels", Path(name) / "unpacked"
        wheels.mkdir()
        download([f"{package}{bound}" for package, bound in bounds().items() if package not in LATER], wheels)
        download([f"{package}{asked_by(wheels, package)}" for package in LATER], wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            unpack(wheel, unpacked)
        size = sum(path.stat().st_size for path in unpacked.rglob("*") if path.is_file())
        if size > MOST:
            raise ValueError(f"the unpacked wheels have {size / 2**20:.0f} MiB: expected at most {MOST / 2**20:.0f}")
        if folder.exists():
            shutil.rmtree(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(unpacked, folder)
    names = ", ".join(sorted(f"{found.name} {found.version}" for found in metadata.distributions(path=[str(folder)])))
    return (
        f"{names}\n{size / 2**20:.1f} MiB in {folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder}, "
        "which git ignores: copy this folder to the GPU machine together with the tree"
    )


# Their versions are bounded by a wheel that is downloaded first, and not by constraints.txt.
LATER = ("dill", "multiprocess")


def bounds() -> dict[str, str]:
    """Version of each package, as ``==1.2`` from constraints.txt; empty for one that it does not list."""
    listed = {}
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines():
        name, equal, version = line.partition("==")
        if equal:
            listed[normal(name)] = f"=={version.strip()}"
    return {package: listed.get(normal(package), "") for package in PACKAGES}


def asked_by(wheels: Path, package: str) -> str:
    """The bounds on ``package`` in the requirements of the downloaded ``wheels``, as ``<0.4.2,>=0.3``."""
    from packaging.requirements import Requirement

    found = []
    for wheel in wheels.glob("*.whl"):
        for line in requirements(wheel):
            needed = Requirement(line)
            if normal(needed.name) == package and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
                found.append(str(needed.specifier))
    return ",".join(filter(None, found))


def requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack a wheel; its scripts are left out. Raises ValueError for a package that belongs to the machine."""
    package = normal(wheel.name.partition("-")[0])
    if package in OF_THE_MACHINE:
        raise ValueError(f"{wheel.name}: {package} is the machine's, and is not carried")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            top = name.partition("/")[0]
            if ".." in Path(name).parts or Path(name).is_absolute():
                raise ValueError(f"{wheel.name} holds {name}, a path outside of its folder")
            if normal(top) in OF_THE_MACHINE:
                raise ValueError(f"{wheel.name} holds {top}, which is the machine's, and is not carried")
            if not top.endswith(".data"):
                archive.extract(name, folder)


def normal(name: str) -> str:
    return name.strip().lower().replace("_", "-")
