"""The choice of the next tokens on a GPU compared with exact cumulative probabilities and with the CPU."""

import pytest
import torch
from precision import FLOAT32, check

from nlgrpo.engine.sampling import Sampling, log_distribution, next_tokens, uniform_noise

ROWS, VOCABULARY = 64, 1003
SETTINGS = {
    "plain": Sampling(),
    "temperature": Sampling(temperature=0.7),
    "top_k": Sampling(top_k=20),
    "top_p": Sampling(top_p=0.8),
    "min_p": Sampling(min_p=0.05),
    "all filters": Sampling(temperature=1.3, top_k=200, top_p=0.9, min_p=0.01),
    "greedy": Sampling(temperature=0),
}


def case(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, VOCABULARY, generator=generator)
    return logits.to(dtype), torch.rand(ROWS, generator=generator, dtype=torch.float64)


def explained(tokens, noise, exact, room=1e-5):
    """Whether the noise lies in the interval of cumulative probabilities of each token, up to ``room``."""
    cumulative = exact.exp().cumsum(-1)
    end = cumulative.gather(1, tokens[:, None])[:, 0]
    begin = end - exact.exp().gather(1, tokens[:, None])[:, 0]
    return (noise >= begin - room) & (noise <= end + room)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_and_log_probs(gpu, name, dtype):
    logits, noise = case(dtype)
    exact = log_distribution(logits.double(), SETTINGS[name])
    tokens, logprobs = (x.cpu() for x in next_tokens(logits.to(gpu), noise.to(gpu), SETTINGS[name]))
    assert explained(tokens, noise, exact).all()
    planted = (tokens + 1) % VOCABULARY
    assert not explained(planted, noise, exact).all()
    truth = exact.gather(1, tokens[:, None])[:, 0]
    if name == "greedy":
        assert torch.equal(tokens, logits.argmax(-1))
        assert not logprobs.any()
    else:
        check(logprobs, truth, FLOAT32, planted=1.01 * truth)
    on_cpu, _ = next_tokens(logits, noise, SETTINGS[name])
    assert torch.equal(tokens, on_cpu)


def test_noise_is_the_same_bit_for_bit(gpu):
    def of(device):
        prompts, samples = torch.tensor([0, 0, 7, 2**40], device=device), torch.tensor([0, 1, 0, 3], device=device)
        return uniform_noise(11, prompts, samples, torch.arange(50, device=device)).cpu()

    assert torch.equal(of(gpu), of("cpu"))
    assert len(of("cpu").unique()) == 200
