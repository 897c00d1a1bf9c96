"""The mathematics of the papers, checked against exact answers.

`exact` and `tabular` are the truths: functionals by their definition, and policies over a few responses. They import
nothing of the project. `check_estimators`, `check_shape` and `check_training` compare the objectives with them;
`claims` is what a check returns. Only `commands.verify` imports this room. Read `claims.py` first.
"""
