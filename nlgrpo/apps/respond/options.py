"""Options of the commands that respond to prompts, and the responder that they describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from nlgrpo.apps.respond.choosing import MAJORITY, VALUE, Chooser
from nlgrpo.apps.respond.procedures import Procedure
from nlgrpo.apps.respond.responder import Model, Responder
from nlgrpo.data.conversations import ChatOptions
from nlgrpo.engine import as_trained, guides, transformers_backend
from nlgrpo.engine.as_trained import AsTrained
from nlgrpo.engine.backends import frozen
from nlgrpo.engine.guided_search import Search, Value
from nlgrpo.engine.sampling import Sampling
from nlgrpo.errors import UserError
from nlgrpo.model import hf_weights
from nlgrpo.model.tokenizer import count_tokens, load_tokenizer, stop_ids_of
from nlgrpo.rewards import specs
from nlgrpo.runtime.device import compute_dtype
from nlgrpo.runtime.distributed import Ranks

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens")


@dataclass
class ResponderOptions:
    """Model, sampling and inference-time procedure."""

    model: str = "story-lm"
    """A Hugging Face directory or hub name, the `model` folder of a run, or the embedded "story-lm", "maze-lm" or
    "numbers-lm"."""
    procedure: str | None = None
    """Inference-time procedure: bon:N, wor:N, soft:TAU:N, maj:N, or rewind:QUANTILE:N (sample until a reward reaches
    this quantile of the reference's rewards, at most N times)."""
    choose: str | None = None
    """How the response is chosen among the candidates: by a reward, written as in a configuration:
    "lexicon(path='vader_lexicon.txt')"; by the "majority" of final answers; in a guided search also by "value", its
    default. With maj:N, a reward extracts the final answers: "gsm8k()"."""
    timeout: float = 600.0
    """Timeout of one call of the reward, in seconds."""
    max_new_tokens: int | None = None
    """Maximum number of tokens of a completion. None: as in the training of the model, else 128."""
    temperature: float | None = None
    """Sampling temperature. 0: greedy decoding. None: as in the training of the model, else 1."""
    top_k: int | None = None
    """Sample from the k most likely tokens. 0 or -1: all. None: as in the training of the model, else all."""
    top_p: float | None = None
    """Sample from the most likely tokens that have this total probability. None: as in the training of the model, else
    1."""
    min_p: float | None = None
    """Sample from tokens with at least this fraction of the probability of the most likely token. None: as in the
    training of the model, else 0."""
    as_trained: bool = True
    """Sample and prompt as in the training of the model, where no option says otherwise: the export of a run has its
    temperature, filters, number of tokens, system prompt and chat options in nlgrpo.json."""
    seed: int = 0
    """Random seed: the same seed gives the same completions."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Compute dtype. auto: bfloat16 on a GPU, float32 on a CPU."""
    max_rows: int = 256
    """Maximum number of completions that are decoded together; it limits memory."""
    engine: Literal["nlgrpo", "vllm"] = "nlgrpo"
    """Engine that samples: nlgrpo's own, or vLLM. Guided search needs nlgrpo's."""
    guide: tuple[Path, ...] = ()
    """Decode by guided search: value models of `nlgrpo value` (folders of runs), or the folder of `nlgrpo iro`."""
    betas: tuple[float, ...] = ()
    """beta_i of the value models, V = sum_i V_i / beta_i. None: those of the folder of `nlgrpo iro`, else 1 each."""
    beams: int | None = None
    """K, beams of the search. None: as in the folder of `nlgrpo iro`, else 4."""
    successors: int | None = None
    """B, chunks sampled after each beam. None: as in the folder of `nlgrpo iro`, else 4."""
    chunk: int | None = None
    """L, tokens per chunk. None: as in the folder of `nlgrpo iro`, else 16."""
    search_temperature: float | None = None
    """Above 0: sample beams in proportion to e^(V / temperature). 0: keep the best. None: as in the folder, else 0."""
    diverse: bool = True
    """Prefer distinct candidates, unless the search of the folder does not."""
    reference: str | None = None
    """Model whose rewards give the threshold of rewind. None: the model itself."""
    reference_samples: int = 64
    """Samples of the reference per prompt, for the threshold of rewind."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed = {self.seed}: expected a number in [0, 2^63)")
        if self.max_rows < 1:
            raise UserError(f"max_rows = {self.max_rows}: expected at least 1")
        of_search = ("betas", "beams", "successors", "chunk", "search_temperature")
        given = [name for name in of_search if getattr(self, name) not in (None, ())] + ["diverse"] * (not self.diverse)
        if self.choose == VALUE:
            given.append("choose value")
        if given and not self.guide:
            raise UserError(f"{', '.join(given)}: only for guided search; name value models with --guide")
        if self.guide and self.procedure is not None:
            raise UserError(f"procedure {self.procedure!r}: guided search is a procedure of its own; omit one of them")
        if self.guide and self.engine != "nlgrpo":
            raise UserError(f"engine {self.engine!r}: guided search needs the engine 'nlgrpo'")
        if self.reference is not None and not (self.procedure or "").startswith("rewind"):
            raise UserError("reference: only for the procedure rewind")

    def sampling(self, stop_ids: Sequence[int] = (), trained: AsTrained | None = None) -> Sampling:
        """Return the requested options, laid over those with which the model was trained."""
        given = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        if self.top_k == -1:  # as vLLM spells it
            given["top_k"] = 0
        return replace(Sampling() if trained is None else trained.sampling, **given, stop_ids=tuple(stop_ids))

    def search(self, learned: Search) -> Search:
        """Return the requested search, laid over the one that the values were learned with."""
        names = ("beams", "successors", "chunk")
        asked = {name: getattr(self, name) for name in names} | {"temperature": self.search_temperature}
        given = {name: value for name, value in asked.items() if value is not None}
        return replace(learned, **given, diverse=self.diverse and learned.diverse)

    def sampled(self, samples: int | None) -> Procedure:
        """Return the procedure, with ``samples`` candidates if its name has no number. One sample if there is none.

        Raises UserError for an unknown procedure, and for one that the way to choose does not fit.
        """
        if self.procedure is not None:
            found = Procedure.parse(self.procedure, samples)
        elif self.choose is not None:
            if samples is None:
                raise UserError("choose: the number of candidates is missing; add --samples N or --procedure bon:N")
            found = Procedure("majority" if self.choose == MAJORITY else "largest", samples)
        else:
            return Procedure("largest", 1)
        if found.needs_reward and self.choose in (None, MAJORITY) and (found.samples > 1 or found.rewind is not None):
            raise UserError(f"procedure {str(found)!r} chooses by a reward: name one with --choose")
        return found

    def load(self, samples: int | None = None, *, isolated: bool = False) -> tuple[Responder, list[str]]:
        """Load the models and build the responder. Return notes for the log as well.

        ``samples``: number of candidates, for procedures whose name has none. ``isolated``: code of the user that
        scores runs in a process of its own. Raises UserError for models, rewards and value models that cannot be
        loaded, and for options that do not fit together.
        """
        procedure: Procedure | Search = self.search(Search()) if self.guide else self.sampled(samples)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = compute_dtype(self.dtype, device)
        source = hf_weights.locate(self.model)
        tokenizer = load_tokenizer(source)
        trained = as_trained.read_as_trained(source) if self.as_trained else None
        sampling = self.sampling(stop_ids_of(tokenizer, source), trained)
        chooser = self._chooser(procedure, device, isolated)
        model = self._model(source, dtype, device, count_tokens(tokenizer))
        native = self.engine == "nlgrpo"
        notes = [f"{self.model}{note}"] if native and (note := transformers_backend.note(source)) else []
        if trained is not None:
            notes.append(f"{self.model}: {self._as_trained(trained)}")
        values: list[tuple[Value, float]] = []
        if self.guide:
            procedure, values = self._guided(tokenizer, sampling, dtype, device)
            notes += [f"{value.name}{guides.BY_TEXT}" for value, _ in values if isinstance(value, guides.TextValue)]
        reference = None if self.reference is None else self._reference(dtype, device, tokenizer)
        responder = Responder(
            model, tokenizer, procedure, chooser, sampling, values, reference, self.reference_samples, self.max_rows,
            chat=ChatOptions() if trained is None else trained.chat,
            add_bos=None if trained is None else trained.add_bos,
        )  # fmt: skip
        return responder, notes

    def _as_trained(self, trained: AsTrained) -> str:
        """Return a note about what is taken from the training of the model."""
        parts = [f"{name} {getattr(trained.sampling, name):g}" for name in SAMPLING if getattr(self, name) is None]
        chat = trained.chat
        parts += [f"system prompt {chat.system_prompt!r}"] * (chat.system_prompt is not None)
        parts += ["texts as user messages"] * (chat.from_text and chat.system_prompt is None)
        parts += [f"chat template arguments {dict(chat.template_kwargs)}"] * bool(chat.template_kwargs)
        parts += [f"{len(chat.tools)} tools"] * bool(chat.tools)
        parts += [f"add_bos {trained.add_bos}"] * (trained.add_bos is not None)
        said = f"as in training: {', '.join(parts) or 'stop ids'}"
        if trained.template != AsTrained.template:
            said += f"; its prompts were made by the template {trained.template!r}, which is not applied"
        return said

    def _chooser(self, procedure: Procedure | Search, device: torch.device, isolated: bool) -> Chooser | None:
        how = self.choose or (VALUE if self.guide else None)
        process = isolated and how not in (None, VALUE, MAJORITY) and specs.may_hang(str(how))
        if isinstance(procedure, Procedure) and procedure.rule == "majority":
            return Chooser.by_votes(self.choose, timeout=self.timeout, process=process)
        return None if how is None else Chooser.of(how, device, timeout=self.timeout, process=process)

    def _guided(
        self, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, dtype: torch.dtype, device: torch.device
    ) -> tuple[Search, list[tuple[Value, float]]]:
        learned = guides.read_guide(self.guide[0]) if len(self.guide) == 1 else None
        paths, betas = (learned.values, self.betas or learned.betas) if learned else (self.guide, self.betas)
        values = guides.load_values(paths, betas, tokenizer, sampling, dtype=dtype, device=device)
        return self.search(learned.search if learned else Search()), values

    def _reference(self, dtype: torch.dtype, device: torch.device, tokenizer: PreTrainedTokenizerBase) -> Model:
        assert self.reference is not None
        source = hf_weights.locate(self.reference)
        if not guides.same_ids(load_tokenizer(source), tokenizer):
            raise UserError(f"reference {self.reference!r} has another tokenizer than {self.model!r}")
        return self._model(source, dtype, device, count_tokens(tokenizer))

    def _model(self, source: Path, dtype: torch.dtype, device: torch.device, tokens: int) -> Model:
        if self.engine == "nlgrpo":
            return transformers_backend.load_frozen(source, dtype=dtype, device=device, tokens=tokens)
        return frozen.load_engine(
            source, dtype, Ranks(0, 1, device), self.engine, max_rows=self.max_rows, tokens=tokens
        )
