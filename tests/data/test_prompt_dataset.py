"""Prompts: every kind of source, the order of a run, and the special tokens at both ends of a prompt."""

import collections
import csv
import gzip
import json

import datasets
import pyarrow
import pytest
from pyarrow import parquet
from support.prompts import WORDS, ids, load, make_tokenizer, write_lines
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nlgrpo.data.conversations import plain_text
from nlgrpo.data.encoding import decode, encode
from nlgrpo.data.prompt_dataset import visits
from nlgrpo.data.sources import read_rows, stream, unread
from nlgrpo.model.hf_weights import locate

TURN = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"
CHAT = TURN + "{% if add_generation_prompt %}assistant :{% endif %}"


@pytest.fixture(scope="module")
def plain():
    return make_tokenizer(bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def stories(shared):
    return AutoTokenizer.from_pretrained(shared / "models" / "stories260K")


ROWS = [{"prompt": "a b", "answer": 1}, {"prompt": "c", "answer": 2}, {"prompt": "d e f", "answer": 3}]


def write_source(kind, folder):
    path = folder / f"data.{kind}"
    match kind:
        case "jsonl":
            write_lines(path, ROWS)
        case "jsonl.gz":
            write_lines(path, ROWS, gzip.open)
        case "json":
            path.write_text(json.dumps(ROWS, indent=1))
        case "parquet":
            parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        case "csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, ["prompt", "answer"])
                writer.writeheader()
                writer.writerows(ROWS)
        case "saved":
            datasets.Dataset.from_list(ROWS).save_to_disk(path)
        case "saved_dict":
            datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(path)
        case "folder":
            path.mkdir()
            write_lines(path / "train.jsonl", ROWS)
            write_lines(path / "test.jsonl", ROWS[:1])
    return str(path)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "parquet", "csv", "saved", "saved_dict", "folder"])
def test_every_format_gives_the_same_prompts_and_columns(kind, tmp_path, plain):
    batch = load(write_source(kind, tmp_path), plain).take(0, 3)
    assert batch.prompts == ["a b", "c", "d e f"]
    assert batch.ids == [ids("a b"), ids("c"), ids("d e f")]
    assert batch.columns == {"answer": [1, 2, 3]}
    assert batch.index == [0, 1, 2]


def test_plain_text_by_line_and_by_document(tmp_path, plain):
    path = tmp_path / "text.txt"
    path.write_text("  a  b\tc d\n\n<|end|>\n<|end|>  e\nf g\n")
    lines = load(path, plain)
    assert lines.prompts == ["a  b\tc d", "<|end|>", "<|end|>  e", "f g"]
    documents = load(path, plain, separator="<|end|>", first_words=3)
    assert documents.prompts == ["a  b\tc", "e\nf g"]
    packed = tmp_path / "text.txt.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert load(packed, plain).prompts == lines.prompts


def test_a_unicode_line_separator_does_not_cut_a_json_line(tmp_path, plain):
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"prompt": "a \u2028 b"}\r\n\r\n{"prompt": "c"}', encoding="utf-8")
    assert load(path, plain).prompts == ["a \u2028 b", "c"]


def test_template_and_cut_after(tmp_path, plain):
    rows = [{"q": "a", "n": 1, "log": "x A: y A: z"}, {"q": "b", "n": 2, "log": "nothing here"}]
    source = write_lines(tmp_path / "a.jsonl", rows)
    made = load(source, plain, template="Question {{{q}}} {n} Answer")
    assert made.prompts == ["Question {a} 1 Answer", "Question {b} 2 Answer"]
    assert made.take(0, 2).columns == {"q": ["a", "b"], "n": [1, 2], "log": [row["log"] for row in rows]}
    cut = load(source, plain, prompt_column="log", cut_after="A:", template="<{prompt}> {q}")
    assert (cut.prompts, cut.unmatched, cut.dropped) == (["<x A: y A:> a"], 1, 0)


def test_a_template_can_contain_a_list_of_numbers(tmp_path, plain):
    """As the data of Countdown have it; a list of texts would be Python's notation."""
    source = write_lines(tmp_path / "a.jsonl", [{"nums": [3, 5, 7], "target": 22}])
    assert load(source, plain, template="{nums} to {target}").prompts == ["[3, 5, 7] to 22"]
    for value in (["a"], [[1]], [True], [], {"a": 1}):
        write_lines(tmp_path / "b.jsonl", [{"nums": value, "target": 22}])
        with pytest.raises(ValueError, match=r"column 'nums' holds .* instead of a text"):
            load(tmp_path / "b.jsonl", plain, template="{nums} to {target}")


