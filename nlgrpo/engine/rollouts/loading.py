"""Loads the engine of a collector of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

from nlgrpo.config.vllm_config import VLLMConfig
from nlgrpo.engine.backends import frozen
from nlgrpo.engine.backends.base import Engine
from nlgrpo.engine.decoding_memory import ROWS
from nlgrpo.engine.rollouts.collect import RolloutCollector
from nlgrpo.model.tokenizer import count_tokens
from nlgrpo.runtime.distributed import Ranks


@contextmanager
def loaded(
    draws: RolloutCollector, engine: frozen.Name, options: VLLMConfig, ranks: Ranks, *, missing: bool
) -> Iterator[Callable[[], Engine]]:
    """Context with a function that returns the engine of ``draws``; the engine is closed at the end.

    nlgrpo's engine is loaded by the first call. vLLM starts on all ranks together, if ``missing`` is true on any: then
    this is collective. Raises UserError as `frozen.load`.
    """
    context = max(map(len, draws.batch.ids), default=0) + draws.sampler.sampling.max_new_tokens
    load = cache(
        partial(
            frozen.load, draws.source, draws.dtype, ranks, engine, options=options, context=context,
            max_rows=draws.sampler.max_rows or ROWS, tokens=count_tokens(draws.sampler.tokenizer),
        )
    )  # fmt: skip
    if engine != "nlgrpo" and ranks.any(missing):
        load()
    try:
        yield load
    finally:
        if load.cache_info().currsize:
            load().close()
