"""Responses of guided search: the choice, by hand; the command, compared with the library and transformers."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from support.helpers import EOS, tiny_model
from support.search_truths import TextValue
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from nlgrpo import cli
from nlgrpo.data.prompt_dataset import Batch
from nlgrpo.engine import guided_search, guides
from nlgrpo.engine.chunked_decoding import ModelValue
from nlgrpo.engine.generation import generate
from nlgrpo.engine.guided_search import Candidate, Search
from nlgrpo.engine.guides import load_values
from nlgrpo.engine.rollouts.store import digest_of_tokenizer
from nlgrpo.engine.sampling import Sampling
from nlgrpo.inference import Chooser, Responder, majority
from nlgrpo.model import decoder, reward_model

PROMPTS = ["w1 w2", "w3", "w4 w5 w6"]
REWARDS = """
def high(completion_ids, **_):
    return [float(sum(ids)) for ids in completion_ids]

def silent(completion_ids, **_):
    return [None for _ in completion_ids]

def broken(completion_ids, **_):
    raise RuntimeError("no")
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A policy and two value models; the second has another size."""
    root = tmp_path_factory.mktemp("work")
    tiny_model(root / "policy", "gpt2", scale=0.3)
    tokenizer = AutoTokenizer.from_pretrained(root / "policy")
    for seed, family in enumerate(("gpt2", "llama")):
        tiny_model(root / "base", family, seed=seed + 1)
        value, _ = reward_model.load_reward_model(str(root / "base"), seed=seed)
        with torch.no_grad():
            value.head.weight.mul_(5.0)
        reward_model.save(value, root / family, tokenizer=tokenizer, pad=0, max_length=64)
    (root / "rewards.py").write_text(REWARDS)
    return root


def loaded(work, dtype=torch.float64):
    return decoder.load(work / "policy", dtype=dtype), AutoTokenizer.from_pretrained(work / "policy")


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_a_beam_that_finished_early_has_several_votes():
    """It counts as the B successors of an unfinished beam."""
    early, late = Candidate((1,), True, places=3), Candidate((2,), True)
    assert Chooser("majority").choose("w1", [late, late, early], ["so 4", "so 4", "so 5"]) == (2, 3 / 5)


def test_the_digest_of_a_guide_depends_on_models_betas_and_search(work, tmp_path):
    guide = guides.Guide([work / "gpt2"], [1.0], Search())
    others = [
        guides.Guide([work / "llama"], [1.0], Search()),
        guides.Guide([work / "gpt2"], [0.5], Search()),
        guides.Guide([work / "gpt2"], [1.0], Search(chunk=8)),
    ]
    shutil.copytree(work / "gpt2", tmp_path / "renamed")
    assert guides.Guide([tmp_path / "renamed"], [1.0], Search()).digest() == guide.digest()
    tokenizer = json.loads((tmp_path / "renamed" / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["w1"], words["w2"] = words["w2"], words["w1"]
    (tmp_path / "renamed" / "tokenizer.json").write_text(json.dumps(tokenizer))
    others.append(guides.Guide([tmp_path / "renamed"], [1.0], Search()))  # its tokenizer may matter
    assert len({one.digest() for one in (guide, *others)}) == 5


def test_majority_votes_by_hand():
    assert majority([3, 4, 4, None], [1, 1, 1, 9]) == (1, 2 / 3)
    assert majority([3, 4, 4, 3], [1, 1, 1, 1]) == (0, 0.5)  # the first of ties
    assert majority([4, 3, 3], [3, 1, 1]) == (0, 0.6)  # a beam that finished early counts as its successors
    assert majority([None, None], [1, 1]) == (0, 0.0)


def test_the_choice_by_value_majority_and_reward(work):
    texts = [r"so \boxed{7}", "it is 8", r"\boxed{8.0} w3", "none"]
    candidates = [Candidate((i,), True, value) for i, value in enumerate((0.5, 2.0, 2.0, math.nan))]
    assert Chooser.of("value").choose("w1", candidates, texts) == (1, 2.0)
    assert Chooser.of("majority").choose("w1", candidates, texts) == (1, 2 / 3)
    high = Chooser.of(f"{work / 'rewards.py'}:high")
    assert high.choose("w1", candidates, texts) == (3, 3.0)
    with pytest.raises(ValueError, match="silent is NaN for all candidates of the prompt 'w1'"):
        Chooser.of(f"{work / 'rewards.py'}:silent").choose("w1", candidates, texts)
    with pytest.raises(ValueError, match="raised RuntimeError: no"):
        Chooser.of(f"{work / 'rewards.py'}:broken").choose("w1", candidates, texts)
    with pytest.raises(ValueError, match="value is NaN for all candidates"):
        Chooser.of("value").choose("w1", candidates[3:], texts[3:])
    with pytest.raises(ValueError, match="lexicn"):
        Chooser.of("lexicn()")


def test_the_response_is_best_of_n_for_chunks_of_full_length(work):
    model, tokenizer = loaded(work)
    sampling = Sampling(max_new_tokens=8, stop_ids=(EOS,))
    chooser = Chooser.of(f"{work / 'rewards.py'}:high")
    ids = [tokenizer(text).input_ids for text in PROMPTS]
    responder = Responder(model, tokenizer, Search(3, 2, chunk=8), chooser, sampling)
    responses, cost = responder.respond(Batch([0, 1, 2], ids, PROMPTS, {}), seed=3)
    rollout = generate(model, ids, 6, sampling, seed=3)
    completions = rollout.completion_ids()
    for p, response in enumerate(responses):
        best = max(completions[6 * p : 6 * p + 6], key=sum)
        assert (list(response.best.tokens), response.score) == (best, sum(best))
        assert PROMPTS[p] + response.text == tokenizer.decode(ids[p] + best, skip_special_tokens=True)
    assert (cost.tokens, cost.queries) == (int(rollout.lengths.sum()), 0)


# --- candidates -------------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_transformers(work):
    model, tokenizer = loaded(work)
    theirs = AutoModelForCausalLM.from_pretrained(work / "policy").double()
    ids = [tokenizer(text).input_ids for text in PROMPTS]
    sampling = Sampling(max_new_tokens=7, stop_ids=tuple(range(20, 26)), temperature=0.7)
    found, _ = guided_search.search(model, ids, Search(2, 2, 2), sampling, [(TextValue(sum), 1.0)], seed=1)
    for prompt, candidates in zip(ids, found, strict=True):
        for one in candidates:
            logits = theirs(torch.tensor([[*prompt, *one.tokens]])).logits[0, len(prompt) - 1 : -1] / 0.7
            expected = logits.log_softmax(-1)[range(len(one.tokens)), list(one.tokens)].sum().item()
            assert one.logprob == pytest.approx(expected, abs=1e-5)


def test_places_sum_to_the_number_of_candidates(work):
    model, tokenizer = loaded(work)
    ids = [tokenizer(text).input_ids for text in PROMPTS * 4]
    sampling = Sampling(max_new_tokens=9, stop_ids=tuple(range(20, 32)))
    found, _ = guided_search.search(model, ids, Search(3, 4, 2), sampling, [(TextValue(len), 1.0)], seed=1)
    assert {sum(one.places for one in candidates) for candidates in found} == {12}
    assert {one.places for candidates in found for one in candidates} == {1, 4}


def test_complete_candidates_are_scored_if_chosen_by_value(work):
    model, tokenizer = loaded(work)
    ids = [tokenizer(text).input_ids for text in PROMPTS]
    sampling = Sampling(max_new_tokens=6, stop_ids=tuple(range(20, 26)))

    def searched(valued):
        value = TextValue(lambda tokens: float(sum(tokens)))
        return guided_search.search(model, ids, Search(2, 3, 2), sampling, [(value, 0.5)], seed=1, valued=valued)

    (plain, before), (found, cost) = searched(False), searched(True)
    assert all(one.value == 2.0 * sum(one.tokens) for candidates in found for one in candidates)
    assert cost.queries == before.queries + sum(one.places == 1 for candidates in found for one in candidates)
    assert [[one.tokens for one in candidates] for candidates in found] == [
        [one.tokens for one in candidates] for candidates in plain
    ]


def test_a_single_value_model_of_a_loop_uses_the_search_of_the_loop(work, tmp_path, monkeypatch):
    loop, how = tmp_path / "loop", Search(2, 3, 5)
    for folder in ("iteration-1/value/model", "compressed-1/model"):
        shutil.copytree(work / "gpt2", loop / folder)
    with pytest.raises(ValueError, match="has not finished"):
        guides.read_guide(loop)
    guides.Guide([loop / "iteration-1" / "value"], [0.5], how, loop / "compressed-1").write(loop)
    monkeypatch.chdir(loop)
    for path, value in (
        (loop / "compressed-1", loop / "compressed-1"),
        (loop / "compressed-1" / "model", loop / "compressed-1" / "model"),
        (Path("compressed-1"), Path("compressed-1")),
        (loop / "iteration-1" / "value", loop / "iteration-1" / "value"),
        (loop / "iteration-1", loop / "iteration-1" / "value"),
    ):
        assert guides.read_guide(path) == guides.Guide([value], [1.0], how)
    assert guides.read_guide(work / "gpt2") is None


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "of_values", "tolerance"),
    [(torch.float64, torch.float64, 1e-6), (torch.float32, torch.float32, 1e-5), (torch.bfloat16, torch.float32, 0.1)],
)
def test_values_have_the_precision_of_the_compute_dtype(work, dtype, of_values, tolerance):
    """Chunk by chunk, compared with transformers' classifier in float64. Values are not rounded to bfloat16."""
    tokenizer = AutoTokenizer.from_pretrained(work / "policy")
    for name in ("gpt2", "llama"):
        [(value, _)] = load_values([work / name], [], tokenizer, Sampling(max_new_tokens=6), dtype=dtype)
        theirs = AutoModelForSequenceClassification.from_pretrained(work / name).double().eval()
        theirs.config.pad_token_id = None
        prompts, rows = [[7, 9], [8]], [[4 + i, 30 - i, 11] for i in range(12)]
        with torch.inference_mode():
            value.begin(prompts)
            value.score([i % 2 for i in range(12)], [row[:2] for row in rows])
            values = value.score(range(12), [row[2:] for row in rows])
            truth = [theirs(torch.tensor([[*prompts[i % 2], *row]])).logits.item() for i, row in enumerate(rows)]
        assert values.dtype == of_values
        assert values.tolist() == pytest.approx(truth, abs=tolerance * max(map(abs, truth)))
        assert (values != values.bfloat16()).sum() > 6


