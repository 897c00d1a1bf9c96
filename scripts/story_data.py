"""Training data of the default model: stories, their tokenizer, and documents of about uniform length.

The length-reward experiment (IAMA, section 6.1) starts from a reference whose completion lengths are about uniform
(J.2). A document is therefore a part of a story, cut between two words after a uniformly sampled number of tokens,
followed by the end token. A model of such documents stops with the hazard 1 / (limit - length) at every position.
Documents of whole sentences were tried first. Such a model can change its lengths only by where its sentences end, and
training for lengths then destroys its English.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SEPARATOR = "<|endoftext|>"
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
VOCABULARY = 1024
CONTEXT, COMPLETION = 160, 128  # tokens: context of the model, and longest completion
PROMPT = 10  # tokens of a typical prompt; a document is such a prompt and a completion
TARGET = (5, 123)  # tokens of a completion, sampled uniformly
QUOTES = str.maketrans({"“": '"', "”": '"', "’": "'", "‘": "'", "–": "-", "—": "-", "…": "..."})
LONGEST = 300  # characters of a sentence; a longer one is usually an unclosed quotation
SENTENCE_END = re.compile(r'[.!?]["\']*(?= |$)')


def read_stories(path: Path) -> list[list[str]]:
    """Read stories as lists of sentences. The piece after the last separator may be incomplete and is dropped."""
    try:
        text = path.read_text(encoding="utf-8").translate(QUOTES)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); give a text file of stories.") from error
    pieces = text.split(SEPARATOR)[:-1]
    stories = [sentences(" ".join(piece.split())) for piece in pieces]
    if sum(map(bool, stories)) < 3:
        raise ValueError(
            f"{path} holds {sum(map(bool, stories))} complete stories; at least 3 are needed, each followed by "
            f"{SEPARATOR} (one of them is held out)."
        )
    return [story for story in stories if story]


def sentences(text: str) -> list[str]:
    """Split ``text`` at sentence ends outside quotations; drop everything from the first very long sentence on."""
    found, start = [], 0
    for match in SENTENCE_END.finditer(text):
        if text.count('"', start, match.end()) % 2 == 0:
            if match.end() - start > LONGEST:
                break
            found.append(text[start : match.end()].strip())
            start = match.end()
    return found


def train_tokenizer(stories: list[list[str]]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that adds ``<s>`` before a text and no end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((" ".join(story) for story in stories), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


@dataclass
class Documents:
    """Samples training documents from stories: parts of about uniform length, as token ids."""

    first: list[list[list[int]]]  # token ids of sentence i of story s at the start of a text
    later: list[list[list[int]]]  # the same after another sentence (the first token has a space)
    starts: list[list[int]]  # sentences of story s from which on the text is long enough for any document
    word_starts: frozenset[int]  # tokens that begin with a space
    bos: int
    eos: int

    @classmethod
    def build(cls, stories: list[list[str]], tokenizer: PreTrainedTokenizerFast) -> Documents:
        """Encode the stories, without those too short for the longest document."""

        def encode(story: list[str], space: str) -> list[list[int]]:
            return [tokenizer.encode(space + sentence, add_special_tokens=False) for sentence in story]

        first = [encode(story, "") for story in stories]
        later = [encode(story, " ") for story in stories]
        need = PROMPT + COMPLETION
        starts = [[i for i in range(len(story)) if sum(map(len, story[i:])) >= need] for story in later]
        long = [s for s, found in enumerate(starts) if found]
        if not long:
            raise ValueError(
                f"none of {len(stories)} stories has the {need} tokens that the longest documents need; "
                "a text with more and longer stories is needed."
            )
        words = frozenset(i for token, i in tokenizer.get_vocab().items() if token.startswith("\u0120"))
        return cls(
            first=[first[s] for s in long],
            later=[later[s] for s in long],
            starts=[starts[s] for s in long],
            word_starts=words,
            bos=tokenizer.bos_token_id,
            eos=tokenizer.eos_token_id,
        )

    def tokens(self) -> int:
        return sum(len(sentence) for story in self.later for sentence in story)

    def draw(self, rng: random.Random) -> list[int]:
        """Sample a document. Half of them start where a story starts, and all end between two words."""
        s = rng.randrange(len(self.starts))
        i = self.starts[s][0] if rng.random() < 0.5 else rng.choice(self.starts[s])
        return self.cut([token for sentence in (self.first[s][i], *self.later[s][i + 1 :]) for token in sentence], rng)

    def cut(self, ids: list[int], rng: random.Random) -> list[int]:
        """Return ``<s>``, ``ids`` up to the first word that starts after a uniformly sampled length, and ``</s>``."""
        end = PROMPT + round(rng.uniform(*TARGET))
        while end < len(ids) and ids[end] not in self.word_starts:
            end += 1
        return [self.bos, *ids[: min(end, CONTEXT - 2)], self.eos]
