"""`linear_policy_loss` compared with autograd through `reference` in float64."""

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
from support.helpers import run_ranks
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nlgrpo import kernels
from nlgrpo.kernels import head as module
from nlgrpo.kernels import reference

KINDS = ["none", "k1", "k2", "k3", "k3_iw"]
SURROGATES = ["ppo", "cispo", "reinforce"]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", {"cpu": 1, "cuda": 1})  # the smallest blocks: 64 rows


def tokens(hidden, weight, bias, targets, seed=7):
    """Old and reference log-probs near those of the policy, advantages and weights; some ratios exceed each clip."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        own, _ = reference.linear_logprob(hidden.double(), weight.double(), targets, bias=bias.double())
    old, ref, A, w = torch.randn(4, len(targets), generator=g, dtype=torch.float64).to(hidden.device)
    return own + old, own + 0.3 * ref, A, w.abs() / 100


def run(loss, leaves):
    """Loss and gradients in float64."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    value = loss(*leaves)
    value.backward()
    return [x.double().reshape(-1) for x in (value.detach(), *(x.grad for x in leaves))]


def plain(targets, old, ref, A, w, **options):
    def loss(hidden, weight, bias):
        o, r, a, v = (
            None if x is None else x.to(torch.promote_types(hidden.dtype, torch.float32)) for x in (old, ref, A, w)
        )
        return reference.linear_policy_loss(
            hidden, weight, targets, o, a, token_weights=v, ref_logprob=r, bias=bias, **options
        )

    return loss


def options_of(kind, surrogate="ppo"):
    options = {"eps_low": 0.1, "eps_high": 0.3, "dual_clip": 1.8 if surrogate == "ppo" else None}
    return options | {"surrogate": surrogate} | ({} if kind == "none" else {"beta": 0.4, "kl": kind})


SETTINGS = [("ppo", temperature, kind) for temperature in (1.0, 0.7) for kind in KINDS]
SETTINGS += [(surrogate, 0.7, kind) for surrogate in ("cispo", "reinforce") for kind in ("none", "k3_iw")]
# For narrow dtypes the interpreted kernel differs only in its loads, so each surrogate and each KL is tested once.
NARROW = [("ppo", 1.0, "k1"), ("ppo", 0.7, "k2"), ("ppo", 1.0, "k3")]
NARROW += [("cispo", 0.7, "k3_iw"), ("reinforce", 0.7, "none")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("surrogate", "temperature", "kind"), SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_loss_and_gradients(impl, device, small_blocks, kind, dtype, surrogate, temperature):
    if (impl, dtype) == ("triton", torch.float64):
        pytest.skip("Triton's kernels compute in float32")
    if impl == "triton" and dtype.itemsize == 2 and device == "cpu" and (surrogate, temperature, kind) not in NARROW:
        pytest.skip("interpreted in float32, and in this dtype with other settings")
    # The rounding errors of exp(reference - policy) in k3 average over tokens; interpreted rows take 5 ms each.
    quick = impl == "triton" and device == "cpu" and not kind.startswith("k3")
    T = ROWS if dtype.itemsize == 2 or quick else 150
    hidden, weight, bias, targets = head(T, 24, 300, dtype, device)
    old, ref, A, w = tokens(hidden, weight, bias, targets)
    ref = None if kind == "none" else ref
    options = {"temperature": temperature} | options_of(kind, surrogate)

    def ours(hidden, weight, bias):
        result = kernels.linear_policy_loss(
            hidden, weight, targets, old, A, bias=bias, token_weights=w, ref_logprob=ref, impl=impl, **options
        )
        return result.loss

    leaves = [hidden, weight, bias]
    theirs = plain(targets, old, ref, A, w, **options)
    truth = run(theirs, [x.double() for x in leaves])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-9, torch.float16: 2**-12}[dtype]
    if surrogate != "ppo" and dtype.itemsize == 2:
        tolerance *= 4  # rounded in the logits, in the sum and scaled: seeds differ by this much, also with "ppo"
    check_as_accurate_as_torch(
        run(ours, leaves), run(theirs, leaves), truth, tolerance + truncation(impl, device, dtype)
    )


