"""Kernel launches and synchronizations of decoding and sampling, counted on the fake device.

Launches take 5 to 10 microseconds each, whatever the number of rows, so a model that launches too many decodes slowly
however fast the GPU is.
"""

import pytest
import torch
import transformers
from support.fake_cuda import on_fake_cuda

from nlgrpo.engine.backends import NativeEngine
from nlgrpo.engine.generation import RolloutRequest
from nlgrpo.engine.sampling import Sampling, next_tokens
from nlgrpo.model import adapters, decoder, lora
from nlgrpo.model.lora import LoraConfig

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES = {"qwen2": ("Qwen2Config", SIZES), "qwen3": ("Qwen3Config", SIZES | {"head_dim": 16})}
LORA = LoraConfig(rank=2, alpha=4.0)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [5] * 11]
# Upper bounds; where the code needs fewer, lower them.
LAUNCHES = {"qwen2": 31, "qwen3": 35}  # per layer and token
OUTSIDE = 24  # per token: the embedding, the last norm, the head, the choice of the tokens, and what the loop keeps
SAMPLING = 2


def build(family, layers, adapter=None):
    """A random model in bfloat16; its adapters are in float32, as they are trained."""
    kind, sizes = FAMILIES[family]
    model = decoder.build(getattr(transformers, kind)(**sizes, num_hidden_layers=layers))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2, generator=generator)
    if adapter is None:
        return model.to(torch.bfloat16)
    lora.attach(model, adapter, torch.bfloat16)
    adapters.init_adapters(model, adapter, 0)
    return model


def decoded(device, model, tokens):
    """Counts of sampling ``tokens`` tokens for 12 rows; no row stops."""
    engine = NativeEngine(model)
    with device.counting() as counts:
        rollout = engine.generate(RolloutRequest(PROMPTS, 4, Sampling(max_new_tokens=tokens), seed=1))
    assert rollout.tokens.is_cuda
    return counts


def per_token(device, family, adapter=None):
    """Counts of a token: per layer, and outside of the layers. What is done once per batch is in neither."""
    of_depth = {}
    for layers in (1, 2):
        model = build(family, layers, adapter).to("cuda:0")
        of_depth[layers] = decoded(device, model, 3) - decoded(device, model, 2)
    layer = of_depth[2] - of_depth[1]
    return layer, of_depth[1] - layer


def sampled(device):
    """Counts of the choice of the next tokens from logits in bfloat16."""
    logits = torch.randn(12, 97, device="cuda:0").bfloat16()
    noise = torch.rand(12, device="cuda:0", dtype=torch.float64)
    with device.counting() as counts, torch.inference_mode():
        next_tokens(logits, noise, Sampling(temperature=0.7))
    return counts


def check_launches(counts, most):
    found = counts.launches.total()
    assert found <= most, f"{found} launches, expected at most {most}: {counts.launched_at.most_common()}"


def check_synchronizations(counts, most):
    found = counts.synchronizations.total()
    assert found <= most, f"{found} synchronizations, expected at most {most}: {counts.synchronizations.most_common()}"


@pytest.fixture(scope="module")
def counts():
    """Counts per layer and outside of the layers, by family, without and with adapters."""

    def work(device):
        return {
            (family, adapted): per_token(device, family, LORA if adapted else None)
            for family in FAMILIES
            for adapted in (False, True)
        }

    return on_fake_cuda(work)


@pytest.mark.parametrize("family", FAMILIES)
def test_launches_of_a_layer_for_each_token(family, counts):
    layer, outside = counts[family, False]
    check_launches(layer, LAUNCHES[family])
    check_launches(outside, OUTSIDE)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_launch_nothing_more(family, counts):
    plain, adapted = counts[family, False], counts[family, True]
    for found, expected in zip(adapted, plain, strict=True):
        check_launches(found, expected.launches.total())


@pytest.mark.parametrize("adapted", [False, True], ids=["", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_does_not_wait_for_the_device(family, adapted, counts):
    for part in counts[family, adapted]:
        check_synchronizations(part, 0)
        assert not part.uploads


def test_launches_of_sampling():
    found = on_fake_cuda(sampled)
    check_launches(found, SAMPLING)
    check_synchronizations(found, 0)


# --- planted faults ---------------------------------------------------------------------------------------------------


def planted(monkeypatch, fault):
    """Let each layer also run ``fault`` on one of its weights."""
    each_block = decoder.Decoder.each_block

    def with_fault(model):
        for block in each_block(model):
            fault(block.norm1.weight)
            yield block

    monkeypatch.setattr(decoder.Decoder, "each_block", with_fault)


def test_an_additional_launch_is_noticed(monkeypatch, counts):
    planted(monkeypatch, lambda weight: weight.sum())
    layer, outside = on_fake_cuda(per_token, "qwen2")
    plain, plain_outside = counts["qwen2", False]
    assert (layer - plain).launches == {"aten::sum": 1}
    assert not (outside - plain_outside).launches
    with pytest.raises(AssertionError, match="launches, expected at most"):
        check_launches(layer, plain.launches.total())


def test_an_additional_synchronization_is_noticed(monkeypatch, counts):
    planted(monkeypatch, lambda weight: weight[0].item())
    layer, _ = on_fake_cuda(per_token, "qwen2")
    (place,) = layer.synchronizations
    assert place.startswith("tests/gpu/test_fake_decoding.py:")
    with pytest.raises(AssertionError, match="1 synchronizations, expected at most 0"):
        check_synchronizations(layer, 0)


def completions(device_name):
    """Tokens and log-probs of a model in float32."""
    model = build("qwen3", 2).float().to(device_name)
    rollout = NativeEngine(model).generate(
        RolloutRequest(PROMPTS, 4, Sampling(max_new_tokens=20, stop_ids=(2, 3, 4)), seed=1)
    )
    return rollout.tokens.cpu(), rollout.logprobs.cpu(), rollout.lengths.cpu()


def test_the_device_decodes_what_the_cpu_decodes():
    found = on_fake_cuda(lambda device: completions("cuda:0"))
    torch.testing.assert_close(found, completions("cpu"), rtol=1e-4, atol=1e-4)
    assert len(found[2].unique()) > 2  # rows stop at different times
