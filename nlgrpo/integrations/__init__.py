"""Non-linear GRPO in other trainers: `trl` wraps reward functions so that GRPOTrainer optimises an objective.

Imports `objectives`, `rewards.calling` and `rewards.outputs`, but no other trainer. Read `trl.py` first.
"""