def test_reward_functions_do_not_get_reserved_columns(tmp_path, plain):
    row = {"prompt": "a", "completion": "b", "completion_ids": [1], "completions": 1, "prompts": 2}
    row |= {"answer": None, "chosen": "c"}
    batch = load(write_lines(tmp_path / "a.jsonl", [row, {"prompt": "b"}]), plain).take(0, 2)
    assert batch.columns == {"answer": [None, None], "chosen": ["c", None]}


# --- Order ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def numbers(tmp_path):
    return write_lines(tmp_path / "numbers.jsonl", [{"prompt": "a", "number": i} for i in range(23)])


def order(prompts, cursor, count):
    return prompts.take(cursor, count).columns["number"]


def test_an_epoch_visits_each_prompt_once_in_a_new_order(numbers, plain):
    prompts = load(numbers, plain, shuffle=True, seed=3)
    epochs = [order(prompts, 23 * epoch, 23) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert order(load(numbers, plain, shuffle=True, seed=4), 0, 23) != epochs[0]
    assert order(load(numbers, plain), 0, 46) == list(range(23)) * 2


def test_take_is_a_function_of_seed_and_cursor(numbers, plain):
    first, second = (load(numbers, plain, shuffle=True, seed=3) for _ in range(2))
    whole = order(first, 0, 200)
    for cursor in (170, 20, 23, 0, 99):  # in any order, across the ends of epochs
        assert order(second, cursor, 30) == whole[cursor : cursor + 30]
    assert second.take(99, 3).index == [99, 100, 101]


def test_the_slices_of_two_ranks_make_the_batch_of_one_rank(numbers, plain):
    prompts = load(numbers, plain, shuffle=True)
    whole, left, right = prompts.take(20, 8), prompts.take(20, 4), prompts.take(24, 4)
    assert left.index + right.index == whole.index
    assert left.ids + right.ids == whole.ids
    assert left.prompts + right.prompts == whole.prompts
    assert left.columns["number"] + right.columns["number"] == whole.columns["number"]


def test_the_order_is_the_same_in_every_version(numbers, plain):
    """Fixed values: another order would break the resumption of existing runs."""
    assert order(load(numbers, plain, shuffle=True, seed=0), 0, 6) == [11, 3, 20, 13, 2, 21]


def test_shuffles_are_uniform(tmp_path, plain):
    source = write_lines(tmp_path / "three.jsonl", [{"prompt": "a", "number": i} for i in range(3)])
    prompts = load(source, plain, shuffle=True, seed=1)
    seen = collections.Counter(tuple(order(prompts, 3 * epoch, 3)) for epoch in range(600))
    assert len(seen) == 6
    assert (
        sum((count - 100) ** 2 / 100 for count in seen.values()) < 20.5
    )  # chi-squared, 5 degrees of freedom: p = 0.001


def test_visits_have_a_new_order_every_epoch():
    epochs = [visits(5, 5 * epoch, 5, seed=1) for epoch in range(3)]
    assert [sorted(rows) for rows in epochs] == [list(range(5))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert visits(5, 3, 4, seed=1) == [*epochs[0][3:], *epochs[1][:2]]
    assert visits(5, 0, 5, seed=2) != epochs[0]


def test_a_batch_is_a_copy(numbers, plain):
    prompts = load(numbers, plain, shuffle=True)
    prompts.take(0, 1).ids[0].append(99)
    assert prompts.take(0, 1).ids == [ids("a")]


# --- Tokens -----------------------------------------------------------------------------------------------------------


BOS, EOS = WORDS.index("<s>"), WORDS.index("</s>")


@pytest.mark.parametrize(
    ("before", "after", "add_bos", "expected"),
    [
        ([], [], None, ids("a b")),
        ([], [], True, [BOS, *ids("a b")]),
        (["<s>"], [], None, [BOS, *ids("a b")]),
        (["<s>"], [], True, [BOS, *ids("a b")]),
        (["<s>"], [], False, ids("a b")),
        ([], ["</s>"], None, ids("a b")),
        (["<s>"], ["</s>"], True, [BOS, *ids("a b")]),
    ],
)
def test_bos_and_eos(tmp_path, before, after, add_bos, expected):
    tokenizer = make_tokenizer(before, after, bos_token="<s>", eos_token="</s>")
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": "a b"}])
    assert load(source, tokenizer, add_bos=add_bos).ids == [expected]


def test_a_token_that_is_bos_and_eos_is_not_removed_from_an_empty_prompt(tmp_path):
    tokenizer = make_tokenizer(["<s>"], [], bos_token="<s>", eos_token="<s>")
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": ""}, {"prompt": "a"}])
    assert load(source, tokenizer).ids == [[BOS], [BOS, *ids("a")]]


def test_an_empty_prompt_needs_a_bos(tmp_path, plain):
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": ""}])
    assert load(source, plain).ids == [ids("a"), [BOS]]
    with pytest.raises(ValueError, match="example 2 is empty, and the tokenizer has no BOS"):
        load(source, make_tokenizer(eos_token="</s>"))
    with pytest.raises(ValueError, match="no BOS token; omit add_bos"):
        load(source, make_tokenizer(eos_token="</s>"), add_bos=True)


def test_long_prompts_are_dropped_and_counted(tmp_path, plain):
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": " ".join("a" * n), "n": n} for n in (1, 5, 3, 4)])
    kept = load(source, plain, longest=3)
    assert (len(kept), kept.dropped, kept.take(0, 2).columns["n"]) == (2, 2, [1, 3])
    assert "2 prompts of 1 to 3 tokens; 2 dropped" in repr(kept)
    assert load(source, plain, longest=3, limit=2).take(0, 2).columns["n"] == [1, 1]
    with pytest.raises(
        ValueError, match=r"all 2 prompts are longer than max_prompt_tokens = 2; the shortest has 3.*longest 4"
    ):
        load(write_lines(tmp_path / "b.jsonl", [{"prompt": "a b c"}, {"prompt": "a b c d"}]), plain, longest=2)


# --- Conversations ----------------------------------------------------------------------------------------------------


USER = {"role": "user", "content": "what is 1"}
ASKED = "user : what is 1 assistant :"
REPLY = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("column", "messages", "prompt", "text"),
    [
        ("prompt", [USER], [USER], ASKED),
        ("prompt", [USER, REPLY, USER], [USER, REPLY, USER], f"{ASKED} a {ASKED}"),
        ("prompt", [USER, REPLY], [USER, REPLY], f"{ASKED} a"),
        ("messages", [USER, REPLY], [USER], ASKED),
    ],
)
def test_a_conversation_goes_through_the_chat_template(tmp_path, column, messages, prompt, text):
    tokenizer = make_tokenizer(bos_token="<s>", eos_token="</s>", chat_template=CHAT)
    batch = load(write_lines(tmp_path / "a.jsonl", [{column: messages, "n": 1}]), tokenizer).take(0, 1)
    assert batch.prompts == [prompt]
    assert batch.ids == [ids(text)]
    assert batch.columns == ({"n": [1]} if column == "prompt" else {"messages": [messages], "n": [1]})


def test_texts_and_conversations_may_be_mixed(tmp_path):
    tokenizer = make_tokenizer(bos_token="<s>", eos_token="</s>", chat_template=CHAT)
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": [USER]}, {"prompt": "b"}])
    made = load(source, tokenizer)
    assert made.ids == [ids("a"), ids(ASKED), ids("b")]


@pytest.mark.parametrize(
    ("messages", "template", "message"),
    [
        ([USER], None, "example 1 is a conversation, but the tokenizer has no chat template"),
        ([USER], "{{ raise_exception('roles must alternate') }}", "the chat template rejects .* roles must alternate"),
    ],
)
def test_bad_conversations_are_refused(tmp_path, messages, template, message):
    tokenizer = make_tokenizer(bos_token="<s>", eos_token="</s>", chat_template=template)
    with pytest.raises(ValueError, match=message):
        load(write_lines(tmp_path / "a.jsonl", [{"prompt": messages}]), tokenizer)


# --- Refused arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_column": "promt"}, r"no column 'promt'; did you mean 'prompt'\? It has prompt, answer"),
        ({"template": "{answr}"}, r"no column 'answr'; did you mean 'answer'"),
        ({"template": "{answer"}, "expected '}' before end of string"),
        ({"template": "{}"}, "braces may contain only the name of a column"),
        ({"template": "{answer!r}"}, "braces may contain only the name of a column"),
        ({"template": "same"}, "has no column, so all prompts would be equal"),
        (
            {"template": "{answer}", "first_words": 2},
            "shorten the prompt column, which the template '{answer}' does not use",
        ),
        ({"cut_after": "zz"}, "none of 3 examples has cut_after = 'zz' in column 'prompt'"),
        ({"separator": "x"}, "is for the documents of a text file"),
        ({"longest": 0}, "max_prompt_tokens = 0: must be 1 or more"),
        ({"first_words": 0}, "first_words = 0: must be 1 or more"),
        ({"limit": -1}, "limit = -1: must be 1 or more"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_bad_options_are_refused(tmp_path, plain, options, message):
    with pytest.raises(ValueError, match=message):
        load(write_lines(tmp_path / "a.jsonl", ROWS), plain, **options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "a.jsonl is empty"),
        ("a.txt", b"\n \n", "a.txt is empty"),
        ("a.json", b"[]", "a.json is empty"),
        ("a.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n', "a.jsonl, line 3: not JSON"),
        ("a.jsonl", b'{"prompt": "a"}\n[1, 2]\n', "a.jsonl, line 2: a list instead of an object"),
        ("a.json", b'[{"prompt": "a"},\n 3]', "a.json, element 2: a int instead of an object"),
        ("a.json", b'[{"prompt": "a"},\n', "a.json, line 2: not JSON"),
        ("a.txt", b"good\nb\xe9d\n", "not readable as UTF-8"),
        ("a.jsonl.gz", b"no gzip", "not readable"),
        ("a.txt.gz", gzip.compress(b"a b c d " * 99, mtime=0)[:-12], "not readable"),
        ("a.parquet", b"PAR1", "not readable as Parquet"),
        ("a.jsonl", b'{"prompt": [{"role": "user", "role": "user", "content": "a"}]}', "has the key 'role' twice"),
        ("a.json", b'[{"prompt": "a", "prompt": "b"}]', "a.json: an object has the key 'prompt' twice"),
        ("a.jsonl", b'[\n {"prompt": "a"}]', "line 1: not JSON .* is one JSON list, .* name the file .json"),
        ("a.jsonl", b'{"data": [\n {}]}', "line 1: not JSON .* is one JSON object, .* each row into one line"),
        ("a.jsonl", b'{"prompt": true}', r"example 1: column 'prompt' holds a bool \(True\) instead of a text"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": null}', "example 2: column 'prompt' holds a NoneType.* leave out"),
        ("a.jsonl", b'{"prompt": "a"}\n{"promt": "b"}', "example 2 has no column 'prompt'; did you mean 'promt'"),
        ("a.jsonl", b'{"prompt": "a", "prompt": "b"}', r"line 1: an object has the key 'prompt' twice: '[^']*'$"),
        ("a.csv", b"prompt,prompt\na,b\n", "the first line repeats a column name: prompt, prompt"),
        ("a.csv", b"prompt,b\n1\n", "not readable as CSV"),
        ("a.bin", b"?", "unknown file type. Supported: .jsonl"),
    ],
)
def test_bad_files_are_refused(tmp_path, plain, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / name, plain)


def test_missing_sources_are_refused(tmp_path, plain):
    write_lines(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"There is no file .*trian.jsonl; did you mean 'train.jsonl'"):
        load(tmp_path / "trian.jsonl", plain)
    with pytest.raises(ValueError, match=r"its folder .*nowhere does not exist"):
        load(tmp_path / "nowhere" / "a.txt", plain, separator="x")
    with pytest.raises(ValueError, match=r"no-such/data-set:config .*cannot be loaded(.|\n)*no local file or folder"):
        load("no-such/data-set:config", plain)
    with pytest.raises(ValueError, match=r"has no split 'test'. It has train"):
        load(write_source("saved_dict", tmp_path), plain, split="test")


# --- Real data --------------------------------------------------------------------------------------------------------


def test_tinystories(shared, stories):
    path = shared / "data" / "tinystories" / "tinystories_sample.txt"
    prompts = load(path, stories, longest=64, separator="<|endoftext|>", first_words=5)
    assert len(prompts) == sum(bool(story.strip()) for story in path.read_text().split("<|endoftext|>"))
    assert all(len(prompt.split()) == 5 for prompt in prompts.prompts)
    assert all(prompt[0] == 1 and 1 not in prompt[1:] for prompt in prompts.ids)  # BOS, and no EOS (the same id)
    batch = prompts.take(0, 8)
    assert stories.batch_decode(batch.ids, skip_special_tokens=True) == batch.prompts


def test_hh_rlhf(shared, stories):
    path = shared / "data" / "hh-rlhf" / "harmless-base-test.jsonl.gz"
    prompts = load(path, stories, longest=384, prompt_column="chosen", cut_after="\n\nAssistant:")
    assert len(prompts) + prompts.dropped == 2312
    assert prompts.unmatched == 0
    assert prompts.dropped > 0
    batch = prompts.take(0, 50)
    assert set(batch.columns) == {"chosen", "rejected"}
    for prompt, chosen in zip(batch.prompts, batch.columns["chosen"], strict=True):
        assert prompt.endswith("\n\nAssistant:")
        assert chosen.startswith(prompt)
        assert "\n\nAssistant:" not in chosen[len(prompt) :]


def test_gsm8k(shared, stories):
    source = str(shared / "data" / "gsm8k" / "train.jsonl")
    prompts = load(source, stories, longest=512, template="Question: {question}\nAnswer:", limit=300)
    batch = prompts.take(0, 100)
    assert len(prompts) + prompts.dropped == 300
    for prompt, question in zip(batch.prompts, batch.columns["question"], strict=True):
        assert prompt == f"Question: {question}\nAnswer:"
    assert all("#### " in answer for answer in batch.columns["answer"])


def test_a_tokenizer_with_few_letters(tmp_path):
    """It knows only the letters of its task, so the prompts themselves must show whether it appends EOS."""
    letters = {letter: i for i, letter in enumerate(["<s>", "</s>", *"0123456789+="])}
    words = Tokenizer(models.WordLevel(letters))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    rows = write_lines(tmp_path / "sums.jsonl", [{"prompt": "</s>"}, {"prompt": "1+2="}])
    assert load(rows, tokenizer).take(0, 2).ids[1] == [letters[letter] for letter in "1+2="]


def test_encode_removes_an_appended_eos_like_load():
    """An EOS that a tokenizer appends to every text would end the prompt."""
    tokenizer = make_tokenizer(before=["<s>"], after=["</s>"], bos_token="<s>", eos_token="</s>")
    assert tokenizer("a b").input_ids == ids("<s> a b </s>")
    assert encode(tokenizer, ["a b", "", "c"]) == [ids("<s> a b"), ids("<s>"), ids("<s> c")]


def test_distinct_prompts(tmp_path, plain):
    texts = ["a b", "c", "a b", "d", "c", "e"]
    (tmp_path / "prompts.txt").write_text("\n".join(texts))
    prompts = load(tmp_path / "prompts.txt", plain)
    kept = prompts.distinct([plain("d").input_ids])
    assert [kept.prompts[i] for i in range(len(kept))] == ["a b", "c", "e"]
    assert kept.take(0, 3).prompts == ["a b", "c", "e"]
    assert len(prompts.distinct()) == 4


# ---- Completions as texts ----


PROMPTS = [
    "Once upon a time there", "Once upon a time", 'She said "', "", "Tim \u00e9t\u00e9", "\u65e5\u672c\u8a9e",
    "She said \u4eca\u65e5\u306f\u3068\u3066\u3082\u826f\u3044\u5929\u6c17\u3067\u3059\u306d",
    "Tim liked \U0001f468\u200d\U0001f469\u200d\U0001f467 and",
]  # fmt: skip


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_and_completion_join_to_the_full_text(stories, prompt):
    """A SentencePiece text may be cut between any two tokens."""
    whole = stories(prompt + "\u65e5\u672c was a little girl named Lily. \u00c9t\u00e9!\n\nShe played.").input_ids
    for cut in range(1, len(whole)):
        start, rest = whole[:cut], whole[cut:]
        (text,) = decode(stories, [start], [rest])
        before, full = (stories.decode(ids, skip_special_tokens=True) for ids in (start, whole))
        if "\ufffd" in before:  # in the middle of a character
            assert text == stories.decode(rest) or before + text == full
        else:
            assert before + text == full
    assert decode(stories, [], []) == []


def test_a_completion_without_a_prompt_begins_a_text(stories):
    ids = stories("Lily was", add_special_tokens=False).input_ids
    assert decode(stories, [[], [1]], [ids, ids]) == ["Lily was"] * 2
    assert decode(stories, [ids], [ids]) == [" Lily was"]


def test_a_completion_is_decoded_alone_if_its_prompt_ends_within_a_character():
    tokenizer = AutoTokenizer.from_pretrained(locate("story-lm"))
    ids = tokenizer("a \u20ac b").input_ids
    euro = [i for i, token in enumerate(ids) if "\ufffd" in tokenizer.decode([token])]
    assert len(euro) > 1
    start, rest = ids[: euro[0] + 1], ids[euro[0] + 1 :]
    assert decode(tokenizer, [start], [rest]) == [tokenizer.decode(rest)]


# ---- CSV ----


def test_a_csv_column_is_text_unless_python_would_write_all_its_numbers_so(tmp_path):
    long = "x" * 3_000_000
    (tmp_path / "a.csv").write_text(
        "prompt,code,when,yes,n,share,some,big,sci,mixed,none,,\r\n"
        f"007,007,2024-01-01,true,7,0.5,3,{10**30},1e16,1,,,\r\n"
        f'"a, ""b""\r\nc",10,2024-01-02,false,-8,1.25,,{10**30 + 1},5e-05,0.5,nan,,\r\n\r\n'
        f"{long},8,x,true,0,2.0,4,1,2.0,0,,,\r\n",
        newline="",
    )
    rows = list(read_rows(str(tmp_path / "a.csv")))
    assert [row["prompt"] for row in rows] == ["007", 'a, "b"\r\nc', long]
    assert [row["code"] for row in rows] == ["007", "10", "8"]
    assert [row["when"] for row in rows] == ["2024-01-01", "2024-01-02", "x"]
    assert [row["yes"] for row in rows] == ["true", "false", "true"]
    assert [row["n"] for row in rows] == [7, -8, 0]
    assert [row["share"] for row in rows] == [0.5, 1.25, 2.0]
    assert [row["some"] for row in rows] == [3, None, 4]
    assert [row["big"] for row in rows] == [10**30, 10**30 + 1, 1]
    assert [row["sci"] for row in rows] == ["1e16", "5e-05", "2.0"]
    assert [row["mixed"] for row in rows] == [1, 0.5, 0]
    assert [row["none"] for row in rows] == ["", "nan", ""]
    assert len(rows[0]) == 11  # columns without a name and values are dropped


def test_a_text_without_tokens_is_refused(tmp_path, plain):
    tokenizer = make_tokenizer(bos_token="<s>")
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("x", "")
    write_lines(tmp_path / "a.jsonl", [{"prompt": "a b"}, {"prompt": "xx"}])
    with pytest.raises(ValueError, match=r"example 2: the tokenizer has no token for a str \('xx'\)"):
        load(tmp_path / "a.jsonl", tokenizer)


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("Once", "Once"),
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}], "Hello"),
        ([{"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "image"}]}], "Look"),
        ([{"role": "assistant", "content": None}], ""),
    ],
)
def test_the_displayed_prompt_is_the_last_message(prompt, shown):
    assert plain_text(prompt) == shown


# ---- one BOS ----


@pytest.mark.parametrize("before", [[], ["<s>"]])
@pytest.mark.parametrize(("text", "add_bos", "expected"), [
    ("<s> a b", None, [BOS, *ids("a b")]),
    ("<s> a b", True, [BOS, *ids("a b")]),
    ("<s> a b", False, ids("a b")),
    ("<s> <s> a b", None, [BOS, *ids("a b")]),
    ("a <s> b", False, ids("a <s> b")),
    ("<s>", None, [BOS]),
])  # fmt: skip
def test_a_prompt_that_writes_bos_has_one(tmp_path, before, text, add_bos, expected):
    tokenizer = make_tokenizer(before, bos_token="<s>", eos_token="</s>")
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": text}])
    assert load(source, tokenizer, add_bos=add_bos).ids == [expected]
    if add_bos is None:
        assert encode(tokenizer, [text]) == [expected]


def test_a_rendered_prompt_has_the_ids_of_transformers(tmp_path, stories):
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": "<s>Once upon a time"}])
    expected = stories("<s>Once upon a time", add_special_tokens=False)["input_ids"]
    assert load(source, stories).ids == [expected]
    assert expected[0] == stories.bos_token_id != expected[1]


# ---- folders ----


def write_folder(folder, files):
    for name, prompts in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"prompt": prompt} for prompt in prompts]
        if path.suffix == ".csv":
            path.write_text("prompt\n" + "".join(f"{prompt}\n" for prompt in prompts))
        elif path.suffix == ".txt":
            path.write_text("\n".join(prompts))
        elif path.suffix == ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif path.name.endswith(".gz"):
            write_lines(path, rows, gzip.open)
        else:
            write_lines(path, rows)
    return str(folder)


