"""Compiled and plain ops of a decoding step compared with float64."""

import os

import pytest
import torch

from nlgrpo import kernels
from nlgrpo.kernels import BlockWeights, Branches, extension

IMPLS = ["torch", "cpp"] if extension.available() or os.environ.get("NLGRPO_BUILD_EXT") == "1" else ["torch"]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# --- a block ----------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, D, WIDTH, FFN, LENGTHS, PROMPT, COLUMN = 4, 2, 8, 24, 40, (5, 2), (1, 0, 1), 3


def block(tokens=1, *, bias=True, dtype=torch.float32):
    """Arguments of `decode_block` that change, and its options."""
    rows, heads = len(PROMPT), HEADS + 2 * KV_HEADS
    sizes = {"norm1": (WIDTH,), "qkv": (heads * D, WIDTH), "qkv_bias": (heads * D,), "out": (WIDTH, HEADS * D)}
    sizes |= {"norm2": (WIDTH,), "up": (2 * FFN, WIDTH), "down": (WIDTH, FFN)}
    weights = {name: 0.3 * normal(*size, seed=i, dtype=dtype) for i, (name, size) in enumerate(sizes.items())}
    angle = normal(rows * tokens, D // 2, seed=20, dtype=dtype)
    given = {
        "x": normal(rows * tokens, WIDTH, seed=21, dtype=dtype),
        "weights": BlockWeights(**weights | {} if bias else weights | {"qkv_bias": None}),
        "rope": (angle.cos(), angle.sin()),
        "own": normal(2, rows, KV_HEADS, COLUMN + tokens + 2, D, seed=22, dtype=dtype),
        "column": COLUMN,
        "prompts": normal(2, len(LENGTHS), KV_HEADS, max(LENGTHS), D, seed=23, dtype=dtype),
        "branches": Branches(torch.tensor(LENGTHS), torch.tensor(PROMPT)),
    }
    return given, {"eps": 1e-5, "heads": HEADS, "scale": 0.4}


def by_hand(x, weights, rope, own, column, prompts, branches, *, eps, heads, scale, window):
    """The block in one formula per line; its attention is tested in `test_branches`."""
    norm = lambda y, weight: y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * weight  # noqa: E731
    qkv = norm(x, weights.norm1) @ weights.qkv.T + (0 if weights.qkv_bias is None else weights.qkv_bias)
    cache = own, column, prompts, branches
    options = {"heads": heads, "scale": scale, "window": window, "impl": "torch"}
    mixed = kernels.branch_attention(qkv.unflatten(1, (-1, own.shape[4])), rope, *cache, **options)
    y = x + mixed.flatten(1) @ weights.out.T
    gate, up = (norm(y, weights.norm2) @ weights.up.T).chunk(2, -1)
    return y + (gate * torch.sigmoid(gate) * up) @ weights.down.T


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("window", [None, 4])
def test_decode_block(impl, tokens, bias, window):
    given, options = block(tokens, bias=bias)
    exact, _ = block(tokens, bias=bias)
    double = lambda x: x.double() if isinstance(x, torch.Tensor) else x  # noqa: E731
    exact = {name: double(x) for name, x in exact.items()}
    exact["weights"] = BlockWeights(*map(double, exact["weights"]))
    exact["rope"] = tuple(map(double, exact["rope"]))
    truth = by_hand(**exact, **options, window=window)
    with torch.inference_mode():
        ours = kernels.decode_block(**given, **options, window=window, impl=impl)
    torch.testing.assert_close(ours.double(), truth, atol=3e-6, rtol=0)
    torch.testing.assert_close(given["own"].double(), exact["own"], atol=3e-6, rtol=0)


@pytest.mark.skipif("cpp" not in IMPLS, reason="this install has no compiled ops (no compiler when it was built)")
class TestCompiledBlock:
    def test_other_dtypes_and_gradients_use_torch(self):
        given, options = block(dtype=torch.float64)
        assert kernels.decode_block(**given, **options).dtype == torch.float64
        with pytest.raises(ValueError, match="float32 on a CPU"):
            kernels.decode_block(**given, **options, impl="cpp")
        given, options = block()
        given["weights"].down.requires_grad_()
        with pytest.raises(ValueError, match="require a gradient"):
            kernels.decode_block(**given, **options, impl="cpp")
        with torch.no_grad():
            kernels.decode_block(**given, **options, impl="cpp")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"out": torch.zeros(WIDTH + 1, HEADS * D)}, "out_weight must have 24 rows, one per column of x, got 25"),
            ({"down": torch.zeros(WIDTH - 1, FFN)}, "down must have 24 rows, one per column of x, got 23"),
            ({"qkv": torch.zeros(4, WIDTH)}, "qkv_weight must have 64 rows, got 4"),
        ],
    )
    def test_weights_of_another_size_are_refused(self, change, message):
        given, options = block(bias=False)
        given["weights"] = given["weights"]._replace(**change)
        with pytest.raises(RuntimeError, match=message):
            kernels.decode_block(**given, **options, impl="cpp")

    @pytest.mark.parametrize("heads", [0, -1, 2**62, 2**63 - 1, -(2**63)])
    def test_a_number_of_heads_that_no_weight_has_is_refused(self, heads):
        given, options = block()
        with pytest.raises(RuntimeError, match="heads must be positive, and at most 64"):
            kernels.decode_block(**given, **options | {"heads": heads}, impl="cpp")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"column": 9}, "column 9 is outside"),
            ({"own": torch.zeros(2, 3, 2, 6)}, "own must have 5 dimensions"),
            ({"own": torch.zeros(2, 2, 2, 6, D)}, "cache must be"),
            ({"own": torch.zeros(2, 3, 1, 6, D)}, "qkv_weight must have"),
            ({"x": torch.zeros(WIDTH)}, "x must have 2 dimensions"),
            ({"x": torch.zeros(3, WIDTH + 1)}, "weight must have 25 elements"),
            ({"branches": Branches(torch.tensor(LENGTHS), torch.tensor((0, 1, 2)))}, r"prompt\[2\] is 2"),
        ],
    )
    def test_shapes_that_do_not_match_are_refused(self, change, message):
        given, options = block()
        with pytest.raises(RuntimeError, match=message):
            kernels.decode_block(**given | change, **options, impl="cpp")


