"""``nlgrpo verify``: the mathematics of the papers compared with exact results.

`exact` has functionals by their definition, `tabular` policies over a few responses, `calibrated` densities of the
calibrated reward, and `tree` token trees; none of them imports anything of the project. The checks compare the code
with them: `check_estimators`, `check_shape`, `check_training` and `check_inexact` of IAMA, `check_infalign`,
`check_vbon` and `check_iro` of the paper in their name. `claims` has the type of their results. Read
`claims.py` first. Guide: ``docs/guides/verification.md``.
"""
