"""The steps of the kit, in the order of their value: what is measured first is kept if time runs out."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"  # ignored by git
RESULTS = ROOT / "bench" / "results" / "gpu"
FORMAT = 1  # of the JSON; the table generator refuses others
GROUP_SECONDS = {"check": 285.0, "speed": 285.0}
REHEARSAL_SECONDS = 600.0  # limit of a step in a rehearsal: other programs may use the cores


@dataclass(frozen=True)
class Step:
    """A step, run as ``python -m gpu_kit.child NAME``. It is stopped after ``seconds``."""

    name: str
    group: str
    seconds: float
    about: str
    rehearsal: str
    """How its rehearsal on a CPU differs from a run on a GPU, beside the sizes."""
    bfloat16: bool = True
    """Whether it needs a card with bfloat16."""
    beside: bool = False
    """Whether it starts with the step before it, and runs beside it: for steps that measure no times."""

    @property
    def module(self) -> str:
        return f"gpu_kit.{self.group}_{self.name.replace('-', '_')}"


STEPS = (
    Step(
        "versions", "check", 30, "the machine, its packages and what was carried there", "no driver and no card",
        bfloat16=False,
    ),
    Step(
        "build", "check", 60, "build the compiled CPU ops, or say why not",
        "nothing is built if the package is installed",
        bfloat16=False, beside=True,
    ),
    Step(
        "smoke", "check", 60, "products with out_dtype, decoding against a packed pass, varlen attention, ECDFs",
        "PyTorch's attention in place of varlen, and products that widen first: a CPU has neither",
    ),
    Step(
        "train", "check", 75,
        "length-bon in bfloat16: background checkpoints, resumed by torchrun, and the same seed again",
        "gloo in place of NCCL",
    ),
    Step("doctor", "check", 90, "nlgrpo doctor", "three of its checks", bfloat16=False),
    Step("tests", "check", 130, "pytest -m gpu", "one small file of tests that need no GPU, in one process"),
    Step(
        "sanitizer", "check", 130, "compute-sanitizer on the chunked linearize and on decoding",
        "each program once and without the sanitizer, and the kernel in Triton's interpreter",
        beside=True,
    ),
    Step(
        "ceilings", "speed", 25, "copy bandwidth, rate of a matrix product, time of a launch",
        "times by the host's clock",
    ),
    Step(
        "engine", "speed", 75, "sampling at the shapes of 0.5B and 7B: launches, sampler, attention, and peers",
        "operators of the CPU in place of kernels; no peaks of memory",
    ),
    Step(
        "update", "speed", 65, "update of 0.5B under FSDP2 and of 7B with LoRA: share of the peak, kernels, memory",
        "gloo in place of NCCL; operators of the CPU in place of kernels; no peaks of memory",
    ),
    Step(
        "step", "speed", 150, "the whole GRPO step against TRL's",
        "float32; also the loop that stands in for a missing TRL",
    ),
    Step(
        "ops", "speed", 75, "head op and sampler against a bare product, PyTorch, torch.compile and Liger-Kernel",
        "float32, without torch.compile and Liger-Kernel; times by the host's clock; no peaks of memory",
    ),
)  # fmt: skip
NAMES = tuple(step.name for step in STEPS)


def of_command(command: str, only: tuple[str, ...] = ()) -> list[Step]:
    """Return the steps of ``check``, ``speed`` or ``all``, or those of them that ``only`` names."""
    chosen = [step for step in STEPS if command in ("all", step.group)]
    return [step for step in chosen if not only or step.name in only]


def tidy(text: str) -> str:
    """Return ``text`` without folders of the user and of Python, for a file that is committed."""
    for folder in (sys.prefix, sys.base_prefix):
        text = text.replace(folder, "<python>")
    text = text.replace(f"{ROOT}{os.sep}", "").replace(str(ROOT), ".")
    return text.replace(str(Path.home()), "~")
