"""Inference-time procedures: their rules by hand, their responses against the engine, and the command."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.helpers import EOS, Forked, tiny_model
from transformers import AutoTokenizer

from nlgrpo import cli, inference
from nlgrpo.apps.doctor.check_machine import cpu_fields
from nlgrpo.apps.respond.line_file import LineFile
from nlgrpo.calibration.rewind import RewindAndRepeat
from nlgrpo.data.prompt_dataset import Batch
from nlgrpo.engine.generation import generate
from nlgrpo.engine.guided_search import Candidate, Search
from nlgrpo.engine.sampling import Sampling
from nlgrpo.errors import UserError
from nlgrpo.inference import Chooser, Procedure, Responder
from nlgrpo.model import decoder
from nlgrpo.rewards.builtin import Gsm8k
from nlgrpo.rewards.reward_functions import RewardError, answer_numbers

PROMPTS = ["w1 w2", "w3", "w4 w5 w6"]
REWARDS = """
import time

def high(completion_ids, **_):
    return [float(sum(ids)) for ids in completion_ids]

def even(completion_ids, **_):
    return [float(sum(ids)) if len(ids) % 2 == 0 else None for ids in completion_ids]

def mostly(completion_ids, **_):
    return [None if sum(ids) % 4 == 0 else float(sum(ids)) for ids in completion_ids]

class Vote:
    def __call__(self, completion_ids, **_):
        return [1.0] * len(completion_ids)

    def answer(self, text):
        if text == "w1":
            time.sleep(600)
        if text == "w2":
            exit(3)
        return [] if text == "w3" else {}[text]

def close(completion_ids, target, **_):
    return [-abs(sum(ids) - t) for ids, t in zip(completion_ids, target)]

def counted(completion_ids, prompts, completions, **_):
    with open("calls", "a") as file:
        file.write(f"{len(completion_ids)}\\n")
    return [float(len(text.split())) for text in completions]
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    root = tmp_path_factory.mktemp("work")
    tiny_model(root / "policy", "gpt2", scale=0.3)
    (root / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"w{i} w{i + 1}", "target": 10 * i} for i in range(1, 24)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def responder(work, procedure, reward="high", **changes):
    tokenizer = AutoTokenizer.from_pretrained(work / "policy")
    parsed = Procedure.parse(procedure)
    chooser = Chooser.of(f"{work / 'rewards.py'}:{reward}") if parsed.needs_reward else Chooser.of("majority")
    options = {"sampling": Sampling(max_new_tokens=6, stop_ids=(EOS, *range(20, 26)))} | changes
    return Responder(decoder.load(work / "policy"), tokenizer, parsed, chooser, **options)


def batch_of(responder, prompts=PROMPTS, index=None):
    ids = [responder.tokenizer(text).input_ids for text in prompts]
    return Batch(list(index or range(len(ids))), ids, list(prompts), {})


# --- rules ------------------------------------------------------------------------------------------------------------


def test_the_rules_by_hand():
    scores = [1.0, 3.0, math.nan, 3.0, -2.0, -2.0]
    assert Procedure.parse("bon:6").choose(scores, 0.9) == 1
    assert Procedure.parse("wor:6").choose(scores, 0.9) == 4
    assert Procedure.parse("rewind:0.5:6").choose(scores, 0.9) == 5
    assert Procedure.parse("maj:6").choose([0.25, 0.5, 0.5, 0.25], 0.9) == 1
    with pytest.raises(ValueError, match="all scores are NaN"):
        Procedure.parse("bon:2").choose([math.nan, math.nan], 0.0)


def test_soft_best_of_n_inverts_the_cdf_of_the_tilted_weights():
    """The share of [0, 1) that gives each index is its probability, computed with SciPy's softmax."""
    from scipy.special import softmax

    scores = [0.3, math.nan, 1.0, -700.0, 0.9]
    rule, cells = Procedure.parse("soft:0.25:5"), 100_000
    counts = Counter(rule.choose(scores, (cell + 0.5) / cells) for cell in range(cells))
    kept = [i for i, score in enumerate(scores) if not math.isnan(score)]
    for i, share in zip(kept, softmax([scores[i] / 0.25 for i in kept]), strict=True):
        assert counts[i] / cells == pytest.approx(share, abs=2 / cells)
    assert rule.choose(scores, 1 - 2**-53) == 4  # the last one with a weight above 0


