"""Reward models: decoders with a head of one output, the score of a text at its last token.

Loads them from a causal model or a classifier, scores preference pairs, and saves directories that
``AutoModelForSequenceClassification`` loads.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from nlgrpo.errors import UserError
from nlgrpo.model import decoder, hf_weights, lora, shards
from nlgrpo.model.architectures import Source, tensor_map
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.packing import PairBatch
from nlgrpo.model.tokenizer import save_tokenizer
from nlgrpo.runtime import atomic_files

SCORE = "score.weight"  # transformers' name of the head
HEAD_FILE = "head.json"  # beside an adapter: what its head means
# transformers' class for a reward model of each family.
CLASSES = {
    "llama": "LlamaForSequenceClassification",
    "mistral": "MistralForSequenceClassification",
    "qwen2": "Qwen2ForSequenceClassification",
    "qwen3": "Qwen3ForSequenceClassification",
    "gpt_neox": "GPTNeoXForSequenceClassification",
    "gpt2": "GPT2ForSequenceClassification",
}


def scores(model: Decoder, batch: PairBatch) -> tuple[Tensor, Tensor]:
    """Scores (n,) of the chosen and of the rejected answers, at least in float32: bfloat16's 8 bits blur margins."""
    both = model(batch.tokens, batch.segments, batch.select, score)[:, 0]
    return both[0::2], both[1::2]


def score(hidden: Tensor, weight: Tensor) -> Tensor:
    """Head outputs (S, 1) of ``hidden (S, D)``, at least in float32.

    The last dimension stays, because FSDP2 hooks the tensor that the forward returns and a view would lose the hook.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return F.linear(hidden.to(wide), weight.to(wide))


# --- reading ------------------------------------------------------------------------------------------------------


def locate(path_or_name: str, *, config_only: bool = False) -> tuple[Path, Path | None]:
    """Return the Hugging Face directory of ``path_or_name``, and a checkpoint whose weights replace its own (or None).

    ``path_or_name`` is a directory or name as in `hf_weights.locate`, the folder of a run (its exported ``model``), or
    a checkpoint of a run, ``runs/NAME/checkpoints/step-00000012``. Raises UserError if there is no such model.
    """
    path = Path(os.path.expanduser(path_or_name))
    if (path / "manifest.json").is_file() and (path / "state.json").is_file():
        begun = hf_weights.begun_from(path.parents[1])
        if begun is None:
            raise UserError(f"{path} is a checkpoint, but {path.parents[1] / 'config.json'} is not the config of a run")
        return locate(begun, config_only=config_only)[0], path
    if hf_weights.begun_from(path) is not None:
        if not (path / "model" / "config.json").is_file():
            raise UserError(
                f"{path} is a run that has not exported its model yet; finish it, or pass one of its checkpoints"
            )
        path = path / "model"
        return path, None
    return hf_weights.locate(path_or_name, config_only=config_only), None


def load_reward_model(
    path_or_name: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    shard: Callable[[Decoder], object] | None = None,
) -> tuple[Decoder, bool]:
    """Load a decoder with a head of one output, and return it with whether the head is trained already.

    A sequence classifier with one output keeps its head. A causal model gets a new one with entries from N(0, 1 / (D +
    1)), drawn with ``seed`` (Stiennon et al. 2020, B.1). Nothing else is ever random: embeddings that a tied model
    stores under the name of its lm_head are loaded, where transformers 5.23 would initialise new ones. ``shard``: as in
    `decoder.load`; a new head is the same for any number of ranks.

    Raises UserError for an unknown architecture, a missing tensor or one of the wrong shape, tensors that have no
    place in the model, and a classifier with several outputs.
    """
    folder, saved = locate(path_or_name)
    config = decoder.read_config(folder)
    model = with_score_head(decoder.blueprint(config)).to(dtype)
    if shard is not None:
        shard(model)
    decoder.allocate(model, device)
    tensors = hf_weights.Checkpoint(folder)
    trained = SCORE in tensors.files
    _check(tensors, model, trained)
    places = score_map(model)
    parameters = lora.base_parameters(model)
    wanted = {name: p for name, p in parameters.items() if trained or name != "head.weight"}
    hf_weights.read_into(wanted, tensors, model.shape, places, unused=hf_weights.HEADS)
    if not trained:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(1, model.shape.width, generator=generator, dtype=torch.float64)
        shards.fill(head_of(model).weight, noise / (model.shape.width + 1) ** 0.5)
    if saved is not None:
        from nlgrpo.runtime.checkpoint.model import read_model  # takes a second

        trained = "head.weight" in read_model(saved, parameters, optional="head.weight")
    return model, trained


def _check(tensors: hf_weights.Checkpoint, model: Decoder, trained: bool) -> None:
    value_head = next((name for name in tensors.files if name.startswith(hf_weights.VALUE_HEAD)), None)
    if value_head is not None:
        raise UserError(
            f"{tensors.folder} has a value head of TRL ({value_head}), which is not read. Save the model as a sequence "
            "classifier with one output (score.weight), or remove the head to start with a new one"
        )
    if trained:
        outputs = tensors.slice(SCORE).get_shape()[0]
        if outputs != 1:
            raise UserError(
                f"{tensors.folder} is a classifier with {outputs} outputs; a reward model starts from a classifier "
                "with one output or from a causal model"
            )
    if not model.shape.tied:  # the language-model head of a tied one is not used here, so it may differ
        tensors.check_embedding(score_map(model)["embed.weight"].names[0], tied=False)


def with_score_head(model: Decoder) -> Decoder:
    """Replace the decoder's head, own or tied, by one with a single output."""
    model.head = nn.Linear(model.shape.width, 1, bias=False)
    return model


