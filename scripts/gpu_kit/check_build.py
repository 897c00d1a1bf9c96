"""Build the compiled CPU ops; the following steps load them. Without a compiler they run without."""

from __future__ import annotations

import os
import subprocess
import sys

from gpu_kit import surroundings
from gpu_kit.child import Kit, Skip
from gpu_kit.plan import ROOT


def run(kit: Kit) -> None:
    if surroundings.installed_ops():
        kit.put(compiled_ops=True, built=False)
        return
    if not surroundings.has_compiler():
        kit.put(compiled_ops=False)
        raise Skip("no C++ compiler: the steps run with NLGRPO_EXT=0")
    command = [sys.executable, "setup.py", "--quiet", "build_ext"]
    command += ["--build-lib", str(surroundings.OPS), "--build-temp", str(surroundings.OPS)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"NLGRPO_BUILD_EXT": "1"}, check=False
    )
    kit.put(compiled_ops=surroundings.OPS_FILE.is_file(), built=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"setup.py build_ext: {last}; the steps run with NLGRPO_EXT=0")
