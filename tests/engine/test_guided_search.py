"""Guided search compared with a search without caches, best-of-N, exact values of a toy language, and brute force."""

import itertools
import math

import pytest
import torch
from scipy import special
from support.random_models import random_model
from support.search_truths import TextValue, best_by_brute_force

from nlgrpo.engine.chunked_decoding import ImplicitReward, ModelValue
from nlgrpo.engine.generation import generate
from nlgrpo.engine.guided_search import CHOICE, Search, search, select
from nlgrpo.engine.sampling import Sampling, draw, log_distribution, uniform_noise
from nlgrpo.model import decoder
from nlgrpo.model.reward_model import with_score_head

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]
FAMILIES = ["llama", "mistral-window", "qwen3", "neox", "gpt2"]


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def policy_of(family, tmp_path):
    random_model(family).save_pretrained(tmp_path / family)
    return decoder.load(tmp_path / family, dtype=torch.float64)


def value_of(family, tmp_path, seed=0):
    model = with_score_head(policy_of(family, tmp_path))
    with torch.no_grad():
        model.head.weight.copy_(torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(seed)))
    return model.double()


# --- compared with a search without caches ----------------------------------------------------------------------------


def last_output(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens), [len(tokens)])[-1]


def by_hand(policy, valued, prompt, how, sampling, seed, index):
    """Algorithms 4 and 5 without a cache. Returns candidates, as lists of tokens, and numbers of tokens and queries."""
    beams, successors, limit, tokens, queries = [[]], how.beams * how.successors, sampling.max_new_tokens, 0, 0
    while True:
        grown, candidates = [], []
        for k, beam in enumerate(beams):
            if beam and beam[-1] in sampling.stop_ids:
                candidates.append(beam)
                continue
            for b in range(successors):
                child = list(beam)
                while len(child) < min(limit, len(beam) + how.chunk):
                    place, position = torch.tensor([k * successors + b]), torch.tensor([len(child)])
                    noise = uniform_noise(seed, torch.tensor([index]), place, position)[:, 0]
                    logits = last_output(policy, [*prompt, *child])[None]
                    child.append(int(draw(log_distribution(logits, sampling), noise)))
                    tokens += 1
                    if child[-1] in sampling.stop_ids:
                        break
                grown.append(child)
                candidates.append(child)
        successors = how.successors
        if all(len(y) == limit or y[-1] in sampling.stop_ids for y in candidates):
            return candidates, tokens, queries
        queries += len(grown) * len(valued)
        terms = [[float(last_output(v, [*prompt, *y])[0]) / beta for v, beta in valued] for y in candidates]
        values = [sum(own) for own in terms]
        if how.softmax:  # SPI, Eq. 14, over all candidates of this round
            shares = special.softmax([sum(own[:-1]) for own in terms])
            values = [share + own[-1] for share, own in zip(shares.tolist(), terms, strict=True)]
        if how.temperature > 0:  # new Gumbel noise in each round
            length, count = torch.tensor([max(map(len, candidates))]), torch.arange(len(candidates))
            noise = uniform_noise(seed ^ CHOICE, torch.full_like(count, index), count, length)[:, 0]
            values = [v / how.temperature - math.log(-math.log(u)) for v, u in zip(values, noise.tolist(), strict=True)]
        beams = best_by_brute_force(candidates, values, how)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("diverse", [True, False])
