"""Random and damaged data files, texts and values of rewards: a result or one clear message, never anything else."""

import decimal
import fractions
import gzip
import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.helpers import tiny_model

from nlgrpo.data import sources
from nlgrpo.data.encoding import decode
from nlgrpo.data.prompt_dataset import Reader, SourceOptions, read_all
from nlgrpo.model import decoder
from nlgrpo.model.hf_weights import locate
from nlgrpo.model.tokenizer import load_tokenizer, stop_ids_of
from nlgrpo.rewards import outputs

fuzzed = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
NASTY = [
    "\x00",
    "\ud800",
    "\u202e",
    "\ufeff",
    "\u2028",
    "a" * 70_000,
    "\U0010ffff",
    "</s>",
    "<pad>",
    "{}",
    "\r",
    "e\u0301",
]
texts = st.one_of(st.text(), st.sampled_from(NASTY), st.text(alphabet=st.characters(min_codepoint=0)))
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts.filter(lambda t: "\ud800" not in t))
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
rows = st.dictionaries(st.sampled_from(["prompt", "answer", "", "a b"]), values, max_size=3)


def damaged(content, cuts):
    """Cut a piece out and flip a byte."""
    at, length, flip = cuts
    content = bytearray(content)
    if content:
        del content[at % len(content) : at % len(content) + length]
    if content:
        content[flip % len(content)] ^= 1 << (flip % 8)
    return bytes(content)


cuts = st.tuples(st.integers(0, 10**6), st.integers(0, 5), st.integers(0, 10**6))
SUFFIXES = [".jsonl", ".json", ".csv", ".txt", ".jsonl.gz"]


def read(path, content):
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" and content[:1] != b"\x1f" else content)
    found, message = result_of(lambda: list(sources.read_rows(str(path))))
    assert found is not None or str(path.name) in message  # which file
    assert len(message) < 2000
    return found


def result_of(work):
    """The result, and the message of a ValueError."""
    try:
        return work(), ""
    except ValueError as error:
        return None, str(error)


@fuzzed
@given(st.binary(max_size=300), st.sampled_from([*SUFFIXES, ".parquet"]))
@example(b"[" * 100_000, ".json")
@example(b"[" * 100_000, ".jsonl")
@example(b'{"a": ' * 100_000, ".jsonl")
@example(b'{"prompt": ' + b"9" * 5000 + b"}", ".jsonl")
@example(b'[{"prompt": ' + b"9" * 5000 + b"}]", ".json")
@example(b"\x1f\x8b\x08\x00", ".jsonl.gz")
@example(b"PAR1PAR1", ".parquet")
@example(b'a,b\n"', ".csv")
def test_random_bytes_are_read_or_named(tmp_path, content, suffix):
    read(tmp_path / f"data{suffix}", content)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".json.gz", ".csv.gz", ".txt.gz"])
def test_a_compressed_file_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(sources._BoundedGzip, "ALWAYS_ALLOWED", 2**20)
    path = tmp_path / f"bomb{suffix}"
    path.write_bytes(gzip.compress(bytes(2**22)))  # a single line of zeros, 1000 times smaller
    with pytest.raises(ValueError, match=r"bomb\S+ expands to more than 1,048,576 bytes, 200 times its size"):
        list(sources.read_rows(str(path)))
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 1000) if suffix == ".jsonl.gz" else gzip.compress(b"[]"))
    list(sources.read_rows(str(path)))


@fuzzed
@given(st.lists(rows, max_size=4), cuts, st.sampled_from([".jsonl", ".json"]))
def test_damaged_json_is_read_or_named(tmp_path, found, where, suffix):
    text = json.dumps(found) if suffix == ".json" else "".join(json.dumps(row) + "\n" for row in found)
    assert read(tmp_path / f"whole{suffix}", text.encode()) is not None
    read(tmp_path / f"data{suffix}", damaged(text.encode(), where))


@fuzzed
@given(st.lists(st.text(max_size=5), min_size=1, max_size=4), cuts)
def test_damaged_parquet_is_read_or_named(tmp_path, found, where):
    import pyarrow
    from pyarrow import parquet

    clean = [text.encode("utf-8", "replace").decode() for text in found]
    parquet.write_table(pyarrow.table({"prompt": clean}), tmp_path / "whole.parquet")
    read(tmp_path / "data.parquet", damaged((tmp_path / "whole.parquet").read_bytes(), where))


@pytest.fixture(scope="module")
def story():
    return load_tokenizer(locate("story-lm"))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    tiny_model(folder)
    return load_tokenizer(folder)


