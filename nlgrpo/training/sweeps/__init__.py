"""A grid of runs: what has become of each point, and the processes that run them.

`state` reads and writes ``sweep.json``; `runner` starts each point as a process of ``nlgrpo train`` in a folder of its
own, and resumes what was stopped. `config.grid` expands the options. Read `state.py` first.
"""