def command(work, *more, values=("gpt2", "llama"), **changes):
    options = {"model": work / "policy", "max-new-tokens": 6, "beams": 2, "successors": 3, "chunk": 2, "seed": 5}
    options |= {name.replace("_", "-"): value for name, value in changes.items()}
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return ["generate", *PROMPTS, *arguments, "--guide", *(str(work / value) for value in values), *more]


def test_the_command_prints_the_response_of_the_search(work, capsys):
    assert cli.main(command(work, "--betas", "1", "0.5", "--json")) == 0
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    model, tokenizer = loaded(work, torch.float32)
    ids = [tokenizer(text).input_ids for text in PROMPTS]
    sampling = Sampling(max_new_tokens=6, stop_ids=(EOS,))
    values = load_values([work / "gpt2", work / "llama"], [1.0, 0.5], tokenizer, sampling)
    found, cost = guided_search.search(model, ids, Search(2, 3, 2), sampling, values, seed=5, valued=True)
    theirs = [AutoModelForSequenceClassification.from_pretrained(work / name).eval() for name in ("gpt2", "llama")]
    for classifier in theirs:
        classifier.config.pad_token_id = None
    for prompt, row, candidates in zip(ids, rows, found, strict=True):
        best = max(candidates, key=lambda one: one.value)
        assert row["ids"] == list(best.tokens)
        one, other = (classifier(torch.tensor([[*prompt, *best.tokens]])).logits.item() for classifier in theirs)
        assert row["score"] == pytest.approx(one + other / 0.5, abs=1e-4)
        assert row["finish_reason"] == ("stop" if row["ids"][-1] == EOS else "length")
    assert f"{cost.tokens:,} tokens sampled, {cost.queries:,} value queries" in captured.err

    assert "no value guides" not in captured.err

    assert cli.main(command(work, "--choose", f"{work / 'rewards.py'}:high", chunk=6)) == 0
    assert "2 beams x 3 chunks of 6 tokens; a chunk is a whole response, so no value guides" in capsys.readouterr().err
    assert cli.main(command(work, "--choose", f"{work / 'rewards.py'}:high")) == 0
    output = capsys.readouterr().out
    assert output.count("rewards.py:high ") == len(PROMPTS)


