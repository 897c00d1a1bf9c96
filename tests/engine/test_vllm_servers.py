"""Sampling on servers: load, weights and their versions, and every way a server can fail. The servers are fake."""

import math
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.fake_vllm import ONE, PROMPTS, SAMPLING, SOURCE, FakeVLLM, change, connect, gap
from support.helpers import run_ranks

from nlgrpo.config.schema import VLLMConfig
from nlgrpo.engine.backends import EngineError, frozen, servers, vllm_http
from nlgrpo.engine.backends.servers import VLLMServers
from nlgrpo.engine.generation import RolloutRequest
from nlgrpo.engine.sampling import Sampling
from nlgrpo.model import decoder
from nlgrpo.model.fsdp import shard
from nlgrpo.runtime.distributed import Ranks


@pytest.fixture
def model():
    return decoder.load(SOURCE)


@pytest.fixture
def server():
    with FakeVLLM(SOURCE) as fake:
        yield fake


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(servers, "SOON", 0.05)
    monkeypatch.setattr(servers, "LATE", 0.2)


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_completions_are_samples_of_the_weights_that_were_given(server, model, tmp_path):
    engine = connect(tmp_path, server)
    for version in range(3):
        engine.take(model, version)
        rollout = engine.generate(RolloutRequest(PROMPTS, 3, SAMPLING, seed=version))
        assert rollout.version == version
        assert rollout.prompt_ids == PROMPTS
        assert rollout.tokens.shape[:2] == (4, 3)
        assert gap(rollout, model) < 1e-4
        for completion, finished in zip(rollout.completion_ids(), rollout.finished.flatten().tolist(), strict=True):
            assert (completion[-1] == 2) == finished
            assert finished or len(completion) == 12
        change(model, version)
    assert server.version == f"{engine.run}:2"
    folders = [path.name for path in (tmp_path / "engine" / engine.run).iterdir()]
    assert sorted(folders) == ["policy-1", "policy-2"]  # those before are removed
    engine.close()
    assert not (tmp_path / "engine").exists()


def test_seeds_depend_on_seed_prompt_and_sample_only(server, model, tmp_path):
    engine = connect(tmp_path, server)
    engine.take(model, 0)
    whole = engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING, seed=3, index=[5, 6, 7, 8]))
    part = engine.generate(RolloutRequest(PROMPTS[2:], 2, SAMPLING, seed=3, index=[7, 8]))
    assert whole.completion_ids()[4:] == part.completion_ids()
    assert engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING, seed=4)).completion_ids() != whole.completion_ids()
    same = engine.generate(RolloutRequest([PROMPTS[0]] * 2, 2, SAMPLING, seed=3, index=[0, 1])).completion_ids()
    assert same[:2] != same[2:]
    later = engine.generate(RolloutRequest(PROMPTS[:1], 2, SAMPLING, seed=3, index=[5], first_sample=2))
    assert later.completion_ids() != whole.completion_ids()[:2]


def test_prompts_are_spread_by_load_and_the_rows_are_limited(model, tmp_path):
    with FakeVLLM(SOURCE, delay=0.05) as fast, FakeVLLM(SOURCE, delay=0.4) as slow:
        engine = connect(tmp_path, fast, slow)
        engine.take(model, 0)
        engine.generate(RolloutRequest(PROMPTS * 5, 2, SAMPLING, max_rows=8))
        assert len(fast.prompts) + len(slow.prompts) == 20
        assert len(fast.prompts) > 2 * len(slow.prompts) > 0
        assert fast.most + slow.most <= 4  # max_rows = 8 completions, 2 per prompt
        assert all(one.busy == 0 for one in engine.servers)


def test_a_frozen_model_is_read_by_the_servers_from_its_own_directory(server):
    options = VLLMConfig(servers=(server.url,), timeout=5.0)
    change(server.model)  # the server has other weights
    engine = frozen.load_engine(SOURCE, torch.float32, ONE, "vllm", options=options, context=60)
    rollout = engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING))
    assert rollout.version is None
    assert gap(rollout, decoder.load(SOURCE)) < 1e-4
    engine.close()
    assert (SOURCE / "model.safetensors").is_file()


def two_ranks(rank, folder, urls):
    ranks = Ranks(rank, 2, torch.device("cpu"))
    model = shard(decoder.load(SOURCE), ranks, torch.float32)
    settings = VLLMConfig(servers=tuple(urls), timeout=20.0)
    engine = VLLMServers.connect(
        settings, model.shape, ranks=ranks, compute=torch.float32, context=60, folder=folder / "engine"
    )
    engine.take(model, 7)
    rollout = engine.generate(
        RolloutRequest(PROMPTS[2 * rank : 2 * rank + 2], 2, SAMPLING, index=[2 * rank, 2 * rank + 1])
    )
    torch.save((rollout, engine.run), folder / f"{rank}.pt")
    engine.close()


