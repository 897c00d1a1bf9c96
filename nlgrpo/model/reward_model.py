"""A reward model: one of our decoders whose head gives a single number, the score of the text that ends there.

Reading it from a causal model or a classifier, its loss on preference pairs, and writing it as a directory that
``AutoModelForSequenceClassification`` loads.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from nlgrpo.model import decoder, hf_weights
from nlgrpo.model.architectures import Source, tensor_map
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.packing import PairBatch
from nlgrpo.runtime import checkpoint

SCORE = "score.weight"  # what transformers calls the head
# The classes of transformers that read a reward model of each family.
CLASSES = {
    "llama": "LlamaForSequenceClassification",
    "mistral": "MistralForSequenceClassification",
    "qwen2": "Qwen2ForSequenceClassification",
    "qwen3": "Qwen3ForSequenceClassification",
    "gpt_neox": "GPTNeoXForSequenceClassification",
    "gpt2": "GPT2ForSequenceClassification",
}


def scores(model: Decoder, batch: PairBatch) -> tuple[Tensor, Tensor]:
    """Scores (n,) of the preferred and of the other answers, in float32 at least: bfloat16 has 8 bits for a margin."""
    found = model(batch.tokens, batch.lengths, batch.select, score)[:, 0]
    return found[0::2], found[1::2]


def score(hidden: Tensor, weight: Tensor) -> Tensor:
    """(2n, 1); not less, because FSDP2 hooks what the forward returns, and would lose the hook of a view."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return F.linear(hidden.to(wide), weight.to(wide))


# --- reading ------------------------------------------------------------------------------------------------------


def locate(path_or_name: str) -> tuple[Path, Path | None]:
    """The Hugging Face directory that ``path_or_name`` stands for, and a checkpoint whose weights replace its own.

    A directory or a name as in `hf_weights.locate`; the folder of a run (its exported ``model``); or a checkpoint of a
    run, ``runs/NAME/checkpoints/step-00000012``. Raises ValueError where there is no such thing.
    """
    path = Path(os.path.expanduser(path_or_name))
    if (path / "manifest.json").is_file() and (path / ".metadata").is_file():
        begun = hf_weights.begun_from(path.parents[1])
        if begun is None:
            raise ValueError(f"{path} is a checkpoint, and {path.parents[1] / 'config.json'} is not that of its run")
        return locate(begun)[0], path
    if hf_weights.begun_from(path) is not None:
        if not (path / "model" / "config.json").is_file():
            raise ValueError(
                f"{path} is a run that has exported no model yet; finish it, or name one of its checkpoints"
            )
        path = path / "model"
        return path, None
    return hf_weights.locate(path_or_name), None


def load(
    path_or_name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[Decoder, bool]:
    """A decoder with a head of one output, and whether that head was trained already.

    From a sequence classifier with one output it is the classifier's; a causal model gets one with entries of N(0,
    1 / (D + 1)), drawn from ``seed`` (Stiennon et al. 2020, B.1). The rest is never random: embeddings that a tied
    model stores under the name of its lm_head are found there, where transformers 5.23 would make new ones.

    Raises ValueError for an unknown architecture, a missing or misshapen tensor, and a classifier of several outputs.
    """
    folder, saved = locate(path_or_name)
    config = decoder.read_config(folder)
    model = decoder.allocate(with_score_head(decoder.blueprint(config)).to(dtype))
    tensors = hf_weights.Checkpoint(folder)
    trained = SCORE in tensors.files
    _check(tensors, model, trained)
    places = score_map(model)
    wanted = {name: p for name, p in model.named_parameters() if trained or name != "head.weight"}
    hf_weights.read_into(wanted, folder, model.shape, places)
    if not trained:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(1, model.shape.width, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            head_of(model).weight.copy_(noise / (model.shape.width + 1) ** 0.5)
    if saved is not None:
        trained = "head.weight" in checkpoint.read_model(saved, dict(model.named_parameters()), optional="head.weight")
    return model.to(device), trained


def _check(tensors: hf_weights.Checkpoint, model: Decoder, trained: bool) -> None:
    if trained:
        outputs = tensors.files[SCORE].get_slice(SCORE).get_shape()[0]
        if outputs != 1:
            raise ValueError(
                f"{tensors.folder} is a classifier of {outputs} outputs; a reward model begins at one with a single "
                "output, or at a causal model"
            )
    if not model.shape.tied:  # a head that is none of a reward model's may differ from a tied embedding
        tensors.check_embedding(score_map(model)["embed.weight"].names[0], tied=False)


def with_score_head(model: Decoder) -> Decoder:
    """The decoder with a head of one output in place of its own, or of the tied one."""
    model.head = nn.Linear(model.shape.width, 1, bias=False)
    return model


def head_of(model: Decoder) -> nn.Linear:
    assert model.head is not None
    return model.head


def score_map(model: Decoder) -> dict[str, Source]:
    """Where each tensor of a reward model stands in a directory of transformers."""
    return tensor_map(model.shape) | {"head.weight": Source((SCORE,), (-1,))}


# --- the padding id -----------------------------------------------------------------------------------------------


def padding_id(config: Any, tokenizer: PreTrainedTokenizerBase, trained: bool) -> int | None:
    """The padding id that goes into the config, by which transformers finds the token that is scored.

    Texts are closed by EOS, and transformers scores the last token that is not padding (`packing.scored_at`). So the
    padding must be another token than EOS; the first of these that the model has an embedding for is taken:

    - a classifier's own, because its head was trained with it
    - the tokenizer's padding token, the unknown token, BOS; each if it is not EOS
    - EOS, if there is nothing else: the score is then read one token before it, in training as in use

    None: transformers can only score such a model's texts one by one.
    """
    if trained and config.pad_token_id is not None:
        return int(config.pad_token_id)
    eos = tokenizer.eos_token_id
    others = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
    candidates = [*(i for i in others if i != eos), eos]
    return next((i for i in candidates if i is not None and i < config.vocab_size), None)


# --- writing ------------------------------------------------------------------------------------------------------


def save(
    model: Decoder,
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    pad: int | None,
    max_length: int,
    parameters: dict[str, Tensor] | None = None,
) -> None:
    """Write a directory that ``AutoModelForSequenceClassification.from_pretrained`` loads, with one output.

    ``pad`` becomes the padding token of the config and of the tokenizer, which pads on the right and cuts texts on the
    left to ``max_length`` tokens. ``parameters``: full tensors to write instead of the model's own (a sharded model's).

    Raises ValueError for a decoder without a Hugging Face config.
    """
    if model.config is None:
        raise ValueError("this decoder was made without a Hugging Face config; use reward_model.load")
    folder.mkdir(parents=True, exist_ok=True)
    state = hf_weights.state_for_export(parameters or dict(model.named_parameters()), model.shape, score_map(model))
    config = copy.deepcopy(model.config)
    config.architectures = [CLASSES[model.shape.family]]
    config.num_labels = 1
    config.pad_token_id = pad
    config.dtype = next(iter(state.values())).dtype
    config.save_pretrained(folder)
    huggingface_hub.save_torch_state_dict(state, folder, max_shard_size="5GB")
    tokenizer = copy.deepcopy(tokenizer)
    if pad is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    tokenizer.padding_side, tokenizer.truncation_side = "right", "left"
    tokenizer.init_kwargs |= {"padding_side": "right", "truncation_side": "left"}  # without it they are not written
    tokenizer.model_max_length = max_length
    tokenizer("")  # an untruncated call: tokenizer.json would carry the truncation of the last one
    tokenizer.save_pretrained(folder)
