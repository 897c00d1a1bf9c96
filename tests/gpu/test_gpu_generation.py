"""Generation on a GPU: tokens and log-probs compared with the CPU, and decoding with one packed forward pass."""

from dataclasses import replace

import pytest
import torch
from precision import FLOAT32, check, error

from nlgrpo.engine import logprobs
from nlgrpo.engine.generation import CachedDecoder, generate
from nlgrpo.engine.sampling import Sampling
from nlgrpo.kernels import ecdf
from nlgrpo.model import decoder
from nlgrpo.model.packing import pack

CASES = ["llama", "mistral-window", "qwen2", "qwen3-tied", "neox", "gpt2"]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]
SAMPLES = 4


def sampled(folder, device, temperature=0.9, max_rows=8):
    """Completions of which some stop early, so that rows leave the batch, also in the middle of a chunk of tokens."""
    model = decoder.load(folder, device=device)
    sampling = Sampling(temperature=temperature, max_new_tokens=18, stop_ids=(2, 18, 20, 21, 22, 23, 63, 65))
    return generate(model, PROMPTS, SAMPLES, sampling, seed=3, max_rows=max_rows)


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_log_probs_in_float32(gpu, models, case):
    found, truth = sampled(models(case), gpu), sampled(models(case), "cpu", max_rows=100)
    assert torch.equal(found.tokens.cpu(), truth.tokens)
    assert torch.equal(found.lengths.cpu(), truth.lengths)
    assert len(truth.lengths.unique()) > 2
    scored = generate_logprobs(models(case), truth, "cpu", temperature=0.91)
    check(found.logprobs, truth.logprobs, FLOAT32, planted=scored)


def generate_logprobs(folder, rollout, device, *, temperature, dtype=torch.float32, skipped=0):
    """Log-probs (P, M, L) of the completions by one packed forward pass, without the first tokens of the prompts."""
    model = decoder.load(folder, dtype=dtype, device=device)
    prompts = [prompt[skipped:] or prompt for prompt in rollout.prompt_ids for _ in range(SAMPLES)]
    batches = pack(prompts, rollout.completion_ids(), range(len(prompts)), 10**6, device)
    found = logprobs.completion_logprobs(model, rollout_on(rollout, device), batches, temperature)
    return found.view(rollout.logprobs.shape)


def rollout_on(rollout, device):
    return replace(rollout, logprobs=rollout.logprobs.to(device), tokens=rollout.tokens.to(device))


@pytest.mark.parametrize("case", CASES)
def test_decoding_in_bfloat16_agrees_with_a_packed_forward_pass(gpu, models, case):
    model = decoder.load(models(case), dtype=torch.bfloat16, device=gpu)
    rollout = generate(model, PROMPTS, SAMPLES, Sampling(max_new_tokens=10), seed=3)
    again = generate_logprobs(models(case), rollout, gpu, temperature=1.0, dtype=torch.bfloat16)
    truth = generate_logprobs(models(case), rollout, torch.device("cpu"), temperature=1.0)
    missing = generate_logprobs(models(case), rollout, torch.device("cpu"), temperature=1.0, skipped=1)
    for found in (rollout.logprobs, again):
        check(found, truth, 0.03, planted=missing)
        check(found, truth, 0.03, planted=1.05 * truth)


def test_the_cache_branches_grows_and_drops_rows(gpu, models):
    """Rows read one and several tokens, are copied, get more room, and leave; each result is that of a whole pass."""
    model = decoder.load(models("qwen3"), device=gpu)
    plain = decoder.load(models("qwen3"))
    texts = [list(prompt) for prompt in PROMPTS]

    def last_logits(rows):
        with torch.no_grad():
            return torch.stack([plain(torch.tensor(row), [len(row)])[-1] for row in rows])

    def read(rows, new):
        logits = cached.read(torch.tensor(new, device=gpu), select=torch.full((len(new),), len(new[0]) - 1, device=gpu))
        rows = [row + tokens for row, tokens in zip(rows, new, strict=True)]
        truth = last_logits(rows)
        planted = last_logits([row[:-2] + row[-1:] for row in rows])
        check(logits, truth, FLOAT32, planted=planted)
        return rows

    with torch.inference_mode():
        cached = CachedDecoder(model)
        assert error(cached.begin(PROMPTS), last_logits(texts)) < FLOAT32
        cached.branch([0, 0, 1, 2, 2], 4)
        texts = [list(texts[i]) for i in (0, 0, 1, 2, 2)]
        texts = read(texts, [[20], [21], [22], [23], [24]])
        texts = read(texts, [[30, 31, 32], [33, 34, 35], [36, 37, 38], [39, 40, 41], [42, 43, 44]])
        cached.cache.grow(3)
        texts = read(texts, [[50, 51], [52, 53], [54, 55], [56, 57], [58, 59]])
        source, target = torch.tensor([4], device=gpu), torch.tensor([1], device=gpu)
        cached.cache.drop(source, target, 4)
        texts = [texts[0], texts[4], texts[2], texts[3]]
        read(texts, [[60], [61], [62], [63]])


def test_empirical_cdfs(gpu):
    generator = torch.Generator().manual_seed(0)
    samples = torch.randint(0, 9, (5, 40), generator=generator).float()
    queries = torch.randn(5, 7, generator=generator) * 4
    weights = torch.rand(5, 40, generator=generator)
    for side in ("strict", "weak", "mid"):
        for w in (None, weights):
            moved = None if w is None else w.to(gpu)
            found = ecdf.cdf(samples.to(gpu), queries.to(gpu), side, weights=moved)
            truth = ecdf.cdf(samples, queries, side, weights=w)
            without_one = ecdf.cdf(samples[:, 1:], queries, side, weights=None if w is None else w[:, 1:])
            check(found, truth, 1e-12, planted=without_one)
        # Not to the bit: on a GPU, PyTorch multiplies by the inverse of the number of samples.
        other = ecdf.ranks(samples, "weak" if side == "strict" else "strict")
        check(ecdf.ranks(samples.to(gpu), side), ecdf.ranks(samples, side), 1e-15, planted=other)