def test_two_ranks_share_the_servers(tmp_path):
    with FakeVLLM(SOURCE) as one, FakeVLLM(SOURCE) as other:
        run_ranks(two_ranks, tmp_path, [one.url, other.url])
        parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
        assert parts[0][1] == parts[1][1]
        assert {one.version, other.version} == {f"{parts[0][1]}:7"}
        model = decoder.load(SOURCE)
        assert all(rollout.version == 7 and gap(rollout, model) < 1e-4 for rollout, _ in parts)


# --- versions ---------------------------------------------------------------------------------------------------------


def test_a_server_that_was_restarted_gets_the_weights_again(server, model, tmp_path, capsys):
    change(model)
    engine = connect(tmp_path, server)
    engine.take(model, 4)
    engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING))
    server.stop()
    server.start()  # with the weights that it was started with
    rollout = engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING, seed=1))
    assert rollout.version == 4
    assert gap(rollout, model) < 1e-4
    assert "does not sample: it sampled with the weights ['default'], not with" in capsys.readouterr().err
    assert server.version == engine.names[-1]


@pytest.mark.slow
def test_a_server_that_is_restarted_while_it_samples_is_waited_for(server, model, tmp_path, capsys):
    change(model)
    server.delay = 0.2
    engine = connect(tmp_path, server)
    engine.take(model, 0)

    def restart():
        time.sleep(0.1)
        server.stop()
        time.sleep(0.5)
        server.start()

    thread = threading.Thread(target=restart)
    thread.start()
    rollout = engine.generate(RolloutRequest(PROMPTS * 3, 2, SAMPLING, max_rows=4))
    thread.join()
    assert gap(rollout, model) < 1e-4
    said = capsys.readouterr().err
    assert said.count("does not sample") == said.count("samples again") >= 1


def test_completions_of_other_weights_are_never_used(server, model, tmp_path):
    engine = connect(tmp_path, server)
    engine.take(model, 0)
    server.lying, engine.timeout = "someone:3", 0.5
    with pytest.raises(EngineError, match=r"it sampled with the weights \['someone:3'\], not with '\w+:0'"):
        engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING))


def test_another_trainer_that_uses_the_server_is_noticed(server, model, tmp_path):
    first, second = connect(tmp_path / "a", server), connect(tmp_path / "b", server)
    first.take(model, 0)
    change(model)
    second.take(model, 0)  # the same step of another run
    assert first.names != second.names
    rollout = first.generate(RolloutRequest(PROMPTS, 2, SAMPLING))
    assert gap(rollout, decoder.load(SOURCE)) < 1e-4  # its own weights, given to the server again


def test_a_completion_may_continue_with_newer_weights(server, model, tmp_path):
    """A rollout that is in flight while the policy is updated; its version is that of the oldest token."""
    engine = connect(tmp_path, server)
    engine.take(model, 0)
    server.gate = threading.Event()
    rollouts = []
    thread = threading.Thread(target=lambda: rollouts.append(engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING))))
    thread.start()
    while server.calls.count("/inference/v1/generate") < 4:
        time.sleep(0.01)
    engine.take(model, 1)
    server.gate.set()
    thread.join()
    assert rollouts[0].version == 1  # the fake server samples after its gate
    server.lying, engine.timeout = engine.names[0], 0.3
    with pytest.raises(EngineError, match=r"it sampled with the weights \['\w+:0'\], not with '\w+:1'"):
        engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING))  # older weights are not allowed


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("fewer", "returned 2 samples of prompt 0; 3 were requested"),
        ("nan", "prompt 0: a log-prob of nan; its weights or its logits are not finite"),
        ("vocabulary", "token id 5000, outside the policy's vocabulary of 1024; it has another model"),
        ("cut", r"without a stop id \(finish reason 'length'\)"),
        ("nothing", r"prompt 0: an empty completion"),
        ("no log-probs", "0 log-probs for .* tokens; start the engine with processed log-probs"),
    ],
)
def test_a_faulty_completion_is_named(server, model, tmp_path, fault, message):
    engine = connect(tmp_path, server)
    engine.take(model, 0)
    server.fault = fault
    with pytest.raises(EngineError, match=message):
        engine.generate(RolloutRequest(PROMPTS, 3, Sampling(max_new_tokens=40, stop_ids=(2,))))
    server.fault = ""
    engine.generate(RolloutRequest(PROMPTS, 3, SAMPLING))  # the next rollout is complete