def test_the_search_follows_the_paper(family, diverse, tmp_path):
    policy, other = policy_of(family, tmp_path), "llama" if family == "gpt2" else "gpt2"
    valued = [(value_of(family, tmp_path, 1), 1.0), (value_of(other, tmp_path, 2), 0.5)]
    how = Search(beams=3, successors=2, chunk=3, diverse=diverse)
    sampling = Sampling(max_new_tokens=11, stop_ids=tuple(range(20, 34)), temperature=0.7)
    values = [(ModelValue(f"value {i}", model, 11), beta) for i, (model, beta) in enumerate(valued)]
    found, cost = search(policy, PROMPTS, how, sampling, values, seed=4, index=[7, 8, 9])
    one_by_one, _ = search(policy, PROMPTS, how, sampling, values, seed=4, index=[7, 8, 9], max_rows=1)
    tokens = queries = 0
    for p, prompt in enumerate(PROMPTS):
        expected, sampled, queried = by_hand(policy, valued, prompt, how, sampling, 4, 7 + p)
        tokens, queries = tokens + sampled, queries + queried
        ours = [list(candidate.tokens) for candidate in found[p]]
        assert sorted(ours) == sorted(expected)
        assert ours == [list(candidate.tokens) for candidate in one_by_one[p]]
        assert [c.finished for c in found[p]] == [c.tokens[-1] in sampling.stop_ids for c in found[p]]
    assert (cost.tokens, cost.queries) == (tokens, queries)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_earlier_values_in_a_softmax(temperature, tmp_path, one_thread):
    """SPI, Eq. 14, where finished beams stay among the candidates; it changes the search, but not for one value."""
    policy = policy_of("llama", tmp_path)
    valued = [
        (value_of("gpt2", tmp_path, 1), 0.5),
        (value_of("llama", tmp_path, 2), 1.0),
        (value_of("neox", tmp_path), 2.0),
    ]
    sampling, prompts = Sampling(max_new_tokens=9, stop_ids=tuple(range(20, 34)), temperature=0.7), PROMPTS * 3
    index = list(range(7, 7 + len(prompts)))
    values = [(ModelValue(f"value {i}", model, 9), beta) for i, (model, beta) in enumerate(valued)]

    def found(softmax, count=3):
        how = Search(2, 3, 2, temperature, softmax=softmax)
        return how, search(policy, prompts, how, sampling, values[:count], seed=4, index=index)[0]

    how, ours = found(True)
    for prompt, i, candidates in zip(prompts, index, ours, strict=True):
        expected, _, _ = by_hand(policy, valued, prompt, how, sampling, 4, i)
        assert sorted(list(candidate.tokens) for candidate in candidates) == sorted(expected)
    assert ours != found(False)[1]
    assert any(candidate.places > 1 for candidates in ours for candidate in candidates)
    if temperature == 0:
        one, plain = ([[c.tokens for c in own] for own in found(softmax, 1)[1]] for softmax in (True, False))
        assert one == plain


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stops", [(), tuple(range(20, 34))])
def test_an_implicit_reward_is_the_difference_of_log_probs(family, stops, tmp_path, one_thread):
    """Values of complete candidates, and of every choice, against transformers' log-probs of whole texts."""
    policy, other = policy_of("llama", tmp_path), "llama" if family == "gpt2" else "gpt2"
    theirs = [random_model(family).double().eval(), random_model(other).double().eval()]
    for name, model in zip(("tuned", "untuned"), theirs, strict=True):
        model.save_pretrained(tmp_path / name)
    pair = [decoder.load(tmp_path / name, dtype=torch.float64) for name in ("tuned", "untuned")]
    sampling, how = Sampling(max_new_tokens=8, stop_ids=stops, temperature=0.7), Search(2, 3, 3)

    @torch.no_grad()
    def logprob(model, prompt, tokens):
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        return float(logits.log_softmax(-1)[range(len(tokens)), list(tokens)].sum())

    def difference(prompt, tokens):
        return logprob(theirs[0], prompt, tokens) - logprob(theirs[1], prompt, tokens)

    for prompt in PROMPTS[:2]:
        value = TextValue(lambda tokens, prompt=prompt: difference(prompt, tokens))
        expected, _ = search(policy, [prompt], how, sampling, [(value, 0.5)], seed=4, valued=True)
        ours = ImplicitReward("implicit", *pair, 8)
        found, _ = search(policy, [prompt], how, sampling, [(ours, 0.5)], seed=4, valued=True)
        assert [one.tokens for one in found[0]] == [one.tokens for one in expected[0]]
        for one in found[0]:
            # transformers computes norms and rotations of float64 models in float32
            assert one.value == pytest.approx(2 * difference(prompt, one.tokens), rel=1e-6, abs=1e-5)
    together, cost = search(policy, PROMPTS, how, sampling, [(ImplicitReward("implicit", *pair, 8), 0.5)], seed=4)
    assert [len({one.tokens for one in own}) > 1 for own in together] == [True] * 3
    alone, other_cost = search(policy, PROMPTS, how, sampling, [(TextValue(len), 1.0)], seed=4)
    assert cost.cache_bytes > other_cost.cache_bytes > 0
    assert len(alone) == len(together)


