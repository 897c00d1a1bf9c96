"""Reward functions with TRL's signature, and similarity kernels for diversity objectives.

`reward_functions` loads the functions that a configuration names and scores completions; `calling` calls them, sync or
async, with a timeout; `outputs` checks their results; `builtin` and `similarity_kernels` are the built-in rewards and
kernels. Imports `data` and `runtime`. Read `reward_functions.py` first.
"""
