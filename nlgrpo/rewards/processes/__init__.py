"""Rewards that run in processes of their own, because what they compute may hang or do harm: programs and mathematics.

`sandbox` and `math_worker` are the scripts of these processes, and import nothing of nlgrpo. May import what `rewards`
may. Read `code_execution.Code` first.
"""
