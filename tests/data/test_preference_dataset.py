"""Preference pairs from files: layouts, truncation, dropped pairs and refused input."""

import gzip
import json

import pytest
from support.helpers import BOS, EOS, WORDS, tiny_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from nlgrpo.data.preference_dataset import PairSet, load_preferences
from nlgrpo.rewards.specs import load_reward as load_reward

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


@pytest.fixture
def load(file, tokenizer):
    """Load the pairs of these rows."""

    def run(*rows, max_length=64, **options):
        return load_preferences(file(*rows), tokenizer, max_length=max_length, **options)

    return run


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
    found = load_preferences(file(*rows, name="pairs.jsonl.gz"), tokenizer, max_length=64)
    unknown = "<unk>"  # "Human:" and "Assistant:" are none of the 32 words
    both = f"{unknown} w1 {unknown} w2 {unknown} w3 {unknown}"
    assert found.chosen == [ids(f"{both} w5 w6")]
    assert found.rejected == [ids(f"{both} w5 w7 w8")]
    assert found.prompts == [start]
    assert found.margins == [0]


def test_texts_without_an_assistant_have_no_prompt(load):
    found = load({"chosen": "w1 w2", "rejected": "w1 w3"})
    assert (found.prompts, found.chosen, found.rejected) == ([""], [ids("w1 w2")], [ids("w1 w3")])


def test_a_prompt_column_comes_before_both(load):
    rows = [{"question": "w1 ", "good": "w2", "bad": "w3", "lead": 2}]
    columns = {"prompt_column": "question", "chosen_column": "good", "rejected_column": "bad", "margin_column": "lead"}
    found = load(*rows, **columns)
    assert (found.prompts, found.chosen, found.rejected) == (["w1 "], [ids("w1 w2")], [ids("w1 w3")])
    assert found.margins == [2.0]


@pytest.mark.parametrize("apart", [False, True])
def test_conversations_go_through_the_chat_template(load, tokenizer, apart):
    tokenizer.chat_template = TEMPLATE
    start = [turn("user", "w5"), turn("assistant", "w6"), turn("user", "w7")]
    answers = {"chosen": [turn("assistant", "w8")], "rejected": [turn("assistant", "w9")]}
    row = {"prompt": start} | answers if apart else {name: start + answer for name, answer in answers.items()}
    found = load(row)
    shared = "w1 w5 </s> w2 w6 </s> w1 w7 </s> w2"
    assert found.chosen == [ids(f"{shared} w8 </s>", begin=(), end=())]
    assert found.rejected == [ids(f"{shared} w9 </s>", begin=(), end=())]
    assert found.prompts == [json.dumps(start)]


def test_ids_equal_those_of_the_classifier(load, tokenizer, tmp_path):
    """Training and use tokenize texts alike."""
    from nlgrpo.model import reward_model

    tiny_model(tmp_path / "causal")
    ours, _ = reward_model.load_reward_model(str(tmp_path / "causal"))
    reward_model.save(ours, tmp_path / "rm", tokenizer=tokenizer, pad=0, max_length=9)
    classifier = load_reward("r", str(tmp_path / "rm")).function
    rows = [{"prompt": "w1 " * n, "chosen": "w2 " * c, "rejected": "w3"} for n, c in ((1, 2), (4, 3), (9, 1), (2, 12))]
    found = load(*rows, max_length=9)
    assert found.chosen == [classifier.encoder.ids(row["prompt"], row["chosen"]) for row in rows]
    assert [len(x) for x in found.chosen] == [5, 9, 9, 9]


# --- truncated, dropped and held-out pairs ----------------------------------------------------------------------------


def test_long_texts_lose_the_beginning_of_their_prompt(load):
    rows = [
        {"prompt": "w1 w2 w3 ", "chosen": "w4 w5", "rejected": "w6"},
        {"prompt": "w1 ", "chosen": "w4", "rejected": "w5"},
    ]
    rows.append({"prompt": "w1 ", "chosen": "w4", "rejected": "w5 w6 w7 w8 w9"})
    found = load(*rows, max_length=5)
    assert found.chosen == [ids("w3 w4 w5"), ids("w1 w4"), ids("w1 w4")]
    assert found.rejected == [ids("w2 w3 w6"), ids("w1 w5"), ids("w7 w8 w9")]
    assert (found.truncated, found.cut) == (2, 1)
    assert "2 truncated at the beginning; 1 of them within an answer" in repr(found)