@pytest.mark.parametrize(
    ("files", "split", "read_prompts"),
    [
        ({"a.jsonl": "ab", "b.csv": "cd", "c.txt": "ef", "d/e.parquet": "g", "f.jsonl.gz": "a"}, "train", "abcdefga"),
        ({"train_math.jsonl": "ab", "chat.jsonl": "cd"}, "train", "cdab"),
        ({"train.jsonl": "a", "test.jsonl": "b", "dev/x.jsonl": "c"}, "train", "a"),
        ({"train.jsonl": "a", "test.jsonl": "b", "dev/x.jsonl": "c"}, "test", "b"),
        ({"train.jsonl": "a", "test.jsonl": "b", "dev/x.jsonl": "c"}, "validation", "c"),
        ({"latest.jsonl": "a", "contest.jsonl": "b"}, "train", "ba"),
        ({"train_sft-00000-of-00002.parquet": "a", "train_sft-00001-of-00002.parquet": "b"}, "train_sft", "ab"),
        ({"data-00000-of-00001.parquet": "a", ".cache/b.jsonl": "b"}, "train", "a"),
    ],
)
def test_all_files_of_a_folder_are_read(tmp_path, plain, files, split, read_prompts):
    folder = write_folder(tmp_path / "data", files)
    (tmp_path / "data" / "README.md").write_text("# Prompts\n")
    prompts = load(folder, plain, split=split)
    assert prompts.prompts == list(read_prompts)
    assert [row["prompt"] for row in stream(folder, split)] == list(read_prompts)


