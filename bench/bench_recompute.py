"""Compare blocks that compute cheap inputs again in the backward pass with blocks that save them, on a CPU.

    python bench/bench_recompute.py [--quick] [--models 97M] [--save]

Both sides run the same forward and backward pass of log-probs over one prompt with 8 completions, taking turns in one
process, and their gradients are equal to the bit. Bytes per token of a block are traced (`apps.plan.activations`), with
the default of the model: narrow ones compute nothing again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from bench_lora import MODELS
from common import machine, one_line, save
from random_models import random_llama

from nlgrpo.apps.plan.activations import BlockBytes, per_token
from nlgrpo.kernels import Segments, linear_logprob
from nlgrpo.model import decoder
from nlgrpo.model.decoder import Decoder

SIDES = {"computed again": True, "saved": False}


def model_of(name: str) -> Decoder:
    """The embedded model, or a random one of `bench_lora`."""
    if name == "story-lm":
        return decoder.load(name)
    torch.manual_seed(0)
    model = decoder.build(random_llama(**MODELS[name]).config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def step(model: Decoder, tokens: torch.Tensor, segments: Segments) -> float:
    """Seconds of a forward and backward pass."""
    select, start = torch.arange(len(tokens)), time.perf_counter()
    model(tokens, segments, select, partial(linear_logprob, targets=tokens))[0].sum().backward()
    return time.perf_counter() - start


def compare(name: str, prompt: int, columns: int, repeats: int) -> dict[str, Any]:
    """Median seconds of both sides, and traced bytes per token of a block."""
    model = model_of(name)
    by_default = next(model.each_block()).recompute
    segments = Segments([prompt] + [columns] * 8, [None] + [0] * 8)
    tokens = torch.randint(model.shape.vocab, (sum(segments.lengths),), generator=torch.Generator().manual_seed(0))
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for repeat in range(repeats + 1):
        gradients = []
        for side in list(SIDES)[:: 1 if repeat % 2 else -1]:
            for block in model.each_block():
                block.recompute = SIDES[side]
            model.zero_grad()
            seconds[side].append(step(model, tokens, segments))
            gradients.append([parameter.grad for parameter in model.parameters()])
        assert all(map(torch.equal, *gradients)), "the gradients differ"
    medians = {side: statistics.median(found[1:]) for side, found in seconds.items()}
    shape = replace(model.shape, context=4096)
    traced: dict[str, BlockBytes] = {
        side: per_token(shape, None, torch.float32, "cpu", checkpointing=not again) for side, again in SIDES.items()
    }
    return {
        "model": name,
        "tokens": len(tokens),
        "by_default": by_default,
        "seconds": {side: round(value, 5) for side, value in medians.items()},
        "bytes_per_token": {side: traced[side].saved for side in SIDES},
        "time_ratio": round(medians["computed again"] / medians["saved"], 4),
        "memory_ratio": round(traced["computed again"].saved / traced["saved"].saved, 4),
    }


def main() -> None:
    args = arguments()
    facts, rows = machine(), []
    torch.set_num_threads(args.threads)
    for name in args.models:
        small = name != "97M"
        rows.append(compare(name, 12, 100, 4 if args.quick else 40 if small else 8))
        row = rows[-1]
        times = "  ".join(f"{side} {value:.4f} s" for side, value in row["seconds"].items())
        default = f"bytes saved by a block {row['memory_ratio']:.3f}" if row["by_default"] else "not used by default"
        print(f"{name:>9s}  {times}  time {row['time_ratio']:.3f}  {default}")
    print(f"float32, medians; {one_line(facts, args.threads)}")
    result = {"bench": "recompute", "threads": args.threads, "rows": rows, "machine": facts}
    if args.save:
        print(f"saved {save('bench_recompute', result)}")
    print(json.dumps(result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*MODELS, "story-lm"]
    parser.add_argument("--models", choices=names, nargs="+", default=names, help="default: all")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--quick", action="store_true", help="4 passes of the first model")
    parser.add_argument("--save", action="store_true", help="write bench/results/cpu/bench_recompute.json")
    args = parser.parse_args()
    if args.quick:
        args.models = args.models[:1]
    return args


if __name__ == "__main__":
    main()