@pytest.mark.parametrize(
    ("text", "samples", "expected"),
    [("bon:4", None, "bon:4"), ("bon", 4, "bon:4"), ("bon:4", 4, "bon:4"), ("soft:0.1", 8, "soft:0.1:8"),
     (" maj:3", None, "maj:3"), ("rewind:0.85:32", None, "rewind:0.85:32"), ("rewind:0.85", 3, "rewind:0.85:3")],
)  # fmt: skip
def test_names_are_parsed_and_written(text, samples, expected):
    assert str(Procedure.parse(text, samples)) == expected


@pytest.mark.parametrize(
    ("text", "samples", "message"),
    [
        ("bonn:4", None, r"did you mean 'bon:N'\? Expected one of bon:N, wor:N, "),
        ("bon", None, "number of candidates is missing; write 'bon:N'"),
        ("bon:0", None, r"0 candidates per prompt: expected a whole number in \[1, 65,536\]"),
        ("bon:4", 3, "samples 4 candidates, but samples = 3"),
        ("bon:4:5", None, "expected 'bon:N'"),
        ("bon:four", None, "expected 'bon:N'"),
        ("soft:0:4", None, "tau = 0.0: expected a finite number > 0"),
        ("soft:nan:4", None, "tau = nan"),
        ("soft:0.1", None, "number of candidates is missing"),
        ("rewind:2:4", None, r"expected a number in \(0, 1\]"),
        ("", None, "is not known"),
    ],
)
def test_wrong_names_are_refused(text, samples, message):
    with pytest.raises(ValueError, match=message):
        Procedure.parse(text, samples)


# --- responses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("procedure", "pick"), [("bon:5", max), ("wor:5", min)])
def test_the_response_is_the_best_or_worst_sample_of_the_engine(work, procedure, pick):
    found = responder(work, procedure)
    batch = batch_of(found)
    responses, cost = found.respond(batch, seed=7)
    completions = generate(found.model, batch.ids, 5, found.sampling, seed=7).completion_ids()
    for p, (prompt, response) in enumerate(zip(PROMPTS, responses, strict=True)):
        own = completions[5 * p : 5 * p + 5]
        assert [list(one.tokens) for one in response.candidates] == own
        assert [one.score for one in response.candidates] == list(map(sum, own))
        assert list(response.best.tokens) == pick(own, key=sum)
        whole = found.tokenizer.decode(batch.ids[p] + pick(own, key=sum), skip_special_tokens=True)
        assert prompt + response.text == whole
        assert response.best.finish_reason == (
            "stop" if own[response.chosen][-1] in found.sampling.stop_ids else "length"
        )
    assert cost.tokens == sum(map(len, completions))


# Without AVX-512, `kernels.linear` is MKL's, whose rounding depends on the number of rows.
ROUNDING = 0 if "avx512f" in cpu_fields().get("flags", "").split() else 1e-5


def without_logprobs(response):
    return replace(response, candidates=[replace(one, logprobs=()) for one in response.candidates])


@pytest.mark.parametrize("procedure", ["bon:3", "soft:5:3", "rewind:0.9:4", "maj:3"])
def test_a_response_does_not_depend_on_the_other_prompts(work, procedure):
    found = responder(work, procedure)
    together, _ = found.respond(batch_of(found, index=[4, 9, 2]), seed=3)
    for prompt, key, response in zip(PROMPTS, (4, 9, 2), together, strict=True):
        (alone,) = found.respond(batch_of(found, [prompt], [key]), seed=3)[0]
        assert without_logprobs(alone) == without_logprobs(response)
        for one, other in zip(alone.candidates, response.candidates, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, rel=ROUNDING, abs=ROUNDING)
    assert found.respond(batch_of(found, index=[4, 9, 2]), seed=4)[0] != together
    assert found(PROMPTS, seed=3) == found.respond(batch_of(found), seed=3)[0]


