"""The reward ``judge``: an endpoint that fails, concurrency, the cache, costs, rubrics and replies without a grade."""

import asyncio
import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from nlgrpo.rewards.judge import RUBRIC, Judge, Reply
from nlgrpo.rewards.reward_functions import RewardError, check_columns, score
from nlgrpo.rewards.specs import load_reward


class Endpoint:
    """Grades a completion by its number of words; fails for a share of the requests."""

    def __init__(self, failures=0.0, delay=0.0, seed=0):
        self.failures, self.delay, self.random, self.lock = failures, delay, random.Random(seed), threading.Lock()
        self.requests, self.served, self.running, self.most, self.keys = [], 0, 0, 0, set()
        self.statuses = (500, 503, 429, 0)  # 0: the connection is closed without an answer
        self.reply = lambda words: f"It has {words} words.\nGrade: {words}"
        self.refuse = lambda body: None  # status and error of a request that is not taken
        self.finish_reason, self.choices = "stop", True

    def __enter__(self):
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.answer(self, body)

        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, handler, body):
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.requests.append(body)
            self.keys.add(handler.headers["Authorization"])
            fails = self.random.random() < self.failures
            status = self.random.choice(self.statuses) if fails else 200
        time.sleep(self.delay)
        with self.lock:
            self.running -= 1
            self.served += status == 200
        if status == 0:
            handler.close_connection = True
            handler.connection.close()
            return
        if (refusal := self.refuse(body)) is not None:
            respond(handler, *refusal)
            return
        words = len(body["messages"][0]["content"].split("<response>")[1].split("</response>")[0].split())
        message = {"role": "assistant", "content": self.reply(words)}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"],
                  "choices": [{"index": 0, "message": message, "finish_reason": self.finish_reason}] * self.choices,
                  "usage": {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107}}  # fmt: skip
        respond(handler, status, answer if status == 200 else {"error": {"message": "busy"}})


def respond(handler, status, answer):
    content = json.dumps(answer).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def judged(spec, completions, prompts=None, samples=None, **columns):
    """Scores through the same path as in training."""
    reward = load_reward("judge", spec)
    prompts = prompts or ["p"] * len(completions)
    scores = score([reward], prompts=prompts, completions=completions, completion_ids=[[1]] * len(completions),
                   columns=columns, samples=samples or len(completions), step=0, total_steps=1)  # fmt: skip
    return scores.values["judge"].flatten().tolist(), {name: values[0] for name, values in scores.metrics.items()}


def words(count):
    return " ".join(["word"] * count)


@pytest.mark.slow
def test_50_concurrent_requests_of_which_a_fifth_fail_lose_none():
    completions = [f"{words(i % 9)} {i}" for i in range(200)]
    with Endpoint(failures=0.2, delay=0.2) as endpoint:
        values, metrics = judged(f"judge(model='m', base_url='{endpoint.url}', concurrency=50)", completions)
        assert values == pytest.approx([(i % 9) / 9 for i in range(200)])
        assert 30 <= endpoint.most <= 50
        assert len(endpoint.requests) > 220  # repeated ones
        assert endpoint.served == 200
    assert metrics["judge/requests"] == 200
    assert metrics["judge/abstained"] == 0


def test_all_but_the_first_request_are_sent_at_once():
    """The first one alone shows what the endpoint refuses."""
    judge, running, counts = Judge("m", concurrency=4), [], []

    async def send(request):
        running.append(request)
        counts.append(len(running))
        await asyncio.sleep(0)
        running.remove(request)
        judge.settled = True
        return Reply("Grade: 10")

    judge._send = send
    for _ in range(2):
        assert asyncio.run(judge(["p"] * 9, [str(i) for i in range(9)])) == [1.0] * 9
    assert counts[:5] == [1, 1, 2, 3, 4]
    assert counts[9:13] == [1, 2, 3, 4]
    assert max(counts) == 4


def test_an_endpoint_that_never_answers_fails_the_reward_and_skips_or_stops():
    with Endpoint(failures=1.0) as endpoint:
        endpoint.statuses = (500,)
        spec = f"judge(model='m', base_url='{endpoint.url}', retries=1)"
        with pytest.raises(RewardError, match=r"raised InternalServerError: Error code: 500 .*busy"):
            judged(spec, ["a", "b"])
        reward = load_reward("judge", spec, on_error="skip")
        scores = score([reward], prompts=["p"] * 2, completions=["a", "b"], completion_ids=[[1]] * 2, columns={},
                       samples=2, step=0, total_steps=1)  # fmt: skip
        assert scores.skipped.tolist() == [True]


def test_an_endpoint_that_hangs_is_given_up():
    with Endpoint(delay=3.0) as endpoint, pytest.raises(RewardError, match="raised APITimeoutError"):
        judged(f"judge(model='m', base_url='{endpoint.url}', retries=0, timeout=0.3)", ["a"])