@pytest.mark.parametrize("surrogate", ["cispo", "reinforce"])
def test_cispo_and_reinforce_equal_their_formulas(impl, device, small_blocks, surrogate):
    """The loss from hidden states written out in float64, with k3_iw."""
    hidden, weight, bias, targets = head(ROWS, 24, 300, torch.float32, device)
    old, ref, A, w = tokens(hidden, weight, bias, targets)

    def ours(hidden, weight, bias):
        result = kernels.linear_policy_loss(
            hidden, weight, targets, old, A, bias=bias, token_weights=w, ref_logprob=ref, impl=impl,
            **options_of("k3_iw", surrogate),
        )  # fmt: skip
        return result.loss

    def truth(hidden, weight, bias):
        logprob = (hidden @ weight.T + bias).log_softmax(1)[torch.arange(ROWS, device=device), targets]
        rho, d = (logprob - old).exp(), ref - logprob
        factor = rho.detach().where(rho < 1.3, 1.3) if surrogate == "cispo" else 1
        return (w * (-factor * A * logprob + 0.4 * rho * (d.exp() - d - 1))).sum()

    leaves = [hidden, weight, bias]
    expected = run(truth, [x.double() for x in leaves])
    for x, y in zip(run(ours, leaves), expected, strict=True):
        assert (x - y).abs().max() < (1e-5 + truncation(impl, device, torch.float32)) * y.abs().max()


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("kind", ["none", "k3_iw"])
def test_statistics_equal_those_of_the_two_separate_ops(impl, device, small_blocks, kind, surrogate):
    hidden, weight, bias, targets = head(ROWS, 24, 300, torch.float32, device)
    targets[::3] = IGNORE
    kept = targets != IGNORE
    old, ref, A, w = tokens(hidden, weight, bias, targets % 300)
    for x in (old, ref, A, w, hidden):
        x[~kept] = math.nan  # ignored tokens are not read
    ref = None if kind == "none" else ref
    options = options_of(kind, surrogate)
    with torch.no_grad():
        result = kernels.linear_policy_loss(
            hidden, weight, targets, old, A, bias=bias, token_weights=w, ref_logprob=ref, impl=impl, **options
        )
    assert result.loss.item() == pytest.approx(
        reference.linear_policy_loss(
            hidden[kept].double(), weight.double(), targets[kept], old[kept], A[kept], token_weights=w[kept],
            ref_logprob=None if ref is None else ref[kept], bias=bias.double(), **options,
        ).item(),
        rel=1e-5,
    )  # fmt: skip
    logprob, entropy = reference.linear_logprob(
        hidden[kept].double(), weight.double(), targets[kept], bias=bias.double()
    )
    assert (result.logprob[~kept] == 0).all()
    assert (result.entropy[~kept] == 0).all()
    torch.testing.assert_close(result.logprob[kept].double(), logprob, atol=1e-5, rtol=0)
    torch.testing.assert_close(result.entropy[kept].double(), entropy, atol=1e-5, rtol=0)
    ratio = (logprob - old[kept]).exp()
    A = A[kept]
    expected = {
        "clip_low": ((ratio < 0.9) & (A < 0)).sum(),
        "clip_high": ((ratio > 1.3) & (A > 0)).sum(),
        "clip_dual": ((ratio > 1.8) & (A < 0)).sum(),
        "ratio_max": ratio.max(),
    }
    assert all(count > 0 for count in expected.values())
    if surrogate != "ppo":
        del expected["clip_dual"]
        expected |= {"clip_low": A.new_zeros(()), "clip_high": (ratio > 1.3).sum() * (surrogate == "cispo")}
    if kind != "none":
        d = ref[kept] - logprob
        expected["kl"] = (ratio * (d.exp() - d - 1)).sum()
    assert result.statistics.keys() == expected.keys()
    for name, value in expected.items():
        assert result.statistics[name].item() == pytest.approx(value.item(), rel=1e-4), name


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_on_policy_without_weights_the_gradient_is_the_policy_gradient(impl, device, surrogate):
    """The gradient is that of -sum_t A_t log pi(t), and the loss that, or -sum_t A_t in "ppo"."""
    hidden, weight, bias, targets = head(30, 8, 50, torch.float32, device)
    A = torch.randn(30, generator=torch.Generator().manual_seed(0)).to(device)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    ours = kernels.linear_policy_loss(hidden, weight, targets, None, A, bias=bias, surrogate=surrogate, impl=impl)
    truth = [x.detach().double().requires_grad_() for x in leaves]
    logprob, _ = reference.linear_logprob(*truth[:2], targets, bias=truth[2])
    loss = -(A.double() * logprob).sum()
    assert ours.loss.item() == pytest.approx(-A.sum().item() if surrogate == "ppo" else loss.item(), abs=1e-5)
    expected = torch.autograd.grad(loss, truth)
    for x, y in zip(torch.autograd.grad(ours.loss, leaves), expected, strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("surrogate", ["cispo", "reinforce"])
def test_a_token_of_probability_0_and_advantage_0_gives_no_nan(impl, device, surrogate):
    """Its log-prob is -inf, and its ratio on policy NaN. Loss and gradients of the other tokens are unchanged."""
    hidden, weight, bias, targets = head(6, 4, 9, torch.float32, device)
    targets = torch.tensor([3, 1, 2, 3, 0, 4], device=device)
    bias[3], A = -math.inf, torch.tensor([0.0, 1, -1, 0, 2, 1], device=device)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    result = kernels.linear_policy_loss(hidden, weight, targets, None, A, bias=bias, surrogate=surrogate, impl=impl)
    assert result.logprob.isneginf().tolist() == [True, False, False, True, False, False]
    kept = A != 0
    truth = [x.detach().double().requires_grad_() for x in leaves]
    logprob = (truth[0] @ truth[1].T + bias).log_softmax(1)[kept, targets[kept]]
    loss = -(A[kept] * logprob).sum()
    assert result.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    finite = torch.arange(9, device=device) != 3
    logits = (truth[0] @ truth[1][finite].T + bias[finite]).log_softmax(1)
    column = torch.where(targets > 3, targets - 1, targets)
    expected = torch.autograd.grad(-(A * logits.gather(1, column[:, None])[:, 0])[kept].sum(), truth)
    for x, y in zip(torch.autograd.grad(result.loss, leaves), expected, strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-5, rtol=1e-5)


def test_a_scaled_loss_and_a_second_backward(impl, device):
    """Each backward multiplies the stored gradients by its upstream gradient."""
    hidden, weight, _, targets = head(9, 8, 50, torch.float32, device)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    A = torch.ones(9, device=device)
    loss = kernels.linear_policy_loss(hidden, weight, targets, None, A, impl=impl).loss
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    thrice = torch.autograd.grad(3 * loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves)
    for x, y, z in zip(once, thrice, again, strict=True):
        torch.testing.assert_close((3 * x, x), (y, z))


def test_tiny_token_weights_survive_float16(device):
    """1 / (tokens of a large batch) times a softmax underflows in float16 unless the loss scale is applied before."""
    hidden, weight, bias, targets = head(20, 8, 50, torch.float16, device)
    A, w = torch.ones(20, device=device), torch.full((20,), 1e-7, device=device)
    hidden.requires_grad_()
    loss = kernels.linear_policy_loss(hidden, weight, targets, None, A, bias=bias, token_weights=w, impl="torch").loss
    (ours,) = torch.autograd.grad(2**23 * loss, hidden)
    wide = hidden.detach().double().requires_grad_()
    theirs = plain(targets, None, None, A, w)(wide, weight.double(), bias.double())
    (truth,) = torch.autograd.grad(2**23 * theirs, wide)
    assert (ours.double() - truth).abs().max() < 0.01 * truth.abs().max()


def test_large_sums_over_tokens_survive_float16(device):
    """Weights of 1 / T are stored as 1. Their sum over tokens overflows in float16 unless it is rescaled before."""
    T = 4096
    hidden, weight, _, targets = head(T, 8, 50, torch.float16, device)
    hidden, targets = torch.full_like(hidden, 8.0), torch.zeros_like(targets)
    A, w = torch.full((T,), 10.0, device=device), torch.full((T,), 1 / T, device=device)
    weight.requires_grad_()
    loss = kernels.linear_policy_loss(hidden, weight, targets, None, A, token_weights=w, impl="torch").loss
    (ours,) = torch.autograd.grad(loss, weight)
    wide = weight.detach().double().requires_grad_()
    theirs = plain(targets, None, None, A, w)(hidden.double(), wide, None)
    (truth,) = torch.autograd.grad(theirs, wide)
    assert ours.dtype == torch.float16
    assert truth.abs().max() * T > 65504
    assert (ours.double() - truth).abs().max() < 0.01 * truth.abs().max()


def test_second_derivatives_are_refused(impl, device):
    hidden, weight, _, targets = head(5, 4, 9, torch.float32, device)
    A = torch.ones(5, device=device)
    loss = kernels.linear_policy_loss(hidden.requires_grad_(), weight, targets, None, A, impl=impl).loss
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match=SECOND_DERIVATIVE):
        torch.autograd.grad(grad.sum(), hidden)


