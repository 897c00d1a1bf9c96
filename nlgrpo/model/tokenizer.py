"""The tokenizer of a model directory, and the token ids that end its texts."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nlgrpo.model.decoder import read_config


def load_tokenizer(source: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory, without running code from it.

    Raises ValueError if the directory has none, or an empty one, which transformers builds if the files are missing.
    """
    read_config(source)  # reports a broken config better than transformers does
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        tokenizer.decode(tokenizer("a text")["input_ids"])  # transformers reads some settings only when they are used
    except Exception as error:  # tokenizers raises bare exceptions
        raise ValueError(f"{source} has no tokenizer that transformers can read: {error}") from error
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise ValueError(
            f"{source} has no tokenizer: its files (tokenizer.json, or vocab.json with merges.txt) are missing"
        )
    return tokenizer


def stop_ids_of(tokenizer: PreTrainedTokenizerBase, source: Path) -> list[int]:
    """Return the token ids that end a text: the ones in the directory's configs, and the tokenizer's EOS.

    Raises ValueError for a config that is not JSON, or whose ``eos_token_id`` is neither an id nor a list of ids.
    """
    ids: list[int] = []
    for path in (source / "generation_config.json", source / "config.json"):
        if path.is_file():
            ids += _declared_stops(path)
    return ids + ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])


def _declared_stops(path: Path) -> list[int]:
    try:
        declared = json.loads(path.read_text("utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error
    ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"{path}: eos_token_id = {declared!r} is neither a token id nor a list of token ids")
    return ids
