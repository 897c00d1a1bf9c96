"""Configurations: every key with its help, recipes, command-line overrides, and what is refused.

`schema` has the dataclasses of a training run, `optim_config` its section [optim], `reward_model_config` and
`value_config` those of the other two; `recipes` are functions that return a whole configuration; `overrides` lays TOML
files and ``--section.key value`` over it; `command_line` checks the arguments of every command; `validate` refuses
what cannot be run; `grid` expands a sweep. Imports `objectives`, `calibration`, `model` and `runtime`. Read
`schema.py` first.
"""
