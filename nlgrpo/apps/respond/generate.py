"""The command ``nlgrpo generate``: completions of prompts, by sampling or through an inference-time procedure."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from time import perf_counter
from typing import Any

from nlgrpo import __version__
from nlgrpo.apps.respond import loading
from nlgrpo.apps.respond.line_file import LineFile
from nlgrpo.apps.respond.options import Generate, read_generate
from nlgrpo.apps.respond.responder import Responder, Scored
from nlgrpo.data import sources
from nlgrpo.data.conversations import ChatOptions, load_tools, messages_in, plain_text
from nlgrpo.data.prompt_dataset import Batch, Reader, SourceOptions, read_all
from nlgrpo.engine import guides
from nlgrpo.engine.guided_search import Cost, Search
from nlgrpo.engine.rollouts.inputs import embedded
from nlgrpo.engine.rollouts.store import (
    digest_of_function,
    digest_of_model,
    digest_of_prompt,
    digest_of_text,
    digests_of_columns,
)
from nlgrpo.errors import UserError
from nlgrpo.model import hf_weights
from nlgrpo.rewards import reward_functions


def generate(arguments: Sequence[str]) -> int:
    """Print or write each prompt with its completions. Raises UserError for user errors."""
    options = read_generate(arguments)
    responder, notes = loading.load(options, options.samples if options.chooses else None)
    print(*notes, sep="\n", end="\n" * bool(notes), file=sys.stderr)
    batch = _prompts(options, responder)
    if responder.chooser is not None and responder.chooser.reward is not None:
        reward_functions.check_columns([responder.chooser.reward], list(batch.columns))
    total = Cost()
    start = perf_counter()
    per_prompt = 1 if options.chooses else options.samples or 1
    identity = "" if options.out is None else _identity(options, responder, batch)
    with nullcontext() if options.out is None else LineFile(options.out, identity, per_prompt) as lines:
        done = 0 if lines is None else len(lines) // per_prompt
        for rows in _rows(options, responder, batch.only(range(done, len(batch.ids))), total):
            if lines is not None:
                lines.add(json.dumps(row) for row in rows)
            else:
                print(*(json.dumps(row) if options.json else _shown(row, responder) for row in rows), sep="\n")
    if options.chooses:
        print(_summary(responder, total, perf_counter() - start), file=sys.stderr)
    return 0


def _prompts(options: Generate, responder: Responder) -> Batch:
    """Return all prompts, those of the source in its order. Notes say what is left out.

    Raises UserError as `prompt_dataset.load_prompt_set`.
    """
    asked = ChatOptions(options.system_prompt, options.chat, options.chat_template_kwargs, load_tools(options.tools))
    chat = _over(responder.chat, asked)
    if options.source is None:
        given = [messages_in(text, f"prompt {i}") for i, text in enumerate(options.prompts, 1)]
        batch = responder.batch(given, chat)  # the engine refuses prompts that are too long
        asked.check_used("prompts", [prompt for prompt in batch.prompts if not isinstance(prompt, str)])
        return batch
    limit = responder.model.shape.context - responder.sampling.max_new_tokens
    if limit < 1:
        raise UserError(
            f"max_new_tokens = {responder.sampling.max_new_tokens} leaves no room for a prompt in the model's context"
        )
    source = embedded(options.source)
    how = SourceOptions(
        split=options.split, prompt_column=options.prompt_column, template=options.template, limit=options.limit,
        chat=chat, add_bos=responder.add_bos,
    )  # fmt: skip
    loaded = read_all(Reader(source, responder.tokenizer, how, limit), shuffle=False)
    asked.check_used(options.source, loaded.conversations())
    notes = sources.unread([(source, options.split)])
    if loaded.dropped:
        notes.append(f"{options.source}: {loaded.dropped:,} prompts of more than {limit} tokens left out")
    print(*notes, sep="\n", end="\n" * bool(notes), file=sys.stderr)
    return loaded.take(0, len(loaded))


def _over(trained: ChatOptions, asked: ChatOptions) -> ChatOptions:
    """Return the requested options of conversations, laid over those with which the model was trained."""
    system_prompt = trained.system_prompt if asked.system_prompt is None else asked.system_prompt or None
    return ChatOptions(
        system_prompt=system_prompt,
        from_text=asked.from_text or trained.from_text,
        template_kwargs={**trained.template_kwargs, **asked.template_kwargs},
        tools=asked.tools or trained.tools,
    )


def _rows(options: Generate, responder: Responder, batch: Batch, total: Cost) -> Iterator[list[dict[str, Any]]]:
    """Yield the JSON objects of as many prompts as are decoded together. Adds their cost to ``total``."""
    samples = responder.candidates if options.chooses else options.samples or 1
    together = max(1, options.max_rows // samples)
    for i in range(0, len(batch.ids), together):
        part = batch.only(range(i, min(i + together, len(batch.ids))))
        if not options.chooses:
            found = responder.sample(part, samples, seed=options.seed, stop=options.stop)
            yield [{"prompt": p} | _row(one) for p, own in zip(part.prompts, found, strict=True) for one in own]
            continue
        responses, cost = responder.respond(part, seed=options.seed, stop=options.stop)
        total.tokens += cost.tokens
        total.queries += cost.queries
        rows = []
        for prompt, response in zip(part.prompts, responses, strict=True):
            more = {"candidates": [_scored(one) for one in response.candidates]} if options.candidates else {}
            rows.append({"prompt": prompt} | _scored(response.best) | more)
        yield rows


def _row(one: Scored) -> dict[str, Any]:
    return {
        "text": one.text,
        "ids": list(one.tokens),
        "logprobs": list(one.logprobs),
        "finish_reason": one.finish_reason,
    }


def _scored(one: Scored) -> dict[str, Any]:
    return _row(one) | {"score": one.score}


def _identity(options: Generate, responder: Responder, batch: Batch) -> str:
    """Everything that the output depends on: options, and digests of the models, the reward and the prompts."""
    settings = {name: value for name, value in asdict(options).items() if name not in ("out", "json", "max_rows")}
    models = [hf_weights.locate(name) for name in (options.model, options.reference) if name is not None]
    reward = None if responder.chooser is None else responder.chooser.reward
    contents = {
        "sampling": asdict(responder.sampling),
        "models": [*map(digest_of_model, models), *map(guides.digest_of_guide, options.guide)],
        "prompts": digest_of_text(*map(digest_of_prompt, batch.ids)),
        "columns": digest_of_text(*digests_of_columns(batch.columns, len(batch.ids))),
        "reward": reward and digest_of_function(reward.function, options.choose or "", options.choose or ""),
    }
    return json.dumps({"nlgrpo": __version__} | settings | contents, default=str, sort_keys=True)


def _shown(row: dict[str, Any], responder: Responder) -> str:
    summary = f"{len(row['ids'])} tokens, {row['finish_reason']}"
    if row.get("score") is not None and responder.chooser is not None:
        summary += f"; {responder.chooser.how} {row['score']:.4g}"
    return f"{plain_text(row['prompt'])}{row['text']}\n    [{summary}]"


def _summary(responder: Responder, cost: Cost, seconds: float) -> str:
    procedure = responder.procedure
    speed = cost.tokens / max(seconds, 1e-9)
    if not isinstance(procedure, Search):
        return f"{procedure}: {cost.tokens:,} tokens sampled, {speed:,.0f} tokens/s"
    searched = f"{procedure.beams} beams x {procedure.successors} chunks of {procedure.chunk} tokens"
    if procedure.chunk >= responder.sampling.max_new_tokens:
        searched += "; a chunk is a whole response, so no value guides"
    return f"{searched}: {cost.tokens:,} tokens sampled, {cost.queries:,} value queries, {speed:,.0f} tokens/s"
