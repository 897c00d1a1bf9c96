"""Each check of `nlgrpo doctor` fails when its part is broken."""

import importlib
import os
import platform
import re
import shutil
import time
import tomllib
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from support.helpers import REPOSITORY

from nlgrpo import kernels
from nlgrpo.apps.doctor import (
    accuracy,
    check_attention,
    check_kernels,
    check_machine,
    check_ops,
    check_packages,
    check_ranks,
    check_training,
)
from nlgrpo.apps.doctor.findings import Check, attempt, run
from nlgrpo.kernels import dispatch, extension
from nlgrpo.model import attention, fsdp
from nlgrpo.runtime import host_memory
from nlgrpo.runtime.device import bandwidth
from nlgrpo.training import learner

GIB = 2**30


def results(find):
    """Results of a check, by name."""
    return {result.name: result for result in run(Check("check", "", find))}


def only(find):
    (result,) = results(find).values()
    return result


# --- packages ---------------------------------------------------------------------------------------------------------


def test_the_ranges_are_those_of_the_package():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    required = dict(re.fullmatch(r"([\w-]+)(.*)", line).groups() for line in project["dependencies"])
    assert required == check_packages.REQUIRED
    assert project["requires-python"] == check_packages.PYTHON
    extras = [line.split(";")[0] for lines in project["optional-dependencies"].values() for line in lines]
    assert {f"{name}{supported}" for name, supported in check_packages.OPTIONAL.items()} <= set(extras)


@pytest.mark.parametrize(
    ("package", "version", "status", "said"),
    [
        ("torch", "2.10.0", "failed", "torch 2.10.0, expected >=2.11,<2.16"),
        ("torch", "2.16.0+cu130", "failed", "torch 2.16.0+cu130"),
        ("torch", "2.11.0+cu128", "ok", "torch 2.11.0+cu128"),
        ("torch", "2.15.0a0+git123", "ok", "torch 2.15.0a0+git123"),
        ("transformers", "4.57.1", "failed", "transformers 4.57.1, expected >=5.0,<6"),
        ("triton", "3.5.0", "failed", "triton 3.5.0, expected >=3.6"),
        ("transformers", None, "failed", "transformers not installed, expected"),
        ("triton", None, "ok", "triton not installed"),
    ],
)
def test_a_version_out_of_range_fails(package, version, status, said, monkeypatch):
    real = metadata.version

    def fake(name):
        if name == package and version is None:
            raise metadata.PackageNotFoundError(name)
        return version if name == package else real(name)

    monkeypatch.setattr(metadata, "version", fake)
    found = only(check_packages.packages)
    assert found.status == status
    assert said in found.detail
    expected = f"pip install '{package}{(check_packages.REQUIRED | check_packages.OPTIONAL)[package]}'"
    assert found.advice == (expected if status == "failed" else "")


def test_an_old_python_fails(monkeypatch):
    monkeypatch.setattr(platform, "python_version", lambda: "3.10.14")
    found = only(check_packages.packages)
    assert (found.status, found.advice) == ("failed", "install Python >=3.11")


# --- the machine ------------------------------------------------------------------------------------------------------


