"""Conversations with environments: their tokens, which of them are trained on, and what can go wrong."""

import asyncio
import signal
import sys
import time

import pytest
import torch
from support.chat_model import chat_model, chat_tokenizer, template
from support.helpers import run_ranks

from nlgrpo.config.schema import EnvironmentConfig
from nlgrpo.engine import generate, logprobs
from nlgrpo.engine.backends import NativeEngine
from nlgrpo.engine.backends.base import EngineError
from nlgrpo.engine.environments.dialogue import Dialogue, Turn, to_rollout
from nlgrpo.engine.environments.rendering import Rendering
from nlgrpo.engine.environments.rounds import Job, Rounds
from nlgrpo.engine.environments.verifiers_environment import VerifiersEnvironment
from nlgrpo.engine.generation import Conversation, Rollout
from nlgrpo.engine.sampling import Sampling
from nlgrpo.errors import UserCodeError
from nlgrpo.model import decoder
from nlgrpo.model.packing import pack
from nlgrpo.runtime.distributed import Ranks

ONE = Ranks(0, 1, torch.device("cpu"))
NOTHING = Conversation([], {"reward": 0.0, "metrics": {}, "error": None})


# --- tokens of a conversation -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A random chat model (transformers', float64; ours), and its tokenizer."""
    folder = tmp_path_factory.mktemp("chat")
    reference = chat_model(folder)
    return reference, decoder.load(folder, dtype=torch.float64), chat_tokenizer(), folder


HAND_MADE = """<|im_start|>user
Add 2 and 3.<|im_end|>
<|im_start|>assistant
{I ask.<|im_end|>}
<|im_start|>user
<tool_response>
5
</tool_response><|im_end|>
<|im_start|>assistant
{It is 5.<|im_end|>}
<|im_start|>user
Sure?<|im_end|>
<|im_start|>assistant
{Yes.}"""


def hand_made(tokenizer):
    """The conversation as token ids, and a mask of those in braces, which the policy sampled."""
    ids, mask, sampled = [], [], False
    for part in HAND_MADE.replace("}", "{").split("{"):
        new = tokenizer(part)["input_ids"]
        ids += new
        mask += [sampled] * len(new)
        sampled = not sampled
    return ids, torch.tensor(mask)


def as_dialogue(ids, mask):
    """Split a conversation into turns by its mask."""
    dialogue, turn = Dialogue(), Turn([], [], [], True)
    for token, sampled in zip(ids, mask.tolist(), strict=True):
        if turn.tokens and not sampled:
            dialogue.add(turn, 1)
            turn = Turn([], [], [], True)
        (turn.tokens if sampled else turn.inserted).append(token)
        turn.logprobs += [-1.0] * sampled
    dialogue.add(turn, 1)
    return dialogue


def test_the_mask_is_that_of_a_hand_made_conversation(chat):
    """The targets are the sampled tokens and nothing else, and their log-probs those of the whole text."""
    reference, model, tokenizer, _ = chat
    ids, mask = hand_made(tokenizer)
    other = [*ids[:-3], *tokenizer("No!!")["input_ids"]]  # a second conversation of the same prompt
    other_mask = torch.cat([mask[:-3], torch.ones(4, dtype=torch.bool)])
    dialogues = [as_dialogue(ids, mask), as_dialogue(other, other_mask)]
    rollout = to_rollout(dialogues, [NOTHING] * 2, [[7]], 2)
    assert rollout.completion_ids() == [
        [token for token, sampled in zip(ids, mask, strict=True) if sampled],
        [token for token, sampled in zip(other, other_mask, strict=True) if sampled],
    ]
    assert rollout.inserted_tokens == int((~mask).sum() + (~other_mask).sum()) - 2 * len(rollout.prompt_ids[0])
    for limit in (10_000, 1):  # together, and each in its own micro-batch
        prompts = rollout.prompt_ids * 2
        batches = pack(prompts, rollout.completion_ids(), [0, 1], limit, inserted=rollout.inserted)
        assert len(batches) == (1 if limit > 1 else 2)
        found = logprobs.completion_logprobs(model, rollout, batches, 1.0)
        for row, (text, sampled) in enumerate([(ids, mask), (other, other_mask)]):
            with torch.no_grad():
                logits = reference(torch.tensor([text])).logits[0, :-1]
            expected = logits.log_softmax(-1)[range(len(text) - 1), text[1:]][sampled[1:]]
            torch.testing.assert_close(found[row, : int(sampled.sum())].double(), expected, rtol=0, atol=1e-6)


