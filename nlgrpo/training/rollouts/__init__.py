"""Rollouts of a run and of the reference.

`ahead` draws the rollout of each training step, also some steps before it trains. `job` samples and scores completions
of the reference for every prompt, file by file (``nlgrpo rollout``). Imports `training` beside it, and `engine`. Read
`ahead.py` first.
"""
