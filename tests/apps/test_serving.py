"""The server, by OpenAI's client and by plain sockets: responses, refusals, many requests at once, and its end."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
import pytest
import torch
from support.helpers import EOS, Forked, environment, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from nlgrpo import cli
from nlgrpo.apps.respond import batching
from nlgrpo.apps.respond.app import _key
from nlgrpo.apps.respond.batching import Batcher, Closed, Job, QueueFull
from nlgrpo.apps.respond.requests import ChatRequest
from nlgrpo.data.conversations import messages_of
from nlgrpo.data.prompt_dataset import Batch
from nlgrpo.engine import guides
from nlgrpo.engine.guided_search import Cost, Search
from nlgrpo.engine.sampling import Sampling
from nlgrpo.inference import Chooser, Procedure, Responder, Response
from nlgrpo.model import decoder, reward_model

TEMPLATE = "{% for m in messages %}{% if m['role'] == 'system' %}w0 {% endif %}{{ m['content'] }} {% endfor %}w9"
REWARDS = """
import ctypes, signal, time

def high(completion_ids, **_):
    if any(ids[0] == 7 and ids[1:] and ids[1] < 12 for ids in completion_ids):
        raise RuntimeError("an ugly word")
    return [float(sum(ids)) for ids in completion_ids]

def endless(completion_ids, **_):
    open(__file__.replace("rewards.py", "endless"), "w").close()
    time.sleep(3600)

def slow(completion_ids, **_):
    time.sleep(0.5)
    return [float(sum(ids)) for ids in completion_ids]

def stuck(prompts, completion_ids, **_):
    if any("w25" in prompt for prompt in prompts):
        open(__file__.replace("rewards.py", "stuck"), "w").close()
        ctypes.PyDLL(None).pthread_mutex_lock(LOCKED)
    return [float(sum(ids)) for ids in completion_ids]

def alarmed(completion_ids, **_):
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return [float(sum(ids)) for ids in completion_ids]
    except ValueError:
        return [0.0] * len(completion_ids)

class Voted:
    def __call__(self, completion_ids, **_):
        return [1.0] * len(completion_ids)

    def answer(self, text):
        if "w25" in text:
            raise KeyError("no vote")
        return text[:2]

LOCKED = ctypes.create_string_buffer(64)
ctypes.CDLL(None).pthread_mutex_lock(LOCKED)
"""
TOKENS = 8


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    root = tmp_path_factory.mktemp("work")
    tiny_model(root / "policy", "gpt2", scale=0.3)
    tokenizer = AutoTokenizer.from_pretrained(root / "policy")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(root / "policy")
    value, _ = reward_model.load_reward_model(str(root / "policy"), seed=1)
    reward_model.save(value, root / "value", tokenizer=tokenizer, pad=0, max_length=64)
    (root / "rewards.py").write_text(REWARDS)
    return root


@contextmanager
def serving(work, *more, reward="high", status=0, at_end=int, **environ):
    """A server in a forked process, and its port; it is stopped by SIGTERM and must end with ``status``.

    The process calls ``at_end`` with the status of the command, and ends with what it returns.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--model", str(work / "policy"), "--name", "tiny", "--max-new-tokens", str(TOKENS), "--port", str(port)]
    if "--guide" not in more:
        options += ["--procedure", "bon:4", "--choose", f"{work / 'rewards.py'}:{reward}"]
    process = Forked(lambda: at_end(cli.main(["serve", *options, *more])), **environ)
    try:
        for _ in range(400):
            try:
                assert get(port, "/health")[0] == 200
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        yield port, process
        os.kill(process.pid, signal.SIGTERM)
        ended = process.end()
        assert ended.status == status, ended.output
    except BaseException:
        try:
            os.kill(process.pid, signal.SIGKILL)
            print(process.end().output)
        except (ProcessLookupError, OSError):
            pass
        raise


@pytest.fixture(scope="module")
def port(work):
    with serving(work) as (port, _):
        yield port


def client(port, **changes):
    return openai.OpenAI(**({"base_url": f"http://127.0.0.1:{port}/v1", "api_key": "any", "max_retries": 0} | changes))


def request(port, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, {"Content-Type": "application/json"} | headers)
    response = connection.getresponse()
    content = response.read()
    return response.status, json.loads(content) if content else None


def get(port, path, **headers):
    return request(port, "GET", path, **headers)


def send(port, body):
    """Send a request, and return the connection without waiting for the response."""
    connection, content = socket.create_connection(("127.0.0.1", port)), json.dumps(body)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    connection.sendall(f"{head}{len(content)}\r\n\r\n{content}".encode())
    return connection


