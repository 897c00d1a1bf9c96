"""The whole GRPO step against TRL's GRPOTrainer with transformers' ``generate``, by ``bench/bench_step.py``."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import bench_step
from bench_step import SHAPES, Case

from gpu_kit.child import Kit
from gpu_kit.measuring import need, release

LOOP = "reference loop (TRL's step)"
PROMPTS, SAMPLES, PROMPT = 32, 8, 224  # completions have up to 128 tokens, 50 on average


def run(kit: Kit) -> None:
    shape = kit.pick("0.5B", "1M")
    case = Case(kit.pick(PROMPT, 12), kit.pick(SAMPLES, 2), beta=0.0)
    args = Namespace(
        prompts=kit.pick(PROMPTS, 2),
        device=kit.device,
        steps=kit.pick(3, 1),
        warmup=kit.pick(1, 0),
        threads=kit.pick(8, 1),
    )
    need(kit.pick(24 * 2**30, 0), kit.device)
    parameters = bench_step.write_inputs(kit.folder, case.prompt_tokens, SHAPES[shape], kit.device)
    release(kit.device)
    kit.put(parameters=parameters, prompts=args.prompts, samples=case.samples, prompt_tokens=case.prompt_tokens)
    missing = missing_trl(kit.rehearse)
    peer = "trl" if missing is None else "loop"
    about: dict[str, dict[str, Any]] = {"ours": {}, "trl": {"title": "TRL"}, "loop": {"title": LOOP, "why": missing}}
    sides = ["ours", peer]
    if kit.rehearse and peer != "loop":
        sides.append("loop")
    with ThreadPoolExecutor(kit.pick(1, 2)) as pool:  # one process after another, but for a rehearsal's times
        for side, found in zip(sides, pool.map(lambda side: measured(kit, side, case, args), sides), strict=True):
            kit.put(**{side: about[side] | found})
    kit.put(ratio=kit.values[peer]["seconds"] / kit.values["ours"]["seconds"])


def missing_trl(rehearse: bool) -> str | None:
    """Return why TRL cannot be used here; None if it can. In a rehearsal, a TRL that is installed has to work."""
    for name in ("trl", "datasets"):
        if importlib.util.find_spec(name) is None:
            return f"No module named {name!r}"
    if rehearse:
        return None
    code = "from trl import GRPOConfig, GRPOTrainer; from datasets import load_dataset"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def measured(kit: Kit, side: str, case: Case, args: Namespace) -> dict[str, Any]:
    """Medians of the steps of one side, in a process of its own; of ours also the seconds of each phase."""
    found = bench_step.measure(side, kit.folder, case, args, seed=0)
    result: dict[str, Any] = bench_step.summary([found], args.prompts * case.samples)
    return result | ({"phases": bench_step.phases([found])} if side == "ours" else {})
