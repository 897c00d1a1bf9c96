"""The subcommands of ``nlgrpo``, one file each; `nlgrpo.cli` imports only the requested one.

A file has the command's options as a dataclass, with the help of each, and a ``main`` that returns the exit status.
``nlgrpo train`` is `nlgrpo.train`. `inference/` has the commands that respond, `guided/` those for guided decoding,
`verification/` the checks that ``nlgrpo verify`` runs, and `diagnosis/` those of ``nlgrpo doctor``. Imports every other
room; nothing imports it.
"""
