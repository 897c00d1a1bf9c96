"""A training run: building it, its steps, and logging.

`build` builds a `run` from its configuration. `rollouts` draws the completions of each step, `global_batch` linearizes
the rewards of all ranks, and `learner` updates the policy, with `critic` for PPO. `offline` has the steps of DPO, IPO,
BoNBoN and BoN-SFT, `reference_rewards` calibrates rewards on samples of the reference, and `scalar_head_trainer`
trains reward and value models. `run_folder` has the files of a run, `evaluation_summary` the numbers before and after
training, and `tracking/` logs. Imports `engine` and the packages below it. Read `learner.py` first.
"""
