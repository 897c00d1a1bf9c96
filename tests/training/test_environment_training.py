"""Runs in an environment of `verifiers`: they learn, resume, and are the same on two ranks."""

import json
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
import verifiers_environments
from support.chat_model import chat_model
from support.helpers import Job, fork_ranks, run_all

from nlgrpo import train
from nlgrpo.config.schema import LossConfig, OptimConfig
from nlgrpo.engine.environments.dialogue import Dialogue, Turn, to_rollout
from nlgrpo.engine.generation import Conversation
from nlgrpo.engine.rollouts.store import digest_of
from nlgrpo.model import decoder
from nlgrpo.runtime.device import MicroBatchLimit
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.learner import Learner, make_optimizer
from nlgrpo.training.tracking.run_files import read_jsonl

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

LIKE = {"dtype": torch.float64}


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("work")
    chat_model(root / "model")
    return root


def run_of(work: Path, out: str, **changes) -> list[str]:
    options = {
        "model.path": work / "model",
        "model.dtype": "float64",
        "environment.id": "verifiers-environments",
        "environment.args": json.dumps({"turns": 2}),
        "environment.renderer": json.dumps({"name": "qwen3"}),
        "data.chat-template-kwargs": json.dumps({"enable_thinking": False}),
        "rewards.spaces.function": "environment(metric='spaces')",
        "rewards.spaces.objective": "bon:2",
        "rewards.total.function": "environment()",
        "rewards.total.objective": "mean",
        "rewards.total.weight": 0,
        "rollout.prompts": 2,
        "rollout.samples": 4,
        "rollout.max-new-tokens": 8,
        "optim.lr": 0.003,
        "optim.eps": 1e-4,
        "loss.beta": 0.01,
        "train.steps": 4,
        "train.checkpoint-every": 2,
        "train.samples-every": 0,
        "evaluation.prompts": 0,
        "evaluation.samples": 4,
        "train.out": work / out,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return ["blank", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]


def logged(folder: Path) -> list[dict]:
    timed = ("time/", "step_time", "perf/")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in read_jsonl(folder / "metrics.jsonl")]


