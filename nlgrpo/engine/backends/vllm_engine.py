"""What both forms of vLLM share: requests, checks of what it returns, and the folder for weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nlgrpo.engine.backends.base import Completion, EngineError
from nlgrpo.engine.decoding_memory import ROWS
from nlgrpo.engine.generation import ModelLimits, Rollout, RolloutRequest, rollout_of
from nlgrpo.engine.sampling import Sampling, uniform_noise
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.distributed import Ranks

Request = tuple[list[int], dict[str, Any]]  # token ids of a prompt, and sampling parameters
NEVER = -100.0  # the lowest bias of a logit that vLLM takes: a probability of 4e-44 relative to an equal one


@dataclass(kw_only=True)
class VLLMEngine(ABC):
    """Base class of the engines that sample with vLLM."""

    shape: ModelLimits
    ranks: Ranks
    run: str
    """Random; part of the names of the weights, which are "RUN:VERSION", and of their folder."""
    folder: Path | None = None
    """For weights that vLLM reads from files. Those of this engine are in a folder below it, named by `run`."""
    version: int | None = None
    tokens: int | None = None
    """Number of ids that have a token, if the head has more rows: those are never sampled."""

    @abstractmethod
    def _sample(
        self, requests: Sequence[Request], together: int, report: Callable[[int], None]
    ) -> list[list[Completion]]:
        """Sample the completions of each request, of at most ``together`` requests at a time if it can choose.

        ``report``: called with the number of completions that are finished, if it knows.
        """

    def generate(self, request: RolloutRequest) -> Rollout:
        """Sample completions; see `Engine.generate`. Raises EngineError as `rollout_from`, and for other weights."""
        request.check(self.shape)
        vocab = min(self.tokens or self.shape.vocab, self.shape.vocab)
        left_out = range(vocab, self.shape.vocab)
        requests = []
        for ids, seed in zip(request.prompts, request_seeds(request), strict=True):
            requests.append((list(ids), parameters_of(request, seed, left_out)))
        together = max(1, (request.max_rows or ROWS) // request.samples)
        found = self._sample(requests, together, request.report)
        request.report(len(found) * request.samples)
        rollout = rollout_from(request, found, vocab=vocab, device=self.ranks.device)
        if self.version is None:
            return rollout
        versions = [version_of(name) for own in found for one in own for name in one.versions]
        return replace(rollout, version=min(versions, default=self.version))

    def own_folder(self) -> Path | None:
        """Return the folder for the weights of this engine."""
        return None if self.folder is None else (self.folder / self.run).resolve()

    def keep_weights(self, kept: Collection[Path]) -> None:
        """Remove the weights in the folder of this engine except ``kept``; only the first rank does."""
        own = self.own_folder()
        if self.ranks.first and own is not None and own.is_dir():
            for path in set(own.iterdir()) - set(kept):
                atomic_files.remove(path)

    def remove_folder(self) -> None:
        """Remove the folder of this engine, and the one above it if nothing else is there; only the first rank does."""
        own = self.own_folder()
        if self.ranks.first and own is not None and self.folder is not None:
            atomic_files.remove(own)
            if self.folder.is_dir() and not any(self.folder.iterdir()):
                self.folder.rmdir()


def version_of(name: str) -> int:
    """Return the version in the name of weights, "RUN:VERSION"."""
    return int(name.rpartition(":")[2])


def parameters_of(request: RolloutRequest, seed: int, left_out: Sequence[int] = ()) -> dict[str, Any]:
    """Sampling parameters of vLLM for the completions of a prompt, without the ids ``left_out``.

    vLLM filters by min_p before top_k and top_p. It returns log-probs of the distribution that it sampled from.
    """
    sampling = request.sampling
    parameters = {
        "n": request.samples,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # stop_ids are all that ends a completion
        "logprobs": 0,  # of the sampled token only
        "detokenize": False,
        "seed": seed,
    }
    if left_out:
        parameters["logit_bias"] = dict.fromkeys(left_out, NEVER)
    return parameters


def request_seeds(request: RolloutRequest) -> list[int]:
    """Return a seed for each prompt, of 53 bits: a hash. vLLM adds the number of the sample to it."""
    numbers = torch.tensor(list(request.numbers), dtype=torch.int64)
    first = torch.tensor(request.first_samples, dtype=torch.int64)
    noise = uniform_noise(request.seed, numbers, first, torch.tensor([-1]))
    return [int(u * 2**53) for u in noise[:, 0].tolist()]


def rollout_from(
    request: RolloutRequest, found: Sequence[Sequence[Completion]], *, vocab: int, device: torch.device
) -> Rollout:
    """Check the completions of each prompt and build their `Rollout`.

    Raises EngineError that names the prompt and the fault: too few samples, no log-probs, a log-prob that
    is not finite, a token outside the vocabulary, a completion that neither a stop id nor the limit ended.
    """
    prompts = len(request.prompts)
    samples = request.samples
    if len(found) != prompts:
        raise EngineError(f"vLLM returned completions of {len(found)} prompts; {prompts} were requested")
    for i, completions in enumerate(found):
        if len(completions) != samples:
            raise EngineError(f"vLLM returned {len(completions)} samples of prompt {i}; {samples} were requested")
        for completion in completions:
            if fault := _fault(completion, request.sampling, vocab):
                raise EngineError(f"vLLM, prompt {i}: {fault}")
    rows = [completion for completions in found for completion in completions]
    longest = max((len(row.tokens) for row in rows), default=0)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    logprobs = torch.zeros(len(rows), longest)
    for r, row in enumerate(rows):
        tokens[r, : len(row.tokens)] = torch.tensor(row.tokens)
        logprobs[r, : len(row.tokens)] = torch.tensor(row.logprobs)
    return rollout_of(request, [(tokens.to(device), logprobs.to(device))], device)


def _fault(completion: Completion, sampling: Sampling, vocab: int) -> str:
    """Return what is wrong with a completion; "" if nothing is."""
    tokens = completion.tokens
    logprobs = completion.logprobs
    if not tokens:
        return f"an empty completion (finish reason {completion.finish_reason!r})"
    if len(logprobs) != len(tokens):
        return f"{len(logprobs)} log-probs for {len(tokens)} tokens; start the engine with processed log-probs"
    if bad := [x for x in logprobs if not math.isfinite(x)]:
        return f"a log-prob of {bad[0]}; its weights or its logits are not finite"
    if not 0 <= min(tokens) <= max(tokens) < vocab:
        return f"token id {max(tokens)}, outside the policy's vocabulary of {vocab}; it has another model"
    stops = [t for t, token in enumerate(tokens) if token in sampling.stop_ids]
    if stops and stops[0] != len(tokens) - 1:
        return "tokens after a stop id"
    if not stops and len(tokens) != sampling.max_new_tokens:
        return f"a completion of {len(tokens)} tokens without a stop id (finish reason {completion.finish_reason!r})"
    return ""
