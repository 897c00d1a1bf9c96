"""Generation engine: sampling of completions, value-guided decoding, and log-probs of given completions.

`generation.generate` samples M completions per prompt; `kv_cache` reads each prompt once for all its rows; `sampling`
has the filters and the noise; `transformers_backend` runs architectures that the decoder does not support;
`guided_search` is value-guided decoding (IRO, SPI) with `chunked_decoding`, `cascade_sampling` is CARDS;
`guides` loads the value models of a guided search; `backends/` has the interface of engines, and vLLM;
`rollouts/` scores and stores completions; `as_trained` is what the training of a model assumed of its prompts.
May import every package below `training`. Read `generation.py` first.
"""

from nlgrpo.engine.generation import Rollout, generate

__all__ = ["Rollout", "generate"]
