"""Built-in rewards: length, word list, regular expression, GSM8K answer, Hugging Face classifiers.

Each is a class, which `reward_functions.load` builds once from the arguments in its spec. The instance is called at
every step like a user's function, with TRL's signature: lists over the P*M completions in, one float or None each out.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nlgrpo.data.encoding import ids_to_score
from nlgrpo.data.prompt_dataset import text_of


def _path(value: object) -> Path:
    if not isinstance(value, str | Path):
        raise ValueError(f"path must be a string in quotes, got {value!r}")
    return Path(os.path.expanduser(value))


@dataclass(frozen=True)
class Length:
    """Negative squared distance to a target length (IAMA, 6.1, where ``scale`` is the maximum length).

        r(y) = -((|y| - target) / scale)^2

    |y| is the number of tokens of the completion, including a sampled end-of-sequence token. The maximum is 0.
    Raises ValueError for a non-finite ``target`` or ``scale``, and for ``scale`` <= 0.
    """

    target: float
    scale: float

    def __post_init__(self) -> None:
        for name, value in (("target", self.target), ("scale", self.scale)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
                raise ValueError(f"{name} must be a number of tokens, got {value!r}")
        if self.scale <= 0:
            raise ValueError(f"scale must be above 0 (the maximum length is a good one), got {self.scale}")

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [-(((len(ids) - self.target) / self.scale) ** 2) for ids in completion_ids]


class Lexicon:
    """Score of the words of a lexicon that occur in the completion, in (-1, 1); 0 if none does.

        s / sqrt(s^2 + 15), with s the sum of the scores

    This is the normalisation of VADER's compound score, without VADER's heuristics (negation, boosters, capitals).
    ``normalize="mean"`` returns the mean score of the words instead, in the units of the file.

    ``path``: a text file (UTF-8) with lines ``word<TAB>score``; further columns are ignored. Case and punctuation
    around a word do not matter; if entries differ only in case, the last one counts. A hyphenated word that is not in
    the file counts by its parts. Entries with spaces or signs match literally: "fed up", ":)".

    Raises ValueError for a missing or empty file, a line without a finite score, and another ``normalize``.
    """

    def __init__(self, path: str, normalize: Literal["compound", "mean"] = "compound") -> None:
        if normalize not in ("compound", "mean"):
            raise ValueError(f"normalize must be 'compound' or 'mean', got {normalize!r}")
        self.normalize = normalize
        self.scores = _read_lexicon(_path(path))
        phrases = [entry for entry in self.scores if not re.fullmatch(r"[\w'-]+", entry)]
        # Phrases come before words, and longer phrases before their beginnings: ":-))" is not ":-)" and a bracket.
        units = [_phrase_pattern(entry) for entry in sorted(phrases, key=len, reverse=True)] + [r"[\w'-]+"]
        self.unit = re.compile("|".join(units))

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        return [self._score(text_of(completion)) for completion in completions]

    def _score(self, text: str) -> float:
        scores = [score for unit in self.unit.findall(text.lower().replace("’", "'")) for score in self._lookup(unit)]
        total = math.fsum(scores)
        if self.normalize == "mean":
            return total / max(len(scores), 1)
        return total / math.sqrt(total * total + 15)

    def _lookup(self, unit: str) -> list[float]:
        word = unit if unit in self.scores else unit.strip("_'-")
        parts = [word] if word in self.scores else word.split("-")
        return [self.scores[part] for part in parts if part in self.scores]


def _read_lexicon(path: Path) -> dict[str, float]:
    """Read a ``word<TAB>score`` file into ``{lower-case entry: score}``."""
    if not os.path.isfile(path):
        raise ValueError(f"there is no lexicon file {str(path)!r} (looked from {Path.cwd()})")
    scores: dict[str, float] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            scores[line.split("\t")[0].strip().lower()] = _lexicon_score(line, f"{path}, line {number}")
    if not scores:
        raise ValueError(f"the lexicon {str(path)!r} is empty; expected a line 'word<TAB>score' for each word")
    return scores


def _lexicon_score(line: str, where: str) -> float:
    fields = line.split("\t")
    try:
        score = float(fields[1])
    except (IndexError, ValueError):
        score = math.nan
    if not math.isfinite(score) or not fields[0].strip():
        raise ValueError(f"{where}: expected 'word<TAB>score', got {line[:80]!r}")
    return score


def _phrase_pattern(phrase: str) -> str:
    """Pattern of a phrase on its own: "fed up" not in "fed upon", ":/" not in "http://", but ":)" in "great:)"."""
    before = r"(?<!\w)" if re.match(r"\w", phrase) else r"(?<![^\w\s\"'(.,!?])"
    after = r"(?!\w)" if re.search(r"\w$", phrase) else r"(?=[\s\"').,!?;]|$)"
    return before + re.escape(phrase) + after


class Regex:
    """1.0 if ``pattern`` occurs in the completion (``full=True``: matches all of it), else 0.0.

    A dot also matches a line break. Raises ValueError for a pattern that does not compile.
    """

    def __init__(self, pattern: str, full: bool = False) -> None:
        try:
            compiled = re.compile(pattern, re.DOTALL)
        except (re.error, TypeError) as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        self.match: Callable[[str], re.Match[str] | None] = compiled.fullmatch if full else compiled.search

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(self.match(text_of(completion)) is not None) for completion in completions]


@dataclass(frozen=True)
class Gsm8k:
    """1.0 if the final answer of the completion equals that of ``column``, else 0.0.

    `final_answer` extracts both. Abstains (None) if the column has no number. Raises ValueError if the data do not have
    the column.
    """

    column: str = "answer"

    @property
    def data_columns(self) -> tuple[str, ...]:
        """Required columns of the data."""
        return (self.column,)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        if self.column not in columns:
            raise ValueError(f"gsm8k(column={self.column!r}) needs a column {self.column!r} in the data")
        golds = [final_answer(str(gold)) for gold in columns[self.column]]  # floats too: "5e-05" is valid
        answers = [final_answer(text_of(completion)) for completion in completions]
        return [None if gold is None else float(gold == answer) for gold, answer in zip(golds, answers, strict=True)]

    def answer(self, text: str) -> Decimal | None:
        """Return the answer of a completion for majority voting."""
        return final_answer(text)


# Digits with commas, a decimal part, a denominator. A minus is a sign unless it follows a term: "16-3" is 16 and 3.
# The decimal point needs digits after it, so a full stop is not part of the number.
_DIGITS = r"(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
_NUMBER = re.compile(rf"((?<![\w)])[-−])?\\?\$?({_DIGITS})(?:/({_DIGITS}))?")


def final_answer(text: str) -> Decimal | None:
    r"""Extract the final number of a solution, or None if it has none.

    It is the first number of the line after the last ``####`` (GSM8K's format); without ``####`` the last number in the
    last ``\boxed{}``; without a box the last number. Reads "$1,234.50", "72." as "72.0", "-$5", "3/4", "\frac{3}{4}"
    and "5e-05".
    """
    text = _plain(text)
    _, marker, tail = text.rpartition("####")
    if marker:
        return next(iter(_numbers(tail.strip().partition("\n")[0])), None)
    numbers = _numbers(_last_boxed(text))
    return numbers[-1] if numbers else None


def vote(text: str) -> Decimal | str | None:
    r"""Return the answer of a solution for majority voting: the content of its last ``\boxed{}``, else `final_answer`.

    A box with a single number, apart from ``x =``, ``$``, ``%`` and ``\text{..}``, gives the number. Any other box
    gives its text without white space, so ``x+1`` and ``2x+1``, or ``2`` and ``x^2``, are different answers.
    """
    boxed = _last_boxed(text)
    if boxed == text or "####" in text:
        return final_answer(text)
    bare = re.sub(r"^\s*[A-Za-z]\s*=|\\?[$%]|\\(?:text|mathrm)\{[^{}]*\}", "", _plain(boxed)).strip()
    several = re.search(r",(?!\d{3}(?!\d))", bare)  # 1,2 is several, 1,200 is one
    number = _numbers(bare) if _NUMBER.fullmatch(bare) and not several else []
    return number[0] if number else "".join(boxed.split()) or None


def _plain(text: str) -> str:
    """Rewrite ``\\frac{3}{4}`` as 3/4, and drop the braces and thin spaces of thousands."""
    return re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text.replace("{,}", ",").replace(r"\,", ""))


def _numbers(text: str) -> list[Decimal]:
    # Decimal, because int rejects the thousands of digits that an untrained model may write.
    numbers = []
    for sign, digits, denominator in _NUMBER.findall(text):
        value = Decimal(("-" if sign else "") + digits.replace(",", ""))
        divisor = Decimal(denominator.replace(",", "") or 1)
        if divisor != 0:
            numbers.append(value if divisor == 1 else value / divisor)
    return numbers


def _last_boxed(text: str) -> str:
    r"""Return the content of the last ``\boxed{}`` with balanced braces; without one, the full text."""
    _, marker, tail = text.rpartition(r"\boxed{")
    if not marker:
        return text
    depth = 1
    for position, letter in enumerate(tail):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return tail[:position]
    return tail


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

    Raises ValueError for a folder without such a model, weights without a trained head, and arguments out of range.
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
            raise ValueError(f"batch_size must be an integer >= 1, got {batch_size!r}")
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"dtype must be 'float32', 'float16' or 'bfloat16', got {dtype!r}")
        self.model, self.tokenizer = _load_classifier(_path(path), getattr(torch, dtype))
        self.model.to(device).eval()
        self.output = _output_index(self.model.config, label, path)
        self.probability, self.include_prompt, self.append_eos = probability, include_prompt, append_eos
        self.max_length = _length_limit(self.model, self.tokenizer, max_length)

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
        rows = [self._tokenize(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        scores: list[float | None] = [None] * len(rows)
        order = sorted((i for i in range(len(rows)) if rows[i]), key=lambda i: len(rows[i]))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            for i, value in zip(batch, self._score([rows[i] for i in batch]).tolist(), strict=True):
                scores[i] = value
        return scores

    def _tokenize(self, prompt: Any, completion: Any) -> list[int]:
        chat = self.include_prompt and not isinstance(prompt, str) and self.tokenizer.chat_template is not None
        if chat:
            text = self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
        else:
            text = self._join(prompt, completion)
        return ids_to_score(self.tokenizer, text, self.max_length, templated=chat, append_eos=self.append_eos)

    def _join(self, prompt: Any, completion: Any) -> str:
        if not self.include_prompt:
            return text_of(completion)
        return ("" if isinstance(prompt, str) else "\n").join((text_of(prompt), text_of(completion)))

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

    Abstains (None) if a member abstains. Raises ValueError for empty ``paths``, another ``how``, and as ``classifier``.
    """

    def __init__(self, paths: Sequence[str], how: Literal["mean", "min"] = "mean", **options: Any) -> None:
        if isinstance(paths, str) or not isinstance(paths, list | tuple) or not paths:
            raise ValueError(f"paths must be a list of model folders, such as ['a', 'b'], got {paths!r}")
        if how not in ("mean", "min"):
            raise ValueError(f"how must be 'mean' or 'min', got {how!r}")
        taken = [name for name in inspect.signature(Classifier).parameters if name != "path"]
        unknown = [name for name in options if name not in taken]
        if unknown:
            raise ValueError(f"ensemble does not take {unknown[0]!r}; it takes: paths, how, {', '.join(taken)}")
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
        return min(scores) if self.how == "min" else math.fsum(scores) / len(scores)


