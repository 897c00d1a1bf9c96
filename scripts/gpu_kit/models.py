"""Random models of known shapes, made on the device from their configs: nothing is downloaded."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import torch
from random_models import word_tokenizer
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, Qwen2Config

from nlgrpo.model import decoder
from nlgrpo.model.architectures import tensor_map
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.hf_weights import layout

STD = 0.02
# Shapes of Qwen2.5-0.5B and -7B.
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "layers": 24, "width": 896, "heads": 14, "kv_heads": 2, "ffn": 4864, "vocab": 151_936, "tied": True,
    },
    "7B": {
        "layers": 28, "width": 3584, "heads": 28, "kv_heads": 4, "ffn": 18_944, "vocab": 152_064, "tied": False,
    },
    "tiny": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 512, "tied": True},
    "tiny, untied": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 512, "tied": False},
}  # fmt: skip


def qwen2(
    layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool = True, context: int = 4096
) -> Qwen2Config:
    """Return the config of a Qwen2 model. Its token 0 pads, and 1 ends a text."""
    return Qwen2Config(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=ffn, vocab_size=vocab, tie_word_embeddings=tied, max_position_embeddings=context,
        pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip


def config_of(name: str) -> Qwen2Config:
    return qwen2(**SHAPES[name])


@torch.no_grad()
def decoder_of(config: PretrainedConfig, device: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """Return a random decoder on the device."""
    model = decoder.allocate(decoder.blueprint(config).to(dtype), device)
    fill(model)
    return model.eval()


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Draw all parameters, in place: matrices from N(0, 0.02^2), norms at 1, biases at 0."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.dim() > 1:
            local.normal_(0.0, STD)
        else:
            local.fill_(0.0 if name.endswith("bias") else 1.0)


def save_blank(config: PretrainedConfig, folder: Path) -> None:
    """Write a model directory whose weights are zeros in bfloat16, in a sparse file that takes no space on the disk.

    `fill` draws the weights once they are on the device.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    word_tokenizer(config.vocab_size).save_pretrained(folder)
    model = decoder.blueprint(config).to(torch.bfloat16)
    header: dict[str, Any] = {}
    end = 0
    for name, (shape, dtype) in layout(dict(model.named_parameters()), model.shape, tensor_map(model.shape)).items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