def test_an_aborted_request_is_sampled_again(server, model, tmp_path, capsys):
    engine = connect(tmp_path, server)
    engine.take(model, 0)
    server.aborts = 2
    assert gap(engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING)), model) < 1e-4
    assert "does not sample: it aborted the request" in capsys.readouterr().err


def test_log_probs_before_the_filters_are_noticed_at_the_connection(tmp_path):
    message = r"returns log-probs \[-0\.\d+\] for the only token that top_k = 1 allows: start it with --logprobs-mode"
    with FakeVLLM(SOURCE, raw=True) as server, pytest.raises(EngineError, match=message):
        connect(tmp_path, server)


def test_a_server_that_a_killed_trainer_left_paused_is_resumed(server, model, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_http, "PAUSED", 0.3)
    server.paused = True
    start = time.monotonic()
    engine = connect(tmp_path, server)
    assert time.monotonic() - start > 0.3  # the trainer may be alive
    engine.take(model, 0)
    assert gap(engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING)), model) < 1e-4


def test_a_server_that_an_earlier_start_of_the_run_paused_is_resumed_at_once(server, model, tmp_path, monkeypatch):
    """The kill is between the requests to pause and to load. A server that another run paused is waited for."""
    pauses = tmp_path / "paused-servers"
    killed = connect(tmp_path, server, pauses=pauses)
    with monkeypatch.context() as kill:
        kill.setattr(vllm_http.Server, "_rpc", lambda *args, **options: sys.exit("killed"))
        with pytest.raises(SystemExit):
            killed.take(model, 0)
    assert server.paused
    assert len(list(pauses.iterdir())) == 1
    with FakeVLLM(SOURCE) as another:
        another.paused = True
        start = time.monotonic()
        resumed = connect(tmp_path, server, pauses=pauses)
        assert time.monotonic() - start < vllm_http.PAUSED / 2
        assert not pauses.exists()  # removed with the last pause
        monkeypatch.setattr(vllm_http, "PAUSED", 0.3)
        start = time.monotonic()
        waited = connect(tmp_path, another, pauses=pauses)
        assert time.monotonic() - start > vllm_http.PAUSED
        for engine in (resumed, waited):
            engine.take(model, 0)
            assert gap(engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING)), model) < 1e-4
            assert not pauses.exists()


def test_a_pause_that_cannot_be_recorded_is_no_error(server, model, tmp_path):
    (tmp_path / "file").write_text("")
    engine = connect(tmp_path, server, pauses=tmp_path / "file" / "paused-servers")
    engine.take(model, 0)
    assert gap(engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING)), model) < 1e-4


def test_folders_of_other_runs_and_of_the_user_stay(server, model, tmp_path):
    mine = tmp_path / "engine" / "policy-mine"
    mine.mkdir(parents=True)
    with FakeVLLM(SOURCE) as another:
        first, second = connect(tmp_path, server), connect(tmp_path, another)
        first.take(model, 3)
        change(model)
        second.take(model, 3)
        server.stop()
        server.start()
        of_first = first.generate(RolloutRequest(PROMPTS, 2, SAMPLING))
        assert gap(of_first, decoder.load(SOURCE)) < 1e-4  # not the weights of the other
        first.close()
        assert gap(second.generate(RolloutRequest(PROMPTS, 2, SAMPLING)), model) < 1e-4
        second.close()
    assert [path.name for path in (tmp_path / "engine").iterdir()] == ["policy-mine"]


def test_a_server_that_failed_once_is_used_again_without_new_weights(model, tmp_path):
    """As on ranks that give no weights, and in commands that never give any."""
    with FakeVLLM(SOURCE, delay=0.02) as one, FakeVLLM(SOURCE, delay=0.02) as other:
        engine = connect(tmp_path, one, other)
        engine.take(model, 0)
        other.aborts = 1
        engine.generate(RolloutRequest(PROMPTS * 3, 2, SAMPLING))
        time.sleep(0.3)
        before = len(other.prompts)
        engine.generate(RolloutRequest(PROMPTS * 8, 2, SAMPLING, max_rows=8))
        assert len(other.prompts) - before > 8