def refused(arguments, capsys):
    """Error message of a command that fails; tyro exits by itself and wraps its lines."""
    try:
        status = cli.main(arguments)
    except SystemExit as end:
        status = end.code
    assert status in (1, 2)
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 2}, "samples = 2: guided search gives one response"),
        ({"beams": 0}, "beams = 0"),
        ({"chunk": 0}, "chunk = 0"),
        ({"search_temperature": -1}, "temperature = -1.0"),
        ({"betas": 1.0}, "1 betas for 2 value models"),
        ({"values": ("policy",)}, "is not a value model: it has no scalar head"),
        ({"values": ("nowhere",)}, "nowhere"),
        ({"choose": "nothing:at_all"}, "nothing"),
        ({"max_new_tokens": 64}, "context"),
    ],
)
def test_bad_arguments_are_refused(work, capsys, changes, message):
    assert message in refused(command(work, **changes), capsys)


def test_a_value_model_with_another_tokenizer_reads_texts(work, tmp_path):
    """Compared with transformers on the ids of its own tokenizer, in which w0 and w1 are swapped."""
    value, tokenizer = swapped(work, tmp_path)
    model, policys = loaded(work)
    ids, sampling = [policys(text).input_ids for text in PROMPTS], Sampling(max_new_tokens=6, stop_ids=(EOS,))
    found = load_values([work / "gpt2", value], [1.0, 0.5], policys, sampling)
    assert [type(one) for one, _ in found] == [ModelValue, guides.TextValue]
    assert [bool(guides.note(folder, policys)) for folder in (work / "gpt2", value)] == [False, True]
    candidates, cost = guided_search.search(
        model.float(), ids, Search(2, 3, 2), sampling, found[1:], seed=5, valued=True
    )
    theirs = AutoModelForSequenceClassification.from_pretrained(value).eval()
    theirs.config.pad_token_id = None
    finished = 0
    for prompt, of_prompt in zip(PROMPTS, candidates, strict=True):
        for one in of_prompt:
            text = policys.decode([*policys(prompt).input_ids, *one.tokens], skip_special_tokens=True)
            text_ids = tokenizer(text).input_ids + [EOS] * one.finished
            assert one.value == pytest.approx(theirs(torch.tensor([text_ids])).logits.item() / 0.5, abs=1e-4)
            finished += one.finished
    assert finished > 0
    assert cost.queries > 0
    reader, _ = found[1]
    context = reader.model.shape.context
    reader.begin([[5] * (context + 3)])
    long = tokenizer(policys.decode([5] * (context + 3) + [6])).input_ids
    assert len(long) > context  # its beginning is cut off
    with torch.inference_mode():
        last = theirs(torch.tensor([long[-context:]])).logits.item()
        ours = reader.score([0], [[6]]).item()
    assert ours == pytest.approx(last, abs=1e-4)


