"""Create a task with exact answers: sums, and a small causal LM that computes them and mostly forgets to carry.

    python -m experiments.guided_sums.make_arithmetic --out runs/arithmetic

    9+4+11=9+4=13 13+11=24 #### 24
    9+4+11=9+4=3 3+11=14 #### 14

A prompt asks for a sum; a solution adds one number at a time and gives the answer after ``####``. The model is a small
Llama with one token per number. It is trained from scratch on solutions in which each carry is lost with probability
``--wrong``, and the following steps continue from the wrong total. With a probability above 1/2 neither greedy decoding
nor the majority of its answers is right, but some samples are.

Writes ``OUT/model`` (a Hugging Face directory) and ``OUT/sums.jsonl`` with the columns ``prompt`` and ``answer``. The
model was trained on none of these prompts. The same options, versions and machine give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from experiments import quick
from nlgrpo.rewards.builtin import final_answer

LARGEST = 12
PAD, BOS, EOS = "<pad>", "<s>", "</s>"


def make_tokenizer(terms: int) -> PreTrainedTokenizerFast:
    """Tokenizer with one token per number and per other character; adds <s> before a text."""
    vocabulary = [PAD, BOS, EOS, *"+= ", "####", *map(str, range(LARGEST * terms + 1))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("####|[0-9]+|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS)


def problem(terms: list[int]) -> str:
    return "+".join(map(str, terms)) + "="


def solution(terms: list[int], wrong: float, rng: random.Random) -> str:
    """Return one equation for every number after the first; a carry is lost with probability ``wrong``."""
    total, steps = terms[0], []
    for term in terms[1:]:
        before, total = total, total + term
        if before % 10 + term % 10 >= 10 and rng.random() < wrong:
            total -= 10
        steps.append(f"{before}+{term}={total} ")
    return "".join(steps) + f"#### {total}"


def draw(terms: int, rng: random.Random) -> list[int]:
    return [rng.randint(1, LARGEST) for _ in range(terms)]


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace, held_out: set[str]
) -> None:
    """Train by AdamW with warm-up and cosine decay, on solutions of sums that are not ``held_out``."""
    rng, begin = random.Random(args.seed + 1), time.time()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * step / args.steps))
        texts: list[str] = []
        while len(texts) < args.batch:
            terms = draw(args.terms, rng)
            if problem(terms) not in held_out:
                texts.append(problem(terms) + solution(terms, args.wrong, rng) + EOS)
        ids = tokenizer(texts, return_tensors="pt", padding=True)["input_ids"]
        logits = model(ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 500 == 0 or step == args.steps - 1:
            print(f"step {step}  loss {loss.item():.3f}  {time.time() - begin:.0f} s", flush=True)


@torch.no_grad()
def solved(model: Any, tokenizer: PreTrainedTokenizerFast, sums: list[list[int]], **options: bool) -> float:
    """Return the share of sums with a right answer, from one sample each; ``options`` are those of ``generate``."""
    right = 0
    for i in range(0, len(sums), 64):
        part = sums[i : i + 64]
        inputs = tokenizer([problem(terms) for terms in part], return_tensors="pt", padding=True, padding_side="left")
        inputs.pop("token_type_ids", None)
        ids = model.generate(**inputs, max_new_tokens=12 * len(part[0]), **options)
        texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(final_answer(text) == sum(terms) for text, terms in zip(texts, part, strict=True))
    return right / len(sums)


QUICK = [
    "--out", "arithmetic", "--terms", "3", "--problems", "8", "--steps", "3",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--terms", type=int, default=6, help="numbers per sum; default 6")
    parser.add_argument("--wrong", type=float, default=0.6, help="share of carries lost in training; default 0.6")
    parser.add_argument("--problems", type=int, default=1024, help="number of sums in sums.jsonl; default 1024")
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps; default 3000")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.terms < 2 or not 0 <= args.wrong < 1:
        parser.error(f"--terms {args.terms} --wrong {args.wrong}: expected 2 terms or more and a share in [0, 1)")
    if not 1 <= args.problems <= LARGEST**args.terms // 2:
        parser.error(f"--problems {args.problems}: allowed is 1 to {LARGEST**args.terms // 2:,}, half of all such sums")
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    different: dict[tuple[int, ...], None] = {}
    while len(different) < args.problems:
        different[tuple(draw(args.terms, rng))] = None
    sums = [list(terms) for terms in different]
    tokenizer = make_tokenizer(args.terms)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=172, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=24 * args.terms, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    print(f"{model.num_parameters():,} parameters, {args.problems} sums of {args.terms} numbers", flush=True)
    train(model, tokenizer, args, {problem(terms) for terms in sums})
    model.eval()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    sampled, greedy = solved(model, tokenizer, sums, do_sample=True), solved(model, tokenizer, sums, do_sample=False)
    print(f"solved: {sampled:.3f} at temperature 1, {greedy:.3f} by greedy decoding")
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    lines = [json.dumps({"prompt": problem(terms), "answer": f"#### {sum(terms)}"}) for terms in sums]
    (args.out / "sums.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(quick.run(main, QUICK))
