"""Implementations of `token_logprob` and `linear_logprob` compared with float64, and their memory use."""

import math

import pytest
import torch
from support.head_ops import (
    IGNORE,
    ROWS,
    SECOND_DERIVATIVE,
    check_as_accurate_as_torch,
    head,
    largest_allocation,
    truncation,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributions import Categorical

from nlgrpo import kernels
from nlgrpo.kernels import extension, reference
from nlgrpo.kernels import head as module

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(5, 3, 1), (17, 33, 257), (ROWS, 8, 1000), (1, 64, 5000)]
# Shape, dtype, temperature, and whether the entropy has a gradient: each pair of two values once or more.
GRID = [
    (shape, dtype, (1.0, 0.3)[(i + j) % 2], (i // 2 + j) % 2 == 0)
    for i, shape in enumerate(SHAPES)
    for j, dtype in enumerate(DTYPES)
]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", {"cpu": 1, "cuda": 1})  # the smallest blocks: 64 rows


def upstream(T, device, entropy=True, seed=1):
    """Non-contiguous upstream gradients of log-prob and entropy."""
    g = torch.randn(T, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)
    return g[:, 0], g[:, 1] if entropy else torch.zeros_like(g[:, 1])


def run(op, inputs, gradients):
    """Results and gradients of ``op(*inputs)``, all in float64."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    results = op(*inputs)
    torch.autograd.backward(results, [g.to(r) for g, r in zip(gradients, results, strict=True)])
    return [x.double() for x in (*(r.detach() for r in results), *(x.grad for x in inputs))]


@pytest.mark.parametrize(("shape", "dtype", "temperature", "entropy"), GRID, ids=str)
def test_linear_logprob_is_as_accurate_as_plain_torch(impl, device, small_blocks, shape, dtype, temperature, entropy):
    T, D, V = shape
    *inputs, targets = head(T, D, V, dtype, device)
    gradients = upstream(T, device, entropy)

    def ours(h, w, b):
        return kernels.linear_logprob(h, w, targets, bias=b, temperature=temperature, impl=impl)

    def plain(h, w, b):
        return reference.linear_logprob(h, w, targets, bias=b, temperature=temperature)

    truth = run(plain, [x.double() for x in inputs], gradients)
    tolerance = {torch.float32: 1e-6, torch.float16: 2**-12, torch.bfloat16: 2**-9}[dtype]  # a block's product rounds
    check_as_accurate_as_torch(
        run(ours, inputs, gradients), run(plain, inputs, gradients), truth, tolerance + truncation(impl, device, dtype)
    )


@pytest.mark.parametrize(("shape", "dtype", "temperature"), [row[:3] for row in GRID], ids=str)
def test_token_logprob_is_as_accurate_as_plain_torch(impl, device, small_blocks, shape, dtype, temperature):
    T, _, V = shape
    logits, *_ = head(T, V, 1, dtype, device)
    targets = torch.randint(V, (T,), generator=torch.Generator().manual_seed(2)).to(device)
    gradients = upstream(T, device)

    def ours(x):
        return kernels.token_logprob(x, targets, temperature=temperature, impl=impl)

    def plain(x):
        return reference.token_logprob(x, targets, temperature=temperature)

    truth = run(plain, [logits.double()], gradients)
    ours, plain = run(ours, [logits], gradients), run(plain, [logits], gradients)
    check_as_accurate_as_torch(ours, plain, truth, 1e-6 + truncation(impl, device, dtype))


def test_ignored_tokens_give_zeros(impl, device, small_blocks):
    hidden, weight, bias, targets = head(ROWS, 8, 40, torch.float32, device)
    gone = torch.arange(ROWS, device=device) % 3 == 0
    hidden[gone] = math.nan  # nothing of such a token is read
    gradients = upstream(ROWS, device)
    ignoring = targets.masked_fill(gone, IGNORE)

    def op(h, w, b):
        return kernels.linear_logprob(h, w, ignoring, bias=b, impl=impl)

    logprob, entropy, *grads = run(op, [hidden, weight, bias], gradients)
    kept = ~gone
    truth = run(
        lambda h, w, b: reference.linear_logprob(h, w, targets[kept], bias=b),
        [hidden[kept].double(), weight.double(), bias.double()],
        [g[kept] for g in gradients],
    )
    assert (logprob[gone] == 0).all()
    assert (entropy[gone] == 0).all()
    assert (grads[0][gone] == 0).all()
    ours = [logprob[kept], entropy[kept], grads[0][kept], *grads[1:]]
    check_as_accurate_as_torch(ours, truth, truth, 1e-5)

    logits = torch.full((ROWS, 40), math.nan, device=device)
    logits[kept] = 1.0
    logprob, entropy, grad = run(lambda x: kernels.token_logprob(x, ignoring, impl=impl), [logits], gradients)
    assert (logprob[gone] == 0).all()
    assert (grad[gone] == 0).all()
    assert grad.isfinite().all()
    assert entropy[kept].cpu() == pytest.approx(math.log(40))


@pytest.mark.parametrize("first", [0, 4096])
def test_whole_blocks_of_forbidden_tokens(impl, device, first):
    """Only 3 of 8,192 logits are finite, all in one block of the kernel."""
    logits = torch.full((2, 8192), -math.inf, device=device)
    logits[:, first : first + 3] = torch.tensor([1.0, 2.0, 0.5], device=device)
    targets = torch.tensor([first + 1, first], device=device)
    truth = Categorical(logits=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))
    x = logits.requires_grad_()
    logprob, entropy = kernels.token_logprob(x, targets, impl=impl)
    torch.testing.assert_close(logprob.cpu().double(), truth.log_prob(torch.tensor([1, 0])), atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy.cpu().double(), truth.entropy().expand(2), atol=1e-6, rtol=0)
    (logprob.sum() + entropy.sum()).backward()
    assert x.grad.isfinite().all()
    assert (x.grad[x == -math.inf] == 0).all()
    assert kernels.token_logprob(x, targets + 5, impl=impl)[0].tolist() == [-math.inf, -math.inf]
    nothing = torch.full((1, 9), -math.inf, device=device)
    assert kernels.token_logprob(nothing, targets[:1] * 0, impl=impl)[0].isnan().all()


def test_logits_of_any_size_and_strides(impl, device):
    """Differences of logits near 1e4 are accurate; rows and columns may have any stride."""
    g = torch.Generator().manual_seed(3)
    wide = (1e4 + torch.randn(6, 2 * 700, generator=g)).to(device)
    targets = torch.arange(6, device=device)
    for x in (wide[:, ::2], wide[:, :700], wide[:3].T[:6, :]):
        truth = Categorical(logits=x.double())
        logprob, entropy = kernels.token_logprob(x, targets % x.shape[1], impl=impl)
        torch.testing.assert_close(logprob.double(), truth.log_prob(targets % x.shape[1]), atol=2e-6, rtol=0)
        torch.testing.assert_close(entropy.double(), truth.entropy(), atol=2e-6, rtol=0)


def test_no_tokens(impl, device):
    *inputs, targets = head(0, 4, 9, torch.float32, device)
    logprob, entropy, *grads = run(
        lambda h, w, b: kernels.linear_logprob(h, w, targets, bias=b, impl=impl), inputs, upstream(0, device)
    )
    assert logprob.shape == entropy.shape == (0,)
    assert [g.shape for g in grads] == [(0, 4), (9, 4), (9,)]
    assert all((g == 0).all() for g in grads)


def test_rows_beyond_2_to_the_31_elements(impl, device, monkeypatch):
    """Three rows 2^30 + 8 elements apart. Memory is used only for the pages of the rows."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    V, apart, dtype = 5000, 2**30 + 8, torch.float32 if impl == "cpp" else torch.float16
    logits = torch.empty(2 * apart + V, dtype=dtype, device=device).as_strided((3, V), (apart, 1))
    assert 2 * logits.stride(0) > 2**31
    logits.copy_(torch.randn(3, V, generator=torch.Generator().manual_seed(0)))
    targets = torch.tensor([1, 2, 4999], device=device)
    truth = Categorical(logits=logits.double())
    logprob, entropy = kernels.token_logprob(logits.requires_grad_(), targets, impl=impl)
    torch.testing.assert_close(logprob.double(), truth.log_prob(targets), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), truth.entropy(), atol=1e-5, rtol=0)
    (grad,) = torch.autograd.grad(logprob.sum(), logits)
    expected = torch.nn.functional.one_hot(targets, V) - truth.probs
    torch.testing.assert_close(grad.double(), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("shape", [(5, 3, 7), (70, 4, 9)])
def test_gradients_by_finite_differences(small_blocks, shape):
    hidden, weight, bias, targets = head(*shape, torch.float64)
    targets[::4] = IGNORE
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(
        lambda h, w, b: kernels.linear_logprob(h, w, targets, bias=b, temperature=0.7), inputs, fast_mode=True
    )


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_required_gradients_are_computed(wanted):
    *inputs, targets = head(6, 4, 9, torch.float32)
    for i in wanted:
        inputs[i].requires_grad_()
    logprob, _ = kernels.linear_logprob(inputs[0], inputs[1], targets, bias=inputs[2])
    logprob.sum().backward()
    assert [x.grad is not None for x in inputs] == [i in wanted for i in range(3)]


def test_rounded_logits_equal_those_of_a_bfloat16_engine():
    hidden, weight, bias, targets = head(20, 16, 300, torch.float32)
    logprob, _ = kernels.linear_logprob(hidden, weight, targets, bias=bias, temperature=0.5, emulate_bf16_logits=True)
    rounded = torch.nn.functional.linear(hidden, weight, bias).bfloat16()
    truth = Categorical(logits=rounded.double() / 0.5).log_prob(targets)
    torch.testing.assert_close(logprob.double(), truth, atol=1e-5, rtol=0)
    assert not torch.allclose(logprob, kernels.linear_logprob(hidden, weight, targets, bias=bias, temperature=0.5)[0])
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    ours, _ = kernels.linear_logprob(hidden, weight, targets, bias=bias, temperature=0.5, emulate_bf16_logits=True)
    exact = torch.nn.functional.linear(hidden, weight, bias)
    straight = exact + (rounded - exact).detach()  # the rounding, and a gradient that does not see it
    expected = reference.token_logprob(straight, targets, temperature=0.5)[0]
    grads = [torch.autograd.grad(x.sum(), leaves, retain_graph=True) for x in (ours, expected)]
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


def test_autocast_applies_as_to_a_linear_layer():
    hidden, weight, _, targets = head(20, 16, 300, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logprob, entropy = kernels.linear_logprob(hidden, weight, targets)
    truth = kernels.linear_logprob(hidden.bfloat16(), weight.bfloat16(), targets)
    torch.testing.assert_close((logprob, entropy), truth, atol=0, rtol=0)
    with pytest.raises(ValueError, match=r"of one dtype, got torch\.bfloat16, torch\.float32"):
        kernels.linear_logprob(hidden.bfloat16(), weight, targets)


def test_the_full_logits_are_never_stored(small_blocks):
    T, D, V = 2000, 4, 300
    *inputs, targets = head(T, D, V, torch.float32)
    inputs = [x.requires_grad_() for x in inputs]

    def step(op):
        logprob, entropy = op(inputs[0], inputs[1], targets, bias=inputs[2])
        (logprob + 0.01 * entropy).sum().backward()

    assert largest_allocation(lambda: step(kernels.linear_logprob)) == 64 * V * 4
    assert largest_allocation(lambda: step(reference.linear_logprob)) == T * V * 4  # the watch sees what it should


@pytest.mark.parametrize("op", ["linear", "token"])
def test_opcheck(op):
    hidden, weight, bias, targets = head(70, 4, 9, torch.float32)
    half = torch.tensor(0.5, dtype=torch.float64)
    args = (half, False, "torch") if op == "linear" else (half, "torch")
    inputs = (hidden, weight, bias) if op == "linear" else (hidden,)
    inputs = [x.requires_grad_() for x in inputs]
    targets = targets % inputs[0].shape[1] if op == "token" else targets
    torch.library.opcheck(getattr(torch.ops.nlgrpo, f"{op}_logprob").default, (*inputs, targets, *args))


@pytest.mark.slow
def test_few_compilations_serve_all_lengths_and_temperatures(impl):
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def loss(hidden, weight, targets, temperature):
        logprob, entropy = kernels.linear_logprob(hidden, weight, targets, temperature=temperature, impl=impl)
        again, _ = kernels.token_logprob(hidden, targets % 4, temperature=temperature, impl=impl)
        return (logprob - 0.1 * entropy + again).sum()

    for T in range(5, 17):
        temperature = 0.5 + T / 20
        hidden, weight, _, targets = head(T, 4, 9, torch.float32)
        ours = loss(hidden.requires_grad_(), weight, targets, temperature)
        (grad,) = torch.autograd.grad(ours, hidden)
        logprob, entropy = reference.linear_logprob(hidden, weight, targets, temperature=temperature)
        truth = (logprob - 0.1 * entropy).sum()
        truth = truth + reference.token_logprob(hidden, targets % 4, temperature=temperature)[0].sum()
        torch.testing.assert_close(ours, truth)
        torch.testing.assert_close(grad, torch.autograd.grad(truth, hidden)[0], atol=1e-5, rtol=1e-4)
    assert counter.frame_count <= 2  # the first one is for a fixed length


@pytest.mark.parametrize("wrong", [-1, 9, 10**9])
def test_a_target_outside_the_vocabulary(impl, device, wrong):
    """On a CPU, an error names it. In a Triton kernel the result is NaN, without a read out of bounds."""
    hidden, weight, _, targets = head(5, 4, 9, torch.float32, device)
    targets[3] = wrong
    if device == "cpu":
        with pytest.raises(ValueError, match=rf"targets\[3\] = {wrong}: expected -100 or a token in \[0, 9\)"):
            kernels.linear_logprob(hidden, weight, targets, impl=impl)
    if impl == "triton":
        logprob, _ = kernels.token_logprob(hidden @ weight.T, targets, impl=impl)
        assert logprob.isnan().tolist() == [False, False, False, True, False]


def test_inputs_of_any_strides(impl, device):
    *inputs, targets = head(70, 12, 300, torch.float32, device)
    apart = [torch.stack([x, x], -1)[..., 0] for x in inputs]
    assert not any(x.is_contiguous() for x in apart)
    everywhere = torch.stack([targets, targets], -1)[:, 1]
    one = torch.ones((), dtype=torch.float64, device=device).expand(70)  # an upstream gradient of stride 0

    def op(where):
        return lambda h, w, b: kernels.linear_logprob(h, w, where, bias=b, impl=impl)

    results = op(everywhere)(*(x.requires_grad_() for x in apart))
    ours = torch.autograd.grad(results, apart, [one.float(), one.float()])
    truth = run(op(targets), inputs, (one, one))
    for x, y in zip((*results, *ours), truth, strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-5, rtol=1e-5)


def test_a_large_vocabulary():
    hidden, weight, _, targets = head(40, 16, 151_936, torch.float32)
    gradients = upstream(40, "cpu")

    def plain(h, w):
        return reference.linear_logprob(h, w, targets)

    truth = run(plain, [hidden.double(), weight.double()], gradients)
    ours = run(lambda h, w: kernels.linear_logprob(h, w, targets), [hidden, weight], gradients)
    check_as_accurate_as_torch(ours, run(plain, [hidden, weight], gradients), truth, 1e-6)


def test_second_derivatives_are_refused(impl, device):
    hidden, weight, _, targets = head(5, 4, 9, torch.float32, device)
    logprob, _ = kernels.linear_logprob(hidden.requires_grad_(), weight, targets, impl=impl)
    (grad,) = torch.autograd.grad(logprob.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match=SECOND_DERIVATIVE):
        torch.autograd.grad(grad.sum(), hidden)


def test_tensors_on_different_devices_are_refused():
    hidden, weight, _, targets = head(5, 4, 9, torch.float32)
    with pytest.raises(ValueError, match="expected weight on cpu, as the first argument, got meta"):
        kernels.linear_logprob(hidden, weight.to("meta"), targets)
    with pytest.raises(ValueError, match="expected targets on cpu, as the first argument, got meta"):
        kernels.token_logprob(hidden, targets.to("meta"))


def test_the_compiled_ops_refuse_what_they_cannot_run():
    hidden, weight, _, targets = head(5, 4, 9, torch.bfloat16)
    with pytest.raises(ValueError, match=r"impl='cpp': linear_logprob cannot run for these tensors, as not all are fl"):
        kernels.linear_logprob(hidden, weight, targets, impl="cpp")
    with pytest.raises(ValueError, match="linear_policy_loss cannot run for these tensors"):
        kernels.linear_policy_loss(hidden, weight, targets, None, torch.ones(5), impl="cpp")


@pytest.mark.skipif(not extension.available(), reason="this install has no compiled ops")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.ones(3)}, "logits must have 2 dimensions, got 1"),
        ({"logits": torch.ones(3, 5, dtype=torch.float64)}, "logits must be float32"),
        ({"logits": torch.ones(3, 0)}, "at least one column"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, r"targets must be \(3,\), int64, on the CPU"),
        ({"targets": torch.tensor([0, 5, 1])}, r"targets\[1\] = 5 is not in \[0, 5\)"),
        ({"targets": torch.tensor([0, 0, -100])}, r"targets\[2\] = -100 is not in"),
        ({"temperature": 0.0}, "temperature must be positive, got 0"),
        ({"kept": torch.ones(2, 2)}, r"kept must be \(2, 3\), got \(2, 2\)"),
        ({"entropy": torch.ones(4)}, r"entropy must have one element per row of logits \(3\), got 4"),
        ({"grad_logprob": torch.ones(4)}, "grad_logprob must have one element per row"),
        ({"grad_entropy": torch.ones(4)}, "grad_entropy must have one element per row"),
        ({"out": torch.ones(3, 4)}, r"out must be \(3, 5\), contiguous"),
        ({"out": torch.ones(5, 3).T}, r"out must be \(3, 5\), contiguous"),
    ],
)
def test_shapes_that_do_not_match_are_refused_by_the_compiled_op(change, message):
    rows = torch.ones(3)
    good = {"logits": torch.ones(3, 5), "targets": torch.zeros(3, dtype=torch.int64), "kept": torch.ones(2, 3)}
    good |= {"entropy": rows, "grad_logprob": rows, "grad_entropy": rows, "temperature": 1.0, "out": torch.ones(3, 5)}
    torch.ops.nlgrpo.logits_gradient(**good)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.nlgrpo.logits_gradient(**{**good, **change})
