"""Prompts of several sources with weights, and prompts that are read while they are visited."""

import collections
import json

import datasets
import pytest
from support.prompts import make_tokenizer, write_lines

from nlgrpo.config import schema
from nlgrpo.data import sources
from nlgrpo.data.mixtures import BLOCK, MixedPrompts, largest_remainders, merge, shares_of
from nlgrpo.data.prompt_dataset import Reader, SourceOptions, load_prompt_set
from nlgrpo.data.streams import PromptStream
from nlgrpo.engine.rollouts.evaluation_samples import size_of
from nlgrpo.engine.rollouts.inputs import all_prompts, find_columns, load_prompts, read_prompts, unread_files
from nlgrpo.rewards.reward_functions import Reward, check_columns


class Limits:
    context, vocab = 1000, 1000


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(bos_token="<s>", eos_token="</s>")


def write(tmp_path, name, count, letter="a", **columns):
    rows = [{"prompt": f"{letter} {letter} " + "b " * (i % 3), "number": i, **columns} for i in range(count)]
    return write_lines(tmp_path / f"{name}.jsonl", rows)


def config(**sections):
    return schema.from_dict({"evaluation": {"prompts": 0}} | sections)


def stream(path, tokenizer, *, longest=100, limit=None, **options):
    return PromptStream(Reader(path, tokenizer, SourceOptions(limit=limit), longest), **options)


# --- mixtures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path, tokenizer):
    big = load_prompt_set(write(tmp_path, "big", 50, source="big"), tokenizer, max_prompt_tokens=100)
    small = load_prompt_set(
        write(tmp_path, "small", 7, "c", source="small", only="here"), tokenizer, max_prompt_tokens=100
    )
    return MixedPrompts([big, small], shares_of([3, 1]))


def test_sources_have_their_shares(mixed):
    names = [mixed.take(i, 1).columns["source"][0] for i in range(2 * BLOCK)]
    assert collections.Counter(names) == {"big": 1500, "small": 500}
    for step in range(0, 2 * BLOCK, 8):  # and nearly so in every step
        assert 1 <= names[step : step + 8].count("small") <= 3


def test_each_source_visits_all_its_prompts_before_it_repeats_one(mixed):
    visited = {"big": [], "small": []}
    columns = mixed.take(0, BLOCK).columns
    for source, number in zip(columns["source"], columns["number"], strict=True):
        visited[source].append(number)
    for name, size in (("big", 50), ("small", 7)):
        epochs = [visited[name][i : i + size] for i in range(0, len(visited[name]) - size, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert epochs[0] != epochs[1]


def test_a_cursor_is_enough_to_resume_a_mixture(mixed):
    whole = mixed.take(990, 30)
    parts = [mixed.take(990 + i, 5) for i in range(0, 30, 5)]
    assert whole.ids == [ids for part in parts for ids in part.ids]
    assert whole.index == list(range(990, 1020))
    assert whole.columns == {name: [v for part in parts for v in part.columns[name]] for name in whole.columns}
    assert set(zip(whole.columns["source"], whole.columns["only"], strict=True)) == {("big", None), ("small", "here")}


def test_held_out_prompts_have_the_shares(mixed):
    rest, held_out = mixed.split(8)
    assert collections.Counter(row["source"] for row in held_out.rows) == {"big": 6, "small": 2}
    assert len(held_out.take(0, 8).ids) == len({(r["source"], r["number"]) for r in held_out.rows}) == 8
    left = rest.take(0, BLOCK).columns
    held = {(row["source"], row["number"]) for row in held_out.rows}
    assert not held & set(zip(left["source"], left["number"], strict=True))
    assert mixed.split(0)[0] is mixed


def test_all_prompts_of_a_mixture(mixed):
    everything = mixed.all()
    assert [(row["source"], row["number"]) for row in everything.rows] == [
        *(("big", i) for i in range(50)),
        *(("small", i) for i in range(7)),
    ]
    assert len(merge([everything, everything])) == 114


@pytest.mark.parametrize(
    ("weights", "shares"),
    [([1, 1, 1], (334, 333, 333)), ([0.7, 0.3], (700, 300)), ([5], (1000,)), ([1, 999], (1, 999))],
)
def test_weights(weights, shares):
    assert shares_of(weights) == shares


@pytest.mark.parametrize(
    ("weights", "message"),
    [([1, 0], "positive"), ([-1, 2], "positive"), ([float("inf"), 1], "positive"), ([1, 1e5], "weight 1 is less than")],
)
def test_weights_that_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        shares_of(weights)


def test_largest_remainders():
    assert largest_remainders([1.5, 1.5, 2.0], 5) == [2, 1, 2]


def test_a_mixture_of_a_configuration(tmp_path, tokenizer):
    first = write(tmp_path, "first", 5, source="first")
    rows = [{"question": f"c {'d ' * i}", "source": "second"} for i in range(6)]
    second = write_lines(tmp_path / "second.jsonl", rows)
    table = {first: 1, second: {"weight": 4, "prompt_column": "question", "limit": 3}}
    cfg = config(data={"mixture": table})
    prompts, _ = load_prompts(cfg, tokenizer, Limits)
    assert prompts.shares == (200, 800)
    assert [len(source) for source in prompts.sources] == [5, 3]
    assert schema.from_dict(schema.to_dict(cfg)) == cfg
    everything = all_prompts(cfg, tokenizer, Limits)
    assert [row["source"] for row in everything.rows] == ["first"] * 5 + ["second"] * 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("much", "the weight of .* is 'much' instead of a number"),
        (True, "instead of a number"),
        (0, r"data\.mixture: weights 0: expected positive numbers"),
        ({"weigth": 2}, r"data\.mixture, .*: unknown key 'weigth'"),
        ({"limit": "3"}, r"limit = '3': expected int"),
        ({"mixture": {}}, "not an option of a source"),
    ],
)
def test_mixtures_that_are_refused(tmp_path, tokenizer, value, message):
    with pytest.raises(ValueError, match=message):
        load_prompts(config(data={"mixture": {write(tmp_path, "a", 3): value}}), tokenizer, Limits)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_in_order_is_the_loaded_set(tmp_path, tokenizer):
    path = write(tmp_path, "a", 150)
    loaded = load_prompt_set(path, tokenizer, max_prompt_tokens=3, shuffle=False)
    streamed = stream(path, tokenizer, longest=3)
    assert 0 < len(loaded) < 150  # some are too long
    count = 2 * len(loaded) + 10
    assert streamed.take(0, count) == loaded.take(0, count)
    assert streamed.names == loaded.names


