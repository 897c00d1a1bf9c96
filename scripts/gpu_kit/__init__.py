"""The GPU kit: turns a few minutes on any GPU into a committed file of checks and figures.

    __main__      the command line of scripts/gpu.sh
    plan          the steps: their groups, time limits, and how a rehearsal differs
    runner        runs each step in a process group of its own and writes the JSON after each
    child         one step, in its own process
    machine       card, driver, versions and commit, for the JSON
    surroundings  the environment of a step: import paths without an installation, the compiled ops
    wheels        `prepare`: downloads and unpacks what GPU machines lack
    tables        writes the tables in the documentation from the JSON files
    measuring     times, kernels and launches of a piece of code
    operations    floating-point operations of an update, for its share of the peak rate
    models        random models, made on the device from their configs

``check_*`` and ``speed_*`` are the steps. Each has a function ``run(kit)``, which calls ``kit.put`` as soon as it knows
a value. A step runs on the device that the kit names: a GPU, or in a rehearsal the CPU, by the same code. Read
`plan.py`, then `runner.py`.
"""