def test_beams_are_sampled_with_separate_noise(tmp_path):
    """The variant that samples beams (SPI): two of four per round, by Gumbel top-k of V / temperature."""
    policy, valued = policy_of("llama", tmp_path), [(value_of("gpt2", tmp_path, 1), 1.0)]
    how, prompts = Search(2, 2, chunk=2, temperature=0.3), PROMPTS * 4
    sampling = Sampling(max_new_tokens=8, stop_ids=(20, 21, 22))
    index = list(range(7, 7 + len(prompts)))
    found, _ = search(
        policy, prompts, how, sampling, [(ModelValue("value", valued[0][0], 8), 1.0)], seed=4, index=index
    )
    for prompt, i, candidates in zip(prompts, index, found, strict=True):
        expected, _, _ = by_hand(policy, valued, prompt, how, sampling, 4, i)
        assert [list(candidate.tokens) for candidate in candidates] == expected
    # Some beams finished before the last chunk.
    assert any(candidate.places > 1 for candidates in found for candidate in candidates)


@pytest.mark.parametrize("likeliest", [False, True])
def test_a_chunk_is_read_once(tmp_path, monkeypatch, likeliest):
    """Value models read all chunks; the policy does not read the last tokens of chunks that are not beams."""
    policy, value = policy_of("llama", tmp_path), value_of("gpt2", tmp_path, 1)
    how = Search(1, 4, 1, diverse=False, likeliest=True) if likeliest else Search(2, 3, 4)
    read = {id(policy): [], id(value): []}
    for model in (policy, value):
        enter = model.enter
        counted = lambda tokens, *args, m=model, e=enter: read[id(m)].append(tokens.numel()) or e(tokens, *args)  # noqa: E731
        monkeypatch.setattr(model, "enter", counted)
    search(policy, PROMPTS, how, Sampling(max_new_tokens=12), [(ModelValue("value", value, 12), 1.0)], seed=1)
    P, prompts, rounds = len(PROMPTS), sum(map(len, PROMPTS)), 12 // how.chunk
    assert read[id(value)] == [prompts] + [P * how.candidates * how.chunk] * (rounds - 1)
    chunk = [P * how.candidates] * (how.chunk - 1)  # the last token of a chunk is read only for the beams
    assert read[id(policy)] == [prompts, *chunk, *([P * how.beams, *chunk] * (rounds - 1))]


# --- known results ----------------------------------------------------------------------------------------------------


def test_chunks_of_full_length_are_best_of_n(family, tmp_path):
    policy, sampling = policy_of(family, tmp_path), Sampling(max_new_tokens=9, stop_ids=(20, 21, 22, 23))
    values = [(ModelValue("value", value_of("llama", tmp_path), 9), 1.0)]
    found, cost = search(policy, PROMPTS, Search(2, 3, chunk=9), sampling, values, seed=5)
    rollout = generate(policy, PROMPTS, 6, sampling, seed=5)
    assert [list(c.tokens) for candidates in found for c in candidates] == rollout.completion_ids()
    assert [c.finished for candidates in found for c in candidates] == rollout.finished.flatten().tolist()
    assert (cost.tokens, cost.queries) == (int(rollout.lengths.sum()), 0)


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_constant_value_is_plain_sampling(chunk, tmp_path):
    policy, sampling = policy_of("llama", tmp_path), Sampling(max_new_tokens=9, stop_ids=(20, 21, 22, 23))
    constant = [(TextValue(lambda tokens: 1.0), 1.0)]
    for beams in (1, 3):
        found, _ = search(policy, PROMPTS, Search(beams, 1, chunk, diverse=False), sampling, constant, seed=5)
        rows = generate(policy, PROMPTS, beams, sampling, seed=5).completion_ids()
        ours = [list(c.tokens) for candidates in found for c in candidates]
        assert sorted(ours) == sorted(rows)
        assert beams > 1 or ours == rows
        # with several successors, the first candidate is always kept: the first sample of `generate`
        found, _ = search(policy, PROMPTS, Search(beams, 4, chunk, diverse=False), sampling, constant, seed=5)
        rows = generate(policy, PROMPTS, 4 * beams, sampling, seed=5).completion_ids()
        assert [list(candidates[0].tokens) for candidates in found] == rows[:: 4 * beams]


