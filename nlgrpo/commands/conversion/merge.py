"""The command ``nlgrpo merge``: write a model with an adapter merged into its weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from nlgrpo.model import adapters, decoder, hf_weights, lora, reward_model
from nlgrpo.model.adapters import Adapter
from nlgrpo.model.tokenizer import load_tokenizer
from nlgrpo.runtime import atomic_files

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass
class Merge:
    """Merge an adapter in PEFT's format into its model: W + (alpha / r) B A, computed in float32.

    The result is a Hugging Face directory that needs no adapter: a causal model, or a classifier for the adapter of a
    reward model.
    """

    adapter: Annotated[str, tyro.conf.Positional]
    """Folder with adapter_config.json, such as runs/NAME/adapter."""
    out: str
    """Folder to write."""
    model: str | None = None
    """Model that the adapter was trained on. None: the one that it names."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Dtype of the result. auto: that of the model."""


def main(arguments: Sequence[str]) -> int:
    """Merge. Raises ValueError for a folder that is not empty, a missing or unsupported adapter, and a wrong model."""
    options = tyro.cli(Merge, args=list(arguments), prog="nlgrpo merge")
    folder, adapter = Path(os.path.expanduser(options.out)), adapters.read(options.adapter)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--out {folder} exists already and is not an empty folder")
    name = options.model or adapter.base
    if not name:
        raise ValueError(f"{adapter.folder} does not name the model that it was trained on; give it as --model")
    scored = adapter.task == "SEQ_CLS"
    source = reward_model.locate(name)[0] if scored else hf_weights.locate(name)
    dtype = DTYPES.get(options.dtype, hf_weights.Checkpoint(source).dtype)
    with atomic_files.into(folder):
        if scored:
            _merge_reward_model(adapter, name, source, dtype, folder)
        else:
            _merge_causal_model(adapter, source, dtype, folder)
    print(f"merged {adapter.folder} into {name}: {folder}")
    return 0


def _merge_causal_model(adapter: Adapter, source: Path, dtype: torch.dtype, folder: Path) -> None:
    model = decoder.load(source, dtype=dtype, shard=lambda m: lora.attach(m, adapter.config, dtype))
    adapters.load(model, adapter)
    merged = lora.merged(model, model.named_parameters(), dtype)
    decoder.save(model, folder, tokenizer=load_tokenizer(source), parameters=merged, dtype=dtype, like=source)


def _merge_reward_model(adapter: Adapter, name: str, source: Path, dtype: torch.dtype, folder: Path) -> None:
    """``name``: the model, which may be a run or one of its checkpoints; ``source``: its Hugging Face directory."""
    tokenizer = load_tokenizer(source)
    model, trained = reward_model.load(name, dtype=dtype, shard=lambda m: lora.attach(m, adapter.config, dtype))
    adapters.load(model, adapter)
    reward_model.save(
        model,
        folder,
        tokenizer=tokenizer,
        pad=reward_model.padding_id(model.config, tokenizer, trained),
        max_length=model.shape.context,
        parameters=lora.merged(model, model.named_parameters(), dtype),
        dtype=dtype,
    )
