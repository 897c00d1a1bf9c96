"""A training run: the update of the policy, and everything that one step passes through.

`build` makes a `run` from its configuration and `plan` describes it; `global_batch` linearizes the rewards of all ranks;
`learner` makes the update, with `critic` for PPO; `offline` has the steps of DPO, IPO, BoNBoN and BoN-SFT;
`reference_rewards` calibrates rewards on samples of the reference, which `rollout_job` collects; `metrics` logs.
`losses/` are pure tensor functions, `scalar_heads/` trains reward and value models, `sweeps/` runs a grid. Imports
`engine` and the rooms below it. Read `learner.py` first.
"""
