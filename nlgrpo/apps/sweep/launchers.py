"""Where the runs of a sweep are started: as processes of this machine, or as jobs of a cluster through submitit.

A launcher starts a run and returns a `Running`, which the sweep polls and may stop.
"""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from nlgrpo.apps.sweep import job
from nlgrpo.apps.sweep.options import SlurmOptions
from nlgrpo.apps.sweep.state import Point, State
from nlgrpo.errors import UserError
from nlgrpo.runtime.supervision import ending_with_parent

JOBS = "jobs"  # folder of submitit in the folder of the sweep
Cluster = Literal["slurm", "local"]


class Running(Protocol):
    """A started run."""

    @property
    def job(self) -> str:
        """Id of its job on a cluster, or "" for a process."""

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; None while it waits or runs."""

    def state(self) -> State:
        """Return "queued" or "running" of a run that has not ended."""

    def stop(self) -> None:
        """Tell it to save and stop; a second time: to end now."""

    def failure(self) -> str:
        """Describe an end that the run's own log cannot explain, or return ""."""


class Launcher(Protocol):
    @property
    def interval(self) -> float:
        """Seconds between two polls."""

    @property
    def resubmits(self) -> bool:
        """Whether to start a run again that a signal from outside has stopped."""

    def start(self, arguments: Sequence[str], point: Point, slot: int) -> Running:
        """Run `nlgrpo` with ``arguments`` and append its output to the point's log."""


def command(arguments: Sequence[str], ranks: int, nodes: int = 1) -> list[str]:
    """Command line that runs `nlgrpo` with these arguments, under torchrun if there are several ranks.

    With several nodes, each of them runs it, and `job.run` sets where they meet.
    """
    line = [sys.executable]
    if nodes > 1:
        line += ["-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"]
        line += ["--rdzv-backend=c10d"]
    elif ranks > 1:
        line += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*line, "-m", "nlgrpo.cli", *arguments]


