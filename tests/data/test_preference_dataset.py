"""Preference pairs from files: layouts, truncation, dropped pairs and refused input."""

import gzip
import json

import pytest
from helpers import BOS, EOS, WORDS, tiny_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from nlgrpo.data.preference_dataset import PairSet, load
from nlgrpo.rewards.specs import load as load_reward

TEMPLATE = "{% for m in messages %}{{ 'w1 ' if m.role == 'user' else 'w2 ' }}{{ m.content }} </s> {% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model(folder)
    return folder


@pytest.fixture
def tokenizer(folder):
    found = AutoTokenizer.from_pretrained(folder)
    found.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return found


@pytest.fixture
def file(tmp_path):
    def write(*rows, name="pairs.jsonl"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return str(path)

    return write


def ids(text, begin=(BOS,), end=(EOS,)):
    return [*begin, *(WORDS.index(word) for word in text.split()), *end]


def texts(*pairs, start="\n\nHuman: w3\n\nAssistant:"):
    return [{"chosen": f"{start} {c}", "rejected": f"{start} {r}"} for c, r in pairs]


def turn(role, content):
    return {"role": role, "content": content}


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_the_layout_of_hh_rlhf(file, tokenizer):
    start = "\n\nHuman: w1\n\nAssistant: w2\n\nHuman: w3\n\nAssistant:"
    rows = texts(("w5 w6", "w5 w7 w8"), start=start)
    found = load(file(*rows, name="pairs.jsonl.gz"), tokenizer, max_length=64)
    unknown = "<unk>"  # "Human:" and "Assistant:" are none of the 32 words
    both = f"{unknown} w1 {unknown} w2 {unknown} w3 {unknown}"
    assert found.chosen == [ids(f"{both} w5 w6")]
    assert found.rejected == [ids(f"{both} w5 w7 w8")]
    assert found.prompts == [start]
    assert found.margins == [0]


def test_texts_without_an_assistant_have_no_prompt(file, tokenizer):
    found = load(file({"chosen": "w1 w2", "rejected": "w1 w3"}), tokenizer, max_length=64)
    assert (found.prompts, found.chosen, found.rejected) == ([""], [ids("w1 w2")], [ids("w1 w3")])


def test_a_prompt_column_comes_before_both(file, tokenizer):
    rows = [{"question": "w1 ", "good": "w2", "bad": "w3", "lead": 2}]
    columns = {"prompt_column": "question", "chosen_column": "good", "rejected_column": "bad", "margin_column": "lead"}
    found = load(file(*rows), tokenizer, max_length=64, **columns)
    assert (found.prompts, found.chosen, found.rejected) == (["w1 "], [ids("w1 w2")], [ids("w1 w3")])
    assert found.margins == [2.0]


@pytest.mark.parametrize("apart", [False, True])
def test_conversations_go_through_the_chat_template(file, tokenizer, apart):
    tokenizer.chat_template = TEMPLATE
    start = [turn("user", "w5"), turn("assistant", "w6"), turn("user", "w7")]
    answers = {"chosen": [turn("assistant", "w8")], "rejected": [turn("assistant", "w9")]}
    row = {"prompt": start} | answers if apart else {name: start + answer for name, answer in answers.items()}
    found = load(file(row), tokenizer, max_length=64)
    shared = "w1 w5 </s> w2 w6 </s> w1 w7 </s> w2"
    assert found.chosen == [ids(f"{shared} w8 </s>", begin=(), end=())]
    assert found.rejected == [ids(f"{shared} w9 </s>", begin=(), end=())]
    assert found.prompts == [json.dumps(start)]


def test_ids_equal_those_of_the_classifier(file, tokenizer, tmp_path):
    """Training and use tokenize texts alike."""
    from nlgrpo.model import reward_model

    tiny_model(tmp_path / "causal")
    ours, _ = reward_model.load(str(tmp_path / "causal"))
    reward_model.save(ours, tmp_path / "rm", tokenizer=tokenizer, pad=0, max_length=9)
    classifier = load_reward("r", str(tmp_path / "rm")).function
    rows = [{"prompt": "w1 " * n, "chosen": "w2 " * c, "rejected": "w3"} for n, c in ((1, 2), (4, 3), (9, 1), (2, 12))]
    found = load(file(*rows), tokenizer, max_length=9)
    assert found.chosen == [classifier.encoder.ids(row["prompt"], row["chosen"]) for row in rows]
    assert [len(x) for x in found.chosen] == [5, 9, 9, 9]


# --- truncated, dropped and held-out pairs ----------------------------------------------------------------------------


def test_long_texts_lose_the_beginning_of_their_prompt(file, tokenizer):
    rows = [
        {"prompt": "w1 w2 w3 ", "chosen": "w4 w5", "rejected": "w6"},
        {"prompt": "w1 ", "chosen": "w4", "rejected": "w5"},
    ]
    rows.append({"prompt": "w1 ", "chosen": "w4", "rejected": "w5 w6 w7 w8 w9"})
    found = load(file(*rows), tokenizer, max_length=5)
    assert found.chosen == [ids("w3 w4 w5"), ids("w1 w4"), ids("w1 w4")]
    assert found.rejected == [ids("w2 w3 w6"), ids("w1 w5"), ids("w7 w8 w9")]
    assert (found.truncated, found.cut) == (2, 1)
    assert "2 truncated at the beginning; 1 of them within an answer" in repr(found)


def test_ties_are_dropped_and_counted(file, tokenizer):
    found = load(file(*texts(("w1", "w1"), ("w1", "w2"), ("w3", " w3"))), tokenizer, max_length=64)
    assert (len(found), found.ties) == (1, 2)  # the last one differs in white space, which has no token
    with pytest.raises(ValueError, match="chosen and rejected are equal in all 2 pairs"):
        load(file(*texts(("w1", "w1"), ("w2", "w2"))), tokenizer, max_length=64)


def pairs(count, prompts=None):
    prompts = prompts or [f"p{i}" for i in range(count)]
    numbers = range(count)
    lost = [i % 3 for i in numbers]
    return PairSet([[i] for i in numbers], [[i, i] for i in numbers], [0.5 * i for i in numbers], prompts, lost, ties=4)


@pytest.mark.parametrize(("count", "requested", "held"), [(10, 3, 3), (10, 9, 5), (1, 5, 0), (3, 0, 0)])
def test_the_last_pairs_are_held_out(count, requested, held):
    train, rest = pairs(count).split(requested)
    assert [x[0] for x in train.chosen] == list(range(count - held))
    assert [x[0] for x in rest.chosen] == list(range(count - held, count))
    assert [x[0] for x in rest.rejected] == list(range(count - held, count))
    assert rest.margins == [0.5 * i for i in range(count - held, count)]
    assert (train.ties, rest.ties) == (4, 0)
    assert train.truncated + rest.truncated == pairs(count).truncated


def test_pairs_with_a_held_out_prompt_are_dropped():
    found = pairs(4, ["a", "", "b", "a"]).without(["a", ""])
    assert ([x[0] for x in found.chosen], found.shared) == ([1, 2], 2)
    assert "2 dropped with a held-out prompt" in repr(found)


# --- refused input ----------------------------------------------------------------------------------------------------

GOOD = {"prompt": "w1", "chosen": "w2", "rejected": "w3"}
CONVERSATION = [turn("user", "w1"), turn("assistant", "w2")]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "is empty"),
        ([{"prompt": "a", "choosen": "b", "rejected": "c"}], {}, "no column 'chosen'.*prompt, choosen.*: 'choosen'"),
        ([{"chosen": "a", "reject": "b"}], {}, "no column 'rejected'.*Nearest: 'reject'"),
        ([GOOD], {"margin_column": "margins"}, "no column 'margins'"),
        ([GOOD, GOOD | {"chosen": None}], {}, "example 2: column 'chosen' holds a NoneType"),
        ([GOOD | {"rejected": 3}], {}, r"example 1: column 'rejected' holds a int \(3\)"),
        ([GOOD | {"rejected": []}], {}, "column 'rejected' holds a list"),
        ([GOOD | {"prompt": ["a"]}], {}, "column 'prompt' holds a list"),
        ([GOOD | {"margin": "big"}], {"margin_column": "margin"}, "column 'margin' holds a str .* finite number"),
        ([GOOD | {"margin": float("inf")}], {"margin_column": "margin"}, "instead of a finite number"),
        ([{"chosen": CONVERSATION, "rejected": "w1"}], {}, "one of chosen and rejected is a text and the other a"),
        ([{"prompt": "w1", "chosen": CONVERSATION, "rejected": CONVERSATION[:1]}], {}, "name another prompt_column"),
        ([{"chosen": CONVERSATION, "rejected": [*CONVERSATION[:1], turn("assistant", "w3")]}], {}, "no chat template"),
        ([GOOD], {"max_length": 1}, "max_length = 1"),
    ],
)  # fmt: skip
def test_bad_pairs_are_refused(file, tokenizer, rows, options, message):
    with pytest.raises(ValueError, match=message):
        load(file(*rows), tokenizer, **({"max_length": 64} | options))


