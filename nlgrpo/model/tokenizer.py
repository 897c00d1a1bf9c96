"""The tokenizer of a model directory, and the token ids that end its texts."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nlgrpo.errors import UserError
from nlgrpo.model import architectures
from nlgrpo.runtime import atomic_files

CONFIG = "tokenizer_config.json"


def load_tokenizer(source: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory, without running code from it.

    Raises UserError if the directory has none, or an empty one, which transformers builds if the files are missing.
    """
    if (source / "config.json").is_file():  # the folder of an adapter has none
        architectures.read_config(source)  # reports a broken config better than transformers does
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        tokenizer.decode(tokenizer("a text")["input_ids"])  # transformers reads some settings only when they are used
        empty = set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids)
    except Exception as error:  # tokenizers raises bare exceptions, and transformers recurses with unk_token = ""
        raise UserError(_unreadable(source, error)) from error
    if empty:
        raise UserError(
            f"{source} has no tokenizer: its files (tokenizer.json, or vocab.json with merges.txt) are missing"
        )
    return tokenizer


def _unreadable(source: Path, error: Exception) -> str:
    """Return the message for a tokenizer that cannot be loaded, with the usual reasons."""
    file = source / "tokenizer.json"
    pieces = source / "tokenizer.model"
    fault = "has no tokenizer that transformers can read"
    if not file.is_file() and pieces.is_file() and find_spec("sentencepiece") is None:
        fault = (
            "has a tokenizer.model and no tokenizer.json, and sentencepiece, with which transformers reads it, is not "
            "installed: pip install sentencepiece"
        )
    for path in (file, pieces):
        if path.is_file() and atomic_files.is_pointer(path):
            return atomic_files.unreadable(path, fault, error)
    return f"{source} {fault}: {error}"


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer in a form that transformers 4 opens, too, if it opens the one that it was loaded from.

    transformers 5 writes names that earlier versions do not know: a class TokenizersBackend, and a list of
    extra_special_tokens. The class is that of the source, or PreTrainedTokenizerFast, which reads tokenizer.json alone.
    """
    tokenizer.save_pretrained(folder)
    written = json.loads((folder / CONFIG).read_text("utf-8"))
    source = Path(tokenizer.name_or_path) / CONFIG
    own = json.loads(source.read_text("utf-8")) if source.is_file() else {}
    for name in ("tokenizer_class", "add_bos_token", "add_eos_token"):
        if own.get(name) is not None:
            written[name] = own[name]
    if written["tokenizer_class"] == "TokenizersBackend":
        written["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(written.get("extra_special_tokens"), list):
        written["additional_special_tokens"] = written.pop("extra_special_tokens")
    text = json.dumps(written, indent=2, sort_keys=True, ensure_ascii=False)
    atomic_files.atomic_write(folder / CONFIG, text + "\n")


def count_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of ids up to the largest one that has a token. A model can have more rows."""
    return max(tokenizer.get_vocab().values()) + 1


def stop_ids_of(tokenizer: PreTrainedTokenizerBase, source: Path) -> list[int]:
    """Return the token ids that end a text: the ones in the directory's configs, and the tokenizer's EOS.

    Raises UserError for a config that is not JSON, or whose ``eos_token_id`` is neither an id nor a list of ids.
    """
    ids: list[int] = []
    for path in (source / "generation_config.json", source / "config.json"):
        if path.is_file():
            ids += _declared_stops(path)
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return ids


def _declared_stops(path: Path) -> list[int]:
    try:
        declared = json.loads(path.read_text("utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a JSON object: {error}") from error
    if declared is None:
        return []
    ids = declared if isinstance(declared, list) else [declared]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise UserError(f"{path}: eos_token_id = {declared!r} is neither a token id nor a list of token ids")
    return ids
