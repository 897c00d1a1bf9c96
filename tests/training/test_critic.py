"""PPO's update against plain PyTorch on transformers' models, in float64; and runs with a critic."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from support.helpers import random_rollout, tiny_model

from nlgrpo import train
from nlgrpo.config import schema, validate
from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import Config, CriticConfig, LossConfig, ModelConfig, OptimConfig, RewardConfig
from nlgrpo.model import decoder
from nlgrpo.objectives.registry import parse
from nlgrpo.runtime.device import MicroBatchLimit
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training import critic
from nlgrpo.training.global_batch import GlobalBatch
from nlgrpo.training.learner import Learner, make_optimizer
from nlgrpo.training.schedules import learning_rates, next_beta

pytestmark = pytest.mark.usefixtures("no_figures")

ALONE = Ranks(0, 1, torch.device("cpu"))
P, M, LIMIT, TEMPERATURE, BETA, LR, CRITIC_LR, EPS = 3, 2, 8, 0.8, 0.3, 0.01, 0.02, 1e-3
OPTIM = OptimConfig(eps=EPS, max_grad_norm=0.0)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def make_learner(root, cfg: Config) -> Learner:
    policy, reference = (decoder.load(root / name, dtype=torch.float64) for name in ("policy", "reference"))
    value = critic.make_critic(cfg, policy, ALONE, torch.float64)
    optimizer = make_optimizer(policy, cfg.optim, value.module)
    reference.requires_grad_(False)
    return Learner(
        policy, reference, optimizer, cfg.loss, cfg.optim, ALONE, TEMPERATURE, LIMIT, MicroBatchLimit(20, 20), 3, value
    )


def head_of(learner):
    module = learner.critic.module
    return module.weight if learner.critic.shared else module.head.weight


# --- plain PyTorch ----------------------------------------------------------------------------------------------------


def of_completion(model, prompt, completion):
    """Log-probs of a completion's tokens, and the last hidden states in which they were chosen."""
    out = model(torch.tensor([prompt + completion]), output_hidden_states=True)
    where = slice(len(prompt) - 1, len(prompt) + len(completion) - 1)
    logp = (out.logits[0, where] / TEMPERATURE).log_softmax(-1)
    return logp[torch.arange(len(completion)), completion], out.hidden_states[-1][0, where]


def plain_gae(rewards, values, gamma, lam):
    advantages, running = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(rewards) else 0.0
        running = rewards[t] + gamma * following - values[t] + gamma * lam * running
        advantages[t] = running
    return advantages


def plain_ppo(policy, reference, trunk, head, rollout, gain, cfg: Config):
    """The whole update of policy, ``trunk`` (the policy itself, where it is shared) and ``head``; in place."""
    shared = trunk is policy
    groups = [{"params": list(policy.parameters()), "lr": LR}, {"params": [head], "lr": CRITIC_LR}]
    if not shared:  # the value model's own unembedding is not part of it
        groups[1]["params"] += list(trunk.parameters())
    optimizer = torch.optim.AdamW(groups, eps=EPS, weight_decay=0.0)
    prompts = [p for p in rollout.prompt_ids for _ in range(M)]
    pairs = list(zip(prompts, rollout.completion_ids(), strict=True))
    targets = []
    with torch.no_grad():
        for (prompt, completion), final_reward in zip(pairs, gain.flatten().tolist(), strict=True):
            old, hidden = of_completion(policy, prompt, completion)
            ref, _ = of_completion(reference, prompt, completion)
            own = hidden if shared else of_completion(trunk, prompt, completion)[1]
            values = own @ head[0]
            rewards = -BETA * (old - ref) if cfg.loss.kl_in == "reward" else torch.zeros_like(old)
            rewards[-1] += final_reward
            gae_advantages = plain_gae(rewards.tolist(), values.tolist(), cfg.critic.gamma, cfg.critic.lam)
            advantages = torch.tensor(gae_advantages, dtype=torch.float64)
            targets.append([old, ref, values, advantages, advantages + values])
    if cfg.critic.whiten:
        every = torch.cat([advantages for *_, advantages, _ in targets])
        for entry in targets:
            entry[3] = (entry[3] - every.mean()) / (every.std() + 1e-8)
    count = sum(len(completion) for _, completion in pairs)
    for _ in range(cfg.loss.epochs):
        total = torch.zeros((), dtype=torch.float64)
        for (prompt, completion), (old, ref, before, advantages, returns) in zip(pairs, targets, strict=True):
            logp, hidden = of_completion(policy, prompt, completion)
            values = (hidden if shared else of_completion(trunk, prompt, completion)[1]) @ head[0]
            ratio = (logp - old).exp()
            gains = torch.min(ratio * advantages, ratio.clip(1 - cfg.loss.eps_low, 1 + cfg.loss.eps_high) * advantages)
            near = before + (values - before).clip(-cfg.critic.clip, cfg.critic.clip)
            errors = torch.max((values - returns) ** 2, (near - returns) ** 2) / 2
            k3 = (ref - logp).exp() - (ref - logp) - 1
            kl = BETA * ratio * k3 if cfg.loss.kl_in == "loss" else 0
            total = total + (-gains + kl + cfg.critic.coef * errors).sum() / count
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    return float(total.detach())


