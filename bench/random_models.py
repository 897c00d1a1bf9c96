"""Random Llamas whose completions have a chosen mean length, with their tokenizer and prompts, for benchmarks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, BOS = 0, 1, 2
LIMIT = 128  # tokens of a completion
STOP_PROBABILITY = 0.018  # at every token; E[length] = (1 - (1 - p)^128) / p = 50
CONTEXT = 4096


def random_llama(vocab: int, width: int, ffn: int, layers: int, heads: int) -> LlamaForCausalLM:
    """A random Llama with tied embeddings, which samples EOS with the probability STOP_PROBABILITY at every token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        pad_token_id=PAD, eos_token_id=EOS, bos_token_id=BOS,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=BOS
    )
    _set_stop_probability(model)
    return model


@torch.no_grad()
def _set_stop_probability(model: LlamaForCausalLM) -> None:
    """Make EOS have the probability STOP_PROBABILITY at every token; the other logits are about 0.

    A Llama has no bias. One coordinate, which is the same in all embeddings and so about the same in all last hidden
    states, replaces it: the EOS row of the (tied) head is nonzero at this coordinate only.
    """
    embedding, vocab = model.model.embed_tokens.weight, model.config.vocab_size
    embedding[:, 0] = 1.0
    constant = model.model(torch.randint(3, vocab, (16, 64))).last_hidden_state[..., 0].mean()
    odds = STOP_PROBABILITY / (1 - STOP_PROBABILITY)
    embedding[EOS] = 0.0
    embedding[EOS, 0] = 1.0 + torch.tensor(odds * (vocab - 1)).log() / constant


def word_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Tokenizer in which the words w0, w1, .. are the tokens 0, 1, .."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": f"w{PAD}", "eos_token": f"w{EOS}", "bos_token": f"w{BOS}"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def random_prompts(count: int, mean_tokens: int, vocab: int) -> list[list[int]]:
    """Return random prompts of about ``mean_tokens`` tokens: 12 +- 4, 224 +- 32."""
    rng, spread = random.Random(0), min(mean_tokens - 1, max(4, mean_tokens // 7))
    lengths = [rng.randint(mean_tokens - spread, mean_tokens + spread) for _ in range(count)]
    return [[rng.randrange(3, vocab) for _ in range(length)] for length in lengths]


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the model and its tokenizer with transformers."""
    model.save_pretrained(folder)
    word_tokenizer(model.config.vocab_size).save_pretrained(folder)


def save_prompts(prompts: list[list[int]], path: Path) -> None:
    """Write prompts as texts, one JSON object per line."""
    texts = [" ".join(f"w{token}" for token in prompt) for prompt in prompts]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
