"""Muon compared with `torch.optim.Muon` on separately stored matrices, with singular values, and over ranks."""

import json
from functools import partial

import pytest
import torch
from support import random_models
from support.helpers import full_tensors, run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from nlgrpo.config.schema import OptimConfig
from nlgrpo.model import decoder, muon
from nlgrpo.model.fsdp import shard
from nlgrpo.model.muon import COEFFICIENTS, Muon, block_matrices, lr_factor, orthogonalize
from nlgrpo.runtime import checkpoint
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.learner import make_optimizer

CPU = torch.device("cpu")
CASES = ["llama", "llama-tied-bias", "qwen3", "neox", "gpt2"]


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# --- one matrix -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 5), (3, 9), (9, 3), (1, 4), (4, 1)])
@pytest.mark.parametrize("steps", [1, 5])
def test_a_singular_value_goes_through_the_polynomial(shape, steps):
    matrix, (a, b, c) = random(*shape, dtype=torch.float64), COEFFICIENTS
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    found = orthogonalize(matrix, steps)
    torch.testing.assert_close(found, u @ s.diag() @ v, rtol=1e-10, atol=1e-12)
    assert found.dtype == torch.float64
    torch.testing.assert_close(matrix, random(*shape, dtype=torch.float64), rtol=0, atol=0)  # unchanged


def test_the_iterations_run_in_float32_on_a_cpu():
    matrix = random(24, 60)
    found, exact = orthogonalize(matrix), orthogonalize(matrix.double())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    narrow = orthogonalize(matrix.bfloat16().double())
    torch.testing.assert_close(orthogonalize(matrix.bfloat16()).double(), narrow, rtol=0, atol=1e-5)


def test_zero_has_no_direction():
    assert orthogonalize(torch.zeros(3, 4)).tolist() == torch.zeros(3, 4).tolist()


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (32, 128), (128, 32)])
def test_an_update_has_the_size_of_adamws(rows, columns):
    update = orthogonalize(random(rows, columns, dtype=torch.float64)) * lr_factor("match_rms_adamw", rows, columns)
    assert update.square().mean().sqrt() == pytest.approx(0.2, rel=0.3)  # singular values are 0.7 to 1.2


# --- a decoder --------------------------------------------------------------------------------------------------------


def parts_of(model, name):
    """Rows of the separate matrices in a weight of a block, from its shape; [] for other parameters."""
    shape, last = model.shape, ".".join(name.split(".")[-2:])
    d = shape.head_dim
    rows = {
        "qkv.weight": [shape.heads * d, shape.kv_heads * d, shape.kv_heads * d],
        "up.weight": [shape.ffn] * (1 + shape.gated),
        "out.weight": [shape.width],
        "down.weight": [shape.width],
    }
    return rows.get(last, []) if name.startswith("blocks.") else []


