"""Value models that guide a search: load them, and read and write the guide of `nlgrpo iro`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nlgrpo.data.encoding import BROKEN
from nlgrpo.engine.chunked_decoding import ModelValue, Prefixes
from nlgrpo.engine.guided_search import Search, Value
from nlgrpo.engine.rollouts.store import digest_of_model, digest_of_tokenizer, same_ids
from nlgrpo.engine.sampling import Sampling
from nlgrpo.errors import UserError
from nlgrpo.model import reward_model
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.packing import bins
from nlgrpo.model.reward_model import score as score_head
from nlgrpo.model.tokenizer import load_tokenizer
from nlgrpo.model.value_model import as_values, kind_of, share_weights
from nlgrpo.runtime import atomic_files

GUIDE_FILE = "guide.json"


@dataclass(frozen=True)
class Retokenizer:
    """Converts token ids of ``source`` to token ids of ``target``, by way of the text.

    The text of prompt and completion is decoded together, without ``source``'s special tokens and without an incomplete
    character at its end. ``target`` adds its usual tokens before the text, and its EOS after a completion that ends in
    one of the ``stops`` (ids of ``source``).
    """

    source: PreTrainedTokenizerBase
    target: PreTrainedTokenizerBase
    stops: Sequence[int]

    def whole(self, prompt: Sequence[int], completion: Sequence[int]) -> list[int]:
        """Convert prompt and completion. Raises UserError if their text has no token."""
        ids = self._ids([*prompt, *completion])
        end = self.target.eos_token_id
        if not ids:
            raise UserError(
                "prompt and completion are an empty text, for which the value model's tokenizer has no token"
            )
        ended = completion and completion[-1] in self.stops and end is not None
        return [*ids, end] if ended else ids

    def parts(self, prompt: Sequence[int], completion: Sequence[int]) -> tuple[list[int], list[int]]:
        """Split `whole` into the ids of the prompt, at least one, and those of the completion.

        A token with letters of both belongs to the completion.
        """
        whole = self.whole(prompt, completion)
        prompt_ids = self._ids(prompt)
        shared = next((i for i, (a, b) in enumerate(zip(prompt_ids, whole, strict=False)) if a != b), len(prompt_ids))
        return whole[: max(shared, 1)], whole[max(shared, 1) :]

    def _ids(self, tokens: Sequence[int]) -> list[int]:
        text = str(self.source.decode(list(tokens), skip_special_tokens=True)).rstrip(BROKEN)
        ids: list[int] = self.target(text, verbose=False).input_ids
        has_eos = len(ids) > 1 and ids[-1] == self.target.eos_token_id  # some tokenizers add it to every text
        return ids[:-1] if has_eos else ids


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
        atomic_files.atomic_write(folder / GUIDE_FILE, json.dumps(data, indent=1) + "\n")


def read_guide(folder: Path) -> Guide | None:
    """Read the guide in ``folder``, the folder of `nlgrpo iro`.

    For the folder of an iteration or of its value model, returns that value model with the search options of the loop.
    Returns None for other folders. Raises UserError for a damaged file and for an unfinished loop.
    """
    path = folder / GUIDE_FILE
    if not path.is_file():
        if (folder / "iteration-1").is_dir():
            raise UserError(f"{folder} belongs to an `nlgrpo iro` that has not finished; run it again to resume")
        loop = next((above for above in folder.absolute().parents[:3] if (above / GUIDE_FILE).is_file()), None)
        guide = loop and read_guide(loop)
        model = folder / "value" if (folder / "value").is_dir() else folder
        return Guide([model], [1.0], guide.search) if guide else None
    try:
        data = json.loads(path.read_text("utf-8"))
        betas = [float(beta) for beta in data["betas"]]
        compressed = folder / data["compressed"] if data["compressed"] else None
        return Guide([folder / name for name in data["values"]], betas, Search(**data["search"]), compressed)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error!r}); run the same `nlgrpo iro` to write it again") from error


def folder_of(path: Path) -> Path:
    """Return the Hugging Face directory of a value model; ``path`` may be an iteration of `nlgrpo iro`.

    Raises UserError if there is no model, and for a checkpoint of a run.
    """
    inner = path / "value"
    folder, checkpoint = reward_model.locate(
        str(inner if inner.is_dir() and not (path / "config.json").is_file() else path)
    )
    if checkpoint is not None:
        raise UserError(f"{path} is a checkpoint; finish its run, then use the folder of the run")
    return folder


def digest_of_value(path: Path) -> str:
    """Digest of a value model: weights and tokenizer."""
    folder = folder_of(path)
    return f"{digest_of_model(folder)}-{digest_of_tokenizer(load_tokenizer(folder))}"


def digest_of_guide(path: Path) -> str:
    """Digest of a guide, or of a single value model."""
    guide = read_guide(path)
    return digest_of_value(path) if guide is None else guide.digest()


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
    Raises UserError for a model without a scalar head, and if the numbers of betas and models differ.
    """
    if betas and len(betas) != len(paths):
        raise UserError(f"{len(betas)} betas for {len(paths)} value models: expected one per model, or none for 1 each")
    found: list[tuple[Value, float]] = []
    for path, beta in zip(paths, betas or [1.0] * len(paths), strict=True):
        folder = folder_of(path)
        model, trained = reward_model.load_reward_model(str(folder), dtype=dtype, device=device)
        if not trained:
            raise UserError(f"{path} is not a value model: it has no scalar head")
        name = str(path)
        model = model.eval()
        theirs = load_tokenizer(folder)
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
        self.name = name
        self.model = model
        self.retokenizer = retokenizer
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
