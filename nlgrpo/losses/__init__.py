"""Losses of the policy and of models with a scalar head, as pure tensor functions.

`policy`: the clipped policy-gradient loss and its normalizations. `kl`: KL estimators and the adaptive beta. `gae`:
advantages and value loss of PPO. `preference`: DPO, IPO, BoNBoN and BoN-SFT. `correction`: importance
weights of completions that another policy sampled. `bradley_terry`: the loss of reward
models. Imports `nlgrpo.objectives` and `nlgrpo.kernels`. Read `policy.py` first.
"""
