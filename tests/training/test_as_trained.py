"""What training assumed is in the export: `generate`, `serve` and transformers continue as the last step sampled."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from support.chat_model import chat_model
from support.helpers import tiny_model

from nlgrpo import cli, train
from nlgrpo.apps.respond import loading
from nlgrpo.apps.respond.options import ResponderOptions
from nlgrpo.data.conversations import ChatOptions
from nlgrpo.engine import as_trained, transformers_backend
from nlgrpo.engine.generation import RolloutRequest, generate
from nlgrpo.engine.sampling import Sampling
from nlgrpo.model import decoder
from nlgrpo.model.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

STOPS = [*range(10, 24)]
TRAINED = Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, max_new_tokens=12, stop_ids=(*STOPS, 2))
PROMPT = [4, 5, 6]


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("work")
    tiny_model(root / "policy")
    chat_model(root / "chat")
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(8)))
    generation = {"eos_token_id": 2, "temperature": 0.3, "repetition_penalty": 1.3, "pad_token_id": 0}
    (root / "policy" / "generation_config.json").write_text(json.dumps(generation))
    return root


def run(work: Path, out: str, model: str = "policy", *more: str) -> Path:
    options = {
        "model.path": work / model, "data.source": work / "prompts.jsonl", "rollout.prompts": 2, "rollout.samples": 2,
        "rewards.short.function": "length(target=3, scale=10)", "rewards.short.objective": "mean", "optim.lr": 1e-3,
        "train.steps": 1, "evaluation.prompts": 0, "train.samples_every": 0, "train.out": work / out,
    }  # fmt: skip
    parts = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    assert train.main(["blank", *parts, *more]) == 0
    return work / out


def sampled(*more: str) -> tuple[str, ...]:
    options = ["--rollout.temperature", "0.7", "--rollout.top-k", "20", "--rollout.top-p", "0.9"]
    options += ["--rollout.min-p", "0.01", "--rollout.max-new-tokens", "12", "--loss.correction", "tis:2"]
    return (*options, "--rollout.stop-ids", *map(str, STOPS), *more)


@pytest.fixture(scope="module")
def trained(work):
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("nlgrpo.apps.report.report.write_report", lambda folder: folder / "report.html")
        return run(work, "trained", "policy", *sampled())


def generated(capsys, *arguments: str) -> list[dict]:
    capsys.readouterr()
    assert cli.main(["generate", *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_generation_config_is_that_of_the_last_step(trained):
    config = transformers.GenerationConfig.from_pretrained(trained / "model")
    assert sorted(config.eos_token_id) == [2, *STOPS]
    assert (config.temperature, config.top_k, config.top_p, config.min_p) == (0.7, 20, 0.9, 0.01)
    assert (config.max_new_tokens, config.do_sample, config.pad_token_id) == (12, True, 0)
    assert config.repetition_penalty in (None, 1.0)  # the model's own, which training did not apply


def test_generate_and_transformers_draw_what_the_last_step_would(trained, capsys):
    """`generate` without options draws the same tokens as the engine with the options of training."""
    model = decoder.load(trained / "model")
    truth = generate(model, [PROMPT], 64, TRAINED, seed=0)
    rows = generated(capsys, "w0 w1 w2", "--model", str(trained / "model"), "--samples", "64")
    assert [row["ids"] for row in rows] == truth.completion_ids()
    lengths = [len(row["ids"]) for row in rows]
    assert len(set(lengths)) > 3
    assert {row["ids"][-1] in TRAINED.stop_ids for row in rows if len(row["ids"]) < 12} == {True}

    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained / "model").eval()
    torch.manual_seed(0)
    ids = theirs.generate(torch.tensor([PROMPT]), num_return_sequences=2000)[:, len(PROMPT) :]
    assert ids.shape[1] <= 12
    ended = torch.isin(ids, torch.tensor(TRAINED.stop_ids))
    theirs_lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, ids.shape[1]).double()
    ours = generate(model, [PROMPT], 2000, TRAINED, seed=1).lengths.double()[0]
    error = (theirs_lengths.var() / 2000 + ours.var() / 2000).sqrt()
    assert abs(theirs_lengths.mean() - ours.mean()) < 4 * error
    for length in range(1, 13):  # the whole distribution
        shares = [(lengths == length).double().mean().item() for lengths in (theirs_lengths, ours)]
        assert abs(shares[0] - shares[1]) < 4 * (0.5 / 2000) ** 0.5
    filters = {"temperature": None, "top_k": None, "top_p": None, "min_p": None}
    greedy = theirs.generate(torch.tensor([PROMPT]), do_sample=False, **filters)
    [own] = generate(model, [PROMPT], 1, replace(TRAINED, temperature=0.0), seed=0).completion_ids()
    assert greedy[0, len(PROMPT) :].tolist() == own


def test_options_replace_what_training_assumed(trained, capsys):
    model = decoder.load(trained / "model")
    rows = generated(capsys, "w0 w1 w2", "--model", str(trained / "model"), "--temperature", "1", "--top-k", "0",
                     "--top-p", "1", "--min-p", "0", "--max-new-tokens", "5")  # fmt: skip
    plain = Sampling(max_new_tokens=5, stop_ids=TRAINED.stop_ids)
    assert [row["ids"] for row in rows] == generate(model, [PROMPT], 1, plain, seed=0).completion_ids()
    rows = generated(capsys, "w0 w1 w2", "--model", str(trained / "model"), "--no-as-trained",
                     "--max-new-tokens", "20")  # fmt: skip
    plain = Sampling(max_new_tokens=20, stop_ids=TRAINED.stop_ids)
    assert [row["ids"] for row in rows] == generate(model, [PROMPT], 1, plain, seed=0).completion_ids()


def test_generate_says_what_it_takes_from_training(trained, capsys):
    assert cli.main(["generate", "w0", "--model", str(trained / "model"), "--temperature", "1"]) == 0
    said = capsys.readouterr().err
    assert "as in training: top_k 20, top_p 0.9, min_p 0.01, max_new_tokens 12" in said


def test_prompts_are_made_as_in_training(work, capsys):
    """The system prompt, conversations of texts and the template's arguments, for `generate`, `serve` and Python."""
    folder = run(
        work, "talks", "chat", "--data.system-prompt", "Be brief.", "--data.chat-template-kwargs",
        '{"enable_thinking": false}', "--rollout.max-new-tokens", "4",
    )  # fmt: skip
    known = as_trained.read_as_trained(folder / "model")
    assert known is not None
    assert (known.chat.system_prompt, known.base) == ("Be brief.", str(work / "chat"))
    tokenizer = load_tokenizer(folder / "model")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=False, tokenize=True, return_dict=False
    )
    responder, notes = loading.load(ResponderOptions(model=str(folder / "model")))
    assert any("system prompt 'Be brief.'" in note for note in notes)
    [response] = responder(["2+2?"], seed=0)
    model = decoder.load(folder / "model")
    [truth] = generate(model, [ids], 1, responder.sampling, seed=0).completion_ids()
    assert list(response.best.tokens) == truth
    [row] = generated(capsys, "2+2?", "--model", str(folder / "model"))
    assert (row["ids"], row["prompt"]) == (truth, messages)
    [row] = generated(capsys, "2+2?", "--model", str(folder / "model"), "--system-prompt", "Sing.")
    assert row["prompt"][0] == {"role": "system", "content": "Sing."}
    given = json.dumps(messages)
    [row] = generated(capsys, given, "--model", str(folder / "model"))
    assert row["prompt"] == messages
    assert cli.main(["generate", given, "--model", str(folder / "model"), "--system-prompt", "Sing."]) == 2
    assert "prompts: system_prompt = 'Sing.' is not used" in capsys.readouterr().err
    [row] = generated(capsys, "2+2?", "--model", str(folder / "model"), "--no-as-trained")
    assert row["prompt"] == "2+2?"


