"""Content-addressed storage of completions and scores, so that nothing is sampled or scored twice.

The folder of a `Store` is named by a digest of the model's files, the sampling options and the seed; file names contain
a digest of the prompts. Scores are stored next to the completions, and their names contain a digest of the reward.
Writes are atomic: a file is complete or absent. Each file has the SHA-256 of its tensors, which is checked when it is
read: a damaged file is sampled or scored again.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nlgrpo.engine.generation import Rollout
from nlgrpo.errors import UserError
from nlgrpo.runtime import atomic_files, user_code

Tensors = dict[str, Tensor]
SHA256 = "sha256"  # entry of the metadata of a file
# Files that were read for their digests: size, times of the last changes of content and of attributes (ns), SHA-256.
# The second time cannot be set, so that a file that is replaced by one of equal size and time is noticed.
READ: dict[str, tuple[int, int, int, str]] = {}


class Store:
    """Folder ``root / digest`` of safetensors files."""

    def __init__(self, root: Path, digest: str) -> None:
        self.folder = root / digest
        self.digest = digest

    @classmethod
    def make(cls, root: Path, identity: Mapping[str, Any], *, first: bool) -> Store:
        """Create the store for ``identity`` (plain data). The ``first`` process also writes ``identity.json``."""
        text = json.dumps(identity, sort_keys=True, indent=1)
        store = cls(root, _short(text.encode()))
        identity_file = store.folder / "identity.json"
        with atomic_files.into(store.folder):
            store.folder.mkdir(parents=True, exist_ok=True)
            if first and not identity_file.is_file():
                atomic_files.atomic_write(identity_file, text + "\n")
        return store

    def has(self, name: str) -> bool:
        """Whether the file exists and is complete."""
        return self.read(name, ()) is not None

    def read(self, name: str, keys: Sequence[str] | None = None) -> Tensors | None:
        """Read all tensors of a file, or only those of ``keys``. Returns None if the file is missing or damaged.

        Raises UserError if the disk cannot be read.
        """
        path = self._path(name)
        try:
            content = path.read_bytes()  # not mapped: the system ends a process that reads a map of a damaged disk
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        try:
            tensors = safetensors.torch.load(content)
            written = _metadata(content).get(SHA256)  # earlier versions did not write it
            if written is not None and written != _digest_of_tensors(tensors):
                return None
            return tensors if keys is None else {key: tensors[key] for key in keys}
        except (SafetensorError, KeyError):
            return None

    def write(self, name: str, tensors: Tensors) -> None:
        plain = {key: x.contiguous().cpu() for key, x in tensors.items()}
        content = safetensors.torch.save(plain, {SHA256: _digest_of_tensors(plain)})
        atomic_files.atomic_write_bytes(self._path(name), content)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def _metadata(content: bytes) -> dict[str, str]:
    """Metadata of a safetensors file that has been loaded."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header.get("__metadata__") or {}


def _digest_of_tensors(tensors: Tensors) -> str:
    """SHA-256 of names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        total.update(json.dumps([name, str(x.dtype), list(x.shape)]).encode())
        total.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def chunk_name(index: Sequence[int], ids: Sequence[Sequence[int]]) -> str:
    """Return the file name for completions of these prompts; ``index`` seeds the noise of each prompt."""
    return f"{index[0]:06d}-{_short(json.dumps([list(index), [list(p) for p in ids]]).encode())}"


def digest_of_prompt(ids: Sequence[int]) -> str:
    """Digest of the token ids of a prompt."""
    return _short(json.dumps(list(ids)).encode())


def digest_of_text(*texts: str) -> str:
    """Digest of a sequence of texts."""
    return _short(json.dumps(texts).encode())


def digests_of_columns(columns: Mapping[str, Sequence[Any]], prompts: int) -> list[str]:
    """Digest of the data columns of each prompt, because rewards can read them; "" without columns."""
    rows = [{name: values[i] for name, values in columns.items()} for i in range(prompts)]
    return [_short(json.dumps(row, sort_keys=True, default=str).encode()) if row else "" for row in rows]


def score_name(chunk: str, digest: str, columns: Sequence[str]) -> str:
    """Return the file name for a reward's values of ``chunk``; ``columns``: digests of the data columns."""
    suffix = f"-{digest_of_text(*columns)}" if any(columns) else ""
    return f"{chunk}.score-{digest}{suffix}"


