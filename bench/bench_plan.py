"""Compare the plan's estimate of memory with the measured peak, for 12 configurations on a CPU.

    python bench/bench_plan.py [--quick] [--only NAME ..] [--save]

Each configuration trains a random model for two steps in new processes, without an evaluation, and exports it.
"Planned" is the peak that ``nlgrpo train`` prints before it loads the model; "measured" is the peak resident memory of
the process (VmHWM) at its end, of the rank that used most. Both contain the libraries. No completion ends early: the
models are random, and a stop token is as likely as any other.
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

import torch
import transformers
from common import MIB, machine, one_line, peak_resident, save
from random_models import random_prompts, save_prompts, word_tokenizer

VOCAB = 16384
SIZE: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
WIDE: dict[str, Any] = SIZE | {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 2048,
}
GROUPED: dict[str, Any] = SIZE | {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 1536,
}  # fmt: skip
MODELS = {
    "llama": transformers.LlamaConfig(**WIDE, num_key_value_heads=12, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**GROUPED, head_dim=64, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=64, tie_word_embeddings=True),
    "gpt_neox": transformers.GPTNeoXConfig(
        **SIZE,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        intermediate_size=2048,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    ),
    "gpt2": transformers.GPT2Config(**SIZE, n_embd=768, n_layer=8, n_head=12, n_positions=1024),
}
LORA, CHECKPOINTING = ["--lora.rank", "16"], ["--model.activation_checkpointing", "True"]
PPO = ["--loss.algorithm", "ppo"]
# name: (model, ranks, options)
CONFIGURATIONS: dict[str, tuple[str, int, list[str]]] = {
    "llama": ("llama", 1, []),
    "llama, LoRA": ("llama", 1, LORA),
    "llama, checkpointing": ("llama", 1, CHECKPOINTING),
    "llama, LoRA, checkpointing": ("llama", 1, [*LORA, *CHECKPOINTING]),
    "gpt2, PPO, shared trunk": ("gpt2", 1, [*PPO, "--critic.trunk", "shared"]),
    "llama, 2 ranks": ("llama", 2, []),
    "llama, 2 ranks, LoRA": ("llama", 2, LORA),
    "mistral, PPO, LoRA": ("mistral", 1, [*PPO, *LORA]),
    "qwen2, PPO": ("qwen2", 1, PPO),
    "qwen3, Muon": ("qwen3", 1, ["--optim.algorithm", "muon"]),
    "gpt_neox, no reference": ("gpt_neox", 1, ["--loss.beta", "0"]),
    "gpt2, 2 optimizer steps": ("gpt2", 1, ["--loss.minibatches", "2"]),
}


# --- one rank, in its own process -------------------------------------------------------------------------------------


def child(folder: Path, options: list[str]) -> None:
    """Train in this process; write the planned and the measured bytes of this rank."""
    from nlgrpo import train
    from nlgrpo.apps.plan import memory, table

    planned: list[memory.Memory] = []
    show = table.show

    def estimate(setup: Any) -> Any:
        planned.append(memory.estimate(table.workload(setup)))
        return show(setup)

    setattr(table, "show", estimate)  # noqa: B010
    if train.main(["blank", *options]):
        sys.exit("the run failed")
    phases = {name: planned[0].total(name) for name in planned[0].phases}
    found = {"planned": planned[0].peak, "phase": planned[0].largest, "measured": peak_resident(), "phases": phases}
    (folder / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


# --- all configurations -----------------------------------------------------------------------------------------------


def measure(name: str, work: Path, threads: int) -> dict[str, Any]:
    """Train one configuration; return planned and measured MiB of the rank with the largest peak."""
    model, ranks, options = CONFIGURATIONS[name]
    folder = work / "run"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("rank*.json"):
        old.unlink()
    fixed = {
        "model.path": work / model,
        "data.source": work / "prompts.jsonl",
        "rollout.prompts": 2,
        "rollout.samples": 4,
        "rollout.max_new_tokens": 96,
        "rewards.short.function": "length(target=30, scale=128)",
        "loss.beta": 0.01,
        "optim.lr": 1e-5,
        "train.steps": 2,
        "train.samples_every": 0,
        "evaluation.prompts": 0,
        "train.out": folder / "out",
    }
    given = [part for key, value in fixed.items() for part in (f"--{key}", str(value))]
    command = [__file__, "--child", str(folder), *given, "--train.restart", *options]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, threads // ranks)), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *launcher, *command], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        sys.exit(f"{name}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
    assert len(found) == ranks, f"{name}: {len(found)} of {ranks} ranks wrote their result"
    largest = max(found, key=lambda rank: rank["measured"])
    return {
        "name": name,
        "planned_mib": round(largest["planned"] / MIB, 1),
        "measured_mib": round(largest["measured"] / MIB, 1),
        "error": round(largest["planned"] / largest["measured"] - 1, 4),
        "phase": largest["phase"],
        "phases_mib": {phase: round(size / MIB, 1) for phase, size in largest["phases"].items()},
    }


def prepare(work: Path, models: set[str]) -> None:
    """Write the random models and the prompts."""
    torch.manual_seed(0)
    for name in sorted(models):
        transformers.AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(work / name)
        word_tokenizer(VOCAB).save_pretrained(work / name)
    save_prompts(random_prompts(64, 24, VOCAB), work / "prompts.jsonl")


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), sys.argv[3:])
        return
    args = arguments()
    facts, rows = machine("transformers"), []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work, {CONFIGURATIONS[name][0] for name in args.only})
        for name in args.only:
            repeated = [measure(name, work, args.threads) for _ in range(args.rounds)]
            rows.append(sorted(repeated, key=lambda row: row["measured_mib"])[len(repeated) // 2])
            row = rows[-1]
            print(
                f"{name:28s} planned {row['planned_mib']:7.0f} MiB ({row['phase']})  measured "
                f"{row['measured_mib']:7.0f} MiB  {row['error']:+.1%}", flush=True,
            )  # fmt: skip
    errors = [abs(row["error"]) for row in rows]
    print(f"largest error {max(errors):.1%}, median {statistics.median(errors):.1%}; {one_line(facts, args.threads)}")
    result = {"bench": "plan", "threads": args.threads, "rounds": args.rounds, "rows": rows, "machine": facts}
    if args.save:
        print(f"saved {save('bench_plan', result)}")
    print(json.dumps(result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CONFIGURATIONS, nargs="+", default=list(CONFIGURATIONS), help="default: all")
    parser.add_argument("--rounds", type=int, default=1, help="runs per configuration; the median counts (default: 1)")
    parser.add_argument("--threads", type=int, default=2, help="threads of all ranks (default: 2)")
    parser.add_argument("--quick", action="store_true", help="only the first configuration")
    parser.add_argument("--save", action="store_true", help="write bench/results/cpu/bench_plan.json")
    args = parser.parse_args()
    if args.quick:
        args.only = args.only[:1]
    return args


if __name__ == "__main__":
    main()
