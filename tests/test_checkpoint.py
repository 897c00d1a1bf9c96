"""Checkpoints: nothing is lost, nothing half-written is read, whatever the number of ranks and whenever the kill."""

import itertools
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from nlgrpo import checkpoint

# Children are forked from a server that has imported the slow modules once: a dozen processes in a few seconds.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "nlgrpo.checkpoint"])


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
    """Steps that draw from all three generators, with a learning rate that depends on the step."""
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
    """All that training depends on, apart from the generators, as plain values that compare bit for bit."""
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
def test_a_resumed_run_is_the_run(tmp_path, before):
    """``before`` + resume + rest equals 4 steps bit for bit, also when the optimiser has not stepped yet."""
    model, optimizer = make()
    seed_all(1)
    losses = train(model, optimizer, 4)

    first, first_optimizer = make()
    seed_all(1)
    assert train(first, first_optimizer, before) == losses[:before]
    save(tmp_path, before, first, first_optimizer, beta=0.1)

    second, second_optimizer = make(seed=99)
    train(second, second_optimizer, 1)  # moments and gradients that must go
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
def test_other_optimisers(tmp_path, build):
    model, other = Toy(), Toy()
    optimizer, other_optimizer = build(model.parameters()), build(other.parameters())
    for _ in range(2):
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
    save(tmp_path, 2, model, optimizer)
    load(tmp_path, other, other_optimizer)
    assert everything(other, other_optimizer) == everything(model, optimizer)


def test_tied_weights_and_wrappers(tmp_path):
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


def test_state_comes_back_as_it_was(tmp_path):
    state = {"beta": 0.1 + 0.2, "cursor": 2**53 + 1, "config": {"a": [1, None, "é"]}, "worst": float("-inf")}
    model, optimizer = make()
    checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer, state=state)
    assert load(tmp_path, model, optimizer) == state


# --- Which one is read ------------------------------------------------------------------------------------------------


def test_no_checkpoint(tmp_path):
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
def test_a_damaged_newest_is_reported_and_the_one_before_is_read(tmp_path, caplog, damage, name):
    model, optimizer = make()
    save(tmp_path, 1, model, optimizer)
    newest = save(tmp_path, 2, model, optimizer)
    damage(newest / name)
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, model, optimizer) == {"step": 1}
    assert "step-00000002" in caplog.text
    assert name in caplog.text  # or, where the manifest is wrong, the file that it is wrong about


def test_nothing_whole_is_an_error_and_no_fresh_start(tmp_path):
    model, optimizer = make()
    for step in (1, 2):
        truncate(save(tmp_path, step, model, optimizer) / "state.json")
    with pytest.raises(ValueError, match=r"No checkpoint in (.|\n)*00000002/state.json has(.|\n)*00000001/state.json"):
        load(tmp_path, model, optimizer)


def test_the_last_k_are_kept(tmp_path):
    model, optimizer = make()
    for step in (3, 1000, 100_000_000, 999_999_999):
        save(tmp_path, step, model, optimizer, keep=2)
    assert names(tmp_path) == ["step-100000000", "step-999999999"]
    save(tmp_path, 1_000_000_000, model, optimizer, keep=1)
    assert names(tmp_path) == ["step-1000000000"]
    assert load(tmp_path, model, optimizer) == {"step": 1_000_000_000}


def test_a_damaged_later_one_does_not_push_out_the_good(tmp_path):
    model, optimizer = make()
    truncate(save(tmp_path, 9, model, optimizer, keep=1) / "state.json")
    save(tmp_path, 5, model, optimizer, keep=1)
    save(tmp_path, 6, model, optimizer, keep=1)
    assert names(tmp_path) == ["step-00000006", "step-00000009"]
    assert load(tmp_path, model, optimizer) == {"step": 6}
    save(tmp_path, 9, model, optimizer, keep=1, again=True)
    assert names(tmp_path) == ["step-00000009"]
    assert load(tmp_path, model, optimizer) == {"step": 9, "again": True}


