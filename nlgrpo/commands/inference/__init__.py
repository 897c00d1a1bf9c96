"""Subcommands that respond with a model: ``nlgrpo generate`` and ``nlgrpo serve``, one file each.

Imports what the other commands import. Read `generate.py` first.
"""