def test_rewind_stops_at_the_first_sample_that_reaches_the_threshold(work):
    """The draws are the first samples of best-of-N; the threshold is a quantile of other samples, sorted by hand."""
    found = responder(work, "rewind:0.8:6", reference_samples=10)
    batch = batch_of(found, [f"w{i}" for i in range(1, 20)])
    responses, cost = found.respond(batch, seed=1)
    draws = generate(found.model, batch.ids, 6, found.sampling, seed=1).completion_ids()
    references = generate(found.model, batch.ids, 10, found.sampling, seed=1 ^ (1 << 59)).completion_ids()
    lengths, tokens = Counter(), sum(map(len, references))
    for p, response in enumerate(responses):
        threshold = sorted(map(sum, references[10 * p : 10 * p + 10]))[7]
        own = draws[6 * p : 6 * p + 6]
        count = next((m + 1 for m, ids in enumerate(own) if sum(ids) >= threshold), 6)
        assert [list(one.tokens) for one in response.candidates] == own[:count]
        assert response.chosen == count - 1
        lengths[count] += 1
        tokens += sum(map(len, own[:count]))
    assert cost.tokens == tokens
    assert len(lengths) > 3
    assert lengths[6] > 0


def test_the_threshold_is_that_of_the_samples_that_have_a_reward(work):
    """The reward abstains for a quarter of the samples, of the reference and of the model."""
    found = responder(work, "rewind:0.8:6", reward="mostly", reference_samples=20)
    batch = batch_of(found, [f"w{i}" for i in range(1, 20)])
    responses, _ = found.respond(batch, seed=1)
    draws = generate(found.model, batch.ids, 6, found.sampling, seed=1).completion_ids()
    references = generate(found.model, batch.ids, 20, found.sampling, seed=1 ^ (1 << 59)).completion_ids()
    numbers = set()
    for p, response in enumerate(responses):
        scored = sorted(sum(ids) for ids in references[20 * p : 20 * p + 20] if sum(ids) % 4)
        numbers.add(len(scored))
        threshold = scored[math.ceil(0.8 * len(scored) - 1e-9) - 1]
        own = draws[6 * p : 6 * p + 6]
        good = [sum(ids) % 4 != 0 and sum(ids) >= threshold for ids in own]
        count = next((m + 1 for m, is_good in enumerate(good) if is_good), 6)
        assert [list(one.tokens) for one in response.candidates] == own[:count]
    assert len(numbers) > 3
    assert max(numbers) < 20


@pytest.mark.slow
def test_the_draws_of_rewind_agree_with_the_estimator(work):
    """Mean score over many seeds against `RewindAndRepeat.chosen` on a large sample: four standard errors."""
    found = responder(work, "rewind:0.75:3", reference_samples=64)
    batch = batch_of(found, ["w1 w2"] * 400)
    responses, _ = found.respond(batch, seed=5)
    scores = torch.tensor([response.score for response in responses], dtype=torch.float64)
    rewards = torch.tensor(
        [
            float(sum(ids))
            for ids in generate(found.model, batch.ids[:1], 4000, found.sampling, seed=6).completion_ids()
        ],
        dtype=torch.float64,
    )
    # A threshold per prompt, each the quantile of 64 samples of its own.
    references = rewards[torch.randint(4000, (400, 64), generator=torch.Generator().manual_seed(0))]
    again = RewindAndRepeat(0.75, 3)
    values = []
    for row in references[:100]:
        probabilities, _ = again.chosen(rewards[None].double(), row[None].double())
        values.append(float((probabilities * rewards).sum()))
    error = float(scores.std()) / math.sqrt(len(scores))
    assert float(scores.mean()) == pytest.approx(sum(values) / len(values), abs=4 * error)
    assert float(scores.mean()) > float(rewards.mean()) + 4 * error


def test_samples_without_a_score_are_not_chosen(work):
    found = responder(work, "bon:16", reward="even")
    responses = found([f"w{i}" for i in range(1, 12)], seed=2)
    assert any(one.score is None for response in responses for one in response.candidates)
    for response in responses:
        assert response.score == max(one.score for one in response.candidates if one.score is not None)


def test_majority_chooses_the_first_of_the_most_frequent_answers(work):
    """The answer of "w3 w5" is its last number, 5."""
    found, won = responder(work, "maj:9", sampling=Sampling(max_new_tokens=2, top_k=4)), set()
    for response in found([f"w{i}" for i in range(1, 12)], seed=1):
        answers = [re.findall(r"\d+", one.text)[-1:] or None for one in response.candidates]
        votes = Counter(tuple(answer) for answer in answers if answer)
        most = max(votes.values())
        assert response.chosen == next(i for i, a in enumerate(answers) if a and votes[tuple(a)] == most)
        assert response.score == pytest.approx(most / sum(votes.values()))
        assert [one.score for one in response.candidates] == [
            pytest.approx(votes[tuple(a)] / sum(votes.values()) if a else 0.0) for a in answers
        ]
        won.add(most)
    assert len(won) > 1


