"""`nlgrpo rollout` on tiny models: drawing, scoring, saving, reuse and refusals."""

import dataclasses
import json
import os
import shutil
import signal
from functools import partial

import pytest
import torch
from rich.console import Console
from support.helpers import Job, fork_ranks, run_all, tiny_model
from transformers import AutoModelForCausalLM

from nlgrpo import cli
from nlgrpo.apps.report import figures
from nlgrpo.apps.report.figures import render
from nlgrpo.apps.rollout.tables import summarize
from nlgrpo.calibration import kolmogorov_smirnov
from nlgrpo.config.schema import Config, DataConfig, ModelConfig, RewardConfig, RolloutConfig
from nlgrpo.engine import generation, transformers_backend
from nlgrpo.engine.rollouts import collect, store
from nlgrpo.engine.rollouts.collect import Provenance, scorers
from nlgrpo.engine.rollouts.inputs import load_rewards, sampling_of
from nlgrpo.engine.rollouts.reference_rollouts import load_rollouts
from nlgrpo.engine.sampling import Sampling
from nlgrpo.errors import UserError
from nlgrpo.model import decoder, hf_weights
from nlgrpo.model.tokenizer import load_tokenizer
from nlgrpo.runtime import work_queue
from nlgrpo.runtime.device import compute_dtype
from nlgrpo.runtime.distributed import Ranks

pytestmark = pytest.mark.usefixtures("no_figures")

K = 5
P = 7
REWARDS = '''
from pathlib import Path

MODE = Path(__file__).with_name("mode")


def short(completion_ids, **kwargs):
    return [-abs(len(ids) - 4) / 10 for ids in completion_ids]


def near(completions, target, **kwargs):
    """Reward that reads a column of the data."""
    return [float(abs(len(text.split()) - wanted)) for text, wanted in zip(completions, target)]


def one(completions, **kwargs):
    return [1.0] * len(completions)


def shy(completion_ids, **kwargs):
    return [None if len(ids) > 6 else 1.0 for ids in completion_ids]


def alike(completion_ids, samples, **kwargs):
    rows = [completion_ids[i // samples * samples :][:samples] for i in range(len(completion_ids))]
    return [[float(len(a) == len(b)) for b in row] for a, row in zip(completion_ids, rows)]


def fickle(prompts, completion_ids, **kwargs):
    """Raise after the first prompts, if the file says so."""
    if MODE.read_text() == "fail" and any(len(prompt.split()) > 3 for prompt in prompts):
        raise KeyError("no such word")
    return [float(len(ids)) for ids in completion_ids]
'''


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    root = tmp_path_factory.mktemp("rollout")
    tiny_model(root / "base", seed=0)
    tiny_model(root / "other", seed=1)
    # the sixth prompt equals the third
    texts = [" ".join(f"w{(5 * i + j) % 28}" for j in range(1 + i % 4)) for i in range(P)]
    texts[5] = texts[2]
    rows = [{"prompt": text, "target": i % 3} for i, text in enumerate(texts)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "rewards.py").write_text(REWARDS)
    (root / "mode").write_text("")
    return root


