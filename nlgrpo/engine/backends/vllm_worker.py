"""Runs in the workers of vLLM. Servers load it by ``--worker-extension-cls nlgrpo.engine.backends.vllm_worker.Worker``.

It imports neither vLLM nor another file of nlgrpo.
"""

from __future__ import annotations

from typing import Any


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

    def load_policy(self, folder: str) -> None:
        """Replace the weights by those of a Hugging Face directory."""
        worker: Any = self
        worker.reload_weights(weights_path=folder)
        pack_tied_head(worker.get_model())
