"""Non-linear GRPO in other trainers. Nothing of theirs is imported."""
