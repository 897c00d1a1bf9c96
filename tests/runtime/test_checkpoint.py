"""Checkpoints: a resumed run equals an uninterrupted one; damaged and unsuitable checkpoints are reported."""

import concurrent.futures
import ctypes
import logging
import os
import pickle
import shutil
import subprocess
import threading
import time
import traceback
from contextlib import contextmanager

import pytest
import torch
from support.checkpoints import SHARD, Toy, flip, load, make, names, save, seed_all, train, truncate
from torch import nn
from torch.cuda import _pin_memory_utils

from nlgrpo.runtime import checkpoint
from nlgrpo.runtime.checkpoint import Keep, Saver, folders, storage
from nlgrpo.runtime.distributed import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"))


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


def remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, flip, remove])
@pytest.mark.parametrize("name", [SHARD, "state.json", "rng-00000.json", "manifest.json"])
def test_a_damaged_newest_checkpoint_is_reported_and_the_previous_one_loaded(tmp_path, caplog, damage, name):
    model, optimizer = make()
    save(tmp_path, 1, model, optimizer)
    newest = save(tmp_path, 2, model, optimizer)
    damage(newest / name)
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, model, optimizer) == {"step": 1}
    assert "step-00000002" in caplog.text
    assert name in caplog.text or (name, damage) == ("manifest.json", flip)  # then the file of the wrong entry


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


def test_multiples_of_a_number_are_kept_too(tmp_path):
    model, optimizer = make()
    for step in range(12):
        save(tmp_path, step, model, optimizer, keep=2, every=4)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (0, 4, 8, 10, 11)]
    save(tmp_path, 12, model, optimizer, keep=1)
    assert names(tmp_path) == ["step-00000012"]


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


# --- In the background ------------------------------------------------------------------------------------------------


def saver(folder, **more):
    return Saver(folder, background=True, **more)


def save_and_wait(saving, step, model, optimizer):
    saving.save(step, model, optimizer, {"step": step}, wait=False)
    saving.wait()


def slowed(monkeypatch, module=storage, name="write"):
    """Let writes wait for an event."""
    go, original = threading.Event(), getattr(module, name)
    monkeypatch.setattr(module, name, lambda *arguments: go.wait(20) and original(*arguments))
    return go


def test_three_checkpoints_in_the_background(tmp_path):
    """Each holds what was at its save, whether or not the memory of one before is used again."""
    model, optimizer = make()
    saving = saver(tmp_path, keep=Keep(3))
    expected = []
    for step in range(3):
        train(model, optimizer, 1, start=step)
        saving.save(step, model, optimizer, {"step": step}, wait=False)
        expected.append(everything(model, optimizer))
    saving.wait()
    for step in reversed(range(3)):
        other, other_optimizer = make(seed=9)
        assert load(tmp_path, other, other_optimizer) == {"step": step}
        assert everything(other, other_optimizer) == expected[step]
        shutil.rmtree(tmp_path / f"step-{step:08d}")


@contextmanager
def gpu_of_the_stager(pinned, synchronized):
    """Let PyTorch see a GPU, which is not there, and record calls of CUDA."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.accelerator, "is_available", lambda: True)
        patched.setattr(torch.accelerator, "synchronize", lambda: synchronized.append(len(pinned)))
        patched.setattr(_pin_memory_utils, "pin_memory", pinned.__setitem__)
        patched.setattr(_pin_memory_utils, "unpin_memory", pinned.pop)
        yield


def test_memory_of_the_host_is_pinned_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    model, optimizer = make()
    train(model, optimizer, 1)
    tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    vectors = sorted(tensor.nbytes for tensor in tensors if tensor.dim())
    pinned, synchronized = {}, []
    saving = saver(tmp_path)
    for step in (1, 2, 3):
        with monkeypatch.context() as patched:
            go = slowed(patched)
            with gpu_of_the_stager(pinned, synchronized):
                saving.save(step, model, optimizer, {"step": step}, wait=False)
            assert sorted(size for size in pinned.values() if size > 8) == vectors
            assert len(synchronized) == step
            go.set()
            saving.wait()
        given_back = time.monotonic() + 20
        while pinned and time.monotonic() < given_back:  # the thread may still be ending
            time.sleep(0.01)
        assert pinned == {}


def test_training_continues_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The checkpoint holds what was at the time of the save, also its random generators."""
    go = slowed(monkeypatch)
    model, optimizer = make()
    seed_all(1)
    train(model, optimizer, 2)
    saving = saver(tmp_path)
    saving.save(2, model, optimizer, {"step": 2}, wait=False)
    losses = train(model, optimizer, 2, start=2)
    while not names(tmp_path):
        saving.poll(ALONE)
    assert names(tmp_path) == [".step-00000002.partial"]
    go.set()
    saving.wait()
    assert names(tmp_path) == ["step-00000002"]
    other, other_optimizer = make(seed=99)
    assert load(tmp_path, other, other_optimizer) == {"step": 2}
    assert train(other, other_optimizer, 2, start=2) == losses
    assert everything(other, other_optimizer) == everything(model, optimizer)


def test_the_next_save_waits_for_the_one_before(tmp_path, monkeypatch):
    go = slowed(monkeypatch)
    model, optimizer = make()
    train(model, optimizer, 1)
    saving = saver(tmp_path, keep=Keep(1))
    saving.save(1, model, optimizer, {"step": 1}, wait=False)
    threading.Timer(0.3, go.set).start()
    before = time.monotonic()
    saving.save(2, model, optimizer, {"step": 2}, wait=False)
    assert time.monotonic() - before > 0.25
    saving.save(3, model, optimizer, {"step": 3})  # the last one of a run
    assert names(tmp_path) == ["step-00000003"]
    saving.wait()


