"""The whole GRPO step against TRL's GRPOTrainer with transformers' ``generate``, by ``bench/bench_step.py``."""

from __future__ import annotations

import importlib.util
import time
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
        steps=kit.pick(2, 1),
        warmup=kit.pick(1, 0),
        threads=kit.pick(8, 1),
    )
    need(kit.pick(24 * 2**30, 0), kit.device)
    parameters = bench_step.write_inputs(kit.folder, case.prompt_tokens, SHAPES[shape], kit.device)
    release(kit.device)
    kit.put(parameters=parameters, prompts=args.prompts, samples=case.samples, prompt_tokens=case.prompt_tokens)
    if kit.rehearse:
        rehearse(kit, case, args)
        return
    kit.put(ours=measured(kit, "ours", case, args))
    try:
        peer = "trl"
        kit.put(trl={"title": "TRL"} | measured(kit, "trl", case, args))
    except SystemExit as error:  # TRL is not there, or not for these versions of its requirements
        peer = "loop"
        why = str(error).strip().splitlines()[-1][-300:]
        kit.put(loop={"title": LOOP, "why": why} | measured(kit, "loop", case, args))
    kit.put(ratio=kit.values[peer]["seconds"] / kit.values["ours"]["seconds"])


def rehearse(kit: Kit, case: Case, args: Namespace) -> None:
    """Run all sides that are installed beside each other; their times say nothing."""
    sides = ["ours", "loop"]
    if importlib.util.find_spec("trl") is not None:
        sides.append("trl")
    with ThreadPoolExecutor(2) as pool:
        for side, found in zip(sides, pool.map(lambda side: measured(kit, side, case, args), sides), strict=True):
            kit.put(**{side: found})
    peer = sides[-1]
    kit.put(ratio=kit.values[peer]["seconds"] / kit.values["ours"]["seconds"])


def measured(kit: Kit, side: str, case: Case, args: Namespace) -> dict[str, Any]:
    """Medians of the steps of one side, in a process of its own; of ours also the seconds of each phase."""
    begin = time.perf_counter()
    found = bench_step.measure(side, kit.folder, case, args, seed=0)
    result: dict[str, Any] = bench_step.summary([found], args.prompts * case.samples)
    result["process_seconds"] = time.perf_counter() - begin
    return result | ({"phases": bench_step.phases([found])} if side == "ours" else {})
