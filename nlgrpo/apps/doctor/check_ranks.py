"""All-reduce between ranks on this machine, in processes of their own that are stopped after a timeout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nlgrpo.apps.doctor.findings import Result

WORKER = Path(__file__).with_name("rank_worker.py")
TIMEOUT = 120.0  # seconds for all ranks, of which importing torch takes most
GLOO = "set GLOO_SOCKET_IFNAME to the interface of 127.0.0.1, such as lo, and check the host's own name in /etc/hosts"
NCCL = "run again with NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1 avoids a broken path between GPUs"


class RankError(RuntimeError):
    """A rank that died, hung, or computed another sum."""


def ranks() -> Iterator[Result]:
    """Sum over two ranks by gloo, and over all GPUs by NCCL."""
    yield all_reduce("gloo", 2, GLOO)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        yield all_reduce("nccl", gpus, NCCL)
    else:
        yield Result("skipped", "no GPU", part="nccl")


def all_reduce(backend: str, world: int, advice: str) -> Result:
    """Compare the sum over ``world`` ranks with the exact one."""
    try:
        found = run_ranks(backend, world)
        for rank, printed in enumerate(found):
            check_sums(rank, world, printed["sums"])
    except RankError as error:
        return Result("failed", str(error), advice, backend)
    seconds = max(printed["seconds"] for printed in found)
    size = found[0]["bytes"]
    detail = f"{world} rank{'s' * (world > 1)}, exact sum; {size / 2**20:.0f} MiB in {1e3 * seconds:.3g} ms"
    return Result("ok", detail, part=backend, numbers={"ranks": world, "bytes": size, "all_reduce_seconds": seconds})


def check_sums(rank: int, world: int, sums: list[float]) -> None:
    """Raise RankError unless ``sums`` is 0, s, 2 s, .. with s = 1 + .. + ``world``."""
    exact = [float(world * (world + 1) // 2 * i) for i in range(len(sums))]
    if not sums or sums != exact:
        raise RankError(f"rank {rank} has the sums {sums[:4]}, expected {exact[:4]}")


def run_ranks(backend: str, world: int) -> list[dict[str, Any]]:
    """Return what each rank printed. Raises RankError for one that dies, and at the timeout; no process remains."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}.err") for rank in range(world)]
        started = []
        try:
            for rank in range(world):
                command = [sys.executable, "-P", str(WORKER), backend, str(rank), str(world), f"{folder}/store"]
                with logs[rank].open("w") as log:
                    started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=_environment()))
            _wait(started, logs)
            return [json.loads(process.stdout.read()) for process in started if process.stdout is not None]
        finally:
            for process in started:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()


def _environment() -> dict[str, str]:
    """The environment with one thread per rank, and without torchrun's own numbers of ranks."""
    launched = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in os.environ.items() if name not in launched} | {"OMP_NUM_THREADS": "1"}


def _wait(started: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while any(process.poll() is None for process in started):
        _refuse_failed(started, logs)
        if time.monotonic() > deadline:
            late = [rank for rank, process in enumerate(started) if process.poll() is None]
            raise RankError(f"no result within {TIMEOUT:g} s from rank {', '.join(map(str, late))} of {len(started)}")
        time.sleep(0.05)
    _refuse_failed(started, logs)


def _refuse_failed(started: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    for rank, process in enumerate(started):
        if process.poll():
            lines = [line for line in logs[rank].read_text(errors="replace").splitlines() if line.strip()]
            why = f": {lines[-1].strip()}" if lines else ""
            raise RankError(f"rank {rank} of {len(started)} ended with status {process.returncode}{why}")