# --- the next tokens --------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("rows", "vocabulary"), [(1, 1), (5, 3), (40, 64), (30, 65), (20, 2048), (7, 4096), (7, 4097), (3, 50_257)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_tokens_invert_the_cumulative_distribution(impl, device, rows, vocabulary, dtype, temperature):
    logits = (3 * normal(rows, vocabulary)).to(device, dtype)
    noise = torch.rand(rows, generator=torch.Generator().manual_seed(1)).double().to(device)
    noise[0] = 0
    tokens, logprob = kernels.sample_tokens(logits, noise, temperature=temperature, impl=impl)
    logp = (logits.double() / temperature).log_softmax(-1)
    through = logp.exp().cumsum(-1)
    up_to = through.gather(1, tokens[:, None])[:, 0]
    before = up_to - logp.exp().gather(1, tokens[:, None])[:, 0]
    assert (before <= noise + 2e-7).all()
    assert (noise < up_to + 2e-7).all()
    atol = 2e-5 if impl == "torch" else 4e-6  # torch.log_softmax adds a large vocabulary one by one
    torch.testing.assert_close(logprob.double(), logp.gather(1, tokens[:, None])[:, 0], atol=atol, rtol=0)


def test_a_column_of_noise_and_rows_of_any_stride(impl, device):
    """The noise of all positions is one tensor. Each token reads a column of it."""
    logits, noise = normal(6, 300, 2).to(device), torch.rand(6, 5, dtype=torch.float64).to(device)
    apart = kernels.sample_tokens(logits[..., 0], noise[:, 3], impl=impl)
    together = kernels.sample_tokens(logits[..., 0].contiguous(), noise[:, 3].contiguous(), impl=impl)
    assert torch.equal(apart[0], together[0])
    assert torch.equal(apart[1], together[1])


