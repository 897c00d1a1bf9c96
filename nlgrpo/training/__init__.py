"""A training run: building it, its steps, and logging.

`build` builds a `run` from its configuration, and `planning/` describes it. `global_batch` linearizes the rewards of
all ranks. `learner` updates the policy, with `critic` for PPO; `offline` has the steps of DPO, IPO, BoNBoN and BoN-SFT.
`reference_rewards` calibrates rewards on samples of the reference. `rollouts/` draws the rollouts of the steps and
those of the reference. `metrics` logs. `losses/` holds pure tensor functions, `scalar_heads/` trains reward and value
models, `sweeps/` runs a grid. Imports `engine` and the packages below it. Read `learner.py` first.
"""
