"""The language model: one decoder for six architectures, its weights, and models with a scalar head.

`architectures` holds the differences between the model families; `hf_weights` reads and writes Hugging Face
directories, `safetensors_writer` writes their files; `lora` attaches adapters, and `adapters` reads and writes them in
PEFT's format; `packing` builds micro-batches without padding, whose `segments` share prefixes, and `attention` runs on
them; `tokenizer` loads tokenizers; `fsdp` shards a model over ranks, `shards` knows which rank holds which rows; `muon`
is an optimizer for the blocks' matrices; `reward_model` and `value_model` are decoders with one output. Imports
`runtime` and `nlgrpo.kernels`. Read `decoder.py` first.
"""

from nlgrpo.model.decoder import Decoder, build, load, read_config, save

__all__ = ["Decoder", "build", "load", "read_config", "save"]
