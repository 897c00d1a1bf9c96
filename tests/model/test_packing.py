"""Micro-batches hold every sequence once, and give the log-probabilities of each sequence run alone."""

from functools import partial

import pytest
import torch
from helpers import WORDS, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from nlgrpo.kernels import linear_logprob
from nlgrpo.model import decoder
from nlgrpo.model.packing import empty_micro_batch, pack, pack_sets

sequences = st.lists(
    st.tuples(
        st.lists(st.integers(0, 99), min_size=1, max_size=9), st.lists(st.integers(0, 99), min_size=1, max_size=9)
    ),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(sequences, st.integers(1, 60), st.data())
def test_every_selected_sequence_is_packed_once_with_correct_indices(pairs, max_tokens, data):
    prompts, completions = [p for p, _ in pairs], [c for _, c in pairs]
    rows = data.draw(st.lists(st.sampled_from(range(len(pairs))), unique=True)) if pairs else []
    seen = []
    for batch in pack(prompts, completions, rows, max_tokens):
        assert len(batch.tokens) == sum(batch.lengths)
        assert len(batch.tokens) <= max_tokens or len(batch.lengths) == 1  # a longer sequence has its own
        starts = torch.tensor([0, *batch.lengths]).cumsum(0).tolist()
        packed = batch.row.unique_consecutive().tolist()
        assert len(packed) == len(batch.lengths)
        for r, start, end in zip(packed, starts[:-1], starts[1:], strict=True):
            assert batch.tokens[start:end].tolist() == (prompts[r] + completions[r])[:-1]  # the last predicts nothing
            of_r = batch.row == r
            # the token before each target predicts it, and the first target follows the prompt
            assert batch.select[of_r].tolist() == list(range(start + len(prompts[r]) - 1, end))
            assert batch.targets[of_r].tolist() == completions[r]
            assert batch.offset[of_r].tolist() == list(range(len(completions[r])))
        seen += packed
    assert sorted(seen) == sorted(rows)


@settings(max_examples=100, deadline=None)
@given(sequences, st.integers(1, 60), st.integers(1, 3))
def test_sets_are_never_split(pairs, max_tokens, width):
    prompts, completions = [p for p, _ in pairs], [c for _, c in pairs]
    sets = [list(range(i, min(i + width, len(pairs)))) for i in range(0, len(pairs), width)]
    seen = []
    for batch in pack_sets(prompts, completions, sets, max_tokens):
        packed = batch.row.unique_consecutive().tolist()
        packed_sets = [rows for rows in sets if rows[0] in packed]
        assert packed == [r for rows in packed_sets for r in rows]
        assert len(batch.tokens) <= max_tokens or len(packed_sets) == 1
        assert len(batch.tokens) == sum(len(prompts[r] + completions[r]) - 1 for r in packed)
        seen += packed
    assert sorted(seen) == list(range(len(pairs)))


@settings(max_examples=100, deadline=None)
@given(sequences, st.integers(20, 60))
def test_no_two_micro_batches_fit_into_one(pairs, max_tokens):
    """First fit, longest first."""
    prompts, completions = [p for p, _ in pairs], [c for _, c in pairs]
    sizes = sorted(len(b.tokens) for b in pack(prompts, completions, range(len(pairs)), max_tokens))
    assert len(sizes) < 2 or sizes[0] + sizes[1] > max_tokens


def test_a_sequence_that_is_too_long_has_its_own_micro_batch():
    prompts, completions = [[1], [2], [3]], [[4], [5] * 20, [6]]
    lengths = [b.lengths for b in pack(prompts, completions, [0, 1, 2], 4)]
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
            logprob, _ = ours(batch.tokens, batch.lengths, batch.select, partial(linear_logprob, targets=batch.targets))
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
    logprob, entropy = model(batch.tokens, batch.lengths, batch.select, partial(linear_logprob, targets=batch.targets))
    assert logprob.shape == entropy.shape == batch.pick(torch.ones(0, 0)).shape == (0,)
    logprob.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
