"""Rows of the head behind the tokenizer's ids: left out of samples, log-probs, entropy and KL, and counted in the plan.

A model of 40 rows, of which 32 have a token, must do what the model of the 32 rows does, however large the others are.
"""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.helpers import WORDS, run_ranks, tiny_model

from nlgrpo import cli, train
from nlgrpo.engine import transformers_backend
from nlgrpo.engine.backends.vllm_engine import parameters_of
from nlgrpo.engine.generation import RolloutRequest, generate
from nlgrpo.engine.rollouts import collect
from nlgrpo.engine.sampling import Sampling
from nlgrpo.kernels import linear_logprob
from nlgrpo.model import decoder, fsdp
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.tracking.run_files import read_jsonl

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

ROWS, KNOWN = 40, len(WORDS)
HEADS = {"untied": ["lm_head.weight", "model.embed_tokens.weight"], "tied": ["model.embed_tokens.weight"]}


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """For each head a model of 40 rows, whose last 8 would be sampled nearly always, and one of 32 rows."""
    root = tmp_path_factory.mktemp("work")
    for head, names in HEADS.items():
        tiny_model(root / f"{head} 40", vocab_size=ROWS, tie_word_embeddings=head == "tied")
        file = root / f"{head} 40" / "model.safetensors"
        tensors = load_file(file)
        for name in names:
            tensors[name][KNOWN:] *= 30
        save_file(tensors, file, metadata={"format": "pt"})
        tiny_model(root / f"{head} 32", vocab_size=KNOWN, tie_word_embeddings=head == "tied")
        shorter = tensors | {name: tensors[name][:KNOWN].clone() for name in names}
        save_file(shorter, root / f"{head} 32" / "model.safetensors", metadata={"format": "pt"})
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(8)))
    return root


def run(work: Path, model: str, out: str, *more: str) -> Path:
    options = {
        "model.path": work / model, "model.dtype": "float64", "data.source": work / "prompts.jsonl", "loss.beta": 0.1,
        "rollout.prompts": 4, "rollout.samples": 4, "rollout.max_new_tokens": 6, "optim.lr": 0.01, "optim.eps": 1e-4,
        "rewards.short.function": "length(target=3, scale=10)", "rewards.short.objective": "bon:2", "train.steps": 3,
        "evaluation.prompts": 0, "train.out": work / out,
    }  # fmt: skip
    parts = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    assert train.main(["blank", *parts, *more]) == 0
    return work / out


def numbers(folder: Path) -> list[dict]:
    wanted = ("loss", "entropy", "kl", "reward", "grad_norm", "completions/mean_length")
    return [{name: row[name] for name in wanted if name in row} for row in read_jsonl(folder / "metrics.jsonl")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    "more", [(), ("--lora.rank", "2"), ("--loss.level", "sequence"), ("--loss.algorithm", "ppo")], ids=str
)
def test_training_is_that_of_the_model_without_these_rows(head, more, work):
    padded, short = (run(work, f"{head} {rows}", f"{head} {rows} {more}", *more) for rows in (ROWS, KNOWN))
    for ours, truth in zip(numbers(padded), numbers(short), strict=True):
        assert len(truth) >= 5
        assert ours == pytest.approx(truth, rel=1e-9, abs=1e-12)
    ours, truth = (load_file(folder / "model" / "model.safetensors") for folder in (padded, short))
    start = load_file(work / f"{head} 40" / "model.safetensors")
    for name, value in truth.items():
        torch.testing.assert_close(ours[name][: len(value)], value, rtol=1e-9, atol=1e-12)
        assert torch.equal(ours[name][len(value) :].float(), start[name][len(value) :]), name  # not trained


def logprobs_and_gradients(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens = torch.tensor([1, 4, 9, 31, 5])
    head = partial(linear_logprob, targets=tokens[1:], temperature=0.7)
    logprobs, entropies = model(tokens[:-1], [4], torch.arange(4), head)
    (logprobs + entropies).sum().backward()
    gradients = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in model.named_parameters()}
    return logprobs.detach(), gradients


def on_rank(rank: int, work: Path) -> None:
    """A sharded model with these rows, against the model without them."""
    ranks = Ranks(rank, 2, torch.device("cpu"))
    shard = partial(fsdp.shard, ranks=ranks, compute=torch.float64)
    for head in HEADS:
        padded = decoder.load(work / f"{head} 40", dtype=torch.float64, shard=shard)
        padded.limit_vocabulary(KNOWN)
        short = decoder.load(work / f"{head} 32", dtype=torch.float64)
        (ours, gradients), (truth, expected) = logprobs_and_gradients(padded), logprobs_and_gradients(short)
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
        for name, value in expected.items():
            torch.testing.assert_close(gradients[name][: len(value)], value, rtol=1e-9, atol=1e-12)
            assert not gradients[name][len(value) :].any()
        sampling = Sampling(max_new_tokens=6, stop_ids=(2,))
        with fsdp.gathered(padded):
            sampled = generate(padded, [[4, 5]], 16, sampling, seed=1)
        assert sampled.completion_ids() == generate(short, [[4, 5]], 16, sampling, seed=1).completion_ids()