def exported(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_chat_model_learns_in_two_turns(work):
    """The reward counts spaces, of which a random model of bytes writes few."""
    learning = {"optim__lr": 0.02, "train__steps": 15, "rollout__prompts": 4, "rollout__samples": 8, "loss__beta": 0}
    assert train.main(run_of(work, "learns", **learning, evaluation__prompts=4)) == 0
    lines = logged(work / "learns")
    assert all(line["sampling/logp_difference/max"] < 1e-5 for line in lines)  # exact across turns
    assert all(line["environment/num_turns"] == 2 for line in lines)
    assert all(line["environment/errors"] == 0 for line in lines)
    assert lines[-1]["rewards/spaces/mean"] > lines[0]["rewards/spaces/mean"] + 3


def test_rewards_are_those_of_the_environment(work):
    assert train.main(run_of(work, "rewards", train__steps=1)) == 0
    (line,) = logged(work / "rewards")
    assert line["rewards/spaces/mean"] == pytest.approx(line["environment/spaces"])
    total = line["environment/answer_length"] + 0.5 * line["environment/spaces"]
    assert line["rewards/total/mean"] == pytest.approx(total)
    digests = json.loads((work / "rewards" / "inputs.json").read_text())["digests"]
    assert digests["environment"] == digest_of(Path(verifiers_environments.__file__))


@pytest.mark.slow
def test_a_killed_run_resumes_with_identical_results(work):
    kill = Job(run_of(work, "killed"), "nlgrpo.train:PolicyTrainer.online_step", 4)
    ended = run_all([Job(run_of(work, "whole")), kill, Job(run_of(work, "killed"))])
    assert [end.status for end in ended] == [0, -signal.SIGKILL, 0], ended[-1].output
    assert "resuming from step 2" in ended[-1].output
    assert logged(work / "killed") == logged(work / "whole")
    assert exported(work / "killed") == exported(work / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["model", "block"])
def test_two_ranks_are_one(work, gather):
    """They need different numbers of rounds: conversations of odd questions fail after their first answer."""
    arguments = json.dumps({"turns": 3, "fault": "tool error"})
    changes = {
        "train__steps": 2,
        "parallel__gather-for-sampling": gather,
        "environment__args": arguments,
        "rollout__prompts": 4,
    }
    assert train.main(run_of(work, f"one-{gather}", **changes)) == 0
    ended = fork_ranks(partial(train.main, run_of(work, f"two-{gather}", **changes)))
    assert [end.status for end in ended] == [0, 0], ended[0].output
    one, two = logged(work / f"one-{gather}"), logged(work / f"two-{gather}")
    for a, b in zip(one, two, strict=True):
        assert a["environment/spaces"] == pytest.approx(b["environment/spaces"], abs=1e-9)
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-8)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "changes",
    [
        {"loss__algorithm": "ppo", "critic__lr": 0.01},
        {"loss__level": "sequence", "loss__epochs": 2},
        {"loss__correction": "tis:2", "rollout__top-k": 20},
        {"loss__normalization": "grpo", "loss__scale": "group"},
        {"lora__rank": 2},
        {"environment__args": '{"kind": "single"}'},
        {"environment__args": '{"fault": "tool error"}', "loss__normalization": "grpo", "rollout__prompts": 4},
        {"environment__renderer": "{}", "data__chat-template-kwargs": "{}"},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_other_algorithms(work, changes, tmp_path):
    assert train.main(run_of(work, tmp_path.name, train__steps=2, **changes)) == 0
    lines = logged(work / tmp_path.name)
    assert all(torch.isfinite(torch.tensor([line["loss"], line["grad_norm"]])).all() for line in lines)
    if "fault" in changes.get("environment__args", ""):
        assert any(0 < line["environment/errors"] < 1 for line in lines)


def test_the_gradient_is_that_of_the_sampled_tokens(work):
    """REINFORCE by hand, with transformers, on whole conversations and their masks."""
    reference = chat_model(work / "by-hand")
    model = decoder.load(work / "by-hand", **LIKE)
    generator = torch.Generator().manual_seed(3)

    def random_ids(count):
        return torch.randint(0, 250, (count,), generator=generator).tolist()

    prompt, dialogues = random_ids(5), []
    for i in range(4):
        turns = [
            Turn(prompt if t == 0 else random_ids(2 + t), answer, [-1.0] * len(answer), True)
            for t, answer in enumerate(random_ids(3 + i - t) for t in range(1 + i % 3))
        ]
        dialogues.append(Dialogue(turns, 0))
    nothing = Conversation([], {"reward": 0.0, "metrics": {}, "error": None})
    rollout = to_rollout(dialogues, [nothing] * 4, [prompt], 4)
    gain = torch.tensor([[0.5, -1.0, 2.0, -1.5]], dtype=torch.float64)
    optim = OptimConfig(max_grad_norm=0.0)
    learner = Learner(
        model=model, reference=None, optimizer=make_optimizer(model, optim), optim=optim,
        loss=LossConfig(beta=0.0, surrogate="reinforce", normalization="dapo"),
        ranks=Ranks(0, 1, torch.device("cpu")), temperature=1.0, max_new_tokens=8,
        micro_batch_limit=MicroBatchLimit(12, 12), seed=0,
    )  # fmt: skip
    learner.optimizer.step = lambda: gradients.update({name: p.grad.clone() for name, p in model.named_parameters()})
    gradients: dict[str, torch.Tensor] = {}
    learner.update(rollout, gain, step=0, lr=0.0, beta=0.0)
    tokens = sum(len(turn.tokens) for dialogue in dialogues for turn in dialogue.turns)
    loss = torch.zeros((), dtype=torch.float64)
    for advantage, dialogue in zip(gain[0], dialogues, strict=True):
        ids, mask = dialogue.ids(), []
        for turn in dialogue.turns:
            mask += [False] * len(turn.inserted) + [True] * len(turn.tokens)
        logps = reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        loss = loss - advantage * logps[torch.tensor(mask[1:])].sum() / tokens
    loss.backward()
    expected = reference.model.embed_tokens.weight.grad
    found = next(g for name, g in gradients.items() if g.shape == expected.shape and "embed" in name)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)  # its norms compute in float32


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__mixture": '{"a.jsonl": 1}'}, "the environment gives the prompts"),
        ({"loss__algorithm": "dpo"}, "not sampled from the reference"),
        ({"rewards__spaces__transform": "log"}, "not sampled from the reference"),
        ({"environment__max-tokens": 8}, "environment.max_tokens"),
        ({"environment__timeout": 0}, "environment.timeout"),
        ({"rewards__spaces__function": "environment(metric='space')"}, "has no metric 'space'; it has answer_length"),
        (
            {"environment__id": "", "data__source": "story-prompts", "data__chat-template-kwargs": "{}"},
            "needs 'environment'",
        ),
        ({"environment__id": "missing-one"}, "Could not import 'missing-one'"),
    ],
)
def test_what_is_refused(work, changes, message, capsys):
    assert train.main(run_of(work, "refused", train__restart=True, **changes)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["rollout", "evaluate"])
def test_commands_without_environments(work, command, capsys):
    from nlgrpo import cli

    arguments = run_of(work, command, evaluation__prompts=2)
    arguments = [part.replace("--train.out", "--out") for part in arguments]
    model = [str(work / "model")] if command == "evaluate" else []
    assert cli.main([command, *model, *arguments]) == 2
    assert "has no environments" in capsys.readouterr().err
