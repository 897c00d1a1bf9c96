"""Hugging Face sequence classifiers as rewards: one, or an ensemble."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nlgrpo.data.conversations import ChatOptions, answered, is_continued, text_of
from nlgrpo.data.encoding import ids_to_score
from nlgrpo.errors import UserError
from nlgrpo.model import hf_weights
from nlgrpo.rewards.builtin import path_of


@dataclass(frozen=True)
class TextEncoder:
    """Token ids of prompt + completion for a classifier.

    Strings are concatenated; the chat template is applied to conversations, whose messages are joined by line breaks
    without one. ``include_prompt=False``: the completion alone. ``append_eos``: end with EOS, except after a template.
    """

    tokenizer: Any
    max_length: int | None
    include_prompt: bool = True
    append_eos: bool = True

    def ids(self, prompt: Any, completion: Any) -> list[int]:
        chat = self.include_prompt and not isinstance(prompt, str) and self.tokenizer.chat_template is not None
        if chat:
            messages = answered(prompt, completion)
            text = ChatOptions().text(self.tokenizer, messages, "a conversation to score", whole=True)
        else:
            text = self._join(prompt, completion)
        return ids_to_score(self.tokenizer, text, self.max_length, templated=chat, append_eos=self.append_eos)

    def _join(self, prompt: Any, completion: Any) -> str:
        if not self.include_prompt:
            return text_of(completion)
        return ("" if is_continued(prompt) else "\n").join((text_of(prompt), text_of(completion)))


class Classifier:
    """Output of a Hugging Face sequence classifier (a reward model) for prompt + completion.

    ``path``: a folder that ``AutoModelForSequenceClassification`` loads, with its tokenizer; safetensors only, no
    remote code. A single output is returned unchanged (``probability=True``: its sigmoid). Of several outputs,
    ``label`` selects one by name or number: its logit, or its softmax with ``probability=True``.

    Strings are concatenated, followed by the tokenizer's end-of-sequence token if it has one (``append_eos``). The chat
    template is applied to conversations; without a template their messages are joined by line breaks.
    ``include_prompt=False`` scores the text of the completion alone. Texts longer than ``max_length`` tokens (default:
    the limit of tokenizer and model) lose their beginning. Abstains (None) for a text without tokens.

    ``dtype="float32"`` makes scores independent of ``batch_size`` up to rounding; ``"bfloat16"`` halves the memory.

    Raises UserError for a folder without such a model, weights without a trained head, and arguments out of range.
    """

    def __init__(
        self,
        path: str,
        batch_size: int = 64,
        label: str | int | None = None,
        probability: bool = False,
        include_prompt: bool = True,
        append_eos: bool = True,
        max_length: int | None = None,
        dtype: Literal["float32", "float16", "bfloat16"] = "float32",
        device: str = "cpu",
    ) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise UserError(f"batch_size must be an integer >= 1, got {batch_size!r}")
        if dtype not in ("float32", "float16", "bfloat16"):
            raise UserError(f"dtype must be 'float32', 'float16' or 'bfloat16', got {dtype!r}")
        self.model, self.tokenizer = _load_classifier(path_of(path), getattr(torch, dtype))
        self.model.to(device).eval()
        self.output = _output_index(self.model.config, label, path)
        self.probability = probability
        limit = _length_limit(self.model, self.tokenizer, max_length)
        self.encoder = TextEncoder(self.tokenizer, limit, include_prompt=include_prompt, append_eos=append_eos)

        config = self.model.config.get_text_config()
        if config.pad_token_id is None:
            config.pad_token_id = self.tokenizer.pad_token_id
        # A decoder scores the last token of a row that is not its config's padding id: pad with that id, not with the
        # tokenizer's. Without one it can only score single rows.
        self.pad = config.pad_token_id
        self.batch_size = 1 if self.pad is None else batch_size

    @property
    def nbytes(self) -> int:
        """Memory of the weights, in bytes."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float | None]:
        rows = [self.encoder.ids(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        scores: list[float | None] = [None] * len(rows)
        order = sorted((i for i in range(len(rows)) if rows[i]), key=lambda i: len(rows[i]))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            for i, value in zip(batch, self._score([rows[i] for i in batch]).tolist(), strict=True):
                scores[i] = value
        return scores

    def _score(self, rows: list[list[int]]) -> Tensor:
        """Scores (B,) of B rows of ids, padded on the right, in float32."""
        width = max(map(len, rows))
        ids = torch.tensor([row + [self.pad or 0] * (width - len(row)) for row in rows])
        mask = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
        logits = self.model(ids.to(self.model.device), attention_mask=mask.long().to(self.model.device)).logits.float()
        if not self.probability:
            return logits[:, self.output]
        return logits.sigmoid()[:, 0] if logits.shape[1] == 1 else logits.softmax(1)[:, self.output]


class Ensemble:
    """Ensemble of classifiers: the ``mean`` or the ``min`` of their outputs.

    Coste et al. (2024), "Reward model ensembles help mitigate overoptimization", 3: mean optimisation and worst-case
    optimisation. ``options`` are options of ``classifier`` for all members. Outputs are not rescaled: train the members
    alike, with different seeds (``nlgrpo reward-model train --train.seed``).

    Abstains (None) if a member abstains. Raises UserError for empty ``paths``, another ``how``, and as ``classifier``.
    """

    def __init__(self, paths: Sequence[str], how: Literal["mean", "min"] = "mean", **options: Any) -> None:
        if isinstance(paths, str) or not isinstance(paths, list | tuple) or not paths:
            raise UserError(f"paths must be a list of model folders, such as ['a', 'b'], got {paths!r}")
        if how not in ("mean", "min"):
            raise UserError(f"how must be 'mean' or 'min', got {how!r}")
        taken = [name for name in inspect.signature(Classifier).parameters if name != "path"]
        unknown = [name for name in options if name not in taken]
        if unknown:
            raise UserError(f"ensemble does not take {unknown[0]!r}; it takes: paths, how, {', '.join(taken)}")
        self.members = [Classifier(path, **options) for path in paths]
        self.how = how

    @property
    def nbytes(self) -> int:
        """Memory of all members' weights, in bytes."""
        return sum(member.nbytes for member in self.members)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float | None]:
        by_completion = zip(*(member(prompts, completions) for member in self.members), strict=True)
        return [self._combine([score for score in scores if score is not None]) for scores in by_completion]

    def _combine(self, scores: list[float]) -> float | None:
        if len(scores) < len(self.members):
            return None
        if any(map(math.isnan, scores)):
            return math.nan  # min() would depend on the order
        return min(scores) if self.how == "min" else math.fsum(scores) / len(scores)


def _load_classifier(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load model and tokenizer from a folder. Raises UserError if that fails or if the file has no head."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer  # slow to import

    if not os.path.isfile(path / "config.json"):
        raise UserError(
            f"{str(path)!r} is not a Hugging Face model folder: it has no config.json (looked from {Path.cwd()})"
        )
    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True, truncation_side="left"
        )
    except OSError as error:
        raise UserError(f"cannot read a classifier and its tokenizer from {str(path)!r}: {error}") from error
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"]))
        advice = ""
        if "score.weight" not in missing:  # trained, but transformers does not find all weights
            advice = (
                "\n  If a tied model is stored under the name of its lm_head, nlgrpo reward-model train --model.path "
                "loads it and saves all weights."
            )
        raise UserError(
            f"{str(path)!r} is not a trained classifier: its weights lack {missing}, which would be random{advice}"
        )
    hf_weights.check_unexpected(path, model, report["unexpected_keys"])
    return model, tokenizer


def _output_index(config: Any, label: str | int | None, path: str) -> int:
    """Return the index of the output ``label``. Raises UserError for an unknown one."""
    names = [str(config.id2label[i]) for i in range(config.num_labels)]
    if label is None and len(names) == 1:
        return 0
    if isinstance(label, int) and 0 <= label < len(names):
        return label
    if label not in names:
        raise UserError(f"{path!r} has the outputs {', '.join(names)}; choose one with label=..., got label={label!r}")
    return names.index(str(label))


def _length_limit(model: Any, tokenizer: Any, requested: int | None) -> int | None:
    """Return ``requested``, or by default the limit of model and tokenizer; None if neither has one.

    Without a limit, a tokenizer's is 1e30 and a model's is missing. Raises UserError for more tokens than the model
    has positions.
    """
    if requested is not None:
        if not isinstance(requested, int) or requested < 2:
            raise UserError(f"max_length must be an integer >= 2, got {requested!r}")
        if requested > (most := _learned_positions(model)):
            raise UserError(f"max_length = {requested}, but the model has only {most:.0f} learned positions")
        return requested
    configured = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    positions = min(configured, _learned_positions(model))
    limit = min(tokenizer.model_max_length, positions)
    return int(limit) if limit < 1e9 else None


def _learned_positions(model: Any) -> float:
    """Maximum text length of the position embeddings. RoBERTa and relatives start after the padding's position."""
    modules = [module for name, module in model.named_modules() if name.endswith(("position_embeddings", "wpe"))]
    tables = [module for module in modules if isinstance(module, torch.nn.Embedding)]
    starts = [0 if table.padding_idx is None else table.padding_idx + 1 for table in tables]
    return min((table.num_embeddings - start for table, start in zip(tables, starts, strict=True)), default=math.inf)
