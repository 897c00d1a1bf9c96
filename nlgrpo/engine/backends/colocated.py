"""vLLM in the processes of the trainer: one engine per rank, or per group of ranks (tensor parallelism)."""

from __future__ import annotations

import atexit
import sys
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nlgrpo.config.schema import VLLMConfig
from nlgrpo.engine.backends import vllm_library
from nlgrpo.engine.backends.base import Completion, EngineError
from nlgrpo.engine.backends.vllm_engine import Request, VLLMEngine
from nlgrpo.engine.generation import ModelLimits
from nlgrpo.model import adapters, fsdp, hf_weights, lora
from nlgrpo.model.architectures import tensor_map
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime.distributed import Ranks


@dataclass(kw_only=True)
class ColocatedVLLM(VLLMEngine):
    """Samples with a vLLM engine in this process, to which `take` copies the weights of the policy.

    Every completion names the weights that sampled it, and is refused if they are not those of the last `take`.
    """

    llm: Any
    compute: torch.dtype
    options: VLLMConfig
    adapter: LoraConfig | None = None
    """Settings of adapters that vLLM gets as such, in files; None: all weights, with adapters merged."""
    weights: str = "default"
    """vLLM's name of the weights that it has."""
    asleep: bool = False
    request: Any = None
    """Of the adapter."""

    @classmethod
    def start(
        cls,
        source: Path,
        shape: ModelLimits,
        *,
        ranks: Ranks,
        compute: torch.dtype,
        options: VLLMConfig,
        context: int,
        max_rows: int,
        adapter: LoraConfig | None = None,
        folder: Path | None = None,
    ) -> ColocatedVLLM:
        """Start the engine with the weights in ``source``; collective. Raises EngineError if it cannot.

        ``context``: tokens of the longest prompt and completion. ``adapter``: settings of the policy's adapters, which
        are saved in ``folder`` for the engine. If it does not support them, it gets merged weights.
        """
        as_adapter = adapter is not None and options.adapters and not adapter.modules_to_save
        begin = partial(
            vllm_library.start,
            source,
            dtype=compute,
            device=ranks.device,
            context=min(context, shape.context),
            max_rows=max_rows,
            tensor_parallel=options.tensor_parallel,
            ranks=ranks.world,
            memory=options.gpu_memory,
            sleep=options.sleep,
        )
        if as_adapter and not vllm_library.supports_lora(source):
            print(f"vLLM has no adapters for the model in {source}; it gets merged weights instead", file=sys.stderr)
            as_adapter = False
        rank = adapter.rank if adapter is not None and as_adapter else None
        llm = ranks.agree(lambda: begin(lora_rank=rank))
        run = ranks.gather_objects(uuid.uuid4().hex[:8])[0]
        engine = cls(
            llm=llm, shape=shape, ranks=ranks, compute=compute, options=options, run=run, folder=folder,
            adapter=adapter if as_adapter else None,
        )  # fmt: skip
        atexit.register(engine.close)  # for a command that does not close it
        return engine

    def take(self, model: Decoder, version: int) -> None:
        self._wake("weights")
        name = f"{self.run}:{version}"
        if self.adapter is None:
            self._load(full_weights(model, self.compute), name)
        else:
            self._load_adapter(model, version, name)
        self._wake("kv_cache")
        self.asleep = False
        self.version = version
        self.weights = name

    def _load(self, weights: Iterator[tuple[str, Tensor]], name: str) -> None:
        """Load all weights. Every rank takes all of them, also after a failure, because gathering is collective."""

        def work() -> None:
            try:
                vllm_library.load_weights(self.llm, weights, name)
            finally:
                deque(weights, maxlen=0)

        self.ranks.agree(work)

    def _load_adapter(self, model: Decoder, version: int, name: str) -> None:
        own = self.own_folder()
        assert self.adapter is not None
        assert own is not None
        folder = own / f"adapter-{version}"
        save = partial(adapters.save, model, folder, self.adapter, base="")
        fsdp.save_on_first(model, None, self.ranks, folder, save, only=lambda key: lora.is_saved(model, key))
        self.request = vllm_library.adapter(name, version + 1, folder)
        self.keep_weights({folder})
        self.llm.update_weight_version(name)

    def _wake(self, part: str) -> None:
        if self.asleep:
            vllm_library.wake(self.llm, part)

    def _sample(
        self, requests: Sequence[Request], together: int, report: Callable[[int], None]
    ) -> list[list[Completion]]:
        """Sample on the engine that this rank shares with its group: all of the group request the prompts of all.

        With tensor parallelism, collective. vLLM schedules by itself.
        """
        size = self.options.tensor_parallel
        groups = [requests]
        own = 0
        if size > 1:
            first = self.ranks.rank // size * size
            groups = self.ranks.gather_objects(requests)[first : first + size]
            own = self.ranks.rank - first
        before = sum(map(len, groups[:own]))
        every = vllm_library.generate(self.llm, [one for group in groups for one in group], self.request)
        found = every[before : before + len(requests)]
        for completion in (one for completions in found for one in completions):
            if set(completion.versions) != {self.weights}:
                raise EngineError(
                    f"vLLM sampled with the weights {completion.versions}, but the policy is {self.weights!r}"
                )
        return found

    def sleep(self) -> None:
        if self.ranks.device.type == "cuda" and self.options.sleep and not self.asleep:
            vllm_library.sleep(self.llm, keep_weights=self.adapter is not None)
            self.asleep = True

    def close(self) -> None:
        atexit.unregister(self.close)
        if self.llm is not None:
            vllm_library.shut_down(self.llm)
            self.llm = None
            self.remove_folder()


def full_weights(model: Decoder, compute: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under Hugging Face's names, in ``compute``, with adapters merged; collective.

    Every rank gets them, and must take all pairs.
    """
    kept = None if lora.adapted(model) else compute
    places = tensor_map(model.shape)
    for name, parameter in lora.merged(model, fsdp.each_replicated(model, kept), compute):
        for theirs, shape, view in hf_weights.as_stored(parameter, places[name], model.shape):
            yield theirs, view.reshape(tuple(shape))