def from_rollout(rollout: Rollout) -> Tensors:
    """Convert a rollout to tensors; ``prompts`` is the concatenation of all prompts, ``prompt_lengths`` its split."""
    return {
        "prompts": torch.tensor([token for ids in rollout.prompt_ids for token in ids], dtype=torch.int32),
        "prompt_lengths": torch.tensor([len(ids) for ids in rollout.prompt_ids]),
        "tokens": rollout.tokens.to(torch.int32),
        "logprobs": rollout.logprobs,
        "lengths": rollout.lengths,
        "finished": rollout.finished,
    }


def to_rollout(tensors: Tensors, prompt_ids: Sequence[Sequence[int]]) -> Rollout:
    """Inverse of `from_rollout`."""
    tokens = tensors["tokens"].long()
    return Rollout([list(p) for p in prompt_ids], tokens, tensors["logprobs"], tensors["lengths"], tensors["finished"])


def digest_of(*paths: Path) -> str:
    """Digest of names and contents of files; for a folder, of its files without subfolders."""
    total = hashlib.sha256()
    for path in paths:
        for file in sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]:
            total.update(file.name.encode())
            total.update(_digest_of_file(file.absolute()))
    return total.hexdigest()[:16]


def _digest_of_file(file: Path) -> bytes:
    """SHA-256 of a file. One that has not been touched since it was read is not read again: models are large."""
    stat = file.stat()
    touched = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    known = READ.get(str(file))
    if known is None or known[:3] != touched:
        with file.open("rb") as opened:
            known = (*touched, hashlib.file_digest(opened, "sha256").hexdigest())
        READ[str(file)] = known
    return bytes.fromhex(known[3])


def digest_of_model(folder: Path) -> str:
    """Digest of a model's config.json and weights."""
    return digest_of(*sorted(p for p in folder.iterdir() if p.name == "config.json" or ".safetensors" in p.name))


def digest_of_weights(folder: Path) -> str:
    """Digest of a model's weights."""
    return digest_of(*sorted(p for p in folder.iterdir() if ".safetensors" in p.name))


def digest_of_tokenizer(tokenizer: PreTrainedTokenizerBase, *, template: bool = True) -> str:
    """Digest of a tokenizer's rules or vocabulary, special ids and, with ``template``, its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)  # None for a tokenizer in Python
    rules = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    set_by_calls = ("padding", "truncation")
    rules = {name: rule for name, rule in rules.items() if backend is None or name not in set_by_calls}
    state = [rules, tokenizer.all_special_ids, tokenizer.bos_token_id, tokenizer.eos_token_id]
    state += [tokenizer.chat_template] * template
    return _short(json.dumps(state, sort_keys=True).encode())


def same_ids(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether both tokenizers have the same vocabulary. Their splitting rules and special tokens may differ."""

    def pieces(tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, int], Any]:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        return tokenizer.get_vocab(), None if backend is None else json.loads(backend.to_str())["decoder"]

    return pieces(one) == pieces(other)


def digest_of_function(function: Callable[..., Any], named: str, spec: str) -> str:
    """Digest of a reward: its spec, its code (`user_code.files_of`), and the files and folders in ``named``.

    ``named`` is the reward's text in the configuration: a model's folder, or a function whose arguments can be paths.
    Other files that the code reads are not included.
    """
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)  # a decorator can be in another file
    code = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        # a function in a process of its own says where it comes from
        source = user_code.files_of(Path(getattr(function, "source_file", None) or inspect.getfile(code)))
    except TypeError:  # a built-in of Python
        source = []
    found = [path for path in [*source, *_paths_in(named)] if len(str(path)) < 4096 and path.exists()]
    return _short(f"{spec} {digest_of(*dict.fromkeys(found))}".encode())


def _paths_in(named: str) -> list[Path]:
    """Return the possible paths: texts in quotes and the text before "(", except ".", ".." and "/"."""
    parts = (named.partition("(")[0].strip(), *named.replace('"', "'").split("'")[1::2])
    return [Path(os.path.expanduser(part)) for part in parts if part.strip() and part not in (".", "..", "/")]


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
