"""Time the ops around the output matrix, forward and backward: ours, plain torch, torch.compile, Liger-Kernel.

    python bench/bench_logprob.py [--device cpu|cuda] [--quick] [--save] [--op token_logprob] [--sizes T=4096 V=32000]

    linear_logprob       hidden states and output matrix -> log-prob and entropy of each token, with a gradient for both
    linear_policy_loss   the same -> clipped policy-gradient loss, summed; computes its gradient in the forward
    token_logprob        logits -> log-prob and entropy

On a CPU in float32: T = 8,192 tokens, D = 512, V = 32,000, and T = 1,024 for token_logprob. On a GPU in bfloat16:
T = 16,384, D = 4,096, V = 151,936. Rates of the first two count the three matrix products that forward and backward
need at least, 6 T D V operations. A side that recomputes the logits does a fourth product; the table has a second floor
for it. token_logprob's floor reads the logits once per direction and writes their gradient.

Peak memory includes the gradients, which every side computes. From Liger-Kernel (`pip install liger-kernel`) the script
uses LigerFusedLinearScaledCrossEntropyFunction with its entropy (a CuTe kernel on an H100 or H200, which needs
`liger-kernel[cutedsl]`; blocks of 512 tokens in plain torch elsewhere) and LigerFusedLinearGRPOLoss (blocks of
sequences in plain torch, gradient in the forward, compiled loss). It has no differentiable log-prob from logits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from kernels_common import main, sizes_of
from kernels_side import PLAIN, Case, compiled
from torch import Tensor

from nlgrpo import kernels
from nlgrpo.kernels import reference

DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
HIDDEN = {"cpu": {"T": 8192, "D": 512, "V": 32_000}, "cuda": {"T": 16_384, "D": 4096, "V": 151_936}}
LOGITS = {"cpu": {"T": 1024, "V": 32_000}, "cuda": {"T": 16_384, "V": 151_936}}
SEQUENCES = 16  # of T / 16 tokens with one advantage each: Liger's loss takes only such advantages
BETA = 0.04

Side = Callable[[SimpleNamespace], tuple[Tensor, ...]]


# --- from hidden states -----------------------------------------------------------------------------------------------


def hidden_inputs(
    sizes: dict[str, int], dtype: torch.dtype, generator: torch.Generator, device: str
) -> SimpleNamespace:
    T, D, V = sizes["T"], sizes["D"], sizes["V"]
    hidden, weight = torch.randn(T, D, generator=generator), torch.randn(V, D, generator=generator) / D**0.5
    targets = torch.randint(V, (T,), generator=generator).to(device)
    return SimpleNamespace(hidden=hidden.to(device, dtype), weight=weight.to(device, dtype), targets=targets)


def products(sizes: dict[str, int]) -> float:
    """FLOP of one product of hidden states and output matrix."""
    return 2.0 * sizes["T"] * sizes["D"] * sizes["V"]


def logprob_side(function: Callable[..., tuple[Tensor, Tensor]]) -> Side:
    return lambda x: function(x.hidden, x.weight, x.targets)


def liger_logprob(x: SimpleNamespace) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(x.hidden, x.weight, x.targets, 1.0, -100, 1, True)
    return -nll, entropy


def linear_logprob_case(args: argparse.Namespace) -> Case:
    sizes, dtype = sizes_of(args, HIDDEN, {"T": 256, "D": 64, "V": 1000}), DTYPE[args.device]
    sides = {
        "ours": logprob_side(kernels.linear_logprob),
        PLAIN: logprob_side(reference.linear_logprob),
        "torch.compile": logprob_side(compiled(reference.linear_logprob)),
        "Liger-Kernel": liger_logprob,
    }
    once = products(sizes)
    return Case(
        "linear_logprob", sizes, dtype, partial(hidden_inputs, sizes, dtype), sides, (once, 2 * once), unit="FLOP",
        wanted=("hidden", "weight"), floors={"four products, logits made twice": 4 * once},
    )  # fmt: skip


# --- from hidden states to the loss -----------------------------------------------------------------------------------


def loss_inputs(sizes: dict[str, int], dtype: torch.dtype, generator: torch.Generator, device: str) -> SimpleNamespace:
    """Inputs of a policy that differs a little from the sampling policy and from the reference."""
    x = hidden_inputs(sizes, dtype, generator, device)
    noise = 0.2 * torch.randn(2, sizes["T"], generator=generator).to(device)
    x.old, x.ref = kernels.linear_logprob(x.hidden, x.weight, x.targets)[0] + noise
    x.by_sequence = torch.randn(SEQUENCES, generator=generator).to(device)
    x.advantages = x.by_sequence.repeat_interleave(sizes["T"] // SEQUENCES)
    x.token_weights = torch.full_like(x.old, 1 / sizes["T"])
    return x


def in_forward(x: SimpleNamespace) -> tuple[Tensor]:
    loss = kernels.linear_policy_loss(
        x.hidden, x.weight, x.targets, x.old, x.advantages,
        token_weights=x.token_weights, ref_logprob=x.ref, beta=BETA,
    )  # fmt: skip
    return (loss.loss,)


def loss_side(logprob: Callable[..., tuple[Tensor, Tensor]], policy_loss: Callable[..., Tensor]) -> Side:
    def run(x: SimpleNamespace) -> tuple[Tensor]:
        values, _ = logprob(x.hidden, x.weight, x.targets)
        loss = policy_loss(values, x.old, x.advantages, ref_logprob=x.ref, beta=BETA)
        return ((x.token_weights * loss).sum(),)

    return run


def liger_loss(x: SimpleNamespace) -> tuple[Tensor]:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    rows = (SEQUENCES, -1)
    old, ref, targets = x.old.view(rows), x.ref.view(rows), x.targets.view(rows)
    hidden, mask = x.hidden.view(*rows, x.hidden.shape[1]), torch.ones_like(old)
    loss = LigerFusedLinearGRPOLoss(beta=BETA)
    value, _ = loss(
        hidden, x.weight, targets, mask, x.by_sequence, ref_per_token_logps=ref, old_per_token_logps=old
    )  # fmt: skip
    return (value,)


def linear_policy_loss_case(args: argparse.Namespace) -> Case:
    sizes, dtype = sizes_of(args, HIDDEN, {"T": 256, "D": 64, "V": 1000}), DTYPE[args.device]
    if sizes["T"] % SEQUENCES:
        raise SystemExit(f"--sizes T={sizes['T']}: expected a multiple of {SEQUENCES} for linear_policy_loss")
    plain = loss_side(reference.linear_logprob, reference.policy_loss)
    sides = {
        "ours": in_forward,
        "ours, logits again": loss_side(kernels.linear_logprob, kernels.policy_loss),
        PLAIN: plain,
        "torch.compile": compiled(plain),
        "Liger-Kernel": liger_loss,
    }
    once = products(sizes)
    return Case(
        "linear_policy_loss", sizes, dtype, partial(loss_inputs, sizes, dtype), sides, (3 * once, 0.0), unit="FLOP",
        wanted=("hidden", "weight"), label=f"beta {BETA:g}",
        floors={"four products, logits made twice": 4 * once},
    )  # fmt: skip


# --- from logits ------------------------------------------------------------------------------------------------------


def logits_side(function: Callable[..., tuple[Tensor, Tensor]]) -> Side:
    return lambda x: function(x.logits, x.targets)


def token_logprob_case(args: argparse.Namespace) -> Case:
    sizes, dtype = sizes_of(args, LOGITS, {"T": 32, "V": 1000}), DTYPE[args.device]
    T, V = sizes["T"], sizes["V"]

    def arguments(generator: torch.Generator, device: str) -> SimpleNamespace:
        targets = torch.randint(V, (T,), generator=generator).to(device)
        torch.manual_seed(0)  # 2.5 billion logits are created on the device
        return SimpleNamespace(logits=torch.randn(T, V, device=device, dtype=dtype), targets=targets)

    sides = {
        "ours": logits_side(kernels.token_logprob),
        PLAIN: logits_side(reference.token_logprob),
        "torch.compile": logits_side(compiled(reference.token_logprob)),
    }
    read = float(T * V * dtype.itemsize)
    return Case("token_logprob", sizes, dtype, arguments, sides, (read, 2 * read), wanted=("logits",))


def cases(args: argparse.Namespace) -> list[Case]:
    return [linear_logprob_case(args), linear_policy_loss_case(args), token_logprob_case(args)]


if __name__ == "__main__":
    tests = {
        "linear_logprob": ("test_logprob.py",),
        "linear_policy_loss": ("test_linear_policy_loss.py", "test_logprob.py", "test_policy_loss.py"),
        "token_logprob": ("test_logprob.py",),
    }
    main(__doc__, "logprob", tests, cases)
