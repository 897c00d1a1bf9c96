"""vLLM in the process of the trainer: its samples are those of the policy, after every update."""

import math
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from support.fake_vllm import gap
from transformers import AutoModelForCausalLM

from nlgrpo.config.schema import VLLMConfig
from nlgrpo.engine import generation
from nlgrpo.engine.backends import EngineError, vllm_library
from nlgrpo.engine.backends.colocated import ColocatedVLLM, full_weights
from nlgrpo.engine.generation import RolloutRequest
from nlgrpo.engine.sampling import Sampling, log_distribution
from nlgrpo.model import adapters, decoder, lora
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime.supervision import process_group

PROMPTS = [[1, 50, 60, 70], [1, 80, 90], [1, 300, 301, 302, 303], [1, 7]]
SAMPLING = Sampling(max_new_tokens=24, stop_ids=(2,))


@pytest.fixture
def ranks():
    with process_group.start() as ranks:
        yield ranks


def start(source, ranks, **options):
    shape = decoder.load(source).shape
    return ColocatedVLLM.start(
        source, shape, ranks=ranks, compute=torch.float32, options=VLLMConfig(), context=100, max_rows=64, **options
    )


def change(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "tied llama", "qwen3"])
def test_after_each_update_it_samples_from_the_policy(models, ranks, kind, tmp_path):
    """Log-probs are those of the policy, and greedy tokens those of transformers with the exported policy."""
    model, engine = decoder.load(models[kind]), start(models[kind], ranks)
    before = None
    for version in range(3):
        engine.take(model, version)
        rollout = engine.generate(RolloutRequest(PROMPTS, 4, SAMPLING, seed=version))
        assert rollout.version == version
        assert gap(rollout, model) < 1e-3
        decoder.save(model, tmp_path / f"{version}")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / f"{version}", dtype=torch.float32).eval()
        greedy = engine.generate(RolloutRequest(PROMPTS, 1, Sampling(temperature=0.0, max_new_tokens=16)))
        for prompt, ids in zip(PROMPTS, greedy.completion_ids(), strict=True):
            inputs = torch.tensor([prompt])
            truth = theirs.generate(
                inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=16, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
            assert ids == truth[0, len(prompt) :].tolist()
        assert greedy.completion_ids() != before
        before = greedy.completion_ids()
        change(model, version)
    stale = engine.generate(RolloutRequest(PROMPTS, 4, SAMPLING))
    assert gap(stale, model) > 1e-2  # the last change was not given to it
    engine.close()


def test_many_long_prompts_at_once(models, ranks):
    """More prompt tokens than vLLM computes in one step. On a CPU a prompt that it splits would end it."""
    model, engine = decoder.load(models["llama"]), start(models["llama"], ranks)
    engine.take(model, 0)
    prompts = [[1, *(3 + (31 * i + 7 * j) % 1000 for j in range(89))] for i in range(120)]
    assert gap(engine.generate(RolloutRequest(prompts, 1, Sampling(max_new_tokens=8, stop_ids=(2,)))), model) < 1e-3
    engine.close()


@pytest.mark.parametrize("sampling", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0.6}], ids=str)
def test_log_probs_are_those_of_the_filtered_distribution(models, ranks, sampling):
    model, engine = decoder.load(models["gpt2"]), start(models["gpt2"], ranks)
    engine.take(model, 0)
    wanted = Sampling(max_new_tokens=12, **sampling)
    rollout = engine.generate(RolloutRequest(PROMPTS, 6, wanted, seed=1))
    theirs = AutoModelForCausalLM.from_pretrained(models["gpt2"]).eval()
    for row, ids in enumerate(rollout.completion_ids()):
        prompt = PROMPTS[row // 6]
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        truth = log_distribution(logits, wanted)[torch.arange(len(ids)), ids]
        assert truth.isfinite().all()
        torch.testing.assert_close(rollout.logprobs[row // 6, row % 6, : len(ids)], truth, atol=1e-3, rtol=0)
    engine.close()


def test_first_tokens_have_the_policys_frequencies(models, ranks):
    """4,000 samples of two prompts: chi-square of the frequencies, and prompts whose samples are independent."""
    model, engine = decoder.load(models["gpt2"]), start(models["gpt2"], ranks)
    engine.take(model, 0)
    n, prompts = 4000, [[1, 50, 60, 70], [1, 50, 60, 70]]
    rollout = engine.generate(RolloutRequest(prompts, n, Sampling(max_new_tokens=1), seed=5))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(models["gpt2"]).eval()(torch.tensor(prompts[:1])).logits[0, -1]
    probs = logits.double().softmax(-1)
    for tokens in rollout.tokens[:, :, 0].tolist():
        counts, chi, cells, rest = Counter(tokens), 0.0, 0, 1.0
        for token in probs.argsort(descending=True).tolist():
            if n * float(probs[token]) < 10:
                break
            chi += (counts.pop(token, 0) - n * float(probs[token])) ** 2 / (n * float(probs[token]))
            cells, rest = cells + 1, rest - float(probs[token])
        chi += (sum(counts.values()) - n * rest) ** 2 / (n * rest)
        assert chi < cells + 5 * math.sqrt(2 * cells)
    same = sum(a == b for a, b in zip(*rollout.tokens[:, :, 0].tolist(), strict=True)) / n
    assert abs(same - float(probs.square().sum())) < 0.05
    request = RolloutRequest(prompts, 8, Sampling(max_new_tokens=4), seed=5)
    again = engine.generate(request)
    assert again.completion_ids() == engine.generate(request).completion_ids()
    engine.close()


@pytest.mark.parametrize("as_adapter", [True, False])
def test_adapters_are_given_as_such_or_merged(models, ranks, tmp_path, as_adapter):
    config = LoraConfig(rank=3)
    model = decoder.load(models["llama"])
    lora.attach(model, config, torch.float32)
    adapters.init_adapters(model, config, seed=1)
    options = VLLMConfig(adapters=as_adapter)
    engine = ColocatedVLLM.start(
        models["llama"], model.shape, ranks=ranks, compute=torch.float32, options=options, context=100, max_rows=64,
        adapter=config, folder=tmp_path / "engine",
    )  # fmt: skip
    assert (engine.adapter is not None) == as_adapter
    for version in range(3):
        engine.take(model, version)
        assert gap(engine.generate(RolloutRequest(PROMPTS, 3, SAMPLING, seed=version)), model) < 1e-3
        change(model, version)
    assert gap(engine.generate(RolloutRequest(PROMPTS, 3, SAMPLING)), model) > 1e-2
    assert (tmp_path / "engine").exists() == as_adapter
    engine.close()
    assert not (tmp_path / "engine").exists()


def test_an_architecture_without_adapters_gets_merged_weights(models, ranks, capsys):
    config = LoraConfig(rank=3)
    model = decoder.load(models["gpt2"])
    lora.attach(model, config, torch.float32)
    adapters.init_adapters(model, config, seed=1)
    engine = start(models["gpt2"], ranks, adapter=config)
    assert "vLLM has no adapters for the model in" in capsys.readouterr().err
    change(model, 0)
    engine.take(model, 0)
    assert gap(engine.generate(RolloutRequest(PROMPTS, 3, SAMPLING)), model) < 1e-3
    engine.close()


def test_the_process_group_and_the_random_state_are_left_alone(models, ranks):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    engine = start(models["gpt2"], ranks)
    torch.testing.assert_close(torch.rand(3), expected)
    engine.close()
    assert torch.distributed.is_initialized()
    torch.distributed.barrier()


def test_a_model_that_vllm_does_not_take_is_one_line(models, ranks, tmp_path):
    shape = decoder.load(models["llama"]).shape
    with pytest.raises(EngineError, match="vLLM cannot load") as error:
        ColocatedVLLM.start(
            tmp_path / "absent", shape, ranks=ranks, compute=torch.float32, options=VLLMConfig(), context=50, max_rows=4
        )
    assert "\n" not in str(error.value)


def test_an_old_vllm_is_refused(monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.11.2")
    with pytest.raises(EngineError, match=r"needs vLLM 0\.32 or newer; 0\.11\.2 is installed"):
        vllm_library.version()


def test_both_engines_sample_the_same_distribution(models, ranks):
    """Mean length and mean log-prob of 400 completions by both engines are within 4 standard errors."""
    model, engine = decoder.load(models["gpt2"]), start(models["gpt2"], ranks)
    engine.take(model, 0)
    sampling = Sampling(max_new_tokens=64, stop_ids=(2,))
    theirs = engine.generate(RolloutRequest([PROMPTS[0]], 400, sampling, seed=1))
    ours = generation.generate(model, [PROMPTS[0]], 400, sampling, seed=1, max_rows=400)
    for of in (lambda r: r.lengths.double(), lambda r: r.logprobs.sum(-1).double() / r.lengths):
        a, b = of(theirs)[0], of(ours)[0]
        error = math.sqrt(float(a.var() + b.var()) / 400)
        assert abs(float(a.mean() - b.mean())) < 4 * error
    engine.close()


@pytest.mark.parametrize("kind", ["gpt2", "llama", "tied llama", "qwen3"])
def test_weights_are_those_of_the_exported_directory(models, kind, tmp_path):
    model = decoder.load(models[kind])
    decoder.save(model, tmp_path, dtype=torch.float32)
    saved = load_file(tmp_path / "model.safetensors")
    pairs = dict(full_weights(model, torch.float32))
    assert pairs.keys() == saved.keys()
    assert all(torch.equal(pairs[name], saved[name]) for name in saved)
