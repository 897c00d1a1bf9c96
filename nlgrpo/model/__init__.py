"""The language model: one decoder for six architectures, its weights, and models with a scalar head.

`architectures` says what sets the families apart; `hf_weights` reads and writes Hugging Face directories; `packing`
makes micro-batches without padding and `attention` runs on them; `fsdp` shards a model over ranks; `reward_model` and
`value_model` are decoders with one output. Imports `runtime` and `nlgrpo.kernels`. Read `decoder.py` first.
"""

from nlgrpo.model.decoder import Decoder, build, load, read_config, save

__all__ = ["Decoder", "build", "load", "read_config", "save"]
