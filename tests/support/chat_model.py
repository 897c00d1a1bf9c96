"""A random chat model: Qwen3's architecture and chat template (as TRL ships it), and one token per byte."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]  # one token each, but not special


def template(name: str = "qwen3") -> str:
    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text("utf-8")


def chat_tokenizer(chat_template: str | None = None, **special) -> PreTrainedTokenizerFast:
    """A tokenizer of 256 bytes and the tokens of Qwen3's chat format."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=chat_template or template(),
        **special,
    )
    made.add_tokens(PLAIN)
    return made


def chat_model(folder: Path, *, seed: int = 0, **changes) -> Qwen3ForCausalLM:
    """Write the model into ``folder`` and return it, in float64."""
    tokenizer = chat_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen3Config(**({"vocab_size": len(tokenizer)} | sizes | heads | ids | changes))
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.double()
