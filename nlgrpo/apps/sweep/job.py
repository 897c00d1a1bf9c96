"""What a job of a cluster runs on each of its nodes: the command line of a run. It imports nothing of the trainer."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)  # submitit requests SIGUSR2 before the time limit
# torchrun waits 30 seconds by default before it kills ranks; SLURM sends SIGUSR2 90 seconds before the limit.
SAVING_SECONDS = 80


def run(line: Sequence[str], log: str, environment: Mapping[str, str], nodes: int) -> int:
    """Run ``line`` with its output appended to ``log``; return its exit status.

    A signal is passed on once as SIGTERM, on which the run saves and stops; the result is then -SIGTERM, whatever
    status torchrun has. The nodes of a job meet at the first one.
    """
    node = 0
    settings = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVING_SECONDS), **environment}
    if nodes > 1:
        import submitit

        place = submitit.JobEnvironment()
        node = place.global_rank
        number = int(place.job_id.split("_")[0])
        settings |= {"PET_RDZV_ENDPOINT": f"{place.hostnames[0]}:{20000 + number % 10000}"}
        settings |= {"PET_RDZV_ID": str(number)}  # torchrun reads PET_<option>
    path = Path(log)
    path = path.with_name(f"{path.stem}.node-{node}.log") if node else path
    return _with_signals(line, path, os.environ | settings)


def _with_signals(line: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
    received = list[int]()
    processes = list[subprocess.Popen[bytes]]()

    def forward(number: int, frame: FrameType | None) -> None:
        if processes and not received:
            processes[0].terminate()
        received.append(number)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    with log.open("ab") as output:
        process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    processes.append(process)
    if received:  # while the process was started
        process.terminate()
    status = process.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    return -signal.SIGTERM if received else status
