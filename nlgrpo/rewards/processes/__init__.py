"""Rewards that run in processes of their own, because what they compute may hang or do harm.

`code_execution` runs programs and `math_answers` compares expressions; `function_process` is the process of a function
of the user (``process = true``). `sandbox`, `math_worker` and `function_worker` are the scripts of these processes. May
import what `rewards` may. Read `code_execution.Code` first.
"""
