"""The compiled linear layer and its gradient compared with float64, and the choice between it and PyTorch's."""

import importlib
import os

import pytest
import torch
import torch.nn.functional as F

from nlgrpo import kernels
from nlgrpo.kernels import extension
from nlgrpo.kernels.linear import FEW_ROWS, MOST_DEPTH, ROWS_PER_TRANSPOSE, times_weight

module = importlib.import_module("nlgrpo.kernels.linear")  # the name in the package is that of the function
COMPILED = extension.available() or os.environ.get("NLGRPO_BUILD_EXT") == "1"
IMPLS = ["torch", "cpp"] if COMPILED else ["torch"]
# Rows, depth and columns: below, at and beyond what a tile, a vector and a block of rows have.
SHAPES = [(1, 1, 1), (6, 16, 4), (7, 17, 9), (5, 15, 3), (13, 344, 130), (97, 33, 1003), (200, 688, 64), (2, 3000, 5)]


def inputs(rows, depth, columns, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*size, generator=g) for size in ((rows, depth), (columns, depth), (columns,))]


def as_accurate(ours, plain, truth):
    """The largest error is at most that of PyTorch in float32, plus a few roundings."""
    assert ours.shape == truth.shape
    room = 4e-7 * float(truth.abs().max()) if truth.numel() else 0
    assert float((ours - truth).abs().max()) <= float((plain - truth).abs().max()) + room


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(impl, with_bias, shape):
    x, weight, bias = inputs(*shape)
    given = [x, weight, bias] if with_bias else [x, weight]
    upstream = torch.randn(shape[0], 2 * shape[2], generator=torch.Generator().manual_seed(1))[:, ::2]  # not contiguous

    def run(op, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in given]
        out = op(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))]

    ours = run(lambda *leaves: kernels.linear(*leaves, impl=impl), torch.float32)
    for results in zip(ours, run(F.linear, torch.float32), run(F.linear, torch.float64), strict=True):
        as_accurate(*results)
    with torch.no_grad():
        assert torch.equal(kernels.linear(*given, impl=impl), ours[0])


