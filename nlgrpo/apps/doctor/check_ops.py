"""Every compiled CPU op compared with plain PyTorch in float64: results, gradients, and what is modified in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nlgrpo import kernels
from nlgrpo.apps.doctor.accuracy import Pair, against_float64, compare, normal
from nlgrpo.apps.doctor.check_machine import cpu_fields
from nlgrpo.apps.doctor.findings import Result, message
from nlgrpo.kernels import BlockWeights, Branches, Segments, ecdf, extension, reference

BOUND = 32  # roundings of the dtype, relative to the largest value
ADVICE = "set NLGRPO_EXT=0: every op then runs in plain PyTorch"


@dataclass(frozen=True)
class Case:
    """A comparison, and the ops of the torch namespace "nlgrpo" that it runs."""

    name: str
    ops: tuple[str, ...]
    pairs: Callable[[], list[Pair]]


def ops() -> Iterator[Result]:
    """Compare every compiled op with its reference."""
    if not extension.available():
        yield absent()
        return
    for case in CASES:
        yield compare(case.name, case.pairs, BOUND, ADVICE)


def absent() -> Result:
    """Say why the ops are not there: disabled, not built, or in a file that cannot be loaded."""
    if os.environ.get("NLGRPO_EXT") == "0":
        return Result("skipped", "disabled by NLGRPO_EXT=0: plain PyTorch runs instead")
    named = os.environ.get("NLGRPO_EXT")
    files = [Path(named)] if named else sorted(Path(extension.__file__).parent.glob("_ext*.so"))
    if not files:
        detail = "this install has none: plain PyTorch runs instead, slower on a CPU"
        return Result("skipped", detail, "install a C++ compiler, then pip install --no-build-isolation .")
    try:
        torch.ops.load_library(files[0])
    except OSError as error:
        advice = "install again with pip install --no-build-isolation . on this machine, or set NLGRPO_EXT=0"
        return Result("failed", f"cannot be loaded: {message(error.__cause__ or error)}", advice)
    return Result("failed", f"{files[0].name} was not loaded at the start, but can be now", "run the command again")


# --- cases ------------------------------------------------------------------------------------------------------------


def compiled(op: Callable[..., Any], *inputs: Tensor, gradients: bool = True) -> list[Pair]:
    """Compare ``op(*inputs, impl="cpp")`` with ``op(*inputs in float64, impl="torch")``."""
    return against_float64(partial(op, impl="cpp"), partial(op, impl="torch"), inputs, gradients=gradients)


def rms_norm() -> list[Pair]:
    return compiled(
        lambda x, weight, impl: kernels.rms_norm(x, weight, 1e-5, impl=impl), 3 * normal(33, 96), normal(96)
    )


def swiglu() -> list[Pair]:
    return compiled(kernels.swiglu, 4 * normal(33, 2 * 88))


def linear() -> list[Pair]:
    """Few rows and many, which are compiled separately, and without a gradient, as in decoding."""
    weight = normal(72, 128, seed=1)
    bias = normal(72, seed=2)
    pairs = compiled(kernels.linear, normal(150, 128), weight, bias)
    return pairs + compiled(kernels.linear, normal(5, 128), weight, bias, gradients=False)


def other_avx512() -> list[Pair]:
    """Whether the processor has AVX-512 and was not made by Intel, compared with what Linux says."""
    fields = cpu_fields()
    flags = set(fields.get("flags", "").split())
    expected = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags
    expected &= fields.get("vendor_id") != "GenuineIntel"
    found = torch.ops.nlgrpo.other_avx512()
    return [(torch.tensor(found), torch.tensor(expected if fields else found))]


def packed_attention() -> list[Pair]:
    segments = Segments([40, 30, 9, 21, 50], [None, 0, 0, 0, None])
    pairs = []
    angle = 3 * normal(150, 8, seed=1)
    for window in (None, 37):

        def op(qkv: Tensor, *, impl: str, window: int | None = window) -> Tensor:
            rope = angle.cos().to(qkv), angle.sin().to(qkv)
            return kernels.packed_attention(qkv, rope, segments, heads=4, scale=0.25, window=window, impl=impl)

        pairs += compiled(op, normal(150, 8, 16))
    return pairs


def branch_attention() -> list[Pair]:
    branches = Branches(torch.tensor([5, 12]), torch.tensor([1, 0, 1]))

    def op(qkv: Tensor, cos: Tensor, sin: Tensor, own: Tensor, prompts: Tensor, *, impl: str) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"heads": 4, "scale": 0.25, "window": 9, "impl": impl}
        return kernels.branch_attention(qkv, (cos, sin), own, 3, prompts, branches, **options), own

    angle = 3 * normal(6, 8, seed=1)
    cache = normal(2, 3, 2, 7, 16, seed=2), normal(2, 2, 2, 12, 16, seed=3)
    return compiled(op, normal(6, 8, 16), angle.cos(), angle.sin(), *cache, gradients=False)


def decode_block() -> list[Pair]:
    branches = Branches(torch.tensor([5, 12]), torch.tensor([1, 0, 1]))
    sizes = ((32,), (128, 32), (128,), (32, 64), (32,), (96, 32), (32, 48))
    weights = [0.3 * normal(*size, seed=10 + i) for i, size in enumerate(sizes)]

    def op(x: Tensor, cos: Tensor, sin: Tensor, own: Tensor, prompts: Tensor, *rest: Tensor, impl: str) -> Any:
        options: dict[str, Any] = {"eps": 1e-5, "heads": 4, "scale": 0.25, "impl": impl}
        return kernels.decode_block(x, BlockWeights(*rest), (cos, sin), own, 3, prompts, branches, **options), own

    angle = 3 * normal(3, 8, seed=1)
    cache = normal(2, 3, 2, 7, 16, seed=2), normal(2, 2, 2, 12, 16, seed=3)
    return compiled(op, normal(3, 32), angle.cos(), angle.sin(), *cache, *weights, gradients=False)


def targets_of(tokens: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(5))


def token_logprob() -> list[Pair]:
    options: dict[str, Any] = {"targets": targets_of(70, 1000), "temperature": 0.7}
    ours = partial(kernels.token_logprob, **options, impl="cpp")
    return against_float64(ours, partial(reference.token_logprob, **options), [3 * normal(70, 1000)])


def linear_logprob() -> list[Pair]:
    options: dict[str, Any] = {"targets": targets_of(70, 300), "temperature": 0.7}
    inputs = normal(70, 32), 0.5 * normal(300, 32, seed=1), normal(300, seed=2)
    return against_float64(
        lambda hidden, weight, bias: kernels.linear_logprob(hidden, weight, bias=bias, **options, impl="cpp"),
        lambda hidden, weight, bias: reference.linear_logprob(hidden, weight, bias=bias, **options),
        inputs,
    )


def linear_policy_loss() -> list[Pair]:
    """The fused loss, whose gradient is computed in the forward, against autograd through its definition."""
    hidden = normal(70, 32)
    weight = 0.5 * normal(300, 32, seed=1)
    targets = targets_of(70, 300)
    logprob = reference.linear_logprob(hidden, weight, targets)[0]
    old = logprob + 0.1 * normal(70, seed=4)
    ref = logprob + 0.3 * normal(70, seed=6)
    A = normal(70, seed=3)
    options: dict[str, Any] = {"beta": 0.1, "kl": "k3_iw"}

    def ours(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        found = kernels.linear_policy_loss(hidden, weight, targets, old, A, ref_logprob=ref, **options, impl="cpp")
        return found.loss, found.logprob, found.entropy

    def truth(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        constants = (old.double(), A.double())
        exact = options | {"ref_logprob": ref.double()}
        loss = reference.linear_policy_loss(hidden, weight, targets, *constants, **exact)
        return loss, *(x.detach() for x in reference.linear_logprob(hidden, weight, targets))

    return against_float64(ours, truth, [hidden, weight])


def sample_tokens() -> list[Pair]:
    noise = torch.rand(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def op(logits: Tensor, *, impl: str) -> tuple[Tensor, Tensor]:
        return kernels.sample_tokens(logits, noise, temperature=0.8, impl=impl)

    return compiled(op, 2 * normal(40, 1000), gradients=False)


def linearize() -> list[Pair]:
    """In both dtypes of the compiled op, with equal rewards."""
    rewards = (2 * normal(21, 13)).round() / 2
    weights = normal(13, seed=1).abs()
    exact = rewards.double(), weights.double()
    ours = partial(kernels.linearize, impl="cpp")
    pairs = against_float64(ours, reference.linearize, [rewards, weights])
    return pairs + against_float64(ours, reference.linearize, exact)


def samples() -> Tensor:
    return (8 * normal(6, 50)).round() / 4  # with equal ones


def ecdf_ranks() -> list[Pair]:
    weights = normal(6, 50, seed=1).abs().double()
    pairs = compiled(ecdf.ranks, samples(), gradients=False)
    return pairs + compiled(partial(ecdf.ranks, weights=weights), samples(), gradients=False)


def ecdf_argsort() -> list[Pair]:
    return compiled(ecdf.argsort, samples(), gradients=False)


def ecdf_evaluate() -> list[Pair]:
    return compiled(ecdf.cdf, samples(), 2 * normal(6, 30, seed=2), gradients=False)


def ecdf_merge() -> list[Pair]:
    a = samples().sort().values
    b = (2 * normal(6, 30, seed=2)).round().sort().values
    weights = normal(6, 50, seed=1).abs().double(), normal(6, 30, seed=3).abs().double()
    pairs = compiled(ecdf.merge, a, b, gradients=False)
    return pairs + compiled(partial(ecdf.merge, weights=weights), a, b, gradients=False)


def ecdf_first_nan() -> list[Pair]:
    x = normal(300)
    x[[137, 200]] = torch.nan
    found = torch.ops.nlgrpo.ecdf_first_nan(x), torch.ops.nlgrpo.ecdf_first_nan(normal(300))
    return [(torch.tensor(found), torch.tensor([137, -1]))]


EPILOGUE = ("logits_statistics", "logits_gradient")
CASES = (
    Case("rms_norm", ("rms_norm", "rms_norm_backward"), rms_norm),
    Case("swiglu", ("swiglu", "swiglu_backward"), swiglu),
    Case("linear", ("linear",), linear),
    Case("other_avx512", ("other_avx512",), other_avx512),
    Case("packed_attention", ("packed_attention", "packed_attention_backward"), packed_attention),
    Case("branch_attention", ("branch_attention",), branch_attention),
    Case("decode_block", ("decode_block",), decode_block),
    Case("token_logprob", ("token_logprob", "token_logprob_backward", *EPILOGUE), token_logprob),
    Case("linear_logprob", ("linear_logprob", "linear_logprob_backward", *EPILOGUE), linear_logprob),
    Case("linear_policy_loss", ("linear_policy_loss", "linear_policy_loss_backward", *EPILOGUE), linear_policy_loss),
    Case("sample_tokens", ("sample_tokens",), sample_tokens),
    Case("linearize", ("linearize", "linearize_backward", "linearize_rows"), linearize),
    Case("ecdf_ranks", ("ecdf_ranks",), ecdf_ranks),
    Case("ecdf_argsort", ("ecdf_argsort",), ecdf_argsort),
    Case("ecdf_evaluate", ("ecdf_evaluate",), ecdf_evaluate),
    Case("ecdf_merge", ("ecdf_merge",), ecdf_merge),
    Case("ecdf_first_nan", ("ecdf_first_nan",), ecdf_first_nan),
)