def test_equal_requests_are_sent_once_and_the_cache_is_shared(tmp_path):
    with Endpoint() as endpoint:
        spec = (
            f"judge(model='m', base_url='{endpoint.url}', cache='{tmp_path / 'new' / 'replies.db'}', prices=(2.0, 8.0))"
        )
        values, metrics = judged(spec, ["a", "a b", "a", "a b c"])
        assert values == pytest.approx([0, 1 / 9, 0, 2 / 9])
        assert len(endpoint.requests) == 3
        assert metrics["judge/prompt_tokens"] == 300
        assert metrics["judge/completion_tokens"] == 21
        assert metrics["judge/cost"] == pytest.approx(3 * (2.0 * 100 + 8.0 * 7) / 1e6)
        values, metrics = judged(spec, ["a b", "a b c d"])
        assert values == pytest.approx([1 / 9, 3 / 9])
        assert (metrics["judge/requests"], metrics["judge/cached"]) == (1, 1)
        assert metrics["judge/prompt_tokens"] == 100
        judged(spec.replace("'m'", "'other'"), ["a b"])  # another model is another key
        assert len(endpoint.requests) == 5
        judged(spec.replace(", prices", ", temperature=1.0, prices"), ["a b"])
        assert len(endpoint.requests) == 6


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("Grade: 10", 1.0),
        ("grade 1", 0.0),
        ("**Grade:** 5.5 of 10", 0.5),
        ("Grade: 3, but with the style Grade: 7", 6 / 9),
        ("Grade: 11", None),
        ("Grade: -2", None),
        ("It is fine.", None),
        ("", None),
    ],
)
def test_the_grade_of_a_reply(reply, value):
    assert Judge("m").reward(reply) == (None if value is None else pytest.approx(value))


def test_a_judge_that_abstains_is_counted():
    with Endpoint() as endpoint:
        endpoint.reply = lambda words: "I cannot grade this." if words == 2 else "Grade: 10"
        reward = load_reward("judge", f"judge(model='m', base_url='{endpoint.url}', label='style')")
        logged = {}
        values = asyncio.run(reward.function(["p"] * 2, ["a", "a b"], log_metric=logged.__setitem__))
    assert values == [1.0, None]
    assert logged["style/abstained"] == 1


def test_a_rubric_with_columns_from_a_file_and_conversations(tmp_path):
    (tmp_path / "rubric.md").write_text(
        "Is <response>{completion}</response> the answer {answer} to {prompt}? {low}-{high}"
    )
    judge = Judge("m", rubric=str(tmp_path / "rubric.md"), low=0, high=1)
    assert judge.data_columns == ("answer",)
    conversation = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "2 + 2?"}]
    request = judge.request(conversation, [{"role": "assistant", "content": "{answer} 4"}], {"answer": "four"})
    expected = "Is <response>{answer} 4</response> the answer four to system: Be kind.\n\nuser: 2 + 2?? 0-1"
    assert request == expected
    with pytest.raises(ValueError, match=r"reward 'x' needs 'answer'\. Columns of the data: none besides the prompt"):
        check_columns([load_reward("x", f"judge(model='m', rubric='{tmp_path / 'rubric.md'}')")], [])