CASES = {
    "own": (LossConfig("ppo", beta=BETA, kl_in="reward", epochs=3), CriticConfig(clip=0.05)),
    "shared": (LossConfig("ppo", beta=BETA, kl_in="reward", epochs=3), CriticConfig(trunk="shared", clip=0.05)),
    "kl in the loss": (LossConfig("ppo", beta=BETA, epochs=2), CriticConfig(whiten=False, gamma=0.9, lam=0.5)),
    "clipped ratios": (
        LossConfig("ppo", beta=BETA, kl_in="reward", epochs=3, eps_low=0.01, eps_high=0.02),
        CriticConfig(trunk="shared", coef=2.0, lam=1.0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_update_is_that_of_plain_pytorch(root, name):
    loss, values = CASES[name]
    theirs = {key: tiny_model(root / key, "gpt2", seed=seed) for seed, key in enumerate(("policy", "reference"))}
    trunk = theirs["policy"] if values.trunk == "shared" else tiny_model(root / "value", "gpt2", seed=2)
    values = values if values.trunk == "shared" else replace(values, path=str(root / "value"))
    cfg = Config(model=ModelConfig(str(root / "policy")), loss=loss, critic=values, optim=OPTIM)
    learner = make_learner(root, cfg)
    assert head_of(learner).abs().max() == 0  # a new head predicts 0
    with torch.no_grad():
        head_of(learner).copy_(0.3 * torch.randn(1, 16, generator=torch.Generator().manual_seed(4)))
    head = head_of(learner).detach().clone().requires_grad_()
    rollout = random_rollout(torch.tensor([[8, 3], [1, 5], [8, 8]]), [1, 4, 2])
    gain = torch.randn(P, M, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ref = learner.reference_logprobs(rollout)
    stats = learner.update(rollout, gain, step=0, lr=LR, critic_lr=CRITIC_LR, beta=BETA, ref_logprobs=ref)
    plain_ppo(theirs["policy"], theirs["reference"], trunk, head, rollout, gain, cfg)
    near = {"rtol": 0, "atol": 1e-9}
    torch.testing.assert_close(head_of(learner), head, **near)
    torch.testing.assert_close(learner.model.embed.weight, theirs["policy"].transformer.wte.weight, **near)
    block = theirs["policy"].transformer.h[1].mlp.c_proj.weight.T
    torch.testing.assert_close(learner.model.blocks[1].down.weight, block, **near)
    if values.trunk == "own":
        own = learner.critic.module
        torch.testing.assert_close(own.embed.weight, trunk.transformer.wte.weight, **near)
        torch.testing.assert_close(own.blocks[0].qkv.weight, trunk.transformer.h[0].attn.c_attn.weight.T, **near)
    assert 0 < stats["value/clip_ratio"] < 1 or values.clip > 0.1
    assert stats["clip_ratio/region_mean"] > 0


def test_dropped_completions_do_not_train_the_critic(root):
    for key in ("policy", "reference"):
        tiny_model(root / key, "gpt2")
    loss, values = CASES["shared"]
    cfg = Config(model=ModelConfig(str(root / "policy")), loss=loss, critic=values, optim=OPTIM)
    rollout = random_rollout(torch.tensor([[8, 3], [1, 5], [8, 8]]), [1, 4, 2])
    gain = torch.randn(P, M, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dropped = torch.tensor([False, True, False])
    heads = []
    for lost in (0.0, 50.0):
        learner = make_learner(root, cfg)
        ref = learner.reference_logprobs(rollout)
        moved = gain + lost * dropped[:, None]
        rates = {"lr": LR, "critic_lr": CRITIC_LR}
        learner.update(rollout, moved, step=0, **rates, beta=BETA, ref_logprobs=ref, dropped=dropped)
        heads.append(head_of(learner).detach().clone())
    torch.testing.assert_close(*heads, rtol=0, atol=0)
    assert heads[0].abs().max() > 0


# --- whole runs -------------------------------------------------------------------------------------------------------


def arguments(root, out, *more):
    return [
        *("blank", "--model.path", str(root / "policy"), "--data.source", str(root / "prompts.jsonl")),
        *("--rewards.few.function", "length(target=2, scale=8)", "--rewards.few.objective", "mean"),
        *("--rollout.prompts", "4", "--rollout.samples", "4", "--rollout.max_new_tokens", "8", "--loss.beta", "0.01"),
        *("--evaluation.prompts", "2", "--evaluation.samples", "2", "--evaluation.ns", "1", "--optim.lr", "3e-3"),
        *("--loss.algorithm", "ppo", "--loss.baseline", "none", "--critic.lr", "1e-2", "--train.out", str(out), *more),
    ]


@pytest.fixture(scope="module")
def prompts(root):
    tiny_model(root / "policy")
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(12)))


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("trunk", "algorithm"), [("own", "adamw"), ("shared", "adamw"), ("own", "muon")])
def test_a_run_resumes_bit_for_bit(root, prompts, tmp_path, trunk, algorithm):
    more = ("--critic.trunk", trunk, "--critic.warmup_steps", "2", "--loss.epochs", "2", "--loss.kl_in", "reward")
    more += ("--optim.algorithm", algorithm, "--optim.weight_decay", "0.1")
    assert train.main(arguments(root, tmp_path / "whole", "--train.steps", "6", *more)) == 0
    assert train.main(arguments(root, tmp_path / "halves", "--train.steps", "3", *more)) == 0
    assert train.main(arguments(root, tmp_path / "halves", "--train.steps", "6", *more)) == 0
    whole, halves = (metrics_of(tmp_path / name) for name in ("whole", "halves"))
    timed = ("time/", "step_time", "perf/")
    for a, b in zip(whole, halves, strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(timed)} == {
            k: v for k, v in b.items() if not k.startswith(timed)
        }
    states = [decoder.load(tmp_path / name / "model").state_dict() for name in ("whole", "halves")]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert [step["learning_rate"] for step in whole] == [0, 0, 3e-3, 3e-3, 3e-3, 3e-3]
    assert whole[1]["kl"] == pytest.approx(0, abs=1e-12)  # only the critic has been trained
    assert whole[1]["value/loss"] != whole[0]["value/loss"]


def test_policy_and_critic_learn(root, prompts, tmp_path):
    assert train.main(arguments(root, tmp_path / "run", "--train.steps", "40")) == 0
    steps = metrics_of(tmp_path / "run")
    first, last = steps[:4], steps[-4:]
    assert sum(s["reward"] for s in last) > sum(s["reward"] for s in first) + 0.4
    assert sum(s["value/loss"] for s in last) < sum(s["value/loss"] for s in first) / 2


def test_a_checkpoint_with_a_critic_can_initialize_a_reward_model(root, prompts, tmp_path):
    from nlgrpo.model import reward_model

    assert train.main(arguments(root, tmp_path / "run", "--train.steps", "2")) == 0
    begun, _ = reward_model.load_reward_model(str(tmp_path / "run" / "checkpoints" / "step-00000002"))
    exported = decoder.load(tmp_path / "run" / "model")
    assert torch.equal(begun.blocks[0].qkv.weight, exported.blocks[0].qkv.weight)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"critic": CriticConfig(gamma=1.5)}, r"critic.gamma = 1.5: allowed is in \[0, 1\]"),
        ({"critic": CriticConfig(lam=-1.0)}, r"critic.lam = -1.0: allowed is in \[0, 1\]"),
        ({"critic": CriticConfig(lr=-1.0)}, "critic.lr = -1.0: allowed is >= 0"),
        ({"critic": CriticConfig(clip=0.0)}, "critic.clip = 0.0: allowed is > 0"),
        ({"critic": CriticConfig(coef=0.0)}, "critic.coef = 0.0: allowed is > 0"),
        ({"critic": CriticConfig(warmup_steps=-1)}, "critic.warmup_steps = -1"),
        ({"critic": CriticConfig(path="a", trunk="shared")}, "critic.path = 'a': critic.trunk = 'shared' has no model"),
        ({"loss": LossConfig("ppo", level="sequence")}, "loss.level = 'sequence'"),
        (
            {"loss": LossConfig("ppo", scale="batch")},
            "loss.scale = 'batch' needs a baseline, .* PPO does not have: use critic.whiten",
        ),
    ],
)
def test_an_invalid_configuration_is_refused(changed, message):
    cfg = Config(rewards={"a": RewardConfig("length(target=2, scale=8)")}, loss=LossConfig("ppo"))
    validate.check_config(replace(cfg, critic=CriticConfig(clip=float("inf"))))
    with pytest.raises(ValueError, match=message):
        validate.check_config(replace(cfg, **changed))