def test_a_model_that_is_sharded_over_two_ranks(work):
    run_ranks(on_rank, work)


@pytest.mark.parametrize("head", HEADS)
def test_samples_have_tokens(head, work, capsys):
    sampling = Sampling(max_new_tokens=6, stop_ids=(2,))
    padded, short = (decoder.load(work / f"{head} {rows}") for rows in (ROWS, KNOWN))
    assert max(map(max, generate(padded, [[4, 5]], 32, sampling).completion_ids())) >= KNOWN
    padded.limit_vocabulary(KNOWN)
    ours, truth = (generate(model, [[4, 5]], 64, sampling, seed=1) for model in (padded, short))
    assert ours.completion_ids() == truth.completion_ids()
    assert torch.equal(ours.logprobs, truth.logprobs)
    options = ["--model", str(work / f"{head} 40"), "--samples", "64", "--max-new-tokens", "6", "--json"]
    assert cli.main(["generate", "w0 w1", *options]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert max(max(row["ids"]) for row in rows) < KNOWN


def test_transformers_of_other_architectures_samples_none_of_them(work):
    model = transformers.AutoModelForCausalLM.from_pretrained(work / "untied 40")
    wrapped = transformers_backend.TransformersModel(model)
    sampling = Sampling(max_new_tokens=6, stop_ids=(2,))
    wrapped.limit_vocabulary(KNOWN)
    truth = generate(decoder.load(work / "untied 32"), [[4, 5]], 16, sampling, seed=1)
    ours = wrapped.generate(RolloutRequest([[4, 5]], 16, sampling, seed=1))
    assert ours.completion_ids() == truth.completion_ids()
    torch.testing.assert_close(ours.logprobs, truth.logprobs, rtol=1e-4, atol=1e-5)


def test_the_export_suppresses_them_in_transformers(work):
    folder = run(work, "untied 40", "exported")
    assert json.loads((folder / "model" / "generation_config.json").read_text())["suppress_tokens"] == [*range(32, 40)]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    torch.manual_seed(0)
    assert int(theirs.generate(torch.tensor([[4, 5]]), num_return_sequences=64).max()) < KNOWN


def test_vllm_gets_the_lowest_bias_for_them():
    request = RolloutRequest([[4, 5]], 2, Sampling(max_new_tokens=4))
    assert "logit_bias" not in parameters_of(request, 0)
    assert parameters_of(request, 0, range(32, 34))["logit_bias"] == {32: -100.0, 33: -100.0}


def test_the_plan_counts_them(work, capsys):
    options = ["blank", "--data.source", str(work / "prompts.jsonl"), "--dry-run", "--rewards.x.objective", "mean"]
    options += ["--rollout.max-new-tokens", "6"]
    options += ["--rewards.x.function", "length(target=3, scale=9)"]
    for rows, said in ((ROWS, True), (KNOWN, False)):
        assert train.main([*options, "--model.path", str(work / f"untied {rows}")]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert ("40 rows; the last 8 have no token" in shown) == said


def test_rollouts_of_an_older_version_are_sampled_again(work, tmp_path, capsys, monkeypatch):
    """They have ids without a token: refused in offline training, and not mixed with new ones."""
    options = {
        "model.path": work / "untied 40", "data.source": work / "prompts.jsonl", "rollout.max_new_tokens": 6,
        "rewards.short.function": "length(target=3, scale=10)", "rewards.short.objective": "mean",
    }  # fmt: skip
    common = ["blank", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]
    sample = ["rollout", *common, "--samples", "4", "--out", str(tmp_path / "rollouts")]
    offline = [*common, "--loss.algorithm", "bon_sft", "--offline.n", "2", "--rollout.samples", "4"]
    offline += ["--train.steps", "1", "--rollout.prompts", "4", "--evaluation.prompts", "0"]
    offline += ["--train.out", str(tmp_path / "run")]
    offline += ["--calibration.rollouts", str(tmp_path / "rollouts")]
    with monkeypatch.context() as older:
        older.setattr(collect, "count_tokens", lambda tokenizer: ROWS)
        assert cli.main(sample) == 0
    assert train.main(offline) == 2
    said = capsys.readouterr().err
    for part in ("which has no token", "expected ids below 32", "`nlgrpo rollout`"):
        assert part in said
    assert cli.main(sample) == 0
    assert train.main([*offline, "--train.allow-changed", "data"]) == 0
