"""Reward functions with TRL's signature, and similarity kernels for diversity objectives.

`reward_functions` loads the functions that a configuration names and scores completions; `calling` calls one (also
async, with the columns it takes); `outputs` checks what it returned; `builtin` and `similarity_kernels` are those that
the package ships. Imports `data` and `runtime`. Read `reward_functions.py` first.
"""