@pytest.mark.parametrize("wanted", [(), (0,), (1,), (2,), (0, 2)])
def test_only_required_gradients_are_computed(wanted):
    *leaves, targets = head(6, 4, 9, torch.float32)
    for i in wanted:
        leaves[i].requires_grad_()
    result = kernels.linear_policy_loss(leaves[0], leaves[1], targets, None, torch.ones(6), bias=leaves[2])
    assert result.loss.requires_grad == bool(wanted)
    assert not result.logprob.requires_grad
    if wanted:
        result.loss.backward()
    assert [x.grad is not None for x in leaves] == [i in wanted for i in range(3)]


def test_no_tokens_and_weights_of_0(impl, device):
    for T, w in ((0, None), (5, torch.zeros(5, device=device))):
        hidden, weight, bias, targets = head(T, 4, 9, torch.float32, device)
        leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
        A = torch.ones(T, device=device)
        result = kernels.linear_policy_loss(
            hidden, weight, targets, A, A, bias=bias, token_weights=w, ref_logprob=A, impl=impl
        )
        result.loss.backward()
        assert result.loss.item() == 0
        assert all((x.grad == 0).all() for x in leaves)


def test_the_full_logits_are_never_stored(small_blocks):
    T, D, V = 2000, 4, 300
    *leaves, targets = head(T, D, V, torch.float32)
    leaves = [x.requires_grad_() for x in leaves]
    A = torch.ones(T)

    def step():
        kernels.linear_policy_loss(leaves[0], leaves[1], targets, None, A, bias=leaves[2]).loss.backward()

    assert largest_allocation(step) == 64 * V * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old_logprob": torch.ones(2)}, r"expected old_logprob \(3,\), one per target, got \(2,\)"),
        ({"advantages": torch.ones(3, 1)}, r"expected advantages \(3,\), one per target, got \(3, 1\)"),
        ({"token_weights": torch.ones(4)}, "token_weights"),
        ({"ref_logprob": torch.ones(4)}, "ref_logprob"),
        ({"beta": 0.1}, "needs ref_logprob"),
        ({"kl": "k4"}, "k1, k2, k3, k3_iw"),
        ({"surrogate": "CISPO"}, "surrogate='CISPO' is not known; expected one of ppo, cispo, reinforce"),
        ({"surrogate": "cispo", "dual_clip": 3.0}, "dual_clip=3.0: expected None with surrogate='cispo'"),
        ({"eps_low": 1.5}, "eps_low=1.5"),
        ({"dual_clip": 1.1}, r"dual_clip=1\.1: expected None or a number > 1 \+ eps_high = 1\.2"),
        ({"temperature": 0.0}, r"temperature=0\.0"),
        ({"targets": torch.zeros(3)}, "dtype torch.int64"),
        ({"weight": torch.ones(5, 3)}, r"hidden \(T, D\) and weight \(V, D\)"),
        ({"impl": "cuda"}, "'cuda' is not known to linear_policy_loss"),
    ],
)
def test_invalid_arguments_are_refused(change, message):
    good = {"hidden": torch.ones(3, 2), "weight": torch.ones(5, 2), "targets": torch.zeros(3, dtype=torch.int64)}
    good |= {"old_logprob": torch.ones(3), "advantages": torch.ones(3)}
    with pytest.raises(ValueError, match=message):
        kernels.linear_policy_loss(**{**good, **change})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_opcheck(surrogate):
    hidden, weight, bias, targets = head(70, 4, 9, torch.float32)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    A, half = torch.ones(70), torch.tensor(0.5, dtype=torch.float64)
    args = (targets, A, A, A, A, half, half, 4 * half, half, "k3_iw", surrogate, half, False, "torch", [True] * 3)
    torch.library.opcheck(torch.ops.nlgrpo.linear_policy_loss.default, (*inputs, *args))


