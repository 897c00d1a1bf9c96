"""Fine-tuning a transformers model without its logits: hidden states and the head's weight go to `linear_logprob`.

    python examples/fine_tune.py --text stories.txt        # nlgrpo's story model
    python examples/fine_tune.py --text stories.txt --model Qwen/Qwen3-0.6B --batch 4 --length 1024

A step that goes through the model's own loss holds logits of batch x length x vocabulary numbers, several times over;
this one holds one block of them. For models whose logits are the head's product, as most are: not scaled, not capped.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from nlgrpo.kernels import linear_logprob
from nlgrpo.model.hf_weights import locate


def fine_tune(model: PreTrainedModel, batches: Iterable[tuple[Tensor, Tensor]], lr: float) -> Iterator[float]:
    """One step a batch of ids (B, L) and labels (B, L), which are -100 at padding; the loss in nats a token."""
    head, optimizer = model.get_output_embeddings(), torch.optim.AdamW(model.parameters(), lr)
    for ids, labels in batches:
        hidden = model.base_model(ids, attention_mask=(labels != -100).long()).last_hidden_state[:, :-1].flatten(0, 1)
        targets = labels[:, 1:].flatten()
        logprob, _ = linear_logprob(hidden, head.weight, targets, bias=head.bias)  # 0 where the target is -100
        loss = -logprob.sum() / (targets != -100).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def read_batches(
    path: Path, tokenizer: PreTrainedTokenizerBase, size: int, length: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and labels (B, L) of ``size`` lines of the text at a time, over and over."""
    lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    rows = [torch.tensor(ids) for ids in tokenizer(lines, truncation=True, max_length=length).input_ids if len(ids) > 1]
    if not rows:
        raise SystemExit(f"{path} has no line of two tokens or more; there is nothing to predict.")
    for start in itertools.count(0, size):
        chosen = [rows[i % len(rows)] for i in range(start, start + size)]
        labels = pad_sequence(chosen, batch_first=True, padding_value=-100)
        yield labels.clamp(min=0), labels


def peak_mib() -> float:
    """Of the GPU's memory, or of the process's where it runs on the CPU (Linux counts in KiB, macOS in bytes)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=Path, help="a document a line")
    parser.add_argument("--model", default="story-lm", help="Hugging Face directory or hub name")
    parser.add_argument("--steps", default=10, type=int)
    parser.add_argument("--batch", default=8, type=int, help="documents a step")
    parser.add_argument("--length", default=128, type=int, help="tokens that are kept of a document")
    parser.add_argument("--lr", default=1e-4, type=float)
    options = parser.parse_args()
    folder, device = locate(options.model), "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(device).train()
    batches = read_batches(options.text, AutoTokenizer.from_pretrained(folder), options.batch, options.length)
    moved = ((ids.to(device), labels.to(device)) for ids, labels in batches)
    for step, loss in enumerate(fine_tune(model, itertools.islice(moved, options.steps), options.lr), start=1):
        print(f"step {step:3}   loss {loss:.6f}   peak {peak_mib():.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
