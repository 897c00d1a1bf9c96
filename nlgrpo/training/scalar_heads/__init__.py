"""Training of models with one output: reward models on preference pairs, value models on rollouts.

`trainer` is the loop that both share; `reward_model_training` and `value_training` define their data and losses.
`value_dataset` loads the rollouts that value models train on, and `value_loop` runs the iterations of ``nlgrpo iro``.
Read `trainer.py` first.
"""