def test_a_container_limits_the_memory(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 2 kB\nMemAvailable:  600 kB\n")
    assert host_memory.of_machine(tmp_path) == (1000 * 1024, 600 * 1024)
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert host_memory.of_machine(tmp_path) == (1000 * 1024, 600 * 1024)
    (group / "memory.max").write_text("2048\n")
    (group / "memory.current").write_text("1024\n")
    assert host_memory.of_machine(tmp_path) == (2048, 1024)
    assert host_memory.of_machine(tmp_path / "none") is None


def test_little_memory_and_too_many_threads_are_warnings(monkeypatch):
    assert only(check_machine.cpu).status == "ok"
    monkeypatch.setattr(host_memory, "of_machine", lambda: (4 * GIB, GIB))
    found = only(check_machine.cpu)
    assert found.status == "warning"
    assert "memory 4.0 GiB, 1.0 GiB free" in found.detail
    monkeypatch.setattr(host_memory, "of_machine", lambda: None)
    monkeypatch.setattr(check_machine, "cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert only(check_machine.cpu).advice.startswith("set OMP_NUM_THREADS=2")


def test_the_cpu_is_read_from_linux(tmp_path):
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: A\nflags\t\t: a b\n\nprocessor\t: 1\nmodel name\t: B\n"
    )
    assert check_machine.cpu_fields(tmp_path / "cpuinfo") == {"processor": "0", "model name": "A", "flags": "a b"}
    assert check_machine.cpu_fields(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("driver", "cuda", "visible", "status", "said"),
    [
        (None, None, None, "skipped", "a CPU build"),
        (None, "12.8", None, "skipped", "found no NVIDIA driver"),
        ("570.1", None, None, "warning", "driver 570.1 is installed, but torch 2.x is a CPU build"),
        ("470.1", "12.8", None, "failed", "finds no GPU"),
        ("570.1", "12.8", "", "skipped", "CUDA_VISIBLE_DEVICES hides all GPUs"),
    ],
)
def test_a_gpu_that_torch_cannot_use(driver, cuda, visible, status, said, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = check_machine.without_gpu(driver, cuda, "2.x")
    assert found.status == status
    assert said in found.detail
    assert bool(found.advice) == (status in ("failed", "warning"))


H100 = check_machine.Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0), True)
BROKEN = check_machine.Gpu("NVIDIA H200", 141 * GIB, (9, 0), False)


@pytest.mark.parametrize(
    ("gpu", "newest", "status", "said"),
    [
        (H100, 12090, "ok", ""),
        (H100, None, "ok", ""),
        (H100, 11080, "failed", "update the driver to one for CUDA 12.8"),
        (check_machine.Gpu("Tesla T4", 15 * GIB, (7, 5), True), 12090, "warning", "NLGRPO_TRITON=0"),
        (
            check_machine.Gpu("NVIDIA H200", 141 * GIB, (9, 0), False),
            12090,
            "failed",
            "a product of two small matrices",
        ),
    ],
)
def test_gpus_are_judged(gpu, newest, status, said):
    found = check_machine.judge_gpu(0, gpu, "575.51", "12.8", newest)
    assert found.status == status
    assert said in found.advice
    assert gpu.name in found.detail
    if gpu is H100 and newest == 12090:
        assert found.detail == (
            "NVIDIA H100 80GB HBM3, 80.0 GiB, 3.35 TB/s, capability 9.0, driver 575.51 (up to CUDA 12.9), "
            "torch for CUDA 12.8"
        )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", 1.555e12),
        ("NVIDIA A100-PCIE-40GB", 1.555e12),
        ("NVIDIA A100-SXM4-80GB", 2.039e12),
        ("NVIDIA A100 80GB PCIe", 1.935e12),
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA H100 PCIe", 2.0e12),
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA B200", 8.0e12),
        ("NVIDIA GB200", None),
        ("NVIDIA L40S", 0.864e12),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", 1.008e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)
def test_bandwidths_are_those_of_the_whole_named_gpu(name, expected):
    assert bandwidth(name) == expected


def usage(free, total=100 * GIB):
    return SimpleNamespace(total=total, used=total - free, free=free)


@pytest.mark.parametrize(("free", "status"), [(0, "failed"), (5 * GIB, "warning"), (50 * GIB, "ok")])
def test_a_full_disk_fails(free, status, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free))
    found = results(check_machine.disk)
    assert [result.status for result in found.values()] == [status] * 2
    assert "TMPDIR" in found["check/temporary files"].advice or status == "ok"


def test_little_shared_memory_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(64 * 2**20, 64 * 2**20))
    found = only(lambda: check_machine.shared_memory(str(tmp_path)))
    assert found.status == "warning"
    assert "--shm-size" in found.advice
    assert only(lambda: check_machine.shared_memory(str(tmp_path / "none"))).status == "skipped"


# --- ranks ------------------------------------------------------------------------------------------------------------

