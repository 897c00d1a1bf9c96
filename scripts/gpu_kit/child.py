"""One step in its own process: ``python -m gpu_kit.child NAME --out FILE [--rehearse]``."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gpu_kit import plan
from nlgrpo.runtime.atomic_files import atomic_write

T = TypeVar("T")


class Skip(Exception):
    """A step, or what it compares with, cannot run on this machine. The message says why."""


@dataclass
class Kit:
    """What a step gets. Values are written at once, so that a step that is stopped keeps them."""

    out: Path
    rehearse: bool
    folder: Path
    """For temporary files."""
    seconds: float = 300.0
    """After which the step is stopped."""
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    def pick(self, real: T, rehearsed: T) -> T:
        """Return the value for this run: that of a GPU, or that of a rehearsal."""
        return rehearsed if self.rehearse else real

    def put(self, **values: Any) -> None:
        """Add values to the step's entry in the JSON."""
        self.values |= values
        self._write({})

    def end(self, status: str, error: str | None = None) -> None:
        self._write({"status": status} | ({} if error is None else {"error": error}))

    def _write(self, end: dict[str, Any]) -> None:
        atomic_write(self.out, plan.tidy(json.dumps({"values": self.values} | end)) + "\n")


def message(error: BaseException) -> str:
    """Type and message of an exception, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:1000]}" if text else type(error).__name__


def need_bfloat16() -> None:
    """Raise `Skip` on a card that computes in bfloat16 only by emulation."""
    import torch

    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise Skip(f"{torch.cuda.get_device_name()} has no bfloat16")


def end_with_the_parent() -> None:
    """Be killed if the runner is (Linux); it then cannot stop its steps."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run(name: str, kit: Kit) -> int:
    """Run a step and write how it ended. Returns 0 unless it failed."""
    step = next(step for step in plan.STEPS if step.name == name)
    try:
        if step.bfloat16 and not kit.rehearse:
            need_bfloat16()
        importlib.import_module(step.module).run(kit)
    except Skip as reason:
        kit.end("skipped", str(reason))
        return 0
    except (Exception, SystemExit) as error:  # the benchmarks end with SystemExit
        traceback.print_exc()
        kit.end("failed", message(error))
        return 1
    kit.end("ok")
    return 0


def main() -> int:
    end_with_the_parent()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=plan.NAMES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())  # inside the runner's folder, which it removes also if it has to stop this step
    return run(args.name, Kit(args.out, args.rehearse, folder, args.seconds))


if __name__ == "__main__":
    sys.stdout.flush()
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a library that hangs at the end of the process does not use up the step's time