def test_the_answers_of_a_vote_are_those_that_the_reward_extracts(work):
    """`gsm8k()` takes the last number of a box, and `vote` its text, as training for maj:N does."""
    texts = [r"\boxed{2x+1}", r"\boxed{3x+1}", r"\boxed{5}"]
    candidates = [[Candidate((i,), True) for i in range(3)]]
    assert Chooser.by_votes("gsm8k()").scores(["w1"], candidates, [texts]) == [[2 / 3, 2 / 3, 1 / 3]]
    assert Chooser.by_votes().scores(["w1"], candidates, [texts]) == [[1 / 3, 1 / 3, 1 / 3]]
    numbers = answer_numbers(Gsm8k(), [texts])
    assert numbers.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("w1", "did not return within its timeout of 0.2 s in its method answer"),
        ("w2", "raised SystemExit in its method answer: 3"),
        ("w3", "raised TypeError in its method answer: unhashable type: 'list'"),
        ("w4", "raised KeyError in its method answer: 'w4'"),
    ],
)
def test_a_vote_that_fails_or_hangs_is_an_error_with_its_traceback(work, text, says):
    chooser = Chooser.by_votes(f"{work / 'rewards.py'}:Vote", timeout=0.2)
    with pytest.raises(RewardError, match=f"Vote' {says}") as error:
        chooser.scores(["q"], [[Candidate((1,), True)]], [[text]])
    assert ("Its traceback is above" in str(error.value)) == (error.value.__cause__ is not None) == (text != "w1")


def test_the_tokens_of_a_response_do_not_depend_on_the_batch(work):
    found = responder(work, "rewind:0.9:4", reference_samples=8)
    batch = batch_of(found)
    together, cost = found.respond(batch, seed=2, stop=["w3"])
    assert cost.tokens == sum(response.sampled for response in together)
    for p, response in enumerate(together):
        [alone], own = found.respond(batch.only([p]), seed=2, stop=["w3"])
        assert alone.sampled == response.sampled == own.tokens
        assert response.sampled > sum(len(one.tokens) for one in response.candidates)  # and those of the reference


def test_a_stop_string_ends_candidates_before_the_reward_sees_them(work):
    found = responder(work, "bon:8")
    batch = batch_of(found, [f"w{i}" for i in range(1, 12)])
    cut, cost = found.respond(batch, seed=1, stop=["w7", "w1"])
    whole, same = found.respond(batch, seed=1)
    shortened = 0
    for one, other in (
        (a, b) for x, y in zip(cut, whole, strict=True) for a, b in zip(x.candidates, y.candidates, strict=True)
    ):
        ends = [at for at in (other.text.find("w7"), other.text.find("w1")) if at >= 0]
        assert one.text == (other.text[: min(ends)] if ends else other.text)
        assert one.score == sum(one.tokens)
        assert one.tokens == other.tokens[: len(one.tokens)]
        assert len(one.logprobs) == len(one.tokens)
        if ends:
            shortened += 1
            kept = found.tokenizer.decode(one.tokens[-1:])
            assert kept.startswith(("w7", "w1"))  # the token that completes the stop string
            assert one.finish_reason == "stop"
        else:
            assert one == other
    assert shortened > 5
    assert cost.tokens == same.tokens  # what is cut off was sampled


def test_log_probs_and_texts_of_conversations(work):
    found = responder(work, "bon:3")
    found.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}w9"
    [response] = found([[{"role": "user", "content": "w1 w2"}]], seed=4)
    rollout = generate(found.model, [found.tokenizer("w1 w2 w9").input_ids], 3, found.sampling, seed=4)
    assert [list(one.tokens) for one in response.candidates] == rollout.completion_ids()
    for one, logprobs in zip(response.candidates, rollout.logprobs[0], strict=True):
        assert list(one.logprobs) == logprobs[: len(one.tokens)].tolist()