def post(port, body, path="/v1/completions", **headers):
    return request(port, "POST", path, body if isinstance(body, str | bytes) else json.dumps(body), **headers)


@pytest.fixture(scope="module")
def responder(work):
    """The library with the options of the server."""
    return Responder(
        decoder.load(work / "policy"),
        AutoTokenizer.from_pretrained(work / "policy"),
        Procedure.parse("bon:4"),
        Chooser.of(f"{work / 'rewards.py'}:high"),
        Sampling(max_new_tokens=TOKENS, stop_ids=(EOS,)),
    )


def responses_of(responder, prompts, seed, **changes):
    """Responses of the library to the prompts (token ids and text) with the noise of the server's ``seed``."""
    ids = [responder.tokenizer(text).input_ids for text in prompts]
    batch = Batch([_key(seed, place) for place in range(len(ids))], ids, list(prompts), {})
    return responder.respond(batch, seed=0, **changes)[0]


# --- responses --------------------------------------------------------------------------------------------------------


def test_a_chat_completion_is_the_best_of_n(port, responder):
    messages = [{"role": "system", "content": "w5"}, {"role": "user", "content": "w1 w2"}]
    found = client(port).chat.completions.create(
        model="tiny", messages=messages, seed=11, extra_body={"candidates": True}, logprobs=True
    )
    ids = responder.tokenizer("w0 w5 w1 w2 w9").input_ids
    [expected], _ = responder.respond(Batch([_key(11, 0)], [ids], [messages], {}))
    [choice] = found.choices
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == expected.best.finish_reason
    assert choice.score == expected.score == max(sum(one.tokens) for one in expected.candidates)
    assert [(one["text"], one["score"]) for one in choice.candidates] == [
        (one.text, one.score) for one in expected.candidates
    ]
    assert [one["chosen"] for one in choice.candidates].index(True) == expected.chosen
    assert [part.logprob for part in choice.logprobs.content] == pytest.approx(expected.best.logprobs)
    assert (found.object, found.model) == ("chat.completion", "tiny")
    sampled = sum(len(one.tokens) for one in expected.candidates)
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, len(expected.best.tokens))
    assert (usage.total_tokens, usage.sampled_tokens) == (5 + len(expected.best.tokens), sampled)


def test_a_final_message_of_the_assistant_is_continued(port, responder):
    messages = [{"role": "user", "content": [{"type": "text", "text": "w1"}]}, {"role": "assistant", "content": "w2"}]
    found = client(port).chat.completions.create(model="tiny", messages=messages, seed=3, logprobs=True)
    ids = responder.tokenizer("w1 w2").input_ids  # as with `continue_final_message`
    [expected], _ = responder.respond(Batch([_key(3, 0)], [ids], [messages], {}))
    [choice] = found.choices
    assert choice.message.content == expected.text
    assert found.usage.prompt_tokens == 2
    assert "".join(part.token for part in choice.logprobs.content) == expected.text


def test_text_completions_of_several_prompts_and_choices(port, responder):
    found = client(port).completions.create(model="tiny", prompt=["w1", "w2 w3"], n=2, seed=5, temperature=0.7)
    hot = Sampling(temperature=0.7, max_new_tokens=TOKENS, stop_ids=(EOS,))
    expected = responses_of(responder, ["w1", "w1", "w2 w3", "w2 w3"], 5, sampling=hot)
    assert [choice.text for choice in found.choices] == [response.text for response in expected]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.usage.prompt_tokens == 3
    assert not hasattr(found.choices[0], "score")  # not requested
    ids = [responder.tokenizer(text).input_ids for text in ("w1", "w2 w3")]
    same = client(port).completions.create(model="tiny", prompt=ids, n=2, seed=5, temperature=0.7)
    assert [choice.text for choice in same.choices] == [choice.text for choice in found.choices]
    one = client(port).completions.create(model="tiny", prompt=ids[1], seed=5, max_tokens=2)
    assert one.usage.completion_tokens <= 2


