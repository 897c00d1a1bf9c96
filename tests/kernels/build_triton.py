"""Compile every Triton kernel for GPUs on a machine without one; print one JSON object per kernel and target.

The arguments are compute capabilities: `build_triton.py 80 90 100`.

`test_triton_builds.py` runs this file in a separate process, as Triton decides once whether it interprets or compiles.
"""

import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import triton

from nlgrpo.apps.doctor.triton_builds import build, cases


def resources(cubin):
    """Registers per thread, and bytes of stack and spills, as reported by cuobjdump."""
    beside = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool = str(beside) if beside.is_file() else shutil.which("cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text.stdout)}


def widest_load(ptx):
    """Largest number of bytes that one instruction loads from global memory."""
    loads = re.findall(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.[bfu](\d+)", ptx)
    return max(int(count or 1) * int(bits) // 8 for count, bits in loads)


def facts(job):
    """Compile the case ``job[0]`` for a GPU of capability ``job[1]``, and report the resources it uses."""
    built = build(*job)
    found = {"kernel": job[0], "sm": job[1], "shared": built.metadata.shared}
    return found | resources(built.asm["cubin"]) | {"load": widest_load(built.asm["ptx"])}


def main():
    assert not triton.knobs.runtime.interpret, "set TRITON_INTERPRET=0: the kernels must be compiled"
    capabilities = [int(text) for text in sys.argv[1:]]
    jobs = list(itertools.product((name for name, *_ in cases()), capabilities))
    with ProcessPoolExecutor() as pool:
        for found in pool.map(facts, reversed(jobs)):  # in reverse, as the last ones are the slowest
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
