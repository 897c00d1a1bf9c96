"""Loads the responder that the options of ``nlgrpo generate`` and ``serve`` describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from nlgrpo.apps.respond.choosing import Chooser
from nlgrpo.apps.respond.options import MAJORITY, VALUE, ResponderOptions
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


def sampling_of(options: ResponderOptions, stop_ids: Sequence[int], trained: AsTrained | None) -> Sampling:
    """Return the requested options, laid over those with which the model was trained."""
    given = {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
    if options.top_k == -1:  # as vLLM spells it
        given["top_k"] = 0
    return replace(Sampling() if trained is None else trained.sampling, **given, stop_ids=tuple(stop_ids))


def search_of(options: ResponderOptions, learned: Search) -> Search:
    """Return the requested search, laid over the one that the values were learned with."""
    names = ("beams", "successors", "chunk")
    asked = {name: getattr(options, name) for name in names} | {"temperature": options.search_temperature}
    given = {name: value for name, value in asked.items() if value is not None}
    return replace(learned, **given, diverse=options.diverse and learned.diverse)


def procedure_of(options: ResponderOptions, samples: int | None) -> Procedure:
    """Return the procedure, with ``samples`` candidates if its name has no number. One sample if there is none.

    Raises UserError for an unknown procedure, and for one that the way to choose does not fit.
    """
    if options.procedure is not None:
        found = Procedure.parse(options.procedure, samples)
    elif options.choose is not None:
        if samples is None:
            raise UserError("choose: the number of candidates is missing; add --samples N or --procedure bon:N")
        found = Procedure("majority" if options.choose == MAJORITY else "largest", samples)
    else:
        return Procedure("largest", 1)
    if found.needs_reward and options.choose in (None, MAJORITY) and (found.samples > 1 or found.rewind is not None):
        raise UserError(f"procedure {str(found)!r} chooses by a reward: name one with --choose")
    return found


def load(
    options: ResponderOptions, samples: int | None = None, *, isolated: bool = False
) -> tuple[Responder, list[str]]:
    """Load the models and build the responder. Return notes for the log as well.

    ``samples``: number of candidates, for procedures whose name has none. ``isolated``: code of the user that
    scores runs in a process of its own. Raises UserError for models, rewards and value models that cannot be
    loaded, and for options that do not fit together.
    """
    procedure: Procedure | Search = search_of(options, Search()) if options.guide else procedure_of(options, samples)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = compute_dtype(options.dtype, device)
    source = hf_weights.locate(options.model)
    tokenizer = load_tokenizer(source)
    trained = as_trained.read_as_trained(source) if options.as_trained else None
    sampling = sampling_of(options, stop_ids_of(tokenizer, source), trained)
    chooser = _chooser(options, procedure, device, isolated)
    model = _model(options, source, dtype, device, count_tokens(tokenizer))
    native = options.engine == "nlgrpo"
    notes = [f"{options.model}{note}"] if native and (note := transformers_backend.note(source)) else []
    if trained is not None:
        notes.append(f"{options.model}: {_as_trained(options, trained)}")
    values: list[tuple[Value, float]] = []
    if options.guide:
        procedure, values = _guided(options, tokenizer, sampling, dtype, device)
        notes += [f"{value.name}{guides.BY_TEXT}" for value, _ in values if isinstance(value, guides.TextValue)]
    reference = None if options.reference is None else _reference(options, dtype, device, tokenizer)
    responder = Responder(
        model, tokenizer, procedure, chooser, sampling, values, reference, options.reference_samples, options.max_rows,
        chat=ChatOptions() if trained is None else trained.chat,
        add_bos=None if trained is None else trained.add_bos,
    )  # fmt: skip
    return responder, notes


def _as_trained(options: ResponderOptions, trained: AsTrained) -> str:
    """Return a note about what is taken from the training of the model."""
    parts = [f"{name} {getattr(trained.sampling, name):g}" for name in SAMPLING if getattr(options, name) is None]
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


def _chooser(
    options: ResponderOptions, procedure: Procedure | Search, device: torch.device, isolated: bool
) -> Chooser | None:
    how = options.choose or (VALUE if options.guide else None)
    process = isolated and how not in (None, VALUE, MAJORITY) and specs.may_hang(str(how))
    if isinstance(procedure, Procedure) and procedure.rule == "majority":
        return Chooser.by_votes(options.choose, timeout=options.timeout, process=process)
    return None if how is None else Chooser.of(how, device, timeout=options.timeout, process=process)


def _guided(
    options: ResponderOptions,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Search, list[tuple[Value, float]]]:
    learned = guides.read_guide(options.guide[0]) if len(options.guide) == 1 else None
    paths, betas = (learned.values, options.betas or learned.betas) if learned else (options.guide, options.betas)
    values = guides.load_values(paths, betas, tokenizer, sampling, dtype=dtype, device=device)
    return search_of(options, learned.search if learned else Search()), values


def _reference(
    options: ResponderOptions, dtype: torch.dtype, device: torch.device, tokenizer: PreTrainedTokenizerBase
) -> Model:
    assert options.reference is not None
    source = hf_weights.locate(options.reference)
    if not guides.same_ids(load_tokenizer(source), tokenizer):
        raise UserError(f"reference {options.reference!r} has another tokenizer than {options.model!r}")
    return _model(options, source, dtype, device, count_tokens(tokenizer))


def _model(options: ResponderOptions, source: Path, dtype: torch.dtype, device: torch.device, tokens: int) -> Model:
    if options.engine == "nlgrpo":
        return transformers_backend.load_frozen(source, dtype=dtype, device=device, tokens=tokens)
    return frozen.load_engine(
        source, dtype, Ranks(0, 1, device), options.engine, max_rows=options.max_rows, tokens=tokens
    )