def test_log_probs_of_a_text_are_those_of_transformers(port, work, responder):
    found = client(port).completions.create(model="tiny", prompt="w1 w2", seed=3, logprobs=1)
    [choice] = found.choices
    words = choice.logprobs.tokens
    assert "".join(words) == choice.text
    assert [choice.text[at:] for at in choice.logprobs.text_offset] == ["".join(words[t:]) for t in range(len(words))]
    model = AutoModelForCausalLM.from_pretrained(work / "policy")
    [response] = responses_of(responder, ["w1 w2"], 3)
    ids = torch.tensor([[*responder.tokenizer("w1 w2").input_ids, *response.best.tokens]])
    logps = model(ids).logits[0].log_softmax(-1)
    truth = [logps[1 + t, token].item() for t, token in enumerate(response.best.tokens)]
    assert choice.logprobs.token_logprobs == pytest.approx(truth, abs=1e-4)


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_is_the_chosen_response(port, chat):
    options = {"model": "tiny", "seed": 4, "n": 2, "extra_body": {"candidates": True}}
    if chat:
        create, options = (
            client(port).chat.completions.create,
            options | {"messages": [{"role": "user", "content": "w7"}]},
        )
        whole = [choice.message.content for choice in create(**options).choices]
    else:
        create, options = client(port).completions.create, options | {"prompt": "w7"}
        whole = [choice.text for choice in create(**options).choices]
    scores = [choice.score for choice in create(**options).choices]
    chunks = list(create(**options, stream=True, stream_options={"include_usage": True}))
    texts, ends = ["", ""], {}
    for chunk in chunks[:-1]:
        [choice] = chunk.choices
        texts[choice.index] += (choice.delta.content or "") if chat else choice.text
        if choice.finish_reason:
            ends[choice.index] = choice
    assert texts == whole
    assert len(chunks) > 8
    assert [ends[i].score for i in range(2)] == scores
    assert all(len(ends[i].candidates) == 4 for i in range(2))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert len({chunk.id for chunk in chunks}) == 1


def test_stop_strings_end_the_response(port, responder):
    stops = ["w3", "w12"]
    found = client(port).completions.create(model="tiny", prompt="w1", n=8, seed=2, stop=stops)
    expected = responses_of(responder, ["w1"] * 8, 2, stop=("w3", "w12"))
    assert [choice.text for choice in found.choices] == [response.text for response in expected]
    assert not any(stop in choice.text for choice in found.choices for stop in stops)


def test_responses_without_a_seed_differ(port):
    texts = {client(port).completions.create(model="tiny", prompt="w1").choices[0].text for _ in range(6)}
    assert len(texts) > 2


def test_models_and_health(port):
    assert [model.id for model in client(port).models.list()] == ["tiny"]
    assert client(port).models.retrieve("tiny").owned_by == "nlgrpo"
    assert get(port, "/health")[1] == {"status": "ok", "procedure": "bon:4", "waiting": 0}
    with pytest.raises(openai.NotFoundError):
        client(port).models.retrieve("other")


def test_a_guided_search_is_served(work, responder):
    """The score is the output of the classifier in transformers for the response that the library finds."""
    search = ("--guide", str(work / "value"), "--beams", "2", "--successors", "2", "--chunk", "2")
    with serving(work, *search) as (port, _):
        found = client(port).completions.create(model="tiny", prompt="w1", seed=1, extra_body={"candidates": True})
    [choice] = found.choices
    values = guides.load_values([work / "value"], [], responder.tokenizer, responder.sampling)
    guided = Responder(
        responder.model, responder.tokenizer, Search(2, 2, 2), Chooser("value"), responder.sampling, values
    )
    [expected] = responses_of(guided, ["w1"], 1)
    assert choice.text == expected.text
    theirs = AutoModelForSequenceClassification.from_pretrained(work / "value").eval()
    theirs.config.pad_token_id = None
    ids = torch.tensor([[*responder.tokenizer("w1").input_ids, *expected.best.tokens]])
    assert theirs(ids).logits.item() == pytest.approx(choice.score, abs=1e-4)
    assert choice.score == max(one["score"] for one in choice.candidates)


# --- refusals ---------------------------------------------------------------------------------------------------------

USER = [{"role": "user", "content": "w1"}]


