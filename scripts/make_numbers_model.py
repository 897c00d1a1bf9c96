"""Create what ``--tiny`` runs of the GSM8K and Countdown examples use: a small model, and problems for it.

    python scripts/make_numbers_model.py --out nlgrpo/data/assets

    9+4+11+2=       9+4=13 13+11=24 24+2=26 #### 26
    3 5 7=22:       <answer>3*5+7</answer>

The model is a Llama of 150 thousand parameters with one token per number. It learns from solutions of which some are
wrong on purpose: sums in which a carry is lost, and expressions of the right numbers with another value. So it solves a
part of both in one sample, and most in one of 64. It writes ``OUT/numbers-lm/``, a Hugging Face directory with weights
in bfloat16, and ``OUT/sums.jsonl`` and ``OUT/countdown.jsonl``, whose problems it was not trained on. The same options,
library versions and machine give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nlgrpo.engine.generation import generate
from nlgrpo.engine.sampling import Sampling
from nlgrpo.estimators import bootstrap, pass_at_k
from nlgrpo.model import decoder
from nlgrpo.rewards.builtin import Gsm8k
from nlgrpo.rewards.countdown import Countdown, expression_of

NAME = "numbers-lm"
LARGEST = 12  # of the numbers in a problem
TERMS = 4  # of a sum
TARGETS = range(1, 101)
LIMIT = 24  # tokens of an answer
CONTEXT = 64
KS = (1, 8, 64)
PAD = "<pad>"
BOS = "<s>"
EOS = "</s>"
UNKNOWN = "<unk>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer with one token per number and per other character; adds <s> before a text."""
    words = [PAD, BOS, EOS, UNKNOWN, *"+-*()=: ", "####", "<answer>", "</answer>", *map(str, range(max(TARGETS) + 1))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("####|</?answer>|[0-9]+|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    names = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNKNOWN}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


# --- problems, as rows of a data set, and solutions -------------------------------------------------------------------


def draw_sum(rng: random.Random) -> dict[str, Any]:
    terms = [rng.randint(1, LARGEST) for _ in range(TERMS)]
    return {"prompt": "+".join(map(str, terms)) + "=", "answer": f"#### {sum(terms)}"}


def solve_sum(row: dict[str, Any], wrong: float, rng: random.Random) -> str:
    """One equation for every number after the first. A carry is lost with probability ``wrong``."""
    total, *terms = map(int, row["prompt"][:-1].split("+"))
    steps = []
    for term in terms:
        before = total
        total += term
        if before % 10 + term % 10 >= 10 and rng.random() < wrong:
            total -= 10
        steps.append(f"{before}+{term}={total} ")
    return "".join(steps) + f"#### {total}"


def expression(numbers: list[int], rng: random.Random) -> str:
    """A random expression of all numbers, in any order."""
    a, b, c = rng.sample(numbers, 3)
    first, second = rng.choices("+-*", k=2)
    form = rng.choice(["{a}{first}{b}{second}{c}", "({a}{first}{b}){second}{c}", "{a}{first}({b}{second}{c})"])
    return form.format(a=a, b=b, c=c, first=first, second=second)


def value_of(text: str) -> int:
    found = expression_of(f"<answer>{text}</answer>")
    assert found is not None
    return int(found[0])


def draw_countdown(rng: random.Random) -> dict[str, Any]:
    while True:
        numbers = [rng.randint(1, LARGEST) for _ in range(3)]
        target = value_of(expression(numbers, rng))
        if target in TARGETS:
            return {"prompt": f"{' '.join(map(str, numbers))}={target}:", "nums": numbers, "target": target}


def solve_countdown(row: dict[str, Any], wrong: float, rng: random.Random) -> str:
    """An expression with the value of the target, or with probability ``wrong`` with any value."""
    any_value = rng.random() < wrong
    while True:
        found = expression(row["nums"], rng)
        if any_value or value_of(found) == row["target"]:
            return f"<answer>{found}</answer>"


Draw = Callable[[random.Random], dict[str, Any]]
Solve = Callable[[dict[str, Any], float, random.Random], str]
TASKS: dict[str, tuple[Draw, Solve]] = {
    "sums": (draw_sum, solve_sum),
    "countdown": (draw_countdown, solve_countdown),
}


def rows_of(draw: Draw, count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return ``count`` different problems."""
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        row = draw(rng)
        found[row["prompt"]] = row
    return list(found.values())


# --- the model --------------------------------------------------------------------------------------------------------


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=172, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace, held_out: set[str]
) -> float:
    """Train by AdamW with warm-up and cosine decay on answers to problems that are not ``held_out``."""
    rng = random.Random(args.seed + 1)
    begin = time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    loss = torch.zeros(())
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * step / args.steps))
        texts: list[str] = []
        starts: list[int] = []
        while len(texts) < args.batch:
            draw, solve = TASKS[rng.choice(list(TASKS))]
            row = draw(rng)
            if row["prompt"] not in held_out:
                texts.append(row["prompt"] + solve(row, args.wrong, rng) + EOS)
                starts.append(len(tokenizer(row["prompt"])["input_ids"]))
        ids = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")["input_ids"]
        targets = ids.clone()
        targets[ids == tokenizer.pad_token_id] = -100
        for i, start in enumerate(starts):
            targets[i, :start] = -100  # the problem itself is random
        logits = model(ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 500 == 0 or step == args.steps - 1:
            print(f"step {step}  loss {loss.item():.3f}  {time.perf_counter() - begin:.0f} s", flush=True)
    return loss.item()


def solved(folder: Path, rows: list[dict[str, Any]], samples: int) -> Tensor:
    """Sample answers; return whether each is right, (P, samples) of 0 and 1."""
    model = decoder.load(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    sampling = Sampling(max_new_tokens=LIMIT, stop_ids=(tokenizer.eos_token_id,))
    rollout = generate(model, prompts, samples, sampling, seed=0)
    answers = tokenizer.batch_decode(rollout.completion_ids(), skip_special_tokens=True)
    columns = {name: [row[name] for row in rows for _ in range(samples)] for name in rows[0]}
    reward = Countdown() if "target" in columns else Gsm8k()
    right = reward(completions=answers, **columns)
    return torch.tensor(right, dtype=torch.float64).view(len(rows), samples)


CARD = """---
license: mit
library_name: transformers
pipeline_tag: text-generation
tags: [arithmetic, nlgrpo]
---

# {name}

A Llama of {parameters:,} parameters, trained from scratch for `--tiny` runs of nlgrpo's examples `gsm8k_qwen.toml` and
`countdown.toml`. It has one token per number and can do nothing else than

```
9+4+11+2=       9+4=13 13+11=24 24+2=26 #### 26
3 5 7=22:       <answer>3*5+7</answer>
```

In {wrong:.0%} of its lessons a carry was lost, or the expression had another value. 128 problems that it was not
trained on, with {samples} samples each at temperature 1; 95% intervals over problems:

| problems | {heads} |
|---|{rule}
{rows}

Loss of the last batch: {loss:.3f} nats per token. Weights are in bfloat16. Made in {minutes:.1f} minutes on {date} by

```
python scripts/make_numbers_model.py --steps {steps} --batch {batch} --lr {lr:g} --wrong {wrong:g} --seed {seed} \\
    --out nlgrpo/data/assets
```

with torch {torch}, Python {python}, {machine}, one thread.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {NAME}/ and the problems")
    parser.add_argument("--problems", type=int, default=768, help="problems of each kind; default 768")
    parser.add_argument("--wrong", type=float, default=0.6, help="share of wrong lessons; default 0.6")
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps; default 4000")
    parser.add_argument("--batch", type=int, default=32, help="problems per step; default 32")
    parser.add_argument("--lr", type=float, default=4e-3, help="default 4e-3")
    parser.add_argument("--samples", type=int, default=64, help="samples per problem for the card; default 64")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    begin = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    problems = {name: rows_of(draw, args.problems, rng) for name, (draw, _) in TASKS.items()}
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    loss = train(model, tokenizer, args, {row["prompt"] for rows in problems.values() for row in rows})
    minutes = (time.perf_counter() - begin) / 60
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=LIMIT, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as made:
        model.bfloat16().save_pretrained(made)
        tokenizer.save_pretrained(made)
        lines = []
        ks = [k for k in KS if k <= args.samples]
        for name, rows in problems.items():
            values = [bootstrap(x) for x in pass_at_k(solved(Path(made), rows[:128], args.samples), ks)]
            cells = " | ".join("{:.3f} [{:.3f}, {:.3f}]".format(*map(float, x)) for x in values)
            lines.append(f"| `{name}` | {cells} |")
            print(lines[-1], flush=True)
        card = CARD.format(
            name=NAME, parameters=model.num_parameters(), heads=" | ".join(f"pass@{k}" for k in ks),
            rule="---|" * len(ks), rows="\n".join(lines), loss=loss, minutes=minutes, date=datetime.now(UTC).date(),
            torch=torch.__version__, python=platform.python_version(),
            machine=f"{platform.system()} {platform.machine()}", **vars(args),
        )  # fmt: skip
        (Path(made) / "README.md").write_text(card, encoding="utf-8")
        folder = args.out / NAME
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)
    for name, rows in problems.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (args.out / f"{name}.jsonl").write_text(text, encoding="utf-8")
    print(folder)


if __name__ == "__main__":
    main()
