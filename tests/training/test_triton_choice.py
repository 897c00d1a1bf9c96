"""Whether a training step on a GPU would run Triton's kernels, asked without a GPU.

One step runs on the CPU, in the compute dtype of a GPU. Each call of an op is repeated up to its choice of the
implementation, with fake CUDA tensors of the same shapes, dtypes and requirements of a gradient.
"""

import json
import re
from importlib import import_module

import pytest
import torch
from support.helpers import REPOSITORY, random_rollout, tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode

from nlgrpo import train
from nlgrpo.kernels import dispatch
from nlgrpo.rewards.reward_functions import Scores
from nlgrpo.runtime.device import compute_dtype
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.global_batch import GlobalBatch

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

DTYPE = compute_dtype("auto", torch.device("cuda"))
STEPS = {  # settings: ops that the step calls
    (): {"linear_logprob", "linear_policy_loss", "linearize"},
    ("--loss.level", "sequence"): {"linear_logprob", "policy_loss", "linearize"},
}
ELSEWHERE = {"token_logprob", "sample_tokens"}  # for other trainers, which have logits; and in sampling


def on_cuda(x):
    if x is None:
        return None
    with FakeTensorMode():
        return torch.empty(x.shape, dtype=x.dtype, device="cuda", requires_grad=x.requires_grad)


@pytest.fixture
def chosen(monkeypatch):
    """The implementations that each op would choose on a GPU, {op: {"triton", "torch"}}, filled while a test runs."""
    found = {}

    def choose(impl, op, *tensors, **options):
        if not dispatch._in_torch:  # as the plan does with a few groups
            found.setdefault(op, set()).add(dispatch.choose(impl, op, *map(on_cuda, tensors), **options))
        return dispatch.choose(impl, op, *tensors, **options)

    def by_triton(impl, terms):
        on_gpu = by_triton_before(impl, type(terms)(*map(on_cuda, terms)))
        found.setdefault("policy_loss", set()).add("triton" if on_gpu else "torch")
        return by_triton_before(impl, terms)

    for name in ("linearize", "logprob", "linear_policy_loss"):
        monkeypatch.setattr(import_module(f"nlgrpo.kernels.{name}"), "choose", choose)
    policy_loss = import_module("nlgrpo.kernels.policy_loss")
    by_triton_before = policy_loss._by_triton
    monkeypatch.setattr(policy_loss, "_by_triton", by_triton)
    return found


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a model and prompts."""
    root = tmp_path_factory.mktemp("work")
    tiny_model(root / "model")
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(4)))
    return root


@pytest.mark.parametrize("settings", STEPS, ids=["defaults", "sequence-level ratios"])
def test_a_step_on_a_gpu_runs_tritons_kernels(work, tmp_path, chosen, settings):
    options = {
        "model.path": work / "model",
        "model.dtype": str(DTYPE).removeprefix("torch."),
        "data.source": work / "prompts.jsonl",
        "rewards.short.function": "length(target=3, scale=10)",
        "rollout.prompts": 2,
        "rollout.samples": 4,
        "rollout.max_new_tokens": 6,
        "train.steps": 1,
        "train.out": tmp_path / "run",
        "evaluation.prompts": 0,
    }
    given = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    assert train.main(["blank", *given, *settings]) == 0
    assert chosen == {op: {"triton"} for op in STEPS[settings]}


def test_these_are_all_ops_that_the_documentation_says_are_compiled_for_a_gpu():
    guide = (REPOSITORY / "docs/guides/kernels.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|.*GPU \|$", guide, re.M)) == set().union(*STEPS.values()) | ELSEWHERE
    for dtype in (DTYPE, torch.float32):
        assert dispatch.choose("auto", "token_logprob", on_cuda(torch.empty(2, 8, dtype=dtype))) == "triton"


def test_objectives_get_the_rewards_on_the_device_of_the_rank():
    rollout = random_rollout(torch.ones(2, 3, dtype=torch.int64), [1, 2])
    scores = Scores({"a": torch.zeros(2, 3, dtype=torch.float64)}, torch.zeros(2, dtype=torch.bool))
    groups = GlobalBatch.gather(Ranks(0, 1, torch.device("meta")), scores, rollout)
    assert [rewards.is_meta for rewards in groups.objective_inputs().values()] == [True]