def test_exact_values_find_the_optimum(tmp_path):
    """All 4^5 texts have random rewards; V is the largest reward that can still be reached."""
    policy = policy_of("llama", tmp_path)
    with torch.no_grad():
        policy.head_weight.zero_()  # all tokens are equally likely
    length, vocabulary = 5, policy.shape.vocab
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand((4,) * length, generator=generator, dtype=torch.float64)
    best = tuple(int(i) for i in torch.unravel_index(rewards.argmax(), rewards.shape))

    def reachable(tokens):
        return float(rewards[tuple(token % 4 for token in tokens)].max())

    how, sampling = Search(beams=2, successors=16, chunk=1), Sampling(max_new_tokens=length)
    found, _ = search(policy, PROMPTS, how, sampling, [(TextValue(reachable), 1.0)], seed=1)
    assert vocabulary > 4
    for candidates in found:
        assert best in {tuple(token % 4 for token in candidate.tokens) for candidate in candidates}


def test_a_search_whose_first_token_is_a_stop_id(tmp_path):
    policy = policy_of("llama", tmp_path)
    every = tuple(range(policy.shape.vocab))
    values = [(ModelValue("value", value_of("llama", tmp_path), 8), 1.0)]
    found, cost = search(policy, PROMPTS, Search(2, 2, 4), Sampling(max_new_tokens=8, stop_ids=every), values)
    assert all(len(c.tokens) == 1 and c.finished for candidates in found for c in candidates)
    assert (cost.tokens, cost.queries) == (12, 0)


@pytest.mark.slow
def test_beams_are_sampled_with_probabilities_of_their_values(tmp_path):
    """One beam of two candidates, which their first tokens identify: probability e^(V1/T) / (e^(V0/T) + e^(V1/T))."""
    policy, n = policy_of("llama", tmp_path), 4000
    how, sampling = Search(beams=1, successors=2, chunk=1, temperature=0.5), Sampling(max_new_tokens=2)
    found, _ = search(policy, [[5, 6]] * n, how, sampling, [(TextValue(lambda y: y[0] / 50), 1.0)], seed=2)
    first = generate(policy, [[5, 6]] * n, 2, Sampling(max_new_tokens=1), seed=2).tokens[..., 0]
    kept = torch.tensor([candidates[0].tokens[0] for candidates in found])
    chance = (first / 50 / 0.5).double().softmax(-1)
    differ = first[:, 0] != first[:, 1]
    assert differ.sum() > n / 2
    excess = (kept == first[:, 1]).double() - chance[:, 1]
    std = (chance[:, 0] * chance[:, 1])[differ].sum().sqrt()
    assert abs(excess[differ].sum()) < 4 * std
    assert ((kept == first[:, 0]) | (kept == first[:, 1])).all()


# --- Algorithm 5 ------------------------------------------------------------------------------------------------------


def test_distinct_candidates_come_first():
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        count, beams = (int(torch.randint(1, 8, (1,), generator=generator)) for _ in range(2))
        groups = torch.randint(0, 4, (count,), generator=generator).tolist()
        values = torch.rand(count, generator=generator).tolist()
        ours = select(values, groups, beams)
        k = min(beams, count)
        assert len(set(ours)) == len(ours) == k

        def quality(subset, groups=groups, values=values):
            return 1e6 * len({groups[i] for i in subset}) + sum(values[i] for i in subset)

        best = max(map(quality, itertools.combinations(range(count), k)))
        assert math.isclose(quality(ours), best)
        assert select(values, groups, beams, diverse=False) == sorted(range(count), key=lambda i: -values[i])[:beams]


