"""Time value-guided decoding against plain sampling of the same number of completions, on one device.

    python bench/bench_guided.py [--model DIR] [--quick] [--save]

Both sample 16 completions of up to 64 tokens per prompt from one frozen model: plain sampling with `engine.generate`,
guided decoding with 4 beams x 4 successors, chunks of 16 tokens and one value model of the policy's size. They take
turns in one process, with 256 rows at a time. Throughput is the number of sampled tokens, without those after a stop
id, divided by the median time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import machine, one_line, save

from nlgrpo.engine.chunked_decoding import ModelValue
from nlgrpo.engine.generation import generate
from nlgrpo.engine.guided_search import Search, search
from nlgrpo.engine.sampling import Sampling
from nlgrpo.model import decoder, hf_weights, reward_model
from nlgrpo.model.tokenizer import load_tokenizer

ASSETS = Path(__file__).parents[1] / "nlgrpo" / "data" / "assets"
NEW_TOKENS, PROMPTS = 64, 32
SEARCH = Search(beams=4, successors=4, chunk=16)
TARGET = 0.5


def sides(path: str, device: torch.device) -> tuple[dict[str, Callable[[], int]], dict[str, int]]:
    """Return a function per side, which returns its number of sampled tokens, and the parameters of both models."""
    source = hf_weights.locate(path)
    policy, tokenizer = decoder.load(source).to(device).eval(), load_tokenizer(source)
    critic = reward_model.load_reward_model(path, device=device)[0].eval()
    lines = (ASSETS / "eval_prompts.jsonl").read_text("utf-8").splitlines()[:PROMPTS]
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    sampling = Sampling(max_new_tokens=NEW_TOKENS, stop_ids=(tokenizer.eos_token_id,))

    def plain() -> int:
        return int(generate(policy, prompts, SEARCH.candidates, sampling).lengths.sum())

    def guided() -> int:
        _, cost = search(policy, prompts, SEARCH, sampling, [(ModelValue("value", critic, NEW_TOKENS), 1.0)])
        return cost.tokens

    counts = {name: sum(p.numel() for p in m.parameters()) for name, m in (("policy", policy), ("value model", critic))}
    return {"plain": plain, "guided": guided}, counts


def timed(work: Callable[[], int], device: torch.device) -> tuple[int, float]:
    """Run ``work``; return its tokens and seconds."""
    begin = time.perf_counter()
    tokens = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return tokens, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ASSETS / "story-lm"), help="of policy and value model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one round, to check that it runs")
    parser.add_argument("--save", action="store_true", help="write results/DEVICE/guided.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    work, parameters = sides(args.model, device)
    rounds = 1 if args.quick else 7
    for run in work.values():
        run()
    found = [{name: timed(run, device) for name, run in work.items()} for _ in range(rounds)]
    tokens = {name: found[0][name][0] for name in work}
    seconds = {name: statistics.median(each[name][1] for each in found) for name in work}
    speed = {name: tokens[name] / seconds[name] for name in work}
    ratios = sorted(each["guided"][0] / each["guided"][1] / (each["plain"][0] / each["plain"][1]) for each in found)
    for name in work:
        print(f"{name:8} {tokens[name]:>8,} tokens {seconds[name]:8.3f} s {speed[name]:>10,.0f} tokens/s")
    facts = machine("nlgrpo")
    print(one_line(facts, args.threads))
    result = {
        "model": Path(args.model).name,
        "parameters": parameters,
        "prompts": PROMPTS,
        "threads": args.threads,
        "rounds": rounds,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": speed,
        "ratio": statistics.median(ratios),
        "ratio_range": [ratios[0], ratios[-1]],
        "target": TARGET,
        "machine": facts,
    }
    if args.save:
        save("guided", result, device.type)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
