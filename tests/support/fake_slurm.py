"""A stand-in for SLURM on one machine: sbatch, srun, sacct, scancel and scontrol, whose "nodes" are processes of it.

`install` writes the commands into a folder for PATH. The folder of a job has its script, its options, its state and the
process ids of its batch script and tasks. While the file ``hold`` exists, jobs wait in the queue.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("sbatch", "srun", "sacct", "scancel", "scontrol")


def install(folder: Path) -> dict[str, str]:
    """Write the commands into ``folder`` and return the environment that finds them."""
    (folder / "bin").mkdir(parents=True)
    for name in COMMANDS:
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {__file__} {folder} {name} "$@"\n')
        script.chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def end(folder: Path) -> None:
    """End the jobs that still run."""
    for job in (path for path in folder.iterdir() if path.name.isdigit()):
        _set_state(job, "CANCELLED")
        for name, number in (("controller", signal.SIGKILL), ("batch", signal.SIGKILL), ("tasks", signal.SIGTERM)):
            for pid in (job / name).read_text().split() if (job / name).exists() else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), number)


def options(script: str) -> dict[str, str]:
    """Options of the #SBATCH lines of a script, by name."""
    lines = [line.split("#", 2)[1] for line in script.splitlines() if line.startswith("#SBATCH ")]
    pairs = (line.removeprefix("SBATCH").strip().lstrip("-").partition("=") for line in lines)
    return {name: value.strip("'\"") for name, _, value in pairs}


def sbatch(folder: Path, arguments: list[str]) -> int:
    script, *rest = arguments
    first = int((folder / "first").read_text()) if (folder / "first").exists() else 101
    number = first + sum(1 for path in folder.iterdir() if path.name.isdigit())
    job = folder / str(number)
    job.mkdir()
    text = Path(script).read_text()
    (job / "script").write_text(text)
    (job / "options").write_text(json.dumps(options(text)))
    _set_state(job, "PENDING")
    if os.fork() == 0:
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(quiet, descriptor)
        _batch(folder, job, rest)
        os._exit(0)
    print(f"Submitted batch job {number}")
    return 0


def _set_state(job: Path, state: str) -> None:
    """Write the state at once: others read the file."""
    partial = job / f"state-{os.getpid()}"
    partial.write_text(state)
    partial.rename(job / "state")


def _batch(folder: Path, job: Path, arguments: list[str]) -> None:
    """Wait in the queue, run the script, and again after `scontrol requeue`."""
    (job / "controller").write_text(str(os.getpid()))
    given = json.loads((job / "options").read_text())
    nodes, tasks = int(given.get("nodes", 1)), int(given.get("ntasks-per-node", 1))
    environment = os.environ | {
        "SLURM_JOB_ID": job.name,
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(nodes * tasks),
        "SLURM_JOB_NODELIST": "localhost",
    }
    again = True
    while again:
        while (folder / "hold").exists():
            time.sleep(0.02)
            if (job / "state").read_text() == "CANCELLED":
                return
        _set_state(job, "RUNNING")
        output = given.get("output", "slurm-%j.out").replace("%j", job.name)
        with open(output, "ab") as log:
            script = subprocess.Popen(
                ["bash", str(job / "script"), *arguments], env=environment, stdout=log, stderr=log
            )
        (job / "batch").write_text(str(script.pid))
        status = script.wait()
        (job / "tasks").unlink(missing_ok=True)
        (job / "batch").unlink(missing_ok=True)
        again = (job / "requeued").exists()
        (job / "requeued").unlink(missing_ok=True)
        if (job / "state").read_text() != "CANCELLED":
            _set_state(job, "PENDING" if again else "FAILED" if status else "COMPLETED")
    (job / "controller").unlink(missing_ok=True)


def srun(folder: Path, arguments: list[str]) -> int:
    """Run the command once per task, each with the variables of its "node"; signals go to all tasks, as with srun."""
    job, output, error = folder / os.environ["SLURM_JOB_ID"], "", ""
    while arguments[0].startswith("--"):
        name = arguments.pop(0)
        if name in ("--output", "--error"):
            value = arguments.pop(0)
            output, error = (value, error) if name == "--output" else (output, value)
    count, running = int(os.environ["SLURM_NTASKS"]), []
    for task in range(count):
        environment = os.environ | {"SLURM_PROCID": str(task), "SLURM_NODEID": str(task), "SLURM_LOCALID": "0"}
        path = output.replace("%j", job.name).replace("%t", str(task))
        log = open(path, "ab") if path else None  # noqa: SIM115
        running.append(subprocess.Popen(arguments, env=environment, stdout=log, stderr=log))
    (job / "tasks").write_text(" ".join(str(process.pid) for process in running))
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: [process.send_signal(number) for process in running])
    return max(process.wait() for process in running) & 0xFF


def sacct(folder: Path, arguments: list[str]) -> int:
    print("JobID|State|NodeList")
    for number in filter(str.isdigit, arguments):
        if (folder / number).is_dir():
            print(f"{number}|{(folder / number / 'state').read_text()}|localhost")
    return 0


def scancel(folder: Path, arguments: list[str]) -> int:
    """``scancel ID`` ends a job; with ``--signal=NAME`` its tasks get that signal, and its batch script does not."""
    job = folder / arguments[-1]
    with (folder / "scancel.log").open("a") as log:
        log.write(" ".join(arguments) + "\n")
    if not (job / "tasks").exists():
        if (job / "state").read_text() == "PENDING":
            _set_state(job, "CANCELLED")
        return 0
    named = [a.partition("=")[2] for a in arguments if a.startswith("--signal")]
    number = getattr(signal, f"SIG{named[0]}") if named else signal.SIGKILL
    if not named:
        _set_state(job, "CANCELLED")
    for pid in (job / "tasks").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), number)
    return 0


def scontrol(folder: Path, arguments: list[str]) -> int:
    if arguments[:2] == ["show", "hostnames"]:
        print("localhost")
    elif arguments[0] == "requeue":
        (folder / arguments[1] / "requeued").write_text("")
    return 0


if __name__ == "__main__":
    where, command, *given = sys.argv[1:]
    sys.exit(globals()[command](Path(where), given))
