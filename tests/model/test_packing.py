"""Micro-batches hold every sequence once, and give the log-probabilities of each sequence run alone."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import WORDS, tiny_model

from nlgrpo.kernels import linear_logprob
from nlgrpo.model import decoder
from nlgrpo.model.packing import empty_micro_batch, pack, pack_sets

ids = st.lists(st.integers(0, 99), min_size=1, max_size=9)
PROMPTS = [[1], [2, 3], [4, 5, 6, 7, 8, 9, 10, 11], [1], [1, 2]]  # the first is repeated; another begins with it
sequences = st.lists(st.tuples(st.one_of(ids, st.sampled_from(PROMPTS)), ids), max_size=12)


def size(prompts, completions, rows):
    """Tokens of ``rows``, each prompt once."""
    return sum(map(len, {tuple(prompts[r]) for r in rows})) + sum(len(completions[r]) - 1 for r in rows)


def read_back(batch, prompts, completions):
    """Check the indices of a micro-batch, and return its rows."""
    starts = torch.tensor([0, *batch.segments.lengths]).cumsum(0).tolist()
    positions = batch.segments.positions(torch.device("cpu")).tolist()
    rows = batch.row.unique_consecutive().tolist()
    for r in rows:
        of_r = batch.row == r
        assert batch.targets[of_r].tolist() == completions[r]
        assert batch.offset[of_r].tolist() == list(range(len(completions[r])))
        select = batch.select[of_r].tolist()
        # the token that predicts each target is the one before it in the sequence
        assert [positions[i] for i in select] == list(range(len(prompts[r]) - 1, len(prompts[r] + completions[r]) - 1))
        assert batch.tokens[select].tolist() == [prompts[r][-1], *completions[r][:-1]]
        # what the last of them attends to: its prefix, and its own segment up to itself
        segment = next(i for i, start in enumerate(starts[1:]) if select[-1] < start)
        prefix, seen = batch.segments.prefixes[segment], batch.tokens[starts[segment] : select[-1] + 1].tolist()
        before = [] if prefix is None else batch.tokens[starts[prefix] : starts[prefix + 1]].tolist()
        assert before + seen == (prompts[r] + completions[r])[:-1]
    return rows


@settings(max_examples=300, deadline=None)
@given(sequences, st.integers(1, 60), st.data())
def test_every_selected_sequence_is_packed_once_with_correct_indices(pairs, max_tokens, data):
    prompts, completions = [p for p, _ in pairs], [c for _, c in pairs]
    rows = data.draw(st.lists(st.sampled_from(range(len(pairs))), unique=True)) if pairs else []
    seen = []
    for batch in pack(prompts, completions, rows, max_tokens):
        packed = read_back(batch, prompts, completions)
        assert len(batch.tokens) == sum(batch.segments.lengths) == size(prompts, completions, packed)
        assert len(batch.tokens) <= max_tokens or sum(len(completions[r]) > 1 for r in packed) <= 1
        seen += packed
    assert sorted(seen) == sorted(rows)


@settings(max_examples=100, deadline=None)
@given(sequences, st.integers(1, 60), st.integers(1, 3))
def test_sets_are_never_split(pairs, max_tokens, width):
    prompts, completions = [p for p, _ in pairs], [c for _, c in pairs]
    sets = [list(range(i, min(i + width, len(pairs)))) for i in range(0, len(pairs), width)]
    seen = []
    for batch in pack_sets(prompts, completions, sets, max_tokens):
        packed = read_back(batch, prompts, completions)
        packed_sets = [rows for rows in sets if rows[0] in packed]
        assert sorted(packed) == sorted(r for rows in packed_sets for r in rows)
        assert len(batch.tokens) <= max_tokens or sum(size(prompts, completions, s) > 1 for s in packed_sets) >= 1
        assert len(batch.tokens) == size(prompts, completions, packed)
        seen += packed
    assert sorted(seen) == list(range(len(pairs)))


@settings(max_examples=100, deadline=None)
@given(sequences, st.integers(20, 60))
def test_no_two_micro_batches_fit_into_one(pairs, max_tokens):
    """First fit, longest first; also where a prompt is shared, which makes the union smaller than the sum."""
    prompts, completions = [p for p, _ in pairs], [c for _, c in pairs]
    batches = pack(prompts, completions, range(len(pairs)), max_tokens)
    sizes = sorted(len(batch.tokens) for batch in batches)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > max_tokens


def test_a_group_that_is_too_long_is_split_and_its_prompt_repeated():
    prompts, completions = [[1, 2, 3]] * 5 + [[9]], [[4] * n for n in (5, 3, 4, 3, 1)] + [[8, 8]]
    batches = pack(prompts, completions, range(6), 10)
    assert [batch.row.unique_consecutive().tolist() for batch in batches] == [[0, 2, 4], [1, 3, 5]]
    assert [len(batch.tokens) for batch in batches] == [3 + 4 + 3 + 0, 3 + 2 + 2 + 2]
    assert [batch.segments.lengths for batch in batches] == [[3, 4, 3], [3, 2, 2, 2]]
    assert [batch.segments.prefixes for batch in batches] == [[None, 0, 0], [None, 0, 0, None]]


def test_a_sequence_that_is_too_long_has_its_own_micro_batch():
    prompts, completions = [[1], [2], [3]], [[4], [5] * 20, [6]]
    lengths = [b.segments.lengths for b in pack(prompts, completions, [0, 1, 2], 4)]
    assert sorted(lengths) == [[1, 1], [20]]


@pytest.mark.parametrize("max_tokens", [1, 17, 1000])
def test_log_probabilities_equal_those_of_each_sequence_run_alone(tmp_path, max_tokens):
    theirs = tiny_model(tmp_path, "gpt2", scale=0.5)
    ours = decoder.load(tmp_path, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(3, len(WORDS), (n,), generator=generator).tolist()  # noqa: E731
    prompts = [draw(n) for n in (1, 5, 3, 7, 2)]
    completions = [draw(n) for n in (4, 1, 9, 6, 2)]
    rows = [4, 0, 2, 3]
    out = torch.full((5, 9), torch.nan, dtype=torch.float64)
    with torch.no_grad():
        for batch in pack(prompts, completions, rows, max_tokens):
            logprob, _ = ours(
                batch.tokens, batch.segments, batch.select, partial(linear_logprob, targets=batch.targets)
            )
            out[batch.row, batch.offset] = logprob
            assert torch.equal(batch.pick(out), logprob)
        for r, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            logits = theirs(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
            truth = [float(logits[len(prompt) + i - 1, token]) for i, token in enumerate(completion)]
            expected = torch.tensor(truth, dtype=torch.float64) if r in rows else torch.full((1,), torch.nan)
            torch.testing.assert_close(out[r, : len(expected)], expected.double(), rtol=1e-12, atol=0, equal_nan=True)
            assert out[r, len(completion) :].isnan().all()


def test_an_empty_micro_batch_runs_and_has_no_targets(tmp_path):
    tiny_model(tmp_path)
    model = decoder.load(tmp_path)
    batch = empty_micro_batch()
    logprob, entropy = model(batch.tokens, batch.segments, batch.select, partial(linear_logprob, targets=batch.targets))
    assert logprob.shape == entropy.shape == batch.pick(torch.ones(0, 0)).shape == (0,)
    logprob.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