@pytest.mark.slow
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_few_compilations_serve_all_lengths_and_settings(impl, surrogate):
    torch.compiler.reset()  # the compilations of other parameters count towards the limit of the function
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def loss(hidden, weight, targets, A, temperature, beta, eps_high):
        result = kernels.linear_policy_loss(
            hidden, weight, targets, A, A, token_weights=A, ref_logprob=A, beta=beta, eps_high=eps_high,
            surrogate=surrogate, temperature=temperature, impl=impl,
        )  # fmt: skip
        return result.loss

    for T in (5, 6, 8, 12, 16):
        temperature, beta, eps_high = 0.5 + T / 20, T / 50, T / 30
        hidden, weight, _, targets = head(T, 4, 9, torch.float32)
        A = torch.randn(T, generator=torch.Generator().manual_seed(T))
        ours = loss(hidden.requires_grad_(), weight, targets, A, temperature, beta, eps_high)
        (grad,) = torch.autograd.grad(ours, hidden)
        options = {"temperature": temperature, "beta": beta, "eps_high": eps_high, "surrogate": surrogate}
        theirs = plain(targets, A, A, A, A, **options)(hidden, weight, None)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(grad, torch.autograd.grad(theirs, hidden)[0], atol=1e-5, rtol=1e-4)
    assert counter.frame_count <= 2  # the first one is for a fixed length