def set_gradients(model, step):
    for i, p in enumerate(model.parameters()):
        p.grad = random(*p.shape, seed=1000 * step + i, dtype=p.dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "changes",
    [{}, {"nesterov": False, "momentum": 0.5, "ns_steps": 2}, {"adjust_lr_fn": "original"}],
    ids=["defaults", "without nesterov", "original"],
)
def test_steps_are_those_of_pytorch_on_separate_matrices(case, changes, monkeypatch):
    monkeypatch.setitem(muon.ITERATED, "cpu", torch.bfloat16)  # as torch.optim.Muon
    model = decoder.build(random_models.random_model(case).config).float()
    for i, p in enumerate(model.parameters()):
        p.data = random(*p.shape, seed=i)
    optim = OptimConfig("muon", lr=0.01, weight_decay=0.1, eps=1e-3, betas=(0.8, 0.9), **changes)
    optimizer = make_optimizer(model, optim)
    cut = {name: parts_of(model, name) for name, _ in model.named_parameters()}
    theirs = {
        name: [nn.Parameter(x.clone()) for x in (p.detach().split(cut[name]) if cut[name] else [p.detach()])]
        for name, p in model.named_parameters()
    }
    matrices = [x for name, pieces in theirs.items() if cut[name] for x in pieces]
    others = [x for name, pieces in theirs.items() if not cut[name] for x in pieces]
    keys = {key: getattr(optim, key) for key in ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")}
    pytorch = torch.optim.Muon(matrices, lr=optim.lr, weight_decay=0.1, **keys)
    groups = [
        {"params": [x for x in others if x.dim() > 1], "weight_decay": 0.1},
        {"params": [x for x in others if x.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    for step in range(4):
        lr = 0.01 / (step + 1)
        for group in [*optimizer.param_groups, *pytorch.param_groups, *adamw.param_groups]:
            group["lr"] = lr
        set_gradients(model, step)
        for name, p in model.named_parameters():
            for x, grad in zip(theirs[name], p.grad.split(cut[name]) if cut[name] else [p.grad], strict=True):
                x.grad = grad.clone()
        optimizer.step()
        pytorch.step()
        adamw.step()
    assert len(matrices) > len(model.blocks) * 4 - 1
    for name, p in model.named_parameters():
        exact = {} if cut[name] else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(p.detach(), torch.cat([x.detach() for x in theirs[name]]), **exact, msg=name)


def test_a_fused_matrix_is_not_orthogonalized_as_one():
    """Otherwise the test above could not fail."""
    model = decoder.build(random_models.random_model("llama").config)
    [qkv, *_] = block_matrices(model)
    weights = [nn.Parameter(torch.zeros_like(qkv["params"][0])) for _ in range(2)]
    keys = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": "match_rms_adamw"}
    for weight, parts in zip(weights, (qkv["parts"], ()), strict=True):
        weight.grad = random(*weight.shape)
        Muon([{"params": [weight], "parts": parts} | keys], lr=1.0).step()
    assert (weights[0] - weights[1]).abs().max() > 0.1


def test_every_weight_of_a_block_and_nothing_else_is_in_a_group_of_muon():
    for case in CASES:
        model = decoder.build(random_models.random_model(case).config)
        names = {id(p): name for name, p in model.named_parameters()}
        optimizer = make_optimizer(model, OptimConfig("muon"))
        found = {names[id(p)] for group in optimizer.param_groups if "parts" in group for p in group["params"]}
        assert found == {name for name in names.values() if parts_of(model, name)}
        assert sum(dict(model.named_parameters())[name].numel() for name in found) == model.shape.matrices
        every = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        assert sorted(every) == sorted(names.values())


@pytest.mark.parametrize(("shape", "parts"), [((4,), ()), ((2, 3, 4), ()), ((4, 3), (2, 3))])
def test_a_parameter_that_does_not_fit_is_refused(shape, parts):
    with pytest.raises(ValueError, match="expected a matrix with parts of"):
        Muon([{"params": [nn.Parameter(torch.zeros(shape))], "parts": parts}], lr=1.0)


def test_a_parameter_without_a_gradient_stays():
    model = decoder.build(random_models.random_model("llama").config)
    for i, p in enumerate(model.parameters()):
        p.data = random(*p.shape, seed=i)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.embed.requires_grad_(False)
    model.blocks[0].qkv.requires_grad_(False)
    optimizer = make_optimizer(model, OptimConfig("muon", lr=0.1, weight_decay=0.1))
    for i, p in enumerate(model.parameters()):
        p.grad = random(*p.shape, seed=i) if p.requires_grad else None
    optimizer.step()
    same = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert same == {"embed.weight", "blocks.0.qkv.weight"} | {n for n in same if n == "blocks.0.qkv.bias"}


# --- ranks and checkpoints --------------------------------------------------------------------------------------------


def start(ranks, case="qwen3"):
    model = decoder.build(random_models.random_model(case).config).double()
    for i, p in enumerate(model.parameters()):
        p.data = random(*p.shape, seed=i, dtype=torch.float64)
    model = shard(model, ranks, torch.float64)
    return model, make_optimizer(model, OptimConfig("muon", lr=0.01, weight_decay=0.1))


def steps(model, optimizer, ranks, numbers):
    for step in numbers:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        for i, p in enumerate(model.parameters()):
            grad = random(*p.shape, seed=1000 * step + i, dtype=torch.float64)
            if isinstance(p, DTensor):
                grad = torch.distributed.tensor.distribute_tensor(grad, p.device_mesh, p.placements)
            p.grad = grad
        optimizer.step()
        optimizer.zero_grad()
    return full_tensors(model)


def on_rank(rank, folder, world):
    ranks = Ranks(rank, world, CPU)
    model, optimizer = start(ranks)
    steps(model, optimizer, ranks, range(2))
    checkpoint.save(folder / f"saved-{world}", 2, model=model, optimizer=optimizer, state={})
    torch.save(steps(model, optimizer, ranks, range(2, 4)), folder / f"whole-{world}-{rank}.pt")
    for saved in ("saved-1", f"saved-{world}"):
        again, other = start(ranks)
        assert checkpoint.load(folder / saved, model=again, optimizer=other) == {}
        torch.save(steps(again, other, ranks, range(2, 4)), folder / f"{saved}-loaded-{world}-{rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])  # with three ranks, shards have different numbers of rows
def test_ranks_equal_one_and_resume_bit_for_bit(tmp_path, world):
    on_rank(0, tmp_path, 1)
    run_ranks(partial(on_rank, folder=tmp_path, world=world), ranks=world)
    truth = torch.load(tmp_path / "whole-1-0.pt")
    begun = full_tensors(start(Ranks(0, 1, CPU))[0])
    assert all((truth[name] != begun[name]).any() for name in truth)
    assert_equal(torch.load(tmp_path / "saved-1-loaded-1-0.pt"), truth, exact=True)
    for rank in range(world):
        whole = torch.load(tmp_path / f"whole-{world}-{rank}.pt")
        assert_equal(whole, truth)
        assert_equal(torch.load(tmp_path / f"saved-{world}-loaded-{world}-{rank}.pt"), whole, exact=True)
        assert_equal(torch.load(tmp_path / f"saved-1-loaded-{world}-{rank}.pt"), truth)


def assert_equal(ours, theirs, exact=False):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        tolerance = 0 if exact else 1e-10
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance, msg=name)


def test_a_checkpoint_of_adamw_is_refused(tmp_path):
    model, muon = start(Ranks(0, 1, CPU))
    adamw = make_optimizer(model, OptimConfig())
    steps(model, adamw, None, range(1))
    path = checkpoint.save(tmp_path, 1, model=model, optimizer=adamw, state={})
    assert json.loads((path / "state.json").read_text())["param_groups"][0]["betas"] == [0.9, 0.999]
    with pytest.raises(ValueError, match="different parameter groups of the optimiser"):
        checkpoint.load(tmp_path, model=model, optimizer=muon)
