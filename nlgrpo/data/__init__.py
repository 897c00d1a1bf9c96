"""Training data: prompts and preference pairs as token ids. One integer, the cursor, is enough to resume their order.

`sources` reads files and data sets of the hub; `prompt_dataset` and `preference_dataset` tokenize; `encoding` is
between texts and token ids, also of two tokenizers; `assets/` is the embedded model with its prompts. Imports no other
room. Read `prompt_dataset.py` first.
"""