def test_every_token_is_sampled_where_its_share_of_the_noise_is(impl, device):
    """Noise in the middle of each token's share selects it, on both sides of the border between blocks of a kernel."""
    logits = normal(1, 5000).double()
    through = logits.softmax(-1)[0].cumsum(0)
    chosen = torch.tensor([0, 1, 4094, 4095, 4096, 4097, 4999])
    noise = torch.stack([(through[v] + (through[v - 1] if v else 0)) / 2 for v in chosen.tolist()])
    logits = logits.float().expand(len(chosen), -1).contiguous()
    tokens, _ = kernels.sample_tokens(logits.to(device), noise.to(device), impl=impl)
    assert torch.equal(tokens.cpu(), chosen)


def test_impossible_tokens_are_never_sampled(impl, device):
    """Noise of 0 and just below 1 takes the first and the last possible token, also if whole blocks are impossible."""
    for size, first in ((300, 70), (9000, 4090), (9000, 5000), (9000, 8990)):
        logits = torch.full((2, size), -torch.inf)
        logits[:, first : first + 10] = normal(10)
        noise = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
        tokens, logprob = kernels.sample_tokens(logits.to(device), noise.to(device), impl=impl)
        assert tokens.tolist() == [first, first + 9]
        assert logprob.isfinite().all()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, "all -inf"])
@pytest.mark.parametrize("vocabulary", [100, 5000])
def test_logits_that_are_not_finite_give_a_log_prob_that_is_nan(impl, device, wrong, vocabulary):
    logits = normal(3, vocabulary)
    logits[1] = -torch.inf if wrong == "all -inf" else logits[1]
    if wrong != "all -inf":
        logits[1, 5] = wrong
    noise = torch.full((3,), 0.5, dtype=torch.float64, device=device)
    tokens, logprob = kernels.sample_tokens(logits.to(device), noise, impl=impl)
    assert logprob.isnan().tolist() == [False, True, False]
    assert 0 <= tokens[1] < vocabulary


@pytest.mark.parametrize("fast", ["cpp", "triton"])
def test_sampling_refuses_what_it_cannot_read(fast):
    if fast == "cpp" and "cpp" not in IMPLS:
        pytest.skip("this install has no compiled ops (no compiler when it was built)")
    if fast == "triton":
        pytest.importorskip("triton")
    device = "cuda" if fast == "triton" and torch.cuda.is_available() else "cpu"
    logits, noise = normal(3, 8).to(device), torch.zeros(3, dtype=torch.float64, device=device)
    assert kernels.sample_tokens(logits[:0], noise[:0], impl=fast)[0].shape == (0,)
    assert kernels.sample_tokens(logits.double(), noise)[1].dtype == torch.float64
    for x, u, temperature, message in (
        (logits, noise.float(), 1.0, "noise must be"),
        (logits, noise[:2], 1.0, "noise must be"),
        (logits[:, :0], noise, 1.0, "at least one column"),
        (logits[0], noise, 1.0, "logits must have 2 dimensions"),
        (logits, noise, 0.0, "temperature must be positive"),
    ):
        with pytest.raises(RuntimeError, match=message) as raised:
            kernels.sample_tokens(x, u, temperature=temperature, impl=fast)
        assert raised.type is RuntimeError  # not KernelError: no kernel has failed
    with pytest.raises(ValueError, match=f"impl='{fast}': sample_tokens cannot run"):
        kernels.sample_tokens(logits.double(), noise, impl=fast)
    with pytest.raises(ValueError, match="impl='fast' is not known to sample_tokens; expected 'auto', 'triton', 'cpp'"):
        kernels.sample_tokens(logits, noise, impl="fast")
