"""Create the model `story-lm`: a causal LM of half a million parameters that tells stories of all lengths.

    python scripts/make_story_model.py tinystories.txt --out nlgrpo/data/assets

The input text has stories separated by ``<|endoftext|>``. The script trains a byte-level BPE tokenizer and a small
GPT-2 on it, then trains the model on texts that it generated itself at a lower temperature. It writes
``OUT/story-lm/`` (a Hugging Face directory), ``OUT/prompts.jsonl`` and ``OUT/eval_prompts.jsonl``. The same text,
options, library versions and machine give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from story_card import model_card
from story_data import COMPLETION, CONTEXT, SEPARATOR, Documents, read_stories, train_tokenizer
from story_prompts import make_prompts
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

WIDTH = 96
# coordinates initialized as sinusoids of the position; their amplitude; shortest and longest wavelength in tokens
POSITION_WIDTH, AMPLITUDE, SHORTEST, LONGEST = 32, 2.5, 12, 600


def pad(documents: list[list[int]], value: int) -> torch.Tensor:
    """Token ids (B, L), padded on the right, for which a causal model needs no attention mask."""
    longest = max(map(len, documents))
    return torch.tensor([ids + [value] * (longest - len(ids)) for ids in documents])


def loss_sum(model: GPT2LMHeadModel, documents: list[list[int]]) -> torch.Tensor:
    """Summed negative log-likelihood of all tokens after ``<s>``."""
    padding: Any = model.config.pad_token_id
    ids = pad(documents, padding)
    logits = model(ids[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=padding, reduction="sum")


def batches(documents: list[list[int]], size: int) -> list[list[list[int]]]:
    """Group documents of similar length, so that there is little padding."""
    documents = sorted(documents, key=len)
    return [documents[i : i + size] for i in range(0, len(documents), size)]


@torch.no_grad()
def perplexity(model: GPT2LMHeadModel, documents: list[list[int]]) -> float:
    """exp of the mean negative log-likelihood per token, without dropout; leaves the model in training mode."""
    model.eval()
    total = sum(loss_sum(model, part).item() for part in batches(documents, 32))
    model.train()
    return math.exp(total / sum(len(ids) - 1 for ids in documents))


def build_model(tokenizer: PreTrainedTokenizerFast, dropout: float, heads: int) -> GPT2LMHeadModel:
    """A GPT-2 with tied embeddings, whose learned positions are initialized as sinusoids.

    `length-bon` trains lengths, and a length is one decision among a hundred tokens. Nearly all of the gradient's
    signal is in the end token's embedding, which sees the final state only. With randomly initialized positions, the
    final state of a trained model says little about the length of the text (R^2 of 0.04 to 0.2 for a linear probe of a
    window of 16 tokens in the middle of the context), so the policy cannot learn to avoid the lengths between the
    recipe's two targets. With sinusoids R^2 is 0.7.
    """
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=WIDTH,
        n_layer=4,
        n_head=heads,
        n_positions=CONTEXT,
        initializer_range=0.05,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.wpe.weight[:, :POSITION_WIDTH] = AMPLITUDE * sinusoids(CONTEXT, POSITION_WIDTH)
    return model


def sinusoids(positions: int, width: int) -> torch.Tensor:
    """Sines and cosines of geometric wavelengths, (positions, width) (Vaswani et al., 2017, 3.5)."""
    waves = (
        2
        * math.pi
        * torch.arange(positions)[:, None]
        / torch.logspace(math.log10(SHORTEST), math.log10(LONGEST), width // 2)
    )
    return torch.cat([waves.sin(), waves.cos()], 1)


def model_facts(model: GPT2LMHeadModel) -> dict[str, int]:
    """Facts about the architecture for the model card."""
    config = model.config
    return {
        "parameters": model.num_parameters(),
        "layers": config.n_layer,
        "width": config.n_embd,
        "vocabulary": config.vocab_size,
        "context": config.n_positions,
        "limit": COMPLETION,
    }


def train(
    model: GPT2LMHeadModel, draw: Callable[[], list[int]], held_out: list[list[int]], steps: int, batch: int, lr: float
) -> None:
    """Train by AdamW with warm-up and cosine decay to zero, on ``batch`` documents per step."""
    begin = time.time()
    kept = [model.transformer.wpe.weight]  # weight decay would shrink the sinusoids
    decayed = [weight for weight in model.parameters() if weight is not kept[0]]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / 200, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        documents = [draw() for _ in range(batch)]
        tokens, total = sum(len(ids) - 1 for ids in documents), 0.0
        for part in batches(documents, -(-batch // 2)):
            loss = loss_sum(model, part) / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 300 == 0 or step == steps - 1:
            held = perplexity(model, held_out)
            print(
                f"step {step}  loss {total:.3f}  held-out perplexity {held:.2f}  {time.time() - begin:.0f} s",
                flush=True,
            )


@torch.no_grad()
def sample(
    model: Any, tokenizer: PreTrainedTokenizerFast, prompts: list[str], n: int, **options: float
) -> tuple[list[list[int]], list[list[int]]]:
    """Sample ``n`` texts, cycling through the prompts: ids of prompts and of completions, with the end token if any.

    ``options`` are those of ``generate``; without any, completions come from the model's own distribution.
    """
    model.eval()
    begun: list[list[int]] = []
    found: list[list[int]] = []
    while len(found) < n:
        chosen = [prompts[(len(found) + k) % len(prompts)] for k in range(min(256, n - len(found)))]
        inputs = tokenizer(chosen, return_tensors="pt", padding=True, return_token_type_ids=False)
        width = inputs["input_ids"].shape[1]
        ids = model.generate(**inputs, **{"do_sample": True, "top_k": 0, "max_new_tokens": COMPLETION} | options)
        for row in ids.tolist():
            begun.append([token for token in row[:width] if token != tokenizer.pad_token_id])
            found.append([token for token in row[width:] if token != tokenizer.pad_token_id])
    model.train()
    return begun, found


def retell(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> list[list[int]]:
    """Sample texts without an end token from the model at a low temperature; token ids without ``<s>``.

    A model trained on them (sequence-level distillation; Kim and Rush, 2016) writes at temperature 1 as this one does
    at the low temperature. Without this, so small a model misspells too many words at temperature 1.
    """
    prompts, _ = make_prompts(1024, 1, args.seed + 1)
    length = {"max_new_tokens": COMPLETION, "min_new_tokens": COMPLETION}
    begun, found = sample(model, tokenizer, prompts, args.retold, temperature=args.temperature, **length)
    return [first[1:] + rest for first, rest in zip(begun, found, strict=True)]


def save(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, card: str, folder: Path) -> None:
    """Write the Hugging Face directory, readable by all users."""
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=COMPLETION,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors makes files readable by the owner only


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
        ("steps", 3600, "optimizer steps on the stories"),
        ("retold", 6000, "texts generated by the model, for the second training"),
        ("retold_steps", 1500, "optimizer steps on them"),
        ("batch", 16, "documents per step"),
        ("samples", 2000, "completions sampled for the lengths in the model card"),
        ("heads", 6, f"attention heads, which share a width of {WIDTH}"),
        ("threads", 1, "CPU threads"),
    ]:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=positive, default=value, help=f"{meaning}; default {value}"
        )
    parser.add_argument("--temperature", type=float, default=0.7, help="of the generated texts; default 0.7")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak rate, half in the second training; default 3e-3")
    parser.add_argument("--dropout", type=float, default=0.1, help="default 0.1: the text is read several times")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.retold < 20:
        parser.error(f"--retold {args.retold}: expected 20 or more, because one in twenty is held out")
    if WIDTH % args.heads:
        parser.error(f"--heads {args.heads}: expected a divisor of the width, {WIDTH}")
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
    model = build_model(tokenizer, args.dropout, args.heads)
    print(f"{len(stories)} stories, {data.tokens()} training tokens, {model.num_parameters()} parameters", flush=True)
    train(model, lambda: data.draw(rng), held_out, args.steps, args.batch, args.lr)
    on_stories = perplexity(model, held_out)
    texts = retell(model, tokenizer, args)
    split = len(texts) // 20
    held_out = [data.cut(text, rng) for text in texts[:split]]
    train(model, lambda: data.cut(rng.choice(texts[split:]), rng), held_out, args.retold_steps, args.batch, args.lr / 2)
    model.config.embd_pdrop = model.config.resid_pdrop = 0.0  # users choose their own dropout
    prompts, eval_prompts = make_prompts(512, 64, args.seed)
    _, completions = sample(model, tokenizer, prompts, args.samples)
    card = model_card(
        prompts,
        completions,
        tokenizer,
        cut=sum(ids[-1] != tokenizer.eos_token_id for ids in completions),
        on_stories=on_stories,
        on_own=perplexity(model, held_out),
        stories=len(stories),
        tokens=data.tokens(),
        **model_facts(model),
        **{name: value for name, value in vars(args).items() if name not in ("text", "out", "samples")},
    )
    save(model, tokenizer, card, args.out / "story-lm")
    write_prompts(args.out / "prompts.jsonl", prompts)
    write_prompts(args.out / "eval_prompts.jsonl", eval_prompts)
    print(card)


if __name__ == "__main__":
    main()
