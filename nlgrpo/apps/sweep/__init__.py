"""``nlgrpo sweep``: a grid of runs, the state of each point, and the processes or cluster jobs that run them.

`state` reads and writes ``sweep.json``; `runner` runs each point with ``nlgrpo train`` in its own folder, and resumes
stopped points; `launchers` start a run, as a process or as a job of SLURM, and `job` is what that job runs.
`grid` expands the options. Read `state.py` first. Guide: ``docs/guides/sweeps.md``.
"""
