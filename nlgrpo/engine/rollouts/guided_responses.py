"""Responses by guided search: load value models, search, and choose one of the candidates."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nlgrpo.data.prompt_dataset import Prompt, encode
from nlgrpo.data.retokenize import Retokenizer
from nlgrpo.engine import guided_search
from nlgrpo.engine.chunked_decoding import ModelValue, Prefixes
from nlgrpo.engine.generation import Rollout
from nlgrpo.engine.guided_search import Candidate, Cost, Search, Value
from nlgrpo.engine.rollouts.sampler import decode
from nlgrpo.engine.rollouts.store import digest_of_model, digest_of_tokenizer, same_ids
from nlgrpo.engine.sampling import Sampling
from nlgrpo.engine.transformers_backend import TransformersModel
from nlgrpo.model import reward_model
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.packing import bins
from nlgrpo.model.reward_model import score as score_head
from nlgrpo.model.tokenizer import load_tokenizer
from nlgrpo.model.value_model import as_values, kind_of, share_weights
from nlgrpo.rewards import reward_functions
from nlgrpo.rewards.builtin import vote
from nlgrpo.rewards.reward_functions import Reward, RewardError
from nlgrpo.runtime import atomic_files

VALUE, MAJORITY = "value", "majority"


@dataclass(frozen=True)
class Chooser:
    """Chooses the response among the candidates of a prompt.

    ``how``: "value" chooses the candidate with the largest V; "majority" the first one with the most frequent final
    answer (extracted by `builtin.vote`, such as the content of ``\\boxed{}``); a reward, written as in a configuration,
    the one with the largest reward. The first of ties wins. Raises ValueError for a reward that does not exist.
    """

    how: str
    reward: Reward | None = None

    @classmethod
    def of(cls, how: str, device: str | torch.device = "cpu") -> Chooser:
        return cls(how, None if how in (VALUE, MAJORITY) else reward_functions.load("choose", how, device=device))

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate], texts: Sequence[str]) -> tuple[int, float]:
        """Return the index of the chosen candidate and its score: V, share of the votes, or reward.

        Raises ValueError if the reward fails, or is NaN or None for all candidates.
        """
        if self.how == MAJORITY:
            return majority([vote(text) for text in texts], [candidate.places for candidate in candidates])
        scores = [candidate.value for candidate in candidates]
        if self.reward is not None:
            scores = _rewards(self.reward, prompt, candidates, texts)
        scored = [i for i, score in enumerate(scores) if not math.isnan(score)]
        if not scored:
            raise ValueError(f"{self.how} is NaN for all candidates of the prompt {prompt!r}")
        best = max(scored, key=lambda i: scores[i])
        return best, scores[best]


def majority(answers: Sequence[Hashable | None], weights: Sequence[float]) -> tuple[int, float]:
    """Weighted majority vote (self-consistency, Wang et al. 2023).

    Returns the index of the first candidate with the winning answer, and the answer's share of the total weight. The
    first of tied answers wins. ``None`` does not vote; if all answers are None, returns (0, 0.0).
    """
    votes: Counter[Hashable] = Counter()
    for answer, weight in zip(answers, weights, strict=True):
        if answer is not None:
            votes[answer] += weight  # type: ignore[assignment]
    if not votes:
        return 0, 0.0
    winner, weight = max(votes.items(), key=lambda item: item[1])
    return list(answers).index(winner), weight / sum(votes.values())


def _rewards(reward: Reward, prompt: Prompt, candidates: Sequence[Candidate], texts: Sequence[str]) -> list[float]:
    try:
        scores = reward_functions.score(
            [reward],
            prompts=[prompt] * len(candidates),
            completions=list(texts),
            completion_ids=[list(candidate.tokens) for candidate in candidates],
            columns={},
            samples=len(candidates),
            step=0,
            total_steps=0,
        )
    except RewardError as error:
        raise ValueError(str(error)) from error
    return [float(value) for value in scores.values[reward.name][0]]


# --- value models and guides ------------------------------------------------------------------------------------------

FILE = "guide.json"


@dataclass(frozen=True)
class Guide:
    """Value models with betas and search options, as saved in ``guide.json`` in the folder of `nlgrpo iro`."""

    values: list[Path]
    betas: list[float]
    search: Search
    compressed: Path | None = None
    """One value model trained on the sum of all values; None: not trained."""

    def digest(self) -> str:
        """Digest of the value models, betas and search."""
        models = [digest_of_value(path) for path in self.values]
        text = json.dumps([models, self.betas, self.search.settings()])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def write(self, folder: Path) -> None:
        """Write ``guide.json``. Paths below ``folder`` are relative to it, so that the folder can be moved."""

        def named(path: Path) -> str:
            return str(path.relative_to(folder) if path.is_relative_to(folder) else path.resolve())

        data = {"values": [*map(named, self.values)], "betas": self.betas, "search": asdict(self.search)}
        data |= {"compressed": self.compressed and named(self.compressed)}
        atomic_files.atomic_write(folder / FILE, json.dumps(data, indent=1) + "\n")


def read_guide(folder: Path) -> Guide | None:
    """Read the guide in ``folder``, the folder of `nlgrpo iro`.

    For the folder of an iteration or of its value model, returns that value model with the search options of the loop.
    Returns None for other folders. Raises ValueError for a damaged file and for an unfinished loop.
    """
    path = folder / FILE
    if not path.is_file():
        if (folder / "iteration-1").is_dir():
            raise ValueError(f"{folder} belongs to an `nlgrpo iro` that has not finished; run it again to resume")
        loop = next((above for above in folder.absolute().parents[:3] if (above / FILE).is_file()), None)
        guide = loop and read_guide(loop)
        model = folder / "value" if (folder / "value").is_dir() else folder
        return Guide([model], [1.0], guide.search) if guide else None
    try:
        data = json.loads(path.read_text("utf-8"))
        betas = [float(beta) for beta in data["betas"]]
        compressed = folder / data["compressed"] if data["compressed"] else None
        return Guide([folder / name for name in data["values"]], betas, Search(**data["search"]), compressed)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}); run the same `nlgrpo iro` to write it again") from error


def folder_of(path: Path) -> Path:
    """Return the Hugging Face directory of a value model; ``path`` may be an iteration of `nlgrpo iro`.

    Raises ValueError if there is no model, and for a checkpoint of a run.
    """
    inner = path / "value"
    folder, checkpoint = reward_model.locate(
        str(inner if inner.is_dir() and not (path / "config.json").is_file() else path)
    )
    if checkpoint is not None:
        raise ValueError(f"{path} is a checkpoint; finish its run, then use the folder of the run")
    return folder


def digest_of_value(path: Path) -> str:
    """Digest of a value model: weights and tokenizer."""
    folder = folder_of(path)
    return f"{digest_of_model(folder)}-{digest_of_tokenizer(load_tokenizer(folder))}"


def load_values(
    paths: Sequence[Path],
    betas: Sequence[float],
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> list[tuple[Value, float]]:
    """Load the value models in ``paths`` (runs, directories or hub names), with ``betas`` (default: 1 each).

    ``tokenizer`` and ``sampling`` are those of the policy. ``dtype`` is the compute dtype; the values are at least
    float32. A model with another tokenizer becomes a `TextValue`. Weights equal to the first model's are stored once.
    Raises ValueError for a model without a scalar head, and if the numbers of betas and models differ.
    """
    if betas and len(betas) != len(paths):
        raise ValueError(
            f"{len(betas)} betas for {len(paths)} value models: expected one per model, or none for 1 each"
        )
    found: list[tuple[Value, float]] = []
    for path, beta in zip(paths, betas or [1.0] * len(paths), strict=True):
        folder = folder_of(path)
        model, trained = reward_model.load(str(folder), dtype=dtype, device=device)
        if not trained:
            raise ValueError(f"{path} is not a value model: it has no scalar head")
        name, model, theirs = str(path), model.eval(), load_tokenizer(folder)
        if same_ids(theirs, tokenizer):
            found.append((ModelValue(name, model, sampling.max_new_tokens), beta))
        else:
            found.append((TextValue(name, model, Retokenizer(tokenizer, theirs, sampling.stop_ids)), beta))
    share_weights([value.model for value, _ in found if isinstance(value, ModelValue | TextValue)])
    return found


BY_TEXT = " (another tokenizer: reads the text of every candidate at every chunk, slower; its context's last tokens)"


def note(folder: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a note for the log if the value model in ``folder`` has another tokenizer than the policy; else ""."""
    return "" if same_ids(load_tokenizer(folder), tokenizer) else BY_TEXT


