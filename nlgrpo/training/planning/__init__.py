"""The plan of a run: its batch arithmetic, memory and speed, before anything is loaded.

`table` is what a run prints before it starts. `workload` holds the numbers that decide memory and time; `memory`
estimates the bytes of each phase from it, `activations` those of a block by tracing it without memory, `roofline` the
seconds of each phase on the machines of `hardware`. `advice` recommends settings and refuses what cannot fit. `notes`
points out risky settings. Read `memory.py` first.
"""
