"""``nlgrpo doctor``: its results, with a failure for each that failed."""

from __future__ import annotations

import json
import subprocess
import sys

from gpu_kit.child import Kit
from gpu_kit.plan import ROOT

REHEARSED = ("packages", "cpu", "training")


def run(kit: Kit) -> None:
    out = kit.folder / "doctor.json"
    command = [sys.executable, "-m", "nlgrpo", "doctor", "--json", str(out)]
    command += kit.pick([], ["--only", *REHEARSED])
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if not out.is_file():
        raise RuntimeError(f"nlgrpo doctor ended with status {done.returncode}: {done.stderr[-500:]}")
    found = json.loads(out.read_text("utf-8"))
    kit.put(results=found["results"], seconds=found["seconds"])
    failed = [f"{one['name']}: {one['detail']}" for one in found["results"] if one["status"] == "failed"]
    if failed:
        raise RuntimeError("; ".join(failed))
