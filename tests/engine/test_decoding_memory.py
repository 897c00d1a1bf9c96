"""The memory of sampling against PyTorch's own record of allocations, by the profiler."""

import dataclasses
import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from nlgrpo.apps.plan.activations import per_token
from nlgrpo.engine import decoding_memory
from nlgrpo.engine.generation import generate
from nlgrpo.engine.sampling import Sampling, next_tokens
from nlgrpo.kernels import Branches, branch_attention, extension
from nlgrpo.model.architectures import Shape
from nlgrpo.model.decoder import Decoder

TWO = {"layers": 2, "windows": (None, None), "scales": (1.0, 1.0)}
SHAPE = Shape("llama", vocab=50, width=16, heads=4, kv_heads=2, head_dim=4, ffn=24, context=4096, rotary_dim=4,
              **TWO)  # fmt: skip
LEARNED = {"norm": "layer", "gated": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
QWEN2 = Shape("qwen2", vocab=151936, width=896, layers=24, heads=14, kv_heads=2, head_dim=64, ffn=4864, context=32768,
              rotary_dim=64, qkv_bias=True, tied=True, windows=(None,) * 24, scales=(0.125,) * 24)  # fmt: skip
FAMILIES = {
    "qwen2": QWEN2,
    "qwen3": dataclasses.replace(QWEN2, family="qwen3", width=1024, heads=16, kv_heads=8, head_dim=128, ffn=3072,
                                 rotary_dim=128, qk_norm=True, qkv_bias=False),
    "llama": dataclasses.replace(QWEN2, family="llama", width=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
                                 rotary_dim=128, qkv_bias=False),
    "gpt2": dataclasses.replace(QWEN2, family="gpt2", kv_heads=14, ffn=3584, rotary_dim=0, activation="gelu_new",
                                **LEARNED),
    "gpt_neox": dataclasses.replace(QWEN2, family="gpt_neox", kv_heads=14, ffn=3584, rotary_dim=16, activation="gelu",
                                    parallel=True, **LEARNED),
}  # fmt: skip


@pytest.fixture
def plain(monkeypatch):
    """Plain PyTorch, as on a GPU without Triton."""
    monkeypatch.setattr(extension, "available", lambda: False)


def measured(folder, work):
    """Most bytes that ``work`` has allocated at a time: those of tensors, and those inside of PyTorch's ops."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = work()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    del kept
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    now = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    return peak


# --- the sampler ------------------------------------------------------------------------------------------------------

TEMPERED = {"temperature": 0.7}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("options", "least"),
    [
        (TEMPERED, 1.0),  # all that is counted
        ({}, 0.85),
        ({"temperature": 0.0}, 0.85),  # what the filters made is freed before the token is drawn
        ({"top_k": 20}, 0.85),
        ({"min_p": 0.1}, 0.85),
        (TEMPERED | {"top_k": 100, "min_p": 0.1}, 0.85),
        ({"top_p": 0.9}, 0.6),  # a CPU's sort has a smaller workspace
        (TEMPERED | {"top_k": 100, "top_p": 0.9, "min_p": 0.1}, 0.6),
    ],
    ids=str,
)
def test_plain_sampling_allocates_what_is_counted(tmp_path, plain, options, least, dtype):
    """Also the float64 copy inside of ``cumsum``, which no count of tensors sees."""
    rows, shape, sampling = 4, dataclasses.replace(SHAPE, vocab=20000), Sampling(**options)
    logits = torch.randn(rows, shape.vocab).to(dtype)
    noise = torch.rand(rows, dtype=torch.float64)
    kind = decoding_memory.sampler_of(filtered=sampling.filtered, top_p=sampling.top_p, fused=False)
    counted = rows * decoding_memory.sampler_bytes(shape, dtype.itemsize, kind)
    found = measured(tmp_path, lambda: next_tokens(logits, noise, sampling))
    assert least * counted <= found <= 1.001 * counted


def test_filters_take_plain_pytorch():
    assert decoding_memory.sampler_of(filtered=False, top_p=1.0, fused=True) == "triton"
    assert decoding_memory.sampler_of(filtered=True, top_p=1.0, fused=True) == "torch"
    assert decoding_memory.sampler_of(filtered=True, top_p=0.9, fused=True) == "top_p"


def test_a_logit_costs_thirty_bytes_in_plain_pytorch_and_almost_none_in_triton():
    """bfloat16, with the logit itself: 512 rows of Qwen2's vocabulary are 2.3 GB, and 0.16 GB."""
    logits, vocab = 512 * QWEN2.vocab * 2, 512 * QWEN2.vocab
    assert logits + 512 * decoding_memory.sampler_bytes(QWEN2, 2, "torch") == 30 * vocab
    assert 512 * decoding_memory.sampler_bytes(QWEN2, 2, "triton") < 0.01 * logits


# --- attention and prefill --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "column"), [(2000, 0), (0, 2000), (1000, 1000)])
def test_scores_of_a_layer_allocate_what_is_counted(tmp_path, plain, prompt, column):
    """With few key heads, so that almost all of it is scores."""
    shape = dataclasses.replace(SHAPE, heads=32, kv_heads=1, head_dim=2)
    rows, prompt = 4, max(1, prompt)
    branches = Branches(torch.tensor([prompt] * 2), torch.tensor([0, 0, 1, 1]))
    own = torch.randn(2, rows, 1, column + 1, 2)
    prompts, qkv = torch.randn(2, 2, 1, prompt, 2), torch.randn(rows, 34, 2)
    work = lambda: branch_attention(qkv, None, own, column, prompts, branches, heads=32, scale=1.0)  # noqa: E731
    counted = rows * decoding_memory._attention(shape, prompt, column + 1, 4)
    assert 0.6 * counted <= measured(tmp_path, work) <= 1.02 * counted


@pytest.mark.parametrize("name", FAMILIES)
def test_the_activations_of_a_prefill_are_those_of_a_traced_block(name):
    """The plan's trace of a block without memory; 10% for what the attention takes as inputs."""
    shape = FAMILIES[name]
    traced = per_token(shape, None, torch.bfloat16, "varlen").forward + 2 * shape.width  # and the layer's input
    counted = decoding_memory._layer_numbers(shape) * 2
    assert traced <= counted <= 1.3 * traced


# --- a whole rollout --------------------------------------------------------------------------------------------------

ROLLOUTS = {  # what takes most of the memory
    "cache": (dataclasses.replace(SHAPE, layers=12, windows=(None,) * 12, scales=(1.0,) * 12), 40, 66, "torch"),
    "sampler": (dataclasses.replace(SHAPE, vocab=20000), 5, 33, "torch"),
    "top_p": (dataclasses.replace(SHAPE, vocab=20000), 5, 33, "top_p"),
    "scores": (dataclasses.replace(SHAPE, heads=32, kv_heads=1, head_dim=2, rotary_dim=2), 1500, 8, "torch"),
    "prefill": (dataclasses.replace(SHAPE, ffn=3000), 1500, 8, "torch"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_rollout_allocates_at_most_what_is_counted(name, tmp_path, plain):
    """Its peak in float32, with the attention and the sampler in plain PyTorch: no more, and not much less.

    1% is for what is not counted, such as cos and sin of all positions.
    """
    shape, prompt, columns, sampler = ROLLOUTS[name]
    torch.manual_seed(0)
    model = Decoder(shape, torch.ones(shape.rotary_dim // 2))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    sampling = Sampling(max_new_tokens=columns, temperature=0.7, top_p=0.9 if sampler == "top_p" else 1.0)
    found = measured(tmp_path, lambda: generate(model, [[1] * prompt, [2] * prompt], 4, sampling, max_rows=8))
    counted = decoding_memory.peak_bytes(
        shape, prompts=2, rows=8, prompt_tokens=prompt, columns=columns, itemsize=4, sampler=sampler
    )
    assert 0.5 * counted <= found <= 1.01 * counted


# --- rows that fit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["triton", "torch", "top_p"])
@pytest.mark.parametrize("free", [1e9, 10e9, 70e9])
@pytest.mark.parametrize("samples", [1, 8])
def test_as_many_rows_as_the_memory_holds(free, samples, sampler):
    sizes = {"prompt_tokens": 512, "columns": 512, "itemsize": 2, "sampler": sampler}
    rows = decoding_memory.rows_that_fit(QWEN2, samples=samples, free=free, **sizes)
    assert rows % samples == 0
    fits = decoding_memory.peak_bytes(QWEN2, prompts=rows // samples, rows=rows, **sizes)
    more = decoding_memory.peak_bytes(QWEN2, prompts=rows // samples + 1, rows=rows + samples, **sizes)
    assert fits <= free < more


@pytest.mark.parametrize("free", [-1e9, 0.0, 1e3])
def test_the_samples_of_one_prompt_are_decoded_in_any_case(free):
    rows = decoding_memory.rows_that_fit(QWEN2, prompt_tokens=9, columns=9, samples=8, itemsize=2, free=free)
    assert rows == 8


def test_the_keys_and_values_of_a_row():
    """Counted by hand: 24 layers of keys and values of 2 heads of 64 numbers, 512 tokens, bfloat16."""
    assert decoding_memory.cache_bytes(QWEN2, 512, 2) == 24 * 2 * 2 * 64 * 512 * 2
    sizes = {"prompt_tokens": 512, "columns": 512, "itemsize": 2}
    cache = decoding_memory.cache_bytes(QWEN2, 512, 2)
    logits = 2 * 151936
    noise = 512 * 28
    assert cache + 2 * logits + noise < decoding_memory.row_bytes(QWEN2, **sizes) < cache + 3 * logits + noise
