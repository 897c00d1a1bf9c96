"""CARDS compared with a loop without caches, and its first segment with the exact distribution of the acceptance."""

import math

import pytest
import torch
from scipy import stats
from support.random_models import random_model

from nlgrpo.engine.cascade_sampling import Cascade, sample
from nlgrpo.engine.generation import generate
from nlgrpo.engine.guided_search import CHOICE
from nlgrpo.engine.sampling import Sampling, draw, log_distribution, uniform_noise
from nlgrpo.model import decoder

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15], [16, 17]]
STOPS = tuple(range(20, 26))


@pytest.fixture(params=["llama", "gpt2"])
def model(request, tmp_path):
    random_model(request.param).save_pretrained(tmp_path / request.param)
    return decoder.load(tmp_path / request.param, dtype=torch.float64)


def worth(prompt, tokens):
    return sum((7 * token + 3 * len(prompt)) % 11 for token in tokens) / (1 + len(tokens))


def rewards(prompts, responses):
    return torch.tensor([worth(PROMPTS[p], tokens) for p, tokens in zip(prompts, responses, strict=True)])


@torch.no_grad()
def by_hand(model, prompt, how, sampling, seed, index):
    """The algorithm for one prompt, which reads the whole text for every token. Returns tokens and costs."""
    limit, accepted, tokens, asked, number = sampling.max_new_tokens, [], 0, 1, 0
    start = worth(prompt, [])
    first = (1 - how.alpha) * start + how.alpha * how.goal
    while True:
        tried = []
        while True:
            segment = []
            while len(accepted) + len(segment) < limit and len(segment) < how.longest:
                logits = model(
                    torch.tensor([*prompt, *accepted, *segment]), [len(prompt) + len(accepted) + len(segment)]
                )
                p = logits[-1].softmax(-1)
                if len(segment) >= how.shortest and -(p * p.log()).sum() >= how.entropy:
                    break
                place, position = torch.tensor([number]), torch.tensor([len(segment)])
                noise = uniform_noise(seed, torch.tensor([index]), place, position)[:, 0]
                segment.append(int(draw(log_distribution(logits[-1:], sampling), noise)))
                tokens += 1
                if segment[-1] in sampling.stop_ids:
                    break
            reward = worth(prompt, accepted + segment)
            asked += 1
            tau = min(how.goal, first + (how.goal - first) * len(accepted + segment) / limit)
            u = uniform_noise(seed ^ CHOICE, torch.tensor([index]), torch.tensor([number]), torch.tensor([0])).item()
            number += 1
            if u < min(1.0, math.exp(min(0.0, (reward - tau) / how.temperature))):
                break
            tried.append((reward, segment))
            if len(tried) == how.tries:
                reward, segment = max(tried, key=lambda pair: pair[0])
                break
        accepted += segment
        if len(accepted) == limit or accepted[-1] in sampling.stop_ids:
            return accepted, reward, tokens, asked


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "how",
    [
        Cascade(6.0, 0.5, 3.2, tries=3, shortest=2, longest=5),
        Cascade(9.0, 0.2, 3.4, tries=2, alpha=0.9, shortest=1),
        Cascade(4.0, tries=20),
    ],
)
def test_segments_are_accepted_as_the_paper_says(model, how):
    sampling = Sampling(max_new_tokens=13, stop_ids=STOPS, temperature=0.7, top_k=12)
    prompts, index = PROMPTS * 2, list(range(7, 15))

    def of_eight(rows, responses):
        return rewards([p % 4 for p in rows], responses)

    found, cost = sample(model, prompts, how, sampling, of_eight, seed=4, index=index)
    three, _ = sample(model, prompts, how, sampling, of_eight, seed=4, index=index, max_rows=3)
    assert [one.tokens for one in three] == [one.tokens for one in found]
    tokens = asked = 0
    for prompt, i, one in zip(prompts, index, found, strict=True):
        expected, reward, drawn, queries = by_hand(model, prompt, how, sampling, 4, i)
        assert list(one.tokens) == expected
        assert one.value == pytest.approx(reward)
        assert one.finished == (expected[-1] in STOPS)
        tokens, asked = tokens + drawn, asked + queries
    assert (cost.tokens, cost.queries) == (tokens, asked)
    assert cost.tokens > sum(len(one.tokens) for one in found)  # something was rejected
    assert cost.cache_bytes > 0