def swapped(work, tmp_path):
    """A value model whose tokenizer has the ids of two words swapped."""
    model, _ = reward_model.load_reward_model(str(work / "gpt2"))
    tiny_model(tmp_path / "base", "gpt2")
    tokens = json.loads((tmp_path / "base" / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["w0"], vocabulary["w1"] = vocabulary["w1"], vocabulary["w0"]
    (tmp_path / "base" / "tokenizer.json").write_text(json.dumps(tokens))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    reward_model.save(model, tmp_path / "value", tokenizer=tokenizer, pad=0, max_length=64)
    return tmp_path / "value", tokenizer


@pytest.mark.parametrize(
    ("dtype", "of_values", "tolerance"),
    [(torch.float64, torch.float64, 1e-6), (torch.float32, torch.float32, 1e-5), (torch.bfloat16, torch.float32, 0.1)],
)
def test_values_of_texts_have_the_precision_of_the_compute_dtype(work, tmp_path, dtype, of_values, tolerance):
    folder, tokenizer = swapped(work, tmp_path)
    _, policys = loaded(work)
    [(value, _)] = load_values([folder], [], policys, Sampling(max_new_tokens=6), dtype=dtype)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).double().eval()
    theirs.config.pad_token_id = None
    prompts, rows = [policys(text).input_ids for text in PROMPTS[:2]], [[4 + i, 30 - i] for i in range(8)]
    value.begin(prompts)
    with torch.inference_mode():
        values = value.score([i % 2 for i in range(8)], rows)
        truth = []
        for i, row in enumerate(rows):
            text = policys.decode([*prompts[i % 2], *row], skip_special_tokens=True)
            truth.append(theirs(torch.tensor([tokenizer(text).input_ids])).logits.item())
    assert values.dtype == of_values
    assert values.tolist() == pytest.approx(truth, abs=tolerance * max(map(abs, truth)))


def test_a_value_model_with_another_chat_template_reads_ids(work, tmp_path):
    """Only the vocabulary matters."""
    shutil.copytree(work / "gpt2", tmp_path / "value")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "value")
    theirs.chat_template = "{{ messages }}"
    theirs.save_pretrained(tmp_path / "value")
    _, policys = loaded(work)
    assert digest_of_tokenizer(theirs) != digest_of_tokenizer(policys)
    [(value, _)] = load_values([tmp_path / "value"], [1.0], policys, Sampling(max_new_tokens=6))
    assert type(value) is ModelValue


