"""Load the pair of models whose log-probs are an implicit reward (BoN-I, weak-to-strong search)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nlgrpo.engine.chunked_decoding import ImplicitReward, Prefixes
from nlgrpo.engine.guided_search import Value
from nlgrpo.engine.guides import Retokenizer
from nlgrpo.engine.rollouts.store import digest_of_model, digest_of_tokenizer, same_ids
from nlgrpo.engine.sampling import Sampling
from nlgrpo.errors import UserError
from nlgrpo.kernels import linear_logprob
from nlgrpo.model import decoder, reward_model
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.packing import bins
from nlgrpo.model.tokenizer import count_tokens, load_tokenizer

Pair = tuple[str, str]  # the tuned model and the untuned one: runs, directories or hub names


def digests(pair: Pair) -> list[str]:
    """Digests of the weights and tokenizers of both models."""
    folders = [reward_model.locate(name)[0] for name in pair]
    return [f"{digest_of_model(folder)}-{digest_of_tokenizer(load_tokenizer(folder))}" for folder in folders]


def check_pair(pair: Pair) -> None:
    """Raise UserError if a model of the pair does not exist, or if they have different tokenizers."""
    tuned, untuned = (load_tokenizer(_folder(name)) for name in pair)
    if not same_ids(tuned, untuned):
        raise UserError(
            f"--tuned {pair[0]} and --untuned {pair[1]} have different tokenizers, so the log-probs of their tokens "
            "cannot be compared; expected a model and what it was trained from"
        )


def load_implicit_reward(
    pair: Pair,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Value:
    """Load an implicit reward that guides a policy with ``tokenizer``; with another tokenizer it reads texts.

    Raises UserError for models that do not exist or do not have the same tokenizer.
    """
    check_pair(pair)
    tuned, untuned = (decoder.load(_folder(name), dtype=dtype, device=device).eval() for name in pair)
    name = f"log-prob of {pair[0]} minus that of {pair[1]}"
    theirs = load_tokenizer(_folder(pair[0]))
    for model in (tuned, untuned):
        model.limit_vocabulary(count_tokens(theirs))
    if same_ids(theirs, tokenizer):
        return ImplicitReward(name, tuned, untuned, sampling.max_new_tokens)
    return TextImplicitReward(name, tuned, untuned, Retokenizer(tokenizer, theirs, sampling.stop_ids))


def _folder(name: str) -> Path:
    folder, checkpoint = reward_model.locate(name)
    if checkpoint is not None:
        raise UserError(f"{name} is a checkpoint; finish its run, then use the folder of the run")
    return folder


class TextImplicitReward(Prefixes):
    """`ImplicitReward` of two models with another tokenizer than the policy: they read whole texts at each chunk."""

    MICRO_BATCH = 16384  # tokens per forward pass

    def __init__(self, name: str, tuned: Decoder, untuned: Decoder, retokenizer: Retokenizer) -> None:
        self.name = name
        self.models = [tuned, untuned]
        self.retokenizer = retokenizer

    def score(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> Tensor:
        """Log-probs of the tokens that the candidates' texts have after their prompts' texts."""
        self.grow(rows, chunks)
        texts = [self.retokenizer.parts(self.prompts[p], tokens) for p, tokens in self.rows]
        context = min(model.shape.context for model in self.models)
        longest = max(len(prompt) + len(completion) for prompt, completion in texts)
        if longest > context:
            raise UserError(f"{self.name}: their context is {context} tokens, but a candidate has {longest}")
        tuned, untuned = (self._sums(model, texts) for model in self.models)
        return tuned - untuned

    def _sums(self, model: Decoder, texts: Sequence[tuple[list[int], list[int]]]) -> Tensor:
        """Log-probs (R,) float64 of the completions after their prompts."""
        device = model.head_weight.device
        sums = torch.zeros(len(texts), dtype=torch.float64)
        sizes = {i: len(prompt) + len(completion) for i, (prompt, completion) in enumerate(texts) if completion}
        for part in bins(sizes, self.MICRO_BATCH):
            tokens = torch.tensor([token for i in part for ids in texts[i] for token in ids], device=device)
            ends = list(accumulate(sizes[i] for i in part))
            counts = [len(texts[i][1]) for i in part]
            # The token before each token of a completion predicts it.
            spans = [range(end - count - 1, end - 1) for end, count in zip(ends, counts, strict=True)]
            before = torch.tensor([place for span in spans for place in span], device=device)
            head = partial(linear_logprob, targets=tokens[before + 1])
            logprob, _ = model(tokens, [sizes[i] for i in part], before, head)
            parts = logprob.double().cpu().split(counts)
            sums[part] = torch.stack([own.sum() for own in parts])
        return sums
