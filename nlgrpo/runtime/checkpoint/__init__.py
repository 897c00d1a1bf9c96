"""Checkpoints of a run: model, optimizer, state and random generators, complete or absent.

A folder of checkpoints belongs to one run and is visible to all ranks. The checkpoint ``step-00000012`` holds

    shard-*.safetensors    tensors of the model and the optimizer, saved sharded by torch.distributed.checkpoint
    state.json             state of the run, the optimizer's settings by parameter group, and `trained_only`
    rng-00000.json ..      random generators of each rank
    manifest.json          size and SHA-256 of every other file

Nothing in it is a pickle. It is written as ``.step-00000012.partial``, synced to the disk, read again, and renamed, so
a kill at any time leaves every checkpoint complete or absent. Hidden folders are not checkpoints:

    .partial    being written        removed by the next save or load
    .old        being replaced       renamed back if its successor does not exist, otherwise removed
    .gone       being deleted        removed

With ``trained_only``, frozen parameters are left out: beside adapters, they are those of the model at the start.

`saving` takes a snapshot and writes it, also in the background; `loading` reads one, on any number of ranks; `tensors`
names the tensors of a model and its optimizer, `storage` is their files, `folders` the folders. Read `saving.py` first.
"""

from nlgrpo.runtime.checkpoint.folders import Keep, drop, verify
from nlgrpo.runtime.checkpoint.loading import load, newest
from nlgrpo.runtime.checkpoint.saving import Saver, save

__all__ = ["Keep", "Saver", "drop", "load", "newest", "save", "verify"]
