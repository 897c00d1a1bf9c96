"""Make nlgrpo's default model: a causal LM of half a million parameters that tells short stories of every length.

    python scripts/make_story_model.py tinystories.txt --out nlgrpo/assets

The text holds stories separated by ``<|endoftext|>``.  The script trains a byte-level BPE tokenizer and a small GPT-2
on it and writes ``OUT/story-lm/`` (a Hugging Face directory), ``OUT/prompts.jsonl`` and ``OUT/eval_prompts.jsonl``.
The same text, options, library versions and machine give the same bytes.  It takes about 12 minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from story_card import model_card
from story_data import COMPLETION, CONTEXT, SEPARATOR, Documents, read_stories, train_tokenizer
from story_prompts import make_prompts
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast


def pad(documents: list[list[int]], value: int) -> torch.Tensor:
    """(B, L) token ids, padded on the right: a causal model needs no attention mask for that."""
    longest = max(map(len, documents))
    return torch.tensor([ids + [value] * (longest - len(ids)) for ids in documents])


def loss_sum(model: GPT2LMHeadModel, documents: list[list[int]]) -> torch.Tensor:
    """Summed negative log-likelihood of all tokens after ``<s>``."""
    ids = pad(documents, model.config.pad_token_id)
    logits = model(ids[:, :-1]).logits
    return F.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=model.config.pad_token_id, reduction="sum"
    )


def batches(documents: list[list[int]], size: int) -> list[list[list[int]]]:
    """Documents of like length together, so that little padding is computed."""
    documents = sorted(documents, key=len)
    return [documents[i : i + size] for i in range(0, len(documents), size)]


@torch.no_grad()
def perplexity(model: GPT2LMHeadModel, documents: list[list[int]]) -> float:
    """exp of the mean negative log-likelihood of a token, without dropout; leaves the model in training mode."""
    model.eval()
    total = sum(loss_sum(model, part).item() for part in batches(documents, 32))
    model.train()
    return math.exp(total / sum(len(ids) - 1 for ids in documents))


def build_model(tokenizer: PreTrainedTokenizerFast, dropout: float) -> GPT2LMHeadModel:
    """A GPT-2 with tied embeddings.

    Its positions are learned, so that it can tell a length of 25 tokens from one of 30, which a rotary model of this
    size cannot well: lengths are what the default recipe trains.
    """
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=96,
        n_layer=4,
        n_head=6,
        n_positions=CONTEXT,
        initializer_range=0.05,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return GPT2LMHeadModel(config)


def model_facts(model: GPT2LMHeadModel) -> dict[str, int]:
    """What the model card says about the architecture."""
    config = model.config
    return {
        "parameters": model.num_parameters(),
        "layers": config.n_layer,
        "width": config.n_embd,
        "heads": config.n_head,
        "vocabulary": config.vocab_size,
        "context": config.n_positions,
        "limit": COMPLETION,
    }


def train(model: GPT2LMHeadModel, data: Documents, held_out: list[list[int]], args: argparse.Namespace) -> None:
    """AdamW with warm-up and cosine decay to zero."""
    rng, begin = random.Random(args.seed), time.time()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.1)
    for step in range(args.steps):
        rate = min((step + 1) / 200, 0.5 + 0.5 * math.cos(math.pi * step / args.steps))
        optimizer.param_groups[0]["lr"] = args.lr * rate
        documents = [data.draw(rng) for _ in range(args.batch)]
        tokens, total = sum(len(ids) - 1 for ids in documents), 0.0
        for part in batches(documents, -(-args.batch // 2)):
            loss = loss_sum(model, part) / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 300 == 0 or step == args.steps - 1:
            held = perplexity(model, held_out)
            print(
                f"step {step}  loss {total:.3f}  held-out perplexity {held:.2f}  {time.time() - begin:.0f} s",
                flush=True,
            )


@torch.no_grad()
def sample(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str], n: int) -> list[list[int]]:
    """``n`` completions at temperature 1, over the prompts in turn; token ids with the end token where it came."""
    model.eval()
    found: list[list[int]] = []
    while len(found) < n:
        chosen = [prompts[(len(found) + k) % len(prompts)] for k in range(min(256, n - len(found)))]
        inputs = tokenizer(chosen, return_tensors="pt", padding=True, return_token_type_ids=False)
        ids = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=COMPLETION)
        found += [
            [t for t in row if t != tokenizer.pad_token_id] for row in ids[:, inputs["input_ids"].shape[1] :].tolist()
        ]
    return found


def save(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, card: str, folder: Path) -> None:
    """Write the Hugging Face directory, readable by all."""
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=COMPLETION,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner alone


def write_prompts(path: Path, prompts: list[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help=f"stories, each followed by {SEPARATOR}")
    parser.add_argument("--out", type=Path, required=True, help="folder for story-lm/ and the two prompt files")
    for name, value, meaning in [
        ("steps", 4500, "optimiser steps"),
        ("batch", 16, "documents a step"),
        ("samples", 2000, "completions sampled for the lengths in the model card"),
        ("threads", 1, "CPU threads"),
    ]:
        parser.add_argument(f"--{name}", type=positive, default=value, help=f"{meaning}; default {value}")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate; default 3e-3")
    parser.add_argument("--dropout", type=float, default=0.1, help="default 0.1: the text is read several times")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    try:
        stories = read_stories(args.text)
        split = max(1, len(stories) // 20)
        tokenizer = train_tokenizer(stories[split:])
        data, held = (Documents.build(part, tokenizer) for part in (stories[split:], stories[:split]))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    rng = random.Random(args.seed)
    held_out = [held.draw(rng) for _ in range(256)]
    model = build_model(tokenizer, args.dropout)
    print(f"{len(stories)} stories, {data.tokens()} training tokens, {model.num_parameters()} parameters", flush=True)
    train(model, data, held_out, args)
    model.config.embd_pdrop = model.config.resid_pdrop = 0.0  # who trains it on decides anew
    prompts, eval_prompts = make_prompts(512, 64, args.seed)
    completions = sample(model, tokenizer, prompts, args.samples)
    card = model_card(
        prompts,
        completions,
        tokenizer,
        cut=sum(ids[-1] != tokenizer.eos_token_id for ids in completions),
        perplexity=perplexity(model, held_out),
        stories=len(stories),
        tokens=data.tokens(),
        **model_facts(model),
        **{name: getattr(args, name) for name in ("steps", "batch", "lr", "dropout", "seed", "threads")},
    )
    save(model, tokenizer, card, args.out / "story-lm")
    write_prompts(args.out / "prompts.jsonl", prompts)
    write_prompts(args.out / "eval_prompts.jsonl", eval_prompts)
    print(card)


if __name__ == "__main__":
    main()
