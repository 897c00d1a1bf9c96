"""Checkpoints: a resumed run equals an uninterrupted one; damaged and unsuitable checkpoints are reported."""

import logging
import random
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from nlgrpo.runtime import checkpoint


class Toy(nn.Module):
    """Two layers, a parameter that never gets a gradient, one that is frozen, and a buffer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.unused = nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        self.count += 1
        return self.layers(inputs) + self.frozen


def make(seed=0):
    torch.manual_seed(seed)
    model = Toy()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def train(model, optimizer, steps, start=0):
    """Train for some steps that draw from all three generators, with a learning rate that depends on the step."""
    losses = []
    for step in range(start, start + steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        inputs = torch.randn(8, 5) * random.random() + np.random.normal()  # noqa: NPY002
        loss = model(inputs).square().mean() + random.gauss() * model.layers[0].bias.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def everything(model, optimizer):
    """All state of training except the generators, as plain values to compare bit for bit."""
    optimizer_state = optimizer.state_dict()
    moments = {i: {k: v.tolist() for k, v in entry.items()} for i, entry in optimizer_state["state"].items()}
    return {k: v.tolist() for k, v in model.state_dict().items()}, moments, optimizer_state["param_groups"]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def save(folder, step, model, optimizer, keep=2, **state):
    return checkpoint.save(folder, step, model=model, optimizer=optimizer, state={"step": step, **state}, keep=keep)


def load(folder, model, optimizer):
    return checkpoint.load(folder, model=model, optimizer=optimizer)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# --- Resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, before):
    """``before`` steps + resume + rest equal 4 steps bit for bit, even if the optimiser has not stepped yet."""
    model, optimizer = make()
    seed_all(1)
    losses = train(model, optimizer, 4)

    first, first_optimizer = make()
    seed_all(1)
    assert train(first, first_optimizer, before) == losses[:before]
    save(tmp_path, before, first, first_optimizer, beta=0.1)

    second, second_optimizer = make(seed=99)
    train(second, second_optimizer, 1)  # moments and gradients that load must replace
    seed_all(99)
    assert load(tmp_path, second, second_optimizer) == {"step": before, "beta": 0.1}
    assert everything(second, second_optimizer) == everything(first, first_optimizer)
    assert train(second, second_optimizer, 4 - before, start=before) == losses[before:]
    assert everything(second, second_optimizer) == everything(model, optimizer)


@pytest.mark.parametrize("before", [0, 2])
def test_saving_changes_nothing(tmp_path, before):
    model, optimizer = make()
    seed_all(1)
    train(model, optimizer, before)
    other, other_optimizer = make()
    seed_all(1)
    train(other, other_optimizer, before)
    save(tmp_path, before, other, other_optimizer)
    assert everything(other, other_optimizer) == everything(model, optimizer)
    seed_all(2)
    losses = train(model, optimizer, 2)
    seed_all(2)
    assert train(other, other_optimizer, 2) == losses


def test_a_save_between_backward_and_step_keeps_the_gradients(tmp_path):
    model, optimizer = make()
    model(torch.ones(1, 5)).sum().backward()
    gradient = model.layers[0].weight.grad.clone()
    save(tmp_path, 0, model, optimizer)
    assert torch.equal(model.layers[0].weight.grad, gradient)
    assert not optimizer.state


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    ],
)
def test_other_optimisers_are_restored(tmp_path, build):
    model, other = Toy(), Toy()
    optimizer, other_optimizer = build(model.parameters()), build(other.parameters())
    for _ in range(2):
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
    save(tmp_path, 2, model, optimizer)
    load(tmp_path, other, other_optimizer)
    assert everything(other, other_optimizer) == everything(model, optimizer)


def test_an_older_checkpoint_resumes_with_the_fused_optimizer(tmp_path):
    model, other = Toy(), Toy()
    optimizer, fused = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters(), fused=True)
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    save(tmp_path, 1, model, optimizer)
    load(tmp_path, other, fused)
    assert fused.param_groups[0]["fused"]
    for network, its in ((model, optimizer), (other, fused)):
        its.zero_grad()
        network(torch.ones(4, 5)).square().mean().backward()
        its.step()
    torch.testing.assert_close(list(other.parameters()), list(model.parameters()))


def test_tied_weights_and_wrappers_are_restored(tmp_path):
    def tied():
        model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
        model["head"].weight = model["embed"].weight
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = tied()
    model["head"](model["embed"](torch.arange(3))).sum().backward()
    optimizer.step()
    save(tmp_path, 1, model, optimizer)
    other, other_optimizer = tied()
    load(tmp_path, torch.compile(other), other_optimizer)
    assert everything(other, other_optimizer) == everything(model, optimizer)
    assert other["head"].weight is other["embed"].weight


def test_state_is_restored_unchanged(tmp_path):
    state = {"beta": 0.1 + 0.2, "cursor": 2**53 + 1, "config": {"a": [1, None, "é"]}, "worst": float("-inf")}
    model, optimizer = make()
    checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer, state=state)
    assert load(tmp_path, model, optimizer) == state


# --- Choice of a checkpoint -------------------------------------------------------------------------------------------


def test_without_a_checkpoint_nothing_is_loaded(tmp_path):
    model, optimizer = make()
    assert load(tmp_path, model, optimizer) is None
    assert load(tmp_path / "nowhere", model, optimizer) is None
    assert checkpoint.newest(tmp_path) is None


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, flip, remove])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", "rng-00000.json", "manifest.json"])
def test_a_damaged_newest_checkpoint_is_reported_and_the_previous_one_loaded(tmp_path, caplog, damage, name):
    model, optimizer = make()
    save(tmp_path, 1, model, optimizer)
    newest = save(tmp_path, 2, model, optimizer)
    damage(newest / name)
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, model, optimizer) == {"step": 1}
    assert "step-00000002" in caplog.text
    assert name in caplog.text  # for a damaged manifest, the file of the wrong entry


def test_only_damaged_checkpoints_are_an_error(tmp_path):
    model, optimizer = make()
    for step in (1, 2):
        truncate(save(tmp_path, step, model, optimizer) / "state.json")
    with pytest.raises(
        ValueError, match=r"All checkpoints in (.|\n)*00000002/state.json has(.|\n)*00000001/state.json"
    ):
        load(tmp_path, model, optimizer)


def test_the_last_checkpoints_are_kept(tmp_path):
    model, optimizer = make()
    for step in (3, 1000, 100_000_000, 999_999_999):
        save(tmp_path, step, model, optimizer, keep=2)
    assert names(tmp_path) == ["step-100000000", "step-999999999"]
    save(tmp_path, 1_000_000_000, model, optimizer, keep=1)
    assert names(tmp_path) == ["step-1000000000"]
    assert load(tmp_path, model, optimizer) == {"step": 1_000_000_000}


def test_a_damaged_later_checkpoint_does_not_replace_good_ones(tmp_path):
    model, optimizer = make()
    truncate(save(tmp_path, 9, model, optimizer, keep=1) / "state.json")
    save(tmp_path, 5, model, optimizer, keep=1)
    save(tmp_path, 6, model, optimizer, keep=1)
    assert names(tmp_path) == ["step-00000006", "step-00000009"]
    assert load(tmp_path, model, optimizer) == {"step": 6}
    save(tmp_path, 9, model, optimizer, keep=1, again=True)
    assert names(tmp_path) == ["step-00000009"]
    assert load(tmp_path, model, optimizer) == {"step": 9, "again": True}


def test_a_file_with_the_name_of_a_checkpoint(tmp_path, caplog):
    model, optimizer = make()
    save(tmp_path, 1, model, optimizer)
    for name in ("step-00000000", "step-00000002", ".step-00000001.gone"):
        (tmp_path / name).write_text("mine")
    assert load(tmp_path, model, optimizer) == {"step": 1}
    assert "step-00000002" in caplog.text
    save(tmp_path, 2, model, optimizer, again=True)
    assert load(tmp_path, model, optimizer) == {"step": 2, "again": True}
    save(tmp_path, 3, model, optimizer)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_leftovers_of_killed_saves_are_removed(tmp_path):
    model, optimizer = make()
    good = save(tmp_path, 1, model, optimizer)
    shutil.copytree(good, tmp_path / ".step-00000002.partial")  # killed before it was renamed
    shutil.copytree(good, tmp_path / ".step-00000001.old")  # killed before its removal; the successor exists
    shutil.copytree(good, tmp_path / ".step-00000000.gone")
    (tmp_path / "notes").mkdir()
    assert load(tmp_path, model, optimizer) == {"step": 1}
    assert names(tmp_path) == ["notes", "step-00000001"]
    good.rename(tmp_path / ".step-00000001.old")  # killed between the two renames of a replacement
    assert load(tmp_path, model, optimizer) == {"step": 1}


# --- Refused arguments ------------------------------------------------------------------------------------------------


def test_another_model_or_optimiser_is_refused(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 1)
    save(tmp_path, 1, model, optimizer)
    before = everything(model, optimizer)[0]

    def refuses(message, model, optimizer):
        with pytest.raises(ValueError, match=message):
            load(tmp_path, model, optimizer)

    wide = Toy()
    wide.layers[2] = nn.Linear(7, 4)
    shapes = r"model/layers.2.(bias|weight) is torch.float32 \(3.*\) in the checkpoint and torch.float32 \(4"
    refuses(shapes, wide, torch.optim.AdamW(wide.parameters()))
    refuses("torch.float32 .* in the checkpoint and torch.bfloat16", Toy().bfloat16(), optimizer)
    more = Toy()
    more.extra = nn.Parameter(torch.zeros(1))
    refuses("model/extra is only in this run", more, torch.optim.AdamW(more.parameters()))
    refuses("different parameter groups", model, torch.optim.AdamW(model.parameters()))
    groups = [{"params": group["params"]} for group in optimizer.param_groups]
    refuses("momentum_buffer is only in this run", model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    assert everything(model, optimizer)[0] == before


def test_save_refuses_bad_arguments(tmp_path):
    model, optimizer = make()
    with pytest.raises(ValueError, match="keep=0"):
        save(tmp_path, 1, model, optimizer, keep=0)
    with pytest.raises(ValueError, match="step=-1"):
        save(tmp_path, -1, model, optimizer)
    with pytest.raises(ValueError, match="Tensor is not JSON"):
        save(tmp_path, 1, model, optimizer, beta=torch.ones(()))
    with pytest.raises(ValueError, match="not one of the model's"):
        save(tmp_path, 1, model, torch.optim.AdamW([nn.Parameter(torch.ones(1))]))
    assert names(tmp_path) == []