def said_by_user(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "not valid JSON"),
        (b"", 400, "the body is empty"),
        (b"[1]", 400, "the body must be a JSON object"),
        (b"\xff\xfe", 400, "not valid JSON"),
        ({}, 400, "prompt: Field required"),
        ({"prompt": "w1", "nonsense": 1}, 400, "nonsense: unknown option"),
        ({"prompt": "w1", "model": "gpt-5"}, 404, "the model 'gpt-5' does not exist; this server has 'tiny'"),
        ({"prompt": "w1", "max_tokens": 0}, 400, "max_tokens: Input should be greater than or equal to 1"),
        ({"prompt": "w1", "max_tokens": 9}, 400, "max_tokens = 9: this server generates at most 8 tokens"),
        ({"prompt": "w1", "max_tokens": 2.5}, 400, "max_tokens: "),
        ({"prompt": "w1", "temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
        ({"prompt": "w1", "temperature": "hot"}, 400, "temperature: "),
        (b'{"prompt": "w1", "temperature": NaN}', 400, "temperature: Input should be a finite number"),
        ({"prompt": "w1", "top_p": 0}, 400, "top_p: Input should be greater than 0"),
        ({"prompt": "w1", "n": 17}, 400, "1 prompts x n = 17: this server returns at most 16 responses"),
        ({"prompt": ["w1"] * 17}, 400, "17 prompts x n = 1"),
        ({"prompt": "w1", "n": 10**30}, 400, "this server returns at most 16 responses"),
        ({"prompt": "w1", "seed": 2**63}, 400, "seed: "),
        ({"prompt": "w1", "stop": ""}, 400, "stop: an empty string stops before the first token; leave it out"),
        ({"prompt": "w1", "stop": [""]}, 400, "stop: an empty string stops before the first token; leave it out"),
        ({"prompt": "w1", "stop": ["a", 3]}, 400, "stop: expected a text or a list of texts, got a list"),
        ({"prompt": "w1", "top_k": -2}, 400, "top_k: Input should be greater than or equal to -1"),
        ({"prompt": "w1", "logit_bias": {"3": 5}}, 400, "'logit_bias' is not supported"),
        ({"prompt": "w1", "repetition_penalty": 1.2}, 400, "'repetition_penalty' is not supported"),
        ({"prompt": "w1", "min_tokens": 4}, 400, "'min_tokens' is not supported"),
        ({"prompt": "w1", "ignore_eos": True}, 400, "'ignore_eos' is not supported"),
        ({"prompt": "w1", "frequency_penalty": -0.5}, 400, "'frequency_penalty' is not supported"),
        ({"prompt": "w1", "stream": True, "stream_options": {"continuous_usage_stats": True}}, 400,
         "stream_options.continuous_usage_stats: unknown option"),
        ({"prompt": "w1", "logprobs": 5}, 400, "logprobs: Input should be less than or equal to 1"),
        ({"prompt": "w1", "best_of": 4}, 400, "'best_of' is not supported"),
        ({"prompt": "w1", "presence_penalty": 0.5}, 400, "'presence_penalty' is not supported"),
        ({"prompt": "w1", "stream_options": {"include_usage": True}}, 400, "stream_options: only with stream"),
        ({"prompt": "w1", "echo": True}, 400, "'echo' is not supported"),
        ({"prompt": []}, 400, "prompt: "),
        ({"prompt": [[]]}, 400, "prompt: "),
        ({"prompt": [99]}, 400, "token id outside [0, 32)"),
        ({"prompt": [-1]}, 400, "token id outside [0, 32)"),
        ({"prompt": ""}, 200, ""),  # the BOS token alone
        ({"prompt": "w1 " * 60}, 400, "exceeds the model's context of 64"),
        (b'{"prompt": "\\ud83d"}', 400, "half a character"),
        ({"messages": USER, "tools": [{"type": "function"}]}, 400, "'tools' is not supported"),
        ({"messages": []}, 400, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "wizard", "content": "w1"}]}, 400, "messages.0.role"),
        (said_by_user({"type": "image_url", "image_url": {"url": "x"}}), 400,
         "messages.0.content: the message has a content part of type 'image_url', a dict"),
        (said_by_user({"type": "text", "text": "w1"}, {"type": "input_audio"}), 400, "part of type 'input_audio'"),
        (said_by_user({"type": "file", "file": {"file_id": "x"}}), 400, "part of type 'file'"),
        (said_by_user({"type": "text"}), 400, "messages.0.content: the message has a content part of type 'text'"),
        (said_by_user(), 400, "messages.0.content: the message has a list ([]) as its content; expected a text"),
        ({"messages": [{"role": "user"}]}, 400, "messages: message 1 (role 'user') has a NoneType"),
        ({"messages": [{"role": "user", "content": None}]}, 400, "messages: message 1 (role 'user') has a NoneType"),
        ({"messages": [{"role": "user", "content": "w1", "audio": {"id": "x"}}]}, 400,
         "'audio' is not supported in a message; this server takes role, content, name"),
        ({"messages": [*USER, {"role": "assistant", "content": "w2", "tool_calls": [{"id": "x"}]}, *USER]}, 400,
         "has tool calls, but the chat template leaves them out"),
        ({"messages": USER, "max_tokens": 2, "max_completion_tokens": 3}, 400,
         "max_tokens = 2, max_completion_tokens = 3: give one of them"),
        ({"messages": USER, "reasoning_effort": "low"}, 400, "'reasoning_effort' is not supported"),
        ({"messages": USER, "functions": [{"name": "f"}]}, 400, "'functions' is not supported"),
        ({"messages": USER, "continue_final_message": True}, 400,
         "continue_final_message = true is not supported where the last message has the role 'user'"),
        ({"messages": USER, "add_generation_prompt": False}, 400, "add_generation_prompt = false is not supported"),
        ({"messages": [*USER, {"role": "assistant", "content": "w2"}], "add_generation_prompt": True}, 400,
         "the response continues it; leave the option out"),
        ({"messages": USER, "response_format": {"type": "json_object"}}, 400, "'response_format' is not supported"),
        ({"messages": USER, "top_logprobs": 3}, 400, "'top_logprobs' is not supported"),
        ({"messages": USER, "max_completion_tokens": 99}, 400, "max_tokens = 99"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused(port, body, status, said):
    chat = isinstance(body, dict) and "messages" in body
    found, answer = post(port, body, "/v1/chat/completions" if chat else "/v1/completions")
    assert (found, said in json.dumps(answer.get("error", ""))) == (status, True), answer
    if status != 200:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["type"] == "invalid_request_error"


def test_log_probs_of_streams_and_of_zero(port):
    """`logprobs: 0` asks for the log-probs of the chosen tokens; a stream has them in its last chunk."""
    body = {"prompt": "w1", "seed": 3, "logprobs": 0}
    whole = post(port, body)[1]["choices"][0]["logprobs"]
    assert len(whole["tokens"]) == len(whole["token_logprobs"]) > 0
    stream = client(port).completions.create(model="tiny", **body, stream=True)
    last = [chunk.choices[0] for chunk in stream][-1]
    assert last.logprobs.token_logprobs == whole["token_logprobs"]
    assert post(port, {"prompt": "w1", "seed": 3})[1]["choices"][0]["logprobs"] is None


def test_neutral_and_harmless_options_are_accepted(port):
    body = {
        "prompt": "w1",
        "presence_penalty": 0,
        "best_of": 1,
        "user": "me",
        "suffix": None,
        "logit_bias": {},
        "n": None,
        "repetition_penalty": 1.0,
        "skip_special_tokens": True,
    }
    assert post(port, body)[0] == 200
    chat = {"messages": USER, "response_format": {"type": "text"}, "tools": [], "store": False, "stream": None}
    assert post(port, chat, "/v1/chat/completions")[0] == 200
    echoed = {"role": "assistant", "content": "w2", "refusal": None, "annotations": [], "tool_calls": None}
    assert post(port, {"messages": [*USER, echoed]}, "/v1/chat/completions")[0] == 200


TALK = [*USER, {"role": "assistant", "content": "w2"}]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": USER, "continue_final_message": False, "add_generation_prompt": True},
        {"messages": TALK, "continue_final_message": True, "add_generation_prompt": False},
        {"messages": TALK, "continue_final_message": None, "stop": None},
    ],
)
def test_continuing_a_message_may_be_said(body):
    assert ChatRequest(**body).messages[-1].role in ("user", "assistant")