def test_a_value_model_with_a_smaller_vocabulary_is_refused(work):
    """The policy's embedding may have more rows than the shared tokenizer and the value model."""
    _, policys = loaded(work)
    [(value, _)] = load_values([work / "gpt2"], [1.0], policys, Sampling(max_new_tokens=6))
    vocabulary = value.model.shape.vocab
    value.begin([[5, vocabulary - 1]])
    with pytest.raises(ValueError, match=f"vocabulary of {vocabulary}, but a candidate has the token id {vocabulary}"):
        value.score([0], [[vocabulary]])
    with pytest.raises(ValueError, match=f"token id {vocabulary + 1}"):
        value.begin([[vocabulary + 1]])


def test_options_of_the_search_need_a_guide(work, capsys):
    plain = ["generate", "w1", "--model", str(work / "policy")]
    for options, names in (
        (["--betas", "1"], "betas"),
        (["--beams", "8", "--chunk", "0"], "beams, chunk"),
        (["--search-temperature", "1", "--no-diverse", "--choose", "majority"], "search_temperature, diverse"),
    ):
        message = " ".join(refused([*plain, *options], capsys).split())
        assert f"{names}: only for guided search" in message
    model, tokenizer = loaded(work)
    with pytest.raises(ValueError, match="--choose value needs a value model"):
        Responder(model, tokenizer, Search(), Chooser("value"), Sampling(max_new_tokens=4))