class TextValue(Prefixes):
    """Value model with another tokenizer than the policy: it reads the text of each candidate again at each chunk.

    It has no KV cache, because the last tokens of a text can change when the text grows. Texts longer than the model's
    context lose their beginning, because their number of tokens is not known in advance.
    """

    MICRO_BATCH = 16384  # tokens per forward pass

    def __init__(self, name: str, model: Decoder, retokenizer: Retokenizer) -> None:
        self.name, self.model, self.retokenizer = name, model, retokenizer
        self.models = [model]

    def score(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> Tensor:
        self.grow(rows, chunks)
        context = self.model.shape.context
        texts = [self.retokenizer.whole(self.prompts[p], tokens)[-context:] for p, tokens in self.rows]
        device = self.model.head_weight.device
        values = torch.empty(len(texts), dtype=torch.promote_types(self.model.head_weight.dtype, torch.float32))
        for part in bins(dict(enumerate(map(len, texts))), self.MICRO_BATCH):
            lengths = [len(texts[i]) for i in part]
            tokens = torch.tensor([token for i in part for token in texts[i]], device=device)
            last = torch.tensor(lengths, device=device).cumsum(0) - 1
            values[part] = as_values(self.model(tokens, lengths, last, score_head)[:, 0], kind_of(self.model)).cpu()
        return values


# --- responses --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Response:
    """Chosen candidate of a prompt, with its text and the score that the choice is based on."""

    candidate: Candidate
    text: str
    score: float


def as_rollout(prompt_ids: Sequence[Sequence[int]], found: Sequence[Sequence[Candidate]]) -> Rollout:
    """Convert candidates to a rollout. Each is repeated ``places`` times, which gives U completions per prompt."""
    rows = [[candidate for candidate in candidates for _ in range(candidate.places)] for candidates in found]
    flat, samples = [candidate for row in rows for candidate in row], len(rows[0])
    rollout = padded(prompt_ids, [candidate.tokens for candidate in flat], samples)
    for row, candidate in zip(rollout.logprobs.flatten(0, 1), flat, strict=True):
        row[: len(candidate.tokens)] = torch.tensor(candidate.logprobs)
    finished = torch.tensor([candidate.finished for candidate in flat]).view(-1, samples)
    return replace(rollout, finished=finished)


def padded(prompt_ids: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], samples: int) -> Rollout:
    """Build a rollout of ``samples`` completions per prompt, sorted by prompt. Log-probs are 0, none is finished."""
    lengths = torch.tensor([len(ids) for ids in completions])
    tokens = torch.zeros(len(completions), int(lengths.max()), dtype=torch.int64)
    for row, ids in zip(tokens, completions, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    shape = (-1, samples)
    logprobs = torch.zeros(tokens.shape).unflatten(0, shape)
    lengths = lengths.view(shape)
    return Rollout([list(ids) for ids in prompt_ids], tokens.unflatten(0, shape), logprobs, lengths, lengths < 0)


def respond(
    model: Decoder | TransformersModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    how: Search,
    sampling: Sampling,
    values: Sequence[tuple[Value, float]],
    chooser: Chooser,
    *,
    seed: int = 0,
    max_rows: int = 256,
) -> tuple[list[Response], Cost]:
    """Search and choose a response for each prompt. Returns responses and total cost.

    Raises the errors of `guided_search.search` and `Chooser.choose`.
    """
    if chooser.how == VALUE and not values:
        raise ValueError("--choose value needs a value model: set one, or choose by majority or a reward")
    ids = encode(tokenizer, prompts)
    valued = chooser.how == VALUE
    found, cost = guided_search.search(model, ids, how, sampling, values, seed=seed, max_rows=max_rows, valued=valued)
    responses = []
    for prompt, start, candidates in zip(prompts, ids, found, strict=True):
        texts = decode(tokenizer, [start] * len(candidates), [c.tokens for c in candidates])
        best, score = chooser.choose(prompt, candidates, texts)
        responses.append(Response(candidates[best], texts[best], score))
    return responses, cost