def head_of(model: Decoder) -> nn.Linear:
    """Return the head of a reward model."""
    assert model.head is not None
    return model.head


def score_map(model: Decoder) -> dict[str, Source]:
    """Map each parameter name of a reward model to its `Source` in a transformers directory."""
    return tensor_map(model.shape) | {"head.weight": Source((SCORE,), (-1,))}


# --- the padding id -----------------------------------------------------------------------------------------------


def padding_id(config: Any, tokenizer: PreTrainedTokenizerBase, trained: bool) -> int | None:
    """Choose the padding id of the saved config, by which transformers finds the token to score.

    Texts end in EOS, and transformers scores the last token that is not padding (`packing.scored_at`), so the padding
    should not be EOS. The choice is the first of these that the model has an embedding for:

    - the padding id of a trained classifier, because its head was trained with it
    - the tokenizer's padding token, unknown token or BOS, if it is not EOS
    - EOS; the score is then read one token before it, in training and in use

    None if there is no such token: transformers can then only score texts one by one.
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
    parameters: Iterable[tuple[str, Tensor]] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Save a directory that ``AutoModelForSequenceClassification.from_pretrained`` loads, with one output.

    ``pad`` becomes the padding token of the config and of the tokenizer, which pads on the right and truncates texts on
    the left to ``max_length`` tokens. ``parameters`` and ``dtype``: as in `decoder.save`.

    Raises UserError for a decoder without a Hugging Face config.
    """
    if model.config is None:
        raise UserError("this decoder was built without a Hugging Face config; use reward_model.load")
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.architectures = [CLASSES[model.shape.family]]
    config.num_labels = 1
    config.pad_token_id = pad
    config.dtype = model.head_weight.dtype if dtype is None else dtype
    hf_weights.write_config(config, folder)
    like = with_score_head(decoder.blueprint(model.config)).to(config.dtype)
    named = model.named_parameters() if parameters is None else parameters
    decoder.write_weights(named, folder, like, score_map(model))
    save_scorer_tokenizer(tokenizer, folder, pad=pad, max_length=max_length)


def save_scorer_tokenizer(
    tokenizer: PreTrainedTokenizerBase, folder: Path, *, pad: int | None, max_length: int
) -> None:
    """Save a tokenizer that pads and truncates as `save` describes."""
    tokenizer = copy.deepcopy(tokenizer)
    if pad is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    tokenizer.padding_side = "right"
    tokenizer.truncation_side = "left"
    tokenizer.init_kwargs |= {"padding_side": "right", "truncation_side": "left"}  # only these are saved
    tokenizer.model_max_length = max_length
    tokenizer("")  # resets the truncation of the last call, which tokenizer.json would store
    save_tokenizer(tokenizer, folder)


def write_head(folder: Path, model: Decoder) -> None:
    """Write what the head of an adapter means, which PEFT has no place for, beside the adapter."""
    known = {"problem_type": getattr(model.config, "problem_type", None)}
    atomic_files.atomic_write(folder / HEAD_FILE, json.dumps(known) + "\n")


def read_head(folder: Path, model: Decoder) -> None:
    """Give a model what `write_head` wrote beside its adapter, if it did."""
    path = folder / HEAD_FILE
    if path.is_file():
        assert model.config is not None
        model.config.problem_type = json.loads(path.read_text("utf-8"))["problem_type"]
