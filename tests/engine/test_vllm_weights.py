"""Weights on servers: adapters and the model under them, and several ranks that load at the same time. No real vLLM."""

import threading

import pytest
import torch
from support.fake_vllm import PROMPTS, SAMPLING, SOURCE, FakeVLLM, FakeWorker, change, connect, gap
from support.helpers import run_ranks

from nlgrpo.config.schema import VLLMConfig
from nlgrpo.engine.backends import EngineError, servers, vllm_http
from nlgrpo.engine.backends.servers import VLLMServers
from nlgrpo.engine.generation import RolloutRequest
from nlgrpo.engine.logprobs import next_token_logprobs
from nlgrpo.model import adapters, decoder, lora
from nlgrpo.model.fsdp import shard
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime.distributed import Ranks

LORA = LoraConfig(rank=2, alpha=8.0)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(servers, "SOON", 0.05)
    monkeypatch.setattr(servers, "LATE", 0.2)


def adapted():
    """The embedded model with adapters that change it."""
    model = decoder.load(SOURCE, shard=lambda m: lora.attach(m, LORA, torch.float32))
    adapters.init_adapters(model, LORA, 0)
    train_adapters(model, 1)
    return model


def train_adapters(model, seed):
    """Change the adapters and nothing else, as an update does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if lora.is_adapter(name):
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def elsewhere(folder):
    """Another checkpoint of the same shape."""
    model = decoder.load(SOURCE)
    change(model)
    decoder.save(model, folder)
    return folder


def test_log_probs_of_the_next_token():
    model = decoder.load(SOURCE)
    ids = [1, 50, 60, 70]
    with torch.no_grad():
        logits = model(torch.tensor(ids), [4])
    torch.testing.assert_close(next_token_logprobs(model, ids), logits[-1].log_softmax(0))


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_a_server_samples_with_the_newest_adapter(tmp_path):
    model = adapted()
    with FakeVLLM(SOURCE, enable_lora=True) as server:
        engine = connect(tmp_path, server, adapter=LORA)
        for version in range(4):
            engine.take(model, version)
            rollout = engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING, seed=version))
            assert rollout.version == version
            assert gap(rollout, model) < 1e-4
            with lora.disabled(model):
                assert gap(rollout, model) > 0.05
            train_adapters(model, version)
        assert list(server.adapters) == [f"{engine.run}:{version}" for version in (2, 3)]
        assert server.version == "default"
        engine.close()


def two_ranks(rank, folder, urls):
    ranks = Ranks(rank, 2, torch.device("cpu"))
    model = shard(adapted(), ranks, torch.float32)
    settings = VLLMConfig(servers=tuple(urls), timeout=20.0)
    engine = VLLMServers.connect(
        settings, model.shape, ranks=ranks, compute=torch.float32, context=60, folder=folder / "engine", adapter=LORA
    )
    for version in (7, 8):
        engine.take(model, version)
        rollout = engine.generate(
            RolloutRequest(PROMPTS[2 * rank : 2 * rank + 2], 2, SAMPLING, index=[2 * rank, 2 * rank + 1])
        )
        torch.save(rollout, folder / f"{rank}-{version}.pt")
    engine.close()


@pytest.mark.slow
def test_two_ranks_give_their_adapters_to_two_servers(tmp_path):
    with FakeVLLM(SOURCE, enable_lora=True) as one, FakeVLLM(SOURCE, enable_lora=True) as other:
        run_ranks(two_ranks, tmp_path, [one.url, other.url])
        names = [sorted(int(name.partition(":")[2]) for name in server.adapters) for server in (one, other)]
        assert names == [[7, 8], [7, 8]]
    for rank in range(2):
        for version in (7, 8):
            rollout = torch.load(tmp_path / f"{rank}-{version}.pt", weights_only=False)
            assert rollout.version == version
            assert gap(rollout, adapted()) < 1e-4


def test_a_server_with_another_model_under_the_adapters_is_named(tmp_path):
    with FakeVLLM(elsewhere(tmp_path / "other"), enable_lora=True) as server:
        engine = connect(tmp_path, server, adapter=LORA)
        message = "was started with another model than the one under the adapters: its log-probs differ by .* nats"
        with pytest.raises(EngineError, match=message):
            engine.take(adapted(), 0)
        assert server.adapters == {}


def test_a_server_that_is_restarted_with_another_model_is_named(tmp_path):
    model = adapted()
    with FakeVLLM(SOURCE, enable_lora=True) as server:
        engine = connect(tmp_path, server, adapter=LORA)
        engine.take(model, 0)
        engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING))
        server.stop()
        server.start()
        assert gap(engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING)), model) < 1e-4  # it got the adapter again
        server.stop()
        server.source = elsewhere(tmp_path / "other")
        server.start()
        with pytest.raises(EngineError, match="was started with another model than the one under the adapters"):
            engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING))


def test_a_server_with_weights_of_another_run_takes_no_adapters(tmp_path):
    with FakeVLLM(SOURCE, enable_lora=True) as server:
        connect(tmp_path / "a", server).take(decoder.load(SOURCE), 3)
        engine = connect(tmp_path / "b", server, adapter=LORA)
        with pytest.raises(EngineError, match=r"has the weights '\w+:3' of another run under the adapters; restart it"):
            engine.take(adapted(), 0)


def test_an_adapter_that_another_rank_has_loaded_meanwhile_is_no_error(tmp_path):
    with FakeVLLM(SOURCE, enable_lora=True) as server:
        engine = connect(tmp_path, server, adapter=LORA)
        engine.take(adapted(), 0)
        [name] = server.adapters
        late = vllm_http.Server(server.url, 20.0)
        late.load_adapter(str(engine._folder(name)), name)
        assert late.weights == name
        assert list(server.adapters) == [name]


def test_a_server_without_adapters_says_how_to_start_it(tmp_path):
    with FakeVLLM(SOURCE) as server:
        engine = connect(tmp_path, server, adapter=LORA)
        with pytest.raises(EngineError, match="For adapters, start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            engine.take(adapted(), 0)


# --- several ranks that load weights at the same time -----------------------------------------------------------------


def test_a_worker_does_not_go_back_to_older_weights_of_the_same_run():
    fake = FakeVLLM(SOURCE)
    worker = FakeWorker(fake)
    worker.load_policy(str(SOURCE), "a:10")
    assert "it has newer weights than a:9: those of version 10" in worker.load_policy(str(SOURCE), "a:9")["outdated"]
    assert worker.loaded_policy() == {"name": "a:10"}
    assert worker.load_policy(str(SOURCE), "a:10") == {}
    assert worker.load_policy(str(SOURCE), "b:0") == {}  # another run, or the next start of the same
    assert worker.loaded_policy() == {"name": "b:0"}


def test_older_weights_that_arrive_late_do_not_replace_newer_ones(tmp_path):
    """Another rank restores a restarted server with the weights of the last step, while this one gives it new ones."""
    model = decoder.load(SOURCE)
    with FakeVLLM(SOURCE) as server:
        engine = connect(tmp_path, server)
        engine.take(model, 0)
        late = vllm_http.Server(server.url, 20.0)
        change(model)
        engine.take(model, 1)
        with pytest.raises(vllm_http.ServerDown, match="it has newer weights than"):
            late.load(str(engine._folder(f"{engine.run}:0")), f"{engine.run}:0")
        assert server.version == "unknown"  # completions that name it are sampled again
        rollout = engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING))
        assert rollout.version == 1
        assert gap(rollout, model) < 1e-4


def test_a_server_that_two_ranks_restore_at_the_same_time(tmp_path):
    model = decoder.load(SOURCE)
    change(model)
    with FakeVLLM(SOURCE) as server:
        engine = connect(tmp_path, server)
        engine.take(model, 2)
        server.stop()
        server.start()
        name = engine.names[-1]
        others = [vllm_http.Server(server.url, 20.0) for _ in range(3)]
        threads = [threading.Thread(target=one.load, args=(str(engine._folder(name)), name)) for one in others]
        for thread in threads:
            thread.start()
        rollout = engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING))
        for thread in threads:
            thread.join()
        assert gap(rollout, model) < 1e-4
        assert server.version == name
        assert {one.weights for one in others} == {name}