def arguments(work, out, **changes):
    options = {
        "out": work / out,
        "samples": K,
        "model.path": work / "base",
        "model.dtype": "float64",
        "data.source": work / "prompts.jsonl",
        "rollout.max-new-tokens": 8,
        "rollout.max-rows": 2 * K,  # two prompts per file
        "rewards.short.function": f"{work / 'rewards.py'}:short",
        "rewards.near.function": f"{work / 'rewards.py'}:near",
    }
    options |= {name.replace("__", "."): value for name, value in changes.items()}
    parts_ = [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
    return ["rollout", "blank", *parts_]


def config(work, **rewards):
    """Configuration of a later stage with the same settings."""
    functions = {"short": f"{work / 'rewards.py'}:short", "near": f"{work / 'rewards.py'}:near"} | rewards
    return Config(
        model=ModelConfig(path=str(work / "base"), dtype="float64"),
        data=DataConfig(source=str(work / "prompts.jsonl")),
        rollout=RolloutConfig(max_new_tokens=8),
        rewards={name: r if isinstance(r, RewardConfig) else RewardConfig(r) for name, r in functions.items()},
    )


def of_run(cfg, **sampling):
    """The two arguments of `check`, as a run builds them."""
    source = hf_weights.locate(cfg.model.path)
    tokenizer = load_tokenizer(source)
    chosen = dataclasses.replace(sampling_of(cfg, tokenizer, source), **sampling)
    objectives, rewards = load_rewards(cfg, torch.device("cpu"))
    dtype = compute_dtype(cfg.model.dtype, torch.device("cpu"))
    return Provenance.of(source, tokenizer, dtype, chosen), scorers(cfg.rewards, objectives, rewards)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def said(text):
    return " ".join(text.split())


@pytest.fixture(scope="module")
def rollouts(work):
    assert cli.main(arguments(work, "first")) == 0
    return load_rollouts(work / "first")


@pytest.fixture(scope="module")
def by_hand(work):
    """Completions of the engine, one prompt at a time in the order of the source: independent of order and batches."""
    model = decoder.load(work / "base", dtype=torch.float64)
    tokenizer = load_tokenizer(work / "base")
    rows = [json.loads(line) for line in (work / "prompts.jsonl").read_text().splitlines()]
    sampling = Sampling(max_new_tokens=8, stop_ids=(tokenizer.eos_token_id,))
    ids = [tokenizer(row["prompt"]).input_ids for row in rows]
    drawn = [
        generation.generate(model, [prompt], K, sampling, seed=1 << 61, index=[i]).completion_ids()
        for i, prompt in enumerate(ids)
    ]
    return tokenizer, rows, ids, drawn


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_completions_equal_those_of_the_engine(rollouts, by_hand):
    _, _, _, drawn = by_hand
    assert [rollouts.ids(row) for row in range(P)] == drawn
    assert rollouts.lengths.tolist() == [[len(ids) for ids in group] for group in drawn]
    assert rollouts.finished.tolist() == [[ids[-1] == 2 for ids in group] for group in drawn]
    assert len({tuple(ids) for group in drawn for ids in group}) > P * K / 2


def test_rewards_equal_those_of_the_functions_in_the_order_of_the_samples(rollouts, by_hand):
    tokenizer, rows, _, drawn = by_hand
    short = [[-abs(len(ids) - 4) / 10 for ids in group] for group in drawn]
    words = [[len(text.split()) for text in tokenizer.batch_decode(g, skip_special_tokens=True)] for g in drawn]
    near = [[float(abs(n - row["target"])) for n in group] for group, row in zip(words, rows, strict=True)]
    assert rollouts.rewards["short"].tolist() == short
    assert rollouts.rewards["near"].tolist() == near
    assert rollouts.rewards["short"].dtype == torch.float64


def test_log_probs_equal_sums_of_transformers_log_probs(work, rollouts, by_hand):
    _, _, prompts, drawn = by_hand
    model = AutoModelForCausalLM.from_pretrained(work / "base", dtype=torch.float64)
    truth = torch.empty(P, K, dtype=torch.float64)
    for p, prompt in enumerate(prompts):
        for k, completion in enumerate(drawn[p]):
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].detach()
            truth[p, k] = logits.log_softmax(-1)[torch.arange(len(completion)), completion].sum()
    assert rollouts.logprobs.dtype == torch.float64
    torch.testing.assert_close(rollouts.logprobs, truth, rtol=0, atol=1e-5)  # tokens' log-probs are kept in float32


def test_prompts_are_found_by_their_tokens(rollouts, by_hand):
    _, _, prompts, drawn = by_hand
    assert [rollouts.row(prompt) for prompt in prompts] == [0, 1, 2, 3, 4, 2, 6]  # the sixth is the third again
    assert rollouts.index.prompts[5] == rollouts.index.prompts[2]
    assert drawn[5] != drawn[2]
    assert rollouts.row([*prompts[0], 5]) is None
    assert rollouts.row(tuple(prompts[3])) == 3


def test_a_kernel_gives_one_number_per_completion(work, by_hand):
    """Minus Rao's diversity per sample: the mean similarity with the other samples of its group."""
    kernel = {"rewards__alike__function": f"{work / 'rewards.py'}:alike", "rewards__alike__objective": "rao"}
    assert cli.main(arguments(work, "kernel", **kernel)) == 0
    found = load_rollouts(work / "kernel").rewards["alike"]
    for p, group in enumerate(by_hand[3]):
        for k, ids in enumerate(group):
            others = [float(len(ids) == len(x)) for j, x in enumerate(group) if j != k]
            assert found[p, k].item() == pytest.approx(-sum(others) / (K - 1))