@pytest.mark.parametrize("name", ["b.tsv", "b.jsonl.zst", "sub/b.arrow", "rewards.py", "prompts"])
def test_files_of_a_folder_that_cannot_be_read_are_named(tmp_path, plain, name):
    folder = write_folder(tmp_path / "data", {"a.jsonl": "ab", name: "cd"})
    with pytest.raises(ValueError, match=rf"would be left out: {name}\. Supported: \.jsonl .*another folder"):
        load(folder, plain)


def test_links_that_would_be_left_out_are_named(tmp_path, plain):
    folder = write_folder(tmp_path / "data", {"a.jsonl": "ab"})
    other = write_folder(tmp_path / "other", {"b.jsonl": "cd"})
    (tmp_path / "data" / "c.jsonl").symlink_to(tmp_path / "other" / "b.jsonl")
    assert load(folder, plain).prompts == ["a", "b", "c", "d"]
    (tmp_path / "data" / "more").symlink_to(other)
    (tmp_path / "data" / "lost.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(
        ValueError, match=r"left out: lost.jsonl \(a link to nothing\), more \(a link to a folder\)\. Sup"
    ):
        load(folder, plain)


def test_documents_in_a_folder_are_no_prompts(tmp_path, plain):
    folder = write_folder(tmp_path / "data", {"a.txt": "ab", "README.txt": "cd", "LICENSE": "e", "CITATION.md": "f"})
    assert load(folder, plain).prompts == ["a", "b"]