def test_numbers_of_samples_continue_where_others_end(work):
    found = responder(work, "bon:3")
    ids = batch_of(found).ids
    whole = generate(found.model, ids, 7, found.sampling, seed=3).completion_ids()
    part = generate(found.model, ids, 3, found.sampling, seed=3, first_sample=4).completion_ids()
    assert part == [ids for p in range(3) for ids in whole[7 * p + 4 : 7 * p + 7]]


@pytest.mark.parametrize(
    ("procedure", "chooser", "message"),
    [
        (Procedure("largest", 4), None, "bon:4 needs a chooser"),
        (Procedure("largest", 4), "majority", "bon:4 chooses by a reward, not by 'majority'"),
        (Procedure("majority", 4), "length(target=1, scale=1)", "maj:4 chooses by the majority of final answers"),
        (Procedure("largest", 4), "value", "has no value models"),
        (Search(), None, "guided search needs a chooser"),
        (Search(), "value", "--choose value needs a value model"),
    ],
)
def test_procedures_and_choosers_that_do_not_fit_are_refused(work, procedure, chooser, message):
    found = responder(work, "bon:2")
    with pytest.raises(ValueError, match=message):
        Responder(found.model, found.tokenizer, procedure, chooser and Chooser.of(chooser))


def test_a_reward_that_abstains_for_all_candidates_or_fails_is_an_error(work):
    found = responder(work, "bon:2", reward="even", sampling=Sampling(max_new_tokens=3))
    with pytest.raises(ValueError, match=r"rewards\.py:even is NaN for all candidates of the prompt 'w1 w2'"):
        found(PROMPTS)
    with pytest.raises(
        ValueError,
        match=r"rewards\.py:even abstains for all 64 samples of the reference for the prompt 'w1 w2', so that",
    ):
        responder(work, "rewind:0.5:2", reward="even", sampling=Sampling(max_new_tokens=3))(PROMPTS)
    with pytest.raises(ValueError, match="takes 'target', which nothing provides"):
        responder(work, "bon:2", reward="close")(PROMPTS)


def test_the_public_name_of_the_room():
    assert inference.Responder is Responder


# --- the command ------------------------------------------------------------------------------------------------------


def command(work, *more):
    stops = ("--max-new-tokens", "6", "--seed", "3")
    return ["generate", "--model", str(work / "policy"), *stops, *map(str, more)]


def rows_of(text):
    return [json.loads(line) for line in text.splitlines()]


def test_the_command_prints_the_responses_of_the_library(work, capsys):
    high = f"{work / 'rewards.py'}:high"
    found = responder(work, "bon:5", sampling=Sampling(max_new_tokens=6, stop_ids=(EOS,)))
    expected = found(PROMPTS, seed=3)
    for options in (["--procedure", "bon:5"], ["--samples", "5"], ["--procedure", "bon", "--samples", "5"]):
        assert cli.main(command(work, *PROMPTS, *options, "--choose", high, "--json", "--candidates")) == 0
        captured = capsys.readouterr()
        for prompt, row, response in zip(PROMPTS, rows_of(captured.out), expected, strict=True):
            assert row["prompt"] == prompt
            assert (row["text"], row["score"], row["ids"]) == (
                response.text,
                response.score,
                list(response.best.tokens),
            )
            assert [(one["text"], one["score"]) for one in row["candidates"]] == [
                (one.text, one.score) for one in response.candidates
            ]
        assert f"bon:5: {sum(len(one.tokens) for r in expected for one in r.candidates)} tokens sampled" in captured.err
    assert cli.main(command(work, *PROMPTS, "--procedure", "bon:5", "--choose", high)) == 0
    shown = capsys.readouterr().out
    for prompt, response in zip(PROMPTS, expected, strict=True):
        summary = f"[{len(response.best.tokens)} tokens, {response.best.finish_reason}; {high} {response.score:.4g}]"
        assert f"{prompt}{response.text}\n    {summary}\n" in shown