def test_ecdf(rollouts):
    own = rollouts.ecdf("short")
    samples = rollouts.rewards["short"]
    assert torch.equal(own.samples, samples.sort(1).values)
    truth = [[sum(s < x for s in row) + sum(s == x for s in row) / 2 for x in row] for row in samples.tolist()]
    torch.testing.assert_close(own.cdf(samples), torch.tensor(truth, dtype=torch.float64) / K)
    with pytest.raises(ValueError, match="reward 'joy' was not scored; scored rewards: "):
        rollouts.ecdf("joy")


def test_an_abstaining_reward_has_no_cdf(work, capsys):
    assert cli.main(arguments(work, "shy", rewards__shy__function=f"{work / 'rewards.py'}:shy")) == 0
    found = load_rollouts(work / "shy")
    absent = found.rewards["shy"].isnan()
    assert torch.equal(absent, found.lengths > 6)
    with pytest.raises(
        ValueError,
        match=f"'shy' abstained for {int(absent.sum())} of {absent.numel()} samples, of {int(absent.any(1).sum())} of "
        f"{len(absent)} prompts, .* return a number there",
    ):
        found.ecdf("shy")
    summary = summarize("shy", found.rewards["shy"])
    assert (summary.mean, summary.std, summary.abstained) == (1.0, 0.0, int(absent.sum()))
    assert str(int(absent.sum())) in capsys.readouterr().out


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_write_the_same_files(work):
    """Figures too, which these processes draw."""

    def run(name):
        figures.render = render
        return cli.main(arguments(work, name))

    for name, ranks in {"one": 1, "two": 2}.items():
        ended = fork_ranks(partial(run, name), ranks)
        assert [end.status for end in ended] == [0] * ranks, ended[0].output
    assert contents(work / "two") == contents(work / "one")
    assert "".join(end.output for end in ended).count(f"rollouts  {work}") == 1


@pytest.mark.slow
def test_killed_and_stopped_work_resumes(work, rollouts):
    scoring, command = "nlgrpo.engine.rollouts.collect:RolloutCollector.score", {"main": "nlgrpo.cli:main"}
    orders = {"kill": (3, signal.SIGKILL), "term": (3, signal.SIGTERM), "late": (4, signal.SIGTERM)}
    jobs = [Job(arguments(work, name), scoring, *order, **command) for name, order in orders.items()]
    jobs += [Job(arguments(work, name), **command) for name in ("kill", "term")]
    killed, stopped, late, *resumed = run_all(jobs)
    assert killed.status == -signal.SIGKILL
    assert stopped.status == 0
    assert "stopped and saved; run the same command again to resume" in stopped.output
    assert late.status == 0
    assert "stopped" not in late.output  # the last file was at work: it is done
    for ended, there in zip(resumed, (2, 3), strict=True):
        assert ended.status == 0, ended.output
        assert f"{there} of 4 files are already done" in ended.output
    for name in orders:
        assert contents(work / name) == contents(work / "first")


def test_other_rewards_and_more_prompts_draw_only_what_is_missing(work, rollouts, monkeypatch, capsys):
    assert cli.main(arguments(work, "grow", prompts=4)) == 0
    assert load_rollouts(work / "grow").lengths.tolist() == rollouts.lengths[:4].tolist()
    capsys.readouterr()
    assert cli.main(arguments(work, "grow")) == 0
    assert "2 of 4 files are already done" in capsys.readouterr().out
    monkeypatch.setattr(transformers_backend, "load_frozen", lambda *a, **k: pytest.fail("a model was loaded"))
    assert cli.main(arguments(work, "grow", rewards__one__function=f"{work / 'rewards.py'}:one")) == 0
    assert "tokens/s" not in capsys.readouterr().out
    found = load_rollouts(work / "grow")
    assert set(found.rewards) == {"short", "near", "one"}
    assert torch.equal(found.rewards["short"], rollouts.rewards["short"])


