"""Completions that are sampled, scored and stored.

`sampler` samples and scores a batch; `collect` does so for many prompts, file by file, into the content-addressed
`store`; `reference_rollouts` reads the samples of the reference that a later stage uses; `evaluation_samples` has the
completions of the evaluation prompts; `guided_responses` answers prompts by guided search. `inputs` loads the prompts
and rewards of a configuration. Read `sampler.py` first.
"""
