"""Generation compared with the trainer's forward pass, with transformers' filters, and with itself in other batches."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from support.random_models import CASES, random_model
from transformers.generation import logits_process

from nlgrpo.engine import decoding_memory, generation
from nlgrpo.engine.generation import generate
from nlgrpo.engine.kv_cache import KVCache
from nlgrpo.engine.sampling import Sampling, draw, log_distribution, uniform_noise
from nlgrpo.kernels import linear_logprob
from nlgrpo.model import decoder

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15], [5, 5, 5, 5]]


@pytest.fixture(params=["llama", "mistral-window", "qwen2-window", "qwen3", "neox", "gpt2"])
def model(request, tmp_path):
    random_model(request.param).save_pretrained(tmp_path)
    return decoder.load(tmp_path)


def trainer_logprobs(model, prompt, completion, temperature=1.0):
    tokens = torch.tensor([*prompt, *completion])
    select = torch.arange(len(prompt) - 1, len(tokens) - 1)
    with torch.no_grad():
        head = partial(linear_logprob, targets=torch.tensor(completion), temperature=temperature)
        return model(tokens, [len(tokens)], select, head)[0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_the_trainers(model, temperature):
    stops = tuple(range(20, 40))  # rows finish at different times, so that the cache is compacted
    out = generate(model, PROMPTS, 6, Sampling(max_new_tokens=30, stop_ids=stops, temperature=temperature), seed=3)
    assert out.tokens.shape[:2] == (4, 6)
    assert len(set(out.lengths.flatten().tolist())) > 4
    for i, ids in enumerate(out.completion_ids()):
        p, j = divmod(i, 6)
        ours = out.logprobs[p, j, : len(ids)]
        torch.testing.assert_close(ours, trainer_logprobs(model, PROMPTS[p], ids, temperature), atol=1e-4, rtol=1e-4)
        ended = ids[-1] in stops
        assert ended == bool(out.finished[p, j]) == (out.finish_reasons()[i] == "stop")
        assert not set(ids[:-1]) & set(stops)
        assert ended or len(ids) == 30
        assert out.tokens[p, j, len(ids) :].eq(0).all()
        assert out.logprobs[p, j, len(ids) :].eq(0).all()


def test_a_prompt_is_cached_once_and_columns_grow_for_unfinished_rows(model, monkeypatch):
    """Before the first doubling, P n + 32 R columns; when all rows reach the limit, P n + new R."""
    sizes, grow = [], KVCache.grow

    def counted(cache, tokens):
        sizes.append((len(cache.prompt), cache.column, cache.nbytes))
        grow(cache, tokens)
        sizes.append((len(cache.prompt), cache.column + tokens, cache.nbytes))

    monkeypatch.setattr(KVCache, "grow", counted)
    shape = model.shape
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * 4
    for stops in ((), tuple(range(20, 40))):
        sizes.clear()
        out = generate(model, PROMPTS, 6, Sampling(max_new_tokens=45, stop_ids=stops), seed=3)
        assert sizes == [
            (rows, columns, token * (len(PROMPTS) * max(map(len, PROMPTS)) + rows * columns))
            for rows, columns, _ in sizes
        ]
        assert [columns for _, columns, _ in sizes] == ([32, 45] if out.lengths.max() > 32 else [])
    assert out.finished.any()


@pytest.mark.sampled(4)
def test_samples_do_not_depend_on_the_batch(model):
    model = model.double()
    sampling = Sampling(max_new_tokens=24, stop_ids=(20, 21, 22))
    together = generate(model, PROMPTS, 4, sampling, seed=1, index=[7, 8, 9, 10]).completion_ids()
    rows = generate(model, PROMPTS, 4, sampling, seed=1, index=[7, 8, 9, 10], max_rows=1).completion_ids()
    halves = [generate(model, PROMPTS[i : i + 2], 4, sampling, seed=1, index=[7 + i, 8 + i]) for i in (0, 2)]
    assert together == rows == halves[0].completion_ids() + halves[1].completion_ids()
    fewer = generate(model, PROMPTS, 2, sampling, seed=1, index=[7, 8, 9, 10]).completion_ids()
    assert fewer == [together[p * 4 + j] for p in range(4) for j in range(2)]
    assert together != generate(model, PROMPTS, 4, sampling, seed=2, index=[7, 8, 9, 10]).completion_ids()
    assert together != generate(model, PROMPTS, 4, sampling, seed=1, index=[8, 9, 10, 11]).completion_ids()


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_greedy_equals_transformers_generate(case, tmp_path):
    theirs = random_model(case)
    theirs.save_pretrained(tmp_path)
    ours = generate(decoder.load(tmp_path), PROMPTS, 1, Sampling(temperature=0, max_new_tokens=20, stop_ids=(2,)))
    for prompt, ids in zip(PROMPTS, ours.completion_ids(), strict=True):
        out = theirs.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=2, pad_token_id=0
        )
        assert ids == out[0, len(prompt) :].tolist()
    assert ours.logprobs.eq(0).all()  # the sampling distribution has one token


def test_sampled_frequencies_follow_the_model(tmp_path):
    theirs = random_model("llama")
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        truth = theirs(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    n = 20_000
    out = generate(decoder.load(tmp_path), [PROMPTS[0]], n, Sampling(max_new_tokens=1), seed=5, max_rows=n)
    counts = torch.bincount(out.tokens.flatten(), minlength=99)
    chi2 = float(((counts - n * truth) ** 2 / (n * truth)).sum())
    assert chi2 < 98 + 5 * math.sqrt(2 * 98)  # 5 standard deviations above the mean of chi^2 with 98 degrees


@pytest.mark.parametrize(
    ("sampling", "processors"),
    [
        (Sampling(temperature=0.6), [logits_process.TemperatureLogitsWarper(0.6)]),
        (Sampling(top_k=7), [logits_process.TopKLogitsWarper(7)]),
        (Sampling(top_p=0.8), [logits_process.TopPLogitsWarper(0.8)]),
        (Sampling(min_p=0.05), [logits_process.MinPLogitsWarper(0.05)]),
        (
            Sampling(temperature=1.5, top_k=30, top_p=0.9, min_p=0.02),
            [
                logits_process.TemperatureLogitsWarper(1.5),
                logits_process.TopKLogitsWarper(30),
                logits_process.TopPLogitsWarper(0.9),
                logits_process.MinPLogitsWarper(0.02),
            ],
        ),
        (Sampling(top_k=500), []),  # more than the vocabulary
    ],
)
def test_filters_equal_transformers(sampling, processors):
    logits = 3 * torch.randn(50, 99, generator=torch.Generator().manual_seed(0))
    truth = logits
    for process in processors:
        truth = process(None, truth)
    ours = log_distribution(logits, sampling)
    assert torch.equal(ours.isneginf(), truth.isneginf())
    torch.testing.assert_close(ours, truth.log_softmax(-1))
    tokens = draw(ours.repeat_interleave(40, 0), torch.rand(2000, dtype=torch.float64))
    assert ours.repeat_interleave(40, 0).gather(-1, tokens[:, None]).isfinite().all()


def test_draw_inverts_the_distribution_exactly():
    log_probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64).log().expand(7, -1)
    noise = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9, 1 - 2**-53], dtype=torch.float64)
    assert draw(log_probs, noise).tolist() == [1, 1, 3, 3, 4, 4, 4]


def test_noise_is_uniform_and_independent():
    one = torch.arange(64)
    u = uniform_noise(0, one.repeat_interleave(64), one.repeat(64), torch.arange(64)).view(64, 64, 64)
    assert 0 <= u.min() < u.max() < 1
    assert u.unique().numel() == u.numel()
    n = u.numel()
    counts = torch.histc(u, 64, 0, 1)
    assert float(((counts - n / 64) ** 2 / (n / 64)).sum()) < 63 + 5 * math.sqrt(126)
    x, other = (
        u - 0.5,
        uniform_noise(1, one.repeat_interleave(64), one.repeat(64), torch.arange(64)).view(u.shape) - 0.5,
    )
    below = torch.ones(64, 64).tril(-1).bool()
    for a, b in [
        (x[1:], x[:-1]),  # neighbouring prompts
        (x[:, 1:], x[:, :-1]),  # samples
        (x[..., 1:], x[..., :-1]),  # positions
        (x[below], x.transpose(0, 1)[below]),  # prompt and sample swapped
        (x, other),  # another seed
    ]:
        assert abs(float((a * b).mean() * 12)) < 5 / math.sqrt(a.numel())


def test_splitmix_reference_values():
    """The finaliser of 1, 2, 3 times the golden gamma gives the published stream of SplitMix64 with seed 0."""
    from nlgrpo.engine.sampling import _mix

    golden = 0x9E3779B97F4A7C15
    counters = [(k * golden) % 2**64 for k in (1, 2, 3)]
    signed = torch.tensor([c - 2**64 if c >= 2**63 else c for c in counters])
    stream = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [x % 2**64 for x in _mix(signed).tolist()] == stream


def test_each_prompt_is_prefilled_once_and_finished_rows_are_dropped(tmp_path, monkeypatch):
    random_model("llama").save_pretrained(tmp_path)
    model = decoder.load(tmp_path)
    seen = []
    monkeypatch.setattr(
        decoder.nn.functional,
        "embedding",
        lambda x, *a, f=decoder.nn.functional.embedding, **k: seen.append(len(x)) or f(x, *a, **k),
    )
    out = generate(model, PROMPTS, 8, Sampling(max_new_tokens=60, stop_ids=tuple(range(20, 30))))
    assert seen[0] == sum(map(len, PROMPTS))
    assert seen[1] <= 32
    assert sum(seen[1:]) < 1.2 * int(out.lengths.sum()) + 60


def test_bad_input_is_refused(tmp_path):
    random_model("llama").save_pretrained(tmp_path)
    model = decoder.load(tmp_path)
    for prompts, message in (
        ([[3], []], "prompt 1 is empty"),
        ([[3], [99]], r"prompt 1 has a token id outside \[0, 99\)"),
        ([[3] * 90], r"90 tokens.*max_new_tokens = 16.*context of 96"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, prompts, 2, Sampling(max_new_tokens=16))
    with pytest.raises(ValueError, match="samples = 0"):
        generate(model, [[3]], 0, Sampling())
    for bad in ({"temperature": -1}, {"top_k": -1}, {"top_p": 0.0}, {"min_p": 1.5}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Sampling(**bad)
    assert generate(model, [], 4, Sampling()).tokens.shape == (0, 4, 0)


def test_every_family_is_covered():
    families = {kind.removesuffix("Config") for kind, _ in CASES.values()}
    assert families == {"Llama", "Mistral", "Qwen2", "Qwen3", "GPTNeoX", "GPT2"}
    assert all(hasattr(transformers, f"{f}Config") for f in families)


# --- rows that are decoded together -----------------------------------------------------------------------------------


def test_a_cpu_decodes_256_rows_together(tmp_path, monkeypatch):
    random_model("llama").save_pretrained(tmp_path)
    model, seen = decoder.load(tmp_path), []
    decode = generation._decode
    monkeypatch.setattr(
        generation, "_decode", lambda m, request, n: seen.append(len(request.prompts)) or decode(m, request, n)
    )
    generate(model, [[5]] * 100, 4, Sampling(max_new_tokens=1))
    assert seen == [64, 36]


@pytest.mark.parametrize("free", [2**20, 2**24, 2**28])
def test_a_gpu_decodes_as_many_rows_as_its_free_memory_holds(tmp_path, monkeypatch, free):
    """The count of rows_that_fit is tested with its own module; here, its arguments."""
    random_model("qwen2-window").save_pretrained(tmp_path)
    model = decoder.load(tmp_path, dtype=torch.bfloat16)
    monkeypatch.setattr(generation, "free_memory", lambda device: free)
    on_gpu = SimpleNamespace(
        shape=model.shape, head_weight=SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, itemsize=2)
    )
    found = generation.rows_together(on_gpu, 7, 8, Sampling(max_new_tokens=30))
    options = {"prompt_tokens": 7, "columns": 30, "itemsize": 2, "sampler": "triton"}
    used = decoding_memory.peak_bytes(model.shape, prompts=found // 8, rows=found, **options)
    more = decoding_memory.peak_bytes(model.shape, prompts=found // 8 + 1, rows=found + 8, **options)
    assert found % 8 == 0
    assert used <= 0.9 * free < more or found == 8
    fewer = generation.rows_together(on_gpu, 7, 8, Sampling(max_new_tokens=30, top_p=0.9))
    assert fewer <= found
    torch.use_deterministic_algorithms(True)
    try:
        assert generation.rows_together(on_gpu, 7, 8, Sampling(max_new_tokens=30)) == 256
    finally:
        torch.use_deterministic_algorithms(False)


def test_running_out_of_memory_names_the_setting(tmp_path, monkeypatch):
    random_model("llama").save_pretrained(tmp_path)
    model = decoder.load(tmp_path)

    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")

    monkeypatch.setattr(generation, "_decode", fails)
    with pytest.raises(
        ValueError, match=r"sampling 8 completions together .* set rollout.max_rows below 8, .* 3.00 GiB"
    ):
        generate(model, PROMPTS, 2, Sampling(max_new_tokens=3))