HANGS = "import os, time; open({mark!r} + str(os.getpid()), 'w').close(); time.sleep(600)"
DIES = "import sys, time\nif sys.argv[2] == '1':\n    sys.exit('planted death')\ntime.sleep(600)"
WRONG = "import json; print(json.dumps({'sums': [0.0, 3.0, 6.5], 'seconds': 1.0, 'bytes': 4}))"


@pytest.mark.slow
def test_two_ranks_sum_exactly():
    found = check_ranks.all_reduce("gloo", 2, "")
    assert found.status == "ok"
    assert found.numbers["bytes"] == 4 * 2**20
    check_ranks.check_sums(0, 3, [0.0, 6.0, 12.0])


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (DIES, "rank 1 of 2 ended with status 1: planted death"),
        (WRONG, "rank 0 has the sums [0.0, 3.0, 6.5], expected [0.0, 3.0, 6.0]"),
    ],
)
def test_a_rank_that_dies_or_errs(code, said, monkeypatch, tmp_path):
    (tmp_path / "worker.py").write_text(code)
    monkeypatch.setattr(check_ranks, "WORKER", tmp_path / "worker.py")
    found = results(check_ranks.ranks)["check/gloo"]
    assert (found.status, found.detail) == ("failed", said)
    assert "GLOO_SOCKET_IFNAME" in found.advice


@pytest.mark.slow
def test_ranks_that_hang_are_stopped(monkeypatch, tmp_path):
    (tmp_path / "worker.py").write_text(HANGS.format(mark=f"{tmp_path}/pid"))
    monkeypatch.setattr(check_ranks, "WORKER", tmp_path / "worker.py")
    monkeypatch.setattr(check_ranks, "TIMEOUT", 2.0)
    start = time.monotonic()
    found = check_ranks.all_reduce("gloo", 2, "advice")
    assert found.status == "failed"
    assert found.detail == "no result within 2 s from rank 0, 1 of 2"
    assert time.monotonic() - start < 60
    for path in tmp_path.glob("pid*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name.removeprefix("pid")), 0)


@pytest.mark.slow
def test_an_all_reduce_of_one_rank_that_waits_for_another_ends(monkeypatch):
    """The real worker, where the other rank is missing: the group never forms."""
    monkeypatch.setattr(check_ranks, "TIMEOUT", 8.0)
    real = check_ranks.subprocess.Popen

    def one_more_rank(command, **options):
        return real([*command[:5], "3", *command[6:]], **options)  # WORLD

    monkeypatch.setattr(check_ranks.subprocess, "Popen", one_more_rank)
    found = check_ranks.all_reduce("gloo", 2, "advice")
    assert found.status == "failed"
    assert found.detail.startswith("no result within 8 s")


# --- accuracy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "truth", "expected"),
    [
        (torch.tensor([1.0, 4.0]), torch.tensor([1.0, 4.0]).double(), 0.0),
        (torch.tensor([1.0 + 2**-22, 4.0]), torch.tensor([1.0, 4.0]).double(), 0.5),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 4.0]).double(), float("inf")),
        (torch.tensor([1.0]), torch.tensor([1.0, 4.0]).double(), float("inf")),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), 0.0),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), float("inf")),
        (torch.tensor([2.0**-8 + 1], dtype=torch.bfloat16), torch.tensor([1.0]).double(), 0.0),
        (torch.tensor([2.0**-7 + 1], dtype=torch.bfloat16), torch.tensor([1.0]).double(), 1.0),
    ],
)
def test_errors_are_in_roundings_of_the_largest_value(ours, truth, expected):
    assert accuracy.roundings([(truth, truth), (ours, truth)]) == expected


def test_gradients_are_compared():
    def wrong(x):
        return x.square() - (x - x.detach()) * 1e-3  # the value is right

    x = accuracy.normal(20)
    assert accuracy.roundings(accuracy.against_float64(torch.square, torch.square, [x])) < 2
    assert accuracy.roundings(accuracy.against_float64(wrong, torch.square, [x], gradients=False)) < 2
    assert accuracy.roundings(accuracy.against_float64(wrong, torch.square, [x])) > 1000


# --- attention --------------------------------------------------------------------------------------------------------