def test_equal_values_keep_their_order():
    assert select([1.0, 1.0, 1.0, 2.0], ["a", "a", "b", "c"], 3) == [3, 0, 2]
    assert select([1.0, 1.0, 1.0], "aaa", 2) == [0, 1]


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beams": 0}, "beams = 0"),
        ({"successors": 1.5}, "successors = 1.5"),
        ({"chunk": True}, "chunk = True"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": math.nan}, "temperature = nan"),
    ],
)
def test_bad_options_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Search(**change)


def test_values_that_are_not_finite_are_refused(tmp_path):
    policy, how, sampling = policy_of("llama", tmp_path), Search(2, 2, 2), Sampling(max_new_tokens=4)
    for bad in (math.nan, math.inf):
        values = [(TextValue(lambda tokens: 0.0), 1.0), (TextValue(lambda tokens, bad=bad: bad), 1.0)]
        with pytest.raises(ValueError, match=rf"by hand returned {bad} for a candidate of prompt 7 with 2 tokens"):
            search(policy, PROMPTS[:1], how, sampling, values, index=[7])
    for beta in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="beta of by hand"):
            search(policy, PROMPTS, how, sampling, [(TextValue(len), beta)])
    with pytest.raises(ValueError, match=r"sum_i V_i / beta_i is not finite for beta = 9.99989e-321"):
        search(policy, PROMPTS, how, sampling, [(TextValue(len), 1e-320)])
    small = ModelValue("small", value_of("llama", tmp_path), policy.shape.context)
    with pytest.raises(ValueError, match=r"small has a context of \d+ tokens, but candidates have up to"):
        search(policy, PROMPTS, how, sampling, [(small, 1.0)])
    with pytest.raises(ValueError, match=r"values\[1\] is NaN"):
        select([0.0, math.nan], "ab", 1)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("how", [Search(1, 2, 2), Search(2, 2, 6), Search(1, 2, 1, likeliest=True)])
def test_nan_in_the_policy_is_reported_as_an_error_of_the_model(how, temperature, tmp_path):
    policy, sampling = policy_of("llama", tmp_path), Sampling(max_new_tokens=6, temperature=temperature)
    with torch.no_grad():
        policy.norm.weight[0] = math.nan
    for values in ([], [(TextValue(len), 1.0)]):
        with pytest.raises(ValueError, match=r"the model's logits, at temperature = \d, are not finite"):
            search(policy, PROMPTS, how, sampling, values)
    with pytest.raises(ValueError, match="are not finite"):
        generate(policy, PROMPTS, 2, sampling)


@pytest.mark.parametrize(("sampling", "possible"), [({"top_k": 3}, 3), ({"temperature": 0.0}, 1), ({}, 999)])
def test_the_most_likely_tokens_are_possible_ones(sampling, possible, tmp_path):
    """There are fewer successors than requested if a filter or the vocabulary leaves fewer tokens."""
    policy, sampling = policy_of("llama", tmp_path), Sampling(max_new_tokens=2, **sampling)
    vocab = policy.shape.vocab
    how = Search(1, vocab + 9, 1, diverse=False, likeliest=True)
    values = [(TextValue(lambda tokens: tokens[-1] / 100), 1.0)]
    found, cost = search(policy, PROMPTS, how, sampling, values, max_rows=1)
    count = min(possible, vocab)
    for prompt, candidates in zip(PROMPTS, found, strict=True):
        [(token,)] = {candidate.tokens[:1] for candidate in candidates}
        logp = log_distribution(last_output(policy, prompt)[None], sampling)[0]
        first = [token for token in range(vocab) if logp[token] > -math.inf]
        assert token == max(first, key=lambda t: float(logp[t]) + t / 100)
        assert len(first) == len({candidate.tokens for candidate in candidates}) == len(candidates) == count
        assert all(math.isfinite(candidate.logprob) for candidate in candidates)
    assert (cost.tokens, cost.queries) == (2 * 3 * count, 3 * count)


def test_the_noise_of_choices_differs_from_that_of_tokens():
    places, positions = torch.arange(16), torch.tensor([3])
    tokens, choices = (uniform_noise(seed, torch.zeros_like(places), places, positions) for seed in (5, 5 ^ CHOICE))
    assert not (tokens == choices).any()