def test_a_save_in_the_background_that_fails_is_reported_at_the_next_step(tmp_path, monkeypatch):
    model, optimizer = make()
    save(tmp_path, 1, model, optimizer)
    monkeypatch.setattr(folders, "publish", lambda *_: open("/dev/full", "wb", buffering=0).write(b"x"))  # noqa: SIM115
    saving = saver(tmp_path)
    saving.save(2, model, optimizer, {"step": 2}, wait=False)
    concurrent.futures.wait([saving._writing])
    with pytest.raises(ValueError, match=f"cannot write into {tmp_path}: No space left on device"):
        saving.poll(ALONE)
    assert names(tmp_path) == ["step-00000001"]
    saving.poll(ALONE)
    monkeypatch.undo()
    saving.save(2, model, optimizer, {"step": 2})
    assert load(tmp_path, model, optimizer) == {"step": 2}


# --- Files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [SHARD, "rng-00000.json", "state.json"])
@pytest.mark.parametrize("damage", [truncate, flip])
def test_what_was_written_is_read_again(tmp_path, monkeypatch, name, damage):
    """A disk that stores something else."""
    model, optimizer = make()
    train(model, optimizer, 1)
    save(tmp_path, 1, model, optimizer)
    monkeypatch.setattr(folders, "_forget", lambda path: damage(path) if path.name == name else None)
    with pytest.raises(ValueError, match=rf"cannot write into .*: {name} was written, and is different"):
        save(tmp_path, 2, model, optimizer)
    assert names(tmp_path) == ["step-00000001"]


def test_large_checkpoints_have_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "FILE_BYTES", 100)
    model, optimizer = make()
    train(model, optimizer, 2)
    files = [path.name for path in save(tmp_path, 2, model, optimizer).glob("*.safetensors")]
    assert len(files) > 4
    other, other_optimizer = make(seed=9)
    assert load(tmp_path, other, other_optimizer) == {"step": 2}
    assert everything(other, other_optimizer) == everything(model, optimizer)


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path, monkeypatch):
    model, optimizer = make()
    train(model, optimizer, 1)
    path = save(tmp_path, 1, model, optimizer)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *_, **__: pytest.fail("a pickle is read"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load is called"))
    assert load(tmp_path, model, optimizer) == {"step": 1}


def test_a_checkpoint_with_a_pickled_index_is_refused(tmp_path):
    """Of an earlier version; or put there by someone else."""
    model, optimizer = make()
    path = save(tmp_path, 1, model, optimizer)
    (path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch /tmp/opened'\ntR.")
    with pytest.raises(ValueError, match=r"was written by nlgrpo before .* pickle, which is not read"):
        load(tmp_path, model, optimizer)


@pytest.fixture
def small_disk():
    """A file system of 1 MiB, in a mount namespace of a child process: a function that runs work there."""

    def run(work, folder):
        child = os.fork()
        if child == 0:
            status = 70
            try:
                os.unshare(os.CLONE_NEWNS) if hasattr(os, "unshare") else unshare()
                subprocess.run(["mount", "--make-rprivate", "/"], check=True)
                folder.mkdir()
                subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], check=True)
                status = work()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    return run


def unshare():
    """`os.unshare`, which Python has from 3.12."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")


@pytest.mark.parametrize("background", [False, True])
def test_a_small_disk_becomes_full_and_free_again(tmp_path, small_disk, background):
    disk = tmp_path / "disk"

    def work():
        model, optimizer = make()
        train(model, optimizer, 1)
        saving = Saver(disk, keep=Keep(1), background=background)
        saving.save(1, model, optimizer, {"step": 1})
        filler = disk / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(disk).free - 4096))
        for step in (2, 3):
            with pytest.raises(ValueError, match=f"cannot write into {disk}: No space left on device. Complete files"):
                save_and_wait(saving, step, model, optimizer)
            assert names(disk) == ["filler", "step-00000001"]
        filler.unlink()
        assert load(disk, model, optimizer) == {"step": 1}
        save_and_wait(saving, 4, model, optimizer)
        assert names(disk) == ["step-00000004"]
        assert load(disk, model, optimizer) == {"step": 4}
        return 0

    assert small_disk(work, disk) == 0


def test_a_disk_that_becomes_read_only(tmp_path, small_disk):
    disk = tmp_path / "disk"

    def work():
        model, optimizer = make()
        save(disk, 1, model, optimizer)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(ValueError, match=f"cannot write into {disk}: Read-only file system"):
            save(disk, 2, model, optimizer)
        assert names(disk) == ["step-00000001"]
        assert load(disk, model, optimizer) == {"step": 1}  # to export or evaluate it
        return 0

    assert small_disk(work, disk) == 0


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
    with pytest.raises(ValueError, match="newest=0"):
        save(tmp_path, 1, model, optimizer, keep=0)
    with pytest.raises(ValueError, match="step=-1"):
        save(tmp_path, -1, model, optimizer)
    with pytest.raises(ValueError, match="Tensor is not JSON"):
        save(tmp_path, 1, model, optimizer, beta=torch.ones(()))
    with pytest.raises(ValueError, match="not one of the model's"):
        save(tmp_path, 1, model, torch.optim.AdamW([nn.Parameter(torch.ones(1))]))
    assert names(tmp_path) == []