def test_a_shuffled_stream_visits_all_prompts_in_each_epoch(tmp_path, tokenizer):
    path = write(tmp_path, "a", 150)
    numbers = stream(path, tokenizer, seed=3, shuffle_buffer=40).take(0, 450).columns["number"]
    epochs = [numbers[i : i + 150] for i in (0, 150, 300)]
    assert all(sorted(epoch) == list(range(150)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(150)]}) == 4
    other = stream(path, tokenizer, seed=4, shuffle_buffer=40).take(0, 150).columns["number"]
    assert other != epochs[0]


@pytest.mark.parametrize("buffer", [0, 40])
def test_a_stream_resumes_from_a_cursor(tmp_path, tokenizer, buffer):
    path = write(tmp_path, "a", 100)
    whole = stream(path, tokenizer, shuffle_buffer=buffer).take(0, 260)
    resumed = stream(path, tokenizer, shuffle_buffer=buffer)
    assert resumed.take(230, 30).ids == whole.ids[230:]
    assert resumed.take(90, 20).columns["number"] == whole.columns["number"][90:110]  # backwards: from the beginning
    assert resumed.take(120, 5).index == list(range(120, 125))


def test_held_out_prompts_of_a_stream_are_not_trained_on(tmp_path, tokenizer):
    path = write(tmp_path, "a", 60)
    rest, held_out = stream(path, tokenizer, longest=3, shuffle_buffer=20).split(10)
    held = {row["number"] for row in held_out.rows}
    assert len(held) == len(held_out) == 10
    fitting = {row["number"] for row in load_prompt_set(path, tokenizer, max_prompt_tokens=3).rows}
    assert set(rest.take(0, 200).columns["number"]) == fitting - held


