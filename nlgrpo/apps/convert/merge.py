"""The command ``nlgrpo merge``: write a model with an adapter merged into its weights."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from nlgrpo.apps.convert.options import read_merge
from nlgrpo.engine import as_trained
from nlgrpo.errors import UserError
from nlgrpo.model import adapters, decoder, hf_weights, lora, reward_model, tokenizer
from nlgrpo.model.adapters import Adapter
from nlgrpo.model.tokenizer import load_tokenizer
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.progress import track
from nlgrpo.training.tracking.terminal import output

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def main(arguments: Sequence[str]) -> int:
    """Merge. Raises UserError for a folder that is not empty, a missing or unsupported adapter, and a wrong model."""
    options = read_merge(arguments)
    folder = Path(os.path.expanduser(options.out))
    adapter = adapters.read_adapter(options.adapter)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out {folder} exists already and is not an empty folder")
    name = options.model or adapter.base
    if not name:
        raise UserError(f"{adapter.folder} does not name the model that it was trained on; give it as --model")
    scored = adapter.task == "SEQ_CLS"
    source = reward_model.locate(name)[0] if scored else hf_weights.locate(name)
    stored = hf_weights.Checkpoint(source)
    dtype = DTYPES.get(options.dtype, stored.dtype)
    with atomic_files.into(folder):
        if scored:
            _merge_reward_model(adapter, name, source, dtype, folder)
        else:
            _merge_causal_model(adapter, source, stored.widest, dtype, folder)
    print(f"merged {adapter.folder} into {name}: {folder}")
    return 0


def _merge_causal_model(adapter: Adapter, source: Path, stored: torch.dtype, dtype: torch.dtype, folder: Path) -> None:
    """``stored``: dtype that holds the weights of the model as they are, so that only the sums are rounded."""
    model = decoder.load(source, dtype=adapter.dtype, shard=lambda m: lora.attach(m, adapter.config, stored))
    adapters.load_adapter(model, adapter)
    as_trained.check_base(adapter.folder, source)
    merged = lora.merged(model, model.named_parameters(), dtype)
    own = load_tokenizer(_tokenizer_folder(adapter, source))
    assumed = adapter.folder if (adapter.folder / hf_weights.SAMPLING_FILES[0]).is_file() else source
    with closing(_shown(model, merged)) as parameters:  # an error is printed without the bar
        decoder.save(model, folder, tokenizer=own, parameters=parameters, dtype=dtype, like=assumed)


def _merge_reward_model(adapter: Adapter, name: str, source: Path, dtype: torch.dtype, folder: Path) -> None:
    """``name``: the model, which may be a run or one of its checkpoints; ``source``: its Hugging Face directory."""
    place = _tokenizer_folder(adapter, source)
    own = load_tokenizer(place)
    wide = torch.promote_types(adapter.dtype, hf_weights.Checkpoint(source).widest)  # a checkpoint may be wider
    model, trained = reward_model.load_reward_model(
        name, dtype=wide, shard=lambda m: lora.attach(m, adapter.config, wide)
    )
    adapters.load_adapter(model, adapter)
    as_trained.check_base(adapter.folder, reward_model.locate(name)[1] or source)
    reward_model.read_head(adapter.folder, model)
    longest = min(own.model_max_length, model.shape.context)  # a tokenizer without a limit has 1e30
    merged = lora.merged(model, model.named_parameters(), dtype)
    with closing(_shown(model, merged)) as parameters:
        reward_model.save(
            model,
            folder,
            tokenizer=own,
            pad=reward_model.padding_id(model.config, own, trained),
            max_length=longest if place == adapter.folder else model.shape.context,
            parameters=parameters,
            dtype=dtype,
        )


def _shown(model: torch.nn.Module, merged: Iterator[tuple[str, Tensor]]) -> Generator[tuple[str, Tensor]]:
    """Show how many of the merged tensors are written."""
    tensors = sum(not lora.is_adapter(name) for name, _ in model.named_parameters())
    return track(merged, "tensors", tensors, output())


def _tokenizer_folder(adapter: Adapter, source: Path) -> Path:
    """Return the folder of the tokenizer that the adapter was trained with: its own, which TRL saves, if it has one."""
    return adapter.folder if (adapter.folder / tokenizer.CONFIG).is_file() else source
