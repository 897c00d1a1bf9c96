"""Training data: prompts and preference pairs as token ids, in an order that one integer resumes.

`sources` reads files and `datasets` names; `prompt_dataset` and `preference_dataset` tokenize; `retokenize` carries
text between two tokenizers; `assets/` is the embedded model with its prompts. Imports no other room. Read
`prompt_dataset.py` first.
"""
