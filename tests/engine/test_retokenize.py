"""Token ids converted between tokenizers, compared with texts put together by hand."""

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from nlgrpo.engine.guides import Retokenizer
from nlgrpo.model import hf_weights
from nlgrpo.model.tokenizer import load_tokenizer


def by_letters(**special):
    """A tokenizer with one token per letter, and one for "ab"."""
    letters = ["<pad>", "<s>", "</s>", "<unk>", *" abcdefghijklmnopqrstuvwxyzé.", "ab"]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("ab|."), "isolated")
    if special.get("template"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=special["template"], special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def policy():
    """A byte-pair tokenizer."""
    return load_tokenizer(hf_weights.locate("story-lm"))


def ids(policy, text):
    return policy(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("template", [None, "<s> $A", "<s> $A </s>"])
def test_prompt_and_completion_are_converted(policy, template):
    letters = by_letters(template=template)
    retokenizer, first = Retokenizer(policy, letters, [policy.eos_token_id]), ["<s>"] * bool(template)
    prompt, completion = policy("a cat").input_ids, ids(policy, " sat.")
    whole = letters.convert_ids_to_tokens(retokenizer.whole(prompt, completion))
    assert whole == [*first, *"a cat sat."]
    ended = [*completion, policy.eos_token_id]
    read = [letters.convert_ids_to_tokens(part) for part in retokenizer.parts(prompt, ended)]
    assert read == [[*first, *"a cat"], [*" sat.", "</s>"]]
    assert [letters.convert_ids_to_tokens(part) for part in retokenizer.parts(prompt, [])] == [[*first, *"a cat"], []]


def test_a_token_across_the_boundary_belongs_to_the_completion(policy):
    letters = by_letters(template="<s> $A")
    read = Retokenizer(policy, letters, []).parts(ids(policy, "cra"), ids(policy, "b"))
    assert [letters.convert_ids_to_tokens(part) for part in read] == [["<s>", "c", "r"], ["ab"]]
    alone = Retokenizer(policy, by_letters(), []).parts(ids(policy, "a"), ids(policy, "b"))
    assert [letters.convert_ids_to_tokens(part) for part in alone] == [["ab"], []]  # the prompt has at least one token


def test_an_incomplete_character_at_the_end_is_dropped(policy):
    letters, bytes_of = by_letters(), ids(policy, "é")
    assert len(bytes_of) == 2
    retokenizer = Retokenizer(policy, letters, [])
    assert letters.convert_ids_to_tokens(retokenizer.whole(ids(policy, "caf"), bytes_of[:1])) == ["c", "a", "f"]
    assert letters.convert_ids_to_tokens(retokenizer.whole(ids(policy, "caf"), bytes_of)) == ["c", "a", "f", "é"]


def test_only_stop_ids_end_a_text(policy):
    letters, (dot,) = by_letters(), ids(policy, ".")
    prompt, completion = ids(policy, "a cat"), [*ids(policy, " sat"), dot]
    for stops, last in (([dot], "</s>"), ([], ".")):
        assert letters.convert_ids_to_tokens(Retokenizer(policy, letters, stops).whole(prompt, completion))[-1] == last
    special = [*completion, policy.eos_token_id]  # a special token outside the stops is dropped
    assert letters.convert_ids_to_tokens(Retokenizer(policy, letters, []).whole(prompt, special))[-1] == "."


def test_an_empty_text_without_a_token_is_refused(policy):
    with pytest.raises(ValueError, match="are an empty text, for which the value model's tokenizer has no token"):
        Retokenizer(policy, by_letters(), []).whole([policy.bos_token_id], [])
