"""vLLM in the processes of the trainer: one engine per rank, or per group of ranks (tensor parallelism)."""

from __future__ import annotations

import atexit
import sys
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nlgrpo.config.vllm_config import VLLMConfig
from nlgrpo.engine.backends import completions, policy_weights, vllm_library
from nlgrpo.engine.backends.returned import Completion, EngineError
from nlgrpo.engine.generation import Limits, Rollout, check_prompts
from nlgrpo.engine.sampling import Sampling
from nlgrpo.model import adapters, fsdp, lora
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.distributed import Ranks


@dataclass
class ColocatedVLLM:
    """Samples with a vLLM engine in this process, to which `take` copies the weights of the policy.

    Every completion names the weights that sampled it, and is refused if they are not those of the last `take`.
    """

    llm: Any
    shape: Limits
    ranks: Ranks
    compute: torch.dtype
    options: VLLMConfig
    adapter: LoraConfig | None = None  # settings of adapters that the engine gets as such
    folder: Path | None = None  # for those adapters
    version: int | None = None
    weights: str = "default"  # vLLM's name of the weights that it has
    asleep: bool = False
    run: str = ""  # part of the names of its weights
    request: Any = None  # of the adapter

    @classmethod
    def start(
        cls,
        source: Path,
        shape: Limits,
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
        engine = cls(llm, shape, ranks, compute, options, adapter if as_adapter else None, folder, run=run)
        atexit.register(engine.close)  # for a command that does not close it
        return engine

    def take(self, model: Decoder, version: int) -> None:
        self._wake("weights")
        name = f"{self.run}:{version}"
        if self.adapter is None:
            self._load(policy_weights.stored(model, self.compute), name)
        else:
            self._load_adapter(model, version, name)
        self._wake("kv_cache")
        self.asleep, self.version, self.weights = False, version, name

    def _load(self, weights: Iterator[tuple[str, Tensor]], name: str) -> None:
        """Load all weights. Every rank takes all of them, also after a failure, because gathering is collective."""

        def work() -> None:
            try:
                vllm_library.load_weights(self.llm, weights, name)
            finally:
                deque(weights, maxlen=0)

        self.ranks.agree(work)

    def _load_adapter(self, model: Decoder, version: int, name: str) -> None:
        assert self.adapter is not None
        folder = self._adapter(version)
        save = partial(adapters.save, model, folder, self.adapter, base="")
        fsdp.save_on_first(model, None, self.ranks, folder, save, only=lambda key: lora.is_saved(model, key))
        self.request = vllm_library.adapter(name, version + 1, folder)
        self._remove_adapters({self._adapter(version)})
        self.llm.update_weight_version(name)

    def _adapter(self, version: int) -> Path:
        assert self.folder is not None
        return self.folder / self.run / f"adapter-{version}"

    def _remove_adapters(self, kept: set[Path]) -> None:
        if self.ranks.first and self.folder is not None and (self.folder / self.run).is_dir():
            for folder in set((self.folder / self.run).glob("adapter-*")) - kept:
                atomic_files.remove(folder)

    def _wake(self, part: str) -> None:
        if self.asleep:
            vllm_library.wake(self.llm, part)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        sampling: Sampling,
        *,
        seed: int = 0,
        index: Sequence[int] | None = None,
        max_rows: int = 256,
        first_sample: int = 0,
    ) -> Rollout:
        """Sample completions; see `Engine.generate`. With tensor parallelism, collective within its group."""
        if samples < 1:
            raise ValueError(f"samples = {samples}: expected at least 1")
        check_prompts(self.shape, prompts, sampling)
        index = range(len(prompts)) if index is None else index
        asked = [
            (list(ids), completions.request_of(sampling, samples, own))
            for ids, own in zip(prompts, completions.request_seeds(seed, index, first_sample), strict=True)
        ]
        found = self._sample(asked)
        for completion in (one for own in found for one in own):
            if set(completion.versions) != {self.weights}:
                raise EngineError(
                    f"vLLM sampled with the weights {completion.versions}, but the policy is {self.weights!r}"
                )
        rollout = completions.rollout_from(
            prompts, found, samples, sampling, vocab=self.shape.vocab, device=self.ranks.device, engine="vLLM"
        )
        return replace(rollout, version=self.version)

    def _sample(self, asked: list[tuple[list[int], dict[str, Any]]]) -> list[list[Completion]]:
        """Sample on the engine that this rank shares with its group: all of the group ask for the prompts of all."""
        size = self.options.tensor_parallel
        if size == 1:
            groups, own = [asked], 0
        else:
            first = self.ranks.rank // size * size
            groups, own = self.ranks.gather_objects(asked)[first : first + size], self.ranks.rank - first
        every = [one for group in groups for one in group]
        found = vllm_library.generate(
            self.llm, [ids for ids, _ in every], [request for _, request in every], self.request
        )
        before = sum(map(len, groups[:own]))
        return found[before : before + len(asked)]

    def sleep(self) -> None:
        if self.ranks.device.type == "cuda" and self.options.sleep and not self.asleep:
            vllm_library.sleep(self.llm, keep_weights=self.adapter is not None)
            self.asleep = True

    def close(self) -> None:
        atexit.unregister(self.close)
        if self.llm is not None:
            vllm_library.shut_down(self.llm)
            self.llm = None
            if self.ranks.first and self.folder is not None:
                atomic_files.remove(self.folder / self.run)
                if self.folder.is_dir() and not any(self.folder.iterdir()):
                    self.folder.rmdir()
