"""A batch of completions by each engine, for benchmarks on a CPU and on GPUs: no filters, temperature 1.

Each function takes a model and returns ``sample(prompts, seed)``: the number of sampled tokens, those after EOS left
out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from random_models import EOS, PAD

GENERATED = Callable[[list[list[int]], int], int]  # prompts and a seed -> number of sampled tokens


def by_nlgrpo(model: Any, samples: int, limit: int, *, rows: int, stop_ids: tuple[int, ...] = (EOS,)) -> GENERATED:
    """nlgrpo's engine with a `Decoder`; at most ``rows`` completions are decoded together."""
    from nlgrpo.engine.generation import generate
    from nlgrpo.engine.sampling import Sampling

    sampling = Sampling(max_new_tokens=limit, stop_ids=stop_ids)

    def sample(prompts: list[list[int]], seed: int) -> int:
        return int(generate(model, prompts, samples, sampling, seed=seed, max_rows=rows).lengths.sum())

    return sample


def by_transformers(model: Any, samples: int, limit: int, *, to_the_end: bool = False) -> GENERATED:
    """transformers' ``generate``, with prompts padded on the left. ``to_the_end``: no completion stops early."""

    def sample(prompts: list[list[int]], seed: int) -> int:
        torch.manual_seed(seed)
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), PAD)
        for row, prompt in zip(ids, prompts, strict=True):
            row[longest - len(prompt) :] = torch.tensor(prompt)
        seen = torch.arange(longest) >= longest - torch.tensor(list(map(len, prompts)))[:, None]
        tokens = model.generate(
            input_ids=ids.to(model.device), attention_mask=seen.long().to(model.device), max_new_tokens=limit,
            min_new_tokens=limit if to_the_end else None, num_return_sequences=samples, do_sample=True,
            temperature=1.0, top_k=0, top_p=1.0,
        )[:, longest:]  # fmt: skip
        ended = (tokens == EOS).cumsum(-1)
        return int((ended - (tokens == EOS).int() == 0).sum())

    return sample


def by_vllm(folder: Path, samples: int, limit: int, *, stop_ids: tuple[int, ...] = (EOS,), **options: Any) -> GENERATED:
    """vLLM, from a model directory. ``options`` are those of ``vllm.LLM``."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), skip_tokenizer_init=True, **options)

    def sample(prompts: list[list[int]], seed: int) -> int:
        params = SamplingParams(
            n=samples, temperature=1.0, max_tokens=limit, stop_token_ids=list(stop_ids), logprobs=0, detokenize=False,
            ignore_eos=not stop_ids,
        )  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return sum(len(one.token_ids) for output in outputs for one in output.outputs)

    return sample
