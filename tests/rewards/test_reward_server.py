"""The reward ``reward_server``: both protocols, failures, and answers that are none."""

import itertools

import pytest
from support.helpers import tiny_model
from support.http_server import JsonServer

from nlgrpo.rewards.reward_functions import RewardError, check_columns, score
from nlgrpo.rewards.specs import load_reward

PROMPTS, ANSWERS = [f"w{i} " for i in range(10)], [f"w{i} w{i + 1}" for i in range(10)]


def scores_of(spec, prompts=PROMPTS, completions=ANSWERS, **columns):
    """Scores through the same path as in training."""
    scores = score([load_reward("r", spec)], prompts=prompts, completions=completions,
                   completion_ids=[[1]] * len(completions), columns=columns, samples=len(completions), step=0,
                   total_steps=1)  # fmt: skip
    return scores.values["r"].flatten().tolist()


class Classify:
    """vLLM's route: two outputs, the lengths of the input and its negative. Every third request fails at first."""

    def __init__(self, fail=()):
        self.bodies, self.fail = [], itertools.chain(fail, itertools.repeat(200))

    def __call__(self, path, body):
        assert path == "/classify"
        status = next(self.fail)
        if status != 200:
            return None if status == 0 else (status, {"error": "busy"})
        self.bodies.append(body)
        inputs = [body["messages"]] if "messages" in body else body["input"]
        rows = [{"index": i, "probs": [len(text), -len(text)]} for i, text in enumerate(inputs)]
        return 200, {"data": rows[::-1]}  # the order is that of "index"


def test_vllm_scores_texts_in_batches():
    answer = Classify()
    with JsonServer(answer) as server:
        found = scores_of(f"reward_server(url='{server.url}/', batch_size=4, model='rm')")
        negative = scores_of(f"reward_server(url='{server.url}', label=1, probability=True)")
    assert found == [len(p + a) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    assert negative == [-x for x in found]
    assert sorted(len(body["input"]) for body in answer.bodies) == [2, 4, 4, 10]
    assert answer.bodies[0].keys() == {"model", "use_activation", "input"}
    assert [body["use_activation"] for body in answer.bodies] == [False] * 3 + [True]
    assert "model" not in answer.bodies[-1]


def test_requests_that_fail_are_repeated():
    answer = Classify(fail=[503, 0, 429, 200, 500])
    with JsonServer(answer) as server:
        found = scores_of(f"reward_server(url='{server.url}', batch_size=2)")
    assert found == [len(p + a) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    assert len(answer.bodies) == 5


def test_conversations_get_the_template_of_the_server():
    prompt = [{"role": "user", "content": "Hi"}]
    completion = [{"role": "assistant", "content": "Hello"}]
    answer = Classify()
    with JsonServer(answer) as server:
        assert scores_of(f"reward_server(url='{server.url}')", [prompt] * 2, [completion] * 2) == [2.0, 2.0]
        alone = scores_of(f"reward_server(url='{server.url}', include_prompt=False)", [prompt], [completion])
    assert answer.bodies[0]["messages"] == [*prompt, *completion]
    assert answer.bodies[0]["add_generation_prompt"] is False
    assert alone == [5.0]


def test_texts_are_tokenized_here_with_a_tokenizer(tmp_path):
    """As `classifier` does: EOS at the end, long texts without their beginning, none for an empty one."""
    tiny_model(tmp_path)
    answer = Classify()
    with JsonServer(answer) as server:
        spec = f"reward_server(url='{server.url}', tokenizer='{tmp_path}', max_length=3)"
        assert scores_of(spec, ["w1 w2 "] * 2, ["w3", "w3 w4 w5"]) == [3.0, 3.0]
        none = f"reward_server(url='{server.url}', tokenizer='{tmp_path}', include_prompt=False, append_eos=False)"
        found = scores_of(none, ["w1"] * 2, ["", "w3"])
    assert answer.bodies[0]["input"] == [[6, 7, 2], [8, 9, 2]] or answer.bodies[0]["input"][1][-1] == 2
    assert found[1] == 1.0
    assert found[0] != found[0]  # NaN: it abstains


def test_the_protocol_of_openrlhf():
    bodies = []

    def answer(path, body):
        bodies.append((path, body))
        return 200, {"rewards": [float(len(text)) for text in body["query"]], "scores": [], "extra_logs": {}}

    with JsonServer(answer) as server:
        spec = f"reward_server(url='{server.url}/get_reward', protocol='openrlhf', labels='answer')"
        found = scores_of(spec, answer=[str(i) for i in range(10)])
        conversation = scores_of(
            f"reward_server(url='{server.url}/get_reward', protocol='openrlhf')",
            [[{"role": "user", "content": "Hi"}]], [[{"role": "assistant", "content": "Yes"}]],
        )  # fmt: skip
    assert found == [len(p + a) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    path, body = bodies[0]
    assert path == "/get_reward"
    assert body == {
        "query": [p + a for p, a in zip(PROMPTS, ANSWERS, strict=True)],
        "prompts": PROMPTS,
        "labels": [str(i) for i in range(10)],
    }
    assert conversation == [len("Hi\nYes")]
    assert bodies[1][1]["labels"] == [None]
    with pytest.raises(ValueError, match="needs 'answer'"):
        check_columns([load_reward("r", spec)], ["question"])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, {"error": "x"}), "without scores"),
        ((200, {"data": []}), r"answered \[\] for 10 completions"),
        ((200, {"data": [{"index": 0, "probs": []}]}), "without scores"),
        ((200, [1, 2]), "without scores"),
        ((200, {"data": [{"index": i, "probs": [float("inf")]} for i in range(10)]}), r"\[inf"),
        ((404, {"error": "no such model"}), "404"),
        ((400, {"error": {"message": "too long"}}), "too long"),
    ],
)
def test_answers_that_are_none(answer, message):
    with JsonServer(lambda *_: answer) as server, pytest.raises(RewardError, match=message):
        scores_of(f"reward_server(url='{server.url}', retries=0)")


def test_a_server_that_is_down():
    with JsonServer(lambda *_: None) as server:
        url = server.url
    with pytest.raises(RewardError, match="Connection error"):
        scores_of(f"reward_server(url='{url}', retries=0)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("url='localhost:8000'", "url must begin with http"),
        ("url='http://x', protocol='trl'", "protocol must be 'vllm' or 'openrlhf', got 'trl'"),
        ("url='http://x', protocol='openrlhf', label=1", "are for the protocol 'vllm'"),
        ("url='http://x', batch_size=0", "batch_size must be a whole number of at least 1"),
        ("url='http://x', label='good'", "label must be a whole number"),
        ("url='http://x', timeout=0", "timeout must be above 0"),
        ("url='http://x', tokenizer='/nowhere'", "cannot load the tokenizer '/nowhere'"),
        ("", "needs url"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_reward("r", f"reward_server({arguments})")