def test_other_columns_are_scored_again(work, rollouts, by_hand, monkeypatch, capsys):
    """For example corrected answers; prompts and completions are unchanged."""
    shutil.copytree(work / "first", work / "corrected")
    monkeypatch.setattr(transformers_backend, "load_frozen", lambda *a, **k: pytest.fail("a model was loaded"))
    with monkeypatch.context() as patched:
        patched.setattr(collect.RolloutCollector, "score", lambda *a: pytest.fail("it is scored again"))
        assert cli.main(arguments(work, "corrected")) == 0
    tokenizer, rows, _, drawn = by_hand
    corrected = [*rows[:-1], rows[-1] | {"target": 5}]
    (work / "corrected.jsonl").write_text("".join(json.dumps(row) + "\n" for row in corrected))
    assert cli.main(arguments(work, "corrected", data__source=work / "corrected.jsonl")) == 0
    near = load_rollouts(work / "corrected").rewards["near"]
    words = [len(text.split()) for text in tokenizer.batch_decode(drawn[-1], skip_special_tokens=True)]
    assert near[-1].tolist() == [float(abs(n - 5)) for n in words] != rollouts.rewards["near"][-1].tolist()
    assert torch.equal(near[:-1], rollouts.rewards["near"][:-1])
    with monkeypatch.context() as patched:  # both are kept, and neither is taken for the other
        patched.setattr(collect.RolloutCollector, "score", lambda *a: pytest.fail("it is scored again"))
        assert cli.main(arguments(work, "corrected")) == 0
    assert torch.equal(load_rollouts(work / "corrected").rewards["near"], rollouts.rewards["near"])


def test_rescoring_that_stops_midway_is_incomplete(work, monkeypatch, capsys):
    """Scores of the old columns remain, but do not count as scores of the new ones."""
    rows = [json.loads(line) for line in (work / "prompts.jsonl").read_text().splitlines()]
    (work / "renamed.jsonl").write_text("".join(json.dumps(row | {"target": 7}) + "\n" for row in rows))
    assert cli.main(arguments(work, "halves")) == 0
    calls, original = [], collect.RolloutCollector.score

    def score(self, chunk, missing):
        calls.append(chunk)
        if len(calls) == 3:
            raise UserError("the power went")
        return original(self, chunk, missing)

    with monkeypatch.context() as patched:
        patched.setattr(collect.RolloutCollector, "score", score)
        assert cli.main(arguments(work, "halves", data__source=work / "renamed.jsonl")) == 2
    with pytest.raises(ValueError, match="the rollouts of 3 of 7 prompts are missing, damaged or not scored"):
        load_rollouts(work / "halves")


def test_rollouts_of_versions_before_columns_counted(work, rollouts):
    """Their index has no columns, and their scores are named by the reward alone."""
    shutil.copytree(work / "first", work / "before")
    data = json.loads((work / "before" / "rollouts.json").read_text())
    assert len(data.pop("columns")) == P
    (work / "before" / "rollouts.json").write_text(json.dumps(data))
    for path in (work / "before").rglob("*.score-*"):
        path.rename(path.with_name(path.name.rpartition("-")[0] + ".safetensors"))
    assert torch.equal(load_rollouts(work / "before").rewards["near"], rollouts.rewards["near"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"samples": 6}, "samples per prompt: 5 in the folder, 6 requested"),
        ({"train__seed": 1}, "train.seed: 0 in the folder, 1 requested"),
        ({"model__dtype": "float32"}, "compute dtype: torch.float64 in the folder, torch.float32 requested"),
        ({"rollout__temperature": 0.7}, "sampled with temperature = 1, but the run has 0.7"),
        ({"model__path": "other"}, "the reference of the run has other weights"),
    ],
)
def test_a_folder_of_other_rollouts_is_not_changed(work, rollouts, changes, says, capsys):
    before = contents(work / "first")
    changes = {name: work / value if name == "model__path" else value for name, value in changes.items()}
    assert cli.main(arguments(work, "first", **changes)) == 2
    shown = said(capsys.readouterr().err)
    assert says in shown
    assert "Choose another folder with --out" in shown
    assert contents(work / "first") == before


