"""BoN-SFT, DPO, IPO and BoNBoN: the update against plain PyTorch on transformers' models in float64; runs on rollouts."""

import json
import math
from collections import Counter

import pytest
import torch
from helpers import tiny_model

from nlgrpo import model as models
from nlgrpo import offline, train
from nlgrpo.config import LossConfig, OfflineConfig, OptimConfig
from nlgrpo.learner import Learner, make_optimizer
from nlgrpo.parallel import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"))
TEMPERATURE, BETA, LR, EPS = 0.8, 0.3, 0.01, 1e-3
ALGORITHMS = ("bon_sft", "dpo", "ipo", "bonbon")
PROMPTS = ["w1 w2", "w3", "w4 w5 w6", "w7"]
REWARDS = """
def first(completion_ids, **_):
    # Tokens are worth their number modulo 8: some tie.
    return [float(ids[0] % 8) for ids in completion_ids]

def low(completion_ids, **_):
    return [-float(ids[0] >= 16) for ids in completion_ids]

def same(completion_ids, **_):
    return [1.0 for _ in completion_ids]

def mostly(completion_ids, **_):
    return [None if ids[0] % 5 == 0 else float(ids[0]) for ids in completion_ids]

def of_some(prompts, completion_ids, **_):
    # One value for every sample of the second prompt.
    return [0.0 if p == "w3" else float(ids[0] % 8) for p, ids in zip(prompts, completion_ids)]
"""


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """Pictures take longer than these runs."""
    monkeypatch.setattr(train.report, "write_report", lambda folder: folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("offline")
    tiny_model(root / "policy", "gpt2", seed=0, scale=0.6)
    tiny_model(root / "reference", "gpt2", seed=1, scale=0.6)
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    (root / "rewards.py").write_text(REWARDS)
    return root


# --- the update -------------------------------------------------------------------------------------------------------


def of_response(model, prompt, completion):
    """log pi(completion | prompt) by transformers' model."""
    logits = model(torch.tensor([prompt + completion])).logits[0] / TEMPERATURE
    where = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
    return logits.log_softmax(-1)[where, completion].sum()


def plain_loss(algorithm, sets, policy, reference, n, alpha):
    """By the formulas of the papers, one set at a time; the loss, and what is logged."""
    total, logged = torch.zeros((), dtype=torch.float64), Counter()
    for responses in sets:
        logps = [of_response(policy, *response) for response in responses]
        with torch.no_grad():
            refs = [of_response(reference, *response) for response in responses]
        logged["logps/chosen"] += float(logps[0].detach())
        if algorithm == "bon_sft":
            total = total - logps[0]
            continue
        ratios = [a - b for a, b in zip(logps, refs, strict=True)]
        h = ratios[0] - ratios[1]
        target = (n - 1) * sum(1 / k for k in range(1, n))
        total = total + {
            "dpo": -torch.sigmoid(BETA * h).log(),
            "ipo": (h - 1 / (2 * BETA)) ** 2,
            "bonbon": -alpha * logps[0] + (1 - alpha) * (h - target) ** 2,
        }[algorithm]  # fmt: skip
        beta = 1 / (2 * target) if algorithm == "bonbon" else BETA
        logged["logps/rejected"] += float(logps[1].detach())
        logged["rewards/chosen"] += beta * float(ratios[0].detach())
        logged["rewards/rejected"] += beta * float(ratios[1].detach())
        logged["rewards/margins"] += beta * float(h.detach())
        logged["rewards/accuracies"] += float(h > 0)
    return total / len(sets), {name: value / len(sets) for name, value in logged.items()}


def make_learner(root, loss, micro=20):
    policy, reference = (models.load(root / name, dtype=torch.float64) for name in ("policy", "reference"))
    optim = OptimConfig(eps=EPS, max_grad_norm=0.0)
    reference.requires_grad_(False)
    kept = reference if loss.has_reference else None
    return Learner(policy, kept, make_optimizer(policy, optim), loss, optim, ALONE, TEMPERATURE, 8, micro, 3)


SETS = [  # prompt and completion of the chosen, then of the rejected
    [([5, 6], [7, 8, 9]), ([5, 6], [10, 2])],
    [([5, 6], [11]), ([5, 6], [12, 13, 14, 15, 2])],
    [([9], [20, 21, 22, 23, 24, 25, 26]), ([9], [27])],
    [([4, 4, 8], [16, 2]), ([4, 4, 8], [17, 18])],
]


def chosen_of(sets):
    flat = [response for responses in sets for response in responses]
    return offline.Chosen([list(p) for p, _ in flat], [list(c) for _, c in flat], len(sets[0]), len(sets))


@pytest.mark.parametrize("micro", [20, 10**6], ids=["small micro-batches", "one micro-batch"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_update_is_that_of_plain_pytorch(root, algorithm, micro):
    theirs, frozen = (tiny_model(root / f"{key}-again", "gpt2", seed=i, scale=0.6) for i, key in enumerate("pr"))
    loss, own = LossConfig(algorithm, beta=BETA), OfflineConfig(n=4, alpha=0.2)
    learner = make_learner(root, loss, micro)
    sets = [responses[:1] for responses in SETS] if algorithm == "bon_sft" else SETS
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    for _ in range(2):  # in the second step the policy is not where it began
        stats = offline.update(learner, chosen_of(sets), own, LR)
        optimizer.zero_grad()
        value, logged = plain_loss(algorithm, sets, theirs, frozen, own.n, own.alpha)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), math.inf)
        optimizer.step()
        assert stats["loss"] == pytest.approx(float(value.detach()), rel=1e-10)
        assert stats["grad_norm"] == pytest.approx(float(norm), rel=1e-9)
        assert {name: stats[name] for name in logged} == pytest.approx(logged, rel=1e-9)
    near = {"rtol": 0, "atol": 1e-9}
    torch.testing.assert_close(learner.model.embed.weight, theirs.transformer.wte.weight, **near)
    torch.testing.assert_close(learner.model.blocks[1].down.weight, theirs.transformer.h[1].mlp.c_proj.weight.T, **near)
    assert stats["tokens"] == sum(len(p) + len(c) for responses in sets for p, c in responses)
    assert (stats["learning_rate"], stats["sets"]) == (LR, 4)


def test_without_a_set_nothing_moves(root):
    learner = make_learner(root, LossConfig("dpo", beta=BETA))
    offline.update(learner, chosen_of(SETS), OfflineConfig(), LR)  # fills the optimiser's moments
    before = learner.model.embed.weight.detach().clone()
    stats = offline.update(learner, offline.Chosen([], [], 2, 0), OfflineConfig(), LR)
    assert torch.equal(learner.model.embed.weight, before)
    assert stats == {"sets": 0, "grad_norm": 0.0, "learning_rate": LR, "tokens": 0}
