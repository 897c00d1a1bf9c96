"""Engines: what samples completions. nlgrpo's own is the default and the reference; vLLM is another one.

`base` defines the interface, `native` is nlgrpo's engine on a decoder, `frozen` loads the engine of a model that is not
trained. `vllm_library` is the only file that imports vLLM, `colocated` runs it in the processes of the trainer,
`servers` uses vLLM servers, and `vllm_engine` has what both share.
Imports `generation`, `sampling` and `transformers_backend` of the engine, and the rooms below. Read `base.py` first.
"""

from nlgrpo.engine.backends.base import Engine, EngineError
from nlgrpo.engine.backends.native import NativeEngine, engine_of

__all__ = ["Engine", "EngineError", "NativeEngine", "engine_of"]
