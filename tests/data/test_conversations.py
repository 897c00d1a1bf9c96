"""Conversations: system prompts, arguments and tools of the chat template."""

import json

import datasets
import pytest
from support.chat_model import chat_tokenizer, template
from support.prompts import write_lines

from nlgrpo.data.conversations import ChatOptions, answered, is_continued, load_tools
from nlgrpo.data.encoding import encode
from nlgrpo.data.prompt_dataset import load_prompt_set

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
    return load_prompt_set(source, tokenizer, max_prompt_tokens=2000, shuffle=False, chat=ChatOptions(**chat))


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
    prompts = load_prompt_set(str(tmp_path / "data.parquet"), tokenizer, max_prompt_tokens=2000, shuffle=False)
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
    with pytest.raises(ValueError, match=r"no argument 'enable_thinkin'; did you mean 'enable_thinking'\? It has "):
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


# --- messages in every form -------------------------------------------------------------------------------------------

PARTS = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there", "image_url": None}]
IMAGE = {"type": "image_url", "image_url": {"url": "cat.png"}}
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
BROKEN_JSON = "[{'role': 'user', 'content': 'Hi'}]"  # Python's repr


def said(content, role="user"):
    return [{"role": role, "content": content}]


@pytest.mark.parametrize(
    ("content", "text"),
    [(PARTS, "Hi\nthere"), (["Hi", "there"], "Hi\nthere"), ([{"text": "Hi"}], "Hi"), (5, "5"), (0.5, "0.5"), ("", "")],
)
def test_content_is_one_text(tmp_path, tokenizer, rendered, content, text):
    prompts = load_rows(tmp_path, tokenizer, {"prompt": said(content)})
    assert prompts.prompts == [said(text)]  # what rewards get
    assert prompts.ids == [rendered(said(text))]
    assert encode(tokenizer, [said(content)]) == [rendered(said(text))]


def test_content_parts_of_arrow(tmp_path, tokenizer, rendered):
    """Arrow gives all parts the keys of all parts, and all messages those of all messages."""
    rows = [{"prompt": said(PARTS[:1])}, {"prompt": [{"role": "user", "name": "me", "content": PARTS}]}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "data.parquet")
    prompts = load_prompt_set(str(tmp_path / "data.parquet"), tokenizer, max_prompt_tokens=2000, shuffle=False)
    assert prompts.prompts == [said("Hi"), [{"role": "user", "name": "me", "content": "Hi\nthere"}]]
    assert prompts.ids == [rendered(said("Hi")), rendered(said("Hi\nthere"))]


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_messages_as_json(tmp_path, tokenizer, rendered, column):
    row = {column: json.dumps(said("Hi"))}
    prompts = load_rows(tmp_path, tokenizer, row, {column: said("Ho")})
    assert prompts.prompts == [said("Hi"), said("Ho")]
    assert prompts.ids == [rendered(said("Hi")), rendered(said("Ho"))]


@pytest.mark.parametrize(
    "text", ["[1, 2] is a list", "[1, 2]", '{"a": 1}', "[{'a': 1}]", "{'role': 'x'} is a dict", "["]
)
def test_other_texts_stay_texts(tmp_path, tokenizer, text):
    assert load_rows(tmp_path, tokenizer, {"prompt": text}).prompts == [text]


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        (said([*PARTS, IMAGE]), ["example 1", "message 1", "'user'", "'image_url'", "only text is supported"]),
        (said([{"type": "input_audio", "input_audio": {}}]), ["'input_audio'", "only text is supported"]),
        (said([3]), ["'int'", "only text is supported"]),
        (said([{"type": "text"}]), ["only text is supported"]),
        (said(None), ["message 1", "NoneType", "expected a text"]),
        (said([]), ["message 1", "a list ([])", "expected a text"]),
        (said(True), ["a bool (True)", "expected a text"]),
        (said(float("nan")), ["a float (nan)", "expected a text"]),
        (said({"parts": ["Hi"]}), ["a dict", "expected a text"]),
        ([{"content": "Hi"}], ["message 1 has no 'role'", "{'role': .., 'content': ..}"]),
        ([*USER, {"role": "user"}], ["message 2 has no 'content'"]),
        ([{"from": "human", "value": "Hi"}], ["has no 'role'", "Rename 'from' and 'value' to 'role' and 'content'"]),
        (said("Hi", role=3), ["a int (3) as its role", "'user'"]),
        (said("Hi", role="human"), ["'human'", "does not know", "system, developer, user, assistant, tool"]),
        (said("Hi", role="usr"), ["'usr'", "did you mean 'user'"]),
        ([], ["no message to answer"]),
        (["Hi"], ["instead of a list of {'role'"]),
        (BROKEN_JSON, ["column 'prompt'", "is not JSON", "json.dumps"]),
        (json.dumps(said("Hi"))[:-4], ["is not JSON", "json.dumps"]),
        (json.dumps(said("Hi")[0]), ["JSON of an object instead of a list"]),
        (json.dumps({"messages": said("Hi")}), ["JSON of an object instead of a list"]),
        (json.dumps([{"content": "Hi"}]), ["message 1 has no 'role'"]),
    ],
)
def test_messages_that_are_refused(tmp_path, tokenizer, prompt, named):
    with pytest.raises(ValueError, match="example 1") as error:
        load_rows(tmp_path, tokenizer, {"prompt": prompt})
    assert [part for part in named if part not in str(error.value)] == []


