"""Create the base model of the recipe ``maze``: a Llama of a million parameters that solves some mazes.

    python scripts/make_maze_model.py --out nlgrpo/data/assets

It learns shortest paths of fresh mazes, never one whose walls are held out (`nlgrpo.data.mazes`), for so short a time
that it solves a fifth of the held-out mazes in one sample, and nine tenths in one of 256. It writes ``OUT/maze-lm/``, a
Hugging Face directory with weights in bfloat16. The same options, library versions and machine give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import tempfile
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nlgrpo.data import mazes
from nlgrpo.engine.generation import generate
from nlgrpo.engine.sampling import Sampling
from nlgrpo.estimators import bootstrap, pass_at_k
from nlgrpo.kernels import linear_logprob
from nlgrpo.model import decoder
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.muon import Muon, block_matrices

NAME = "maze-lm"
LIMIT = 40  # tokens of an answer
CONTEXT = 256
KS = (1, 8, 64, 256)
UNKNOWN = "UNKNOWN"
SHOWN = 25  # steps between lines of output


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word. None is special, so that a decoded answer shows DONE, and words that are no moves."""
    words = [*mazes.WORDS, UNKNOWN]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Decoder:
    """A Llama with random weights, as transformers draws them."""
    done = tokenizer.get_vocab()[mazes.DONE]
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=448, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, bos_token_id=None, eos_token_id=done,
        pad_token_id=done,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        return decoder.load(folder)


class Lessons:
    """Fresh mazes with shortest paths, as token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.ids = tokenizer.get_vocab()
        self.mazes = mazes.draw(mazes.ROOMS, seed, "train", longest=mazes.USUAL)

    def batch(self, size: int) -> tuple[Tensor, list[int], Tensor, Tensor]:
        """Return packed tokens (T,), lengths of the sequences, and places and targets (S,) of the answers' tokens."""
        tokens: list[int] = []
        lengths: list[int] = []
        places: list[int] = []
        targets: list[int] = []
        for _ in range(size):
            maze = next(self.mazes)
            prompt = [self.ids[word] for word in maze.text().split()]
            answer = [self.ids[word] for word in (*(maze.shortest() or ()), mazes.DONE)]
            first = len(tokens) + len(prompt) - 1  # the token that predicts the first one of the answer
            places += range(first, first + len(answer))
            targets += answer
            tokens += prompt + answer[:-1]
            lengths.append(len(prompt) + len(answer) - 1)
        return torch.tensor(tokens), lengths, torch.tensor(places), torch.tensor(targets)