def test_messages_of_tools_are_those_of_the_protocol():
    """What OpenAI's client returns for a response, and the answers of its tools."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    echoed = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
              "function_call": None, "tool_calls": [call]}  # fmt: skip
    result = {"role": "tool", "tool_call_id": "c1", "name": "f", "content": [{"type": "text", "text": "w4"}]}
    named = {"role": "user", "name": "ann", "content": "w1"}
    for silent in (echoed, {**echoed, "content": []}, {key: echoed[key] for key in ("role", "tool_calls")}):
        messages = [message.plain() for message in ChatRequest(messages=[named, silent, result]).messages]
        assert messages_of(messages, "messages") == [
            named, {"role": "assistant", "tool_calls": [call]}, {**result, "content": "w4"},
        ]  # fmt: skip


def test_parts_of_text_are_joined(port):
    """Parts are the text that has them as lines."""
    parts = said_by_user({"type": "text", "text": "w1"}, {"type": "text", "text": "w2", "cache_control": None})
    text = {"messages": [{"role": "user", "content": "w1\nw2"}]}
    answers = [post(port, {**body, "seed": 5}, "/v1/chat/completions")[1]["choices"] for body in (parts, text)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_can_be_off_in_two_ways(port, responder, top_k):
    found = client(port).completions.create(model="tiny", prompt="w1", seed=4, extra_body={"top_k": top_k})
    [expected] = responses_of(responder, ["w1"], 4)
    assert found.choices[0].text == expected.text


def test_many_stop_strings(port, responder):
    stops = [f"w{i}" for i in range(3, 28, 2)]
    found = client(port).completions.create(model="tiny", prompt="w1", n=8, seed=2, stop=stops)
    expected = responses_of(responder, ["w1"] * 8, 2, stop=tuple(stops))
    assert [choice.text for choice in found.choices] == [response.text for response in expected]
    assert not any(stop in choice.text.split() for choice in found.choices for stop in stops)


def test_other_paths_and_methods(port):
    assert get(port, "/v1/nothing")[0] == 404
    assert get(port, "/v1/completions")[0] == 405
    status, answer = post(port, {"prompt": "w1"}, **{"Content-Type": "text/plain"})
    assert (status, answer["error"]["message"]) == (400, "the body must be a JSON object, sent as application/json")


def test_a_reward_that_fails_is_a_server_error_for_its_request_alone(port):
    """It fails for some completions; the other requests of their batch are answered."""
    ok, failed = 0, 0
    with ThreadPoolExecutor(32) as pool:
        bodies = [{"prompt": f"w{i % 20}", "seed": i, "n": 8, "temperature": 2} for i in range(96)]
        for status, answer in pool.map(lambda body: post(port, body), bodies):
            ok += status == 200
            if status != 200:
                failed += 1
                assert status == 500
                assert "an ugly word" in answer["error"]["message"]
                assert answer["error"]["type"] == "server_error"
    assert ok > 20
    assert failed > 3


@pytest.mark.slow
def test_a_reward_that_hangs_ends_no_server_and_blocks_no_other_request(work, monkeypatch):
    """It holds the interpreter's lock of its own process, for one request."""
    monkeypatch.setattr(batching, "SLOW", 0.5)
    with serving(work, "--timeout", "15", reward="stuck") as (port, _), ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(post, port, {"prompt": "w25"})
        until((work / "stuck").exists)
        begun = time.monotonic()
        for seed in range(3):
            assert post(port, {"prompt": "w1", "seed": seed})[0] == 200
        assert time.monotonic() - begun < 12
        assert not hanging.done()
        status, answer = hanging.result(60)
        assert status == 500
        assert "rewards.py:stuck' did not return within its timeout of 15 s" in answer["error"]["message"]
        assert post(port, {"prompt": "w1"})[0] == 200