def test_a_group_of_one_needs_no_baseline_with_a_critic():
    cfg, _ = from_arguments(["length-mean", "--loss.algorithm", "ppo", "--loss.baseline", "none"])
    alone = replace(cfg, rollout=replace(cfg.rollout, samples=1))
    validate.check_config(alone)
    assert schema.to_dict(cfg)["critic"]["trunk"] == "own"
    for objective in ("soft:0.1", "erm:2", "bop:3", "cvar:0.5", "bon:4"):  # of one sample, two of them are constant
        rewards = {"a": RewardConfig("length(target=2, scale=8)", objective)}
        if objective in ("soft:0.1", "erm:2"):
            with pytest.raises(ValueError, match=r"needs rollout\.samples >= 2"):
                validate.check_config(replace(alone, rewards=rewards))
        else:
            validate.check_config(replace(alone, rewards=rewards))


# --- completions without a reward -------------------------------------------------------------------------------------


def test_which_completions_have_a_reward():
    rewards = {name: torch.tensor([[1.0, torch.nan, 2.0], [torch.nan] * 3]) for name in ("a", "b", "c")}
    rewards["b"] = torch.tensor([[torch.nan, torch.nan, 2.0], [torch.nan, torch.nan, 5.0]])
    groups = GlobalBatch(rewards, {}, {}, *[torch.zeros(2, 3)] * 2, torch.zeros(2), slice(0, 2), 0, 0, {}, {})
    means = {"a": parse("mean"), "b": parse("mean"), "c": parse("mean")}
    of_a = [[True, False, True], [False] * 3]
    assert groups.has_reward(means, torch.tensor([1.0, 0.0, 0.0])).tolist() == of_a
    assert groups.has_reward(means, torch.tensor([1.0, -1.0, 0.0])).tolist() == [of_a[0], [False, False, True]]
    of_prompts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    assert groups.has_reward(means, of_prompts).tolist() == [of_a[0], [False, False, True]]
    pair = means | {"b": parse("bon:2:unbiased")}  # which needs two
    assert groups.has_reward(pair, torch.tensor([1.0, 1.0, 0.0])).tolist() == of_a


