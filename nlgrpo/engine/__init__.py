"""Sampling completions: the generation engine, guided search, and log-probs of given completions.

`generation.generate` samples M completions of each prompt with a KV cache; `sampling` has the filters and the noise;
`transformers_backend` runs architectures that the decoder lacks; `guided_search` is value-guided decoding (IRO, SPI)
over `chunked_decoding` and `branching_cache`; `rollouts/` scores and stores completions. Imports every room below
`training`. Read `generation.py` first.
"""

from nlgrpo.engine.generation import Rollout, generate

__all__ = ["Rollout", "generate"]
