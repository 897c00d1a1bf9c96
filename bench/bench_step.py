"""Time a whole training step against TRL's GRPOTrainer, on a CPU or a GPU.

    python bench/bench_step.py [--quick] [--prompt-tokens 12 224 1024] [--samples 8 32] [--save]
    .venv-vllm/bin/python bench/bench_step.py --engine vllm [--quick] [--save bench_step_vllm]

With ``--engine vllm`` the other side is this trainer with vLLM as its engine, colocated, instead of TRL; both models
then have heads of 32, which vLLM's CPU attention needs. ``make test-vllm`` makes the environment.

Both sides train the same random Llama (1.05 million parameters, float32) on 6 prompts x 8 completions of up to 128
tokens, 50 on average, with the same loss (dapo, one optimizer step per rollout), the same reward and the same sampling
(temperature 1, no filters). They take turns, each time in a new process. The time of a step is from the end of the step
before to its own end: data, generation, reward, reference, loss, backward, optimizer, logging. Needs TRL, which
``pip install nlgrpo[test]`` installs.

With ``--device cuda`` both sides compute in bfloat16: ours with float32 master weights, TRL with the bfloat16 weights
that are fastest for it, and `MICRO_BATCH` completions at a time, so that its logits fit. There are no floors then.

Each phase of our step on a CPU is printed beside its floor: the time of its bare matrix products, without attention,
measured in the same process after the steps, by the same ops. Their shapes are read from the profile of one more step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import MIB, machine, one_line, peak_resident, resident, save
from random_models import LIMIT, random_llama, random_prompts, save_model, save_prompts
from transformers.utils import logging

PROMPTS = 6
SHAPES = {
    "1M": {"vocab": 2048, "width": 128, "ffn": 344, "layers": 4, "heads": 8},
    "0.5B": {"vocab": 151_936, "width": 896, "ffn": 4864, "layers": 24, "heads": 14},
}
MICRO_BATCH = 32  # completions of TRL's forward pass on a GPU
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
LEARNING_RATE = 1e-6  # small, so that the lengths do not change
SIDES = ("ours", "trl", "loop", "vllm")
LIBRARY = ("aten::mm", "aten::addmm", "aten::addmm_")
COMPILED = {"nlgrpo::linear": [1], "nlgrpo::decode_block": [2, 4, 6, 7]}  # the arguments that are weights (out, in)


def write_inputs(folder: Path, prompt_tokens: int, shape: dict[str, int], device: str = "cpu") -> int:
    """Write the model and the prompts; return the number of parameters."""
    with torch.device(device):
        model = random_llama(**shape)
    save_model(model if device == "cpu" else model.bfloat16(), folder / "model")
    save_prompts(random_prompts(600, prompt_tokens, shape["vocab"]), folder / "prompts.jsonl")
    return int(model.num_parameters())


# --- one side, in its own process -------------------------------------------------------------------------------------


@dataclass
class Record:
    """Measurements of one process. ``ends``: times at which steps ended; the first is the start of the first step."""

    ends: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # tokens of each step's completions
    laps: list[dict[str, float]] = field(default_factory=list)  # times of the parts of our steps
    floors: dict[str, float] = field(default_factory=dict)  # times of the matrix products of these parts
    before: int = 0  # resident bytes at the start of the first step
    peak: int = 0

    def begin(self) -> None:
        self.before = torch.cuda.memory_allocated() if torch.cuda.is_available() else resident()
        self.ends.append(time.perf_counter())

    def end_step(self) -> None:
        self.ends.append(time.perf_counter())
        self.peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_resident()

    def result(self, warmup: int) -> dict[str, Any]:
        seconds = [end - begin for begin, end in zip(self.ends[:-1], self.ends[1:], strict=True)]
        if len(seconds) <= warmup or len(self.tokens) != len(seconds):
            raise RuntimeError(
                f"{len(seconds)} steps, {len(self.tokens)} rollouts: expected equal numbers above {warmup}"
            )
        return {
            "seconds": seconds[warmup:],
            "tokens": self.tokens[warmup:],
            "laps": self.laps[warmup:],
            "floors": self.floors,
            "peak_mib": self.peak / MIB,
            "added_mib": (self.peak - self.before) / MIB,
            "threads": torch.get_num_threads(),
        }


RECORD = Record()


def length_reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Length of a completion as a share of the limit. Also records the step's tokens, for both sides."""
    RECORD.tokens.append(sum(map(len, completion_ids)))
    return [len(ids) / LIMIT for ids in completion_ids]


Products = Counter[tuple[str, int, int, int]]  # (op, rows, depth, columns)