def test_attention_passes_in_every_implementation(monkeypatch):
    assert "compiled CPU op" in only(check_attention.attention).detail or not extension.available()
    monkeypatch.setattr(extension, "_AVAILABLE", False)
    found = only(check_attention.attention)
    assert found.status == "ok"
    assert "PyTorch" in found.detail


@pytest.mark.parametrize("fault", ["window", "prefixes", "scale", "values"])
def test_a_wrong_attention_fails(fault, monkeypatch):
    real = attention.packed_attention

    def wrong(qkv, rope, segments, *, heads, scale, window):
        window = None if fault == "window" else window
        segments = kernels.Segments(segments.lengths) if fault == "prefixes" else segments
        out = real(qkv, rope, segments, heads=heads, scale=scale * (1 + 1e-4 * (fault == "scale")), window=window)
        return out * (1 + 1e-5) if fault == "values" else out

    monkeypatch.setattr(attention, "packed_attention", wrong)
    found = only(check_attention.attention)
    assert found.status == "failed"
    assert "NLGRPO_EXT=0" in found.advice


def test_what_avoids_a_wrong_attention_on_a_gpu(monkeypatch):
    """Without a GPU: the kind of attention is given, and its kernel is PyTorch's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check_attention, "compare", lambda device, dtype, advice="": 1 / (device == "cpu"))
    monkeypatch.setattr(check_attention, "implementation", lambda *_: "flash_attn")
    found = results(check_attention.attention)
    assert "NLGRPO_ATTENTION=varlen" in found["check/cuda bfloat16"].advice
    assert found["check/cuda bfloat16"].status == "failed"


# --- compiled ops -----------------------------------------------------------------------------------------------------

needs_ops = pytest.mark.skipif(
    not extension.available() and os.environ.get("NLGRPO_BUILD_EXT") != "1", reason="this install has no compiled ops"
)


def schemas():
    """Schemas of all ops in torch's namespace "nlgrpo", compiled or not, by name."""
    found = torch._C._jit_get_all_schemas()
    return {schema.name.split("::")[1]: schema for schema in found if schema.name.startswith("nlgrpo::")}


def places(compiled):
    """Name and number of every result, and of every argument that is modified (negative), of the compiled ops."""
    for name in compiled:
        schema = schemas()[name]
        changed = [-1 - i for i, x in enumerate(schema.arguments) if x.alias_info is not None and x.alias_info.is_write]
        yield from ((name, i) for i in [*range(len(schema.returns)), *changed])


COMPILED = re.findall(r'm\.def\(\s*"(\w+)\(', (REPOSITORY / "csrc" / "library.cpp").read_text("utf-8"))


@needs_ops
def test_every_op_is_compared():
    covered = {op for case in (*check_ops.CASES, *check_kernels.KERNELS) for op in case.ops}
    assert covered == set(schemas())
    assert len(COMPILED) == len(set(COMPILED)) > 15
    assert set(COMPILED) <= {op for case in check_ops.CASES for op in case.ops}


def spoilt(x):
    if isinstance(x, bool):
        return not x
    if isinstance(x, int):
        return x + 1
    assert x.numel()
    return x * (1 + 1e-4) if x.is_floating_point() else x + 1


@needs_ops
@pytest.mark.parametrize(("name", "place"), list(places(COMPILED)) if extension.available() else [])
def test_a_wrong_result_of_any_op_fails(name, place, monkeypatch):
    real = getattr(torch.ops.nlgrpo, name)

    def wrong(*arguments):
        out = real(*arguments)
        if place < 0:
            arguments[-1 - place].mul_(1 + 1e-4)
        elif isinstance(out, tuple | list):
            out = tuple(spoilt(x) if i == place and getattr(x, "numel", int)() else x for i, x in enumerate(out))
        else:
            out = spoilt(out)
        return out

    monkeypatch.setattr(torch.ops.nlgrpo, name, wrong)
    for case in check_ops.CASES:
        if name in case.ops:
            assert accuracy.judge(case.pairs(), check_ops.BOUND, "").status == "failed", case.name


