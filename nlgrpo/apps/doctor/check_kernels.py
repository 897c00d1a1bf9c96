"""Every Triton kernel: on a GPU its error, elsewhere whether it compiles.

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
from nlgrpo.apps.doctor.accuracy import Pair, against_float64, compare, normal
from nlgrpo.apps.doctor.findings import Result
from nlgrpo.kernels import dispatch, reference

BOUND = 128  # roundings of float32; a GPU's exp and log are accurate to a few, and sums add in another order
ADVICE = "set NLGRPO_TRITON=0: every op then runs in plain PyTorch"
COMPILER = "reinstall triton (its ptxas may not fit this system), or set NLGRPO_TRITON=0 on a GPU"
TIMEOUT = 300.0  # seconds to compile all
WORKER = [sys.executable, "-m", "nlgrpo.apps.doctor.triton_builds"]


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel by its row in the table, the ops of "nlgrpo" that launch it, and its comparison on a device."""

    name: str
    ops: tuple[str, ...]
    pairs: Callable[[str], list[Pair]]


def triton_kernels() -> Iterator[Result]:
    """Compare every kernel with float64 on the first GPU; without a GPU, compile every kernel for three."""
    if importlib.util.find_spec("triton") is None:
        yield Result("skipped", "Triton is not installed, so ops on a GPU run in plain PyTorch")
    elif dispatch.DISABLED:
        yield Result("skipped", "disabled by NLGRPO_TRITON=0: plain PyTorch runs instead")
    elif torch.cuda.is_available():
        for kernel in KERNELS:
            yield compare(kernel.name, partial(kernel.pairs, "cuda"), BOUND, ADVICE)
    else:
        yield from builds()


# --- on a GPU ---------------------------------------------------------------------------------------------------------


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


def sample_pairs(device: str) -> list[Pair]:
    """Integers must be equal: no noise of these lies within the rounding of a border between two tokens."""
    x, _ = logits(9, 5000, device)
    noise = torch.linspace(0.01, 0.97, len(x), dtype=torch.float64, device=device)
    ours = kernels.sample_tokens(x, noise, temperature=0.7, impl="triton")
    return list(zip(ours, reference.sample_tokens(x.double(), noise, 0.7), strict=True))


def groups(P: int, M: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Rewards (P, M), some of them equal, and positive weights (M,)."""
    rewards = (4 * normal(P, M, device=device)).round() / 4
    return rewards.to(dtype), normal(M, seed=1, device=device).abs().to(dtype)


def _linearize(name: str, M: int, dtype: torch.dtype) -> Kernel:
    def pairs(device: str) -> list[Pair]:
        given = groups(2, M, dtype, device)
        ours = kernels.linearize(*given, impl="triton")
        return [(ours, reference.linearize(*(x.double() for x in given)))]

    return Kernel(name, ("linearize",), pairs)


TOKENS = ("token_logprob", "token_logprob_backward")
KERNELS = (
    Kernel("statistics", TOKENS, statistics_pairs),
    Kernel("gradient", TOKENS, gradient_pairs),
    Kernel("sample", (), sample_pairs),
    Kernel("policy_loss", ("policy_loss", "policy_loss_backward"), policy_pairs),
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
    detail = "no GPU: errors are not checked, nor compilation for other dtypes, sizes and targets"
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
