"""Applications: one folder a capability, with its command and its code.

A command lives in the file with its name (``evaluate/evaluate.py``); `nlgrpo.cli` has the table of all. An application
imports the core. The core imports no application; `train.py` may, where it prints the plan and writes the report.
Applications import each other only where a contract in ``pyproject.toml`` lists it.
"""
