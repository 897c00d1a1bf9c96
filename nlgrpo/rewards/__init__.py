"""Reward functions with TRL's signature, and similarity kernels for diversity objectives.

`specs` loads the functions that a configuration names; `reward_functions` scores completions with them; `calling` calls
them, sync or async, with a timeout; `outputs` reads their results, and `history` warns of one that may be broken.
Built-in rewards are in `builtin`, `classifiers`, `judge`, `composite` and `processes/` (programs and mathematics),
kernels in `similarity_kernels`. Imports `data` and `runtime`. Read `reward_functions.py` first.
"""
