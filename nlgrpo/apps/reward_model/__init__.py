"""``nlgrpo reward-model``: a reward model from preference pairs.

`training` has its data and loss; the loop is `nlgrpo.training.scalar_heads`. Read `training.py` first. Guide:
``docs/guides/reward-models.md``.
"""