def test_a_stopped_run_does_not_wait_for_a_request_that_hangs(server, model, tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "GRACE", 0.3)
    stop = threading.Event()
    engine = connect(tmp_path, server, timeout=600.0, stopping=stop.is_set)
    engine.take(model, 0)
    server.gate = threading.Event()
    threading.Timer(0.3, stop.set).start()
    start = time.monotonic()
    with pytest.raises(EngineError, match="the run was stopped while vLLM sampled"):
        engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING))
    assert time.monotonic() - start < 10
    server.gate.set()


def test_after_an_error_no_more_prompts_are_requested(server, model, tmp_path):
    engine = connect(tmp_path, server)
    engine.take(model, 0)
    server.fault, server.delay = "", 0.05
    server.status, server.error = 400, "refused"
    with pytest.raises(EngineError, match="refused"):
        engine.generate(RolloutRequest(PROMPTS * 10, 2, SAMPLING, max_rows=2))
    time.sleep(0.5)
    asked = server.calls.count("/inference/v1/generate")
    engine.close()
    time.sleep(0.5)
    assert server.calls.count("/inference/v1/generate") == asked <= 4


def test_a_server_that_never_answers_is_an_error_after_the_timeout(model, tmp_path):
    fake = FakeVLLM(SOURCE)
    fake.start()
    fake.stop()
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"no vLLM server samples, after 0.5 s \(vllm.timeout\): http://127.*refused"):
        connect(tmp_path, fake, timeout=0.5)
    assert 0.4 < time.monotonic() - start < 5


@pytest.mark.slow
def test_a_slow_server_is_given_up_and_another_one_samples(model, tmp_path, capsys):
    with FakeVLLM(SOURCE, delay=30.0) as stuck, FakeVLLM(SOURCE) as works:
        stuck.delay = 0.0
        engine = connect(tmp_path, stuck, works, timeout=1.0)
        engine.take(model, 0)
        stuck.delay = 30.0
        rollout = engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING))
        assert gap(rollout, model) < 1e-4
        assert f"{stuck.url} does not sample: TimeoutError" in capsys.readouterr().err


def test_a_server_without_memory_is_named(server, model, tmp_path):
    engine = connect(tmp_path, server)
    engine.take(model, 0)
    server.status, engine.timeout = 500, 0.5
    with pytest.raises(EngineError, match="status 500: out of memory"):
        engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING))


def test_a_request_that_the_server_refuses_is_an_error_at_once(server, model, tmp_path):
    engine = connect(tmp_path, server)
    engine.take(model, 0)
    server.status, server.error = 400, "token id 900 is out of vocabulary"
    start = time.monotonic()
    with pytest.raises(EngineError, match="token id 900 is out of vocabulary"):
        engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("status", "error"),
    [(403, "disabled"), (404, "Not Found"), (404, "The path does not exist."), (405, "Method Not Allowed")],
)
def test_a_server_with_other_options_says_how_to_start_it(server, model, tmp_path, status, error):
    engine = connect(tmp_path, server)
    engine.take(model, 0)
    server.status, server.error = status, error
    with pytest.raises(EngineError, match=r"start the server with: VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --tokens"):
        engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING))


def test_weights_that_the_server_cannot_read(server, model, tmp_path, monkeypatch):
    engine = connect(tmp_path, server)
    monkeypatch.setattr(VLLMServers, "_folder", lambda self, name: Path("/nowhere"))
    monkeypatch.setattr(VLLMServers, "_save", lambda self, model, folder: None)
    said = r"/nowhere does not exist here: the server and the trainer need a shared disk; set vllm\.folder"
    with pytest.raises(EngineError, match=said):
        engine.take(model, 0)


def test_a_server_without_the_worker_says_how_to_start_it(server, model, tmp_path):
    engine = connect(tmp_path, server)
    server.without_worker = True
    with pytest.raises(
        EngineError, match=r"no attribute 'load_policy'\); start the server with: .*vllm_worker\.Worker"
    ):
        engine.take(model, 0)
    assert server.calls[-1] == "/resume"


def test_an_old_server_and_a_short_context_are_refused(model, tmp_path):
    with (
        FakeVLLM(SOURCE, number="0.11.2") as old,
        pytest.raises(EngineError, match=r"runs vLLM 0\.11\.2; 0\.32 or newer"),
    ):
        connect(tmp_path, old)
    with FakeVLLM(SOURCE, context=50) as short:
        message = "allows 50 tokens, but a prompt and its completion can have 60; start it with --max-model-len 60"
        with pytest.raises(EngineError, match=message):
            connect(tmp_path, short)


