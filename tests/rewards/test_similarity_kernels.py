"""Built-in kernels compared with their formulas, and the call of a kernel by `reward_functions.score`."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from nlgrpo.rewards import reward_functions, specs
from nlgrpo.rewards.reward_functions import Reward, RewardError

TEXTS = ["the cat sat", "The cat, sat.", "a dog ran far", "", "cat cat the", "x"]
IDS = [[1, 2, 3], [1, 2, 3, 1, 2], [4, 5], [], [2, 1], [7]]


def call(kernel, samples=3, **options):
    """Scores of ``kernel`` (a spec or a function) for one P*M batch, TEXTS."""
    reward = (
        specs.load_reward("k", kernel, pairwise=True, **options)
        if isinstance(kernel, str)
        else Reward("k", kernel, pairwise=True, **options)
    )
    count = len(TEXTS)
    return reward_functions.score(
        [reward], prompts=["p"] * count, completions=TEXTS, completion_ids=IDS, columns={}, samples=samples, step=5,
        total_steps=9,
    )  # fmt: skip


def cosine(a, b):
    dot = sum(a[piece] * b[piece] for piece in a)
    return dot / math.sqrt(sum(n * n for n in a.values()) * sum(n * n for n in b.values()))


def words(text):
    return [w.strip(",.").lower() for w in text.split()]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("of", ["tokens", "words"])
def test_ngrams_kernel(n, of):
    kernel = call(f"ngrams(n={n}, of='{of}')").values["k"]
    rows = IDS if of == "tokens" else [words(text) for text in TEXTS]
    pieces = [Counter(tuple(row[i : i + n]) for i in range(len(row) - n + 1)) or Counter([tuple(row)]) for row in rows]
    truth = [[[cosine(pieces[3 * p + j], pieces[3 * p + i]) for i in range(3)] for j in range(3)] for p in range(2)]
    np.testing.assert_allclose(kernel, truth, atol=1e-12)
    assert (torch.linalg.eigvalsh(kernel) > -1e-12).all()


def test_length_kernel():
    kernel = call("length(width=2)").values["k"]
    truth = [[[math.exp(-(((a - b) / 2) ** 2) / 2) for a in group] for b in group] for group in ([3, 5, 2], [0, 2, 1])]
    np.testing.assert_allclose(kernel, truth)


def test_equal_kernel():
    kernel = call("equal()", samples=6).values["k"]
    assert torch.equal(kernel[0], torch.eye(6, dtype=torch.float64))
    nan = math.nan
    found = call(r"equal(pattern='\\b(cat|dog)\\b')").values["k"]
    np.testing.assert_array_equal(found[0], [[1, 1, 0], [1, 1, 0], [0, 0, 1]])
    np.testing.assert_array_equal(found[1], [[nan, nan, nan], [nan, 1, nan], [nan, nan, nan]])


def test_a_kernel_function_gets_the_group_size_and_the_arguments_it_names():
    seen = {}

    def kernel(completions, samples, **columns):
        seen.update(columns, samples=samples)
        return np.eye(samples)[np.arange(len(completions)) % samples]

    scores = call(kernel, scale=2.0)
    assert torch.equal(scores.values["k"], 2 * torch.eye(3, dtype=torch.float64).expand(2, 3, 3))
    assert seen["samples"] == 3
    assert {"prompts", "completion_ids", "trainer_state"} <= seen.keys()

    def without(completions):
        return torch.eye(3).repeat(2, 1)

    assert call(without).values["k"].shape == (2, 3, 3)

    async def later(completions, samples):
        return [[1.0] * samples for _ in completions]

    assert torch.equal(call(later).values["k"], torch.ones(2, 3, 3, dtype=torch.float64))


EYE = [[1.0, 0, 0], [0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (None, "returned a value of type NoneType for 6 completions in groups of 3"),
        (EYE, "returned 3 rows for 6 completions in groups of 3"),
        ([1.0] * 6, "returned a value of type float, not a list, for 3 completions in the row of a completion"),
        ([[1.0, 0]] * 6, "returned 2 values for 3 completions in the row"),
        ([*EYE, [1.0, 0, 0], [0, math.nan, 0], [0, 0, 1]], r"returned nan in the row.*prompt 1, sample 1"),
        (
            [*EYE, [1.0, 0.5, 0], [0, 1, 0], [0, 0, 1]],
            r"returned 0.5 for samples 0 and 1, 0 for .*prompt 1, sample 0",
        ),
        (
            [[1.0, None, 0], [0, 1, 0], [0, 0, 1], *EYE],
            r"returned nan for samples 0 and 1, 0 for .*prompt 0, sample 0",
        ),
    ],
)
def test_an_invalid_kernel_stops_the_run_or_drops_its_group(rows, says):
    with pytest.raises(RewardError, match=f"reward 'k' {says}"):
        call(lambda completions: rows)
    skipped = call(lambda completions: rows, on_error="skip").skipped.tolist()
    assert skipped == {"1": [False, True], "0": [True, False]}.get(says.split("prompt ")[-1][:1], [True, True])


def test_a_completion_with_none_has_nan_in_its_row_and_column():
    kernel = call(lambda completions: [EYE[0], None, EYE[2], *EYE]).values["k"]
    assert kernel[0].isnan().tolist() == [[False, True, False], [True, True, True], [False, True, False]]
    assert torch.equal(kernel[1], torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("ngram(n=2)", "there is no kernel 'ngram'; did you mean 'ngrams'"),
        ("regex(pattern='a')", "there is no kernel 'regex'"),
        ("ngrams(n=0)", "n must be an integer >= 1"),
        ("ngrams(of='letters')", "of must be 'tokens' or 'words'"),
        ("length()", "length needs width"),
        ("length(width=0)", "scale must be above 0"),
        ("equal(pattern='(')", "is not a regular expression"),
    ],
)
def test_bad_specs_are_refused(spec, says):
    with pytest.raises(ValueError, match=f"reward 'k' = .*{says}"):
        specs.load_reward("k", spec, pairwise=True)
