"""``nlgrpo doctor``: what a new machine must have, and whether it computes what it should.

`findings` has the type of their results. `check_packages`, `check_machine`, `check_ranks`, `check_attention`,
`check_ops`, `check_kernels` and `check_training` are the checks; each is a generator of results. `accuracy` measures
errors in units of rounding, `triton_builds` compiles Triton's kernels without a GPU, and `rank_worker` is one rank of
the all-reduce. Heavy packages are imported inside the checks, so that an import that fails is a result. Read
`findings.py` first. Guide: ``docs/guides/doctor.md``.
"""