def test_a_goal_that_all_reach_gives_samples_of_the_model(model):
    """One segment as long as the response, accepted at once: the first sample of the engine, and no other token."""
    sampling = Sampling(max_new_tokens=9, stop_ids=STOPS)
    found, cost = sample(model, PROMPTS, Cascade(-1e9, entropy=1e9), sampling, rewards, seed=4)
    engine = generate(model, PROMPTS, 1, sampling, seed=4)
    assert [list(one.tokens) for one in found] == engine.completion_ids()
    assert (cost.tokens, cost.queries) == (int(engine.lengths.sum()), 8)
    for one, logprobs in zip(found, engine.logprobs[:, 0], strict=True):
        assert one.logprobs == pytest.approx(logprobs[: len(one.tokens)].tolist(), abs=1e-6)


@pytest.mark.slow
def test_the_first_segment_has_the_distribution_of_rejection_sampling(tmp_path):
    """Segments of one token and many tries: p(token) min(1, exp((r - tau) / beta)), normalized (chi-square test)."""
    random_model("gpt2").save_pretrained(tmp_path)
    model, count = decoder.load(tmp_path, dtype=torch.float64), 2000
    how = Cascade(8.0, 1.5, entropy=0.0, tries=10**6, alpha=1.0, shortest=1, longest=1)
    values = [(7 * token) % 11 for token in range(model.shape.vocab)]

    def first(prompts, responses):
        return torch.tensor([0.0 if not ids else float(values[ids[0]]) for ids in responses])

    sampling = Sampling(max_new_tokens=1)
    found, _ = sample(model, [[5, 6]] * count, how, sampling, first, seed=3, max_rows=2000)
    with torch.no_grad():
        p = model(torch.tensor([5, 6]), [2])[-1].softmax(-1)
    target = p * torch.tensor([min(1.0, math.exp((value - 8.0) / 1.5)) for value in values], dtype=torch.float64)
    expected = (target / target.sum() * count).tolist()
    drawn = [0] * len(values)
    for one in found:
        drawn[one.tokens[0]] += 1
    often = [i for i, x in enumerate(expected) if x >= 5]
    rest = [i for i, x in enumerate(expected) if x < 5]
    counts = [drawn[i] for i in often] + [sum(drawn[i] for i in rest)]
    truth = [expected[i] for i in often] + [sum(expected[i] for i in rest)]
    assert len(often) > 10
    assert stats.chisquare(counts, truth).pvalue > 1e-3
    assert stats.chisquare(counts, [float(p[i]) * count for i in often] + [float(p[rest].sum()) * count]).pvalue < 1e-9


def test_refused(model):
    for options, said in (
        ({"goal": math.inf}, "goal = inf"),
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"entropy": -1.0}, "entropy = -1.0"),
        ({"tries": 0}, "tries = 0"),
        ({"alpha": 1.5}, "alpha = 1.5"),
        ({"shortest": 0}, "shortest = 0"),
        ({"shortest": 65}, "shortest = 65: expected 1 to longest = 64"),
    ):
        with pytest.raises(ValueError, match=said):
            Cascade(**{"goal": 0.0} | options)
    silent = torch.tensor([0.0, math.nan, 0.0, 0.0])
    with pytest.raises(ValueError, match="the response to prompt 8 is nan"):
        sample(model, PROMPTS, Cascade(0.0), Sampling(max_new_tokens=3), lambda *_: silent, index=[7, 8, 9, 10])
