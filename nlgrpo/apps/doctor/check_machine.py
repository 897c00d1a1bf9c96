"""CPU, memory, GPUs, free disk and shared memory of the machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from nlgrpo.apps.doctor.findings import Result
from nlgrpo.runtime import host_memory
from nlgrpo.runtime.device import bandwidth

GIB = 2**30
LEAST_MEMORY = 2 * GIB  # free; the default recipe needs about 1 GiB
# below: failed, warning
LEAST_DISK = GIB
LITTLE_DISK = 10 * GIB
LITTLE_SHARED = GIB  # Docker's default is 64 MiB; NCCL uses tens of MiB per pair of ranks
NEEDED_CAPABILITY = (8, 0)  # the oldest for which the kernels are compiled in the tests


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size < 100 * GIB else f"{size / GIB:.0f} GiB"


# --- CPU --------------------------------------------------------------------------------------------------------------


def cpu_fields(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo; empty on other systems than Linux."""
    try:
        first = path.read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu() -> Iterator[Result]:
    """Report the CPU's model, cores, vector instructions and memory; warn of little memory or too many threads."""
    name = cpu_fields().get("model name") or platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    found = host_memory.of_machine()
    detail = f"{name}, {cores()} cores, {torch.backends.cpu.get_cpu_capability()}, PyTorch threads: {threads}"
    numbers: dict[str, int | str] = {"model": name, "cores": cores(), "threads": threads}
    if found is not None:
        detail += f", memory {gib(found[0])}, {gib(found[1])} free"
        numbers |= {"memory_bytes": found[0], "memory_free_bytes": found[1]}
    if found is not None and found[1] < LEAST_MEMORY:
        yield Result("warning", detail, f"free memory: a run needs about {gib(LEAST_MEMORY)}", numbers=numbers)
    elif threads > cores():
        yield Result("warning", detail, f"set OMP_NUM_THREADS={cores()}: more threads are slower", numbers=numbers)
    else:
        yield Result("ok", detail, numbers=numbers)


# --- GPU --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """A GPU as torch sees it. ``works``: whether a small product on it is right."""

    name: str
    memory: int
    capability: tuple[int, int]
    works: bool


def read_gpus() -> list[Gpu]:
    """List the GPUs that torch can use, and try each."""
    found = []
    for i in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(i)
        device = torch.device("cuda", i)
        product = torch.full((4, 8), 2.0, device=device) @ torch.full((8, 4), 3.0, device=device)
        works = bool((product == 48).all())
        found.append(Gpu(of.name, of.total_memory, (of.major, of.minor), works))
    return found


def driver() -> str | None:
    """Version of the NVIDIA driver by nvidia-smi; None without one. Needs no CUDA build of torch."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def driver_cuda() -> int | None:
    """Latest CUDA that the driver supports, as 1000 major + 10 minor; None if unknown."""
    try:
        return int(getattr(torch._C, "_cuda_getDriverVersion")())  # noqa: B009  (unknown to torch's type stubs)
    except (AttributeError, RuntimeError):  # a CPU build; no driver
        return None


def gpu() -> Iterator[Result]:
    """Report every GPU, the driver and CUDA; fail if torch cannot use a GPU that is there."""
    version = driver()
    if torch.version.cuda is None or not torch.cuda.is_available():
        yield without_gpu(version, torch.version.cuda, torch.__version__)
        return
    for i, found in enumerate(read_gpus()):
        yield judge_gpu(i, found, version, torch.version.cuda, driver_cuda())


def without_gpu(version: str | None, cuda: str | None, built: str) -> Result:
    """Result where torch has no GPU: skipped, unless there is a driver. ``cuda``: that of the build of torch."""
    if version is None:
        why = "a CPU build" if cuda is None else f"built for CUDA {cuda}, and found no NVIDIA driver"
        return Result("skipped", f"no GPU: torch {built} is {why}")
    if cuda is None:
        advice = "to use the GPU, install torch for CUDA: https://pytorch.org/get-started/locally"
        return Result("warning", f"driver {version} is installed, but torch {built} is a CPU build", advice)
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Result("skipped", "CUDA_VISIBLE_DEVICES hides all GPUs")
    advice = "look at nvidia-smi; update the driver, or install a torch for an older CUDA"
    return Result("failed", f"driver {version} is installed, but torch {built} (CUDA {cuda}) finds no GPU", advice)


def judge_gpu(i: int, found: Gpu, version: str | None, cuda: str, newest: int | None) -> Result:
    """Result of GPU ``i``. ``newest``: latest CUDA of the driver, as `driver_cuda`."""
    limit = bandwidth(found.name)
    memory = gib(found.memory)
    if limit is not None:
        memory += f", {limit / 1e12:.3g} TB/s"
    capability = ".".join(map(str, found.capability))
    supports = f" (up to CUDA {newest // 1000}.{newest % 1000 // 10})" if newest else ""
    detail = f"{found.name}, {memory}, capability {capability}"
    detail += f", driver {version or 'unknown'}{supports}, torch for CUDA {cuda}"
    numbers = asdict(found) | {"driver": version, "torch_cuda": cuda, "driver_cuda": newest, "bytes_per_second": limit}
    status = "ok"
    advice = ""
    if not found.works:
        status = "failed"
        advice = "a product of two small matrices is wrong: check the GPU with nvidia-smi -q and dmesg"
    elif newest is not None and newest // 1000 < int(cuda.split(".")[0]):
        status = "failed"
        advice = f"update the driver to one for CUDA {cuda}, or install a torch for an older CUDA"
    elif found.capability < NEEDED_CAPABILITY:
        status = "warning"
        advice = "the kernels are tested for capability 8.0 and later; set NLGRPO_TRITON=0 if one fails"
    return Result(status, detail, advice, part=f"cuda:{i}", numbers=numbers)  # type: ignore[arg-type]


# --- disk -------------------------------------------------------------------------------------------------------------


def disk() -> Iterator[Result]:
    """Report the free disk space of the working folder and of the folder for temporary files."""
    for part, folder in (("working folder", os.getcwd()), ("temporary files", tempfile.gettempdir())):
        free = shutil.disk_usage(folder).free
        detail = f"{gib(free)} free"
        numbers = {"free_bytes": free}
        advice = "free some space: a checkpoint takes about 12 bytes per parameter"
        if part == "temporary files":
            advice = "free some space, or set TMPDIR to a folder of another disk"
        if free < LEAST_DISK:
            yield Result("failed", detail, advice, part, numbers)
        elif free < LITTLE_DISK:
            yield Result("warning", detail, advice, part, numbers)
        else:
            yield Result("ok", detail, part=part, numbers=numbers)


def shared_memory(folder: str = "/dev/shm") -> Iterator[Result]:  # nosec B108  # its size is read
    """Report the size of shared memory, in which ranks on one machine exchange data."""
    if not os.path.isdir(folder):
        yield Result("skipped", f"this system has no {folder}")
        return
    found = shutil.disk_usage(folder)
    detail = f"{gib(found.total)}, {gib(found.free)} free"
    numbers = {"total_bytes": found.total, "free_bytes": found.free}
    if found.free < LITTLE_SHARED:
        advice = "several ranks may need more: remount it larger, or start a container with --shm-size=8g or --ipc=host"
        yield Result("warning", detail, advice, numbers=numbers)
    else:
        yield Result("ok", detail, numbers=numbers)
