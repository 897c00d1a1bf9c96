"""Invalid input is reported by ``--dry-run``, in a message that names it and without a traceback."""

import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.helpers import WORDS, fork_ranks, tiny_model

from nlgrpo import cli, train
from nlgrpo.config.schema import OptimConfig
from nlgrpo.engine.kv_cache import KVCache
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.errors import UserError
from nlgrpo.model import decoder
from nlgrpo.runtime import checkpoint
from nlgrpo.training.learner import make_optimizer
from nlgrpo.training.tracking.run_files import read_jsonl

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

REWARDS = """
def short(completion_ids, **columns):
    return [-float(len(ids)) for ids in completion_ids]

def wants(completion_ids, gold):
    return [float(g) for g in gold]

class Broken:
    def __init__(self):
        raise KeyError("no such table")

def weight(ranks):
    return [1.0]

def huge(completion_ids, trainer_state, **_):
    return [(i % 2) * 1.0 for i in range(len(completion_ids))]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model, prompts and rewards, and the current folder."""
    tiny_model(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"w{i}"}) + "\n" for i in range(6)))
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "raises.py").write_text("import math\nmath.sqrt(-1)\n")
    (tmp_path / "syntax.py").write_text("import math\ndef f(:\n")
    (tmp_path / "within.py").write_text("import json\n\njson.loads('{')\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(*more: str) -> list[str]:
    return [
        "blank", "--model.path=model", "--data.source=prompts.jsonl", "--rewards.x.function=rewards.py:short",
        "--rollout.prompts=2", "--rollout.samples=2", "--rollout.max-new-tokens=4", "--train.steps=3",
        "--evaluation.prompts=0", "--train.samples-every=0", "--train.out=run", *more,
    ]  # fmt: skip


def config(folder, **changes):
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--rewards.x.function=gsm8k(column='nope')", "reward 'x' needs 'nope'. Columns of the data: none besides the"),
        ("--rewards.x.function=rewards.py:wants", "reward 'x' needs 'gold'"),
        ("--rewards.x.function=rewards.py:Broken", "'rewards.py:Broken': rewards.py:Broken cannot be built, KeyError"),
        ("--rewards.x.function=raises.py:f", "raises.py cannot be imported, ValueError: math domain error ("),
        ("--rewards.x.function=syntax.py:f", "SyntaxError: invalid syntax (syntax.py, line 2)\n"),
        ("--rewards.x.function=within.py:f", "within.py, line 3)"),
        ("--rewards.x.function=exits.py:f", "exits.py cannot be imported, SystemExit: 0 ("),
        ("--rewards.x.objective=distortion:rewards.py:weight", "must be a finite tensor of that shape, got list"),
        ("--rewards.x.objective=distortion:rewards.py:wants", "f raised TypeError"),
        (f"--rollout.stop-ids={len(WORDS)}", f"the largest token id of model is {len(WORDS) - 1}"),
    ],
)  # fmt: skip
def test_options(folder, capsys, more, says):
    assert train.main([*options(more), "--dry-run"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("generation_config.json", "[]", "generation_config.json is not a JSON object"),
        (
            "generation_config.json",
            '{"eos_token_id": "</s>"}',
            "eos_token_id = '</s>' is neither a token id nor",
        ),
        ("generation_config.json", '{"eos_token_id": [[2]]}', "is neither a token id nor a list"),
        ("tokenizer.json", '{"model": {"type": "Other"}}', "has no tokenizer that transformers can read"),
        ("prompts", '{"prompt": "w1"}\n{"prompt": "w1 \\ud83d"}\n', r"example 2: '\ud83d' in a str"),
        ("prompts", '{"prompt": [{"role": "user", "content": "\\udc00"}]}\n', r"example 1: '\udc00' in a list"),
    ],
)
def test_files(folder, capsys, file, content, says):
    (folder / "prompts.jsonl" if file == "prompts" else folder / "model" / file).write_text(content)
    assert train.main([*options(), "--dry-run"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rotary embedding 'dynamic'"),
        ({"vocab_size": 6}, "returns the token id 6 ('w2'), outside the model's vocabulary of 6, for the prompt"),
        ({"num_attention_heads": 5}, "cannot read model/config.json"),
        ({"num_attention_heads": 0}, "cannot read model/config.json"),
        ({"hidden_size": "wide"}, "cannot read model/config.json"),
        (
            {"num_key_value_heads": 3},
            "is not a valid 'llama' config: vocabulary 32, width 24, 4 heads of dimension 6, 3 key",
        ),
        ({"max_position_embeddings": 0}, "is not a valid 'llama' config"),
        (
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "partial_rotary_factor": 0.5,
                }
            },
            "give 2 frequencies [0.5, ",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0, "rope_theta": 1e4}}, "frequencies [inf, inf]"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": "x", "rope_theta": 1e4}},
            "rope_parameters, uns",
        ),
        (
            {"model_type": "mistral", "sliding_window": 0},
            "is not a valid 'mistral' config: sliding_window 0",
        ),
        (
            {"model_type": "qwen2", "sliding_window": 5, "layer_types": ["sliding_attention"] * 2},
            "with sliding_window None; supported: full_attention",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention"]},
            "is not a valid 'qwen3' config: layer_types ['full_attention', 'chunked_attention'] "
            "with sliding_window None",
        ),
    ],
)
def test_models(folder, capsys, changes, says):
    config(folder, **changes)
    assert train.main([*options(), "--dry-run"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 3}, {"num_attention_heads": 5}, {"hidden_act": "nope"}])
