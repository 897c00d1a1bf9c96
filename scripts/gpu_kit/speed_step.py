"""The whole GRPO step against TRL's GRPOTrainer with transformers' ``generate``, by ``bench/bench_step.py``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import bench_step
from bench_step import SHAPES, Case

from gpu_kit.child import Kit, message

PROMPTS, SAMPLES, PROMPT = 32, 8, 224  # completions have up to 128 tokens, 50 on average


def run(kit: Kit) -> None:
    shape = kit.pick("0.5B", "1M")
    case = Case(kit.pick(PROMPT, 12), kit.pick(SAMPLES, 2), beta=0.0)
    args = Namespace(
        prompts=kit.pick(PROMPTS, 2), device=kit.device, steps=kit.pick(3, 1), warmup=1, threads=kit.pick(8, 1)
    )
    parameters = bench_step.write_inputs(kit.folder, case.prompt_tokens, SHAPES[shape], kit.device)
    kit.put(parameters=parameters, prompts=args.prompts, samples=case.samples, prompt_tokens=case.prompt_tokens)
    kit.put(ours=measured(kit, "ours", case, args))
    try:
        kit.put(trl=measured(kit, "trl", case, args))
    except (Exception, SystemExit) as error:
        kit.put(trl={"error": message(error)[-500:]})
        if kit.rehearse:
            raise
        return
    kit.put(ratio=kit.values["trl"]["seconds"] / kit.values["ours"]["seconds"])


def measured(kit: Kit, side: str, case: Case, args: Namespace) -> dict[str, Any]:
    """Medians of the steps of one side, in a process of its own; of ours also the seconds of each phase."""
    found = bench_step.measure(side, kit.folder, case, args, seed=0)
    result: dict[str, Any] = bench_step.summary([found], args.prompts * case.samples)
    return result | ({"phases": bench_step.phases([found])} if side == "ours" else {})
