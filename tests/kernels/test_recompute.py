"""Recomputation in the backward pass: the same gradients to the bit, and fewer saved tensors."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nlgrpo import kernels
from nlgrpo.kernels.recompute import recomputed, without_temporaries


def norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def saved_bytes(run):
    """Bytes of the tensors that autograd saves, by PyTorch's hooks."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage()._cdata] = (x.untyped_storage().nbytes(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gradients_are_those_of_the_function(dtype):
    x, weight = torch.randn(7, 16, dtype=dtype, requires_grad=True), torch.randn(16, dtype=dtype, requires_grad=True)
    upstream = torch.randn(7, 16, dtype=dtype)
    plain = torch.autograd.grad(norm(x, weight), (x, weight), upstream)
    again = torch.autograd.grad(without_temporaries(norm, x, weight), (x, weight), upstream)
    assert all(map(torch.equal, plain, again))


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_input_has_no_gradient(frozen):
    inputs = [torch.randn(3, 8), torch.randn(8)]
    inputs[1 - frozen].requires_grad_()
    without_temporaries(norm, *inputs).sum().backward()
    assert inputs[frozen].grad is None
    assert inputs[1 - frozen].grad is not None


def test_second_derivatives_by_gradgradcheck():
    x, weight = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    inputs = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda *xs: without_temporaries(norm, *xs), inputs)
    assert torch.autograd.gradgradcheck(lambda *xs: without_temporaries(norm, *xs), inputs)


def test_only_the_inputs_are_saved():
    x, weight = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True), torch.ones(32, dtype=torch.bfloat16)
    assert saved_bytes(lambda: without_temporaries(norm, x, weight)) == x.nbytes + weight.nbytes
    assert saved_bytes(lambda: norm(x, weight)) > 2 * x.nbytes
    gate = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    assert saved_bytes(lambda: kernels.swiglu(gate)) == gate.nbytes


def test_nothing_is_saved_without_a_gradient():
    x, weight = torch.randn(4, 8), torch.ones(8)
    assert without_temporaries(norm, x, weight).grad_fn is None
    with torch.no_grad():
        assert without_temporaries(norm, x.requires_grad_(), weight).grad_fn is None


class Counted:
    """A norm that counts its calls and remembers its results weakly."""

    def __init__(self, x):
        self.x, self.results = x, []

    def __call__(self):
        result = self.x.tanh()
        self.results.append(weakref.ref(result))
        return result

    @property
    def alive(self):
        gc.collect()
        return sum(ref() is not None for ref in self.results)


def test_a_value_is_freed_and_computed_once_for_all_its_uses():
    x = torch.randn(5, 8, requires_grad=True)
    layers = nn.ModuleList(nn.Linear(8, 3, bias=False) for _ in range(3))
    make = Counted(x)
    value = make()
    with recomputed(value, make):
        y = sum(layer(value) for layer in layers)
    plain = torch.autograd.grad(sum(layer(x.tanh()) for layer in layers).square().sum(), layers.parameters())
    loss = y.square().sum()
    del value, y
    assert make.alive == 0
    again = torch.autograd.grad(loss, layers.parameters(), retain_graph=True)
    assert all(map(torch.equal, plain, again))
    assert len(make.results) == 2
    assert make.alive == 0
    repeated = torch.autograd.grad(loss, layers.parameters())
    assert all(map(torch.equal, plain, repeated))


def test_other_saved_tensors_are_saved_as_usual():
    x, other = torch.randn(5, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    make = Counted(x)
    value = make()
    with recomputed(value, make):
        y = (value[:, 2:] * other[:, 2:]).sum() + (value * other).sum()  # a view of the value is not the value
    dx, dother = torch.autograd.grad(y, (x, other))
    a, b = x.detach().requires_grad_(), other.detach().requires_grad_()
    ((a.tanh()[:, 2:] * b[:, 2:]).sum() + (a.tanh() * b).sum()).backward()
    torch.testing.assert_close((dx, dother), (a.grad, b.grad), rtol=0, atol=0)


def test_values_may_overlap_in_time():
    x = torch.randn(4, 6, requires_grad=True)
    layer = nn.Linear(6, 6, bias=False)
    y = x
    for _ in range(3):
        value = y.sin()
        with recomputed(value, y.sin):
            y = y + layer(value)
    grads = torch.autograd.grad(y.sum(), (x, layer.weight))
    z = x
    for _ in range(3):
        z = z + layer(z.sin())
    assert all(map(torch.equal, grads, torch.autograd.grad(z.sum(), (x, layer.weight))))
