"""Runs that sample with vLLM, in processes of their own: servers that are killed, trainers that are killed."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm_processes import RealServer, processes_of, write_model

ROOT = Path(__file__).parents[2]


def command(source, folder, *more, steps=6, ranks=1):
    sizes = ["--rollout.prompts", "2", "--rollout.samples", "4", "--rollout.max-new-tokens", "24"]
    launcher = ["torchrun", "--standalone", f"--nproc-per-node={ranks}", str(ROOT / "nlgrpo" / "train.py")]
    alone = [sys.executable, "-m", "nlgrpo.train"]
    return [
        *(launcher if ranks > 1 else alone), "length-bon", "--model.path", str(source), "--train.steps", str(steps),
        "--train.out", str(folder), "--evaluation.prompts", "0", "--train.samples-every", "0", *sizes,
        "--rollout.engine", "vllm", "--loss.correction", "tis:2", *more,
    ]  # fmt: skip


def run(arguments, timeout=400):
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout, env=environment())
    return done.returncode, done.stdout, done.stderr


def environment():
    bin_folder = Path(sys.executable).parent
    return os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def of(folder, name):
    return [json.loads(line)[name] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def served(server):
    return ["--vllm.servers", server.url, "--vllm.timeout", "200"]


@pytest.mark.parametrize(
    "more",
    [
        ["--rollout.top-k", "20"],
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(["--lora.rank", "2", "--optim.lr", "0.01"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_colocated_run(models, tmp_path, more):
    status, _, err = run(command(models["llama"], tmp_path / "run", *more))
    assert status == 0, err[-3000:]
    assert of(tmp_path / "run", "sampling/version") == list(range(6))
    if "--rollout.top-k" not in more:
        assert max(of(tmp_path / "run", "sampling/logp_difference/max")) < 1e-3
    else:  # the ratio of policy and filtered policy is the mass that the filter kept
        assert max(of(tmp_path / "run", "sampling/importance_sampling_ratio/max")) < 1
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert not (tmp_path / "run" / "engine").exists()
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_two_ranks_have_an_engine_each_or_share_one(models, tmp_path, tensor_parallel):
    """Their update is that of one rank, whose engine samples the same completions."""
    more = ["--vllm.tensor-parallel", str(tensor_parallel)]
    status, _, err = run(command(models["tied llama"], tmp_path / "two", *more, steps=3, ranks=2))
    assert status == 0, err[-3000:]
    assert of(tmp_path / "two", "sampling/version") == [0, 1, 2]
    assert max(of(tmp_path / "two", "sampling/logp_difference/max")) < 1e-3
    status, _, err = run(command(models["tied llama"], tmp_path / "one", steps=3))
    assert status == 0, err[-3000:]
    assert of(tmp_path / "one", "reward") == pytest.approx(of(tmp_path / "two", "reward"), rel=1e-4)


@pytest.mark.slow
def test_a_server_killed_in_the_middle_of_a_run_that_samples_ahead(models, tmp_path, serve):
    """30 steps; the server is killed and restarted. No step used other weights than those of the step before."""
    server = serve(models["gpt2"])
    arguments = command(models["gpt2"], tmp_path / "run", *served(server), "--rollout.ahead", "1", steps=30)
    trainer = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment())
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not metrics.is_file() or len(metrics.read_text().splitlines()) < 10:
        assert trainer.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    server.kill()
    time.sleep(3)
    server.start()
    _, err = trainer.communicate(timeout=300)
    assert trainer.returncode == 0, err[-3000:]
    assert of(tmp_path / "run", "step") == list(range(30))
    assert of(tmp_path / "run", "sampling/version") == [0, *range(29)]
    assert of(tmp_path / "run", "sampling/staleness") == [0, *[1] * 29]
    assert "does not sample" in err
    assert "samples again" in err
    assert processes_of(trainer.pid) == []


def test_a_server_gives_samples_of_every_policy(models, tmp_path, serve):
    """Without sampling ahead the log-probs of the server are those of the policy, also after a restart."""
    server = serve(models["gpt2"])
    status, _, err = run(command(models["gpt2"], tmp_path / "run", *served(server), steps=4))
    assert status == 0, err[-3000:]
    assert max(of(tmp_path / "run", "sampling/logp_difference/max")) < 1e-3
    server.kill()
    server.start()
    status, _, err = run(command(models["gpt2"], tmp_path / "run", *served(server), steps=8))
    assert status == 0, err[-3000:]
    assert of(tmp_path / "run", "sampling/version") == list(range(8))
    assert max(of(tmp_path / "run", "sampling/logp_difference/max")) < 1e-3


@pytest.mark.slow
def test_a_server_gets_adapters(models, tmp_path, serve):
    server = serve(models["llama"], "--enable-lora", "--max-lora-rank", "8", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    more = [*served(server), "--lora.rank", "2", "--optim.lr", "0.01"]
    status, _, err = run(command(models["llama"], tmp_path / "run", *more))
    assert status == 0, err[-3000:]
    assert max(of(tmp_path / "run", "sampling/logp_difference/max")) < 1e-3
    assert of(tmp_path / "run", "kl")[-1] > 1e-4  # the adapters have changed


def test_a_server_with_another_model_under_the_adapters_is_named(models, tmp_path, serve):
    other = write_model(tmp_path / "other", "llama", seed=1)
    server = serve(other, "--enable-lora", "--max-lora-rank", "8", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    status, _, err = run(command(models["llama"], tmp_path / "run", *served(server), "--lora.rank", "2"))
    assert status == 2
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "was started with another model than the one under the adapters: its log-probs differ by" in line
    more = [*served(server), "--lora.rank", "2", "--vllm.adapters", "false"]
    assert run(command(models["llama"], tmp_path / "merged", *more, steps=2))[0] == 0


def test_a_server_with_another_model_is_named(models, tmp_path, serve):
    server = serve(models["llama"])
    status, _, err = run(command(models["gpt2"], tmp_path / "run", *served(server)))
    assert status == 2
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "the server was started with another model than the policy: model_type is 'llama', and 'gpt2'" in line
    assert run(command(models["llama"], tmp_path / "other", *served(server), steps=2))[0] == 0  # it still serves


def test_a_server_without_the_options_says_how_to_start_it(models, tmp_path, serve):
    server = serve(models["llama"], VLLM_SERVER_DEV_MODE="0")
    status, _, err = run(command(models["llama"], tmp_path / "run", *served(server)))
    assert status == 2
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "/weight_info is not available (404" in line
    assert "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL" in line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_saves_and_leaves_no_process(models, tmp_path, number):
    trainer = subprocess.Popen(
        command(models["llama"], tmp_path / "run", steps=500), stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, start_new_session=True, env=environment(),
    )  # fmt: skip
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 200
    while not metrics.is_file() or not metrics.read_text().count("\n") > 2:
        assert trainer.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(trainer.pid, number)
    out, err = trainer.communicate(timeout=60)
    assert trainer.returncode == 0, err[-3000:]
    assert "run the same command again to resume" in out
    assert processes_of(trainer.pid) == []


@pytest.mark.slow
def test_ten_kills_at_random_times(models, tmp_path, serve):
    """The trainer is killed ten times while it samples ahead on a server; every start resumes, and nothing is left.

    Every third kill is while it starts. The others are up to 4 seconds after the first step of the start.
    """
    server, generator = serve(models["gpt2"]), random.Random(7)
    more = [*served(server), "--rollout.ahead", "1", "--train.checkpoint-every", "1"]
    metrics, done = tmp_path / "run" / "metrics.jsonl", [0]
    for kill in range(10):
        trainer = subprocess.Popen(
            command(models["gpt2"], tmp_path / "run", *more, steps=5000), stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment(),
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while kill % 3 < 2 and not (metrics.is_file() and metrics.read_text().count("\n") > done[-1]):
            assert trainer.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(generator.uniform(0.0, 4.0))
        os.killpg(trainer.pid, signal.SIGKILL)
        _, err = trainer.communicate(timeout=30)
        assert trainer.returncode == -signal.SIGKILL, err[-3000:]
        assert processes_of(trainer.pid) == []
        done.append(metrics.read_text().count("\n") if metrics.is_file() else 0)
    assert all(
        after >= before - 1 for before, after in itertools.pairwise(done)
    )  # at most the step of the kill is lost
    steps = done[-1] + 5
    status, _, err = run(command(models["gpt2"], tmp_path / "run", *more, steps=steps))
    assert status == 0, err[-3000:]
    assert of(tmp_path / "run", "step") == list(range(steps))
    staleness, version = of(tmp_path / "run", "sampling/staleness"), of(tmp_path / "run", "sampling/version")
    assert set(staleness) == {0, 1}
    assert all(step - old == late for step, (old, late) in enumerate(zip(version, staleness, strict=True)))
    assert all(torch.isfinite(x).all() for x in load_file(tmp_path / "run" / "model" / "model.safetensors").values())
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert not (tmp_path / "run" / "paused-servers").exists()


@pytest.mark.slow
def test_a_killed_colocated_run_resumes_and_leaves_no_process(models, tmp_path):
    arguments = command(models["gpt2"], tmp_path / "run", "--train.checkpoint-every", "2", steps=20)
    for enough in (3, 9):
        trainer = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, start_new_session=True, env=environment())
        metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 200
        while not metrics.is_file() or metrics.read_text().count("\n") < enough:
            assert trainer.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(trainer.pid, signal.SIGKILL)  # this process only: whatever it started would remain
        trainer.wait()
        time.sleep(0.5)
        assert processes_of(trainer.pid) == []
    assert run(arguments)[0] == 0
    assert of(tmp_path / "run", "sampling/version") == list(range(20))


@pytest.mark.parametrize(
    "name",
    ["evaluate", "generate", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rollout", "iro"))],
)
def test_commands(models, tmp_path, name):
    source, out = str(models["gpt2"]), ["--out", str(tmp_path / "out")]
    vllm = ["length-bon", "--rollout.engine", "vllm", "--model.path", source]
    arguments = {
        "rollout": ["rollout", *vllm, *out, "--samples", "4", "--prompts", "6"],
        "iro": ["iro", *vllm, *out, "--iterations", "1", "--samples", "4", "--prompts", "8"],
        "evaluate": ["evaluate", str(tmp_path / "run"), *out, "--rollout.engine", "vllm", "--n", "4", "--ns", "1"],
        "generate": ["generate", "Once upon a time", "--model", source, "--engine", "vllm", "--procedure", "bon:4",
                     "--choose", "length(target=20, scale=128)"],
    }[name]  # fmt: skip
    if name == "evaluate":
        sizes = ["--evaluation.prompts", "4", "--evaluation.samples", "4", "--evaluation.ns", "1"]
        trained = command(models["gpt2"], tmp_path / "run", *sizes, steps=1)
        assert run(trained)[0] == 0
    status, printed, err = run([sys.executable, "-m", "nlgrpo.cli", *arguments])
    assert status == 0, err[-3000:]
    assert "Once upon a time" in printed or (tmp_path / "out").is_dir()
    assert "Traceback" not in err


def test_the_server_fixture_kills_what_it_started(models, tmp_path):
    server = RealServer(models["llama"], tmp_path / "server.log")
    server.start()
    assert processes_of(server.process.pid)
    server.kill()
    assert processes_of(server.process.pid) == []
