"""Losses of the policy and of models with a scalar head, as pure tensor functions.

`policy` is the clipped policy-gradient loss with its normalizations, `kl` the KL estimators and the adaptive beta,
`gae` the advantages and value loss of PPO, `preference` DPO, IPO, BoNBoN and BoN-SFT, `bradley_terry` the loss of
reward models. Imports `objectives` and `nlgrpo.kernels`. Read `policy.py` first.
"""
