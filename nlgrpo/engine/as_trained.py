"""How a policy was sampled and prompted in training: written beside the exported model, and read to continue so.

``generation_config.json`` is for transformers and vLLM: stop ids, temperature, filters and the number of new tokens.
``nlgrpo.json`` also has what they have no place for: the system prompt and other options of prompts, and the original
model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

from nlgrpo import __version__
from nlgrpo.config.schema import Config, DataConfig
from nlgrpo.data.conversations import ChatOptions, load_tools
from nlgrpo.engine.rollouts.store import digest_of_weights
from nlgrpo.engine.sampling import Sampling
from nlgrpo.errors import UserError
from nlgrpo.model.hf_weights import SAMPLING_FILES
from nlgrpo.model.tokenizer import count_tokens
from nlgrpo.runtime import atomic_files

GENERATION, FILE = SAMPLING_FILES
BASE = "base_digest"  # key of the digest of the weights that training started from


@dataclass(frozen=True)
class AsTrained:
    """What the training of a policy assumed of its prompts and its sampler."""

    base: str
    """Path or name of the model that training started from."""
    sampling: Sampling
    chat: ChatOptions = ChatOptions()  # noqa: RUF009 - frozen
    add_bos: bool | None = None
    template: str = "{prompt}"
    """Text that the prompts were made of, with columns of the data in braces."""

    @classmethod
    def of(cls, cfg: Config, sampling: Sampling) -> AsTrained:
        """Return what a run assumes. ``sampling``: as it samples, with all stop ids.

        An option that sources of a mixture set differently is that of [data]. Raises UserError for tools that cannot
        be loaded.
        """
        data = cfg.data
        if cfg.environment.id:  # which makes the prompts; only the arguments of the template are those of [data]
            data = DataConfig(chat_template_kwargs=data.chat_template_kwargs)
        chat = ChatOptions(data.system_prompt, data.chat, data.chat_template_kwargs, load_tools(data.tools))
        return cls(cfg.model.path, sampling, chat, data.add_bos, data.template)

    def write(self, folder: Path, tokenizer: PreTrainedTokenizerBase, vocab: int, digest: str) -> None:
        """Write both files into the folder of an exported model or adapter.

        ``vocab``: number of rows of its head. ``digest``: of the model that training started from.
        """
        _write(folder, asdict(self) | {BASE: digest})
        settings = _generation_config(self.sampling, tokenizer, folder, vocab)
        atomic_files.atomic_write(folder / GENERATION, json.dumps(settings, indent=2) + "\n")


def _generation_config(
    sampling: Sampling, tokenizer: PreTrainedTokenizerBase, folder: Path, vocab: int
) -> dict[str, Any]:
    """Return the content of generation_config.json with which transformers and vLLM sample as ``sampling``.

    It names every filter, because transformers 4 has defaults of its own (the 50 most likely tokens), and suppresses
    ids without a token. Padding and BOS are those of the files in ``folder``, if they have them, else those of the
    tokenizer.
    """
    ids = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for name in ("config.json", GENERATION):
        saved = json.loads((folder / name).read_text("utf-8")) if (folder / name).is_file() else {}
        ids |= {key: saved[key] for key in ids if saved.get(key) is not None}
    ends = list(sampling.stop_ids)
    settings = ids | {
        "do_sample": True,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "max_new_tokens": sampling.max_new_tokens,
        "min_p": sampling.min_p or None,
        "suppress_tokens": list(range(count_tokens(tokenizer), vocab)) or None,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "transformers_version": transformers.__version__,
    }
    return {name: value for name, value in settings.items() if value is not None}


def write_base(folder: Path, base: str, digest: str) -> None:
    """Write ``nlgrpo.json`` with the original model only: for the adapter of a model that samples nothing."""
    _write(folder, {"base": base, BASE: digest})


def _write(folder: Path, known: Mapping[str, Any]) -> None:
    text = json.dumps({"nlgrpo": __version__, **known}, indent=2, ensure_ascii=False)
    atomic_files.atomic_write(folder / FILE, text + "\n")


def check_base(adapter: str | Path, source: Path) -> None:
    """Check that an adapter was trained on the weights in ``source``, if its folder says on which.

    Raises UserError for other weights, and for a damaged file.
    """
    path = Path(os.path.expanduser(adapter)) / FILE
    if not path.is_file():
        return
    try:
        saved = json.loads(path.read_text("utf-8"))
        base = saved["base"]
        trained_on = saved[BASE]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error!r}); expected the model that the adapter was trained on. Remove the file "
            "to use the adapter with any model"
        ) from error
    found = digest_of_weights(source)
    if trained_on != found:
        raise UserError(
            f"{adapter} was trained on {base}, and {source} has other weights (digests {trained_on} and {found}); give "
            f"the model that it was trained on, or remove {path} to use it with this one"
        )


def read_as_trained(folder: Path) -> AsTrained | None:
    """Read what the training of the model in ``folder`` assumed; None if it is not an export of nlgrpo.

    Raises UserError for a damaged file.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        saved = json.loads(path.read_text("utf-8"))
        sampling = saved["sampling"] | {"stop_ids": tuple(saved["sampling"]["stop_ids"])}
        return AsTrained(
            base=saved["base"],
            sampling=Sampling(**sampling),
            chat=ChatOptions(**saved["chat"]),
            add_bos=saved["add_bos"],
            template=saved["template"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read ({error!r}); expected what a run of nlgrpo exported. Remove the file to use the "
            "defaults"
        ) from error