def test_ties_are_dropped_and_counted(load):
    found = load(*texts(("w1", "w1"), ("w1", "w2"), ("w3", " w3")))
    assert (len(found), found.ties) == (1, 2)  # the last one differs in white space, which has no token
    with pytest.raises(ValueError, match="chosen and rejected are equal in all 2 pairs"):
        load(*texts(("w1", "w1"), ("w2", "w2")))


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
        ([{"prompt": "a", "choosen": "b", "rejected": "c"}], {}, "no column 'chosen'; did you mean 'choosen'"),
        ([{"chosen": "a", "reject": "b"}], {}, "no column 'rejected'; did you mean 'reject'"),
        ([GOOD], {"margin_column": "margins"}, "no column 'margins'"),
        ([GOOD, GOOD | {"chosen": None}], {}, "example 2: column 'chosen' holds a NoneType"),
        ([GOOD | {"rejected": True}], {}, r"example 1: column 'rejected' holds a bool \(True\)"),
        ([GOOD | {"rejected": []}], {}, "column 'rejected' holds a list"),
        ([GOOD | {"prompt": ["a"]}], {}, "column 'prompt' holds a list"),
        ([GOOD | {"margin": "big"}], {"margin_column": "margin"}, "column 'margin' holds a str .* finite number"),
        ([GOOD | {"margin": float("inf")}], {"margin_column": "margin"}, "instead of a finite number"),
        ([{"chosen": CONVERSATION, "rejected": "w1"}], {}, "one of chosen and rejected is a text and the other a"),
        ([{"prompt": "w5", "chosen": CONVERSATION, "rejected": CONVERSATION[:1]}], {}, "set prompt_column = ''"),
        ([{"chosen": CONVERSATION, "rejected": [*CONVERSATION[:1], turn("assistant", "w3")]}], {}, "no chat template"),
        ([GOOD], {"max_length": 1}, "max_length = 1"),
    ],
)  # fmt: skip
def test_bad_pairs_are_refused(load, rows, options, message):
    with pytest.raises(ValueError, match=message):
        load(*rows, **options)


def test_a_conversation_that_the_template_rejects(load, tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    row = {"chosen": CONVERSATION, "rejected": [*CONVERSATION[:1], turn("assistant", "w3")]}
    with pytest.raises(ValueError, match=r"example 1: the chat template rejects.*roles must alternate"):
        load(row)


def test_a_text_without_tokens(load, tokenizer):
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="example 1: the text '' has no tokens"):
        load({"chosen": "", "rejected": "w1"})


def test_a_missing_file_is_reported_with_the_nearest_name(tokenizer, file):
    file(GOOD)
    with pytest.raises(ValueError, match=r"There is no file .*pair\.jsonl; did you mean 'pairs.jsonl'"):
        load_preferences(file(GOOD).replace("pairs", "pair"), tokenizer, max_length=9)


def test_pairs_of_hh_rlhf(shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260K")
    source = str(shared / "data" / "hh-rlhf" / "harmless-base-test.jsonl.gz")
    found = load_preferences(source, tokenizer, max_length=512, limit=200)
    assert len(found) == 200
    assert all(prompt.endswith("\n\nAssistant:") and prompt.startswith("\n\nHuman:") for prompt in found.prompts)
    assert max(map(len, found.chosen + found.rejected)) == 512
    assert all(x[0] == 1 and x[-1] == tokenizer.eos_token_id for x in found.chosen)
    with gzip.open(source, "rt") as lines:
        first = json.loads(next(lines))
    assert found.chosen[0] == [*tokenizer(first["chosen"]).input_ids, 1]


# --- prompts that come twice, or not at all ---------------------------------------------------------------------------

ASKED = "w1 w2 w3"


def test_a_prompt_that_both_answers_repeat_is_read_once(load):
    rows = [{"prompt": f"{ASKED} ", "chosen": f"{ASKED} w5", "rejected": f"{ASKED} w6"}]
    found = load(*rows)
    assert (found.chosen, found.rejected) == ([ids(f"{ASKED} w5")], [ids(f"{ASKED} w6")])
    assert (found.prompts, found.repeated) == ([ASKED], 1)
    assert "1 of the source with the prompt in both answers, read once" in repr(found)


@pytest.mark.parametrize(
    ("rows", "repeated", "chosen"),
    [
        (
            [("w1", "w1 w2", "w1 w3"), ("w4", "w4 w5", "w4 w6")],
            2,
            ["w1 w2", "w4 w5"],
        ),  # all answers repeat their prompts
        ([("w1", "w1 w2", "w1 w3"), ("w4 ", "w5", "w6")], 0, ["<unk> w2", "w4 w5"]),  # one does, perhaps by chance
        ([(ASKED, f"{ASKED} w5", f"{ASKED} w6"), ("w4 ", "w5", "w6")], 1, [f"{ASKED} w5", "w4 w5"]),  # no chance
        ([("w1 w2 ", "w1 w2 w3", "w4")], 0, ["w1 w2 w1 w2 w3"]),  # only one of the answers
    ],
)
def test_short_prompts_may_be_repeated_by_chance(load, rows, repeated, chosen):
    named = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows]
    found = load(*named)
    assert (found.repeated, found.chosen) == (repeated, list(map(ids, chosen)))


