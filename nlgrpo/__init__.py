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

``errors`` has `UserError`, and how a command ends; ``sections`` the parts of a configuration that rooms below
``config`` take. ``integrations`` is for users of other trainers. ``aggregation``, ``diversity``, ``ecdf``,
``inference`` and ``variational`` have the public names of modules that live inside a room.
"""

from nlgrpo.errors import UserError

__all__ = ["UserError", "__version__"]
__version__ = "0.1.0"