def test_a_broken_config_of_a_known_family_is_refused(folder, capsys, changes):
    config(folder, **changes)
    assert cli.main(["generate", "w1", "--model=model", "--max-new-tokens=2"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "config.json" in said or "cannot be loaded by transformers: KeyError('nope')" in said


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_a_model_without_a_tokenizer(folder, capsys, family):
    """transformers creates an empty one for GPT-2, with which all prompts would be the same."""
    shutil.rmtree(folder / "model")
    tiny_model(folder / "model", family)
    for path in folder.glob("model/*token*"):
        path.unlink()
    assert train.main([*options(), "--dry-run"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[]", "{"])
def test_a_folder_whose_configuration_is_damaged(folder, capsys, content):
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text(content)
    assert train.main(options()) == 2
    assert "run/config.json is damaged" in capsys.readouterr().err
    assert (folder / "run" / "config.json").read_text() == content


def test_the_folder_of_a_run_in_place_of_its_model(folder, capsys):
    assert train.main(options("--train.steps=1")) == 0
    capsys.readouterr()
    for arguments in (["generate", "w1", "--model=run"], ["train", *options("--model.path=run", "--train.out=other")]):
        assert cli.main(arguments) == 2
        assert (
            "run is the folder of a run, not a model; a finished run has its model in run/model"
            in capsys.readouterr().err
        )


def test_a_configuration_with_a_byte_order_mark_and_a_tilde(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder / "home"))
    text = 'model.path = "model"\n'
    text += '[data]\nsource = "prompts.jsonl"\n[train]\nout = "~/run"\nsteps = 1\n'
    text += '[rewards.x]\nfunction = "~/rewards.py:short"\n[evaluation]\nprompts = 0\n'
    (folder / "home").mkdir()
    shutil.copy("rewards.py", folder / "home")
    (folder / "mine.toml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    more = [option for option in options() if option.startswith("--rollout")]
    assert train.main(["mine.toml", *more]) == 0
    assert (folder / "home" / "run" / "model" / "config.json").is_file()
    assert not (folder / "~").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--optim.lr=1e10"], "are not finite: its weights have NaN or too large values"),
        (["--optim.lr=1", "--optim.weight-decay=1e18"], "the norm of the gradient is nan"),
    ],
)
def test_weights_that_overflow_end_the_run(folder, capsys, more, says):
    run = options(*more, "--rewards.x.function=rewards.py:huge", "--train.checkpoint-every=1")
    assert train.main(run) == 2
    assert says in capsys.readouterr().err
    assert not (folder / "run" / "model").exists()
    model = decoder.load("model")
    checkpoint.load(folder / "run" / "checkpoints", model=model, optimizer=make_optimizer(model, OptimConfig()))
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_are_never_written(folder, capsys, monkeypatch, bad):
    def step(self):
        with torch.no_grad():
            self.param_groups[0]["params"][-1].view(-1)[3] = bad

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    assert train.main(options("--train.steps=1")) == 2
    assert "weight has NaN or infinite values; nothing was saved" in capsys.readouterr().err
    assert not list(folder.glob("run/checkpoints/*"))
    assert not (folder / "run" / "model").exists()


def test_weights_that_were_never_finite(folder, capsys):
    """The NaN is in an embedding row that no prompt uses, so all activations are finite."""
    weights = load_file(folder / "model" / "model.safetensors")
    weights["model.embed_tokens.weight"][-1] = float("nan")
    save_file(weights, folder / "model" / "model.safetensors", {"format": "pt"})
    assert train.main(options()) == 2
    assert "embed.weight has NaN or infinite values in model, before any training" in capsys.readouterr().err


@pytest.mark.slow
def test_a_failure_on_one_rank_ends_all_with_its_message(folder, monkeypatch):
    def fails(self, model, batch, draw=Sampler.draw):
        rollout = draw(self, model, batch)
        if os.environ["RANK"] == "1":
            raise UserError("the model's logits are not finite")
        return rollout

    monkeypatch.setattr(Sampler, "draw", fails)
    ended = fork_ranks(lambda: train.main(options()))
    output = "".join(end.output for end in ended)
    assert [end.status for end in ended] == [2, 2]
    assert output.count("error: the model's logits are not finite") == 1
    assert "Connection closed" not in output


@pytest.mark.slow
def test_the_end_of_another_rank_is_one_line(folder, monkeypatch):
    def ends(self, model, batch, draw=Sampler.draw):
        if os.environ["RANK"] == "1":
            os._exit(3)
        return draw(self, model, batch)

    monkeypatch.setattr(Sampler, "draw", ends)
    first, second = fork_ranks(lambda: train.main(options()))
    assert (first.status, second.status) == (2, 3)
    assert "error: rank 0 has lost the connection to another rank, which has ended: " in first.output
    assert "Traceback" not in first.output


@pytest.mark.slow
def test_a_failure_in_a_pass_by_block_ends_all_ranks_with_its_message(folder, monkeypatch):
    def fails(self, *arguments, layer, run_block=KVCache.run_block, **options):
        if os.environ["RANK"] == "1" and layer == 1:
            raise UserError("no second layer")
        return run_block(self, *arguments, layer=layer, **options)

    def main() -> int:
        signal.alarm(60)  # ranks that wait for each other
        return train.main(options("--parallel.gather-for-sampling=block"))

    monkeypatch.setattr(KVCache, "run_block", fails)
    ended = fork_ranks(main)
    assert [end.status for end in ended] == [2, 2]
    assert "".join(end.output for end in ended).count("error: no second layer") == 1


@pytest.mark.slow
@pytest.mark.parametrize("when", ["training", "evaluation"])
def test_a_reward_failure_on_one_rank_ends_all_with_its_message(folder, when):
    (folder / "falls.py").write_text(
        "import os\n"
        "def falls(completions, trainer_state, **_):\n"
        f"    if os.environ['RANK'] == '1' and (trainer_state.max_steps > 0) == {when == 'training'}:\n"
        "        raise KeyError('no such answer')\n"
        "    return [0.0] * len(completions)\n"
    )
    given = options("--rewards.x.function=falls.py:falls")
    given += [] if when == "training" else ["--evaluation.prompts=2"]
    ended = fork_ranks(lambda: train.main(given))
    assert [end.status for end in ended] == [2, 2]
    output = ended[0].output + ended[1].output
    assert output.count("error: reward 'x'") == 1
    assert output.count("KeyError: 'no such answer'\n") == 1  # with where it came from, on the rank that has it
    assert "Connection closed" not in output


def test_a_temperature_just_above_0(folder, capsys):
    assert train.main(options("--rollout.temperature=1e-45")) == 2
    assert "are not finite" in capsys.readouterr().err


def test_values_logged_by_rewards_are_in_metrics_and_samples(folder):
    (folder / "talks.py").write_text(
        "def talks(completions, completion_ids, log_metric, log_extra, **_):\n"
        "    log_metric('mine/count', len(completion_ids))\n"
        "    log_metric('mine/count', 0)\n"
        "    log_metric('loss', 5.0)\n"
        "    log_metric('rewards/x/median', 6.0)\n"
        "    log_extra('said', completions)\n"
        "    log_extra('odd', [object()] * len(completion_ids))\n"
        "    log_extra('half', __import__('torch').full((len(completion_ids),), 0.5))\n"
        "    return [float(len(ids)) for ids in completion_ids]\n"
    )
    assert train.main(options("--rewards.x.function=talks.py:talks", "--train.samples-every=1")) == 0
    lines = read_jsonl(folder / "run" / "metrics.jsonl")
    assert [line["mine/count"] for line in lines] == [2.0] * 3  # the mean of 4 and 0
    assert [line["logged/loss"] for line in lines] == [5.0] * 3
    assert all(line["loss"] != 5.0 for line in lines)
    assert [line["logged/rewards/x/median"] for line in lines] == [6.0] * 3
    rows = read_jsonl(folder / "run" / "samples.jsonl")
    assert len(rows) == 6
    for row in rows:
        assert row["extra"]["said"] == row["completion"]
        assert row["extra"]["odd"].startswith("<object")
        assert row["extra"]["half"] == 0.5


def test_a_model_of_a_known_family_with_another_rotary_embedding_is_run_by_transformers(folder, capsys):
    config(folder, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert cli.main(["generate", "w1 w2", "--model=model", "--max-new-tokens=4", "--json"]) == 0
    shown = capsys.readouterr()
    assert "transformers runs it, which is slower (unknown rotary embedding 'dynamic'" in shown.err
    assert 1 <= len(json.loads(shown.out)["ids"]) <= 4
    assert torch.tensor(json.loads(shown.out)["logprobs"]).isfinite().all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--data.shuffle-buffer=5"], "data.shuffle_buffer = 5: only a shuffled stream has one; set data.streaming"),
        (["--data.shuffle-buffer=5", "--data.streaming", "--data.no-shuffle"], "and data.shuffle = true"),
        (
            ["--data.source=", '--data.mixture={"a.jsonl": {"shuffle_buffer": 5}}'],
            "'a.jsonl': shuffle_buffer = 5: only",
        ),
        (['--data.mixture={"prompts.jsonl": 1}'], "data.source = 'prompts.jsonl' is not used beside data.mixture"),
        (["--data.split=test"], "split = 'test', but prompts.jsonl is a single file"),
        (["--data.prompt-column=promt"], "has no column 'promt'; did you mean 'prompt'? It has prompt."),
        (['--data.chat-template-kwargs={"think": 1}'], "chat_template_kwargs is for the chat template"),
        (
            ["--environment.id=x", "--data.system-prompt=Hi", "--data.source="],
            "data.system_prompt: the environment gives the prompts",
        ),
    ],
)
def test_keys_of_the_data_that_would_be_ignored(folder, capsys, more, says):
    assert train.main([*options(*more), "--dry-run"]) == 2
    assert says in capsys.readouterr().err