def test_a_reward_with_an_alarm_has_its_values_in_a_server(work):
    with serving(work, reward="alarmed") as (port, _):
        status, answer = post(port, {"prompt": "w1", "candidates": True, "seed": 1})
    assert status == 200
    assert max(one["score"] for one in answer["choices"][0]["candidates"]) > 0


def test_votes_of_a_reward_of_the_user(work):
    with serving(work, "--procedure", "maj:4", reward="Voted") as (port, _):
        found = [post(port, {"prompt": f"w{i}", "seed": i, "temperature": 2}) for i in range(12)]
    assert {status for status, _ in found} == {200, 500}
    for status, answer in found:
        if status == 500:
            assert "Voted' raised KeyError in its method answer" in answer["error"]["message"]


def test_a_key_is_needed_if_there_is_one(work):
    with serving(work, NLGRPO_API_KEY="secret") as (port, _):
        assert client(port, api_key="secret").completions.create(model="tiny", prompt="w1").choices
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
            {"Authorization": "Bearer secre"},
        ):
            status, answer = post(port, {"prompt": "w1"}, **headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert get(port, "/v1/models")[0] == 401
        assert get(port, "/health")[0] == 200


def test_large_and_unfinished_bodies(work):
    with serving(work, "--max-body", "2000") as (port, _):
        assert post(port, {"prompt": "w1 " * 1000})[0] == 413
        assert post(port, {"prompt": "w1 "})[0] == 200

        def chunks():
            for _ in range(1000):
                yield b"x" * 100

        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request(
                "POST", "/v1/completions", chunks(), encode_chunked=True, headers={"Transfer-Encoding": "chunked"}
            )
            assert connection.getresponse().status == 413
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server closed the connection before the whole body was sent
        half = socket.create_connection(("127.0.0.1", port))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert post(port, {"prompt": "w1 "})[0] == 200
        half.close()


# --- many requests, and the end ---------------------------------------------------------------------------------------


def test_200_requests_at_once_get_their_own_answers(port, responder):
    """Each answer equals the one that the same request gets alone, from the library."""

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as many:
            return await asyncio.gather(
                *(
                    many.completions.create(model="tiny", prompt=f"w{i % 26}", seed=i, temperature=(0.5, 1.0)[i % 2])
                    for i in range(200)
                )
            )

    found = asyncio.run(ask())
    assert len(found) == 200
    for i in range(0, 200, 7):
        warm = Sampling(temperature=(0.5, 1.0)[i % 2], max_new_tokens=TOKENS, stop_ids=(EOS,))
        [expected] = responses_of(responder, [f"w{i % 26}"], i, sampling=warm)
        assert found[i].choices[0].text == expected.text


@pytest.mark.slow
def test_a_full_queue_refuses(work):
    with (
        serving(work, "--max-queue", "3", "--max-rows", "4", reward="slow") as (port, _),
        ThreadPoolExecutor(12) as pool,
    ):
        statuses = list(pool.map(lambda i: post(port, {"prompt": "w1", "seed": i})[0], range(12)))
        assert sorted(set(statuses)) == [200, 429]
        assert statuses.count(200) >= 4  # one runs, three wait
        assert post(port, {"prompt": "w1"})[0] == 200


@pytest.mark.slow
def test_requests_in_flight_are_answered_before_the_end(work):
    with serving(work, "--max-rows", "4", reward="slow") as (port, process), ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(post, port, {"prompt": "w1", "seed": i}) for i in range(6)]
        until(lambda: get(port, "/health")[1]["waiting"] == 5)
        os.kill(process.pid, signal.SIGTERM)
        assert [future.result()[0] for future in waiting] == [200] * 6
        with pytest.raises(OSError, match="refused"):
            get(port, "/health")