def phases_of(events: list[Any]) -> dict[str, Products]:
    """Count the matrix products of each phase of a profiled step."""
    found: dict[str, Products] = {}
    products: Products = Counter()
    inside = 0.0  # end of the latest op of ours, whose library calls are not counted again
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.name in COMPILED:
            inside = event.time_range.end
            rows, _ = event.input_shapes[0]
            for columns, depth in (event.input_shapes[i] for i in COMPILED[event.name]):
                products["linear", rows, depth, columns] += 1
        elif event.name in LIBRARY and event.time_range.start >= inside:
            (rows, depth), (_, columns) = [shape for shape in event.input_shapes if len(shape) == 2][-2:]
            products["mm", rows, depth, columns] += 1
        elif event.name.startswith("phase "):
            found[event.name.removeprefix("phase ")], products = products, Counter()
    return found


def seconds_of(products: Products) -> float:
    """Measure the time of matrix products: of each shape the median of 5 calls, times its number."""
    from nlgrpo.kernels import linear

    total = 0.0
    for (op, rows, depth, columns), count in products.items():
        a, b = torch.randn(rows, depth), torch.randn(depth, columns)
        weight, out = b.mT.contiguous(), torch.empty(rows, columns)
        times = []
        for _ in range(6):
            begin = time.perf_counter()
            if op == "mm":
                torch.mm(a, b, out=out)
            else:
                linear(a, weight)
            times.append(time.perf_counter() - begin)
        total += count * statistics.median(times[1:])
    return total


def run_ours(folder: Path, args: argparse.Namespace, engine: str = "nlgrpo") -> None:
    from nlgrpo.config.schema import Config, from_dict
    from nlgrpo.runtime.supervision import process_group
    from nlgrpo.runtime.supervision.stop_signal import StopSignal
    from nlgrpo.runtime.timing import Clock
    from nlgrpo.train import PolicyTrainer

    steps = args.warmup + args.steps
    settings = {
        "model": {"path": str(folder / "model"), "dtype": DTYPES[args.device]},
        "data": {"source": str(folder / "prompts.jsonl")},
        "rollout": {
            "prompts": args.prompts,
            "samples": args.samples[0],
            "max_new_tokens": LIMIT,
            "engine": engine,
            "max_rows": max(256, args.prompts * args.samples[0]),
        },
        "rewards": {"length": {"function": f"{__name__}:length_reward", "objective": "mean"}},
        "loss": {"normalization": "dapo", "beta": args.beta, "kl_importance": False},
        "optim": {"lr": LEARNING_RATE},
        "train": {
            "steps": steps + (args.device == "cpu"),  # on a CPU one more, which is profiled
            "seed": args.seed,
            "out": str(folder / "ours"),
            "restart": True,
            "checkpoint_every": 0,
            "samples_every": 0,
        },
        "evaluation": {"prompts": 0},
    }
    with process_group.start() as ranks:
        trainer = PolicyTrainer.build(from_dict(settings, Config()), ranks)
        trainer.claim()
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
        stop = Clock.stop

        def marked_stop(clock: Clock) -> None:
            stop(clock)
            if clock.current:
                with torch.profiler.record_function(f"phase {clock.current}"):
                    pass

        signals = StopSignal()
        with trainer.loaded(signals), trainer.logger() as log:
            trainer.begin(None, log)
            write = log.log

            def log_and_record(step: int, metrics: Mapping[str, float]) -> None:
                write(step, metrics)
                if step < steps:
                    RECORD.laps.append({k[5:]: v for k, v in metrics.items() if k.startswith("time/")})
                    RECORD.end_step()
                if step == steps - 1 and args.device == "cpu":
                    setattr(Clock, "stop", marked_stop)  # noqa: B010
                    profile.start()

            log.log = log_and_record  # type: ignore[method-assign]  # the last call of a step
            RECORD.begin()
            trainer.train(signals, log)
        if args.device != "cpu":
            return
        RECORD.tokens.pop()
        profile.stop()
        RECORD.floors = {name: seconds_of(products) for name, products in phases_of(profile.events()).items()}


def run_trl(folder: Path, args: argparse.Namespace) -> None:
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            RECORD.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            RECORD.end_step()

    # One generation, one forward and backward, and one optimizer step for all completions; no recomputation, logging
    # or saving.
    samples, on_cpu = args.samples[0], args.device == "cpu"
    completions, together = args.prompts * samples, together_of(args)
    config = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=on_cpu, bf16=not on_cpu, gradient_checkpointing=False,
        seed=args.seed,
        max_steps=args.warmup + args.steps, per_device_train_batch_size=together, num_generations=samples,
        gradient_accumulation_steps=completions // together, num_iterations=1, max_completion_length=LIMIT,
        temperature=1.0, top_k=0, top_p=1.0, loss_type="dapo",
        scale_rewards="none", beta=args.beta, use_bias_correction_kl=False, epsilon=0.2, learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, logging_strategy="no", save_strategy="no",
        report_to="none", disable_tqdm=True, dataloader_num_workers=0, dataloader_pin_memory=False,
        model_init_kwargs={"dtype": DTYPES[args.device]},
    )  # fmt: skip
    trainer = GRPOTrainer(
        str(folder / "model"), reward_funcs=length_reward, args=config, callbacks=[Watch()],
        train_dataset=load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train",
                                   cache_dir=str(folder / "cache")),
    )  # fmt: skip
    trainer.train()