def test_splits_of_a_folder_are_named(tmp_path, plain):
    folder = write_folder(tmp_path / "data", {"train.jsonl": "a", "test.jsonl": "b"})
    with pytest.raises(ValueError, match=r"no split 'dev'. It has test, train"):
        load(folder, plain, split="dev")
    assert unread([(folder, "train")]) == [f"not read in {folder}: test.jsonl (split 'test')"]
    assert unread([(folder, "test")]) == [f"not read in {folder}: train.jsonl (split 'train')"]
    assert unread([(folder, "test"), (folder, "train")]) == []
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="has no data files"):
        load(tmp_path / "none", plain)


def test_texts_of_a_folder_are_those_of_its_files(tmp_path, plain):
    folder = write_folder(tmp_path / "data", {"a.txt": ["a b", "c"], "b.txt": ["d"]})
    assert load(folder, plain).prompts == ["a b", "c", "d"]
    documents = load(folder, plain, separator="c")
    assert documents.prompts == ["a b", "d"]
    mixed = write_folder(tmp_path / "mixed", {"a.txt": ["a"], "b.jsonl": ["b"]})
    with pytest.raises(ValueError, match=r"separator = 'c' is for the documents of a text file .*b\.jsonl"):
        load(mixed, plain, separator="c")


def test_a_folder_whose_readme_describes_it_is_read_as_it_says(tmp_path, plain):
    folder = write_folder(tmp_path / "data", {"a.jsonl": "a", "b.jsonl": "b"})
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: b.jsonl\n---\n# Prompts\n"
    (tmp_path / "data" / "README.md").write_text(card)
    assert load(folder, plain).prompts == ["b"]


