"""Adapters of a TRL run: those of a script's LoraConfig, with PEFT's defaults, or of TRL's own script, with TRL's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nlgrpo.apps.convert import trl_options
from nlgrpo.apps.convert.trl_output import Converted
from nlgrpo.apps.convert.trl_script import PEFT
from nlgrpo.errors import UserError

# PEFT's target modules by the type of the model.
TARGETS = {
    "llama": ("q_proj", "v_proj"),
    "mistral": ("q_proj", "v_proj"),
    "qwen2": ("q_proj", "v_proj"),
    "qwen3": ("q_proj", "v_proj"),
    "gpt_neox": ("query_key_value",),
    "gpt2": ("c_attn",),
}
# Types by words in the names of models; the first one counts.
WORDS = {
    "pythia": "gpt_neox",
    "neox": "gpt_neox",
    "gpt2": "gpt2",
    "qwen3": "qwen3",
    "qwen": "qwen2",
    "mistral": "mistral",
    "llama": "llama",
    "smollm": "llama",
}


def convert(given: Mapping[str, Any], out: Converted) -> None:
    """Write the section [lora], if the run has adapters."""
    if given[PEFT] is not None:
        keys = _of_peft(given[PEFT], out)
    elif given["use_peft"]:
        keys = {
            "r": given["lora_r"],
            "lora_alpha": given["lora_alpha"],
            "lora_dropout": given["lora_dropout"],
            "use_rslora": given["use_rslora"],
            "target_modules": given["lora_target_modules"],
            "modules_to_save": given["lora_modules_to_save"],
        }
    else:
        return
    out.set("lora.rank", keys["r"])
    out.set("lora.alpha", float(keys["lora_alpha"]))
    out.set("lora.dropout", float(keys["lora_dropout"]))
    out.set("lora.rslora", keys["use_rslora"])
    path = given["model_name_or_path"] or given["model"]
    out.set("lora.target_modules", _modules("target_modules", keys) or _targets(path, out))
    out.set("lora.modules_to_save", _modules("modules_to_save", keys))


def _of_peft(options: Mapping[str, Any], out: Converted) -> dict[str, Any]:
    """Arguments of a LoraConfig with PEFT's defaults; those that set no key are listed."""
    known = trl_options.LORA
    keys = trl_options.defaults(known)
    for name, value in options.items():
        if name not in known:
            out.drop(f"LoraConfig.{name}", value, "not an argument of PEFT's LoraConfig (0.21)")
            continue
        keys[name] = trl_options.typed(f"LoraConfig.{name}", value, known[name])
        if not known[name].keys and keys[name] != known[name].default and name not in ("task_type", "inference_mode"):
            out.drop(f"LoraConfig.{name}", value, known[name].note)
    return keys


def _modules(name: str, keys: Mapping[str, Any]) -> list[str]:
    value = keys[name] or []
    if not isinstance(value, str | list | tuple | set):
        raise UserError(f"{name} = {value!r}: expected names of modules")
    if isinstance(value, str):
        return [value]
    return [str(module) for module in (sorted(value) if isinstance(value, set) else value)]


def _targets(path: Any, out: Converted) -> list[str]:
    """PEFT's modules for the model. Its type is in its config.json; one that its name suggests is noted."""
    kind = model_type(path)
    if not (isinstance(path, str) and _config(path).is_file()):
        of = f"models of type {kind!r}, as the name suggests" if kind else "Llama, Mistral and Qwen"
        out.notes.append(f"lora.target_modules: PEFT's default for {of}; it depends on the type of the model")
    return list(TARGETS.get(kind, TARGETS["llama"]))


def model_type(path: Any) -> str:
    """The model_type in a directory's config.json, or what a name suggests; empty if nothing is known."""
    if not isinstance(path, str):
        return ""
    if _config(path).is_file():
        try:
            return str(json.loads(_config(path).read_text("utf-8"))["model_type"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{_config(path)} has no readable model_type: {error!r}") from error
    return next((kind for word, kind in WORDS.items() if word in path.lower()), "")


def _config(path: str) -> Path:
    return Path(path).expanduser() / "config.json"
