"""Commands that convert: adapters into whole models (`merge`), configurations of TRL into nlgrpo's (`from_trl`).

May import what `commands` may. Read `from_trl.convert` first.
"""
