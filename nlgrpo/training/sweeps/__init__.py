"""A grid of runs: the state of each point, and the processes that run them.

`state` reads and writes ``sweep.json``; `runner` runs each point with ``nlgrpo train`` in its own process and folder,
and resumes stopped points. `config.grid` expands the options. Read `state.py` first.
"""
