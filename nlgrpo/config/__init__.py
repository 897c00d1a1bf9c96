"""Configurations: every key with its help, recipes, command-line overrides, and what is refused.

`schema` has the dataclasses of a training run, with the bound of each key, and what those of reward models and value
models share; `recipes` are functions that return a whole configuration; `overrides` lays ``--section.key value`` over
it; `command_line` checks the arguments of every command; `validate` refuses what cannot be run; `comparing` finds what
differs, and `toml_file` writes a configuration. Imports `objectives`, `calibration`, `model` and `runtime`. Read
`schema.py` first.
"""
