"""The library of faults: built once, and loaded before all others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("faults.c")
BUILT = SOURCE.parents[2] / "build" / "chaos" / "faults.so"


def environment() -> dict[str, str]:
    """Environment of a process whose operations can fail. Builds the library; needs Linux and a C compiler."""
    if sys.platform != "linux":
        raise SystemExit("error: faults are injected on Linux only")
    if not BUILT.exists() or BUILT.stat().st_mtime < SOURCE.stat().st_mtime:
        BUILT.parent.mkdir(parents=True, exist_ok=True)
        new = BUILT.with_suffix(f".{os.getpid()}")
        flags = ("-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread")
        subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", new, SOURCE, "-ldl"], check=True)
        new.replace(BUILT)
    return {"LD_PRELOAD": str(BUILT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
