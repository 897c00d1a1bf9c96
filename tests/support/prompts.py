"""Tokenizers, files and sets of prompts for tests of data."""

import json

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from nlgrpo.data.prompt_dataset import load_prompt_set

WORDS = ["<s>", "</s>", "<unk>", *"abcdefg:12", "user", "assistant", "what", "is", "Question", "Answer"]


def make_tokenizer(before=(), after=(), **special):
    """A tokenizer with one id per word that adds ``before`` and ``after`` to every text."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    single = " ".join([*before, "$A", *after])
    core.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(w, WORDS.index(w)) for w in WORDS[:2]]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **special)


def ids(text):
    """Token ids of a text of `WORDS`."""
    return [WORDS.index(word) for word in text.split()]


def write_lines(path, rows, opener=open):
    """Write rows as JSON lines; return the path as a text."""
    with opener(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def load(source, tokenizer, *, longest=99, shuffle=False, **options):
    """Load prompts, by default in the order of the source."""
    return load_prompt_set(str(source), tokenizer, max_prompt_tokens=longest, shuffle=shuffle, **options)