@needs_ops
def test_an_op_that_raises_does_not_stop_the_others(monkeypatch):
    def broken(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(torch.ops.nlgrpo, "swiglu", broken)
    found = results(check_ops.ops)
    assert len(found) == len(check_ops.CASES)
    assert [result.name for result in found.values() if result.status == "failed"] == ["check/swiglu"]
    assert found["check/swiglu"].detail == "RuntimeError: planted"
    assert "NLGRPO_EXT=0" in found["check/swiglu"].advice


def test_ops_that_are_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "available", lambda: False)
    monkeypatch.setenv("NLGRPO_EXT", "0")
    assert only(check_ops.ops).status == "skipped"
    (tmp_path / "_ext.so").write_bytes(b"not a library")
    monkeypatch.setenv("NLGRPO_EXT", str(tmp_path / "_ext.so"))
    found = only(check_ops.ops)
    assert found.status == "failed"
    assert found.detail.startswith("cannot be loaded: OSError")
    monkeypatch.delenv("NLGRPO_EXT")
    monkeypatch.setattr(extension, "__file__", str(tmp_path / "empty" / "extension.py"))
    found = only(check_ops.ops)
    assert found.status == "skipped"
    assert "compiler" in found.advice


# --- Triton's kernels -------------------------------------------------------------------------------------------------

SLOW = {"linearize chunks", "linearize chunks float64"}  # in Triton's interpreter
EACH = [pytest.param(x, id=x.name, marks=[pytest.mark.slow] * (x.name in SLOW)) for x in check_kernels.KERNELS]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kernel", EACH)
def test_kernels_are_compared_in_the_interpreter(kernel, monkeypatch):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert accuracy.judge(kernel.pairs(device), check_kernels.BOUND, "").status == "ok"


WRONG_KERNELS = [
    ("epilogue_triton", "statistics", 0, "statistics"),
    ("epilogue_triton", "statistics", 1, "statistics"),
    ("epilogue_triton", "statistics", 2, "gradient"),
    ("epilogue_triton", "gradient", None, "gradient"),
    *(("policy_loss_triton", "policy_loss", place, "policy_loss") for place in (0, 1, 2, 4)),
    ("linearize_triton", "linearize", 0, "linearize"),
    *(("sample_triton", "sample_tokens", place, "sample") for place in (0, 1)),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("module", "name", "place", "kernel"), WRONG_KERNELS)
def test_a_wrong_kernel_fails(module, name, place, kernel, monkeypatch):
    """``place``: number of the wrong result; None: what is written in place."""
    pytest.importorskip("triton")
    module = importlib.import_module(f"nlgrpo.kernels.{module}")
    real = getattr(module, name)

    def wrong(*arguments):
        out = real(*arguments)
        if place is None:
            arguments[-1].mul_(1 + 1e-4)
            return out
        if isinstance(out, torch.Tensor):
            return out * (1 + 1e-4)
        return tuple(x * (1 + 1e-4) if i == place else x for i, x in enumerate(out))

    monkeypatch.setattr(module, name, wrong)
    pairs = next(found.pairs for found in check_kernels.KERNELS if found.name == kernel)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert accuracy.judge(pairs(device), check_kernels.BOUND, "").status == "failed"


