"""``nlgrpo value``, ``iro`` and ``decode``: value-guided decoding of a frozen model.

`value_training` fits value models to the rollouts that `value_dataset` loads, `value_loop` alternates rollouts with
fits (IRO), `decoding` compares decoding methods, with the two models of `implicit_reward` among them. Read `iro.py`
first. Guide: ``docs/guides/value-guided-decoding.md``.
"""
