"""Digests of what a run reads besides its configuration: a run that resumes compares them with those of its start.

They are made of the digests of `store`, by which stored rollouts know their model and rewards, too. ``inputs.json`` in
the folder of a run has them, with the size, times and SHA-256 of every file that was read: a start that finds a file
untouched does not read it again, so the weights of a large model are read once, and once more after they were copied.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from transformers import PreTrainedTokenizerBase

from nlgrpo.config.schema import Config
from nlgrpo.data.prompt_dataset import Prompts, PromptSet
from nlgrpo.engine.rollouts import store
from nlgrpo.errors import UserError
from nlgrpo.runtime import atomic_files, user_code

if TYPE_CHECKING:
    from nlgrpo.engine.rollouts.collect import Scorer

INPUTS_FILE = "inputs.json"
EVALUATION_FILE = "evaluation.json"  # of the folder of a run, with the samples of its evaluation
RENDERED = "token ids of the same prompts (a template that writes the date does this)"
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
        atomic_files.atomic_write(folder / INPUTS_FILE, json.dumps(content, indent=1) + "\n")


def read_digests(folder: Path) -> dict[str, str] | None:
    """Read the digests of a run; None if it began before they were written.

    Files that were read for them are known from then on. Raises UserError for a damaged file.
    """
    path = folder / INPUTS_FILE
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


def digests_of(
    cfg: Config,
    source: Path,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    held_out: PromptSet,
    evaluation_sets: Mapping[str, PromptSet],
    scorers: Sequence[Scorer],
    stop_ids: Sequence[int],
) -> RunInputs:
    """Return the inputs of a run that trains a policy. Reads all files of the model and of the rewards."""
    found = RunInputs(EVALUATION_FILE)
    known = prompts.all()
    both = (known, held_out)  # of a stream, only those that are held out are known
    if prompts.streamed:
        found.notes.append("a streamed data set has no digest: whether it has changed is not known")
    if len(known) or len(held_out):
        found.add("data", "data", digest_of_rows(both), "prompts or columns of the data, or their order")
        found.add("ids", "template", digest_of_ids(both), RENDERED, unless=("data", "tokenizer", "template"))
    for name, prompts_of_set in evaluation_sets.items():
        if prompts_of_set is not held_out:
            digest = digest_of_rows([prompts_of_set])
            found.add(f"evaluation.sets.{name}", "data", digest, f"prompts or columns of evaluation.sets.{name}")
    if cfg.calibration.rollouts:
        from nlgrpo.engine.rollouts.reference_rollouts import read_index

        index = read_index(Path(os.path.expanduser(cfg.calibration.rollouts)))
        content = json.dumps([index.store, index.samples, index.prompts, index.columns])
        found.add("rollouts", "data", store.digest_of_text(content), f"rollouts in {cfg.calibration.rollouts}")
    for scorer in scorers:
        reward = cfg.rewards[scorer.name]
        code = store.digest_of(*_code_in(reward.objective), *_code_in(reward.transform))
        digest = store.digest_of_text(scorer.digest, code)
        found.add(f"rewards.{scorer.name}", "rewards", digest, f"code or files of {scorer.spec}")
    if cfg.environment.id:
        code = store.digest_of(*_code_of_module(cfg.environment.id.rpartition("/")[2].replace("-", "_")))
        found.add("environment", "rewards", code, f"code of the environment {cfg.environment.id}")
    found.add_model(source, tokenizer, cfg.model.path)
    ends = store.digest_of_text(json.dumps(sorted(set(stop_ids))))
    found.add("stop ids", "model", ends, f"stop ids of {cfg.model.path}", unless=("tokenizer",))
    return found


def _code_in(text: str) -> list[Path]:
    """Return the files of Python code of the functions that an objective or a transform names, once it is loaded."""
    files: list[Path] = []
    for place in text.split(":")[:-1]:
        files += _code_of_module(place)
        if place.endswith(".py"):
            files += user_code.files_of(Path(os.path.expanduser(place)))
    return files


def _code_of_module(name: str) -> list[Path]:
    """Return the files of a module that has been imported; [] for others, and for one without a file."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return user_code.files_of(Path(file)) if file else []