def test_a_completion_without_a_reward_is_not_trained_on(root, prompts, tmp_path):
    """An abstention is not a reward of 0."""
    (root / "judge.py").write_text(
        "def some(completion_ids, **_):\n"
        "    return [None if ids[0] % 2 else 5.0 for ids in completion_ids]\n"
        "def all(completion_ids, **_):\n"
        "    return [5.0 for ids in completion_ids]\n"
    )
    found = {}
    for name in ("some", "all"):
        more = (
            "--rewards.r.function",
            f"{root / 'judge.py'}:{name}",
            "--rewards.few.weight",
            "0",
            "--critic.lr",
            "0.05",
        )
        more += ("--rewards.r.objective", "mean", "--train.steps", "30")
        assert train.main(arguments(root, tmp_path / name, *more)) == 0
        found[name] = metrics_of(tmp_path / name)
    means = {name: steps[-1]["value/return_mean"] for name, steps in found.items()}
    assert means["some"] == pytest.approx(means["all"], abs=0.5)  # with zeros among them it would be about 2.5


# --- when it begins ---------------------------------------------------------------------------------------------------


def test_the_policys_schedule_starts_after_the_critics_warm_up():
    given = ["length-mean", "--loss.algorithm", "ppo", "--critic.warmup_steps", "3", "--train.steps", "7"]
    given += ["--optim.lr", "1", "--critic.lr", "10", "--optim.warmup_steps", "2", "--optim.schedule", "linear"]
    cfg, _ = from_arguments([*given, "--loss.target_kl", "0.1", "--loss.beta", "1"])
    assert [learning_rates(cfg, step)["lr"] for step in range(7)] == [0, 0, 0, 0.5, 1, 1, 0.5]
    assert [learning_rates(cfg, step)["critic_lr"] for step in range(3)] == [5, 10, 10]
    assert [next_beta(cfg, step, 1.0, 0.0) for step in range(3)] == [1, 1, 1]  # the policy is not trained yet
    assert next_beta(cfg, 3, 1.0, 0.0) < 1


# --- its model, before a run begins -----------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "not-there"),
        ({"vocab_size": 40}, "has a vocabulary of 40 tokens, but the policy's has 32"),
        ({"n_positions": 6}, "has a context of 6 tokens, but a prompt and its completion can have"),
    ],
)
def test_an_unsuitable_critic_is_reported_before_a_run_is_removed(root, prompts, tmp_path, capsys, changed, message):
    given = arguments(root, tmp_path / "run", "--train.steps", "1")
    assert train.main(given) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    path = tmp_path / "not-there"
    if changed:
        path = tmp_path / "critic"
        shape = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 32} | changed
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).save_pretrained(path)
    for more in (["--dry-run"], ["--train.restart"]):
        assert train.main([*given, "--critic.path", str(path), *more]) == 2
        assert message in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