def test_leftovers_of_killed_saves(tmp_path):
    model, optimizer = make()
    good = save(tmp_path, 1, model, optimizer)
    shutil.copytree(good, tmp_path / ".step-00000002.partial")  # killed before it was renamed
    shutil.copytree(good, tmp_path / ".step-00000001.old")  # killed before its removal: the successor stands
    shutil.copytree(good, tmp_path / ".step-00000000.gone")
    (tmp_path / "notes").mkdir()
    assert load(tmp_path, model, optimizer) == {"step": 1}
    assert names(tmp_path) == ["notes", "step-00000001"]
    good.rename(tmp_path / ".step-00000001.old")  # killed between the two renames of a replacement
    assert load(tmp_path, model, optimizer) == {"step": 1}


# --- What does not fit ------------------------------------------------------------------------------------------------


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
    refuses("other parameter groups", model, torch.optim.AdamW(model.parameters()))
    groups = [{"params": group["params"]} for group in optimizer.param_groups]
    refuses("momentum_buffer is only in this run", model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    assert everything(model, optimizer)[0] == before


def test_what_save_refuses(tmp_path):
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


# --- Kills ------------------------------------------------------------------------------------------------------------


def save_until_killed(folder, start):
    torch.set_num_threads(1)
    model, optimizer = make()
    train(model, optimizer, 1)
    for step in range(start, start + 10_000):
        mark(model, step)
        save(folder, step, model, optimizer, keep=2)


def mark(model, step):
    """Weights that tell which step they are of, so that a mixture of two saves would show."""
    for parameter in model.parameters():
        parameter.data.fill_(step)


def assert_whole(folder):
    model, optimizer = make()
    train(model, optimizer, 1)
    state = load(folder, model, optimizer)
    assert state is not None
    assert all((parameter == state["step"]).all() for parameter in model.parameters())
    assert not [name for name in names(folder) if name.startswith(".")]
    assert all(checkpoint.verify(folder / name) is None for name in names(folder))
    return state["step"]


def test_sigkill_at_random_moments(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 1)
    mark(model, 0)
    save(tmp_path, 0, model, optimizer)
    step, dice = 0, random.Random(5)
    for _ in range(8):
        child = processes.Process(target=save_until_killed, args=(tmp_path, step + 1))
        child.start()
        deadline = time.monotonic() + 30
        while max(checkpoint._steps(tmp_path)) < step + 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(dice.uniform(0, 0.05))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        reached = assert_whole(tmp_path)
        assert reached >= step + 3
        step = reached


FILE_OPERATIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "os.scandir"}


def save_and_die(folder, step, at, model, optimizer):
    """Save, with a SIGKILL before the ``at``-th file operation; exit code 0 if there are fewer."""
    seen = 0

    def die(event, _):
        nonlocal seen
        if event in FILE_OPERATIONS:
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    save(folder, step, model, optimizer, keep=2)
    os._exit(0)


def kill_at_every_operation(base, folder, step, queue):
    torch.set_num_threads(1)
    model, optimizer = make()
    train(model, optimizer, 1)
    mark(model, step)
    loaded = []
    for at in itertools.count(1):
        shutil.copytree(base, folder)
        child = os.fork()
        if child == 0:
            save_and_die(folder, step, at, model, optimizer)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        loaded.append(assert_whole(folder))
        shutil.rmtree(folder)
        if status != -signal.SIGKILL:
            queue.put((status, loaded))
            return


@pytest.mark.parametrize("step", [2, 3])
def test_sigkill_at_every_file_operation(tmp_path, step):
    """Of a save that adds step 3 and deletes step 1, and of one that replaces step 2."""
    model, optimizer = make()
    train(model, optimizer, 1)
    for old in (1, 2):
        mark(model, old)
        save(tmp_path / "base", old, model, optimizer)
    queue = processes.Queue()
    child = processes.Process(target=kill_at_every_operation, args=(tmp_path / "base", tmp_path / "run", step, queue))
    child.start()
    status, loaded = queue.get(timeout=60)
    child.join()
    assert status == 0
    assert len(loaded) > 15
    assert loaded == sorted(loaded)  # the old one up to some operation, the new one from there on
    assert set(loaded) == {2, step}


# --- Ranks ------------------------------------------------------------------------------------------------------------


