"""Commands that convert and publish: adapters to models (`merge`), TRL's configurations (`from_trl`), the Hub (`push`).

May import what `commands` may. Read `from_trl.convert` first.
"""
