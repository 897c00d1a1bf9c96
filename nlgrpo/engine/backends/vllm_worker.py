"""Runs in the workers of vLLM. Servers load it by ``--worker-extension-cls nlgrpo.engine.backends.vllm_worker.Worker``.

It does not import vLLM.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# Keys of a Hugging Face config that must be those of the model that a server was started with.
SAME = (
    "model_type", "vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads",
    "n_head", "num_key_value_heads", "intermediate_size", "n_inner", "tie_word_embeddings",
)  # fmt: skip


def pack_tied_head(model: Any) -> None:
    """Pack an output head that shares the embedding's weight again, after new weights were loaded.

    vLLM 0.32 reloads the parameters of a checkpoint, and a tied head has none. On a CPU it computes with a packed copy
    of its weight, which would remain that of the old policy. On a GPU both share one tensor.
    """
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


class Worker:
    """Mixed into vLLM's worker."""

    def loaded_policy(self) -> dict[str, str]:
        """Name that `load_policy` was given last, as {"name": ..}; "" before."""
        return {"name": getattr(self, "_policy_name", "")}

    def load_policy(self, folder: str, name: str) -> dict[str, str]:
        """Replace the weights by those of a Hugging Face directory, remember their ``name``, and return {}.

        Before anything is changed, return {"refused": why} for a directory that is not there or has another model, and
        {"outdated": why} for an older version than the one of the same run that it has: ranks may call at the same
        time. vLLM itself would leave a model without weights, and its next request would end the server. An error
        would reach the trainer as a text only.
        """
        worker: Any = self
        run, _, version = name.rpartition(":")
        its_run, _, newest = self.loaded_policy()["name"].rpartition(":")
        if its_run and run == its_run and int(newest) > int(version):
            return {"outdated": f"it has newer weights than {name}: those of version {newest}"}
        if why := fault_of(folder, worker.model_config.hf_config):
            return {"refused": why}
        self._policy_name = ""
        worker.reload_weights(weights_path=folder)
        self._policy_name = name
        pack_tied_head(worker.get_model())
        return {}


def fault_of(folder: str, own: Any) -> str:
    """Return why a server with the config ``own`` cannot take the weights in ``folder``; "" if it can."""
    path = Path(folder)
    if not os.path.isdir(folder):  # also False, without an error, for a folder of another user
        return (
            f"{folder} does not exist here: the server and the trainer need a shared disk; "
            "set vllm.folder to a folder that both can read"
        )
    if not any(path.glob("*.safetensors")):
        return f"{folder} has no weights in the format safetensors"
    theirs = json.loads((path / "config.json").read_text("utf-8"))
    for key in SAME:
        if key in theirs and hasattr(own, key) and theirs[key] != getattr(own, key):
            return (
                f"the server was started with another model than the policy: {key} is {getattr(own, key)!r}, and "
                f"{theirs[key]!r} in {folder}"
            )
    return ""
