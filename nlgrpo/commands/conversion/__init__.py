"""Commands that convert and publish: adapters to models (`merge`), TRL's configurations (`from_trl`), the Hub (`push`).

A run of TRL is read by `trl_files` and `trl_script`; `trl_options` has all of its options. May import what `commands`
may. Read `from_trl.convert` first.
"""