def test_a_dry_run_writes_nothing(work, capsys):
    assert cli.main([*arguments(work, "dry", rollout__top_k=4), "--dry-run"]) == 0
    assert not (work / "dry").exists()
    shown = said(capsys.readouterr().out)
    assert "35 completions of up to 8 tokens, at temperature 1, top_k 4, top_p 1, min_p 0; 2 prompts per file" in shown
    assert "1 are repeats" in shown


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_run_with_the_same_settings_uses_the_rollouts(work, rollouts):
    rollouts.check(*of_run(config(work)))
    origin, scored = of_run(config(work))
    rollouts.check(dataclasses.replace(origin, dtype="torch.bfloat16"), scored[:1])  # what it does not have, or need


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"temperature": 0.7}, "the rollouts were sampled with temperature = 1, but the run has 0.7"),
        ({"top_k": 3}, "the rollouts were sampled with top_k = 0, but the run has 3"),
        ({"top_p": 0.9}, "the rollouts were sampled with top_p = 1, but the run has 0.9"),
        ({"min_p": 0.1}, "the rollouts were sampled with min_p = 0, but the run has 0.1"),
        ({"max_new_tokens": 9}, "the rollouts were sampled with max_new_tokens = 8, but the run has 9"),
        ({"stop_ids": (2, 7)}, r"the rollouts were sampled with stop_ids = \[2\], but the run has \[2, 7\]"),
    ],
)
def test_another_sampling_is_refused(work, rollouts, sampling, says):
    with pytest.raises(ValueError, match=says):
        rollouts.check(*of_run(config(work), **sampling))


def test_the_order_of_stop_ids_does_not_matter(work, rollouts):
    rollouts.check(*of_run(config(work), stop_ids=(2, 2)))


def test_another_model_is_refused(work, rollouts):
    other = dataclasses.replace(config(work), model=ModelConfig(path=str(work / "other"), dtype="float64"))
    with pytest.raises(ValueError, match="the reference of the run has other weights") as error:
        rollouts.check(*of_run(other))
    assert str(work / "base") in str(error.value)
    assert "tokenizer" not in str(error.value)


def test_another_tokenizer_is_refused(work, rollouts):
    shutil.copytree(work / "base", work / "shifted")
    path = work / "shifted" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["w1"], vocabulary["w2"] = vocabulary["w2"], vocabulary["w1"]
    path.write_text(json.dumps(content))
    shifted = dataclasses.replace(config(work), model=ModelConfig(path=str(work / "shifted"), dtype="float64"))
    with pytest.raises(ValueError, match=r"have the tokenizer of .*base, but the run has another tokenizer") as error:
        rollouts.check(*of_run(shifted))
    assert "weights" not in str(error.value)


def test_a_tokenizer_that_has_been_used_is_the_same(work):
    tokenizer = load_tokenizer(work / "base")
    before = store.digest_of_tokenizer(tokenizer)
    tokenizer(["w1", "w1 w2"], padding=True, truncation=True, max_length=1)
    assert store.digest_of_tokenizer(tokenizer) == before


def test_other_rewards_are_refused(work, rollouts):
    with pytest.raises(ValueError, match="reward 'long' was not scored; scored rewards: short, near") as error:
        rollouts.check(*of_run(config(work, long="length(target=3, scale=2)")))
    assert f"--out {work / 'first'} to score these samples" in str(error.value)
    scaled = RewardConfig(f"{work / 'rewards.py'}:short", scale=-1.0)
    with pytest.raises(ValueError, match=r"'short' is .*:short x 1.0 in the rollouts, but .*:short x -1.0 in the run"):
        rollouts.check(*of_run(config(work, short=scaled)))
    source = (work / "rewards.py").read_text()
    try:
        (work / "rewards.py").write_text(source.replace("- 4", "- 5"))
        with pytest.raises(ValueError, match=r"the code or files of reward 'short' \(.*\) have changed since"):
            rollouts.check(*of_run(config(work)))
    finally:
        (work / "rewards.py").write_text(source)


def test_rollouts_cut_short(work, rollouts, capsys):
    folder = work / "short"
    shutil.copytree(work / "first", folder)
    completions = sorted(path for path in folder.rglob("*.safetensors") if "score" not in path.name)
    scores = sorted(folder.rglob("000006*score*"))
    completions[0].write_bytes(completions[0].read_bytes()[:-9])
    completions[1].unlink()
    scores[0].write_bytes(b"")
    with pytest.raises(
        ValueError, match="the rollouts of 5 of 7 prompts are missing, damaged or not scored; run the same"
    ):
        load_rollouts(folder)
    assert cli.main(arguments(work, "short")) == 0
    assert "1 of 4 files are already done" in capsys.readouterr().out
    assert contents(folder) == contents(work / "first")
    found = load_rollouts(folder)
    completions[2].unlink()
    with pytest.raises(ValueError, match="completions of prompt 4 are missing or damaged"):
        found.ids(4)


