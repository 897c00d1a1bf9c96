"""Compiled and plain ops of a transformer block, and their gradients, compared with float64."""

import math
import os
import subprocess
import sys

import pytest
import torch

from nlgrpo import kernels
from nlgrpo.kernels import extension

IMPLS = ["torch", "cpp"] if extension.available() or os.environ.get("NLGRPO_BUILD_EXT") == "1" else ["torch"]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_as_good_as_torch(ours, plain, truth):
    """The largest error is at most that of plain PyTorch in float32, plus a few roundings."""
    assert ours.dtype == torch.float32
    assert ours.shape == truth.shape
    room = 4e-7 * float(truth.abs().max())
    assert float((ours - truth).abs().max()) <= float((plain - truth).abs().max()) + room


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (7, 64), (48, 128), (3, 1), (300, 1021)])
def test_rms_norm(impl, rows, width):
    x, weight = 3 * normal(rows, width), normal(width, seed=1)
    truth = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    plain = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert_as_good_as_torch(kernels.rms_norm(x, weight, 1e-5, impl=impl), plain, truth)
    strided = kernels.rms_norm(x.t().contiguous().t(), weight.repeat_interleave(2)[::2], 1e-5, impl=impl)
    assert_as_good_as_torch(strided, plain, truth)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (7, 64), (48, 344), (300, 1021)])
def test_swiglu(impl, rows, width):
    x = 4 * normal(rows, 2 * width)
    gate, up = x.double().chunk(2, -1)
    plain = torch.nn.functional.silu(x[:, :width]) * x[:, width:]
    assert_as_good_as_torch(kernels.swiglu(x, impl=impl), plain, gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("impl", IMPLS)
def test_swiglu_at_the_ends_of_the_exponential(impl):
    gate = torch.tensor([[-1e30, -200.0, -90.0, -87.0, 0.0, 87.0, 90.0, 1e30, math.nan]])
    out = kernels.swiglu(torch.cat((gate, torch.ones_like(gate)), -1), impl=impl)[0]
    assert out[:4].abs().max() < 1e-7
    assert out[4:8].tolist() == gate[0, 4:8].tolist()
    assert out[8].isnan()


def gradients(op, inputs, upstream):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(op(*inputs), inputs, upstream)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (7, 64), (63, 128), (64, 3), (129, 1), (300, 1021)])
def test_gradients_of_rms_norm(impl, rows, width):
    inputs, upstream = (3 * normal(rows, width), normal(width, seed=1)), normal(rows, width, seed=2)
    plain = lambda x, weight: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight  # noqa: E731
    truth = gradients(plain, [x.double() for x in inputs], upstream.double())
    ours = gradients(lambda x, weight: kernels.rms_norm(x, weight, 1e-5, impl=impl), inputs, upstream)
    for mine, its, naive in zip(ours, truth, gradients(plain, inputs, upstream), strict=True):
        assert_as_good_as_torch(mine, naive, its)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (7, 64), (48, 344), (300, 1021)])
def test_gradients_of_swiglu(impl, rows, width):
    inputs, upstream = [4 * normal(rows, 2 * width)], normal(rows, width, seed=1)
    plain = lambda x: x[:, :width] * torch.sigmoid(x[:, :width]) * x[:, width:]  # noqa: E731
    (truth,) = gradients(plain, [x.double() for x in inputs], upstream.double())
    (ours,) = gradients(lambda x: kernels.swiglu(x, impl=impl), inputs, upstream)
    assert_as_good_as_torch(ours, *gradients(plain, inputs, upstream), truth)


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_of_swiglu_at_the_ends_of_the_exponential(impl):
    gate = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 1e30]])
    (grad,) = gradients(
        lambda x: kernels.swiglu(x, impl=impl), [torch.cat((gate, torch.ones_like(gate)), -1)], 1.0 * gate.ne(7)
    )
    torch.testing.assert_close(grad[0, :6], torch.tensor([0, 0, 0, 0.5, 1, 1]), atol=1e-6, rtol=0)


@pytest.mark.skipif("cpp" not in IMPLS, reason="this install has no compiled ops (no compiler when it was built)")
class TestCompiled:
    def test_no_rows(self):
        x, weight = torch.zeros(0, 8, requires_grad=True), torch.ones(8, requires_grad=True)
        kernels.swiglu(kernels.rms_norm(x, weight, 1e-5, impl="cpp"), impl="cpp").sum().backward()
        assert x.grad.shape == (0, 8)
        assert weight.grad.tolist() == [0] * 8

    def test_strides_and_the_number_of_threads_do_not_change_a_bit(self):
        x, upstream, weight = normal(400, 1000), normal(400, 1000, seed=1), normal(1000, seed=2)
        norm, gated = lambda *xs: kernels.rms_norm(*xs, 1e-5, impl="cpp"), lambda y: kernels.swiglu(y, impl="cpp")
        before, results = torch.get_num_threads(), []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                by = upstream if threads < 3 else upstream.T.contiguous().T
                grads = *gradients(norm, (x, weight), by), *gradients(gated, [x], by[:, :500])
                results.append((gated(x), norm(x, weight), *grads))
        finally:
            torch.set_num_threads(before)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))

    def test_they_are_differentiable_once(self):
        x = normal(2, 4).requires_grad_()
        for y in (kernels.swiglu(x), kernels.rms_norm(x, torch.ones(4), 1e-5)):
            (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                first.sum().backward()

    def test_unsupported_tensors_use_torch(self):
        x, weight = normal(4, 8), torch.ones(8)
        for y in (x.double(), x.bfloat16()):
            assert kernels.rms_norm(y, weight.to(y), 1e-5).dtype == kernels.swiglu(y).dtype == y.dtype
            with pytest.raises(ValueError, match="float32 on a CPU"):
                kernels.swiglu(y, impl="cpp")
        with pytest.raises(RuntimeError, match="must be float32"):
            torch.ops.nlgrpo.swiglu(x.double())
        with pytest.raises(RuntimeError, match="even number"):
            torch.ops.nlgrpo.swiglu(x[:, :7])
        with pytest.raises(RuntimeError, match="weight must have 8"):
            torch.ops.nlgrpo.rms_norm(x, weight[:3], 1e-5)
        with pytest.raises(RuntimeError, match=r"grad must be \(4, 8\)"):
            torch.ops.nlgrpo.rms_norm_backward(x[:3], x, weight, 1e-5)
        with pytest.raises(RuntimeError, match=r"grad must be \(4, 4\)"):
            torch.ops.nlgrpo.swiglu_backward(x, x)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="'auto', 'cpp' or 'torch'"):
        kernels.swiglu(torch.ones(2, 2), impl="triton")


def test_without_the_compiled_ops():
    code = (
        "import torch; from nlgrpo import kernels; x = torch.ones(2, 4); print(kernels.swiglu(x).shape)\n"
        "try: kernels.swiglu(x, impl='cpp')\nexcept ValueError as e: print(e)"
    )
    env = os.environ | {"NLGRPO_EXT": "0"}
    shown = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert "torch.Size([2, 2])" in shown
    assert "no compiled ops" in shown