def test_a_column_of_messages_has_no_texts(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"column 'messages' holds a str \('Hi'\) .* prompt_column = 'messages'"):
        load_rows(tmp_path, tokenizer, {"messages": "Hi"})
    source = write_lines(tmp_path / "a.jsonl", [{"messages": "Hi"}])
    assert load_prompt_set(source, tokenizer, max_prompt_tokens=9, prompt_column="messages").prompts == ["Hi"]


def test_a_conversation_in_a_template_is_refused(tmp_path, tokenizer):
    for prompt in (USER, json.dumps(USER)):
        source = write_lines(tmp_path / "a.jsonl", [{"prompt": prompt}])
        with pytest.raises(ValueError, match=r"'prompt' is a conversation, which the template 'Q: \{prompt\}'"):
            load_prompt_set(source, tokenizer, max_prompt_tokens=99, template="Q: {prompt}")


# --- what the template does with messages -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma", "llama3", "qwen3", "phi3"])
@pytest.mark.parametrize("add_bos", [None, True])
def test_ids_are_those_of_transformers_with_one_bos(tmp_path, name, add_bos):
    tokenizer = chat_tokenizer(template(name), bos_token="<|im_start|>")
    expected = tokenizer.apply_chat_template(USER, add_generation_prompt=True, tokenize=True, return_dict=False)
    if add_bos and expected[0] != tokenizer.bos_token_id:
        expected = [tokenizer.bos_token_id, *expected]
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": USER}])
    assert load_prompt_set(source, tokenizer, max_prompt_tokens=999, add_bos=add_bos).ids == [expected]
    assert expected[:2] != [tokenizer.bos_token_id] * 2


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_that_the_template_drops(tmp_path, role):
    rows = {"prompt": [{"role": role, "content": "Be brief."}, *USER]}
    with pytest.raises(ValueError, match=r"example 1: .* leaves out message 1") as error:
        load_rows(tmp_path, chat_tokenizer(NO_SYSTEM), rows)
    assert "Be brief." in str(error.value)
    assert "first message of the user" in str(error.value)
    with pytest.raises(ValueError, match=r"leaves out message 1.* remove data.system_prompt"):
        load_rows(tmp_path, chat_tokenizer(NO_SYSTEM), {"prompt": "Hi"}, system_prompt="Be brief.")


def test_a_system_message_that_the_template_rejects(tmp_path):
    with pytest.raises(ValueError, match=r"System role not supported(.|\n)*first message of the user"):
        load_rows(tmp_path, chat_tokenizer(template("gemma"), bos_token="<s>"), {"prompt": "Hi"}, system_prompt="Be.")


def test_a_developer_is_a_system_where_the_template_has_none(tmp_path, tokenizer, rendered):
    developer, system = ([{"role": role, "content": "Be brief."}, *USER] for role in ("developer", "system"))
    assert load_rows(tmp_path, tokenizer, {"prompt": developer}).ids == [rendered(system)]
    own = load_rows(tmp_path, tokenizer, {"prompt": developer}, {"prompt": "Hi"}, system_prompt="Be kind.")
    assert own.prompts == [developer, [{"role": "system", "content": "Be kind."}, *USER]]


def test_roles_of_the_template_are_known(tmp_path):
    tokenizer = chat_tokenizer("{% if messages[0].role == 'critic' %}!{% endif %}" + PLAIN)
    assert load_rows(tmp_path, tokenizer, {"prompt": said("Hi", "critic")}).ids == [
        tokenizer("!<critic>Hi<assistant>")["input_ids"]
    ]


def test_a_thought_that_a_template_removes_is_no_message_left_out(tmp_path, tokenizer, rendered):
    """Qwen3 shows earlier answers without their reasoning."""
    talk = [*USER, {"role": "assistant", "content": "<think>Hm.</think>Yes"}, *USER]
    assert load_rows(tmp_path, tokenizer, {"prompt": talk}).ids == [rendered(talk)]


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}


def test_tool_calls_and_their_results(tmp_path, tokenizer, rendered):
    talk = [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, *said("Rain", role="tool")]
    assert load_rows(tmp_path, tokenizer, {"prompt": talk}).ids == [rendered(talk)]
    with pytest.raises(ValueError, match="message 2 has tool calls, but the chat template leaves them out"):
        load_rows(tmp_path, chat_tokenizer(PLAIN), {"prompt": talk})
    with pytest.raises(ValueError, match=r"ends with tool calls of the assistant.* role 'tool'"):
        load_rows(tmp_path, tokenizer, {"prompt": talk[:2]})


