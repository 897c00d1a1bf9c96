"""Time `nlgrpo.kernels.policy_loss`, forward and backward, with and without a KL penalty.

    python bench/bench_policy_loss.py [--device cpu|cuda] [--quick] [--save] [--op policy_loss] [--sizes T=4096]

Compared with `reference.policy_loss` in eager torch and under torch.compile, for T = 16,384 tokens (and a million on a
GPU), float32, beta 0 and 0.04 (k3). The floor of the forward reads log-prob, old log-prob, advantage (and reference)
and writes loss and derivative. The floor of the backward reads the upstream gradient and the derivative and writes the
gradient: 32 or 36 bytes per token in total. Arrays of 16,384 tokens fit in a cache, so memory bandwidth does not limit
them, and the comparison measures launch costs. On a device without a kernel "ours" is the reference itself; a line
below the table says so.

A second op, loss_from_logits, goes from logits (B, L, V), bfloat16 on a GPU, to the loss of each token and back: by
`token_logprob` and `policy_loss`, by plain torch, and on a GPU by Liger-Kernel's Triton GRPO loss from logits (with
inplace=False like the others; by default it overwrites the logits with their gradient).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import SimpleNamespace

import torch
from kernels_common import main, sizes_of
from kernels_side import PLAIN, Case, compiled
from torch import Tensor

from nlgrpo import kernels
from nlgrpo.kernels import reference

BETAS = (0.0, 0.04)
TOKENS = 16_384
MANY_TOKENS = 1_048_576
LOGITS = {"cpu": {"B": 8, "L": 128, "V": 32_000}, "cuda": {"B": 16, "L": 512, "V": 151_936}}
CLIP = {"eps_low": 0.2, "eps_high": 0.2}

Loss = Callable[..., Tensor]
Side = Callable[[SimpleNamespace], tuple[Tensor, ...]]


def loss_side(function: Loss, beta: float) -> Side:
    return lambda x: (function(x.logprob, x.old, x.advantages, ref_logprob=x.ref, beta=beta, **CLIP),)


def loss_case(args: argparse.Namespace, T: int, beta: float) -> Case:
    sizes = sizes_of(args, {"cpu": {"T": T}, "cuda": {"T": T}}, {"T": 1000})

    def arguments(generator: torch.Generator, device: str) -> SimpleNamespace:
        logprob, old, ref, advantages = torch.randn(4, sizes["T"], generator=generator)
        old, ref = logprob + 0.2 * old, logprob + 0.2 * ref
        tensors = {"logprob": logprob, "old": old, "ref": ref if beta else None, "advantages": advantages}
        return SimpleNamespace(**{name: None if x is None else x.to(device) for name, x in tensors.items()})

    sides = {
        "ours": loss_side(kernels.policy_loss, beta),
        PLAIN: loss_side(reference.policy_loss, beta),
        "torch.compile": loss_side(compiled(reference.policy_loss), beta),
    }
    work = (4.0 * sizes["T"] * (6 if beta else 5), 12.0 * sizes["T"])
    label = f"beta {beta:g}"
    return Case("policy_loss", sizes, torch.float32, arguments, sides, work, wanted=("logprob",), label=label)


# --- from logits ------------------------------------------------------------------------------------------------------


def logits_side(logprob: Callable[..., tuple[Tensor, Tensor]], loss: Loss, beta: float) -> Side:
    """All rows of the logits are tokens; the last token of each sequence has no target."""

    def run(x: SimpleNamespace) -> tuple[Tensor]:
        values = logprob(x.logits.flatten(0, 1), x.targets.flatten())[0].view_as(x.old)
        advantages = x.advantages[:, None].expand_as(x.old)
        return (loss(values, x.old, advantages, ref_logprob=x.ref, beta=beta, **CLIP)[:, :-1].flatten(),)

    return run


def plain_logprob(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs without support for -100; the loss of those tokens is dropped afterwards."""
    return reference.token_logprob(logits, targets.clamp(min=0))


def liger(beta: float) -> Side:
    def run(x: SimpleNamespace) -> tuple[Tensor]:
        from liger_kernel.transformers.grpo_loss import triton_grpo_loss

        old, targets = x.old[:, :-1].contiguous(), x.targets[:, :-1].contiguous()
        ref = x.ref[:, :-1].contiguous() if beta else None
        options = {"temperature": 1.0, "beta": beta, "inplace": False, **CLIP}
        return (triton_grpo_loss(x.logits, old, ref, targets, x.advantages, **options)[0].flatten(),)

    return run


def logits_case(args: argparse.Namespace, beta: float) -> Case:
    sizes = sizes_of(args, LOGITS, {"B": 2, "L": 9, "V": 500})
    B, L, V = sizes["B"], sizes["L"], sizes["V"]
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32

    def arguments(generator: torch.Generator, device: str) -> SimpleNamespace:
        targets = torch.randint(V, (B, L), generator=generator).to(device)
        noise, advantages = torch.randn(2, B, L, generator=generator).to(device), torch.randn(B, generator=generator)
        torch.manual_seed(0)  # logits are created on the device
        logits = torch.randn(B, L, V, device=device, dtype=dtype)
        targets[:, -1] = -100
        logprob = kernels.token_logprob(logits.flatten(0, 1), targets.flatten())[0].view(B, L)
        old, ref = logprob + 0.2 * noise
        return SimpleNamespace(
            logits=logits, targets=targets, old=old, ref=ref if beta else None, advantages=advantages.to(device)
        )

    sides = {
        "ours": logits_side(kernels.token_logprob, kernels.policy_loss, beta),
        PLAIN: logits_side(plain_logprob, reference.policy_loss, beta),
        "torch.compile": compiled(logits_side(plain_logprob, reference.policy_loss, beta)),
    } | ({"Liger-Kernel": liger(beta)} if args.device == "cuda" else {})
    read = float(B * L * V * dtype.itemsize)
    return Case(
        "loss_from_logits", sizes, dtype, arguments, sides, (read, 2 * read), wanted=("logits",), label=f"beta {beta:g}"
    )


def cases(args: argparse.Namespace) -> list[Case]:
    betas = BETAS[1:] if args.quick else BETAS
    one = args.device == "cpu" or args.quick or "T" in args.sizes
    losses = [loss_case(args, T, beta) for T in ((TOKENS,) if one else (TOKENS, MANY_TOKENS)) for beta in betas]
    return losses + [logits_case(args, beta) for beta in betas]


if __name__ == "__main__":
    tests = {"policy_loss": ("test_policy_loss.py",), "loss_from_logits": ("test_policy_loss.py", "test_logprob.py")}
    main(__doc__, "policy_loss", tests, cases)