def on_ranks(ranks, work, folder, tag):
    """Run ``work(rank, folder)`` on ``ranks`` processes joined by gloo; what they return comes back as JSON."""
    children = [processes.Process(target=_rank_main, args=(rank, ranks, work, folder, tag)) for rank in range(ranks)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * ranks
    return [json.loads((folder / f"{tag}-{rank}.json").read_text()) for rank in range(ranks)]


def _rank_main(rank, ranks, work, folder, tag):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / tag}", rank=rank, world_size=ranks)
    result = work(rank, folder)
    (folder / f"{tag}-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def sharded():
    """The toy with every parameter split over the ranks: 7 rows by 2 leaves uneven shards."""
    torch.manual_seed(0)
    model = Toy()
    fully_shard(model.layers)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def one_rank():
    torch.manual_seed(0)
    model = Toy()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(model, optimizer, count):
    for _ in range(count):
        loss = model(torch.ones(4, 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def whole(model, optimizer):
    full = lambda value: value.full_tensor().tolist() if hasattr(value, "full_tensor") else value.tolist()  # noqa: E731
    moments = {str(i): {k: full(v) for k, v in e.items()} for i, e in optimizer.state_dict()["state"].items()}
    return {"model": {k: full(v) for k, v in model.state_dict().items()}, "moments": moments}


def draws():
    return [random.random(), float(np.random.random()), torch.rand(()).item()]  # noqa: NPY002


def work_save(rank, folder):
    model, optimizer = sharded()
    steps(model, optimizer, 2)
    seed_all(100 + rank)
    save(folder / "run", 2, model, optimizer)
    return {"draws": draws(), **whole(model, optimizer)}


def work_load(rank, folder):
    model, optimizer = sharded()
    seed_all(500 + rank)
    state = load(folder / "run", model, optimizer)
    return {"state": state, "draws": draws(), **whole(model, optimizer)}


def without_draws(result):
    return {"model": result["model"], "moments": result["moments"]}


def test_two_ranks_save_and_one_or_two_or_three_load(tmp_path):
    saved = on_ranks(2, work_save, tmp_path, "save")
    assert saved[0]["draws"] != saved[1]["draws"]
    files = json.loads((tmp_path / "run" / "step-00000002" / "manifest.json").read_text())["files"]
    assert {"__0_0.distcp", "__1_0.distcp", "rng-00000.json", "rng-00001.json", "state.json", ".metadata"} == set(files)

    two = on_ranks(2, work_load, tmp_path, "two")
    assert [result["draws"] for result in two] == [result["draws"] for result in saved]
    three = on_ranks(3, work_load, tmp_path, "three")
    assert [result["draws"] for result in three[:2]] == [result["draws"] for result in saved]
    seed_all(502)
    assert three[2]["draws"] == draws()  # the third keeps its own seeding
    for result in two + three:
        assert result["state"] == {"step": 2}
        assert without_draws(result) == without_draws(saved[0])

    model, optimizer = one_rank()
    assert load(tmp_path / "run", model, optimizer) == {"step": 2}
    assert draws() == saved[0]["draws"]
    assert json.loads(json.dumps(whole(model, optimizer))) == without_draws(saved[0])


def test_one_rank_saves_and_two_load(tmp_path):
    model, optimizer = one_rank()
    steps(model, optimizer, 2)
    save(tmp_path / "run", 2, model, optimizer)
    expected = json.loads(json.dumps(whole(model, optimizer)))
    assert [without_draws(result) for result in on_ranks(2, work_load, tmp_path, "load")] == [expected, expected]


def work_load_damaged(rank, folder):
    model, optimizer = sharded()
    try:
        return load(folder / "run", model, optimizer)
    except ValueError as error:
        return str(error)


def test_all_ranks_agree_on_what_is_damaged(tmp_path):
    model, optimizer = one_rank()
    save(tmp_path / "run", 1, model, optimizer)
    shutil.copytree(tmp_path / "run" / "step-00000001", tmp_path / "run" / "step-00000002")
    flip(tmp_path / "run" / "step-00000002" / "rng-00000.json")  # one rank of the two reads this file
    assert on_ranks(2, work_load_damaged, tmp_path, "one") == [{"step": 1}] * 2
    truncate(tmp_path / "run" / "step-00000001" / "__0_0.distcp")
    errors = on_ranks(2, work_load_damaged, tmp_path, "none")
    assert errors[0] == errors[1]
    assert "No checkpoint" in errors[0]
