"""compute-sanitizer on the chunked kernel of linearize, which has barriers, and on decoding with a tiny model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from gpu_kit.child import Kit, Skip
from gpu_kit.plan import ROOT

PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
# Tool and program. Memory checks cover both programs; races are those of shared memory.
CASES = (("memcheck", "linearize"), ("racecheck", "linearize"), ("memcheck", "decode"))


def run(kit: Kit) -> None:
    found = tool()
    if found is None and not kit.rehearse:
        raise Skip("compute-sanitizer is not installed")
    processes = {
        (name, program): subprocess.Popen(
            [*([] if kit.rehearse else [str(found), "--tool", name, "--error-exitcode", "9"]),
             sys.executable, "-m", "gpu_kit.sanitized", program, kit.device],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # a block for each tensor: its end is checked
        )
        for name, program in kit.pick(CASES, (CASES[0], CASES[2]))
    }  # fmt: skip
    failed = []
    for (name, program), process in processes.items():
        output, _ = process.communicate()
        errors = [line for line in output.splitlines() if line.startswith("=========")][:20]
        kit.put(**{f"{name} {program}": {"status": process.returncode, "report": errors}})
        if "Device not supported" in output:
            raise Skip("compute-sanitizer does not support this device")
        if process.returncode:
            failed.append(f"{name} {program}: status {process.returncode}: {output[-300:]}")
    if failed:
        raise RuntimeError("; ".join(failed))


def tool() -> Path | None:
    """Path of compute-sanitizer; it comes with CUDA's compiler, which need not be on the PATH."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *PLACES])
    found = shutil.which("compute-sanitizer", path=path)
    return None if found is None else Path(found)
