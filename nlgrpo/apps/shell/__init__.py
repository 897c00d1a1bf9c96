"""``nlgrpo recipes`` and ``completion``: help at the prompt. Read `shell.py` first."""
