"""Non-linear GRPO in other trainers: `trl` wraps reward functions so that GRPOTrainer optimises an objective.

Imports `objectives` and, of `rewards`, `calling`, `outputs` and `history`, but no other trainer. Read `trl.py` first.
"""