def test_arguments_of_the_template_in_training_do_not_refuse_texts(work, capsys):
    """Training has conversations with arguments of the template; those are for conversations here, too."""
    folder, tokenizer = work / "thinks", load_tokenizer(work / "chat")
    shutil.copytree(work / "chat", folder)
    chat = ChatOptions(template_kwargs={"enable_thinking": False})
    known = as_trained.AsTrained(str(work / "chat"), Sampling(max_new_tokens=2), chat)
    known.write(folder, tokenizer, len(tokenizer), "")
    [row] = generated(capsys, "2+2?", "--model", str(folder))
    assert row["prompt"] == "2+2?"
    messages = [{"role": "user", "content": "2+2?"}]
    responder, _ = loading.load(ResponderOptions(model=str(folder)))
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=False, tokenize=True, return_dict=False
    )
    assert responder.batch([messages]).ids == [expected]
    source = work / "prompts.jsonl"
    assert len(generated(capsys, "--source", str(source), "--limit", "2", "--model", str(folder))) == 2
    more = ("--chat-template-kwargs", '{"enable_thinking": true}')
    assert cli.main(["generate", "--source", str(source), "--model", str(folder), *more]) == 2
    assert "chat_template_kwargs is for the chat template" in capsys.readouterr().err


def test_a_server_prompts_as_in_training(work):
    fastapi = pytest.importorskip("fastapi.testclient")
    from nlgrpo.apps.respond import app
    from nlgrpo.apps.respond.batching import Batcher

    folder = run(work, "serves", "chat", "--data.system-prompt", "Be brief.", "--rollout.max-new-tokens", "4")
    responder, _ = loading.load(ResponderOptions(model=str(folder / "model")))
    seen = []
    batcher = Batcher(responder)
    submit = batcher.submit
    batcher.submit = lambda job: seen.append(job) or submit(job)
    with fastapi.TestClient(app.build_app(batcher, "policy", app.ServerLimits())) as client:
        body = {"messages": [{"role": "user", "content": "2+2?"}], "seed": 0}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        own = {"messages": [{"role": "system", "content": "Sing."}, {"role": "user", "content": "2+2?"}]}
        assert client.post("/v1/chat/completions", json=own).status_code == 200
    batcher.close()
    assert [job.prompts[0][0]["content"] for job in seen] == ["Be brief.", "Sing."]
    assert seen[0].sampling.max_new_tokens == 4
    tokenizer = load_tokenizer(folder / "model")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert seen[0].ids == [expected]


