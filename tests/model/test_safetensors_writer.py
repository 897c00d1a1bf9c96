"""Files written tensor by tensor equal those of safetensors and huggingface_hub, and are complete or absent."""

import json
import os
import signal
import weakref

import huggingface_hub
import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from support.helpers import Forked

from nlgrpo.model import safetensors_writer
from nlgrpo.model.hf_weights import Checkpoint
from nlgrpo.model.safetensors_writer import DTYPES, write

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def tensors(dtype=torch.float32):
    """Odd shapes: a scalar, no elements, one dimension, more than two."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"b": (37, 5), "a.bias": (11,), "scalar": (), "none": (0, 4), 'Ünicode "x"': (3, 4, 5), "long": (1, 700)}
    return {name: (9 * torch.randn(size, generator=generator)).to(dtype) for name, size in shapes.items()}


def layout(state):
    return {name: (tuple(x.shape), x.dtype) for name, x in state.items()}


def same_bits(a, b):
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def read(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(safetensors_writer, "PIECE", 64)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_a_file_equals_that_of_safetensors(tmp_path, dtype):
    state = tensors(dtype)
    write(tmp_path, layout(state), iter(state.items()))
    assert list(read(tmp_path)) == [FILE]
    assert (tmp_path / FILE).read_bytes() == safetensors.torch.save(state, {"format": "pt"})
    for name, value in load_file(tmp_path / FILE).items():
        assert value.shape == state[name].shape
        assert same_bits(value, state[name])


def test_all_dtypes_of_safetensors_are_known():
    assert safetensors.torch._TYPES == DTYPES


def test_tensors_of_several_dtypes_are_aligned(tmp_path):
    state = {
        "x": torch.arange(3).to(torch.bfloat16),
        "a": torch.ones(1, dtype=torch.uint8),
        "y": torch.randn(5).double(),
    }
    write(tmp_path, layout(state), iter(state.items()))
    loaded = load_file(tmp_path / FILE)
    assert all(torch.equal(loaded[name], state[name]) for name in state)


@pytest.mark.usefixtures("small_pieces")
def test_views_are_written_in_the_order_of_their_elements(tmp_path):
    x = torch.randn(6, 40, 10)
    views = {"transposed": x[0].T, "permuted": x.permute(2, 0, 1), "rows": x[:, 3:5], "every other": x[0, ::2]}
    write(tmp_path, layout(views), iter(views.items()))
    loaded = load_file(tmp_path / FILE)
    assert all(torch.equal(loaded[name], views[name]) for name in views)


@pytest.mark.parametrize("size", [1, 450, 900, 1500, 10**6])
def test_shards_and_index_equal_those_of_huggingface_hub(tmp_path, size):
    state = {f"layer.{i}": torch.randn(10 + i, 5) for i in range(12)}
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").mkdir()
    huggingface_hub.save_torch_state_dict(state, tmp_path / "theirs", max_shard_size=size)
    write(tmp_path / "ours", layout(state), iter(state.items()), max_file=size)
    ours, theirs = read(tmp_path / "ours"), read(tmp_path / "theirs")
    if INDEX in theirs:
        assert len(theirs) > 2
        assert json.loads(ours.pop(INDEX)) == json.loads(theirs.pop(INDEX))
    assert ours == theirs


def test_a_file_has_at_most_5_gb():
    sizes = {"a": ((10**9,), torch.float32), "b": ((25 * 10**7,), torch.float32), "c": ((1,), torch.bfloat16)}
    files = safetensors_writer.split(sizes, safetensors_writer.MAX_FILE)
    assert {name: list(part) for name, part in files.items()} == {
        "model-00001-of-00002.safetensors": ["a", "b"],
        "model-00002-of-00002.safetensors": ["c"],
    }


def test_a_tensor_is_released_before_the_next_is_requested(tmp_path):
    alive = []

    def stream():
        for i in range(4):
            assert not any(reference() is not None for reference in alive)
            tensor = torch.randn(8, 3)
            alive.append(weakref.ref(tensor))
            yield str(i), tensor
            del tensor

    write(tmp_path, {str(i): ((8, 3), torch.float32) for i in range(4)}, stream())
    assert len(alive) == 4


def test_unknown_dtypes_are_refused(tmp_path):
    (tmp_path / FILE).write_text("old")
    with pytest.raises(ValueError, match=r"x has dtype torch\.complex128, which safetensors cannot store; use one of"):
        write(tmp_path, {"x": ((1,), torch.complex128)}, iter(()))
    assert read(tmp_path) == {FILE: b"old"}


def test_other_tensors_than_in_the_layout_are_an_error(tmp_path):
    wanted = {"x": ((2,), torch.float32)}
    for found in ({}, {"y": torch.ones(2)}, {"x": torch.ones(3)}, {"x": torch.ones(2).double()}):
        with pytest.raises(AssertionError):
            write(tmp_path, wanted, iter(found.items()))
        assert read(tmp_path) == {}


def test_old_weights_are_removed_and_other_files_stay(tmp_path):
    stale = [FILE, INDEX, "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors.tmp"]
    others = ["config.json", "model.safetensors.backup", "my-model.safetensors"]
    for name in stale + others:
        (tmp_path / name).write_text("old")
    write(tmp_path, {"x": ((2,), torch.float32)}, iter([("x", torch.ones(2))]))
    assert sorted(read(tmp_path)) == sorted([FILE, *others])
    assert load_file(tmp_path / FILE)["x"].tolist() == [1, 1]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_follow_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        write(tmp_path, {"x": ((2,), torch.float32)}, iter([("x", torch.ones(2))]))
    finally:
        os.umask(before)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("max_file", [10**6, 700])
@pytest.mark.parametrize("killed", [True, False], ids=["a kill", "an exception"])
def test_weights_are_complete_or_absent(tmp_path, max_file, killed):
    """Also those that were there before, of which a reader would else find a mixture."""
    state = {f"layer.{i}": torch.randn(10, 5) for i in range(12)}

    def until(last):
        for i, (name, tensor) in enumerate(state.items()):
            if i == last and killed:
                os.kill(os.getpid(), signal.SIGKILL)
            elif i == last:
                raise OSError("disk full")
            yield name, tensor

    def work():
        write(tmp_path, layout(state), until(9), max_file=max_file)

    save_file(state, tmp_path / FILE)
    if killed:
        assert Forked(lambda: work() or 0).end().status == -signal.SIGKILL
    else:
        with pytest.raises(OSError, match="disk full"):
            work()
        assert not list(tmp_path.glob("*.tmp"))
    assert FILE not in read(tmp_path)
    assert INDEX not in read(tmp_path)
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        Checkpoint(tmp_path)
    write(tmp_path, layout(state), iter(state.items()), max_file=max_file)
    assert not list(tmp_path.glob("*.tmp"))
    files = Checkpoint(tmp_path).files
    assert all(torch.equal(files[name].get_tensor(name), state[name]) for name in state)