def visible_gpus() -> list[str]:
    """Names of the visible GPUs, as in CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if named:
        return named.split(",")[:count]
    return [str(i) for i in range(count)]


def _python_settings() -> dict[str, str]:
    """Environment variables of every run."""
    settings = {"PYTHONUNBUFFERED": "1"}  # keeps output and errors in order in the log
    if not {"", os.getcwd()} & set(sys.path):  # else `python -m` would put this folder on the path
        settings["PYTHONSAFEPATH"] = "1"
    return settings


# --- processes of this machine ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalRun:
    """A process with its own session: a Ctrl-C goes to the terminal's whole process group, and the ranks of a torchrun
    would get it twice. If the sweep is killed, the run saves and stops."""

    process: subprocess.Popen[bytes]
    job: str = ""

    def poll(self) -> int | None:
        return self.process.poll()

    def state(self) -> State:
        return "running"

    def stop(self) -> None:
        self.process.terminate()

    def failure(self) -> str:
        return ""


@dataclass(frozen=True)
class LocalLauncher:
    """Runs points as processes, each of ``jobs`` slots on its own GPUs and its share of the cores."""

    ranks: int
    jobs: int
    lock: int  # descriptor of the folder's lock, which every run inherits
    interval: float = 0.05
    resubmits: bool = False

    def start(self, arguments: Sequence[str], point: Point, slot: int) -> LocalRun:
        line = command(arguments, self.ranks)
        with point.log.open("ab") as log:
            log.write(f"$ {shlex.join(line)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                ending_with_parent.command(line),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(slot, self.ranks, self.jobs),
                pass_fds=[self.lock],
                start_new_session=True,
            )
        return LocalRun(process)


def _environment(slot: int, ranks: int, jobs: int) -> dict[str, str]:
    """Environment of the run in one of ``jobs`` slots; several slots get their own GPUs and a share of the cores."""
    environment = os.environ | _python_settings()
    if jobs > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // (jobs * ranks)))
        if gpus := visible_gpus():
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot * ranks : (slot + 1) * ranks])
    return environment


# --- jobs of a cluster ------------------------------------------------------------------------------------------------


def submitit() -> Any:
    """Import submitit. Raises UserError if it is not installed."""
    try:
        return importlib.import_module("submitit")
    except ImportError as error:
        raise UserError(
            "--launcher slurm needs submitit, which is not installed; install it with: pip install 'nlgrpo[slurm]'"
        ) from error


@dataclass
class SubmititLauncher:
    """Runs points as jobs of a cluster. ``cluster`` "local" is for tests: submitit starts the jobs on this machine."""

    folder: Path
    ranks: int
    options: SlurmOptions
    cluster: Cluster = "slurm"
    interval: float = 1.0
    resubmits: bool = True
    calls: threading.RLock = field(default_factory=threading.RLock)  # submitit is not safe to call from several threads

    def __post_init__(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # parameters that the other cluster does not have
                self.executor = submitit().AutoExecutor(self.folder / JOBS, cluster=self.cluster)
                self.executor.update_parameters(**self.options.parameters())
        except RuntimeError as error:
            raise UserError(f"--launcher slurm: {error}; start the sweep where sbatch and srun are") from error

    def start(self, arguments: Sequence[str], point: Point, slot: int) -> SubmittedRun:
        """Submit a run, or attach to the job of an earlier sweep that was killed."""
        if point.job and point.state in ("queued", "running") and self.cluster == "slurm":
            tasks = list(range(self.options.nodes))
            known = submitit().SlurmJob(folder=self.folder / JOBS, job_id=point.job, tasks=tasks)
            return SubmittedRun(known, self.calls)
        line = command(arguments, self.ranks, self.options.nodes)
        with point.log.open("ab") as log:
            log.write(f"$ {shlex.join(line)}\n".encode())
        with self.calls:
            submitted = self.executor.submit(
                job.run, line, str(point.log.absolute()), _python_settings(), self.options.nodes
            )
        return SubmittedRun(submitted, self.calls)


@dataclass
class SubmittedRun:
    """A job of submitit."""

    handle: Any  # submitit.Job
    calls: threading.RLock
    stops: int = 0
    ended: str = ""

    @property
    def job(self) -> str:
        return str(self.handle.job_id)

    @property
    def _local(self) -> bool:
        """Whether this is a job of submitit's local cluster."""
        return hasattr(self.handle, "_process")

    def poll(self) -> int | None:
        with self.calls:
            if not self.handle.done():
                return None
        try:
            statuses = [int(status) for status in self.handle.results()]
        except Exception as error:  # of any type: an exception in the job is raised here
            with self.calls:
                state = self.handle.state
            lines = [line for line in str(error).splitlines() if line.strip()]
            reason = lines[-1] if lines else type(error).__name__
            self.ended = f"job {self.job} ended in state {state}: {reason}"
            return 1
        if -signal.SIGTERM in statuses:
            # a preempted job may be in the queue again, and must not run beside the next
            if not self._local:
                with self.calls:
                    self.handle.cancel(check=False)
            return -signal.SIGTERM
        return next((status for status in statuses if status != 0), 0)

    def state(self) -> State:
        with self.calls:
            waits = self.handle.state.upper() in ("PENDING", "UNKNOWN", "REQUEUED")
        return "queued" if waits else "running"

    def stop(self) -> None:
        """Send SIGTERM to a run; cancel a job that waits, or, the second time, a run too."""
        self.stops += 1
        with self.calls:
            if self._local:  # its `cancel` kills after a second
                self.handle._process.send_signal(signal.SIGTERM)
            elif self.stops > 1 or self.handle.get_info().get("State", "PENDING").upper().startswith("PEND"):
                self.handle.cancel(check=False)
            else:
                subprocess.run(["scancel", "--signal=TERM", self.job], check=False)  # nosec B607  # of the user's PATH

    def failure(self) -> str:
        return self.ended


def launcher(name: str, folder: Path, ranks: int, jobs: int, lock: int, slurm: SlurmOptions | None = None) -> Launcher:
    """Build the launcher "local", "slurm" or "submitit-local". Raises UserError without submitit or SLURM."""
    if name == "local":
        return LocalLauncher(ranks, jobs, lock)
    cluster: Cluster = "local" if name == "submitit-local" else "slurm"
    return SubmititLauncher(folder, ranks, slurm or SlurmOptions(), cluster)