# ---- inputs that would be ignored or misread ----


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".txt", ".csv", ".parquet", ".jsonl.gz"])
def test_a_pointer_of_git_lfs_is_no_data(tmp_path, plain, suffix):
    path = tmp_path / f"data{suffix}"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(ValueError, match=rf"data{suffix} is a pointer of Git LFS .* git lfs pull"):
        load(path, plain)


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    ("content", "key"), [({"data": ROWS}, "data"), ({"version": "1", "data": {"train": ROWS}}, "data.train")]
)
def test_an_object_around_the_rows_is_refused(tmp_path, plain, content, key, indent):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(content, indent=indent))
    with pytest.raises(
        ValueError, match=rf"one object, with the keys .*'data'.* a list of objects .* list {key}: write"
    ):
        load(path, plain)


def test_one_object_is_no_list(tmp_path, plain):
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"prompt": {"0": "a", "1": "b"}}, indent=1))
    with pytest.raises(ValueError, match="one object, with the keys 'prompt', where a list of objects is expected"):
        load(path, plain)
    path.write_text('{"prompt": "a", "tools": [{"type": "function", "function": {}}]}')  # a line with one row
    assert load(path, plain).prompts == ["a"]


def test_a_file_has_no_splits(tmp_path, plain):
    source = write_lines(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"split = 'test', but .*a.jsonl is a single file"):
        load(source, plain, split="test")
    with pytest.raises(ValueError, match="one saved data set, without splits, but split = 'test'"):
        load(write_source("saved", tmp_path), plain, split="test")


