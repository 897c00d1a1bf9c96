"""Random transformers models of every family, and their logits."""

from __future__ import annotations

import torch
import transformers

TINY = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = TINY | {"num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GPT2 = {
    "vocab_size": 99,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEOX = TINY | {"rotary_pct": 0.5}
CASES = {
    "llama": ("LlamaConfig", GQA),
    "llama-tied-bias": ("LlamaConfig", GQA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("LlamaConfig", GQA | {"head_dim": 16}),
    "llama3-rope": ("LlamaConfig", GQA | {"rope_parameters": LLAMA3}),
    "llama-yarn": ("LlamaConfig", GQA | {"rope_parameters": YARN}),
    "mistral": ("MistralConfig", GQA | {"sliding_window": None}),
    "mistral-window": ("MistralConfig", GQA | {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", GQA),
    "qwen2-window": ("Qwen2Config", GQA | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", GQA | {"head_dim": 16}),
    "qwen3-tied": ("Qwen3Config", GQA | {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "neox": ("GPTNeoXConfig", NEOX),
    "neox-serial": ("GPTNeoXConfig", NEOX | {"use_parallel_residual": False, "attention_bias": False}),
    "gpt2": ("GPT2Config", GPT2),
    "gpt2-scales": ("GPT2Config", GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 100}),
    "gpt2-untied": ("GPT2Config", GPT2 | {"tie_word_embeddings": False}),
}
LENGTHS = [17, 1, 40, 2]


def random_model(case: str) -> transformers.PreTrainedModel:
    """A model with random parameters, norms and biases too: initial ones and zeros would hide a misplaced tensor."""
    kind, arguments = CASES[case]
    theirs = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**arguments)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.2).add_(1.0 if parameter.dim() == 1 else 0.0)
    return theirs


def their_logits(theirs: transformers.PreTrainedModel, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([theirs(x[None]).logits[0] for x in tokens.split(lengths)])


def tokens_for(vocab: int, lengths: list[int] = LENGTHS) -> torch.Tensor:
    return torch.randint(3, vocab, (sum(lengths),), generator=torch.Generator().manual_seed(1))