def test_another_sigterm_at_the_end_does_not_change_the_status(work):
    def stopped_again(status):
        os.kill(os.getpid(), signal.SIGTERM)
        return status

    with serving(work, at_end=stopped_again) as (port, _):
        assert post(port, {"prompt": "w1"})[0] == 200


@pytest.mark.slow
def test_what_still_waits_after_the_grace_is_refused(work):
    """One request runs when the signal comes, five wait."""
    options = ("--max-rows", "4", "--grace", "0")
    with serving(work, *options, reward="slow") as (port, process), ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(post, port, {"prompt": "w1", "seed": i}) for i in range(6)]
        until(lambda: get(port, "/health")[1]["waiting"] == 5)
        os.kill(process.pid, signal.SIGTERM)
        answers = [future.result() for future in waiting]
        assert sorted(status for status, _ in answers) == [200, *[503] * 5]
        assert {answer["error"]["message"] for status, answer in answers if status == 503} == {"the server is stopping"}


@pytest.mark.slow
def test_a_batch_that_does_not_end_is_abandoned(work):
    with serving(work, "--grace", "0", reward="endless", status=1) as (port, process):
        waiting = send(port, {"prompt": "w1"})
        until((work / "endless").exists)
        began = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
    assert time.monotonic() - began < 10
    waiting.close()


@pytest.mark.slow
def test_a_client_that_goes_away_leaves_the_queue(work):
    with serving(work, "--max-rows", "4", reward="slow") as (port, _), ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, port, {"prompt": "w1"})
        until(lambda: running.running())
        for connection in [send(port, {"prompt": "w1"}) for _ in range(5)]:
            connection.close()
        assert running.result()[0] == 200
        began = time.monotonic()
        assert post(port, {"prompt": "w1"})[0] == 200
        assert time.monotonic() - began < 5 * 0.5  # the five would take longer