def test_one_of_two_servers_is_enough(model, tmp_path, capsys):
    with FakeVLLM(SOURCE) as one, FakeVLLM(SOURCE) as other:
        engine = connect(tmp_path, one, other)
        other.stop()
        engine.take(model, 0)
        assert gap(engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING)), model) < 1e-4
        assert len(one.prompts) == 4
        other.start()
        time.sleep(0.3)
        change(model)
        engine.take(model, 1)
        assert gap(engine.generate(RolloutRequest(PROMPTS * 3, 2, SAMPLING)), model) < 1e-4
        assert other.prompts
        assert f"{other.url} samples again" in capsys.readouterr().err


def test_a_user_who_stops_the_run_does_not_wait(server, model, tmp_path):
    stop = threading.Event()
    engine = connect(tmp_path, server, timeout=600.0, stopping=stop.is_set)
    engine.take(model, 0)
    server.stop()
    threading.Timer(0.3, stop.set).start()
    start = time.monotonic()
    with pytest.raises(EngineError, match="the run was stopped"):
        engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING))
    assert time.monotonic() - start < 5


def test_prompts_that_do_not_fit_are_refused_as_by_the_own_engine(server, model, tmp_path):
    engine = connect(tmp_path, server)
    engine.take(model, 0)
    for prompts, message in (([[]], "prompt 0 is empty"), ([[2000]], "outside"), ([[1] * 200], "exceeds")):
        with pytest.raises(ValueError, match=message):
            engine.generate(RolloutRequest(prompts, 2, SAMPLING))
    with pytest.raises(ValueError, match="expected at least 1"):
        engine.generate(RolloutRequest(PROMPTS, 0, SAMPLING))


def test_options_out_of_range():
    faults = VLLMConfig(servers=("node7:8000", "http://x:1"), timeout=0, gpu_memory=math.inf, tensor_parallel=3)
    found = "\n".join(faults.faults(4))
    for text in ("'node7:8000' is not a URL", "vllm.timeout = 0", "vllm.gpu_memory = inf", "divisor of the number of"):
        assert text in found
    assert "http://x:1" not in found


# --- where the weights are --------------------------------------------------------------------------------------------

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("urls", "here"),
    [
        (["http://localhost:1", "http://127.0.0.1:2", "http://[::1]:3"], True),
        (["http://localhost:1", "http://node7:2"], False),
        (["http://10.0.0.1:1"], False),
        ([], False),
    ],
)
def test_servers_on_this_machine_are_known_by_their_names(urls, here):
    assert servers.on_this_machine(urls) is here


@pytest.fixture
def shared(tmp_path, monkeypatch):
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(servers, "SHARED_MEMORY", folder)
    return folder


LOCAL = VLLMConfig(servers=("http://localhost:1",))


def test_weights_for_servers_on_this_machine_are_in_shared_memory_if_they_fit(tmp_path, shared, monkeypatch):
    run = tmp_path / "run"
    free = shutil.disk_usage(shared).free
    found = servers.weights_folder(LOCAL, run, ALONE, 10.0)
    assert found.parent == shared
    assert found.stat().st_mode & 0o777 == 0o700
    assert found != servers.weights_folder(LOCAL, tmp_path / "other", ALONE, 10.0)
    beside = run / "engine"
    assert servers.weights_folder(LOCAL, run, ALONE, 2.0 * free) == beside
    assert servers.weights_folder(VLLMConfig(servers=("http://node7:1",)), run, ALONE, 10.0) == beside
    assert servers.weights_folder(replace(LOCAL, folder=str(tmp_path)), run, ALONE, 10.0) == tmp_path
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # one rank of several nodes has another number than all ranks
    assert servers.weights_folder(LOCAL, run, ALONE, 10.0) == beside


def test_what_a_killed_trainer_left_is_removed(tmp_path, shared):
    found = servers.weights_folder(LOCAL, tmp_path / "run", ALONE, 10.0)
    for folder in (found, tmp_path / "run" / "engine"):
        (folder / "policy-3").mkdir(parents=True)
    assert servers.weights_folder(LOCAL, tmp_path / "run", ALONE, 10.0) == found
    assert list(found.iterdir()) == []
    assert not (tmp_path / "run" / "engine").exists()


def test_a_link_with_the_name_is_not_followed(tmp_path, shared):
    found = servers.weights_folder(LOCAL, tmp_path / "run", ALONE, 10.0)
    found.rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    found.symlink_to(tmp_path / "elsewhere")
    assert servers.weights_folder(LOCAL, tmp_path / "run", ALONE, 10.0) == tmp_path / "run" / "engine"
    assert (tmp_path / "elsewhere" / "file").exists()