@pytest.mark.skipif(not COMPILED, reason="this install has no compiled ops")
@pytest.mark.parametrize("depth", [15, 16, 40, 344])
def test_a_row_does_not_depend_on_the_others(depth):
    """So that the samples of a row do not depend on which rows are decoded with it."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("without AVX-512 the compiled op is the library's")
    x, weight, bias = inputs(200, depth, 70)
    together = kernels.linear(x, weight, bias, impl="cpp")
    for rows in (slice(0, 1), slice(3, 8), slice(90, 103), slice(199, 200)):
        assert torch.equal(kernels.linear(x[rows], weight, bias, impl="cpp"), together[rows])
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        assert torch.equal(kernels.linear(x, weight, bias, impl="cpp"), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows_and_any_strides(impl):
    x, weight, bias = inputs(9, 20, 12)
    assert kernels.linear(x[:0], weight, bias, impl=impl).shape == (0, 12)
    apart = [torch.stack([t, t], -1)[..., 0] for t in (x, weight, bias)]
    torch.testing.assert_close(kernels.linear(*apart, impl=impl), kernels.linear(x, weight, bias, impl=impl))
    torch.testing.assert_close(
        kernels.linear(x.T.contiguous().T, weight, impl=impl), kernels.linear(x, weight, impl=impl)
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_values_that_are_not_finite_stay_in_their_row(impl):
    x, weight, _ = inputs(8, 33, 10)
    x[2, 32], x[5, 0] = torch.nan, torch.inf
    out = kernels.linear(x, weight, impl=impl)
    assert out.isfinite().all(1).tolist() == [True, True, False, True, True, False, True, True]
    assert out[2].isnan().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_times_weight(impl):
    grad, weight, _ = inputs(13, 7, 7)
    weight = torch.randn(7, 21, generator=torch.Generator().manual_seed(3))
    truth = grad.double() @ weight.double()
    as_accurate(times_weight(grad, weight, impl=impl), grad @ weight, truth)


@pytest.mark.skipif(not COMPILED, reason="this install has no compiled ops")
def test_the_choice(monkeypatch):
    """With "auto", the compiled op takes few rows without a gradient, and all rows where MKL is slow."""
    calls = []
    op = torch.ops.nlgrpo.linear

    def called(*arguments):
        calls.append(len(arguments[0]))
        return op(*arguments)

    monkeypatch.setattr(torch.ops.nlgrpo, "linear", called)
    few, weight, _ = inputs(FEW_ROWS, 8, 8)
    many = inputs(FEW_ROWS + 1, 8, 8)[0]
    deep = inputs(FEW_ROWS + 1, MOST_DEPTH + 1, 1)
    for slow, expected in ((False, [FEW_ROWS]), (True, [FEW_ROWS, FEW_ROWS + 1, FEW_ROWS, FEW_ROWS])):
        monkeypatch.setattr(module, "mkl_is_slow", lambda slow=slow: slow)
        calls.clear()
        kernels.linear(few, weight)
        kernels.linear(many, weight)
        kernels.linear(few.clone().requires_grad_(), weight)
        kernels.linear(few, weight.clone().requires_grad_())
        kernels.linear(*deep)
        assert kernels.linear(few[None], weight).shape == (1, FEW_ROWS, 8)
        kernels.linear(few.double(), weight.double())
        kernels.linear(few.bfloat16(), weight.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            assert kernels.linear(few, weight).dtype == torch.bfloat16
        assert calls == expected


@pytest.mark.skipif(not COMPILED, reason="this install has no compiled ops")
@pytest.mark.parametrize(
    ("rows", "columns", "slow", "copies"),
    [(ROWS_PER_TRANSPOSE, 8, True, 1), (ROWS_PER_TRANSPOSE, 8, False, 0), (ROWS_PER_TRANSPOSE - 1, 8, True, 0),
     (ROWS_PER_TRANSPOSE, MOST_DEPTH + 1, True, 0)],
)  # fmt: skip
def test_a_weight_is_transposed_for_many_rows_and_few_columns_only(monkeypatch, rows, columns, slow, copies):
    """A vocabulary of 151,936 would be a copy of half a gigabyte per block of 64 tokens."""
    calls = []
    op = torch.ops.nlgrpo.linear
    monkeypatch.setattr(torch.ops.nlgrpo, "linear", lambda *given: calls.append(0) or op(*given))
    monkeypatch.setattr(module, "mkl_is_slow", lambda: slow)
    grad, weight = torch.ones(rows, columns), torch.ones(columns, 3)
    assert (times_weight(grad, weight) == columns).all()
    assert len(calls) == copies


def test_torch_compile_sees_one_graph():
    compiled = torch.compile(kernels.linear, fullgraph=True, backend="aot_eager")
    for rows in (9, FEW_ROWS + 1):
        x, weight, bias = inputs(rows, 20, 12)
        weight.requires_grad_()
        torch.testing.assert_close(compiled(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3)}, "x must have 2 dimensions, got 1"),
        ({"weight": torch.ones(4, 3)}, "weight must have 2 columns, as x, got 3"),
        ({"bias": torch.ones(3)}, "bias must have 4 elements, got 3"),
    ],
)
@pytest.mark.skipif(not COMPILED, reason="this install has no compiled ops")
def test_shapes_that_do_not_match_are_refused(change, message):
    good = {"x": torch.ones(5, 2), "weight": torch.ones(4, 2), "bias": torch.ones(4)}
    with pytest.raises(RuntimeError, match=message):
        kernels.linear(**{**good, **change}, impl="cpp")


def test_what_cannot_run_is_refused():
    half = torch.ones(2, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="impl='cpp': linear cannot run for these tensors, as not all are float32"):
        kernels.linear(half, half, impl="cpp")
    with pytest.raises(ValueError, match="impl='triton' is not known to linear"):
        kernels.linear(half, half, impl="triton")
