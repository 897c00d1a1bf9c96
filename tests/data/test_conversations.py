"""Conversations: system prompts, arguments and tools of the chat template."""

import json

import datasets
import pytest
from chat_model import chat_tokenizer, template
from test_prompt_dataset import write_lines

from nlgrpo.data.conversations import ChatOptions
from nlgrpo.data.prompt_dataset import load
from nlgrpo.data.prompt_encoding import encode
from nlgrpo.engine.rollouts.tools import load_tools

USER = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city."}},
            "required": ["city"],
        },
    },
}
FUNCTION = '''
def weather(city: str):
    """Return the weather of a city.

    Args:
        city: Name of the city.
    """

def without_types(city):
    """Return the weather of a city."""
'''


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="module")
def rendered(tokenizer):
    """What transformers makes of a conversation."""

    def render(messages, **options):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)

    return render


def load_rows(tmp_path, tokenizer, *rows, **chat):
    source = write_lines(tmp_path / "prompts.jsonl", rows)
    return load(source, tokenizer, max_prompt_tokens=2000, shuffle=False, chat=ChatOptions(**chat))


def test_texts_become_user_messages(tmp_path, tokenizer, rendered):
    prompts = load_rows(tmp_path, tokenizer, {"prompt": "Hi"}, from_text=True)
    assert prompts.ids == [rendered(USER)]
    assert prompts.prompts == [USER]
    as_text = load_rows(tmp_path, tokenizer, {"prompt": "Hi"})
    assert (as_text.ids, as_text.prompts) == ([tokenizer("Hi")["input_ids"]], ["Hi"])


def test_a_system_prompt_is_added_where_there_is_none(tmp_path, tokenizer, rendered):
    own = [{"role": "system", "content": "Be kind."}, *USER]
    added = [{"role": "system", "content": "Be brief."}, *USER]
    rows = [{"prompt": own}, {"prompt": USER}, {"prompt": "Hi"}]
    prompts = load_rows(tmp_path, tokenizer, *rows, system_prompt="Be brief.")
    assert prompts.prompts == [own, added, added]
    assert prompts.ids == [rendered(own), rendered(added), rendered(added)]


def test_arguments_reach_the_template(tmp_path, tokenizer, rendered):
    rows = [{"prompt": USER}, {"prompt": USER, "chat_template_kwargs": {"enable_thinking": True}}]
    prompts = load_rows(tmp_path, tokenizer, *rows, template_kwargs={"enable_thinking": False})
    with_thinking, without = rendered(USER), rendered(USER, enable_thinking=False)
    assert with_thinking != without
    assert prompts.ids == [without, with_thinking]
    assert encode(tokenizer, [USER], ChatOptions(template_kwargs={"enable_thinking": False})) == [without]


@pytest.mark.parametrize("column", [[WEATHER], json.dumps([WEATHER])])
def test_tools_reach_the_template(tmp_path, tokenizer, rendered, column):
    rows = [{"prompt": USER, "tools": column}, {"prompt": USER}]
    assert load_rows(tmp_path, tokenizer, *rows).ids == [rendered(USER, tools=[WEATHER]), rendered(USER)]
    other = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}
    both = load_rows(tmp_path, tokenizer, rows[0], tools=[other])
    assert both.ids == [rendered(USER, tools=[other, WEATHER])]


def test_keys_that_arrow_adds_are_not_shown_to_the_model(tmp_path, tokenizer, rendered):
    """Arrow gives every row the keys of all rows."""
    other = {"type": "function", "function": {"name": "now", "description": "Time.", "strict": True}}
    rows = [{"prompt": USER, "tools": [WEATHER]}, {"prompt": USER, "tools": [other]}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "data.parquet")
    prompts = load(str(tmp_path / "data.parquet"), tokenizer, max_prompt_tokens=2000, shuffle=False)
    names = [list(row["tools"][0]["function"]) for row in prompts.rows]
    assert names[0] == names[1]  # the keys that are missing are there, as None
    expected = [tokenizer.decode(rendered(USER, tools=[tool])) for tool in (WEATHER, other)]
    texts = list(map(tokenizer.decode, prompts.ids))
    assert [_objects(text) for text in texts] == [_objects(text) for text in expected]


def _objects(text):
    """The schemas in a prompt of Qwen3: Arrow may have changed the order of their keys."""
    listed = text.partition("<tools>\n")[2].partition("\n</tools>")[0]
    return [json.loads(line) for line in listed.splitlines()]


def test_tools_of_files_and_functions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTION)
    (tmp_path / "one.json").write_text(json.dumps(WEATHER))
    (tmp_path / "list.json").write_text(json.dumps([WEATHER, WEATHER]))
    assert load_tools(["mine.py:weather"]) == [WEATHER]
    assert load_tools(["one.json", "list.json"]) == [WEATHER] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.json", "cannot be read as JSON"),
        ("broken.json", "cannot be read as JSON"),
        ("number.json", "no list of tool schemas"),
        ("unnamed.json", "no list of tool schemas"),
        ("mine.py:without_types", "no schema can be made of mine.py:without_types"),
        ("mine.py:wether", "did you mean 'weather'"),
    ],
)
def test_tools_that_are_none(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTION)
    for file, content in {"broken": "[{", "number": "[3]", "unnamed": '[{"function": {}}]'}.items():
        (tmp_path / f"{file}.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tools([name])


def test_arguments_that_the_template_does_not_have(tmp_path, tokenizer):
    """`apply_chat_template` would ignore them."""
    with pytest.raises(ValueError, match=r"no argument 'enable_thinkin'.* It has .*Nearest: 'enable_thinking'"):
        load_rows(tmp_path, tokenizer, {"prompt": USER}, template_kwargs={"enable_thinkin": False})
    plain = chat_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="has tools, but the chat template does not use them"):
        load_rows(tmp_path, plain, {"prompt": USER}, tools=[WEATHER])


@pytest.mark.parametrize("name", ["qwen3_training", "llama3_2", "gemma4", "gptoss", "qwen2_5", "qwen3_5_think"])
def test_templates_of_other_models_are_read(tmp_path, name):
    """Their variables are found; templates for training mark the assistant's tokens with a tag of transformers."""
    with pytest.raises(ValueError, match=r"no argument 'nothing'\. It has .*tools"):
        load_rows(tmp_path, chat_tokenizer(template(name)), {"prompt": USER}, template_kwargs={"nothing": 1})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tools": "weather"}, r"example 1: column 'tools' is not JSON"),
        ({"tools": [3]}, r"column 'tools' holds a list \(\[3\]\) instead of a list of tool schemas"),
        ({"tools": {"name": "weather"}}, r"column 'tools' holds a dict"),
        ({"chat_template_kwargs": [1]}, r"column 'chat_template_kwargs' holds a list \(\[1\]\) instead of an object"),
        ({"chat_template_kwargs": {"think": 1}}, r"example 1: the chat template has no argument 'think'"),
    ],
)
def test_columns_that_are_refused(tmp_path, tokenizer, row, message):
    with pytest.raises(ValueError, match=message):
        load_rows(tmp_path, tokenizer, {"prompt": USER} | row)


def test_columns_of_texts_are_not_read(tmp_path, tokenizer):
    """A column `tools` of a data set without conversations is a column like others."""
    prompts = load_rows(tmp_path, tokenizer, {"prompt": "Hi", "tools": "hammer"})
    assert prompts.columns == {"tools": ["hammer"]}
