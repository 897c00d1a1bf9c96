"""Training runs: what they are made of, their steps, and their folder.

`trainer` is the life of every run: its loop, checkpoints and export. `nlgrpo.train` is the trainer of a policy, and
`scalar_heads` that of reward and value models. For a policy, `build` makes a `Setup` from the configuration and
`policy` loads the weights and the engine. In a step, `rollouts` draws completions, `global_batch` linearizes the
rewards of all ranks, and `learner` updates the policy, with `critic` for PPO. `offline` has the steps of DPO, IPO,
BoNBoN and BoN-SFT. `reference_rewards` calibrates rewards on samples of the reference, `schedules` has learning rates,
`divergence` watches the metrics, `evaluation` samples before and after training and `evaluation_summary` has the
numbers of it. `run_folder` has the files of a run, and `tracking/` logs. Imports `engine` and the packages below it.
Read `trainer.py` first.
"""