def test_a_prompt_column_that_the_template_does_not_use(tmp_path, plain):
    source = write_lines(tmp_path / "a.jsonl", [{"q": "a", "text": "b"}])
    with pytest.raises(ValueError, match=r"prompt_column = 'text', but the template 'Question \{q\}' .*\{text\}"):
        load(source, plain, prompt_column="text", template="Question {q}")
    assert load(source, plain, prompt_column="text", template="{text} {q}").prompts == ["b a"]


def test_a_missing_number_is_no_text(tmp_path, plain):
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": 3}, {"prompt": float("nan")}])
    with pytest.raises(ValueError, match=r"example 2: column 'prompt' holds a float \(nan\) instead of a text"):
        load(source, plain)


# ---- held-out prompts ----


def test_held_out_prompts_do_not_depend_on_the_seed(numbers, plain):
    orders = []
    for seed in (0, 1, 2):
        _, held_out = load(numbers, plain, shuffle=True, seed=seed).split(8)
        orders.append(order(held_out, 0, 8))
    assert orders[0] == orders[1] == orders[2]
    assert sorted(orders[0]) == list(range(15, 23))


def test_prompts_of_a_set_are_dropped_and_counted(tmp_path, plain):
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": p, "n": i} for i, p in enumerate("abcabd")])
    prompts = load(source, plain)
    rest = prompts.without([ids("a"), ids("e")])
    assert (rest.prompts, rest.shared, rest.columns) == (["b", "c", "b", "d"], 2, {"n": [1, 2, 4, 5]})
    assert "2 dropped with a held-out prompt" in repr(rest)
    assert prompts.without([ids("e")]) is prompts
    with pytest.raises(ValueError, match=r"all 6 training prompts are also held out.* evaluation.prompts = 0"):
        prompts.without(prompts.ids)


def test_held_out_prompts_have_all_columns_of_their_source(tmp_path, plain):
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b"}]
    _, held_out = load(write_lines(tmp_path / "a.jsonl", rows), plain).split(1)
    assert held_out.take(0, 1).columns == {"answer": [None]}


def test_prompts_that_are_left_out_have_reasons(tmp_path, plain):
    rows = [{"prompt": "a x b"}, {"prompt": "a a a x b"}, {"prompt": "b"}]
    loaded = load(write_lines(tmp_path / "a.jsonl", rows), plain, longest=2, cut_after="x")
    assert loaded.left_out == {"dropped as too long": 1, "without cut_after": 1}
    assert load(write_lines(tmp_path / "b.jsonl", ROWS), plain).left_out == {}
