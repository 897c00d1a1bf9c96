"""Fine-tune a transformers model without its logits: pass hidden states and the head's weight to `linear_logprob`.

    python examples/fine_tune.py --text stories.txt        # nlgrpo's embedded model
    python examples/fine_tune.py --text stories.txt --model Qwen/Qwen3-0.6B --batch 4 --length 1024

The model's own loss keeps several copies of all logits, batch x length x vocabulary; this step keeps one block of them.
Works for models whose logits are the plain product with the head, as for most models: not scaled and not soft-capped.
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
    """Take one step per batch of ids (B, L) and labels (B, L), -100 at padding; yields the loss in nats per token."""
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
    """Yield ids and labels (B, L) of ``size`` lines of the text at a time, repeating the text."""
    lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    rows = [torch.tensor(ids) for ids in tokenizer(lines, truncation=True, max_length=length).input_ids if len(ids) > 1]
    if not rows:
        raise SystemExit(f"{path} has no line of two tokens or more, so there is nothing to predict.")
    for start in itertools.count(0, size):
        chosen = [rows[i % len(rows)] for i in range(start, start + size)]
        labels = pad_sequence(chosen, batch_first=True, padding_value=-100)
        yield labels.clamp(min=0), labels


def peak_mib() -> float:
    """Peak memory of the GPU, or of the process on a CPU (Linux counts in KiB, macOS in bytes)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=Path, help="text file, one document per line")
    parser.add_argument("--model", default="story-lm", help="Hugging Face directory or hub name")
    parser.add_argument("--steps", default=10, type=int)
    parser.add_argument("--batch", default=8, type=int, help="documents per step")
    parser.add_argument("--length", default=128, type=int, help="maximum tokens per document")
    parser.add_argument("--lr", default=1e-4, type=float)
    options = parser.parse_args()
    folder, device = locate(options.model), "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(device).train()
    batches = read_batches(options.text, AutoTokenizer.from_pretrained(folder), options.batch, options.length)
    on_device = ((ids.to(device), labels.to(device)) for ids, labels in batches)
    for step, loss in enumerate(fine_tune(model, itertools.islice(on_device, options.steps), options.lr), start=1):
        print(f"step {step:3}   loss {loss:.6f}   peak {peak_mib():.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
