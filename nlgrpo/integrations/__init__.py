"""Non-linear GRPO in other trainers: `trl` wraps reward functions so that GRPOTrainer optimises an objective.

Imports `objectives` and `rewards.calling`, and nothing of the other trainers. Read `trl.py` first.
"""
