"""Compare LoRA with training all weights: peak memory and time of GRPO steps with a KL penalty, on a CPU.

    python bench/bench_lora.py [--quick] [--models 97M] [--rank 16] [--checkpointing] [--save]

Both sides train the same random Llama in float32 with the same prompts, on 4 prompts x 8 completions of up to 128
tokens, 50 on average. With all weights, the reference is a frozen copy; with LoRA it is the model without its adapters.
They take turns, each time in a new process. The peak is that of the whole process (VmHWM) from its start to the end of
the last step, without the export; it contains the libraries, whose size is that of a process which only imports
nlgrpo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import MIB, machine, one_line, peak_resident, save
from random_models import LIMIT, random_llama, random_prompts, save_model, save_prompts

MODELS = {
    "3.7M": {"vocab": 2048, "width": 256, "ffn": 688, "layers": 4, "heads": 8},
    "97M": {"vocab": 16384, "width": 768, "ffn": 2048, "layers": 12, "heads": 12},
}
SIDES = ("all weights", "LoRA")
PHASES = {"sampling": "time/generate", "update": "time/update", "step": "step_time"}


# --- one side, in its own process -------------------------------------------------------------------------------------


def child(args: argparse.Namespace) -> dict[str, Any]:
    """Train ``args.steps`` steps in this process."""
    from nlgrpo import train

    imported = peak_resident()
    peaks: list[int] = []
    options = {
        "model.path": args.folder / "model",
        "data.source": args.folder / "prompts.jsonl",
        "rollout.prompts": 4,
        "rollout.samples": 8,
        "rollout.max_new_tokens": LIMIT,
        "rewards.short.function": "length(target=30, scale=128)",
        "loss.beta": 0.01,
        "optim.lr": 1e-12,  # the same completions on both sides and in all steps: 1e-6 would shorten them
        "lora.rank": args.rank if args.child == "LoRA" else 0,
        "model.activation_checkpointing": args.checkpointing,
        "train.steps": args.steps,
        "train.checkpoint_every": 0,
        "train.samples_every": 0,
        "evaluation.prompts": 0,
        "train.out": args.folder / args.child,
    }
    setattr(train.PolicyTrainer, "finish", lambda *_: peaks.append(peak_resident()))  # noqa: B010
    setattr(train.PolicyTrainer, "save", lambda *_, **__: None)  # noqa: B010
    if train.main(["blank", *(part for k, v in options.items() for part in (f"--{k}", str(v))), "--train.restart"]):
        sys.exit("the run failed")
    lines = [json.loads(line) for line in (args.folder / args.child / "metrics.jsonl").read_text().splitlines()]
    times = {name: [line[key] for line in lines[1:]] for name, key in PHASES.items()}
    return {"imported_mib": imported / MIB, "peak_mib": peaks[0] / MIB, "seconds": times}


# --- both sides in turns ----------------------------------------------------------------------------------------------


def measure(side: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run one side in a new process; exit with its error output if it fails."""
    options = [f"--steps={args.steps}", f"--rank={args.rank}", *["--checkpointing"] * args.checkpointing]
    command = [sys.executable, __file__, "--child", side, "--folder", str(folder), *options]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{side}: the process ended with status {done.returncode}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds for one model. ``ratios``: LoRA over all weights."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(random_llama(**MODELS[name]), Path(folder) / "model")
        save_prompts(random_prompts(128, 12, MODELS[name]["vocab"]), Path(folder) / "prompts.jsonl")
        rounds = {side: [measure(side, Path(folder), args) for _ in range(args.rounds)] for side in SIDES}
    sides = {side: summary(found) for side, found in rounds.items()}
    ratios = {key: sides["LoRA"][key] / value for key, value in sides["all weights"].items() if key != "imported_mib"}
    return {"model": name, "sides": sides, "ratios": {key: round(value, 3) for key, value in ratios.items()}}


def summary(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Largest peak, and median seconds over the steps of all processes; the first step of each is not counted."""
    times = {f"{p}_seconds": statistics.median(s for r in rounds for s in r["seconds"][p]) for p in PHASES}
    peaks = {key: round(max(r[key] for r in rounds), 1) for key in ("imported_mib", "peak_mib")}
    return peaks | {key: round(value, 4) for key, value in times.items()}


def show(row: dict[str, Any]) -> None:
    for side, s in row["sides"].items():
        times = "  ".join(f"{phase} {s[f'{phase}_seconds']:.2f} s" for phase in PHASES)
        print(
            f"{row['model']:>5s} {side:12s} peak {s['peak_mib']:6.0f} MiB (libraries {s['imported_mib']:.0f})  {times}"
        )
    print(f"{row['model']:>5s} LoRA / all   " + "  ".join(f"{k} {v:.2f}" for k, v in row["ratios"].items()), flush=True)


def main() -> None:
    args = arguments()
    if args.child:
        print(json.dumps(child(args)))
        return
    facts, rows = machine("transformers"), []
    for name in args.models:
        rows.append(compare(name, args))
        show(rows[-1])
    print(f"rank {args.rank}, float32; {one_line(facts, args.threads)}, {args.rounds} processes per side")
    result = {"bench": "lora", "rank": args.rank, "threads": args.threads, "rows": rows, "machine": facts}
    if args.save:
        print(f"saved {save('bench_lora', result)}")
    print(json.dumps(result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="processes per side (default: 2)")
    parser.add_argument("--steps", type=int, default=4, help="steps per process, the first not timed (default: 4)")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters (default: 16)")
    parser.add_argument("--checkpointing", action="store_true", help="with activation checkpointing on both sides")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS), help="default: all")
    parser.add_argument("--quick", action="store_true", help="1 process of 2 steps of the first model")
    parser.add_argument("--save", action="store_true", help="write bench/results/cpu/bench_lora.json")
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.steps, args.models = 1, 2, args.models[:1]
    return args


if __name__ == "__main__":
    main()
