"""A reference loop that does what a step of TRL's GRPOTrainer does, for machines that cannot import TRL.

transformers samples with ``generate``, the rewards of a group lose their mean, and log-probs come from the model's
logits, a log-softmax and a gather: TRL's step with loss_type="dapo", beta=0, scale_rewards="none" and one update per
rollout, without its bookkeeping. A test compares its loss and gradient with TRL's formula.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from random_models import EOS, PAD
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

Reward = Callable[..., list[float | None]]


class Loop:
    """The model, its optimizer, and the prompts in their order; ``step`` is one step of training."""

    def __init__(self, folder: Path, device: str, dtype: str, *, lr: float, limit: int, together: int) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)
        self.model = model.to(device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0, fused=True)
        self.device, self.limit, self.together = device, limit, together
        lines = (folder / "prompts.jsonl").read_text("utf-8").splitlines()
        self.prompts: Iterator[str] = iter([json.loads(line)["prompt"] for line in lines])

    def step(self, prompts: int, samples: int, reward: Reward) -> float:
        """Sample, score and update; return the loss."""
        batch = self.tokenizer([next(self.prompts) for _ in range(prompts)], return_tensors="pt", padding=True)
        batch = batch.to(self.device)
        width = batch["input_ids"].shape[1]
        with torch.no_grad():
            ids = self.model.generate(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=self.limit,
                num_return_sequences=samples, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            )  # fmt: skip
        completions = ids[:, width:]
        mask = until_the_end(completions)
        texts = [row[kept].tolist() for row, kept in zip(completions, mask, strict=True)]
        rewards = torch.tensor(reward(completion_ids=texts), device=self.device).view(prompts, samples)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
        seen = torch.cat((batch["attention_mask"].repeat_interleave(samples, 0), mask.long()), dim=1)
        self.optimizer.zero_grad()
        loss = 0.0
        for rows in torch.arange(len(ids), device=self.device).split(self.together):
            part = self.loss(ids[rows], seen[rows], mask[rows], advantages[rows]) / mask.sum()
            part.backward()
            loss += float(part.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss

    def loss(self, ids: Tensor, seen: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        """Sum over completion tokens of -A exp(log p - sg(log p))."""
        columns = mask.shape[1]
        logits = self.model(input_ids=ids, attention_mask=seen, logits_to_keep=columns + 1).logits[:, :-1]
        logprob = logits.float().log_softmax(-1).gather(-1, ids[:, -columns:, None])[..., 0]
        return -(advantages[:, None] * (logprob - logprob.detach()).exp() * mask).sum()


def until_the_end(completions: Tensor) -> Tensor:
    """Mask of the tokens up to EOS, which is included."""
    ended = (completions == EOS).int().cumsum(1)
    return (ended - (completions == EOS).int() == 0) & (completions != PAD)


def run(folder: Path, args: Any, *, dtype: str, lr: float, limit: int, together: int, reward: Reward) -> Iterator[None]:
    """Yield before the first step, and after every step."""
    if args.beta:
        raise ValueError(f"beta = {args.beta}: the reference loop has no reference model")
    torch.manual_seed(args.seed)
    loop = Loop(folder, args.device, dtype, lr=lr, limit=limit, together=together)
    yield
    for _ in range(args.warmup + args.steps):
        loop.step(args.prompts, args.samples[0], reward)
        if args.device == "cuda":
            torch.cuda.synchronize()
        yield