class Small(torch.nn.Module):
    """Embeddings, and a head that is used outside of `forward`; if tied, both share one weight."""

    def __init__(self, V, D, tied):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(V, D), torch.nn.Linear(D, V)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.embed(tokens)


def compare(rank: int, tied: bool) -> None:
    """Compare gradients of a head sharded over two ranks and used outside of `forward` with their mean on one rank."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model, truth = Small(7, 6, tied).double(), Small(7, 6, tied).double()
    truth.load_state_dict(model.state_dict())
    tokens, targets, A = torch.randint(7, (10,)), torch.randint(7, (10,)), torch.randn(10, dtype=torch.float64)
    ranks = (slice(0, 3), slice(3, 10))
    fully_shard(model, mesh=mesh, reshard_after_forward=True)

    def loss(model, op, rows):
        return op(model(tokens[rows]), model.head.weight, model.head.bias, targets[rows], A[rows])

    for op in (recomputed, in_forward):
        model.zero_grad()
        truth.zero_grad()
        model(tokens)
        assert isinstance(model.head.weight, DTensor)
        loss(model, op, ranks[rank]).backward()
        (sum(loss(truth, op, rows) for rows in ranks) / 2).backward()
        for ours, theirs in zip(model.parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, atol=1e-12, rtol=0)


def recomputed(hidden, weight, bias, targets, A):
    return -(A * kernels.linear_logprob(hidden, weight, targets, bias=bias)[0]).sum()


def in_forward(hidden, weight, bias, targets, A):
    return kernels.linear_policy_loss(hidden, weight, targets, None, A, bias=bias).loss


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_sharded_by_fsdp(tied):
    run_ranks(compare, tied)