def test_conversations_that_begin_differently():
    """What differs is inserted before the first sampled token."""
    dialogues = [
        Dialogue([Turn([1, 2, 3], [8], [-0.5], True)], 4),
        Dialogue([Turn([1, 2, 4, 5], [9, 9], [-1, -2], False)], 4),
        Dialogue(),  # it ended before the policy was asked
    ]
    rollout = to_rollout(dialogues, [NOTHING] * 3, [[1, 2, 3]], 3)
    assert rollout.prompt_ids == [[1, 2]]
    assert rollout.inserted == [{0: [3]}, {0: [4, 5]}, {}]
    assert (rollout.lengths.tolist(), rollout.finished.tolist()) == ([[1, 2, 0]], [[True, False, False]])
    assert rollout.logprobs.tolist() == [[[-0.5, 0], [-1, -2], [0, 0]]]
    assert rollout.version == 4


def test_conversations_of_several_policies_are_refused():
    turn = Turn([1], [2], [-1.0], True)
    with pytest.raises(EngineError, match="policy of step 1 and then by that of step 2"):
        Dialogue([turn], 1).add(turn, 2)
    with pytest.raises(EngineError, match="policies of steps 1, 2"):
        to_rollout([Dialogue([turn], 1), Dialogue([turn], 2)], [NOTHING] * 2, [[1]], 2)
    with pytest.raises(EngineError, match="begin with different tokens"):
        to_rollout([Dialogue([turn], 1), Dialogue([Turn([3], [2], [-1.0], True)], 1)], [NOTHING] * 2, [[1]], 2)


# --- messages to tokens -----------------------------------------------------------------------------------------------

TALK = [
    {"role": "system", "content": "Be good."},
    {"role": "user", "content": "Hi!"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "More?"},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "Why?"},
]
NO_THINKING = {"enable_thinking": False}
CASES = [
    ("qwen2_5", {}, {}),
    ("qwen3", {}, {}),
    ("qwen3", {}, NO_THINKING),
    ("qwen3_instruct_2507", {}, {}),
    ("llama3", {}, {}),
    ("phi3", {}, {}),
    ("lfm2", {}, {}),
    ("qwen3", {"name": "qwen3"}, {}),
    ("qwen3", {"name": "qwen3"}, NO_THINKING),
]


def extended(rendering, tokenizer, messages, end):
    """Tokens of a conversation as an environment builds them: answers are tokens, never rendered."""
    ids, answer, known = [], [], 0
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i in [*answers, len(messages)]:
        if not ids:
            ids = rendering.begin(messages[:i], [])
        else:
            ids += rendering.extend(ids[: -len(answer)], answer, messages[:i], i - known, [])
        if i < len(messages):
            answer = tokenizer(messages[i]["content"] + end, add_special_tokens=False)["input_ids"]
            ids, known = [*ids, *answer], i + 1
    return ids


@pytest.mark.parametrize(("name", "options", "kwargs"), CASES)
@pytest.mark.parametrize("truncated", [False, True])
def test_extended_conversations_are_those_of_the_chat_template(name, options, kwargs, truncated):
    """transformers renders the whole conversation; an answer that was truncated gets its end from the template."""
    tokenizer = chat_tokenizer(template(name), bos_token="<|endoftext|>")
    end = "<|im_end|>" if name.startswith("qwen") and not truncated else ""
    found = extended(Rendering(tokenizer, "here", options, kwargs), tokenizer, TALK, end)
    expected = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False, **kwargs)
    assert _without_empty_thoughts(tokenizer.decode(found)) == expected
    assert found == tokenizer(tokenizer.decode(found), add_special_tokens=False)["input_ids"]


