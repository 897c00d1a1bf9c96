"""Subcommands for guided decoding of frozen models: ``nlgrpo value``, ``iro`` and ``decode``, one file each.

`value` fits value models, `iro` alternates rollouts with fits, `decode` compares decoding methods. Imports what the
other commands import. Read `iro.py` first.
"""
