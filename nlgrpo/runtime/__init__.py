"""What every process of a run needs: ranks, files, clocks, seeds, user code, checkpoints.

`distributed.Ranks` is this process among the others; `atomic_files` writes files that are complete or absent;
`checkpoint` saves and restores model, optimizer and random states; `work_queue` shares work between ranks;
`user_code` imports a function that a configuration names. Imports no other room. Read `distributed.py` first.
"""
