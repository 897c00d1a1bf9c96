"""Basics of every process of a run: ranks, files, timing, seeds, user code, checkpoints.

`distributed.Ranks` is this process among the others; `atomic_files` writes files that are complete or absent;
`checkpoint` saves and restores model, optimizer and random states; `seeding` has seeds and deterministic algorithms;
`work_queue` distributes work over the ranks; `user_code` imports functions that a configuration names; `gpus` has the
limits of named GPUs. Imports no other room. Read `distributed.py` first.
"""