def _without_empty_thoughts(text):
    """Qwen3's template leaves the empty thoughts out of earlier answers; here they stay, as the policy read them."""
    *before, last = text.split("<|im_start|>assistant\n")
    return "<|im_start|>assistant\n".join([*(t.removeprefix("<think>\n\n</think>\n\n") for t in before), last])


def test_answers_become_messages():
    tokenizer = chat_tokenizer()
    text = '<think>\nHm.\n</think>\n\nLet me add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    for options in ({"name": "qwen3"}, {"tool_parser": "qwen3"}):
        parsed = Rendering(tokenizer, "here", options, {}).parse(ids, [], [])
        assert (parsed.content.strip(), parsed.reasoning_content.strip()) == ("Let me add.", "Hm.")
        assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("add", {"a": 2})]
    assert not Rendering(tokenizer, "here", {}, {}).parse(ids, [], []).tool_calls


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "qwen"}, "renderer 'qwen' of environment.renderer cannot be used: .*'qwen3'"),
        ({"name": "qwen3", "colour": 1}, "'qwen3' of environment.renderer cannot be used: Extra inputs"),
        ({"tool_parser": "hermes"}, "Unknown tool_parser 'hermes'"),
        ({"name": "gpt-oss"}, "cannot be used"),
    ],
)
def test_renderers_that_cannot_be_used(options, message):
    with pytest.raises(ValueError, match=message):
        Rendering(chat_tokenizer(), "here", options, {})


def test_templates_that_cannot_be_extended():
    tokenizer = chat_tokenizer("{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}")
    with pytest.raises(EngineError, match="leaves answers of the assistant out"):
        extended(Rendering(tokenizer, "here", {}, {}), tokenizer, TALK, "")
    rendering = Rendering(chat_tokenizer(), "here", {}, {})
    with pytest.raises(EngineError, match="wrote a message of the assistant"):
        rendering.extend([1], [2], TALK[:5], 1, [])
    with pytest.raises(EngineError, match="only text is supported"):
        rendering.begin([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], [])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="needs a chat template"):
        Rendering(tokenizer, "here", {}, {})


# --- rounds -----------------------------------------------------------------------------------------------------------


def asks(*values, sleep=0.0, fail=None):
    """A job that asks for each value in turn."""

    async def run(ask):
        found = []
        for value in values:
            await asyncio.sleep(sleep)
            found.append(await ask(value))
        if fail is not None:
            raise fail
        return found

    return Job(run)


def test_all_conversations_are_answered_together():
    rounds, sizes = Rounds(ONE, 5.0), []

    def answer(asked):
        sizes.append(sorted(asked))
        return [10 * x for x in asked]

    assert rounds.run([asks(1, 2, 3), asks(4), asks(5, 6)], answer) == [[10, 20, 30], [40], [50, 60]]
    assert sizes == [[1, 4, 5], [2, 6], [3]]
    assert rounds.run([], answer) == []
    rounds.close()


def test_slow_conversations_join_a_later_round():
    sizes = []

    def answer(asked):
        sizes.append(sorted(asked))
        return asked

    start = time.perf_counter()
    assert Rounds(ONE, 5.0).run([asks(1, 2), asks(7, sleep=0.6)], answer) == [[1, 2], [7]]
    assert time.perf_counter() - start < 3
    assert [1] in sizes
    assert [7] in sizes


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (RuntimeError("broken"), "the environment failed, RuntimeError: broken"),
        (EngineError("as it is"), "^as it is"),
        (SystemExit(2), "the environment raised SystemExit"),
        (KeyboardInterrupt(), "the environment raised KeyboardInterrupt"),
    ],
)
def test_jobs_that_fail(fail, message):
    rounds = Rounds(ONE, 5.0)
    with pytest.raises(EngineError, match=message) as raised:
        rounds.run([asks(1, 2, 3), asks(1, fail=fail)], lambda asked: asked)
    if not isinstance(fail, EngineError):  # the traceback of the environment is shown
        assert isinstance(raised.value, UserCodeError)
        assert raised.value.__cause__ is fail
    assert rounds.run([asks(1)], lambda asked: asked) == [[1]]  # the loop still works


