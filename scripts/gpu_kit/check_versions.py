"""Versions, imports of what the kit carries, and whether the machine's packages satisfy their requirements."""

from __future__ import annotations

import importlib
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gpu_kit import surroundings
from gpu_kit.child import Kit, message

NEEDED = ("nlgrpo.kernels", "tyro", "datasets", "pyarrow", "rich", "scipy", "matplotlib", "transformers")
PEERS = ("trl", "liger_kernel", "vllm", "flash_attn", "peft", "accelerate")
TOOLS = ("nvidia-smi", "nvcc", "compute-sanitizer", "ncu", "c++", "git")


def run(kit: Kit) -> None:
    kit.put(
        platform=f"{platform.system()} {platform.machine()}",
        torch={
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
            "nccl": list(torch.cuda.nccl.version()) if kit.device == "cuda" else None,
            "bfloat16": kit.device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False),
        },
        tools={name: shutil.which(name) is not None for name in TOOLS},
        card=card(),
    )
    kit.put(carried=carried(surroundings.WHEELS), unmet=unmet(surroundings.WHEELS))
    failed = {name: error for name in NEEDED if (error := import_error(name)) is not None}
    kit.put(imports=failed, peers={name: import_error(name) or "ok" for name in PEERS})
    if failed:
        raise RuntimeError(f"imports fail: {failed}; on the machine with a network, run scripts/gpu.sh prepare")


def import_error(name: str) -> str | None:
    """Return the error of importing ``name``; None if there is none. A package that is not there is no exception."""
    try:
        importlib.import_module(name)
    except Exception as error:  # a package for another version of torch may fail in any way
        return message(error)[:300]
    return None


def card() -> list[str] | None:
    """Clocks, temperature and power of the GPUs before the run, by nvidia-smi."""
    fields = "name,driver_version,memory.used,clocks.sm,clocks.mem,temperature.gpu,power.limit"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()


def carried(folder: Path) -> dict[str, str]:
    """Packages and versions of the unpacked wheels."""
    return {found.name: found.version for found in metadata.distributions(path=[str(folder)])}


def unmet(folder: Path) -> list[str]:
    """Requirements of the unpacked wheels that no installed version satisfies."""
    from packaging.requirements import Requirement

    found: list[str] = []
    for package in metadata.distributions(path=[str(folder)]):
        for text in package.requires or ():
            needed = Requirement(text)
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            has = installed(needed.name)
            if has is None or not needed.specifier.contains(has, prereleases=True):
                found.append(f"{package.name} needs {needed.name}{needed.specifier}, and here is {has or 'none'}")
    return found


def installed(name: str) -> Any:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
