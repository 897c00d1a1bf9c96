"""``nlgrpo curves``: win rate against KL of transformed rewards, computed without a model.

Read `curves.py` first. Guide: ``docs/guides/infalign-ctrl.md``.
"""
