"""Engines from a configuration: of a model that is not trained, and of vLLM for a policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from nlgrpo.config.schema import VLLMConfig
from nlgrpo.engine import transformers_backend
from nlgrpo.engine.backends.base import Engine, EngineError, PolicyEngine
from nlgrpo.engine.backends.native import engine_of
from nlgrpo.engine.generation import ModelLimits
from nlgrpo.model import decoder
from nlgrpo.model.architectures import check_causal
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime.distributed import Ranks

if TYPE_CHECKING:
    from nlgrpo.engine.backends.colocated import ColocatedVLLM
    from nlgrpo.engine.backends.servers import VLLMServers

Name = Literal["nlgrpo", "vllm"]


def load_engine(
    source: Path,
    dtype: torch.dtype,
    ranks: Ranks,
    engine: Name = "nlgrpo",
    *,
    options: VLLMConfig | None = None,
    context: int | None = None,
    max_rows: int = 256,
    tokens: int | None = None,
) -> Engine:
    """Load the model in ``source`` into an engine. Raises UserError as `load_frozen`, and EngineError.

    ``context``: tokens of the longest prompt and completion, for vLLM; None: the model's limit. ``tokens``: number of
    ids that have a token; rows of the head after them are never sampled.
    """
    if engine == "nlgrpo":
        return engine_of(transformers_backend.load_frozen(source, dtype=dtype, device=ranks.device, tokens=tokens))
    config = decoder.read_config(source)
    check_causal(config)
    shape = transformers_backend.limits_of(config)
    options = options or VLLMConfig()
    context = context or shape.context
    if not options.servers and options.tensor_parallel > 1:
        raise EngineError(
            f"vllm.tensor_parallel = {options.tensor_parallel}: ranks sample different files here; use vllm.servers"
        )
    if not options.servers:
        from nlgrpo.engine.backends.colocated import ColocatedVLLM

        colocated = ColocatedVLLM.start(
            source, shape, ranks=ranks, compute=dtype, options=options, context=context, max_rows=max_rows
        )
        colocated.tokens = tokens
        return colocated
    from nlgrpo.engine.backends.servers import VLLMServers

    servers = VLLMServers.connect(options, shape, ranks=ranks, compute=dtype, context=context, folder=source)
    servers.tokens = tokens
    servers.take_directory(source)
    return servers


def of_policy(
    source: Path,
    shape: ModelLimits,
    *,
    ranks: Ranks,
    compute: torch.dtype,
    options: VLLMConfig,
    context: int,
    max_rows: int,
    adapter: LoraConfig | None,
    folder: Path,
    pauses: Path,
    stopping: Callable[[], bool],
    tokens: int | None = None,
) -> PolicyEngine:
    """Start vLLM for a policy, or connect to its servers; collective. Raises EngineError.

    Arguments as for `ColocatedVLLM.start` and `VLLMServers.connect`, and `VLLMEngine.tokens`.
    """
    engine: ColocatedVLLM | VLLMServers
    if options.servers:
        from nlgrpo.engine.backends.servers import VLLMServers

        engine = VLLMServers.connect(
            options, shape, ranks=ranks, compute=compute, context=context, folder=folder, pauses=pauses,
            adapter=adapter, stopping=stopping,
        )  # fmt: skip
    else:
        from nlgrpo.engine.backends.colocated import ColocatedVLLM

        engine = ColocatedVLLM.start(
            source, shape, ranks=ranks, compute=compute, options=options, context=context, max_rows=max_rows,
            adapter=adapter, folder=folder,
        )  # fmt: skip
    engine.tokens = tokens
    return engine
