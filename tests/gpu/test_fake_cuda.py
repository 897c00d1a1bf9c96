"""The fake CUDA device itself: its numbers, devices that do not match, launches and synchronizations."""

import pytest
import torch
import torch.nn.functional as F
from support.fake_cuda import fake_cuda, on_fake_cuda

from nlgrpo.model.attention import takes_fewer_key_heads

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:

    @triton.jit
    def _double_kernel(x, out, n, BLOCK: tl.constexpr):
        column = tl.arange(0, BLOCK)
        tl.store(out + column, 2 * tl.load(x + column, mask=column < n), mask=column < n)


@torch.library.custom_op("nlgrpo_tests::three_launches", mutates_args=())
def three_launches(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).square() + torch.zeros_like(x).sum().item()


@torch.library.custom_op("nlgrpo_tests::no_launch", mutates_args=())
def no_launch(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def network(device):
    """Losses, gradients and sampled values of a small network, computed on ``device``."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, generator=generator).to(device)
    weight = torch.randn(8, 8, generator=generator).to(device).requires_grad_()
    gain = torch.ones(8, device=device, requires_grad=True)
    optimizer = torch.optim.AdamW([weight, gain], lr=0.1, fused=True)
    losses = []
    for _ in range(3):
        hidden = F.rms_norm(F.silu(x @ weight), (8,), gain, 1e-6)
        hidden[0, :2] = 0.0
        scores = hidden.view(2, 3, 8) @ hidden.view(2, 3, 8).mT
        loss = -scores.log_softmax(-1).diagonal(dim1=1, dim2=2).mean() + torch.quantile(hidden, 0.5)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([weight, gain], 1.0)
        optimizer.step()
        losses.append(loss.item())
    with torch.inference_mode():
        ordered, order = (x.detach() * 2).sort(dim=-1)
        ordered[:, 0] += 1.0
    return losses, weight.grad.cpu(), weight.detach().cpu(), ordered.cpu(), order.cpu()


def test_results_are_those_of_the_cpu():
    found = on_fake_cuda(lambda device: network("cuda"))
    torch.testing.assert_close(found, network("cpu"))


def test_tensors_are_on_the_device_and_say_so():
    def work(device):
        x = torch.ones(2, 3, device="cuda")
        places = [
            x,
            x[0],
            x.new_zeros(2),
            torch.zeros_like(x),
            x.to(torch.float64),
            torch.ones(2).to(x),
            torch.ones(2).to("cuda"),
        ]
        assert all(y.device == torch.device("cuda", 0) and y.is_cuda and not y.is_cpu for y in places)
        back = [
            x.cpu(),
            x.to("cpu"),
            x.to(torch.ones(1)),
            torch.zeros_like(x, device="cpu"),
            x.new_ones(2, device="cpu"),
        ]
        assert all(type(y) is torch.Tensor and y.is_cpu for y in back)
        assert x.to("cuda") is x
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            x.numpy()
        model = torch.nn.Linear(3, 2).to("cuda")
        assert isinstance(model.weight, torch.nn.Parameter)
        assert model(x).is_cuda

    on_fake_cuda(work)


MIXED = {
    "sum": lambda x: x + torch.ones(3),
    "product": lambda x: x[None] @ torch.ones(3, 2),
    "cat": lambda x: torch.cat([x, torch.ones(2)]),
    "in place": lambda x: torch.ones(3).add_(x),
    "where": lambda x: torch.where(torch.ones(3, dtype=torch.bool), x, 0.0),
    "index of a tensor on the CPU": lambda x: torch.ones(3)[torch.zeros(2, dtype=torch.int64, device="cuda")],
    "embedding": lambda x: F.embedding(torch.zeros(2, dtype=torch.int64), x[:, None]),
    "values to write": lambda x: x.index_put((torch.arange(2, device="cuda"),), torch.ones(2)),
    "gradient": lambda x: (2 * x.requires_grad_()).backward(torch.ones(3)),
}


@pytest.fixture(scope="module")
def raised():
    """The error of each operation on mixed devices, None without one."""

    def work(device):
        found = {}
        for name, function in MIXED.items():
            found[name] = None
            try:
                function(torch.ones(3, device="cuda"))
            except RuntimeError as error:
                found[name] = str(error)
        return found

    return on_fake_cuda(work)


@pytest.mark.parametrize("name", MIXED)
def test_tensors_on_different_devices_raise(name, raised):
    assert raised[name] is not None
    assert "to be on the same device" in raised[name]
    assert "cuda:0" in raised[name]
    assert "cpu" in raised[name]


def test_numbers_and_indices_may_be_on_the_cpu():
    def work(device):
        x = torch.arange(3.0, device="cuda")
        with device.counting() as counts:
            y = x * torch.tensor(2.0) + x[torch.tensor([2, 1, 0])]
        assert y.tolist() == [2.0, 3.0, 4.0]
        assert counts.uploads.total() == 1

    on_fake_cuda(work)


WAITING = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool((x > 0).all()),
    "if": lambda x: 1 if x[0] else 0,
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to the CPU": lambda x: x.to("cpu"),
    "copy to the CPU": lambda x: torch.zeros(3).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "where with one argument": lambda x: torch.where(x > 0),
    "boolean index": lambda x: x[x > 0],
    "values at a boolean index": lambda x: x.index_put_((x > 0,), torch.ones(3, device="cuda")),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.long().bincount(minlength=9),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 3]).to("cuda", non_blocking=True)),
    "slice": lambda x: x[: x[0].long()],
    "synchronize": lambda x: torch.cuda.synchronize(),
}
NOT_WAITING = {
    "a number at a boolean index": lambda x: x.__setitem__(x > 0, 1.0),
    "repeat_interleave with its size": lambda x: x.repeat_interleave(x.long(), output_size=6),
    "repeat_interleave by a number": lambda x: x.repeat_interleave(2),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "index": lambda x: x[x.long() - 1],
    "to the same device": lambda x: x.to("cuda"),
    "to another dtype": lambda x: x.to(torch.bfloat16),
    "sort": lambda x: x.sort(),
    "number on the CPU": lambda x: torch.ones(()).item(),
}


UPLOADING = {
    "tensor": (lambda: torch.tensor([1, 2], device="cuda"), 1),
    "to": (lambda: torch.ones(3).to("cuda"), 1),
    "copy": (lambda: torch.zeros(3, device="cuda").copy_(torch.ones(3)), 1),
    "without waiting": (lambda: torch.ones(3).to("cuda", non_blocking=True), 0),
    "made there": (lambda: torch.arange(3, device="cuda"), 0),
}


@pytest.fixture(scope="module")
def counted():
    """Counts of each operation of `WAITING`, `NOT_WAITING` and `UPLOADING`."""

    def work(device):
        found = {}
        for name, function in (WAITING | NOT_WAITING).items():
            x = torch.arange(1.0, 4.0, device="cuda")
            with device.counting() as found[name]:
                function(x)
        for name, (function, _) in UPLOADING.items():
            with device.counting() as found[name]:
                function()
        return found

    return on_fake_cuda(work)


@pytest.mark.parametrize("name", [*WAITING, *NOT_WAITING])
def test_synchronizations_are_counted(name, counted):
    counts = counted[name]
    assert counts.synchronizations.total() == (name in WAITING), counts
    assert all(place.startswith("tests/gpu/test_fake_cuda.py:") for place in counts.synchronizations)
    assert not counts.uploads


@pytest.mark.parametrize("name", UPLOADING)
def test_blocking_copies_to_the_device_are_counted(name, counted):
    assert counted[name].uploads.total() == UPLOADING[name][1]
    assert not counted[name].synchronizations


LAUNCHING = {
    "view": (lambda x: x.view(2, 4)[:, 1:].transpose(0, 1), 0),
    "sum": (lambda x: x + 1, 1),
    "linear": (lambda x: F.linear(x.view(1, 8), x.view(1, 8)), 1),
    "fused norm": (lambda x: F.rms_norm(x, (8,), x, 1e-6), 1),
    "fused norm without a weight": (lambda x: F.rms_norm(x, (8,)), 1),
    "layer norm": (lambda x: F.layer_norm(x, (8,), x, x), 1),
    "empty": (lambda x: torch.empty_like(x), 0),
    "custom op": (lambda x: three_launches(x), 5),  # with its zeros and their sum
    "custom op without a kernel": (lambda x: no_launch(x), 1),
    "on the CPU": (lambda x: torch.ones(3) + 1, 0),
}


@pytest.fixture(scope="module", params=[False, True], ids=["", "inference"])
def launched(request):
    """Counts of each operation of `LAUNCHING`, outside and inside of inference mode."""

    def work(device):
        found = {}
        with torch.inference_mode(request.param):
            x = torch.ones(8, device="cuda")
            for name, (function, _) in LAUNCHING.items():
                with device.counting() as found[name]:
                    function(x)
        return found

    return on_fake_cuda(work)


@pytest.mark.parametrize("name", LAUNCHING)
def test_launches_are_counted(name, launched):
    counts, expected = launched[name], LAUNCHING[name][1]
    assert counts.launches.total() == expected, counts
    assert counts.launched_at.total() == expected
    assert counts.custom_ops.total() == name.startswith("custom op")


def test_a_backward_pass_counts_its_launches_where_it_was_started():
    def work(device):
        x = torch.ones(8, device="cuda", requires_grad=True)
        loss = F.rms_norm(x, (8,), x.detach(), 1e-6).sum()
        with device.counting() as counts:
            loss.backward()
        assert counts.launches["aten::_fused_rms_norm_backward"] == 1
        assert {place.rpartition(":")[0] for place in counts.launched_at} == {"tests/gpu/test_fake_cuda.py"}

    on_fake_cuda(work)


@pytest.mark.skipif(triton is None, reason="Triton is not installed")
def test_a_triton_kernel_runs_and_counts_as_one_launch():
    def work(device):
        x = torch.arange(5.0, device="cuda")
        out = torch.empty_like(x)
        with device.counting() as counts:
            _double_kernel[(1,)](x, out, 5, BLOCK=8)
        assert counts.launches == {"triton::_double_kernel": 1}
        assert out.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
        with pytest.raises(ValueError, match="cannot be accessed from Triton"):
            _double_kernel[(1,)](torch.ones(5), out, 5, BLOCK=8)

    on_fake_cuda(work)


def test_countings_can_be_nested_and_subtracted():
    def work(device):
        x = torch.ones(3, device="cuda")
        with device.counting() as outer:
            x + 1
            with device.counting() as inner:
                x * 2
        assert inner.launches == {"aten::mul": 1}
        assert (outer - inner).launches == {"aten::add": 1}
        x + 1
        assert outer.launches.total() == 2

    on_fake_cuda(work)


# --- ops that only a GPU has ------------------------------------------------------------------------------------------


def dense_attention(q, k, v, scale, left):
    """Causal attention of one sequence, whose queries and keys end together, in the dtype of the arguments."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    seen = (distance >= 0) & ((distance <= left) | (left < 0))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("left", [-1, 2])
def test_flash_attention_and_its_gradients(kv_heads, left):
    generator = torch.Generator().manual_seed(0)
    sizes_q, sizes_k = [3, 1, 5], [3, 4, 9]
    q, k, v, upstream = (
        torch.randn(sum(sizes), heads, 8, generator=generator).bfloat16()
        for sizes, heads in ((sizes_q, 4), (sizes_k, kv_heads), (sizes_k, kv_heads), (sizes_q, 4))
    )

    def work(device):
        from torch.nn.attention.varlen import varlen_attn

        leaves = [x.to("cuda").requires_grad_() for x in (q, k, v)]
        ends = [torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32).to("cuda") for sizes in (sizes_q, sizes_k)]
        keys = leaves[1:]
        grouped = {}
        if kv_heads < 4 and takes_fewer_key_heads(varlen_attn):
            grouped = {"enable_gqa": True}
        elif kv_heads < 4:
            keys = [x.repeat_interleave(4 // kv_heads, dim=1) for x in keys]
        out = varlen_attn(leaves[0], *keys, *ends, 5, 9, scale=0.3, window_size=(left, 0), **grouped)
        out.backward(upstream.to("cuda"))
        with pytest.raises(RuntimeError, match="the longest sequence of keys"):
            varlen_attn(leaves[0], *keys, *ends, 5, 8, scale=0.3, window_size=(left, 0), **grouped)
        return [x.cpu() for x in (out.detach(), *(leaf.grad for leaf in leaves))]

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    parts = zip(exact[0].split(sizes_q), exact[1].split(sizes_k), exact[2].split(sizes_k), strict=True)
    truth = torch.cat([dense_attention(*part, 0.3, left) for part in parts])
    truth.backward(upstream.double())
    expected = [truth.detach(), *(leaf.grad for leaf in exact)]
    for found, exact_value in zip(on_fake_cuda(work), expected, strict=True):
        largest = float(exact_value.abs().max())
        torch.testing.assert_close(found.double(), exact_value, rtol=0.01, atol=0.01 * largest)


def test_products_with_a_wider_result():
    generator = torch.Generator().manual_seed(0)
    a, b, added = (torch.randn(2, 8, 8, generator=generator) for _ in range(3))
    a, b = a.bfloat16(), b.bfloat16()

    def work(device):
        x, y, total = a.to("cuda"), b.to("cuda"), added[0].to("cuda")
        batched = torch.bmm(x, y, out_dtype=torch.float32)
        torch.addmm(total, x[0], y[0], out_dtype=torch.float32, out=total)
        with pytest.raises(RuntimeError, match="out_dtype"):
            torch.bmm(x, y, out_dtype=torch.float64)
        return batched.cpu(), total.cpu()

    batched, total = on_fake_cuda(work)
    torch.testing.assert_close(batched, a.float() @ b.float())
    torch.testing.assert_close(total, added[0] + a[0].float() @ b[0].float())


# --- the process ------------------------------------------------------------------------------------------------------


def test_the_process_afterwards_has_no_device():
    before = torch.Tensor.to, torch.tensor, torch.cuda.device_count()
    with fake_cuda():
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
    assert (torch.Tensor.to, torch.tensor, torch.cuda.device_count()) == before
    assert torch.ones(3).to("cpu").add(1).tolist() == [2.0, 2.0, 2.0]


def test_a_failure_in_the_process_is_reported_with_its_traceback():
    def work(device):
        raise ValueError("a fault on the device")

    with pytest.raises(AssertionError, match="a fault on the device"):
        on_fake_cuda(work)
