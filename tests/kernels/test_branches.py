"""Compiled and plain `branch_attention` compared with float64 loops."""

import os

import pytest
import torch

from nlgrpo.kernels import Branches, branch_attention, extension

IMPLS = ["torch", "cpp"] if extension.available() or os.environ.get("NLGRPO_BUILD_EXT") == "1" else ["torch"]
LENGTHS, PROMPT = (5, 12, 1), (1, 0, 1, 1, 2, 0)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(tokens, heads, kv_heads, d, rotary, column=7, lengths=LENGTHS, prompt=PROMPT):
    """Arguments of `branch_attention`. The cache has unused columns; columns after a prompt's length are poisoned."""
    rows = len(prompt)
    angle = 3 * normal(rows * tokens, rotary // 2, seed=1)
    own = normal(2, 2, rows, kv_heads, column + tokens + 3, d, seed=2)[1, :, :, :, 1:]
    prompts = normal(2, len(lengths), kv_heads, max(lengths) + 2, d, seed=3)
    for p, n in enumerate(lengths):
        prompts[:, p, :, n:] = 1e4
    return {
        "qkv": normal(rows * tokens, heads + 2 * kv_heads, d),
        "rope": (angle.cos(), angle.sin()) if rotary else None,
        "own": own,
        "column": column,
        "prompts": prompts,
        "branches": Branches(torch.tensor(lengths), torch.tensor(prompt)),
    }


def by_hand(qkv, rope, own, column, prompts, branches, *, heads, scale, window):
    """Compute the result and the updated cache token by token and head by head in float64."""
    qkv, own, rows = qkv.double(), own.double().clone(), own.shape[1]
    tokens, kv_heads = len(qkv) // rows, own.shape[2]
    if rope is not None:
        half = rope[0].shape[1]
        turn = torch.complex(rope[0].double(), rope[1].double())[:, None]
        rotated = torch.complex(qkv[..., :half], qkv[..., half : 2 * half]) * turn
        qk = torch.cat((rotated.real, rotated.imag, qkv[..., 2 * half :]), -1)
        qkv = torch.cat((qk[:, : heads + kv_heads], qkv[:, heads + kv_heads :]), 1)
    out = qkv.new_zeros(len(qkv), heads, qkv.shape[2])
    for row in range(rows):
        length = int(branches.lengths[branches.prompt[row]])
        shared = prompts[:, branches.prompt[row], :, :length].double()
        for t in range(tokens):
            own[:, row, :, column + t] = qkv[row * tokens + t, heads:].unflatten(0, (2, kv_heads))
        for t in range(tokens):
            sequence = torch.cat((shared, own[:, row, :, : column + t + 1]), 2)
            sequence = sequence[:, :, -window:] if window else sequence
            for h in range(heads):
                g = h * kv_heads // heads
                q = qkv[row * tokens + t, h]
                keys, values = sequence[:, g]
                out[row * tokens + t, h] = (scale * keys @ q).softmax(0) @ values
    return out, own


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("window", [None, 1, 6, 9])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "d", "rotary"),
    [(1, 1, 1, 5, 4), (4, 6, 3, 16, 16), (3, 6, 1, 16, 4), (1, 6, 2, 64, 64), (16, 4, 4, 80, 20), (2, 2, 2, 128, 0)],
)
def test_branch_attention(impl, tokens, heads, kv_heads, d, rotary, window):
    given = case(tokens, heads, kv_heads, d, rotary)
    options = {"heads": heads, "scale": d**-0.5, "window": window}
    truth, after = by_hand(**given, **options)
    written = given["own"].clone()
    plain = branch_attention(**given | {"own": given["own"].clone()}, **options, impl="torch")
    ours = branch_attention(**given | {"own": written}, **options, impl=impl)
    room = 4e-7 * float(truth.abs().max())
    assert float((ours - truth).abs().max()) <= float((plain - truth).abs().max()) + room
    torch.testing.assert_close(ours.double(), truth, atol=1e-5, rtol=0)
    torch.testing.assert_close(written.double(), after, atol=1e-6, rtol=0)
    columns = torch.arange(written.shape[3])
    new = (columns >= given["column"]) & (columns < given["column"] + tokens)
    assert torch.equal(written[:, :, :, ~new], given["own"][:, :, :, ~new])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "d", "rotary"), [(4, 6, 3, 16, 16), (16, 4, 4, 80, 20)])
