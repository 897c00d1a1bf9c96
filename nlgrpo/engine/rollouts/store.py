"""Completions kept on disk under names that their content determines, so that none is drawn or scored twice.

What a model draws depends on its files, the sampling, the seed and the prompts. The folder of a `Store` is named by a
digest of the first three, and a file in it by one of its prompts; what is computed from a file, scores for instance,
lies beside it under a digest of what computed it. A file is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nlgrpo.engine.generation import Rollout
from nlgrpo.runtime import atomic_files

Tensors = dict[str, Tensor]


class Store:
    """Files of tensors in a folder below ``root`` that is named by a digest, that of an identity for instance."""

    def __init__(self, root: Path, digest: str) -> None:
        self.folder, self.digest = root / digest, digest

    @classmethod
    def make(cls, root: Path, identity: Mapping[str, Any], *, first: bool) -> Store:
        """The folder for ``identity``, plain data, which is written down by the ``first`` of those that share it."""
        text = json.dumps(identity, sort_keys=True, indent=1)
        store = cls(root, _short(text.encode()))
        written = store.folder / "identity.json"
        with atomic_files.into(store.folder):
            store.folder.mkdir(parents=True, exist_ok=True)
            if first and not written.is_file():
                atomic_files.atomic_write(written, text + "\n")
        return store

    def has(self, name: str) -> bool:
        """Whether there is such a file, and it is whole."""
        return self.read(name, ()) is not None

    def read(self, name: str, keys: Sequence[str] | None = None) -> Tensors | None:
        """All tensors of a file, or only those of ``keys``; None where there is no such file, or it is damaged."""
        try:
            with safe_open(self._path(name), "pt") as file:
                return {key: file.get_tensor(key) for key in (file.keys() if keys is None else keys)}
        except (FileNotFoundError, SafetensorError):
            return None

    def write(self, name: str, tensors: Tensors) -> None:
        content = safetensors.torch.save({key: x.contiguous().cpu() for key, x in tensors.items()})
        atomic_files.atomic_write_bytes(self._path(name), content)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def chunk_name(index: Sequence[int], ids: Sequence[Sequence[int]]) -> str:
    """Of the completions of some prompts, whose numbers key the noise."""
    return f"{index[0]:06d}-{_short(json.dumps([list(index), [list(p) for p in ids]]).encode())}"


def digest_of_prompt(ids: Sequence[int]) -> str:
    """Of a prompt's token ids."""
    return _short(json.dumps(list(ids)).encode())


def digest_of_text(*texts: str) -> str:
    """Of texts in their order."""
    return _short(json.dumps(texts).encode())


def digests_of_columns(columns: Mapping[str, Sequence[Any]], prompts: int) -> list[str]:
    """Of what rewards may read besides each prompt and its completions; "" where there is nothing."""
    rows = [{name: values[i] for name, values in columns.items()} for i in range(prompts)]
    return [_short(json.dumps(row, sort_keys=True, default=str).encode()) if row else "" for row in rows]


def score_name(chunk: str, digest: str, columns: Sequence[str]) -> str:
    """Of a reward's values for a file of completions, whose prompts have ``columns`` of these digests."""
    of_columns = f"-{digest_of_text(*columns)}" if any(columns) else ""
    return f"{chunk}.score-{digest}{of_columns}"


def from_rollout(rollout: Rollout) -> Tensors:
    """A rollout as it is kept: ``prompts`` are the tokens of all, one after another, ``prompt_lengths`` of each."""
    return {
        "prompts": torch.tensor([token for ids in rollout.prompt_ids for token in ids], dtype=torch.int32),
        "prompt_lengths": torch.tensor([len(ids) for ids in rollout.prompt_ids]),
        "tokens": rollout.tokens.to(torch.int32),
        "logprobs": rollout.logprobs,
        "lengths": rollout.lengths,
        "finished": rollout.finished,
    }


def to_rollout(tensors: Tensors, prompt_ids: Sequence[Sequence[int]]) -> Rollout:
    tokens = tensors["tokens"].long()
    return Rollout([list(p) for p in prompt_ids], tokens, tensors["logprobs"], tensors["lengths"], tensors["finished"])


def digest_of(*paths: Path) -> str:
    """Of the contents of files, and of the folders' own files, with their names."""
    total = hashlib.sha256()
    for path in paths:
        for file in sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]:
            total.update(file.name.encode())
            now = file.stat()
            total.update(_digest_of_file(file.absolute(), now.st_size, now.st_mtime_ns))
    return total.hexdigest()[:16]


@cache
def _digest_of_file(file: Path, size: int, changed: int) -> bytes:
    """Read once while its size and its time of change are the same: loops come by a large model again and again."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def digest_of_model(folder: Path) -> str:
    """Of what a model computes: its config.json and weights."""
    return digest_of(*sorted(p for p in folder.iterdir() if p.name == "config.json" or ".safetensors" in p.name))


def digest_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of how texts become ids and ids texts: its rules or vocabulary, special ids and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)  # none: its rules are Python code
    rules = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    of_last_call = ("padding", "truncation")
    rules = {name: rule for name, rule in rules.items() if backend is None or name not in of_last_call}
    whole = [rules, tokenizer.all_special_ids, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template]
    return _short(json.dumps(whole, sort_keys=True).encode())


def same_ids(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether an id is the same piece of text in both; how they part texts, and what is special, may differ."""

    def pieces(tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, int], Any]:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        return tokenizer.get_vocab(), None if backend is None else json.loads(backend.to_str())["decoder"]

    return pieces(one) == pieces(other)


def digest_of_function(function: Callable[..., Any], named: str, spec: str) -> str:
    """Of what a reward does: its spec, the source file of its code, and every file or folder that it is ``named`` by.

    ``named`` is its text in the configuration: a model's folder, or a function whose arguments may be paths. What the
    code reads elsewhere is not seen.
    """
    while isinstance(function, partial):
        function = function.func
    code = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        source = [Path(inspect.getfile(code))]
    except TypeError:  # built in
        source = []
    found = [path for path in [*source, *_paths_in(named)] if len(str(path)) < 4096 and path.exists()]
    return _short(f"{spec} {digest_of(*dict.fromkeys(found))}".encode())


def _paths_in(named: str) -> list[Path]:
    """Texts in quotes, and what stands before the brackets; not those that are folders whatever they mean."""
    parts = (named.partition("(")[0].strip(), *named.replace('"', "'").split("'")[1::2])
    return [Path(os.path.expanduser(part)) for part in parts if part.strip() and part not in (".", "..", "/")]


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