def test_a_job_that_hangs_and_an_engine_that_fails():
    with pytest.raises(EngineError, match=r"did nothing for 0\.3 s"):
        Rounds(ONE, 0.3).run([asks(1), asks(2, sleep=100)], lambda asked: asked)

    def answer(asked):
        raise EngineError("no memory")

    with pytest.raises(EngineError, match="no memory"):
        Rounds(ONE, 5.0).run([asks(1)], answer)


def _on_two_ranks(rank, fails):
    ranks = Ranks(rank, 2, torch.device("cpu"))
    rounds, calls = Rounds(ranks, 20.0), []

    def answer(asked):
        calls.append(len(asked))
        ranks.sum(torch.zeros(1))  # collective, like a sharded model
        return asked

    jobs = [asks(*range(2 + 3 * rank), fail=RuntimeError("broken") if fails and rank == 0 else None)]
    if fails:
        with pytest.raises(EngineError, match="broken" if rank == 0 else "failed on another rank"):
            rounds.run(jobs, answer)
    else:
        assert rounds.run(jobs, answer) == [list(range(2 + 3 * rank))]
        assert len(calls) == 5
        assert sum(calls) == 2 + 3 * rank


@pytest.mark.parametrize("fails", [False, True])
def test_all_ranks_take_part_in_all_rounds(fails):
    run_ranks(_on_two_ranks, fails)


# --- environments of verifiers ----------------------------------------------------------------------------------------


@pytest.fixture
def make(chat, monkeypatch):
    """Build an environment of tests/verifiers_environments.py."""
    made = []

    def build(kwargs=None, renderer=None, longest=None, retries=0, timeout=20.0, **arguments):
        _, model, tokenizer, folder = chat
        config = EnvironmentConfig("verifiers-environments", arguments, renderer or {}, longest, retries, timeout)
        environment = VerifiersEnvironment(config, tokenizer, str(folder), model.shape, kwargs or {}, ONE)
        made.append(environment)
        return environment

    yield build
    for environment in made:
        environment.close()


def draw(environment, model, *, prompts=2, samples=3, tokens=6, seed=0, **sampling):
    batch = environment.prompts(max_new_tokens=tokens, shuffle=False).take(0, prompts)
    options = Sampling(max_new_tokens=tokens, **sampling)
    return batch, environment.draw(NativeEngine(model), batch, samples, options, seed=seed, max_rows=64)