def test_each_changed_bit_of_a_file_is_noticed(tmp_path):
    there = store.Store(tmp_path, "here")
    there.folder.mkdir()
    written = {"lengths": torch.tensor([3, 5]), "finished": torch.tensor([True, False]), "one": torch.tensor(0.5)}
    there.write("chunk", written)
    path = there.folder / "chunk.safetensors"
    content = path.read_bytes()
    damaged = 0
    for position in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[position] ^= 1 << bit
            path.write_bytes(changed)
            found = there.read("chunk")
            damaged += found is None
            if found is not None:  # the change was in the padding, or in the name of the digest
                assert found.keys() == written.keys()
                assert all(torch.equal(found[name], value) for name, value in written.items())
    assert damaged > 8 * len(content) * 0.9
    path.write_bytes(content)
    assert there.read("chunk", ["lengths"]).keys() == {"lengths"}
    assert there.read("chunk", ["absent"]) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": "x"}', '{"origin": {}, "files": []}'])
def test_a_damaged_index_is_reported_and_written_again(work, rollouts, tmp_path, content):
    shutil.copytree(work / "first", tmp_path / "x")
    (tmp_path / "x" / "rollouts.json").write_text(content)
    with pytest.raises(ValueError, match=r"rollouts\.json cannot be read"):
        load_rollouts(tmp_path / "x")
    assert cli.main(arguments(work, tmp_path / "x")) == 0
    assert contents(tmp_path / "x") == contents(work / "first")


def test_a_folder_without_rollouts(tmp_path):
    with pytest.raises(ValueError, match=r"rollouts\.json is missing; expected the --out folder of `nlgrpo rollout`"):
        load_rollouts(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"samples": 1}, "--samples 1: expected at least 2, because rewards are ranked"),
        ({"samples": 0}, "--samples 0"),
        ({"samples": 2**31}, "expected less than 2^31"),
        ({"prompts": 0}, "--prompts 0: expected >= 1"),
        ({"data__source": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"rewards__short__function": None, "rewards__near__function": None}, "there is no reward"),
        ({"rollout__max-new-tokens": 64}, "leaves no room for a prompt"),
        ({"model__path": "nothing"}, "model 'nothing' is neither a directory"),
    ],
)
def test_invalid_options_are_refused(work, changes, says, capsys):
    assert cli.main(arguments(work, "refused", **changes)) == 2
    assert says in said(capsys.readouterr().err)
    assert not (work / "refused").exists()


# --- what fails on the way --------------------------------------------------------------------------------------------


def test_a_reward_that_fails_midway(work, capsys):
    (work / "mode").write_text("fail")
    options = arguments(work, "fickle", rewards__fickle__function=f"{work / 'rewards.py'}:fickle")
    assert cli.main(options) == 2
    shown = capsys.readouterr().err
    assert "reward 'fickle' raised KeyError" in shown
    assert "prompts 2 to 3" in shown
    assert 'raise KeyError("no such word")' in shown
    assert "are saved; run the same command again" in shown
    before = contents(work / "fickle")
    with pytest.raises(ValueError, match="the rollouts of 5 of 7 prompts are missing"):
        load_rollouts(work / "fickle")
    (work / "mode").write_text("")
    assert cli.main(options) == 0
    after = contents(work / "fickle")
    assert all(after[name] == content for name, content in before.items())
    assert torch.equal(
        load_rollouts(work / "fickle").rewards["fickle"], load_rollouts(work / "fickle").lengths.double()
    )


@pytest.mark.slow
@pytest.mark.parametrize("file", [1, 2, 4, 6])
def test_a_full_disk_is_reported_and_work_resumes(work, rollouts, tmp_path, monkeypatch, capsys, file):
    """For the description of the draws, the index, and the files of completions and scores."""
    sync, calls = os.fsync, 0

    def full(descriptor):
        nonlocal calls
        calls += 1
        if calls == file:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert cli.main(arguments(work, tmp_path / "full")) == 2
    assert "No space left on device. Complete files stay" in said(capsys.readouterr().err)
    assert cli.main(arguments(work, tmp_path / "full")) == 0
    assert contents(tmp_path / "full") == contents(work / "first")


class TwoRanks(Ranks):
    """Rank 0 of two, where rank 1 has failed with ``theirs``."""

    theirs = ""

    def any(self, flag):
        return flag or bool(self.theirs)

    def gather_objects(self, value):
        return [value, (self.theirs, False) if self.theirs else [1, 3]]