@pytest.mark.parametrize("name", ["story", "words"])
@fuzzed
@given(text=texts)
def test_any_prompt_is_encoded_or_named(request, name, text):
    tokenizer = request.getfixturevalue(name)
    reader = Reader("memory", tokenizer, SourceOptions(), 10**6)
    found, message = result_of(lambda: read_all(reader, [{"prompt": text}]))
    assert found is not None or "memory" in message
    for ids in [] if found is None else found.ids:
        assert all(0 <= i < len(tokenizer) for i in ids)


@pytest.mark.parametrize("name", ["story", "words"])
@fuzzed
@given(ids=st.lists(st.integers(0, 31), max_size=30))
def test_any_tokens_are_decoded_to_text_that_can_be_saved(request, name, ids):
    [text] = decode(request.getfixturevalue(name), [[]], [ids])
    assert json.loads(json.dumps(text).encode()) == text
    text.encode("utf-8", "strict")


def change(draw, value):
    """``value`` with another value at one place, at any depth."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 3)):
        keys = sorted(value) if isinstance(value, dict) else range(len(value))
        key = draw(st.sampled_from(keys))
        copy = dict(value) if isinstance(value, dict) else list(value)
        copy[key] = change(draw, value[key])
        return copy
    return draw(st.sampled_from([None, -1, 0, True, 2**63, 1e308, "x", "\ud800", [], {}, [[]], {"a": {}}]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"])
@settings(fuzzed, max_examples=40)
@given(data=st.data())
def test_a_damaged_tokenizer_or_config_is_read_or_named(tmp_path, name, data):
    tiny_model(tmp_path / "model")
    path = tmp_path / "model" / name
    content = path.read_bytes()
    if data.draw(st.booleans()):
        content = damaged(content, data.draw(cuts))
    else:
        content = json.dumps(change(data.draw, json.loads(content))).encode()
    path.write_bytes(content)

    def load():
        tokenizer = load_tokenizer(tmp_path / "model")
        assert decode(tokenizer, [[]], [tokenizer("w1 w2")["input_ids"]])
        stop_ids_of(tokenizer, tmp_path / "model")
        return decoder.load(tmp_path / "model")

    found, message = result_of(load)
    assert found is not None or str(tmp_path) in message or "; supported: " in message


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"head_dim": 2**63}),
        ("config.json", {"num_hidden_layers": 10**9}),
        ("config.json", {"num_hidden_layers": -1}),
        ("config.json", {"vocab_size": 2**40}),
        ("tokenizer_config.json", {"model_max_length": {}}),
        ("tokenizer_config.json", {"unk_token": ""}),
    ],
)
def test_numbers_that_no_model_has_are_refused(tmp_path, name, changes):
    tiny_model(tmp_path)
    path = tmp_path / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        decoder.load(tmp_path) if name == "config.json" else load_tokenizer(tmp_path)


class Evil:
    def __float__(self):
        raise RuntimeError("no")

    def __len__(self):
        raise RuntimeError("no")


ODD = [
    *(
        np.float32(1.5),
        np.int64(3),
        np.nan,
        np.bool_(True),
        np.array(2.0),
        np.array([1.0]),
        np.datetime64("2020-01-01"),
    ),
    *(torch.tensor(1.0), torch.ones(2), torch.tensor(1.0, requires_grad=True), torch.tensor(1j)),
    *(decimal.Decimal("sNaN"), fractions.Fraction(1, 3), Evil(), Evil, float, ...),
]
large = st.integers(10**300, 10**400)
others = st.one_of(st.binary(max_size=4), st.complex_numbers(), st.decimals(), st.fractions(), large)
numbers = st.one_of(scalars, others, st.sampled_from(ODD))


def is_missing(item):
    """Whether an item is None or NaN."""
    if item is None:
        return True
    try:
        return math.isnan(item)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


@fuzzed
@given(
    st.one_of(st.lists(numbers, max_size=4), numbers, st.tuples(numbers, numbers)), st.sampled_from([1.0, -2.5, 1e300])
)
@example(torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (3,)), 1.0)
@example(torch.empty(3, device="meta"), 1.0)
@example({"a": 1}, 1.0)
@example("abc", 1.0)
@example(Evil(), 1.0)
@example([Evil(), 1.0, None], 1.0)
@example([10**400, 1.0, None], 1.0)
def test_any_values_of_a_reward_are_numbers_or_faults(output, scale):
    read = outputs.values_of(output, 3, scale)
    found, faults = read.values, read.faults
    assert found.shape == (3,)
    assert found.dtype == torch.float64
    for i, value in enumerate(found.tolist()):
        if math.isnan(value):
            abstained = isinstance(output, list | tuple) and len(output) == 3 and is_missing(output[i])
            assert abstained or any(fault.index in (i, None) for fault in faults)
    assert all(len(fault.what) < 500 for fault in faults)
