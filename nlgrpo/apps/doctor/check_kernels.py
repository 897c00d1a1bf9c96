"""Every Triton kernel: on a GPU its error and its speed, elsewhere whether it compiles.

The comparisons also run in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nlgrpo
from nlgrpo import kernels
from nlgrpo.apps.doctor.accuracy import Pair, against_float64, judge, normal
from nlgrpo.apps.doctor.findings import Result, attempt
from nlgrpo.kernels import dispatch, reference
from nlgrpo.runtime.device import bandwidth

BOUND = 128  # roundings of float32; a GPU's exp and log are accurate to a few, and sums add in another order
ADVICE = "set NLGRPO_TRITON=0: every op then runs in plain PyTorch"
COMPILER = "reinstall triton (its ptxas may not fit this system), or set NLGRPO_TRITON=0 on a GPU"
TIMEOUT = 300.0  # seconds to compile all
WORKER = [sys.executable, "-m", "nlgrpo.apps.doctor.triton_builds"]

Work = tuple[Callable[[], object], int]  # a call to time, and the bytes that it must read and write


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel by its row in the table, the ops of "nlgrpo" that launch it, its comparison and its timing."""

    name: str
    ops: tuple[str, ...]
    pairs: Callable[[str], list[Pair]]
    work: Callable[[str], Work]


def triton_kernels() -> Iterator[Result]:
    """Compare and time every kernel on the first GPU; without a GPU, compile every kernel for three."""
    if importlib.util.find_spec("triton") is None:
        yield Result("skipped", "Triton is not installed, so ops on a GPU run in plain PyTorch")
    elif dispatch.DISABLED:
        yield Result("skipped", "disabled by NLGRPO_TRITON=0: plain PyTorch runs instead")
    elif torch.cuda.is_available():
        for kernel in KERNELS:
            yield attempt(kernel.name, lambda kernel=kernel: measure(kernel), ADVICE)  # type: ignore[misc]
    else:
        yield from builds()


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def measure(kernel: Kernel) -> Result:
    """Compare a kernel with float64 on the GPU, then time it."""
    result = judge(kernel.pairs("cuda"), BOUND, ADVICE)
    if result.status != "ok":
        return result
    from triton.testing import do_bench

    run, size = kernel.work("cuda")
    seconds = 1e-3 * float(do_bench(run, warmup=25, rep=100, return_mode="median"))
    limit = bandwidth(torch.cuda.get_device_name())
    speed = f"{1e3 * seconds:.3g} ms, {size / seconds / 1e12:.2f} TB/s{share(size / seconds, limit)}"
    numbers = dict(result.numbers) | {"kernel_seconds": seconds, "bytes": size, "roofline_bytes_per_second": limit}
    return Result("ok", f"{result.detail}, {speed}", numbers=numbers)


def share(achieved: float, limit: float | None) -> str:
    return ", roofline unknown" if limit is None else f", {achieved / limit:.0%} of the bandwidth"


def logits(rows: int, vocabulary: int, device: str) -> tuple[Tensor, Tensor]:
    """Random logits (rows, vocabulary) in float32, and targets."""
    targets = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(5))
    return 3 * normal(rows, vocabulary, device=device), targets.to(device)


def statistics_pairs(device: str) -> list[Pair]:
    return _token_pairs(device, gradients=False)


def gradient_pairs(device: str) -> list[Pair]:
    return _token_pairs(device, gradients=True)[2:]  # after log-prob and entropy


def _token_pairs(device: str, gradients: bool) -> list[Pair]:
    x, targets = logits(9, 5000, device)
    options: dict[str, Any] = {"targets": targets, "temperature": 0.7}
    return against_float64(
        lambda x: kernels.token_logprob(x, **options, impl="triton"),
        lambda x: reference.token_logprob(x, **options),
        [x],
        gradients=gradients,
    )


def statistics_work(device: str) -> Work:
    from nlgrpo.kernels import epilogue_triton

    x, targets = large_logits(device)
    return lambda: epilogue_triton.statistics(x, targets, 0.7), x.nbytes


def gradient_work(device: str) -> Work:
    from nlgrpo.kernels import epilogue_triton

    x, targets = large_logits(device)
    _, entropy, kept = epilogue_triton.statistics(x, targets, 0.7)
    grad = torch.ones(len(x), device=device)
    out = torch.empty_like(x)
    return lambda: epilogue_triton.gradient(x, targets, kept, entropy, grad, grad, 0.7, out), 2 * x.nbytes


def large_logits(device: str) -> tuple[Tensor, Tensor]:
    """Logits (2048, 131072) in bfloat16, 512 MiB, and their targets."""
    x = torch.randn(2048, 131_072, device=device, dtype=torch.bfloat16)
    return x, torch.randint(x.shape[1], (len(x),), device=device)


