"""Options of ``nlgrpo sweep``; without PyTorch, so that ``--help`` takes no seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

ABOUT = """Train a grid: nlgrpo sweep [recipe] [file.toml] --loss.beta 1e-2,1e-1 --objective mean,bon:4 --seed 0,1,2

Keys are those of `nlgrpo train`; --objective sets the objective of all rewards, and --seed is --train.seed. An option
with several values, separated by commas, is an axis of the grid. Commas inside brackets and quotes do not separate:
'length(target=25, scale=128)' is one value. Quotes around a value, as in "'distortion:0,1,2',mean", are removed. For a
key that is a list, write every value in brackets: --evaluation.ns [1,4],[1,8].

The same command resumes: finished points are skipped and stopped points continue. More values add points.

With --launcher slurm each point is a job of a SLURM cluster, with the resources of --slurm.*."""
LauncherName = Literal["local", "slurm", "submitit-local"]


@dataclass
class SlurmOptions:
    """Resources of each job of `--launcher slurm`. The names are submitit's."""

    partition: str | None = None
    """Partition. None: the cluster's default."""
    timeout_min: int = 60
    """Time limit of a job in minutes. 90 seconds before it, the run saves and is submitted again."""
    nodes: int = 1
    """Nodes per run. Each starts --nproc-per-node ranks."""
    gpus_per_node: int | None = None
    """GPUs per node. None: request none."""
    cpus_per_task: int | None = None
    """CPU cores per node. None: the cluster's default."""
    mem_gb: float | None = None
    """Memory per node in GB. None: the cluster's default."""
    account: str | None = None
    """Account that is charged."""
    setup: tuple[str, ...] = ()
    """Shell commands before each run, such as "module load cuda"."""
    extra: tuple[str, ...] = ()
    """Other options of sbatch as NAME=VALUE, such as qos=high or constraint=a100."""

    def faults(self, ranks: int) -> list[str]:
        """Return what is out of range, one line each."""
        wrong = list[tuple[str, object, str]]()
        if self.timeout_min < 3:
            wrong.append(("timeout-min", self.timeout_min, ">= 3, because runs are stopped 90 seconds before"))
        if self.nodes < 1:
            wrong.append(("nodes", self.nodes, ">= 1"))
        if self.gpus_per_node is not None and self.gpus_per_node < ranks:
            wrong.append(("gpus-per-node", self.gpus_per_node, f"none or >= --nproc-per-node = {ranks}"))
        if self.cpus_per_task is not None and self.cpus_per_task < 1:
            wrong.append(("cpus-per-task", self.cpus_per_task, "none or >= 1"))
        if self.mem_gb is not None and not self.mem_gb > 0:
            wrong.append(("mem-gb", self.mem_gb, "none or > 0"))
        if not all(pair.partition("=")[2] for pair in self.extra):
            wrong.append(("extra", self.extra, "NAME=VALUE .."))
        return [f"--slurm.{name} = {value}: allowed is {allowed}" for name, value, allowed in wrong]

    def parameters(self) -> dict[str, Any]:
        """Parameters of submitit's AutoExecutor."""
        extra = {}
        for pair in self.extra:
            name, _, value = pair.partition("=")
            extra[name.lstrip("-")] = value
        return {
            "name": "nlgrpo",
            "timeout_min": self.timeout_min,
            "nodes": self.nodes,
            "tasks_per_node": 1,
            "gpus_per_node": self.gpus_per_node,
            "cpus_per_task": self.cpus_per_task,
            "mem_gb": self.mem_gb,
            "stderr_to_stdout": True,
            "slurm_partition": self.partition,
            "slurm_account": self.account,
            "slurm_setup": list(self.setup) or None,
            "slurm_additional_parameters": extra or None,
        }


@dataclass
class Options:
    """Options in addition to the configuration keys."""

    out: Path | None = None
    """Folder of the sweep. None: runs/<recipe>-sweep."""
    retry: bool = False
    """Run failed points again, from their checkpoints."""
    dry_run: bool = False
    """Check and list all points, and run nothing."""
    nproc_per_node: int = 1
    """Ranks per run. torchrun starts the run if there are several."""
    jobs: int | None = None
    """Points that run at the same time, each on its own cores and GPUs. None: 1, and with --launcher slurm all."""
    launcher: LauncherName = "local"
    """Run points as processes of this machine, or each as a job of SLURM. submitit-local is for tests: the same jobs,
    on this machine."""
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    """Resources of each job."""


def read_options(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Return the options, and the arguments that are left: the grid."""
    return tyro.cli(Options, args=list(arguments), prog="nlgrpo sweep", description=ABOUT, return_unknown_args=True)
