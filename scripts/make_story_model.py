"""Make nlgrpo's default model: a causal LM of half a million parameters that tells short stories of every length.

    python scripts/make_story_model.py tinystories.txt --out nlgrpo/assets

The text holds stories separated by ``<|endoftext|>``.  The script trains a byte-level BPE tokenizer and a small Llama
on it and writes ``OUT/story-lm/`` (a Hugging Face directory), ``OUT/prompts.jsonl`` and ``OUT/eval_prompts.jsonl``.
The same text, options, library versions and machine give the same bytes.

Lengths.  The length-reward experiment (IAMA, section 6.1) starts from a reference whose completion lengths are about
uniform (J.2).  A training document is therefore a run of whole sentences whose number of tokens comes nearest to a
uniform draw, followed by the end token: the model learns to stop at a sentence end with the hazard 1 / (limit - length).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from story_card import model_card
from story_prompts import make_prompts
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEPARATOR = "<|endoftext|>"
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
VOCABULARY = 1024
CONTEXT, COMPLETION = 160, 128  # tokens: the most the model sees, and the most that follow a prompt
PROMPT = 10  # tokens of a typical prompt; a document is one such prompt and a completion
TARGET = (5, 123)  # tokens of a completion, drawn uniformly; sentence ends scatter about the draw
QUOTES = str.maketrans({"“": '"', "”": '"', "’": "'", "‘": "'", "–": "-", "—": "-", "…": "..."})
LONGEST = 300  # characters of a sentence; a longer one is mostly a quotation that was not closed
SENTENCE_END = re.compile(r'[.!?]["\']*(?= |$)')


def read_stories(path: Path) -> list[list[str]]:
    """Stories as lists of sentences.  The piece after the last separator, which may be cut, is left out."""
    pieces = path.read_text(encoding="utf-8").translate(QUOTES).split(SEPARATOR)[:-1]
    stories = [sentences(" ".join(piece.split())) for piece in pieces]
    if sum(map(bool, stories)) < 3:
        raise ValueError(
            f"{path} holds {sum(map(bool, stories))} complete stories; at least 3 are needed, each followed by "
            f"{SEPARATOR} (one of them is held out)."
        )
    return [story for story in stories if story]


def sentences(text: str) -> list[str]:
    """Cut ``text`` at sentence ends outside quotations; from the first very long sentence on, it is dropped."""
    found, start = [], 0
    for match in SENTENCE_END.finditer(text):
        if text.count('"', start, match.end()) % 2 == 0:
            if match.end() - start > LONGEST:
                break
            found.append(text[start : match.end()].strip())
            start = match.end()
    return found


def train_tokenizer(stories: list[list[str]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that puts ``<s>`` before a text and never an end token after it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((" ".join(story) for story in stories), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


@dataclass
class Documents:
    """Training documents drawn from stories: a run of sentences of about uniform length, between start and end tokens."""

    first: list[list[list[int]]]  # token ids of sentence i of story s, as the first of a text
    later: list[list[list[int]]]  # the same after another sentence (its first token carries the space)
    starts: list[list[int]]  # sentences of story s after which enough text is left for the longest document
    bos: int
    eos: int

    @classmethod
    def build(cls, stories: list[list[str]], tokenizer: PreTrainedTokenizerFast) -> Documents:
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        first = [[encode(s) for s in story] for story in stories]
        later = [[encode(" " + s) for s in story] for story in stories]
        need = PROMPT + COMPLETION
        starts = [[i for i in range(len(story)) if sum(map(len, story[i:])) >= need] for story in later]
        keep = [s for s, found in enumerate(starts) if found]
        if not keep:
            raise ValueError(f"none of {len(stories)} stories has {need} tokens, which the longest documents need.")
        pick = lambda table: [table[s] for s in keep]  # noqa: E731
        return cls(pick(first), pick(later), pick(starts), tokenizer.bos_token_id, tokenizer.eos_token_id)

    def tokens(self) -> int:
        return sum(len(sentence) for story in self.later for sentence in story)

    def draw(self, rng: random.Random) -> list[int]:
        """One document; half of them begin where their story begins."""
        s = rng.randrange(len(self.starts))
        i = self.starts[s][0] if rng.random() < 0.5 else rng.choice(self.starts[s])
        target = PROMPT + rng.uniform(*TARGET)
        ids = list(self.first[s][i])
        for sentence in self.later[s][i + 1 :]:
            if len(ids) + len(sentence) / 2 > target or len(ids) + len(sentence) > CONTEXT - 2:
                break  # the end before this sentence is the nearer one
            ids += sentence
        return [self.bos, *ids, self.eos]


def pad(documents: list[list[int]], value: int) -> torch.Tensor:
    """(B, L) token ids, padded on the right: a causal model needs no attention mask for that."""
    longest = max(map(len, documents))
    return torch.tensor([ids + [value] * (longest - len(ids)) for ids in documents])


def loss_sum(model: LlamaForCausalLM, documents: list[list[int]]) -> torch.Tensor:
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
def perplexity(model: LlamaForCausalLM, documents: list[list[int]]) -> float:
    """exp of the mean negative log-likelihood of a token."""
    total = sum(loss_sum(model, part).item() for part in batches(documents, 32))
    return math.exp(total / sum(len(ids) - 1 for ids in documents))


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with tied embeddings and grouped-query attention."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        # wavelengths of 6 to 2,600 tokens: 10,000, the usual base, is meant for longer contexts
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def model_facts(model: LlamaForCausalLM) -> dict[str, int]:
    """What the model card says about the architecture."""
    config = model.config
    return {
        "parameters": model.num_parameters(),
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings,
        "limit": COMPLETION,
    }


def train(model: LlamaForCausalLM, data: Documents, held_out: list[list[int]], args: argparse.Namespace) -> None:
    """AdamW with warm-up and cosine decay to zero."""
    rng, begin = random.Random(args.seed), time.time()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.1)
    for step in range(args.steps):
        rate = min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * step / args.steps))
        optimizer.param_groups[0]["lr"] = args.lr * rate
        documents = [data.draw(rng) for _ in range(args.batch)]
        tokens, total = sum(len(ids) - 1 for ids in documents), 0.0
        for part in batches(documents, max(1, args.batch // 3)):
            loss = loss_sum(model, part) / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == args.steps - 1:
            held = perplexity(model, held_out)
            print(
                f"step {step}  loss {total:.3f}  held-out perplexity {held:.2f}  {time.time() - begin:.0f} s",
                flush=True,
            )


@torch.no_grad()
def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], n: int) -> list[list[int]]:
    """``n`` completions at temperature 1, over the prompts in turn; token ids with the end token where it came."""
    found: list[list[int]] = []
    while len(found) < n:
        chosen = [prompts[(len(found) + k) % len(prompts)] for k in range(min(256, n - len(found)))]
        inputs = tokenizer(chosen, return_tensors="pt", padding=True, return_token_type_ids=False)
        ids = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=COMPLETION)
        found += [
            [t for t in row if t != tokenizer.pad_token_id] for row in ids[:, inputs["input_ids"].shape[1] :].tolist()
        ]
    return found


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, card: str, folder: Path) -> None:
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
        ("steps", 2400, "optimiser steps"),
        ("batch", 48, "documents a step"),
        ("samples", 2000, "completions sampled for the lengths in the model card"),
        ("threads", 2, "CPU threads"),
    ]:
        parser.add_argument(f"--{name}", type=positive, default=value, help=f"{meaning}; default {value}")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate; default 4e-3")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    return parser


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
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
    model = build_model(tokenizer)
    print(f"{len(stories)} stories, {data.tokens()} training tokens, {model.num_parameters()} parameters", flush=True)
    train(model, data, held_out, args)
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
        **{name: getattr(args, name) for name in ("steps", "batch", "lr", "seed", "threads")},
    )
    save(model, tokenizer, card, args.out / "story-lm")
    write_prompts(args.out / "prompts.jsonl", prompts)
    write_prompts(args.out / "eval_prompts.jsonl", eval_prompts)
    print(card)


if __name__ == "__main__":
    main()
