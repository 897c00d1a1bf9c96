"""nlgrpo: reinforcement learning of language models for the inference-time procedure that will be used.

Read `train.py` first: one training step on one screen. Rooms, from the top down; each imports only rooms below it:

    train.py, commands      the training loop; one file for each other subcommand of ``nlgrpo``
    evaluation              estimators, results, figures and reports
    training                the update, losses, critics, baselines, checkpoints of a run, reward and value models
    engine                  generation, guided search, and completions that are sampled, scored and stored
    config, rewards         every key of a configuration; reward functions
    calibration, model      ECDFs, InfAlign transforms and variational best-of-N; the decoder and its weights
    objectives, data        best-of-N and its relatives; prompts and preference pairs
    runtime                 processes, files, clocks
    kernels                 fused ops (the folder ``kernels/`` of the repository)

``errors`` has `UserError`, and how a command ends. ``integrations`` is for users of other trainers. `ALIASES` are the
public modules that live inside a room.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from nlgrpo.errors import UserError

__all__ = ["UserError", "__version__"]
__version__ = "0.1.0"

ALIASES = {
    "nlgrpo.aggregation": "nlgrpo.objectives.aggregation",
    "nlgrpo.diversity": "nlgrpo.objectives.diversity",
    "nlgrpo.ecdf": "nlgrpo.calibration.ecdf",
    "nlgrpo.inference": "nlgrpo.engine.inference",
    "nlgrpo.variational": "nlgrpo.calibration.variational",
}


class _AliasImporter(MetaPathFinder, Loader):
    """Imports the module behind a name of `ALIASES` when the name is first imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in ALIASES else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(ALIASES[module.__name__])


sys.meta_path.append(_AliasImporter())