def test_kernels_on_a_gpu_are_judged_by_their_errors(monkeypatch):
    def raises(device):
        raise RuntimeError(f"no kernel for {device}")

    one = torch.ones(3)
    right = check_kernels.Kernel("right", (), lambda _: [(one, one.double())])
    wrong = check_kernels.Kernel("wrong", (), lambda _: [(one, 2 * one.double())])
    absent = check_kernels.Kernel("absent", (), raises)
    monkeypatch.setattr(check_kernels, "KERNELS", (right, wrong, absent))
    monkeypatch.setattr(check_kernels.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = results(check_kernels.triton_kernels)
    statuses = {name: result.status for name, result in found.items()}
    assert statuses == {"check/right": "ok", "check/wrong": "failed", "check/absent": "failed"}
    assert found["check/wrong"].advice == found["check/absent"].advice == check_kernels.ADVICE
    assert "no kernel for cuda" in found["check/absent"].detail


def test_triton_absent_or_disabled(monkeypatch):
    monkeypatch.setattr(dispatch, "DISABLED", True)
    assert "NLGRPO_TRITON=0" in only(check_kernels.triton_kernels).detail
    monkeypatch.setattr(check_kernels.importlib.util, "find_spec", lambda _: None)
    found = only(check_kernels.triton_kernels)
    assert (found.status, "not installed" in found.detail) == ("skipped", True)


def worker(monkeypatch, tmp_path, code):
    (tmp_path / "worker.py").write_text(code)
    monkeypatch.setattr(check_kernels, "WORKER", [check_kernels.sys.executable, str(tmp_path / "worker.py")])


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_fails(monkeypatch, tmp_path):
    """The type of one argument is wrong, so the compiler of Triton refuses one kernel."""
    pytest.importorskip("triton")
    code = """
from nlgrpo.apps.doctor import triton_builds
triton_builds.REPRESENTATIVE = {"statistics bf16": (90,), "gradient bf16 with entropy": (80, 90)}
real = triton_builds.cases
def cases():
    for name, kernel, types, *rest in real():
        yield (name, kernel, types | {"tops": "fp32"} if name.startswith("gradient") else types, *rest)
triton_builds.cases = cases
triton_builds.main()
"""
    worker(monkeypatch, tmp_path, code)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = results(check_kernels.triton_kernels)
    assert found["check/statistics bf16"].status == "ok"
    assert found["check/gradient bf16 with entropy"].status == "failed"
    assert found["check/gradient bf16 with entropy"].detail.startswith("sm_80: ")
    assert "NLGRPO_TRITON=0" in found["check/gradient bf16 with entropy"].advice
    assert found["check/on a GPU"].status == "skipped"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "timeout", "said"),
    [
        ("import os, sys; print('planted', file=sys.stderr, flush=True); os.abort()", 60, "status -6: planted"),
        ("import time; time.sleep(600)", 1, "stopped after 1 s"),
    ],
)
def test_a_compiler_that_crashes_or_hangs_fails(code, timeout, said, monkeypatch, tmp_path):
    worker(monkeypatch, tmp_path, code)
    monkeypatch.setattr(check_kernels, "TIMEOUT", timeout)
    monkeypatch.setattr(check_kernels.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = only(check_kernels.triton_kernels)
    assert found.status == "failed"
    assert said in found.detail


def test_the_representative_builds_have_every_kernel():
    pytest.importorskip("triton")
    from nlgrpo.apps.doctor import triton_builds

    kernel_of = {name: kernel.__name__ for name, kernel, *_ in triton_builds.cases()}
    sources = [path.read_text("utf-8") for path in (REPOSITORY / "kernels").glob("*_triton.py")]
    written = {name for text in sources for name in re.findall(r"^def (_\w*kernel\w*)\(", text, re.MULTILINE)}
    assert {kernel_of[name] for name in triton_builds.REPRESENTATIVE} == written
    assert len(check_kernels.KERNELS) == len(written) - 1 == 8  # both kernels of sampling are measured together
    targets = {target for found in triton_builds.REPRESENTATIVE.values() for target in found}
    assert targets == {80, 90, 100}


# --- a training step --------------------------------------------------------------------------------------------------


@pytest.fixture
def step():
    return results(check_training.training)["check/cpu"]


def test_a_training_step_is_that_of_transformers(step):
    assert step.status == "ok"
    assert step.numbers["loss_error"] < 1e-6
    assert step.numbers["gradient_norm_error"] < 1e-5
    assert {"update_error", "bound"} <= step.numbers.keys()


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """Folder of the random model, its step in float64, and the model before it."""
    folder = tmp_path_factory.mktemp("model")
    start = check_training.random_model(folder)
    return folder, check_training.plain_step(start), start


def test_a_step_in_bfloat16_is_sharded_and_close_to_that_of_transformers(monkeypatch, truth):
    """The policy has float32 shards, and the reference is bfloat16. The process group is gone afterwards."""
    seen, real = [], fsdp.shard

    def spy(model, ranks, compute):
        result = real(model, ranks, compute)
        kinds = {type(parameter).__name__ for parameter in model.parameters()}
        seen.append((kinds, model.embed.weight.dtype, compute, torch.distributed.get_world_size()))
        return result

    monkeypatch.setattr(fsdp, "shard", spy)
    found = check_training.sharded(*truth)
    assert seen == [({"DTensor"}, torch.float32, torch.bfloat16, 1), ({"Parameter"}, torch.bfloat16, torch.bfloat16, 1)]
    assert found.status == "ok"
    assert found.detail.startswith("a step in ")
    assert found.detail.endswith("in bfloat16 under FSDP2, on cpu")
    assert found.numbers["loss_error"] < 2e-3
    assert 1e-4 < found.numbers["update_error"] < 0.05 == found.numbers["bound"]
    assert found.numbers["step_seconds"] > 0
    assert not torch.distributed.is_initialized()


def test_a_wrong_sharded_step_fails(monkeypatch, truth):
    real = learner.packed_loss_from_hidden

    def wrong(*arguments, **options):
        loss, *others = real(*arguments, **options)
        return (loss + 0.1 * (loss - loss.detach()), *others)  # a gradient that is 10% too large

    monkeypatch.setattr(learner, "packed_loss_from_hidden", wrong)
    found = check_training.sharded(*truth)
    assert found.status == "failed"
    assert "NLGRPO_ATTENTION=packed" in found.advice
    assert found.numbers["gradient_norm_error"] == pytest.approx(0.1, rel=0.1)


def test_a_group_of_one_rank_that_does_not_start_names_the_interface(monkeypatch, truth):
    def fails(*arguments):
        raise RuntimeError("Bootstrap : no socket interface found\nmore")

    monkeypatch.setattr(torch.distributed, "all_reduce", fails)
    found = check_training.sharded(*truth)
    assert found.status == "failed"
    assert found.detail == (
        "the process group of one rank does not start: RuntimeError: Bootstrap : no socket interface found"
    )
    assert "NCCL_SOCKET_IFNAME=lo" in found.advice
    assert not torch.distributed.is_initialized()


def test_a_sharded_step_that_raises_is_a_failed_result(monkeypatch, truth):
    def fails(*arguments):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(check_training, "learner_step", fails)
    found = attempt("fsdp", lambda: check_training.sharded(*truth), "advice")
    assert (found.status, found.detail) == ("failed", "RuntimeError: no kernel image is available")
    assert not torch.distributed.is_initialized()


FAULTS = {
    "gradient": ("packed_loss_from_hidden", lambda out: (out[0] + 1e-3 * (out[0] - out[0].detach()), *out[1:])),
    "loss": ("packed_loss_from_hidden", lambda out: (out[0] + 1e-3 * out[0].detach(), *out[1:])),
    "nan": ("packed_loss_from_hidden", lambda out: (out[0] * torch.nan, *out[1:])),
    "norm": ("clip_gradients", lambda out: out * 1.001),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_step_fails(fault, monkeypatch):
    name, spoil = FAULTS[fault]
    real = getattr(learner, name)
    monkeypatch.setattr(learner, name, lambda *a, **k: spoil(real(*a, **k)))
    found = results(check_training.training)["check/cpu"]
    assert found.status == "failed"
    assert "NLGRPO_EXT=0" in found.advice


def test_a_wrong_optimizer_step_fails(monkeypatch):
    real = torch.optim.AdamW.step

    def wrong(self, *arguments):
        result = real(self, *arguments)
        if self.defaults["fused"]:  # that of the learner
            with torch.no_grad():
                self.param_groups[0]["params"][-1].add_(1e-5)
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", wrong)
    found = results(check_training.training)["check/cpu"]
    assert found.status == "failed"
    assert found.numbers["update_error"] > found.numbers["bound"] > found.numbers["loss_error"]


@needs_ops
def test_a_wrong_compiled_op_fails_the_step(monkeypatch):
    real = torch.ops.nlgrpo.logits_gradient

    def wrong(*arguments):
        real(*arguments)
        arguments[-1].mul_(1.01)

    monkeypatch.setattr(torch.ops.nlgrpo, "logits_gradient", wrong)
    assert results(check_training.training)["check/cpu"].status == "failed"