def test_keys_come_from_the_environment(monkeypatch):
    with Endpoint() as endpoint:
        monkeypatch.setenv("OTHER_KEY", "secret")
        judged(f"judge(model='m', base_url='{endpoint.url}', key='OTHER_KEY')", ["a"])
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        judged(f"judge(model='m', base_url='{endpoint.url}')", ["b"])
    assert endpoint.keys == {"Bearer secret", "Bearer none"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "judge needs model"),
        ("model='m', low=5, high=5", "low must be below high"),
        ("model='m', concurrency=0", "concurrency must be a whole number of at least 1, got 0"),
        ("model='m', retries=-1", "retries must be a whole number of at least 0"),
        ("model='m', timeout=0", "timeout must be above 0 s"),
        ("model='m', rubric='grade it'", r"the rubric must contain \{completion\}"),
        ("model='m', rubric='none.txt'", "there is no rubric 'none.txt'"),
        ("model='m', grade='('", "is not a regular expression"),
        ("model='m', grade='x'", "must have one group"),
        ("model='m', prices=(1.0,)", "prices must be two numbers"),
        ("model='m', cache='/proc/nowhere/x.db'", "cannot use /proc/nowhere/x.db as the cache of a judge"),
        ("model='m', colour=1", "judge does not take 'colour'"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_reward("x", f"judge({arguments})")


def test_the_default_rubric_has_all_fields():
    request = Judge("m").request("What?", "That.", {})
    assert "{" not in request
    assert "from 1 (useless) to 10 (excellent)" in request
    assert "What?" in request
    assert RUBRIC.count("{completion}") == 1


# --- what an endpoint does not take -----------------------------------------------------------------------------------


def reasoning_model(body):
    """OpenAI's answers for its reasoning models."""
    if "max_tokens" in body:
        return 400, {"error": {"message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
                               "'max_completion_tokens' instead.", "type": "invalid_request_error",
                               "param": "max_tokens", "code": "unsupported_parameter"}}  # fmt: skip
    if body.get("temperature", 1) != 1:
        return 400, {"error": {"message": "Unsupported value: 'temperature' does not support 0 with this model. "
                               "Only the default (1) value is supported.", "type": "invalid_request_error",
                               "param": "temperature", "code": "unsupported_value"}}  # fmt: skip
    return None


def earlier_server(body):
    """A server of before 2024 that forbids options it does not know, as FastAPI does."""
    known = {"model", "messages", "temperature", "max_tokens"}
    detail = [{"type": "extra_forbidden", "loc": ["body", name], "msg": "Extra inputs are not permitted"}
              for name in body if name not in known]  # fmt: skip
    return (422, {"detail": detail}) if detail else None


def one_limit(body):
    both = {"max_tokens", "max_completion_tokens"} <= body.keys()
    message = "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported."
    error = {"message": message, "param": None, "code": "invalid_parameter_combination"}
    return (400, {"error": error}) if both else None


@pytest.mark.parametrize(
    ("refuse", "kept", "refusals"),
    [
        (lambda body: None, {"temperature": 0.0, "max_tokens": 30, "max_completion_tokens": 30}, 0),
        (reasoning_model, {"max_completion_tokens": 30}, 2),
        (earlier_server, {"temperature": 0.0, "max_tokens": 30}, 1),
        (one_limit, {"temperature": 0.0, "max_completion_tokens": 30}, 1),
    ],
    ids=["both", "reasoning model", "max_tokens only", "one of them"],
)
def test_what_an_endpoint_refuses_is_left_out_and_remembered(refuse, kept, refusals, caplog):
    with Endpoint() as endpoint:
        endpoint.refuse = refuse
        reward = load_reward("judge", f"judge(model='m', base_url='{endpoint.url}', max_tokens=30)")
        for _ in range(2):
            completions = [f"{words(7)} {i}" for i in range(9)]
            values = asyncio.run(reward.function(["p"] * 9, completions))
            assert values == pytest.approx([7 / 9] * 9)
        sent = [{key: body[key] for key in body.keys() - {"model", "messages"}} for body in endpoint.requests]
    assert sent[refusals:] == [kept] * 18
    said = [record.getMessage() for record in caplog.records if record.name == "nlgrpo.rewards.judge"]
    assert len(said) == refusals
    assert all("judge 'm' refuses" in text for text in said)


def test_openai_itself_gets_its_own_parameters(monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert Judge("gpt-5-mini")._sent().keys() == {"model", "temperature", "max_completion_tokens"}
    assert "max_tokens" in Judge("m", base_url="http://localhost:8000/v1")._sent()
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:8000/v1")
    assert "max_tokens" in Judge("m")._sent()


def test_a_temperature_that_the_user_gave_is_not_left_out():
    with Endpoint() as endpoint:
        endpoint.refuse = reasoning_model
        with pytest.raises(RewardError, match="'temperature' does not support"):
            judged(f"judge(model='m', base_url='{endpoint.url}', temperature=0.5)", ["a"])


@pytest.mark.parametrize(
    "message",
    ["'max_tokens' or 'max_completion_tokens' is too large: 30. The maximum context length is 8 tokens.", "no"],
)
def test_other_errors_are_not_about_parameters(message):
    with Endpoint() as endpoint:
        endpoint.refuse = lambda body: (400, {"error": {"message": message, "param": None, "code": 400}})
        with pytest.raises(RewardError, match="raised BadRequestError"):
            judged(f"judge(model='m', base_url='{endpoint.url}', max_tokens=30)", ["a"])
        assert len(endpoint.requests) == 1


def test_a_server_without_any_limit_is_an_error():
    with Endpoint() as endpoint:
        limits = ("max_tokens", "max_completion_tokens")
        errors = {name: (400, {"error": {"message": f"Unknown parameter {name}", "param": name}}) for name in limits}
        endpoint.refuse = lambda body: next((errors[name] for name in limits if name in body), None)
        with pytest.raises(RewardError, match="Unknown parameter max_"):
            judged(f"judge(model='m', base_url='{endpoint.url}')", ["a"])


def test_reasoning_that_takes_all_tokens_is_an_error():
    with Endpoint() as endpoint:
        endpoint.finish_reason = "length"
        endpoint.reply = lambda words: ""
        said = r"used all max_tokens = 30 tokens before its reply, .*; give judge\(\.\., max_tokens=\.\.\) more"
        with pytest.raises(RewardError, match=said):
            judged(f"judge(model='m', base_url='{endpoint.url}', max_tokens=30)", ["a"])
        endpoint.reply = lambda words: "First I look at" if words == 1 else "Grade: 10, because"
        values, metrics = judged(f"judge(model='m', base_url='{endpoint.url}')", ["a", "a b"])
    assert values[1] == 1.0
    assert (metrics["judge/abstained"], metrics["judge/truncated"]) == (1, 1)


def test_an_answer_without_a_choice_is_an_error():
    with Endpoint() as endpoint:
        endpoint.choices = False
        with pytest.raises(RewardError, match="the judge 'm' answered without a choice"):
            judged(f"judge(model='m', base_url='{endpoint.url}')", ["a"])
