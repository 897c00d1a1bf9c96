"""Facts for the JSON: card, driver, versions, and the commit that was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from gpu_kit.plan import ROOT

PACKAGES = ("torch", "triton", "transformers", "numpy", "datasets", "pyarrow", "tyro", "trl", "liger-kernel", "vllm")

# In a process of its own: the runner itself imports no torch, so that it starts at once and holds no GPU memory.
PROBE = """
import json, platform, sys
from importlib import metadata
import torch
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = None
facts = {"versions": found, "cuda": torch.version.cuda, "card": None}
if torch.cuda.is_available():
    of = torch.cuda.get_device_properties(0)
    facts |= {"card": of.name, "memory_bytes": of.total_memory, "capability": [of.major, of.minor],
              "multiprocessors": of.multi_processor_count, "gpus": torch.cuda.device_count()}
print(json.dumps(facts))
"""


def probe(environment: dict[str, str]) -> dict[str, Any]:
    """Return the versions of packages and what torch says of the first GPU; ``card`` is None without one.

    Raises ValueError, with the last line of the error, if torch cannot be imported.
    """
    command = [sys.executable, "-c", PROBE, *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"{sys.executable} cannot import torch: {last}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def driver() -> str | None:
    """Version of the NVIDIA driver by nvidia-smi; None without one."""
    return _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])


def commit() -> tuple[str | None, bool | None]:
    """Return the commit of the tree, and whether the tree has changes; (None, None) outside of a git checkout."""
    name = _first_line(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    if name is None:
        return None, None
    return name, _first_line(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]) is not None


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    return lines[0] if lines else None