@pytest.mark.slow
def test_the_command_in_its_own_process_ends_by_itself(work):
    """Not forked from pytest: Python's own exit, its first line of output, and a second signal."""
    options = ["--model", str(work / "policy"), "--port", "0", "--max-new-tokens", "4"]
    for signals in (1, 2):
        process = subprocess.Popen(
            [sys.executable, "-m", "nlgrpo.cli", "serve", *options], env=environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        first = process.stdout.readline()
        port = int(first.split("http://127.0.0.1:")[1].split("/")[0])
        assert post(port, {"prompt": "w1"})[0] == 200
        hanging = socket.create_connection(("127.0.0.1", port))
        hanging.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        if signals == 2:
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
        else:
            hanging.close()
            assert process.wait(20) == 0
        process.communicate()


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "port = 70000"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:8000"),
        (["--max-queue", "0"], "max_queue = 0"),
        (["--grace", "-1"], "grace = -1"),
        (["--api-key", ""], "api_key is empty"),
        (["--port", "0", "--procedure", "bon:4"], "chooses by a reward"),
        (["--port", "0", "--choose", "majority"], "the number of candidates is missing"),
        (["--port", "0", "--model", "nowhere"], "model 'nowhere' is neither a directory"),
    ],
)
def test_wrong_options_are_refused(options, message, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    try:
        status = cli.main(["serve", *options])
    except SystemExit as end:
        status = end.code
    assert status in (1, 2)
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_port_that_is_taken_is_refused(port, capsys):
    assert cli.main(["serve", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr("nlgrpo.apps.respond.serve.find_spec", lambda name: None if name == "fastapi" else object())
    assert cli.main(["serve"]) == 2
    assert "nlgrpo serve needs fastapi; install them: pip install 'nlgrpo[serve]'" in capsys.readouterr().err


# --- the queue --------------------------------------------------------------------------------------------------------


class Recorder:
    """A responder that records the batches, and waits for a permit before each."""

    candidates, max_rows = 2, 8

    def __init__(self):
        self.batches, self.permits = [], threading.Semaphore(0)

    def respond(self, batch, *, seed, sampling, stop):
        self.permits.acquire()
        self.batches.append((list(batch.prompts), sampling.temperature))
        if "bad" in batch.prompts:
            raise ValueError("bad")
        if "panic" in batch.prompts:
            raise KeyboardInterrupt("panic")  # as the panics of libraries in Rust, not an Exception
        return [Response([], 0) for _ in batch.prompts], Cost(tokens=1)


def job(*prompts, temperature=1.0):
    return Job([[1]] * len(prompts), list(prompts), [0] * len(prompts), Sampling(temperature=temperature))


def test_jobs_with_the_same_options_share_a_batch_up_to_its_rows():
    recorder = Recorder()
    batcher = Batcher(recorder)
    first = batcher.submit(job("a"))
    until(lambda: len(batcher) == 0)
    others = [
        batcher.submit(one)
        for one in (job("b"), job("c", temperature=0.5), job("d", "e"), job("f", "g"), job(*"hijklm"), job("n"))
    ]
    cancelled = batcher.submit(job("never"))
    assert cancelled.cancel()
    for _ in range(6):
        recorder.permits.release()
    for future in (first, *others):
        future.result(timeout=20)
    assert recorder.batches == [
        (["a"], 1.0),
        (["b", "d", "e"], 1.0),
        (["c"], 0.5),
        (["f", "g"], 1.0),
        (list("hijklm"), 1.0),
        (["n"], 1.0),
    ]
    assert batcher.close(timeout=20)
    with pytest.raises(Closed):
        batcher.submit(job("late"))


def test_a_job_fails_alone():
    recorder = Recorder()
    batcher = Batcher(recorder)
    first = batcher.submit(job("a"))
    until(lambda: len(batcher) == 0)
    good, bad, other = (batcher.submit(job(prompt)) for prompt in ("b", "bad", "c"))
    for _ in range(5):
        recorder.permits.release()
    assert [len(future.result(timeout=20)) for future in (first, good, other)] == [1, 1, 1]
    with pytest.raises(ValueError, match="bad"):
        bad.result(timeout=20)
    batcher.close(timeout=20)


def test_a_panic_fails_its_job_and_the_queue_goes_on():
    recorder = Recorder()
    batcher = Batcher(recorder)
    for _ in range(4):
        recorder.permits.release()
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        batcher.submit(job("panic")).result(timeout=20)
    assert len(batcher.submit(job("a")).result(timeout=20)) == 1
    batcher.close(timeout=20)


def test_a_closed_queue_fails_what_waits():
    recorder = Recorder()
    batcher = Batcher(recorder, max_queue=2)
    running = batcher.submit(job("a"))
    until(lambda: len(batcher) == 0)
    waiting = [batcher.submit(job("b")), batcher.submit(job("c"))]
    with pytest.raises(QueueFull):
        batcher.submit(job("d"))
    assert not batcher.close(timeout=0)
    for future in waiting:
        with pytest.raises(Closed):
            future.result(timeout=20)
    recorder.permits.release()
    assert running.result(timeout=20)
    assert batcher.close(timeout=20)


def until(condition, seconds=20.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)