def test_a_conversation_of_two_turns(chat, make):
    """Its text is the template's; the sampled log-probs are those of the whole conversation."""
    reference, model, tokenizer, _ = chat
    batch, rollout = draw(make(kwargs=NO_THINKING), model)
    assert rollout.prompt_ids == batch.ids
    start = tokenizer.decode(batch.ids[0])
    assert start.startswith("<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\nQuestion 0?<|im_end|>\n")
    batches = pack(
        [ids for ids in batch.ids for _ in range(3)], rollout.completion_ids(), range(6), 4096,
        inserted=rollout.inserted,
    )  # fmt: skip
    found = logprobs.completion_logprobs(model, rollout, batches, 1.0)
    torch.testing.assert_close(found, rollout.logprobs.flatten(0, 1).to(found), rtol=0, atol=1e-6)
    for row, conversation in enumerate(rollout.conversations):
        assert [message["role"] for message in conversation.messages] == ["assistant", "user", "assistant"]
        assert conversation.messages[1]["content"] == "Turn 1: say more."
        ((position, inserted),) = conversation.inserted.items()
        end = "<|im_end|>" * (rollout.completion_ids()[row][position - 1] != tokenizer.eos_token_id)
        opening = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        assert tokenizer.decode(inserted) == f"{end}\n<|im_start|>user\nTurn 1: say more.<|im_end|>\n{opening}"
        assert conversation.outcome["metrics"].keys() == {"answer_length", "spaces", "num_turns"}
        whole = [*batch.ids[row // 3]]
        for k, token in enumerate(rollout.completion_ids()[row]):
            whole += [*conversation.inserted.get(k, ()), token]
        with torch.no_grad():
            logits = reference(torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
        expected = logits[range(len(whole) - 1), whole[1:]]
        sampled = rollout.logprobs.flatten(0, 1)[row, :position].double()
        torch.testing.assert_close(sampled, expected[len(batch.ids[row // 3]) - 1 :][:position], rtol=0, atol=1e-6)


def test_samples_do_not_depend_on_the_batch(chat, make):
    """The first answers are those of the engine, with the noise of (seed, prompt, sample, turn)."""
    _, model, _, _ = chat
    environment = make()
    batch, rollout = draw(environment, model, samples=3)
    _, alone = draw(environment, model, prompts=1, samples=3)
    assert rollout.completion_ids()[:3] == alone.completion_ids()
    assert draw(environment, model, seed=1)[1].completion_ids() != rollout.completion_ids()
    first = generate(model, batch.ids, 3, Sampling(max_new_tokens=6, stop_ids=(256,)), index=[0, 4096])
    turns = [
        row[: next(iter(c.inserted))] for row, c in zip(rollout.completion_ids(), rollout.conversations, strict=True)
    ]
    assert turns == first.completion_ids()
    answers = [tuple(row) for row in rollout.completion_ids()]
    assert len(set(answers)) == len(answers)


def test_slow_environments_do_not_change_the_samples(chat, make):
    _, model, _, _ = chat
    _, fast = draw(make(turns=3), model)
    _, slow = draw(make(turns=3, fault="slow"), model)
    assert fast.completion_ids() == slow.completion_ids()


def test_prompts_of_the_environment(chat, make):
    environment = make(count=8, evaluation=3)
    training = environment.prompts(max_new_tokens=6, shuffle=False)
    assert len(training) == 8
    assert training.names == ["question", "answer", "example_id"]
    assert len(environment.prompts(evaluation=True, max_new_tokens=6)) == 3
    assert len(environment.prompts(max_new_tokens=6, limit=5)) == 5
    assert make().prompts(evaluation=True, max_new_tokens=6) is None
    with pytest.raises(ValueError, match="all 12 prompts are too long: the shortest has"):
        make(longest=20).prompts(max_new_tokens=6)


def test_a_conversation_that_is_too_long_ends(chat, make):
    """The environment stops it when there is no room for another answer."""
    _, model, _, _ = chat
    environment = make(turns=5, longest=180)
    _, rollout = draw(environment, model)
    turns = [c.outcome["metrics"]["num_turns"] for c in rollout.conversations]
    assert all(1 <= n < 5 for n in turns)
    longest = rollout.lengths + torch.tensor([sum(map(len, c.inserted.values())) for c in rollout.conversations]).view(
        2, 3
    )
    assert int(longest.max()) + len(rollout.prompt_ids[0]) <= 180


class Scripted:
    """An engine that says the same to everybody, turn by turn."""

    def __init__(self, model, *answers):
        self.shape, self.answers, self.asked = model.shape, list(answers), []

    def generate(self, request):
        answer = self.answers.pop(0)
        prompts = request.prompts
        self.asked += prompts
        rows, shape = len(prompts) * request.samples, (len(prompts), request.samples)
        tokens = torch.tensor([answer] * rows).view(*shape, -1)
        lengths = torch.full(shape, len(answer))
        return Rollout(list(prompts), tokens, torch.full(tokens.shape, -1.0), lengths, lengths > 0, 3)


def test_tools_are_called(chat, make):
    _, model, tokenizer, _ = chat
    environment = make(kind="tools", turns=3, renderer={"name": "qwen3"})
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    engine = Scripted(model, *([*tokenizer(text)["input_ids"], 256] for text in (call, "It is 5.")))
    batch = environment.prompts(max_new_tokens=64, shuffle=False).take(0, 1)
    assert '"name": "add"' in tokenizer.decode(batch.ids[0])
    rollout = environment.draw(engine, batch, 2, Sampling(max_new_tokens=64), seed=0, max_rows=64)
    conversation = rollout.conversations[0]
    assert [message["role"] for message in conversation.messages] == ["assistant", "tool", "assistant"]
    assert [call["function"]["name"] for call in conversation.messages[0]["tool_calls"]] == ["add"]
    assert conversation.messages[1]["content"] == "5"
    assert conversation.outcome["reward"] == 5.0
    ((position, inserted),) = conversation.inserted.items()
    expected = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(inserted) == expected
    assert position == len(tokenizer(call)["input_ids"]) + 1
    assert rollout.version == 3


def test_rewards_of_groups(chat, make):
    _, model, _, _ = chat
    _, rollout = draw(make(kind="group"), model, samples=4)
    rewards = torch.tensor([c.outcome["reward"] for c in rollout.conversations]).view(2, 4)
    lengths = torch.tensor(
        [sum(len(m.get("content", "")) for m in c.messages if m["role"] == "assistant") for c in rollout.conversations]
    ).view(2, 4)
    expected = lengths >= lengths.sort(-1).values[:, 2:3]
    assert torch.equal(rewards, expected.double().to(rewards))


def test_conversations_with_random_beginnings(chat, make):
    _, model, tokenizer, _ = chat
    _, rollout = draw(make(kind="random", turns=1), model, samples=4)
    assert all(0 in c.inserted for c in rollout.conversations[:4])
    assert tokenizer.decode(rollout.prompt_ids[0]).endswith("<|im_start|>user\nNumber ")


def test_errors_of_verifiers_leave_a_conversation_without_reward(chat, make):
    _, model, _, _ = chat
    _, rollout = draw(make(fault="tool error"), model)
    errors = [c.outcome["error"] for c in rollout.conversations]
    assert errors[:3] == [None] * 3
    assert all("ToolCallError" in error for error in errors[3:])
    assert (rollout.lengths > 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fault": "always"}, "all conversations of the environment ended with an error; the first: .*ToolCallError"),
        ({"fault": "raises"}, "the environment failed, RuntimeError: broken"),
        ({"fault": "exits"}, "the environment raised SystemExit"),
        ({"fault": "rewrites"}, "changed earlier messages of a conversation"),
        ({"fault": "speaks"}, "wrote a message of the assistant"),
        ({"fault": "hangs", "timeout": 0.5}, "did nothing for 0.5 s"),
    ],
)
def test_environments_that_fail(chat, make, options, message):
    with pytest.raises(EngineError, match=message):
        draw(make(**options), chat[1])


def test_environments_that_cannot_be_loaded(chat, make, monkeypatch):
    with pytest.raises(ValueError, match=r"environment\.id = 'verifiers-environments': .*no key"):
        make(fault="load")
    _, model, tokenizer, folder = chat
    with pytest.raises(ValueError, match="Could not import 'missing' environment"):
        VerifiersEnvironment(EnvironmentConfig("missing"), tokenizer, str(folder), model.shape, {}, ONE)
    module = sys.modules[VerifiersEnvironment.__module__]
    monkeypatch.setattr(module.importlib.metadata, "version", lambda _: "0.4.0")
    with pytest.raises(ValueError, match=r"needs verifiers 0\.2, .* but 0\.4\.0 is installed"):
        make()


def test_signal_handlers_stay(make):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    make()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
