"""``nlgrpo evaluate``: models as they will be used, for example with best-of-N.

`named_models` finds the models, `model_evaluation` samples and scores them, and `results` has the numbers with their
intervals and tests. Read `evaluate.py` first. Guide: ``docs/guides/evaluation.md``.
"""
