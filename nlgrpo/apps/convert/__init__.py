"""``nlgrpo from-trl`` and ``merge``: TRL's configurations to ours, adapters to whole models.

A run of TRL is read by `trl_files` and `trl_script`; `trl_options` has all of its options. Read
`trl_conversion.convert` first. Guide: ``docs/migrating-from-trl.md``.
"""
