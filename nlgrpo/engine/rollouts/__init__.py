"""Sampling, scoring and storage of completions.

`sampler` samples and scores a batch; `collect` does so file by file for many prompts, and saves the files in the
content-addressed `store`; `reference_rollouts` loads the reference's samples for training and decoding;
`evaluation_samples` stores the samples for the evaluation prompts; `convert` makes rollouts of candidates and back.
`inputs` loads the prompts and rewards of a configuration; `run_inputs` has digests of what a run reads.
Read `sampler.py` first.
"""