def test_prompts_of_a_file_have_columns_for_the_reward(work, tmp_path, capsys):
    out = tmp_path / "new" / "responses.jsonl"
    close = f"{work / 'rewards.py'}:close"
    arguments = command(work, "--source", work / "prompts.jsonl", "--procedure", "bon:4", "--choose", close)
    assert cli.main([*arguments, "--out", str(out), "--candidates", "--max-rows", "8"]) == 0
    rows = rows_of(out.read_text())
    assert len(rows) == 23
    for i, row in enumerate(rows, 1):
        assert row["prompt"] == f"w{i} w{i + 1}"
        scores = [-abs(sum(one["ids"]) - 10 * i) for one in row["candidates"]]
        assert [one["score"] for one in row["candidates"]] == scores
        assert row["score"] == max(scores)
    assert not list(out.parent.glob("*.partial"))
    assert cli.main([*arguments, "--limit", "3", "--json", "--max-rows", "256"]) == 0
    assert [row["ids"] for row in rows_of(capsys.readouterr().out)] == [row["ids"] for row in rows[:3]]


def test_a_killed_command_resumes(work, tmp_path, monkeypatch):
    """It is killed after the third of six batches; the second command runs only the others."""
    monkeypatch.chdir(tmp_path)
    counted = f"{work / 'rewards.py'}:counted"
    arguments = command(work, "--source", work / "prompts.jsonl", "--samples", 2, "--choose", counted, "--max-rows", 8)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert cli.main([*arguments, "--out", str(whole)]) == 0
    (tmp_path / "calls").unlink()

    def killed():
        from nlgrpo.apps.respond.line_file import LineFile

        add, done = LineFile.add, []

        def die(self, lines):
            add(self, lines)
            done.append(1)
            if len(done) == 3:
                with self.partial.open("a") as file:
                    file.write('{"prompt": "half a li')
                os.kill(os.getpid(), signal.SIGKILL)

        LineFile.add = die
        return cli.main([*arguments, "--out", str(out)])

    assert Forked(killed).end().status == -signal.SIGKILL
    assert not out.exists()
    (tmp_path / "calls").unlink()
    assert cli.main([*arguments, "--out", str(out)]) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert (tmp_path / "calls").read_text().split() == ["8", "8", "6"]


@pytest.mark.parametrize("changed", ["prompts", "column", "weights", "reward"])
def test_work_on_other_contents_is_not_resumed(work, tmp_path, monkeypatch, capsys, changed):
    """The options stay the same. The partial file of the other work is kept, and the command is refused."""
    for name in ("rewards.py", "prompts.jsonl"):
        (tmp_path / name).write_text((work / name).read_text())
    shutil.copytree(work / "policy", tmp_path / "policy")
    monkeypatch.chdir(tmp_path)
    arguments = [
        "generate",
        "--model",
        "policy",
        "--max-new-tokens",
        "4",
        "--source",
        "prompts.jsonl",
        "--samples",
        "2",
    ]
    arguments += ["--choose", "rewards.py:close", "--out", "out.jsonl", "--max-rows", "8"]

    def die(self, lines):
        raise UserError("stopped")

    with monkeypatch.context() as patched:
        add, done = LineFile.add, []
        patched.setattr(LineFile, "add", lambda self, lines: (die if done else add)(self, lines) or done.append(1))
        assert cli.main(arguments) == 2
    partial = (tmp_path / "out.jsonl.partial").read_text()
    assert partial.count("\n") == 5
    if changed == "prompts":
        (tmp_path / "prompts.jsonl").write_text((work / "prompts.jsonl").read_text().replace('"w1 w2"', '"w1 w3"'))
    elif changed == "column":
        (tmp_path / "prompts.jsonl").write_text((work / "prompts.jsonl").read_text().replace("230", "231"))
    elif changed == "weights":
        tiny_model(tmp_path / "policy", "gpt2", scale=0.3, seed=1)
    else:
        for name in [name for name in sys.modules if name.startswith("_nlgrpo_user_")]:
            monkeypatch.delitem(sys.modules, name)  # or the file is not read again
        (tmp_path / "rewards.py").write_text(REWARDS.replace("-abs(", "-2 * abs("))
    capsys.readouterr()
    assert cli.main(arguments) == 2
    assert "out.jsonl.partial has results of other options, prompts, models" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl.partial").read_text() == partial
    (tmp_path / "out.jsonl.partial").unlink()
    assert cli.main(arguments) == 0
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert len(lines) == 23
    if changed != "column":
        assert lines[0] != partial.splitlines()[1]