def test_narrow_dtypes_round_only_stored_tensors(dtype, tokens, heads, kv_heads, d, rotary):
    """Results are up to 3, the tolerance four roundings of 1: rotated q and k, probabilities, both parts, their sum."""
    given = case(tokens, heads, kv_heads, d, rotary, lengths=(300, 90, 1))
    given |= {name: x.to(dtype) for name, x in given.items() if isinstance(x, torch.Tensor)}
    given["rope"] = tuple(x.to(dtype) for x in given["rope"])
    options = {"heads": heads, "scale": d**-0.5, "window": None}
    truth, after = by_hand(**given, **options)
    ours = branch_attention(**given, **options)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), truth, atol=4 * torch.finfo(dtype).eps, rtol=0)
    torch.testing.assert_close(given["own"].double(), after, atol=2 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_several_tokens_at_once_equal_the_same_tokens_one_by_one(impl):
    given = case(5, 4, 2, 16, 16)
    one_by_one, rows = given["own"].clone(), len(PROMPT)
    together = branch_attention(**given, heads=4, scale=0.25, impl=impl).unflatten(0, (rows, 5))
    qkv = given["qkv"].unflatten(0, (rows, 5))
    cos, sin = (x.unflatten(0, (rows, 5)) for x in given["rope"])
    for t in range(5):
        step = given | {"qkv": qkv[:, t], "rope": (cos[:, t], sin[:, t]), "own": one_by_one, "column": 7 + t}
        out = branch_attention(**step, heads=4, scale=0.25, impl=impl)
        torch.testing.assert_close(out, together[:, t], atol=2e-6, rtol=0)
    torch.testing.assert_close(one_by_one, given["own"], atol=0, rtol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_prompt_without_rows_and_an_empty_cache(impl):
    given = case(1, 2, 2, 8, 8, column=0, lengths=(3, 4), prompt=(1, 1, 1))
    truth, _ = by_hand(**given, heads=2, scale=0.3, window=None)
    ours = branch_attention(**given, heads=2, scale=0.3, impl=impl)
    torch.testing.assert_close(ours.double(), truth, atol=1e-5, rtol=0)


@pytest.mark.skipif("cpp" not in IMPLS, reason="this install has no compiled ops (no compiler when it was built)")
class TestCompiled:
    def test_the_number_of_threads_does_not_change_a_bit(self):
        given, results = case(16, 8, 4, 64, 64, lengths=(200, 90), prompt=(0, 1) * 24), []
        before = torch.get_num_threads()
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(branch_attention(**given, heads=8, scale=0.125, impl="cpp"))
        finally:
            torch.set_num_threads(before)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])

    @pytest.mark.parametrize("d", [5, 16, 80])
    @pytest.mark.parametrize("window", [None, 9])
    def test_where_a_sequence_is_divided_does_not_change_a_bit(self, d, window):
        """Of 16 tokens and a new one, the first n are the prompt."""
        qkv, keys, results = normal(3, 4, d), normal(2, 3, 1, 17, d, seed=1), []
        for n in range(1, 17):
            own = torch.cat((keys[:, :, :, n:], torch.zeros(2, 3, 1, 4, d)), 3)
            branches = Branches(torch.tensor([n] * 3), torch.arange(3))
            options = {"heads": 2, "scale": 0.3, "window": window, "impl": "cpp"}
            results.append(branch_attention(qkv, None, own, 16 - n, keys[:, :, :, :n].clone(), branches, **options))
        assert all(torch.equal(results[0], other) for other in results[1:])

    def test_prompts_without_columns(self):
        given = case(2, 4, 2, 16, 16, lengths=(0, 0), prompt=(1, 0, 1)) | {"prompts": torch.zeros(2, 2, 2, 0, 16)}
        truth, _ = by_hand(**given, heads=4, scale=0.25, window=None)
        ours = branch_attention(**given, heads=4, scale=0.25, impl="cpp")
        torch.testing.assert_close(ours.double(), truth, atol=1e-5, rtol=0)

    def test_heads_without_elements(self):
        given = case(2, 4, 2, 0, 0)
        assert branch_attention(**given, heads=4, scale=0.25, impl="cpp").shape == (12, 4, 0)

    def test_no_rows(self):
        given = case(1, 4, 2, 16, 0) | {"qkv": torch.zeros(0, 8, 16), "own": torch.zeros(2, 0, 2, 9, 16)}
        given["branches"] = Branches(torch.tensor(LENGTHS), torch.zeros(0, dtype=torch.int64))
        assert branch_attention(**given, heads=4, scale=0.25, impl="cpp").shape == (0, 4, 16)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"column": 9}, "column 10 is outside"),
            ({"column": -1}, "column -1 is outside"),
            ({"column": 2**63 - 1}, "column 9223372036854775807 is outside"),
            ({"heads": 3}, "heads"),
            ({"heads": -(2**63)}, "heads"),
            ({"window": -2}, "window"),
            ({"qkv": torch.zeros(11, 8, 16), "rope": None}, "cache must be"),
            ({"rope": (torch.ones(6, 8), torch.ones(6, 8))}, "cos and sin"),
            ({"prompts": torch.zeros(2, 3, 2, 14, 15)}, "prompts must be"),
            ({"prompts": torch.zeros(2, 3, 1, 14, 16)}, "prompts must be"),
            ({"prompts": torch.zeros(3, 3, 2, 14, 16)}, "prompts must be"),
            ({"prompts": torch.zeros(3, 4, 14, 16)}, "prompts must have 5 dimensions"),
            ({"own": torch.zeros(1, 6, 2, 12, 16)}, "cache must be"),
            ({"prompts": torch.zeros(2, 2, 2, 14, 16)}, r"prompt\[4\] is 2; allowed is 0 to 1"),
            ({"prompts": torch.zeros(2, 3, 2, 11, 16)}, r"lengths\[1\] is 12; allowed is 0 to 11"),
            ({"branches": Branches(torch.tensor(LENGTHS), torch.tensor((0, 1, 2, 3, 0, 1)))}, r"prompt\[3\] is 3"),
            ({"branches": Branches(torch.tensor(LENGTHS), torch.tensor((0, 1, 2, -1, 0, 1)))}, r"prompt\[3\] is -1"),
            ({"branches": Branches(torch.tensor(LENGTHS), torch.tensor((0, 1, 2)))}, "prompt must be"),
            ({"branches": Branches(torch.tensor(LENGTHS).int(), torch.tensor(PROMPT))}, "lengths must be"),
        ],
    )
    def test_invalid_arguments_are_refused_before_the_cache_is_written(self, change, message):
        given = case(2, 4, 2, 16, 16, column=7) | change
        given["own"] = given["own"][:, :, :, :10]
        before = given["own"].clone()
        with pytest.raises(RuntimeError, match=message):
            branch_attention(**{"heads": 4, "scale": 0.25} | given, impl="cpp")
        assert torch.equal(given["own"], before)