def test_a_conversation_that_the_template_rejects(file, tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    row = {"chosen": CONVERSATION, "rejected": [*CONVERSATION[:1], turn("assistant", "w3")]}
    with pytest.raises(ValueError, match=r"example 1: the chat template rejects.*roles must alternate"):
        load(file(row), tokenizer, max_length=64)


def test_a_text_without_tokens(file, tokenizer):
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="example 1: the text '' has no tokens"):
        load(file({"chosen": "", "rejected": "w1"}), tokenizer, max_length=64)


def test_a_missing_file_is_reported_with_the_nearest_name(tokenizer, file):
    file(GOOD)
    with pytest.raises(ValueError, match=r"There is no file .*pair\.jsonl\. Nearest: 'pairs.jsonl'"):
        load(file(GOOD).replace("pairs", "pair"), tokenizer, max_length=9)


def test_pairs_of_hh_rlhf(shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260K")
    source = str(shared / "data" / "hh-rlhf" / "harmless-base-test.jsonl.gz")
    found = load(source, tokenizer, max_length=512, limit=200)
    assert len(found) == 200
    assert all(prompt.endswith("\n\nAssistant:") and prompt.startswith("\n\nHuman:") for prompt in found.prompts)
    assert max(map(len, found.chosen + found.rejected)) == 512
    assert all(x[0] == 1 and x[-1] == tokenizer.eos_token_id for x in found.chosen)
    with gzip.open(source, "rt") as lines:
        first = json.loads(next(lines))
    assert found.chosen[0] == [*tokenizer(first["chosen"]).input_ids, 1]