def test_a_stream_reads_no_more_than_it_needs(tmp_path, tokenizer):
    """The last line of the file is broken, but it is not reached."""
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a"}) + "\n" for _ in range(5000)) + "{broken")
    assert len(stream(str(path), tokenizer).take(0, 100).ids) == 100
    with pytest.raises(ValueError, match="line 5001: not JSON"):
        stream(str(path), tokenizer).take(5000, 1)


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_data_sets_are_streamed(tmp_path, tokenizer, kind, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    data = datasets.Dataset.from_list([{"prompt": "a " * (1 + i % 2), "number": i} for i in range(100)])
    folder = tmp_path / "data"
    if kind == "saved":
        datasets.DatasetDict({"train": data}).save_to_disk(folder)
    else:
        folder.mkdir()
        data.to_parquet(folder / "train.parquet")
    prompts = stream(str(folder), tokenizer, shuffle_buffer=10)
    assert sorted(prompts.take(0, 100).columns["number"]) == list(range(100))
    assert [row["number"] for row in sources.stream(str(folder), limit=5, skip=2)] == [2, 3, 4]


def test_the_limit_counts_rows(tmp_path, tokenizer):
    prompts = stream(write(tmp_path, "a", 50), tokenizer, limit=12, shuffle_buffer=5)
    assert collections.Counter(prompts.take(0, 24).columns["number"]) == dict.fromkeys(range(12), 2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [([], "is empty"), ([{"prompt": "a a a a"}], "no prompt is left"), ([{"text": "a"}], "has no column 'prompt'")],
)
def test_streams_that_are_refused(tmp_path, tokenizer, rows, message):
    path = write_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        stream(path, tokenizer, longest=2).take(0, 1)


def test_streams_of_a_configuration(tmp_path, tokenizer):
    path = write_lines(
        tmp_path / "a.jsonl", [{"prompt": "a " * (i + 1), "number": i, "source": "a"} for i in range(40)]
    )
    other = write(tmp_path, "b", 40, source="b")
    cfg = config(data={"source": path, "streaming": True, "shuffle_buffer": 5}, evaluation={"prompts": 4})
    prompts, held_out = load_prompts(cfg, tokenizer, Limits)
    assert (len(held_out), prompts.longest) == (4, 1000 - 128)
    assert len(set(prompts.take(0, 36).columns["number"])) == 36
    mixture = config(data={"mixture": {path: 1, other: {"weight": 1, "streaming": False}}, "streaming": True})
    both, _ = load_prompts(mixture, tokenizer, Limits)
    assert collections.Counter(both.take(0, 20).columns["source"]) == {"a": 10, "b": 10}
    assert len(both.all()) == 40  # those that are known
    assert len(all_prompts(mixture, tokenizer, Limits)) == 80


def late(tmp_path, name="late", count=200, first=150, **common):
    """A file whose rows have the column `answer` from number ``first`` on."""
    rows = [{"prompt": "b " * (1 + i % 50), "number": i, **common} for i in range(count)]
    for i in range(first, count):
        rows[i]["answer"] = i
    return write_lines(tmp_path / f"{name}.jsonl", rows)


@pytest.mark.parametrize("buffer", [0, 10_000])
def test_a_column_that_comes_late_is_there(tmp_path, tokenizer, buffer):
    columns = stream(late(tmp_path), tokenizer, shuffle_buffer=buffer).take(0, 200).columns
    answers = dict(zip(columns["number"], columns["answer"], strict=True))
    assert answers == {i: i if i >= 150 else None for i in range(200)}


def test_a_late_column_is_found_before_it_is_needed(tmp_path, tokenizer):
    prompts = stream(late(tmp_path, first=1500, count=2000), tokenizer)
    assert prompts.names == ["number"]
    prompts.find(["answer", "other"])
    assert prompts.names == ["number", "answer"]
    assert prompts.take(0, 3).columns == {"number": [0, 1, 2], "answer": [None] * 3}


def needs_answer(completions, answer):
    return [float(a is not None) for a in answer]


@pytest.mark.parametrize("mixed", [False, True])
def test_rewards_may_need_a_late_column(tmp_path, tokenizer, mixed):
    source, other = late(tmp_path, source="a"), write(tmp_path, "b", 40, source="b")
    given = {"mixture": {source: 1, other: 1}} if mixed else {"source": source}
    cfg = config(data=given | {"streaming": True, "shuffle_buffer": 5}, evaluation={"prompts": 4})
    prompts, held_out = load_prompts(cfg, tokenizer, Limits)
    rewards = [Reward("r", needs_answer)]
    with pytest.raises(ValueError, match=r"reward 'r' needs 'answer'. Columns of the data: number, source"):
        check_columns(rewards, prompts.names)
    find_columns(cfg, rewards, prompts, held_out)
    for scored in (prompts, held_out):
        check_columns(rewards, scored.names)
        assert scored.take(0, 4).columns["answer"] == [None] * 4


def test_a_column_that_no_row_has_is_named_with_the_nearest(tmp_path, tokenizer):
    prompts = stream(late(tmp_path, first=0), tokenizer)

    def reward(completions, anser):
        return []

    with pytest.raises(ValueError, match=r"needs 'anser'; did you mean 'answer'\? Columns of the data: number, answer"):
        check_columns([Reward("r", reward)], prompts.names)


def test_a_stream_without_a_prompt_to_hold_out(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="no prompt is left"):
        stream(write(tmp_path, "a", 5), tokenizer, longest=1).split(2)


# --- training and evaluation prompts ----------------------------------------------------------------------------------


def repeated(tmp_path, name, letters):
    return write_lines(
        tmp_path / f"{name}.jsonl", [{"prompt": letter, "number": i} for i, letter in enumerate(letters)]
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_prompts_that_are_held_out_are_not_trained(tmp_path, tokenizer, streaming):
    """The last two prompts are c and d, those of a stream the first two; both occur in the rest as well."""
    letters = "abcabd" if not streaming else "cdabca"
    cfg = config(data={"source": repeated(tmp_path, "a", letters), "streaming": streaming}, evaluation={"prompts": 2})
    prompts, held_out = load_prompts(cfg, tokenizer, Limits)
    trained = prompts.take(0, 20).prompts
    assert not set(trained) & set(held_out.prompts)
    assert set(trained) == set(letters) - set(held_out.prompts)


def test_evaluation_prompts_of_another_file_are_not_trained(tmp_path, tokenizer):
    source, other = repeated(tmp_path, "a", "abcdab"), repeated(tmp_path, "b", "bex")
    alone, _ = load_prompts(config(data={"source": source}), tokenizer, Limits)
    cfg = config(data={"source": source, "evaluation": other}, evaluation={"prompts": 3})
    prompts, held_out = load_prompts(cfg, tokenizer, Limits)
    assert (prompts.prompts, prompts.shared, len(held_out)) == (["a", "c", "d", "a"], 2, 3)
    assert "2 dropped with a held-out prompt" in repr(prompts)
    assert len(read_prompts(cfg, tokenizer, Limits)[0]) == len(alone) == 6
    mixture = config(data={"mixture": {source: 1, repeated(tmp_path, "c", "bcd"): 1}, "evaluation": other})
    assert {*load_prompts(mixture, tokenizer, Limits)[0].all().prompts} == {*"acd"}
    with pytest.raises(ValueError, match="all 6 training prompts are also held out"):
        load_prompts(
            config(data={"source": source, "evaluation": source}, evaluation={"prompts": 2}), tokenizer, Limits
        )
    off, _ = load_prompts(config(data={"source": source, "evaluation": source}), tokenizer, Limits)
    assert len(off) == 6  # nothing is evaluated


def test_a_source_that_shares_nothing_keeps_its_order(tmp_path, tokenizer):
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": "a " * (i + 1), "number": i} for i in range(40)])
    cfg = config(data={"source": source}, evaluation={"prompts": 8}, train={"seed": 3})
    prompts, _ = load_prompts(cfg, tokenizer, Limits)
    rows = load_prompt_set(source, tokenizer, max_prompt_tokens=99, limit=32, seed=3)
    assert prompts.take(0, 70) == rows.take(0, 70)


@pytest.mark.parametrize("own", [True, False])
def test_every_seed_evaluates_the_same_prompts(tmp_path, tokenizer, own):
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": "a " * (i + 1)} for i in range(40)])
    given = {"source": source} | ({} if own else {"evaluation": write(tmp_path, "b", 30, "b")})
    found = []
    for seed in (0, 1, 7):
        cfg = config(data=given, evaluation={"prompts": 4}, train={"seed": seed})
        _, held_out = load_prompts(cfg, tokenizer, Limits)
        found.append(held_out.take(0, 4))
    assert found[0] == found[1] == found[2]


def test_evaluation_prompts_that_are_too_long_are_counted(tmp_path, tokenizer):
    source, other = write(tmp_path, "a", 6), write(tmp_path, "b", 9, "c")  # of 2, 3 and 4 tokens
    cfg = config(data={"source": source, "evaluation": other, "max_prompt_tokens": 3}, evaluation={"prompts": 9})
    _, held_out = load_prompts(cfg, tokenizer, Limits)
    assert (len(held_out), held_out.left_out) == (6, {"dropped as too long": 3})
    assert size_of(6, 16, held_out.left_out) == "6 prompts x 16 samples; 3 dropped as too long"
    assert size_of(6, 16, {}) == "6 prompts x 16 samples"


def test_a_mixture_of_single_prompts_cannot_hold_out_one(tmp_path, tokenizer):
    mixture = {write(tmp_path, name, 1): 1 for name in "ab"}
    with pytest.raises(ValueError, match=r"each source of the mixture has a single prompt.* data.evaluation"):
        load_prompts(config(data={"mixture": mixture}, evaluation={"prompts": 2}), tokenizer, Limits)


def test_a_split_is_not_inherited_by_a_file(tmp_path, tokenizer):
    folder = tmp_path / "data"
    folder.mkdir()
    repeated(folder, "test", "ab")
    cfg = config(data={"source": str(folder), "split": "test", "evaluation": repeated(tmp_path, "b", "cd")})
    prompts, held_out = load_prompts(cfg, tokenizer, Limits)
    assert (prompts.prompts, held_out.prompts) == (["a", "b"], ["c", "d"])


def test_files_of_other_splits_are_listed(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "test", "dev"):
        repeated(folder, name, "ab")
    cfg = config(data={"source": str(folder), "evaluation": str(folder), "evaluation_split": "test"})
    assert unread_files(cfg) == [f"not read in {folder}: dev.jsonl (split 'validation')"]
    assert unread_files(config(data={"source": str(folder / "train.jsonl")})) == []


# --- options of the chat template -------------------------------------------------------------------------------------


def chats(tmp_path, count, first=0):
    """A file of texts and, from row number ``first`` on, conversations."""
    rows = [{"prompt": f"a {'b ' * i}"} for i in range(first)]
    rows += [{"prompt": [{"role": "user", "content": f"c {'b ' * i}"}]} for i in range(count)]
    return write_lines(tmp_path / "chats.jsonl", rows)


@pytest.mark.parametrize("streaming", [False, True])
def test_options_of_the_template_are_for_some_sources(tmp_path, streaming):
    tokenizer = make_tokenizer(bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{{ 'g ' if thinks else 'f ' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    texts, talks = write(tmp_path, "texts", 5), chats(tmp_path, 5, first=70)
    common = {"streaming": streaming, "chat_template_kwargs": {"thinks": True}, "shuffle": False}
    cfg = config(data={"mixture": {texts: 1, talks: 1}} | common)
    prompts, _ = load_prompts(cfg, tokenizer, Limits)
    assert next(prompts.conversations())[0]["role"] == "user"
    assert len(all_prompts(cfg, tokenizer, Limits)) == 80
    for source in ({"source": texts}, {"mixture": {texts: 1}}):
        with pytest.raises(ValueError, match=r"texts.jsonl: chat_template_kwargs is for the chat template, but all"):
            load_prompts(config(data=source | common), tokenizer, Limits)
    own = {"mixture": {texts: {"chat_template_kwargs": {"thinks": True}}, talks: 1}, "streaming": streaming}
    with pytest.raises(ValueError, match=r"texts.jsonl: chat_template_kwargs is for the chat template"):
        load_prompts(config(data=own), tokenizer, Limits)
    # A late conversation of a stream, and evaluation prompts that are texts.
    cfg = config(data={"source": talks, "evaluation": texts} | common)
    assert len(list(load_prompts(cfg, tokenizer, Limits)[0].conversations())) == 5


@pytest.mark.parametrize("streaming", [False, True])
def test_a_system_prompt_that_no_conversation_gets(tmp_path, streaming):
    """Conversations keep a system message of their own, so a prompt for the others may be for none."""
    tokenizer = make_tokenizer(bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}"
    plain = chats(tmp_path, 5)
    instructed = [[{"role": "system", "content": "e"}, {"role": "user", "content": f"c {i}"}] for i in range(5)]
    own = write_lines(tmp_path / "own.jsonl", [{"prompt": messages} for messages in instructed])
    common = {"streaming": streaming, "shuffle": False}
    alone = {"source": own, "system_prompt": "a"}
    beside_others = {"mixture": {own: {"system_prompt": "a"}, plain: 1}, "system_prompt": "b"}
    for data in (alone, beside_others):
        with pytest.raises(ValueError, match=r"own.jsonl: system_prompt = 'a' is not used, because all .* Remove"):
            load_prompts(config(data=data | common), tokenizer, Limits)
    shared = config(data={"mixture": {own: 1, plain: 1}, "system_prompt": "a"} | common)
    prompts, _ = load_prompts(shared, tokenizer, Limits)
    assert {messages[0]["content"] for messages in prompts.conversations()} == {"a", "e"}