def test_an_adapter_and_its_merge_have_it_too(work, capsys):
    folder = run(work, "adapted", "policy", *sampled("--lora.rank", "2"))
    assert cli.main(["merge", str(folder / "adapter"), "--out", str(work / "merged")]) == 0
    for place in (folder / "model", folder / "adapter", work / "merged"):
        known = as_trained.read_as_trained(place)
        assert known is not None
        assert known.sampling == replace(TRAINED, stop_ids=known.sampling.stop_ids)
        config = json.loads((place / "generation_config.json").read_text())
        assert sorted(config["eos_token_id"]) == [2, *STOPS]
        assert transformers.AutoTokenizer.from_pretrained(place)("w1")["input_ids"] == [5]


def test_a_damaged_file_is_named(trained, tmp_path, capsys):
    shutil.copytree(trained / "model", tmp_path / "model")
    (tmp_path / "model" / "nlgrpo.json").write_text('{"sampling": {}}')
    assert cli.main(["generate", "w0", "--model", str(tmp_path / "model")]) == 2
    said = capsys.readouterr().err
    assert "nlgrpo.json cannot be read" in said
    assert "Remove the file" in said


def test_a_value_model_of_adapters_keeps_the_meaning_of_its_head(work, capsys):
    """`merge` of an adapter of a value model in [0, 1] is read as a probability, and truncates where training did."""
    from nlgrpo.model import reward_model
    from nlgrpo.model.value_model import kind_of

    rollouts = work / "rollouts"
    options = ["blank", "--model.path", str(work / "policy"), "--data.source", str(work / "prompts.jsonl")]
    options += ["--rollout.max-new-tokens", "4", "--rewards.r.function", "length(target=3, scale=10)"]
    options += ["--rewards.r.scale", "-1"]
    assert cli.main(["rollout", *options, "--out", str(rollouts), "--samples", "4"]) == 0
    folder = work / "value"
    options = ["--model.path", str(work / "policy"), "--data.rollouts", str(rollouts), "--loss.kind", "bce"]
    options += ["--lora.rank", "2", "--data.max-length", "20", "--evaluation.prompts", "0", "--train.out", str(folder)]
    assert cli.main(["value", "train", *options]) == 0
    assert cli.main(["merge", str(folder / "adapter"), "--out", str(work / "merged-value")]) == 0
    tiny_model(work / "another", seed=1)
    merge = ["merge", str(folder / "adapter"), "--out", str(work / "merged-wrong")]
    assert cli.main([*merge, "--model", str(work / "another")]) == 2
    said = capsys.readouterr().err
    assert f"was trained on {work / 'policy'}" in said
    assert "has other weights" in said
    (folder / "adapter" / "nlgrpo.json").write_text("[]")
    assert cli.main(merge) == 2
    assert "nlgrpo.json cannot be read" in capsys.readouterr().err
    for place in (folder / "model", work / "merged-value"):
        model, trained = reward_model.load_reward_model(str(place))
        assert trained
        assert kind_of(model) == "bce"
        assert load_tokenizer(place).model_max_length == 20


def test_the_transformers_backend_draws_the_same(trained):
    """With the same noise, transformers' model of the export draws the tokens of nlgrpo's."""
    theirs = transformers_backend.TransformersModel(
        transformers.AutoModelForCausalLM.from_pretrained(trained / "model")
    )
    ours = generate(decoder.load(trained / "model"), [PROMPT], 16, TRAINED, seed=3)
    assert theirs.generate(RolloutRequest([PROMPT], 16, TRAINED, seed=3)).completion_ids() == ours.completion_ids()


def test_an_adapter_is_merged_and_continued_on_its_own_base_only(work, capsys):
    folder = run(work, "own-base", "policy", "--lora.rank", "2", "--rollout.max-new-tokens", "4")
    tiny_model(work / "other", seed=1)
    merge = ["merge", str(folder / "adapter"), "--out", str(work / "wrong")]
    assert cli.main([*merge, "--model", str(work / "other")]) == 2
    said = capsys.readouterr().err
    assert f"was trained on {work / 'policy'}" in said
    assert f"{work / 'other'} has other weights" in said
    assert not (work / "wrong").exists()
    options = ["--model.path", str(work / "other"), "--lora.path", str(folder / "adapter"), "--train.steps", "1"]
    options += ["--data.source", str(work / "prompts.jsonl"), "--rollout.prompts", "2", "--rollout.samples", "2"]
    options += ["--rewards.short.function", "length(target=3, scale=10)", "--evaluation.prompts", "0"]
    options += ["--rollout.max-new-tokens", "4"]
    assert train.main(["blank", *options, "--train.out", str(work / "wrong-run")]) == 2
    assert "has other weights" in capsys.readouterr().err