def test_an_error_on_another_rank_ends_the_work():
    ranks, done = TwoRanks(0, 2, torch.device("cpu")), []
    queue = work_queue.WorkQueue(ranks, Console(quiet=True))
    assert queue.missing("abcd", lambda piece: piece == "c") == [
        "a",
        "b",
        "d",
    ]  # it looked at a and c, the other at b, d
    assert queue.work("letters", ["a", "b", "d"], done.append)
    assert done == ["a", "d"]
    object.__setattr__(ranks, "theirs", "no memory")
    with pytest.raises(UserError, match="no memory"):
        queue.work("letters", ["a", "b", "d"], done.append)
    assert done == ["a", "d", "a"]


def test_summary_equals_counting():
    rewards = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    tied = [sum(row[i] == row[j] for i, j in pairs) / len(pairs) for row in rewards.tolist()]
    found = summarize("x", rewards)
    assert found.mean == pytest.approx(14 / 12)
    assert found.std == pytest.approx(rewards.flatten().std().item())
    assert found.std_in_prompt == pytest.approx((0 + (2 / 3) ** 0.5 + (5 / 3) ** 0.5) / 3)
    assert found.zero_std == pytest.approx(1 / 3)
    assert found.ties == pytest.approx(sum(tied) / 3)
    assert tied == [1.0, 2 / 12, 0.0]


def test_the_table(work, rollouts, capsys):
    assert cli.main(arguments(work, "table", rewards__one__function=f"{work / 'rewards.py'}:one")) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line.split() for line in lines if line.split()[:1] == ["one"]]
    assert row == ["one", "1.0000", "0.0000", "0.0000", "100.0%", "100.0%", "0"]
    text = " ".join(lines)
    assert f"{rollouts.lengths.double().mean():.1f} tokens per completion" in text
    assert f"{(~rollouts.finished).double().mean():.1%} truncated at 8" in text
    assert f"sampled {int(rollouts.lengths.sum())} tokens" in text


# --- Kolmogorov-Smirnov tests -----------------------------------------------------------------------------------------


def test_ks_tests_equal_scipys_and_figures_are_drawn(work, capsys, monkeypatch):
    """Nested samples, the larger side all K samples in any order: rejections equal those of scipy's exact test."""
    from scipy.stats import ks_2samp

    monkeypatch.setattr("nlgrpo.apps.report.figures.render", render)
    assert cli.main([*arguments(work, "first"), "--ks", "3", str(K), "--ks-nested"]) == 0
    shown = capsys.readouterr().out
    assert "short: two-sample Kolmogorov-Smirnov tests at 5%, nested samples" in said(shown)
    kept = load_rollouts(work / "first")
    few = kolmogorov_smirnov.ks_table(kept.rewards["short"], [3, K], nested=True)[0]
    chosen = kolmogorov_smirnov._shuffled(kept.rewards["short"], 0)
    truth = [ks_2samp(row[:3], row, method="exact").pvalue <= 0.05 for row in chosen.numpy()]
    assert few.rejected == sum(truth)
    assert f"{few.rejected} of {len(truth)}" in said(shown)
    for name in ("short", "near"):
        whole = not kept.rewards[name].isnan().all(1).any()
        picture = work / "first" / f"calibration-{name}.png"
        assert not whole or picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("sizes", [["5"], ["0", "2"], ["4", str(K)]])
def test_invalid_ks_sizes_are_refused(work, sizes, capsys):
    assert cli.main([*arguments(work, "none"), "--ks", *sizes]) == 2
    assert f"together at most --samples {K}" in said(capsys.readouterr().err)
    assert not (work / "none").exists()


def test_a_reward_changes_with_the_files_of_its_specification(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "rm").mkdir(parents=True)

    def digest(named, scale="1.0"):
        return store.digest_of_function(len, named, f"{named} x {scale}")

    for named in ("runs/rm", "classifier(path='runs/rm')", "runs/rm(batch_size=4)"):
        (tmp_path / "runs" / "rm" / "model.safetensors").write_bytes(b"old")
        old = digest(named)
        assert old == digest(named) != digest(named, "2.0")
        (tmp_path / "runs" / "rm" / "model.safetensors").write_bytes(b"new")
        assert digest(named) != old, named
    pattern = digest("regex(pattern='.')")
    (tmp_path / "run.log").write_text("a file that has nothing to do with it")
    assert digest("regex(pattern='.')") == pattern