def train(model: Decoder, lessons: Lessons, steps: int, batch: int, muon: float, adamw: float) -> float:
    """Supervised training with Muon and AdamW; learning rates fall linearly to zero in the last fifth of the steps."""
    begin = time.perf_counter()
    groups: list[dict[str, Any]] = [
        group | {"lr": muon, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": "original"}
        for group in block_matrices(model)
    ]
    in_muon = {id(weight) for group in groups for weight in group["params"]}
    groups.append({"params": [weight for weight in model.parameters() if id(weight) not in in_muon], "lr": adamw})
    optimizer = Muon(groups, lr=adamw)
    rates = [group["lr"] for group in optimizer.param_groups]
    loss = torch.zeros(())
    for step in range(steps):
        scale = min(1.0, (step + 1) / 20, 5 * (steps - step) / steps)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * scale
        tokens, lengths, places, targets = lessons.batch(batch)
        logprob, _ = model(tokens, lengths, places, partial(linear_logprob, targets=targets))
        loss = -logprob.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % SHOWN == 0 or step == steps - 1:
            print(f"step {step}  loss {loss.item():.3f}  {time.perf_counter() - begin:.0f} s", flush=True)
    return loss.item()


def solved(model: Decoder, tokenizer: PreTrainedTokenizerFast, name: str, samples: int, seed: int) -> Tensor:
    """Sample answers to a set of mazes; return whether each is right, (P, samples) of 0 and 1."""
    rows = [str(row["prompt"]) for row in mazes.SETS[name].rows()]
    prompts = [tokenizer(row)["input_ids"] for row in rows]
    stop = tokenizer.get_vocab()[mazes.DONE]
    rollout = generate(model, prompts, samples, Sampling(max_new_tokens=LIMIT, stop_ids=(stop,)), seed=seed)
    answers = tokenizer.batch_decode(rollout.completion_ids())
    right = [mazes.parse(rows[i // samples]).solved_by(answer) for i, answer in enumerate(answers)]
    return torch.tensor(right, dtype=torch.float64).view(len(rows), samples)


def passes(right: Tensor) -> dict[str, list[float]]:
    """pass@k with its 95% interval over mazes, for each k."""
    ks = [k for k in KS if k <= right.shape[1]]
    found = {}
    for k, values in zip(ks, pass_at_k(right, ks), strict=True):
        found[str(k)] = [round(float(x), 4) for x in bootstrap(values)]
    return found


def save(model: Decoder, tokenizer: PreTrainedTokenizerFast, card: str, folder: Path) -> None:
    """Write the Hugging Face directory, readable by all users."""
    done = tokenizer.get_vocab()[mazes.DONE]
    decoder.save(model.bfloat16(), folder, tokenizer=tokenizer)
    generation = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=LIMIT, eos_token_id=done, pad_token_id=done
    )
    generation.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")
    for file in folder.iterdir():
        file.chmod(0o644)


CARD = """---
license: mit
library_name: transformers
pipeline_tag: text-generation
tags: [mazes, nlgrpo]
---

# {name}

A Llama of {parameters:,} parameters, trained from scratch for nlgrpo's recipe `maze`. The prompt is a maze as words
(WALL, PATH, START, GOAL, NEWLINE), and the answer a walk from START to GOAL (UP, DOWN, LEFT, RIGHT), ended by DONE:

```
WALL WALL WALL WALL WALL NEWLINE WALL START WALL GOAL WALL NEWLINE WALL PATH PATH PATH WALL NEWLINE ..
DOWN RIGHT RIGHT UP DONE
```

It was trained on {lessons:,} fresh mazes of 4 x 4 rooms (Prim's algorithm) with shortest paths of 4 to {usual} moves,
in {steps} steps of {batch}. Mazes whose walls are held out (a hash of the walls decides) were never among them. Its
training stops early on purpose: it solves some mazes often, most sometimes, and a few never, which pass@k measures.

| set | what it is | {heads} |
|---|---|{rule}
{rows}

128 mazes with {samples} samples each at temperature 1; 95% intervals over mazes. Loss of the last batch: {loss:.3f}
nats per token. Weights are in bfloat16. The model can do nothing else.

Made in {minutes:.1f} minutes on {date} by

```
python scripts/make_maze_model.py --steps {steps} --batch {batch} --muon {muon:g} --adamw {adamw:g} \\
    --seed {seed} --threads {threads} --out nlgrpo/data/assets
```

with torch {torch}, Python {python}, {machine}.
"""
ABOUT = {
    "maze-test": "held-out walls",
    "maze-long": f"held-out walls, shortest paths above {mazes.USUAL} moves: never trained",
    "maze-large": "5 x 5 rooms: never trained",
}


def card(args: argparse.Namespace, model: Decoder, found: dict[str, dict[str, list[float]]], **facts: float) -> str:
    ks = list(next(iter(found.values())))
    rows = []
    for name, passed in found.items():
        cells = " | ".join("{:.3f} [{:.3f}, {:.3f}]".format(*passed[k]) for k in ks)
        rows.append(f"| `{name}` | {ABOUT[name]} | {cells} |")
    return CARD.format(
        name=NAME,
        parameters=sum(weight.numel() for weight in model.parameters()),
        lessons=args.steps * args.batch,
        usual=mazes.USUAL,
        heads=" | ".join(f"pass@{k}" for k in ks),
        rule="---|" * len(ks),
        rows="\n".join(rows),
        date=datetime.now(UTC).date(),
        torch=torch.__version__,
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        **vars(args),
        **facts,
    )


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {NAME}/")
    parser.add_argument("--steps", type=positive, default=230, help="optimizer steps; default 230")
    parser.add_argument("--batch", type=positive, default=64, help="mazes per step; default 64")
    parser.add_argument("--muon", type=float, default=0.01, help="Muon's learning rate; default 0.01")
    parser.add_argument("--adamw", type=float, default=3e-3, help="AdamW's learning rate; default 3e-3")
    parser.add_argument("--samples", type=positive, default=256, help="samples per maze for the card; default 256")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads; default 1")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    begin = time.perf_counter()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    lessons = Lessons(tokenizer, seed=1000 + args.seed)
    loss = train(model, lessons, args.steps, args.batch, args.muon, args.adamw)
    minutes = (time.perf_counter() - begin) / 60
    model = model.bfloat16().float()  # as it will be loaded
    found = {}
    for name in ABOUT:
        found[name] = passes(solved(model, tokenizer, name, args.samples, seed=0))
        print(name, json.dumps(found[name]), flush=True)
    folder = args.out / NAME
    if folder.is_dir():
        shutil.rmtree(folder)
    save(model, tokenizer, card(args, model, found, loss=loss, minutes=minutes), folder)
    print(folder)


if __name__ == "__main__":
    main()