def test_conversations_that_repeat_their_prompt(load, tokenizer):
    tokenizer.chat_template = TEMPLATE
    start = [turn("user", "w5")]
    whole = {name: [*start, turn("assistant", answer)] for name, answer in (("chosen", "w6"), ("rejected", "w7"))}
    expected = [ids("w1 w5 </s> w2 w6 </s>", begin=(), end=())]
    for prompt in (start, "w5", " w5\n", json.dumps(start)):  # a text is the prompt of ultrafeedback
        found = load({"prompt": prompt} | whole)
        assert (found.chosen, found.prompts) == (expected, [json.dumps(start)])
    other = {"prompt": [turn("user", "w8")]} | whole
    with pytest.raises(ValueError, match="example 1: column 'chosen' begins with a message of the role 'user' other"):
        load(other)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"question": "w1", **texts(("w2", "w3"))[0]},
            {"prompt_column": "qestion"},
            "'qestion'; did you mean 'question'",
        ),
        (
            {"prompts": "w1", "chosen": "w2", "rejected": "w3"},
            {},
            r"no column 'prompt', and .*; did you mean 'prompts'\? .* Name",
        ),
        ({"prompt": None, "chosen": "w2", "rejected": "w3"}, {}, "example 1: column 'prompt' is empty"),
        ({"prompt": "w1", "chosen": [turn("user", [{"type": "image"}])], "rejected": "w1"}, {}, "type 'image'"),
        ({"chosen": "[{'role': 'user', 'content': 'w1'}]", "rejected": "w1"}, {}, "is not JSON"),
    ],
)
def test_columns_of_prompts_that_are_refused(load, row, options, message):
    with pytest.raises(ValueError, match=message):
        load(row, **options)


def test_pairs_may_have_no_prompt(load):
    rows = [{"prompt_id": "x", "chosen": "w2", "rejected": "w3"}, {"prompts": "w1", "chosen": "w2", "rejected": "w3"}]
    for row, options in zip(rows, ({}, {"prompt_column": ""}), strict=True):
        found = load(row, **options)
        assert (found.chosen, found.unasked) == ([ids("w2")], 1)
        assert "1 of the source without a prompt" in repr(found)


def test_numbers_of_csv_are_texts(tmp_path, tokenizer, load):
    (tmp_path / "pairs.csv").write_text("prompt,chosen,rejected\nw1,7,0.5\nw2,8,1.5\n")
    found = load_preferences(str(tmp_path / "pairs.csv"), tokenizer, max_length=64)
    texts = [("w1", "7", "0.5"), ("w2", "8", "1.5")]
    expected = load(*({"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in texts))
    assert (found.chosen, found.rejected) == (expected.chosen, expected.rejected)


def test_pairs_that_write_bos_have_one(load):
    found = load({"chosen": "<s> w2", "rejected": "<s> w3"})
    assert (found.chosen, found.rejected) == ([ids("w2")], [ids("w3")])


@pytest.mark.parametrize(
    ("train", "held", "shared"),
    [
        (("User: w1\nBot: w2", "User: w1\nBot: w3"), ("User: w1\nBot: w4", "User: w1\nBot: w5"), 1),
        (("User: w1\nBot: w2", "User: w1\nBot: w3"), ("User: w9\nBot: w4", "User: w9\nBot: w5"), 0),
        (("w1 w2 w3 w4", "w1 w2 w3 w5"), ("w1 w2 w3 w6", "w1 w2 w3 w7"), 1),
        (("w1 w2", "w1 w3"), ("w1 w4", "w1 w5"), 0),  # one common word is no prompt
        (("w1 w2", "w1 w3"), ("w1 w3", "w1 w2"), 1),  # the pair itself
    ],
)
def test_pairs_without_a_prompt_are_compared_by_their_common_beginning(load, train, held, shared):
    rows = [dict(zip(("chosen", "rejected"), pair, strict=True)) for pair in (train, ("w8", "w9"), held, ("w7", "w6"))]
    rest, held_out = load(*rows).split(2)
    kept = rest.without(held_out.prompts, zip(held_out.chosen, held_out.rejected, strict=True))
    assert (kept.shared, len(kept)) == (shared, 2 - shared)


def test_conversations_without_a_common_message_share_no_prompt(load, tokenizer):
    tokenizer.chat_template = TEMPLATE
    rows = [{"chosen": [turn("user", f"w{i}")], "rejected": [turn("user", f"w{i + 1}")]} for i in (1, 3, 5, 7)]
    rest, held_out = load(*rows).split(2)
    assert held_out.prompts == ["", ""]
    assert len(rest.without(held_out.prompts)) == 2


def test_options_of_the_chat_template_are_counted(load, tokenizer):
    """A reward model scores conversations without the tools of a prompt."""
    tokenizer.chat_template = TEMPLATE
    talk = {
        "chosen": [turn("user", "w1"), turn("assistant", "w2")],
        "rejected": [turn("user", "w1"), turn("assistant", "w3")],
    }
    rows = [talk | {"tools": [{"name": "w"}]}, talk | {"tools": None}, talk | {"chat_template_kwargs": {"x": 1}}]
    found = load(*rows)
    assert found.options == 2
    assert "2 of the source with tools or chat_template_kwargs, which reward models do not read" in repr(found)
    assert load({"chosen": "w1", "rejected": "w2", "tools": "w3"}).options == 0
