"""`linearize` in Triton and C++ compared with the sum of gaps in float64, with ties and infinities."""

import math
from fractions import Fraction

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nlgrpo import kernels
from nlgrpo.kernels import reference

pytest.importorskip("triton")
from nlgrpo.kernels import extension, linearize_triton


@pytest.fixture(params=["triton", "cpp"])
def impl(request, device):
    """A fast implementation for ``device``."""
    if request.param == "cpp" and device != "cpu":
        pytest.skip("the compiled op runs only on a CPU")
    return request.param


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


EPS = {torch.float32: 1e-6, torch.float64: 1e-13}  # error relative to the largest value


@pytest.fixture
def chunks_of_64(monkeypatch):
    """Triton sorts groups of more than 64 in chunks, which takes the interpreter less time than groups of 1,024."""
    monkeypatch.setattr(linearize_triton, "ELEMENTS", 64)
    monkeypatch.setattr(linearize_triton, "GATHERED", 64)


def groups(P, M, device, dtype=torch.float32, seed=0):
    """Rewards with ties and both zeros, and weights with zeros."""
    g = torch.Generator().manual_seed(seed)
    rewards, weights = torch.randn(P, M, generator=g, dtype=dtype), torch.rand(M, generator=g, dtype=dtype)
    rewards = torch.where(torch.rand(P, M, generator=g) < 0.4, (rewards * 2).round(), rewards)
    weights[::5] = 0
    return rewards.to(device), weights.to(device)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("P", "M"),
    [(3, 1), (5, 2), (130, 3), (7, 8), (1, 33), (3, 100), pytest.param(1, 1000, marks=pytest.mark.slow)],
)
def test_equals_the_sum_of_the_gaps_above(device, impl, dtype, P, M):
    rewards, weights = groups(P, M, device, dtype)
    truth = reference.linearize(rewards.double(), weights.double())
    ours = kernels.linearize(rewards, weights, impl=impl)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), truth, atol=EPS[dtype] * max(1.0, truth.abs().max().item()), rtol=0)
    for row, values in zip(rewards.tolist(), ours.tolist(), strict=True):
        by_reward = {}
        assert all(by_reward.setdefault(r, v) == v for r, v in zip(row, values, strict=True))  # ties share one value
        assert values[row.index(max(row))] == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("P", "M", "chunk"),
    [
        (2, 65, 64),
        (1, 128, 64),
        (5, 250, 64),
        pytest.param(1, 300, 1024, marks=pytest.mark.slow),
        pytest.param(1, 1025, 1024, marks=pytest.mark.slow),
        pytest.param(1, 4096, 1024, marks=pytest.mark.slow),
    ],
)
def test_large_groups_in_chunks(device, monkeypatch, dtype, P, M, chunk):
    """Ties cross the ends of chunks; with two programs, one of them processes two groups."""
    for name, value in {"PROGRAMS": 2, "ELEMENTS": chunk, "GATHERED": min(chunk, linearize_triton.GATHERED)}.items():
        monkeypatch.setattr(linearize_triton, name, value)
    rewards, weights = groups(P, M, device, dtype)
    rewards[0, M // 8 :] = 0.25
    rewards[-1, :: M // 4] = math.inf
    truth = reference.linearize(rewards.double(), weights.double())
    strided = torch.empty(P, 2 * M, dtype=dtype, device=device)[:, ::2].copy_(rewards)
    ours = kernels.linearize(strided, weights, impl="triton")
    atol = EPS[dtype] * truth[truth.isfinite()].abs().max().item()
    torch.testing.assert_close(ours.double(), truth, atol=atol, rtol=0)
    for row, values in zip(rewards, ours, strict=True):
        assert all(len(values[row == r].unique()) == 1 for r in row.unique())  # ties share one value
        assert (values[row == row.max()] == 0).all()


@pytest.mark.parametrize("M", [8, 70])
@pytest.mark.usefixtures("chunks_of_64")
def test_infinities_and_zeros_of_both_signs(device, impl, dtype, M):
    rewards, weights = groups(4, M, device, dtype)
    weights = weights + 0.5
    rewards[0, ::3], rewards[1, ::3], rewards[2, 1::4] = math.inf, -math.inf, -0.0
    rewards[3] = rewards[3].where(torch.arange(M, device=device) % 2 == 0, math.inf)
    rewards[3, 0] = -math.inf
    ours = kernels.linearize(rewards, weights, impl=impl)
    truth = reference.linearize(rewards.double(), weights.double())
    torch.testing.assert_close(ours.double(), truth, atol=100 * EPS[dtype], rtol=0)


def numbers_next_to_each_other(M, device):
    """Groups (5, M) of float64 rewards that float32 cannot tell apart, with ties: one row per magnitude."""
    g = torch.Generator().manual_seed(0)
    k = torch.randint(-M, M, (5, M), generator=g).double()
    ulp = 2.0**-52
    rows = [1 + k[0].abs() * ulp, (1 + k[1].abs() * ulp) * -1e300, k[2] * 5e-324, k[3] * 5e-324 + 0.0, k[4] * ulp]
    rewards = torch.stack(rows)
    rewards[3] = rewards[3].where(torch.arange(M) % 2 == 0, -0.0)
    assert M == 1 or (rewards.float() == rewards.float()[:, :1]).all(1)[:4].all()
    return rewards.to(device)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("M", [1, 2, 7, 33, 150])
@pytest.mark.usefixtures("chunks_of_64")
def test_float64_rewards_that_are_equal_in_float32(device, impl, M):
    """Integer weights make every product and sum exact, so that the results equal those of rational arithmetic."""
    rewards, weights = numbers_next_to_each_other(M, device), torch.arange(1.0, M + 1, dtype=torch.float64)
    ours = kernels.linearize(rewards, weights.to(device), impl=impl)
    for row, values in zip(rewards.tolist(), ours.tolist(), strict=True):
        ordered = [Fraction(r) for r in sorted(row)]
        gaps = [int(w) * (b - a) for w, a, b in zip(weights, ordered, ordered[1:], strict=False)]
        assert values == [float(-sum(gaps[ordered.index(Fraction(r)) :])) for r in row]


def test_any_strides_no_groups_and_narrow_dtypes(device, impl, dtype):
    rewards, weights = groups(40, 6, device, dtype)
    truth = reference.linearize(rewards, weights)
    torch.testing.assert_close(kernels.linearize(rewards.T.contiguous().T, weights, impl=impl), truth)
    torch.testing.assert_close(kernels.linearize(rewards[::2], weights, impl=impl), truth[::2])
    assert kernels.linearize(rewards[:0], weights, impl=impl).shape == (0, 6)
    half = rewards.bfloat16()
    torch.testing.assert_close(
        kernels.linearize(half, weights, impl=impl), reference.linearize(half.float(), weights.float())
    )


@pytest.mark.sampled(4)
def test_gradients_and_opcheck(device, impl, dtype):
    inputs = [x.requires_grad_() for x in groups(5, 7, device, dtype)]
    upstream = torch.randn(7, 5, device=device, dtype=dtype).T
    ours = torch.autograd.grad(kernels.linearize(*inputs, impl=impl), inputs, upstream)
    torch.testing.assert_close(ours, torch.autograd.grad(reference.linearize(*inputs), inputs, upstream))
    if device == "cpu":
        torch.library.opcheck(torch.ops.nlgrpo.linearize, (*inputs, impl))


@pytest.mark.slow
def test_few_compilations_serve_all_sizes(device, impl):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(kernels.linearize, fullgraph=True, backend=counter)
    for P, M in ((3, 5), (4, 6), (7, 9), (2, 17), (5, 33)):
        inputs = [x.requires_grad_() for x in groups(P, M, device)]
        ours, truth = compiled(*inputs, impl=impl), reference.linearize(*inputs)
        torch.testing.assert_close(ours, truth, atol=1e-5, rtol=1e-5)
        grads = [torch.autograd.grad(x.sum(), inputs) for x in (ours, truth)]
        torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)
    assert counter.frame_count <= 2  # of fixed sizes first


@pytest.mark.sampled(3)
@pytest.mark.parametrize("M", [6, 70])
@pytest.mark.usefixtures("chunks_of_64")
def test_in_a_compiled_graph_nan_is_last_and_affects_only_its_group(device, impl, dtype, M):
    """Compiled graphs do not check for NaN; NaN of either sign are sorted after the largest reward, by column."""
    rewards, weights = groups(3, M, device, dtype)
    rewards[1, 2], rewards[2, 1::2], weights = math.nan, math.nan, weights + 0.5
    weights[-2] = 0  # of the gap between the last two NaN of the third group
    for nan in (rewards, -rewards.abs()):
        ours = torch.ops.nlgrpo.linearize(nan, weights, impl)
        truth = reference.linearize(nan.double(), weights.double())
        torch.testing.assert_close(ours.double(), truth, atol=100 * EPS[dtype], rtol=0, equal_nan=True)
        assert truth.isnan().sum(1).tolist() == [0, 0, M - 2]


def test_unsupported_inputs_are_refused_by_triton():
    with pytest.raises(ValueError, match="with M = 4097, above 4096"):
        kernels.linearize(torch.zeros(1, 4097), torch.ones(4097), impl="triton")
    with pytest.raises(ValueError, match="group 0, sample 2 is NaN"):
        kernels.linearize(torch.tensor([[1.0, 2.0, math.nan]]), torch.ones(3), impl="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("P", "M"), [(9, 24), (9, 600), (8, 1024), (7, 1025), (3, 5000), (2, 70_000)])
def test_large_groups_in_cpp(dtype, P, M):
    rewards, weights = (x.to(dtype) for x in groups(P, M, "cpu"))
    rewards[-1] = rewards[-1].where(torch.arange(M) % 5 > 0, 1 + torch.rand(M, dtype=dtype) * 1e-14)
    truth = reference.linearize(rewards.double(), weights.double())
    ours = kernels.linearize(rewards, weights, impl="cpp")
    assert ours.dtype == dtype
    atol = (1e-6 if dtype == torch.float32 else 1e-13) * truth.abs().max().item()
    torch.testing.assert_close(ours.double(), truth, atol=atol, rtol=0)
    assert (ours.gather(1, rewards.argmax(1, keepdim=True)) == 0).all()


def test_the_number_of_threads_does_not_change_the_result():
    rewards, weights = groups(1003, 64, "cpu")
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(kernels.linearize(rewards, weights, impl="cpp"))
    finally:
        torch.set_num_threads(before)
    assert all(result.equal(results[0]) for result in results)


def test_auto_runs_the_compiled_op_on_a_cpu(monkeypatch):
    rewards, weights = groups(2, 5, "cpu")
    assert torch.equal(kernels.linearize(rewards, weights), kernels.linearize(rewards, weights, impl="cpp"))
    monkeypatch.setattr(extension, "_AVAILABLE", False)
    assert torch.equal(kernels.linearize(rewards, weights), reference.linearize(rewards, weights))
    with pytest.raises(ValueError, match="impl='cpp': linearize cannot run in this install, which has no compiled ops"):
        kernels.linearize(rewards, weights, impl="cpp")
    with pytest.raises(ValueError, match="expected 'auto', 'triton', 'cpp', 'torch'"):
        kernels.linearize(rewards, weights, impl="cuda")
    with pytest.raises(RuntimeError, match=r"expected rewards \(P, M\) and weights \(M,\) of one dtype"):
        torch.ops.nlgrpo.linearize_rows(rewards, weights[:-1])