def together_of(args: argparse.Namespace) -> int:
    """Completions of one forward pass of TRL."""
    completions: int = args.prompts * args.samples[0]
    return completions if args.device == "cpu" else math.gcd(completions, MICRO_BATCH)


def run_loop(folder: Path, args: argparse.Namespace) -> None:
    """Run the loop that stands in for TRL where it cannot be imported."""
    import trl_loop

    ends = trl_loop.run(
        folder,
        args,
        dtype=DTYPES[args.device],
        lr=LEARNING_RATE,
        limit=LIMIT,
        together=together_of(args),
        reward=length_reward,
    )
    next(ends)
    RECORD.begin()
    for _ in ends:
        RECORD.end_step()


def child(side: str, folder: Path, args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    if side == "trl":
        run_trl(folder, args)
    elif side == "loop":
        run_loop(folder, args)
    else:
        run_ours(folder, args, engine="vllm" if side == "vllm" else "nlgrpo")
    print(json.dumps(RECORD.result(args.warmup)))


# --- both sides in turns ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    prompt_tokens: int
    samples: int
    beta: float

    def steps(self, most: int) -> int:
        """Number of measured steps: fewer if they take long."""
        return max(1, most // max(1, self.prompt_tokens * self.samples // 800))


def measure(side: str, folder: Path, case: Case, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run one side in a new process; exit with its error output if it fails."""
    command = [sys.executable, __file__, "--child", side, "--folder", str(folder), "--beta", str(case.beta)]
    numbers = {"warmup": args.warmup, "steps": case.steps(args.steps), "threads": args.threads, "seed": seed}
    for name, value in (numbers | {"samples": case.samples, "prompts": args.prompts, "device": args.device}).items():
        command += [f"--{name}", str(value)]
    environment = {
        "OMP_NUM_THREADS": str(args.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    } | ({"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {})
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    if done.returncode:
        sys.exit(f"{side}, {case}: the process ended with status {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def summary(rounds: list[dict[str, Any]], completions: int) -> dict[str, float]:
    """Medians over all steps of all rounds, and the largest peak."""
    seconds = [s for r in rounds for s in r["seconds"]]
    tokens = [t for r in rounds for t in r["tokens"]]
    return {
        "seconds": round(statistics.median(seconds), 4),
        "tokens_per_s": round(statistics.median(t / s for t, s in zip(tokens, seconds, strict=True)), 1),
        "mean_length": round(statistics.mean(tokens) / completions, 2),
        "peak_mib": round(max(r["peak_mib"] for r in rounds), 1),
        "added_mib": round(max(r["added_mib"] for r in rounds), 1),
        "steps": len(seconds),
    }


def phases(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of each part of our steps."""
    laps = [lap for r in rounds for lap in r["laps"]]
    return {name: round(statistics.median(lap[name] for lap in laps), 4) for name in laps[0]}


def floors(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of the matrix products of each part of our steps."""
    return {name: round(statistics.median(r["floors"][name] for r in rounds), 4) for name in rounds[0]["floors"]}


def compare(folder: Path, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds of one case. ``rounds``: the ratio of seconds in each round, which shows the noise."""
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in args.sides}
    for number in range(args.rounds):
        for side in args.sides:
            rounds[side].append(measure(side, folder, case, args, seed=number))
    result = asdict(case) | {side: summary(rounds[side], args.prompts * case.samples) for side in args.sides}
    if "ours" in rounds:
        result |= {"phases": phases(rounds["ours"]), "floors": floors(rounds["ours"])}
    if "vllm" in rounds:
        result |= {"phases_vllm": phases(rounds["vllm"])}
    if len(rounds) == 1:
        return result
    ours, other = result["ours"], result[args.sides[1]]
    medians = [[statistics.median(r["seconds"]) for r in rounds[side]] for side in args.sides]
    return result | {
        "ratio": round(other["seconds"] / ours["seconds"], 2),
        "ratio_tokens_per_s": round(ours["tokens_per_s"] / other["tokens_per_s"], 2),
        "ratio_peak": round(ours["peak_mib"] / other["peak_mib"], 3),
        "rounds": [round(theirs / mine, 2) for mine, theirs in zip(*medians, strict=True)],
    }


def show(row: dict[str, Any]) -> None:
    """Print a line per side and one for the parts of our step."""
    title = f"prompts {row['prompt_tokens']:<5d} M {row['samples']:<3d} beta {row['beta']:<5g}"
    for side in SIDES:
        if side not in row:
            continue
        note = ""
        if side != "ours" and "ratio" in row:
            note = (
                f"   x{row['ratio']:.2f} ({min(row['rounds'])} to {max(row['rounds'])}), memory {row['ratio_peak']:.2f}"
            )
        s = row[side]
        print(
            f"{title} {side:5s} {s['seconds']:7.3f} s/step  {s['tokens_per_s']:8,.0f} tok/s  "
            f"peak {s['peak_mib']:5.0f} MiB ({s['added_mib']:+.0f} in training)  "
            f"{s['mean_length']:5.1f} tokens per completion{note}"
        )
    if "phases" in row:
        parts = ", ".join(
            f"{name} {1000 * seconds:.0f}"
            + (f" (floor {1000 * floor:.0f})" if (floor := row["floors"].get(name)) else "")
            for name, seconds in row["phases"].items()
        )
        total, floor = sum(row["phases"].values()), sum(row["floors"].values())
        share = f"; share of the floor {floor / total:.0%}" if floor else ""
        print(f"           ours, ms: {parts}{share}", flush=True)


def main() -> None:
    args = arguments()
    if args.child:
        return child(args.child, args.folder, args)
    logging.disable_progress_bar()
    rows = []
    for prompt_tokens in args.prompt_tokens:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shape = SHAPES[args.shape] | ({"heads": 4} if "vllm" in args.sides else {})
            parameters = write_inputs(folder, prompt_tokens, shape, args.device)
            for samples, beta in itertools.product(args.samples, args.betas):
                rows.append(compare(folder, Case(prompt_tokens, samples, beta), args))
                show(rows[-1])
    other = "vllm" if "vllm" in args.sides else "trl"
    facts = machine("transformers", *({"trl"} & {*args.sides})) | ({"vllm": vllm_version()} if other == "vllm" else {})
    print(
        f"{parameters / 1e6:.2f}M Llama, {args.prompts} prompts, completions of up to {LIMIT} tokens, "
        f"{DTYPES[args.device]}; {one_line(facts, args.threads)}, {other} {facts.get(other)}, "
        f"medians of {args.rounds} processes per side, "
        "in turns"
    )
    result = {
        "bench": "step",
        "device": args.device,
        "parameters": parameters,
        "threads": args.threads,
        "rows": rows,
        "machine": facts,
    }
    if args.save:
        print(f"saved {save(args.save, result, args.device)}")
    print(json.dumps(result))


def vllm_version() -> str:
    from nlgrpo.engine.backends import vllm_library

    return vllm_library.version()


def at_least(least: int) -> Any:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least {least}")
        return int(text)

    return number


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=3, help="processes per side (default: 3)")
    parser.add_argument(
        "--steps",
        type=at_least(1),
        default=12,
        help="measured steps per process (default: 12), fewer with long prompts",
    )
    parser.add_argument("--warmup", type=at_least(0), default=3, help="unmeasured steps before them (default: 3)")
    parser.add_argument("--threads", type=at_least(1), default=2, help="threads of torch (default: 2)")
    parser.add_argument(
        "--prompt-tokens", type=at_least(1), nargs="+", default=[12, 224], help="mean lengths (default: 12 224)"
    )
    parser.add_argument(
        "--samples", type=at_least(2), nargs="+", default=[8], help="completions per prompt (default: 8)"
    )
    parser.add_argument("--device", choices=DTYPES, default="cpu", help="default: cpu")
    parser.add_argument("--shape", choices=SHAPES, default="1M", help="of the model (default: 1M)")
    parser.add_argument("--prompts", type=at_least(1), default=PROMPTS, help=f"prompts per step (default: {PROMPTS})")
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=["ours", "trl"], help="default: ours trl")
    parser.add_argument("--engine", choices=("nlgrpo", "vllm"), default="nlgrpo", help="vllm: the sides ours and vllm")
    parser.add_argument("--betas", type=float, nargs="+", default=[0.0, 0.04], help="KL weights (default: 0 0.04)")
    parser.add_argument("--quick", action="store_true", help="1 round of 1 + 3 steps, to check that it works")
    parser.add_argument(
        "--save", nargs="?", const="bench_step", metavar="NAME", help="write bench/results/cpu/NAME.json (bench_step)"
    )
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--beta", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine == "vllm":
        args.sides = ["ours", "vllm"]
    if args.quick:
        args.rounds, args.warmup, args.steps = 1, 1, 3
    return args


if __name__ == "__main__":
    main()
