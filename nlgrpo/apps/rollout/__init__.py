"""``nlgrpo rollout``: completions of the reference model, sampled and scored once for all runs that need them.

`job` samples and scores file by file, `tables` summarises what is there. Read `rollout.py` first. Guide:
``docs/guides/reference-rollouts.md``.
"""
