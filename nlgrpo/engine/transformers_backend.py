"""Frozen models of architectures that the decoder does not support: transformers runs them, nlgrpo samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers import logging as transformers_logging

from nlgrpo.engine import generation
from nlgrpo.engine.decoding_memory import ROWS
from nlgrpo.engine.generation import Rollout, RolloutRequest, rollout_of
from nlgrpo.engine.sampling import Sampling, next_tokens, uniform_noise
from nlgrpo.errors import UserError
from nlgrpo.model import decoder, hf_weights
from nlgrpo.model.architectures import UnknownModel, check_causal, shape_of
from nlgrpo.model.decoder import Decoder

UNBOUNDED = 1 << 30  # context length if the config has none


@dataclass(frozen=True)
class ConfigLimits:
    """Context length and vocabulary size in a Hugging Face config (see `generation.ModelLimits`)."""

    context: int
    vocab: int

    @classmethod
    def of(cls, config: Any) -> ConfigLimits:
        text = config.get_text_config()
        names = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
        limits = [value for name in names if isinstance(value := getattr(text, name, None), int) and value > 0]
        return cls(min(limits, default=UNBOUNDED), text.vocab_size)


class TransformersModel(nn.Module):
    """Causal language model of transformers that samples with the same noise as nlgrpo's decoder.

    `transformers.GenerationMixin.generate` runs the model, from the complete prefix each time; `sampling` chooses the
    tokens, with noise that depends only on (seed, prompt, sample, position).
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.model.generation_config = GenerationConfig()  # the model's own may penalise, force or forbid tokens
        self.shape = ConfigLimits.of(model.config)
        self.tokens: int | None = None

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    def limit_vocabulary(self, tokens: int | None) -> None:
        """Never sample ids from ``tokens`` on, as `Decoder.limit_vocabulary`."""
        self.tokens = None if tokens is None or tokens >= self.shape.vocab else tokens

    def extend(
        self, prefixes: Sequence[Sequence[int]], noise: Tensor, sampling: Sampling, likely: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Sample up to n tokens after each prefix with noise (R, n). Return tokens and log-probs, (R, n).

        They have fewer columns if all rows end earlier; entries after a stop id are undefined. ``likely``: take each
        row's token of this rank by log-prob instead of sampling. Prefixes are batched by length, because some
        architectures do not support padding.
        """
        tokens = torch.zeros(noise.shape, dtype=torch.int64, device=self.device)
        logprobs = torch.zeros(noise.shape, device=self.device)
        most = 0
        for length in sorted(set(map(len, prefixes))):
            rows = [i for i, prefix in enumerate(prefixes) if len(prefix) == length]
            ranks = None if likely is None else [likely[i] for i in rows]
            sampler = _TokenSampler(noise[rows], sampling, ranks, self.tokens)
            self._run(torch.tensor([prefixes[i] for i in rows], device=self.device), sampler, noise.shape[1], sampling)
            tokens[rows, : len(sampler.tokens)] = torch.stack(sampler.tokens, 1)
            logprobs[rows, : len(sampler.tokens)] = torch.stack(sampler.logprobs, 1)
            most = max(most, len(sampler.tokens))
        return tokens[:, :most], logprobs[:, :most]

    @torch.inference_mode()
    def gap(self) -> float:
        """Mean absolute difference, in nats, between log-probs of `generate` and of one forward pass over its tokens.

        It detects architectures that lose their state between the steps of transformers' `generate`.
        """
        ids = [i % self.shape.vocab for i in (1, 2, 3)]
        rollout = self.generate(RolloutRequest([ids], 8, Sampling(max_new_tokens=4)))
        tokens = rollout.tokens[0]
        sequences = torch.cat([tokens.new_tensor(ids).expand(len(tokens), -1), tokens], 1)
        one_pass = self.model(sequences).logits[:, 2:-1].float().log_softmax(-1)
        return float((one_pass.gather(2, tokens[:, :, None])[:, :, 0] - rollout.logprobs[0]).abs().mean())

    def _run(self, ids: Tensor, processor: LogitsProcessor, tokens: int, sampling: Sampling) -> None:
        if ids.shape[1] == 1:  # resets models that keep state: they would continue the previous text
            self.model(ids, use_cache=False)
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=LogitsProcessorList([processor]),
            generation_config=GenerationConfig(
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=list(sampling.stop_ids) or None,
                pad_token_id=0,
            ),
        )

    def generate(self, request: RolloutRequest) -> Rollout:
        """Sample completions; result and errors as in `engine.generate`."""
        request.check(self.shape)
        positions = torch.arange(request.sampling.max_new_tokens, device=self.device)
        numbers = request.numbers
        first = request.first_samples
        rows = [(p, m) for p in range(len(request.prompts)) for m in range(request.samples)]
        together = request.max_rows or ROWS
        parts = []
        for start in range(0, len(rows), together):
            batch = rows[start : start + together]
            key = torch.tensor([numbers[p] for p, _ in batch], device=self.device)
            sample = torch.tensor([first[p] + m for p, m in batch], device=self.device)
            noise = uniform_noise(request.seed, key, sample, positions)
            parts.append(self.extend([request.prompts[p] for p, _ in batch], noise, request.sampling))
            request.report(start + len(batch))
        return rollout_of(request, parts, self.device)

    def close(self) -> None:
        """Nothing has to be ended."""


class _TokenSampler(LogitsProcessor):
    """Logits processor that chooses the next token of each row with `next_tokens`, and masks all others."""

    def __init__(self, noise: Tensor, sampling: Sampling, likely: Sequence[int] | None, vocabulary: int | None) -> None:
        self.noise = noise
        self.sampling = sampling
        self.likely = likely
        self.vocabulary = vocabulary
        self.tokens: list[Tensor] = []
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        possible = scores if self.vocabulary is None else scores[:, : self.vocabulary].contiguous()
        token, logprob = next_tokens(possible, self.noise[:, len(self.tokens)], self.sampling, self.likely)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        return torch.full_like(scores, -torch.inf).scatter(1, token[:, None], 0.0)


# --- decoder or transformers ------------------------------------------------------------------------------------------


def fault(config: Any) -> str:
    """Return why nlgrpo's decoder does not support the architecture; "" if it does.

    Raises UserError for a supported architecture with an invalid config.
    """
    try:
        shape_of(config)
    except UnknownModel as error:
        return str(error)
    return ""


def note(source: Path) -> str:
    """Return a note for the log if transformers runs the model; "" otherwise."""
    why = fault(decoder.read_config(source))
    return f"; transformers runs it, which is slower ({why})" if why else ""


def limits_of(config: Any) -> generation.ModelLimits:
    return ConfigLimits.of(config) if fault(config) else shape_of(config)


def load_frozen(
    source: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    tokens: int | None = None,
) -> Decoder | TransformersModel:
    """Load a frozen model: nlgrpo's decoder, or a `TransformersModel` for other architectures.

    Reads safetensors only and runs no code of the directory. Raises UserError for an architecture that transformers
    does not support either, for tensors that are missing or have no place in the model, and if the log-probs of its
    `generate` differ from those of one forward pass.

    ``tokens``: number of ids that have a token; rows of the head after them are left out (`limit_vocabulary`).
    """
    config = decoder.read_config(source)
    check_causal(config)
    if not fault(config):
        ours = decoder.load(source, dtype=dtype, device=device)
        ours.limit_vocabulary(tokens)
        return ours
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        raise UserError(f"{source} cannot be loaded by transformers: {error!r}") from error
    finally:
        if bar:
            transformers_logging.enable_progress_bar()
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        more = f" and {len(missing) - 1} others" * (len(missing) > 1)
        raise UserError(f"{source} has no tensor {missing[0]!r}{more}: its values would be random")
    hf_weights.check_unexpected(source, model, report["unexpected_keys"])
    wrapped = TransformersModel(model.to(device))
    if not (gap := wrapped.gap()) < (0.01 if torch.finfo(dtype).bits >= 32 else 0.25):
        raise UserError(
            f"{source} cannot be sampled: log-probs of transformers' generate differ by {gap:.2g} nats from those of "
            "one forward pass over the same tokens"
        )
    wrapped.limit_vocabulary(tokens)
    return wrapped
