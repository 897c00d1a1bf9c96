"""Checks of `nlgrpo verify`: the mathematics of the papers compared with exact results.

`exact` has functionals by their definition, and `tabular` policies over a few responses; both import nothing of the
project. `check_estimators`, `check_shape` and `check_training` compare the objectives with them; `claims` has the type
of their results. Only `commands.verify` imports this room. Read `claims.py` first.
"""
