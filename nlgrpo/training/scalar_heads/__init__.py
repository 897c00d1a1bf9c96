"""Training of models with one output: reward models on preference pairs, value models on rollouts.

`trainer` is the loop that both share, `reward_model_training` and `value_training` what sets them apart,
`value_dataset` the prefixes of rollouts that values are fitted to, `value_loop` the iterations of ``nlgrpo iro``. Read `trainer.py` first.
"""
