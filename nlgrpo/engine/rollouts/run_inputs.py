"""Digests of what a run reads besides its configuration: a run that resumes compares them with those of its start.

They are made of the digests of `store`, by which stored rollouts know their model and rewards, too. ``inputs.json`` in
the folder of a run has them, with the size, times and SHA-256 of every file that was read: a start that finds a file
untouched does not read it again, so the weights of a large model are read once, and once more after they were copied.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase

from nlgrpo.data.prompt_dataset import PromptSet
from nlgrpo.engine.rollouts import store
from nlgrpo.errors import UserError
from nlgrpo.runtime import atomic_files

FILE = "inputs.json"
Kind = Literal["data", "rewards", "model", "tokenizer", "template"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Input:
    """Digest of an input.

    ``kind``: its name in train.allow_changed. ``meaning``: what has changed if the digest has. ``unless``: kinds that
    this digest depends on, so that it is compared only where they are unchanged.
    """

    kind: Kind
    digest: str
    meaning: str
    unless: tuple[Kind, ...] = ()


@dataclass
class RunInputs:
    """Inputs of a run by their names in ``inputs.json``, and notes on those that have no digest."""

    results: str
    """File in the folder of the run with values that depend on them; it may be there before the first checkpoint."""
    inputs: dict[str, Input] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, kind: Kind, digest: str, meaning: str, unless: tuple[Kind, ...] = ()) -> None:
        self.inputs[name] = Input(kind, digest, meaning, unless)

    def add_model(self, folder: Path, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
        """Add the weights, the tokenizer and the chat template of the model in ``folder``, which ``path`` names."""
        self.add("model", "model", store.digest_of_model(folder), f"config.json or weights of {path}")
        rules = store.digest_of_tokenizer(tokenizer, template=False)
        self.add("tokenizer", "tokenizer", rules, f"vocabulary, rules or special tokens of the tokenizer of {path}")
        text = store.digest_of_text(json.dumps(tokenizer.chat_template, sort_keys=True))
        self.add("template", "template", text, f"chat template of {path}")

    def changed(self, saved: Mapping[str, str]) -> dict[str, Input]:
        """Return the inputs whose digests differ from the ``saved`` ones. An input that was not saved is not new."""
        differ = {name: one for name, one in self.inputs.items() if saved.get(name, one.digest) != one.digest}
        kinds = {one.kind for one in differ.values() if not one.unless}
        return {name: one for name, one in differ.items() if not kinds & set(one.unless)}

    def write(self, folder: Path) -> None:
        """Write ``inputs.json`` into the folder of the run."""
        content = {"digests": {name: one.digest for name, one in self.inputs.items()}, "files": store.READ}
        atomic_files.atomic_write(folder / FILE, json.dumps(content, indent=1) + "\n")


def read_digests(folder: Path) -> dict[str, str] | None:
    """Read the digests of a run; None if it began before they were written.

    Files that were read for them are known from then on. Raises UserError for a damaged file.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        saved = json.loads(path.read_text("utf-8"))
        for name, (size, modified, changed, digest) in saved["files"].items():
            store.READ.setdefault(name, (int(size), int(modified), int(changed), str(digest)))
        return {str(name): str(digest) for name, digest in saved["digests"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read ({error!r}); remove it to go on without comparing data, rewards and model with "
            "those of the first start"
        ) from error


def digest_of_rows(sets: Iterable[PromptSet]) -> str:
    """Digest of prompts before they are rendered, and of their rows in the data."""
    total = hashlib.sha256()
    for prompts in sets:
        for prompt, row in zip(prompts.prompts, prompts.rows, strict=True):
            total.update(json.dumps([prompt, row], sort_keys=True, default=str).encode())
    return total.hexdigest()[:16]


def digest_of_ids(sets: Iterable[PromptSet]) -> str:
    """Digest of the token ids of prompts."""
    return digest_of_examples([ids] for prompts in sets for ids in prompts.ids)


def digest_of_examples(examples: Iterable[Any]) -> str:
    """Digest of examples of plain data: lists of token ids and numbers."""
    total = hashlib.sha256()
    for example in examples:
        total.update(json.dumps(example).encode())
    return total.hexdigest()[:16]
