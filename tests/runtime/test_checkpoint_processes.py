"""Checkpoints of killed processes and of several ranks."""

import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.checkpoints import SHARD, Toy, flip, load, make, names, save, seed_all, train, truncate
from support.helpers import run_ranks
from torch.distributed.fsdp import fully_shard

from nlgrpo.runtime import checkpoint
from nlgrpo.runtime.checkpoint import Keep, Saver, folders, storage
from nlgrpo.runtime.distributed import Ranks

pytestmark = pytest.mark.slow

processes = multiprocessing.get_context("fork")  # new processes would import everything again


# --- Kills ------------------------------------------------------------------------------------------------------------


def save_until_killed(folder, start, background):
    torch.set_num_threads(1)
    model, optimizer = make()
    train(model, optimizer, 1)
    saver = Saver(folder, background=background)
    for step in range(start, start + 10_000):
        mark(model, step)
        saver.save(step, model, optimizer, {"step": step}, wait=False)


def mark(model, step):
    """Fill the weights with the step, to detect a mixture of two saves."""
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


@pytest.mark.parametrize("background", [False, True])
def test_sigkill_at_random_moments(tmp_path, background):
    model, optimizer = make()
    train(model, optimizer, 1)
    mark(model, 0)
    save(tmp_path, 0, model, optimizer)
    step, dice = 0, random.Random(5)
    for _ in range(8):
        child = processes.Process(target=save_until_killed, args=(tmp_path, step + 1, background))
        child.start()
        deadline = time.monotonic() + 30
        while max(folders.steps(tmp_path)) < step + 3 and time.monotonic() < deadline:
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
    """Save, with a SIGKILL before file operation number ``at``; exit code 0 if there are fewer."""
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
    """During a save that adds step 3 and deletes step 1, and during one that replaces step 2."""
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
    assert loaded == sorted(loaded)  # first the old checkpoint, after some operation the new one
    assert set(loaded) == {2, step}


# --- Ranks ------------------------------------------------------------------------------------------------------------


def on_ranks(ranks, work, folder, tag):
    """Run ``work(rank, folder)`` on ``ranks`` processes joined by gloo; return their results as read from JSON."""
    run_ranks(_rank_main, work, folder, tag, ranks=ranks)
    return [json.loads((folder / f"{tag}-{rank}.json").read_text()) for rank in range(ranks)]


def _rank_main(rank, work, folder, tag):
    result = work(rank, folder)
    (folder / f"{tag}-{rank}.json").write_text(json.dumps(result))


def sharded():
    """The toy model sharded over the ranks; 7 rows on 2 ranks are uneven shards."""
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
    shards = [f"shard-0000{i}-model-00001-of-00001.safetensors" for i in (1, 2)]
    assert {*shards, "rng-00000.json", "rng-00001.json", "state.json"} == set(files)

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


def work_chain(rank, folder):
    """Load if there is something to load, one step, save in the background."""
    model, optimizer = sharded() if dist.get_world_size() > 1 else one_rank()
    state = load(folder / "run", model, optimizer) or {"step": 0}
    steps(model, optimizer, 1)
    saver = Saver(folder / "run", keep=Keep(9), background=True)
    saver.save(state["step"] + 1, model, optimizer, {"step": state["step"] + 1}, wait=False)
    steps(model, optimizer, 1)  # must not change what is being written
    ranks = Ranks(rank, dist.get_world_size(), torch.device("cpu"))
    while saver._writing is not None:
        saver.poll(ranks)
    return state


def test_one_two_four_and_one_ranks_continue_each_other(tmp_path):
    """The mean of equal gradients over 2 or 4 ranks is exact, so the result is that of one rank, bit for bit."""
    for begun, ranks in enumerate((1, 2, 4, 1)):
        assert on_ranks(ranks, work_chain, tmp_path, f"chain-{begun}") == [{"step": begun}] * ranks
    model, optimizer = one_rank()
    steps(model, optimizer, 4)
    last, its_optimizer = one_rank()
    assert load(tmp_path / "run", last, its_optimizer) == {"step": 4}
    assert whole(last, its_optimizer) == whole(model, optimizer)
    shards = [len(list(path.glob("shard-*"))) for path in sorted((tmp_path / "run").iterdir())]
    assert shards == [1, 2, 4, 1]


def work_load_damaged(rank, folder):
    model, optimizer = sharded()
    try:
        return load(folder / "run", model, optimizer)
    except ValueError as error:
        return str(error)


def test_all_ranks_report_the_same_damage(tmp_path):
    model, optimizer = one_rank()
    save(tmp_path / "run", 1, model, optimizer)
    shutil.copytree(tmp_path / "run" / "step-00000001", tmp_path / "run" / "step-00000002")
    flip(tmp_path / "run" / "step-00000002" / "rng-00000.json")  # only one rank reads this file
    assert on_ranks(2, work_load_damaged, tmp_path, "one") == [{"step": 1}] * 2
    truncate(tmp_path / "run" / "step-00000001" / SHARD)
    errors = on_ranks(2, work_load_damaged, tmp_path, "none")
    assert errors[0] == errors[1]
    assert "All checkpoints" in errors[0]


def work_save_without_room(rank, folder):
    """Save with a full disk on rank 1: first for its tensors, then for its random generators."""
    model, optimizer = sharded()
    steps(model, optimizer, 2)
    save(folder / "run", 1, model, optimizer)
    errors, before = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    for full, limit in (("save", 500), ("write", 100)):
        owner = storage.dcp if full == "save" else folders
        original = getattr(owner, full)

        def without_room(*args, original=original, limit=limit, **kwargs):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit if rank == 1 else before[0], before[1]))
            try:
                return original(*args, **kwargs)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        setattr(owner, full, without_room)
        try:
            save(folder / "run", 2, model, optimizer)
        except ValueError as error:
            errors.append([str(error), names(folder / "run")])
        finally:
            setattr(owner, full, original)
        dist.barrier()
    save(folder / "run", 2, model, optimizer)
    return errors


def test_all_ranks_report_a_full_disk(tmp_path):
    first, second = on_ranks(2, work_save_without_room, tmp_path, "full")
    assert [message for message, _ in first] == [message for message, _ in second]
    assert len(first) == 2
    assert all(message.startswith(f"cannot write into {tmp_path / 'run'}: ") for message, _ in first)
    assert all(left == ["step-00000001"] for _, left in first)
    assert names(tmp_path / "run") == ["step-00000001", "step-00000002"]
