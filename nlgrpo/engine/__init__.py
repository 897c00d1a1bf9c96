"""Generation engine: sampling of completions, value-guided decoding, and log-probs of given completions.

`generation.generate` samples M completions per prompt; `kv_cache` reads each prompt once for all its rows; `sampling`
has the filters and the noise; `transformers_backend` runs architectures that the decoder does not support;
`guided_search` is value-guided decoding (IRO, SPI) with `chunked_decoding`, `cascade_sampling` is CARDS;
`rollouts/` scores and stores completions;
`inference/` responds to prompts through an inference-time procedure, and `serving/` does so over HTTP.
May import every package below `training`. Read `generation.py` first.
"""

from nlgrpo.engine.generation import Rollout, generate

__all__ = ["Rollout", "generate"]