def policy_pairs(device: str) -> list[Pair]:
    T = 3000
    logprob = -normal(T, device=device).abs()
    old, ref = (logprob + scale * normal(T, seed=i, device=device) for i, scale in ((1, 0.3), (2, 0.5)))
    A = normal(T, seed=3, device=device)
    options: dict[str, Any] = {"beta": 2.0, "kl": "k3_iw"}

    def with_statistics(logprob: Tensor, impl: str) -> tuple[Tensor, ...]:
        given = [x.to(logprob) for x in (old, A, ref)]
        loss, statistics = kernels.policy_loss_with_statistics(
            logprob, *given[:2], ref_logprob=given[2], **options, impl=impl
        )
        return loss, *(x.to(loss) for x in statistics.values())

    plain = partial(with_statistics, impl="torch")  # the functions in `reference`
    return against_float64(partial(with_statistics, impl="triton"), plain, [logprob])


def policy_work(device: str) -> Work:
    from nlgrpo.kernels import policy_loss_triton
    from nlgrpo.kernels.reference import PolicyLossSettings

    logprob, old, A, ref = torch.randn(4, 2**25, device=device)
    settings = PolicyLossSettings(beta=0.1)
    arrays = 4 + 3  # read, written
    return lambda: policy_loss_triton.policy_loss(logprob, old, A, None, ref, None, settings), arrays * logprob.nbytes


def sample_pairs(device: str) -> list[Pair]:
    """Integers must be equal: no noise of these lies within the rounding of a border between two tokens."""
    x, _ = logits(9, 5000, device)
    noise = torch.linspace(0.01, 0.97, len(x), dtype=torch.float64, device=device)
    ours = kernels.sample_tokens(x, noise, temperature=0.7, impl="triton")
    return list(zip(ours, reference.sample_tokens(x.double(), noise, 0.7), strict=True))


def sample_work(device: str) -> Work:
    x, _ = large_logits(device)
    noise = torch.rand(len(x), dtype=torch.float64, device=device)
    return lambda: kernels.sample_tokens(x, noise, impl="triton"), x.nbytes


def groups(P: int, M: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Rewards (P, M), some of them equal, and positive weights (M,)."""
    rewards = (4 * normal(P, M, device=device)).round() / 4
    return rewards.to(dtype), normal(M, seed=1, device=device).abs().to(dtype)


def _linearize(name: str, M: int, dtype: torch.dtype) -> Kernel:
    def pairs(device: str) -> list[Pair]:
        given = groups(2, M, dtype, device)
        ours = kernels.linearize(*given, impl="triton")
        return [(ours, reference.linearize(*(x.double() for x in given)))]

    def work(device: str) -> Work:
        from nlgrpo.kernels import linearize_triton

        rewards = torch.randn(2**24 // M, M, device=device, dtype=dtype)
        weights = torch.rand(M, device=device, dtype=dtype)
        return lambda: linearize_triton.linearize(rewards, weights), 2 * rewards.nbytes

    return Kernel(name, ("linearize",), pairs, work)


TOKENS = ("token_logprob", "token_logprob_backward")
KERNELS = (
    Kernel("statistics", TOKENS, statistics_pairs, statistics_work),
    Kernel("gradient", TOKENS, gradient_pairs, gradient_work),
    Kernel("sample", (), sample_pairs, sample_work),
    Kernel("policy_loss", ("policy_loss", "policy_loss_backward"), policy_pairs, policy_work),
    _linearize("linearize", 64, torch.float32),
    _linearize("linearize float64", 64, torch.float64),
    _linearize("linearize chunks", 1500, torch.float32),
    _linearize("linearize chunks float64", 300, torch.float64),
)


# --- without a GPU ----------------------------------------------------------------------------------------------------


def builds() -> Iterator[Result]:
    """Compile at least one case of every kernel, in a process with an empty cache; a result per case."""
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for line in lines_of(WORKER, {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder}):
            found.setdefault(line["kernel"], []).append(line)
    for name, targets in found.items():
        yield built(name, targets)
    detail = "no GPU: errors and times are not checked, nor compilation for other dtypes, sizes and targets"
    yield Result("skipped", detail, part="on a GPU")


def built(name: str, targets: list[dict[str, Any]]) -> Result:
    """Result of one case, compiled for several ``targets``."""
    seconds = sum(target["seconds"] for target in targets)
    for target in targets:
        if "error" in target:
            return Result("failed", f"sm_{target['sm']}: {target['error']}", COMPILER, name, seconds=seconds)
    shared = max(target["shared"] for target in targets)
    names = ", ".join(f"sm_{target['sm']}" for target in targets)
    detail = f"compiles for {names}; {shared} bytes of shared memory"
    return Result("ok", detail, part=name, numbers={"shared_bytes": shared}, seconds=seconds)


def lines_of(command: list[str], environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines that a process prints. Raises RuntimeError if it fails or takes longer than `TIMEOUT`."""
    paths = [str(Path(nlgrpo.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    full = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=full) as process,
    ):
        late = threading.Timer(TIMEOUT, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            yield from map(json.loads, process.stdout)
            status = process.wait()
        finally:
            expired = not late.is_alive()
            late.cancel()
            process.kill()
        if status:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["no message"])[-1]
            why = f"stopped after {TIMEOUT:g} s" if expired else f"status {status}: {last}"
            raise RuntimeError(f"the process that compiles ended early, {why}")