@pytest.mark.parametrize(("content", "left"), [("work\na\nb\n", False), ("work\na\n", True), ("other\nc\n", True)])
def test_a_partial_file_beside_its_result_is_removed(tmp_path, content, left):
    """A kill between the last two operations leaves both; other work is kept."""
    path, partial = tmp_path / "x.jsonl", tmp_path / "x.jsonl.partial"
    path.write_text("a\nb\n")
    partial.write_text(content)
    with pytest.raises(ValueError, match="exists; remove it"):
        LineFile(path, "work")
    assert partial.exists() == left
    assert path.read_text() == "a\nb\n"


def test_a_line_file_keeps_whole_groups_and_is_locked(tmp_path):
    path = tmp_path / "x.jsonl"
    with contextlib.suppress(RuntimeError), LineFile(path, "work", 3) as lines:
        lines.add(["a", "b", "c", "d"])
        raise RuntimeError
    with open(tmp_path / "x.jsonl.partial", "a") as torn:
        torn.write("half")
    with LineFile(path, "work", 3) as lines:
        assert len(lines) == 3
        with pytest.raises(ValueError, match="another process is writing"):
            LineFile(path, "work", 3)
        lines.add(["e", "f", "g"])
    assert path.read_text() == "a\nb\nc\ne\nf\ng\n"
    assert not (tmp_path / "x.jsonl.partial").exists()
    with pytest.raises(ValueError, match="exists; remove it"):
        LineFile(path, "work")
    (tmp_path / "y.jsonl.partial").write_text("torn identity")  # killed before its end
    with LineFile(tmp_path / "y.jsonl", "work") as lines:
        lines.add(["a"])
    assert (tmp_path / "y.jsonl").read_text() == "a\n"


def refused(arguments, capsys):
    try:
        status = cli.main(arguments)
    except SystemExit as end:
        status = end.code
    assert status in (1, 2)
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["w1", "--choose", "length(target=1, scale=1)"], "number of candidates is missing; add --samples N"),
        (["w1", "--procedure", "bon:4"], "procedure 'bon:4' chooses by a reward: name one with --choose"),
        (["w1", "--procedure", "bon:4", "--samples", "3"], "samples 4 candidates, but samples = 3"),
        (["w1", "--procedure", "maj:4", "--choose", "length(target=1, scale=1)"], "extracts no final answers"),
        (["w1", "--procedure", "rewind:0.5:1"], "chooses by a reward: name one with --choose"),
        (["w1", "--procedure", "soft:0.1", "--choose", "length(target=1, scale=1)"], "write 'soft:TAU:N'"),
        (["w1", "--procedure", "bon:4", "--guide", "x", "--choose", "majority"], "guided search is a procedure of its"),
        (["w1", "--choose", "value", "--samples", "2"], "only for guided search"),
        (["w1", "--candidates"], "add --json or --out FILE"),
        (["w1", "--candidates", "--json"], "nothing is chosen"),
        (["w1", "--stop", ""], "an empty string stops before the first token"),
        (["w1", "--source", "prompts.jsonl"], "give one of them"),
        (["w1", "--prompt-column", "x"], "--prompt-column is for prompts of a --source"),
        (["w1", "--limit", "2"], "--limit is for prompts of a --source"),
        (["w1", "--chat-template-kwargs", '{"a": 1}'], "prompts: chat_template_kwargs is for the chat template"),
        (["[{'role': 'user'}]"], "prompt 1 begins like a conversation, but is not JSON"),
        (["--source", "no.jsonl"], "no.jsonl"),
        (["w1", "--max-rows", "0"], "max_rows = 0"),
        (["w1", "--reference", "x"], "only for the procedure rewind"),
        (["--source", "{work}/prompts.jsonl", "--max-new-tokens", "64"], "leaves no room for a prompt"),
        (["--source", "{work}/prompts.jsonl", "--prompt-column", "nothing"], "has no column 'nothing'"),
        (["w1", "--procedure", "bon:2", "--choose", "{work}/rewards.py:close"], "needs 'target'"),
        (["w1", "--procedure", "bon:2", "--choose", "lexicn()"], "lexicn"),
        (["w1", "--out", "{work}/rewards.py"], "rewards.py exists; remove it or choose another file"),
        (["w1", "--out", "/proc/nowhere/x.jsonl"], "cannot write into /proc/nowhere"),
    ],
)
def test_wrong_options_are_refused(work, capsys, options, message, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert message in refused(command(work, *(text.replace("{work}", str(work)) for text in options)), capsys)