def test_a_final_message_of_the_assistant_is_continued(tmp_path, tokenizer):
    talk = [*USER, {"role": "assistant", "content": PARTS}]
    expected = tokenizer.apply_chat_template(
        [*USER, {"role": "assistant", "content": "Hi\nthere"}], continue_final_message=True, return_dict=False
    )
    assert load_rows(tmp_path, tokenizer, {"prompt": talk}).ids == [expected]
    assert encode(tokenizer, [talk]) == [expected]


def test_an_answer_that_continues_is_one_message():
    begun = [*USER, {"role": "assistant", "content": "The answer"}]
    assert answered(begun, said(" is 4", "assistant")) == [*USER, {"role": "assistant", "content": "The answer is 4"}]
    assert answered(USER, said("4", "assistant")) == [*USER, {"role": "assistant", "content": "4"}]
    assert [is_continued(prompt) for prompt in ("Hi", USER, begun)] == [True, False, True]


@pytest.mark.parametrize(
    ("options", "name"),
    [({"template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"), ({"tools": [WEATHER]}, "tools")],
)
def test_options_of_the_template_without_a_conversation(tmp_path, tokenizer, options, name):
    with pytest.raises(ValueError, match=rf"prompts.jsonl: {name} is for the chat template.* chat = true"):
        load_rows(tmp_path, tokenizer, {"prompt": "Hi"}, **options)
    assert load_rows(tmp_path, tokenizer, {"prompt": "Hi"}, {"prompt": USER}, **options)


# --- templates of models ----------------------------------------------------------------------------------------------

TALK = [*said("Be brief.", "system"), *said("Hi"), *said("Hello", "assistant"), *said(" Bye ")]
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'system' %}<<SYS>>{{ m.content }}<</SYS>>{% else %} {{ m.content }} {{ eos_token }}{% endif %}"
    "{% endfor %}"
)
MERGED = (  # the system's text begins the first message of the user
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>"
    "{{ messages[0].content if loop.first and messages[0].role == 'system' }}{{ m.content }}{% endfor %}"
)
BY_CONTENT = (  # writes a text in one of two ways
    "{% for m in messages %}{% if m.content.startswith('H') %}{{ m.content }}{% else %}[{{ m.content }}]{% endif %}"
    "{% endfor %}"
)
LAST_TWO = "{% for m in messages[-2:] %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def of_transformers(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


@pytest.mark.parametrize("source", [LLAMA2, MERGED, BY_CONTENT])
def test_small_templates_are_rendered_as_by_transformers(source):
    tokenizer = chat_tokenizer(source, bos_token="<|im_start|>")
    assert encode(tokenizer, [TALK]) == [of_transformers(tokenizer, TALK, add_generation_prompt=True)]
    begun = [*TALK, *said("Good", "assistant")]
    assert encode(tokenizer, [begun]) == [of_transformers(tokenizer, begun, continue_final_message=True)]


def test_a_template_of_the_last_messages_is_refused():
    with pytest.raises(ValueError, match=r"leaves out message 1, of the role 'system': a str \('Be brief.'\)"):
        encode(chat_tokenizer(LAST_TWO), [TALK])
    assert encode(chat_tokenizer(LAST_TWO), [TALK[-2:]])


@pytest.mark.parametrize(
    "name",
    [
        "cohere",
        "deepseekv3",
        "gemma3",
        "glm4moe",
        "gptoss",
        "lfm2",
        "llama3_1",
        "nemotron_3_nano",
        "phi3_5",
        "qwen3_5_think",
    ],
)
def test_templates_of_models_are_rendered_as_by_transformers(name):
    """With their BOS, a system message, an earlier answer with a thought, and white space around a text."""
    tokenizer = chat_tokenizer(template(name), bos_token="<s>", unk_token="<unk>")
    talk = [*TALK[:2], *said("<think>Hm.</think>Hello", "assistant"), *TALK[3:]]
    assert encode(tokenizer, [talk]) == [of_transformers(tokenizer, talk, add_generation_prompt=True)]


def test_a_template_that_writes_no_texts_is_refused():
    """Templates of models for images expect content as parts, and write nothing for a text."""
    with pytest.raises(ValueError, match=r"leaves out message 1, of the role 'user': a str \('Hi'\)"):
        encode(chat_tokenizer(template("smolvlm")), [USER])


def test_reasoning_without_an_answer_is_not_continued(tmp_path, tokenizer):
    talk = [*USER, {"role": "assistant", "reasoning_content": "Hm."}]
    with pytest.raises(ValueError, match=r"example 1 ends with reasoning .* cannot be continued.* remove the message"):
        load_rows(tmp_path, tokenizer, {"prompt": talk})
    assert load_rows(tmp_path, tokenizer, {"prompt": [*talk, *USER]}).prompts == [[*talk, *USER]]
