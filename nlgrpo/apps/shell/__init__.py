"""``nlgrpo recipes`` and ``completion``: help at the prompt. Read `recipes.py` first."""