def _load_classifier(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load model and tokenizer from a folder. Raises ValueError if that fails or if the file has no head."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer  # slow to import

    if not os.path.isfile(path / "config.json"):
        raise ValueError(
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
        raise ValueError(f"cannot read a classifier and its tokenizer from {str(path)!r}: {error}") from error
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"]))
        advice = ""
        if "score.weight" not in missing:  # trained, but transformers does not find all weights
            advice = (
                "\n  If a tied model is stored under the name of its lm_head, nlgrpo reward-model train --model.path "
                "loads it and saves all weights."
            )
        raise ValueError(
            f"{str(path)!r} is not a trained classifier: its weights lack {missing}, which would be random{advice}"
        )
    return model, tokenizer


def _output_index(config: Any, label: str | int | None, path: str) -> int:
    """Return the index of the output ``label``. Raises ValueError for an unknown one."""
    names = [str(config.id2label[i]) for i in range(config.num_labels)]
    if label is None and len(names) == 1:
        return 0
    if isinstance(label, int) and 0 <= label < len(names):
        return label
    if label not in names:
        raise ValueError(f"{path!r} has the outputs {', '.join(names)}; choose one with label=..., got label={label!r}")
    return names.index(str(label))


def _length_limit(model: Any, tokenizer: Any, requested: int | None) -> int | None:
    """Return ``requested``, or by default the limit of model and tokenizer; None if neither has one.

    Without a limit, a tokenizer's is 1e30 and a model's is missing. Raises ValueError for more tokens than the model
    has positions.
    """
    if requested is not None:
        if not isinstance(requested, int) or requested < 2:
            raise ValueError(f"max_length must be an integer >= 2, got {requested!r}")
        if requested > (most := _learned_positions(model)):
            raise ValueError(f"max_length = {requested}, but the model has only {most:.0f} learned positions")
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


BUILTIN: dict[str, type] = {
    "length": Length, "lexicon": Lexicon, "regex": Regex, "gsm8k": Gsm8k, "classifier": Classifier,
    "ensemble": Ensemble,
}  # fmt: skip
