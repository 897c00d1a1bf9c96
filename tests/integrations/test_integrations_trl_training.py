"""Three steps of TRL 1.16's trainer with each kind of objective, and with an aggregate of several.

Rewards are computed from the completions that TRL samples. TRL's advantages are compared with sums over all draws or
all subsets, autograd, and integrals by the trapezoidal rule.
"""

import asyncio
import functools
import itertools
import math

import pytest
import torch
from datasets import Dataset
from helpers import tiny_model
from scipy.stats import norm
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from nlgrpo.integrations.trl import aggregated, linearized

M, P = 4, 3
numbers, zeros = (functools.partial(make, dtype=torch.float64) for make in (torch.tensor, torch.zeros))
TABLE = [2.0, 1.5, 0.5, -0.25]


# ---- expected first variation and value of a group with rewards (M,) or similarities (M, M) ----


def by_autograd(R, r):
    """The gradient of R(p) at p = 1/M is the first variation, up to a constant."""
    p = torch.full_like(r, 1 / len(r), requires_grad=True)
    value = R(p, r)
    (gradient,) = torch.autograd.grad(value, p)
    return gradient - gradient.mean(), value.item()


def best(n, p, r):
    draws = torch.cartesian_prod(*[torch.arange(len(r))] * n).view(-1, n)
    return (p[draws].prod(-1) * r[draws].amax(-1)).sum()


def best_of_poisson(rate, p, r):
    chances = [math.exp(-rate) * rate**k / math.factorial(k) for k in range(1, 40)]
    order = r.argsort()
    cdf = torch.cat((zeros(1), p[order].cumsum(0)))
    return sum(chance * (r[order] * (cdf**k).diff()).sum() for k, chance in enumerate(chances, 1))


def tilted(tau, p, r):
    e = p * (r / tau).exp()
    return (e * r).sum() / e.sum()


def by_subsets(n, h, data):
    """Mean of h over all subsets of n samples (the value), and over those that contain sample j (first variation)."""
    size = len(data)
    mean = lambda chosen: sum(h(data, list(s)) for s in chosen) / len(chosen)  # noqa: E731
    every = list(itertools.combinations(range(size), n))
    containing = numbers([n * mean([s for s in every if j in s]) for j in range(size)])
    return size / (size - n) * (containing - containing.mean()), mean(every)


def log_det(kernel, s):
    return (kernel[s][:, s] + 1e-3 * torch.eye(len(s), dtype=kernel.dtype)).logdet().item()


def worst_half(r):
    """-(q - r)^+ / 0.5 at the quantile q (Rockafellar and Uryasev); the value is the mean of the two worst."""
    ordered = r.sort().values
    linear = -(ordered[2] - r).clamp(min=0) / 0.5
    return linear - linear.mean(), ordered[:2].mean().item()


def smoothed_best(n, r):
    low, high = r.quantile(numbers([0.25, 0.75]))
    h = 0.9 * (min(r.std(), (high - low) / 1.34) if high > low else r.std()) * len(r) ** -0.2
    at = torch.cat((torch.linspace(float(r.min() - 9 * h), float(r.max() + 9 * h), 100_001, dtype=r.dtype), r))
    at = at.sort().values
    cdf = torch.from_numpy(norm.cdf(((at[:, None] - r) / h).numpy())).mean(-1) if h > 0 else torch.ones_like(at)
    below = torch.cat((zeros(1), torch.cumulative_trapezoid(n * cdf ** (n - 1), at)))
    linear = below[torch.searchsorted(at, r)]
    return linear - linear.mean(), float(at[-1] - torch.trapezoid(cdf**n, at))


def by_table(table, r):
    ordered, places = r.sort()
    linear = zeros(len(r))
    for j, place in enumerate(places):
        linear[place] = -sum(table[k] * (ordered[k + 1] - ordered[k]) for k in range(j, len(r) - 1))
    return linear - linear.mean(), sum(w * x for w, x in zip(table, ordered.tolist(), strict=True)) / len(r)


def worst(n, r):
    linear, value = by_autograd(functools.partial(best, n), -r)
    return -linear, -value


TRUTH = {
    "mean": lambda r: (r - r.mean(), r.mean().item()),
    "bon:4": functools.partial(by_autograd, functools.partial(best, 4)),
    "bon:2:unbiased": functools.partial(by_subsets, 2, lambda r, s: r[s].max().item()),
    "wor:3": functools.partial(worst, 3),
    "bop:2": functools.partial(by_autograd, functools.partial(best_of_poisson, 2.0)),
    "cvar:0.5": worst_half,
    "soft:0.5": functools.partial(by_autograd, functools.partial(tilted, 0.5)),
    "erm:1": functools.partial(by_autograd, lambda p, r: (p * r.exp()).sum().log()),
    "bon:4:kde": functools.partial(smoothed_best, 4),
    "distortion:2,1.5,0.5,-0.25": functools.partial(by_table, TABLE),
    "rao": functools.partial(by_subsets, 2, lambda kernel, s: -kernel[s[0], s[1]].item()),
    "dpp:2": functools.partial(by_subsets, 2, log_det),
}
PAIRWISE = ("rao", "dpp:2")


def expected(objective, groups):
    """First variations (P * M,) of the groups, and the mean of their values."""
    pairs = [TRUTH[objective](group) for group in groups]
    return torch.cat([x for x, _ in pairs]), sum(value for _, value in pairs) / len(pairs)


def close(ours, truth):
    assert truth.abs().max() > 1e-3
    torch.testing.assert_close(ours.double(), truth.double(), rtol=1e-5, atol=1e-5)


# ---- rewards of sampled completions, which record what they return ----


class RecordedRewards:
    def __init__(self):
        self.seen = {"tokens": [], "late": [], "alike": []}

    def tokens(self, completion_ids, **_):
        """With ties."""
        values = [len(set(ids)) + ids[0] % 3 / 2 for ids in completion_ids]
        self.seen["tokens"].append(numbers(values).view(-1, M))
        return values

    async def late(self, completion_ids, **_):
        await asyncio.sleep(0.01)
        values = [math.sin(sum(ids)) for ids in completion_ids]
        self.seen["late"].append(numbers(values).view(-1, M))
        return values

    def alike(self, completion_ids, samples, **_):
        """Similarity of the sums of token ids: 1 if they are equal."""
        points = numbers([float(sum(ids)) for ids in completion_ids]).view(-1, samples)
        kernel = (-((points[:, :, None] - points[:, None, :]) / 8).square()).exp()
        self.seen["alike"].append(kernel)
        return kernel.flatten(0, 1).tolist()


class RecordingTrainer(GRPOTrainer):
    advantages = ()

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.advantages.append(output["advantages"])
        return output


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    tiny_model(folder)
    args = GRPOConfig(
        output_dir=str(folder / "out"), use_cpu=True, bf16=False, report_to="none", num_generations=M,
        per_device_train_batch_size=P * M, max_completion_length=4, gradient_checkpointing=False, scale_rewards="none",
        loss_type="dr_grpo", learning_rate=1e-2, logging_steps=1, disable_tqdm=True, save_strategy="no", max_steps=3,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": ["w4 w5", "w6 w7", "w8"]})
    model, tokenizer = (load.from_pretrained(folder) for load in (AutoModelForCausalLM, AutoTokenizer))
    # One of them is async, so that TRL starts its event loop.
    functions = [linearized(reward, "mean", M) for reward in (RecordedRewards().tokens, RecordedRewards().late)]
    return RecordingTrainer(model, functions, args, train_dataset=data, processing_class=tokenizer)


def trained(trainer, function):
    """Train for three steps with a reward function. Return the advantages and the log entries of each."""
    trainer.reward_funcs, trainer.reward_func_names = [function], [function.__name__]
    trainer.reward_processing_classes, trainer.reward_weights = [None], torch.ones(1)
    trainer.advantages = []
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert any((old != new).any() for old, new in zip(before, trainer.model.parameters(), strict=True))
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(trainer.advantages) == len(logs) == 3
    return trainer.advantages, logs


@pytest.mark.parametrize("objective", TRUTH)
def test_every_objective_trains(trainer, objective):
    rewards = RecordedRewards()
    name = "alike" if objective in PAIRWISE else "tokens"
    advantages, logs = trained(trainer, linearized(getattr(rewards, name), objective, M))
    largest = 0.0
    for ours, log, groups in zip(advantages, logs, rewards.seen[name], strict=True):
        truth, value = expected(objective, groups)
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)
        assert log[f"objective/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-5)
        mean = value if objective in PAIRWISE else groups.mean().item()
        assert log[f"rewards/{name}/mean"] == pytest.approx(mean, rel=1e-5, abs=1e-5)
        largest = max(largest, truth.abs().max().item())
    assert largest > 0.1
    assert max(log["grad_norm"] for log in logs) > 0


def of_aggregate(g, pairs):
    """sum_i dg/dR_i (first variation of R_i) at the values over the batch, and g; ``pairs``: results of `expected`."""
    R = numbers([value for _, value in pairs], requires_grad=True)
    aggregate = g(R)
    (gradient,) = torch.autograd.grad(aggregate, R)
    return sum(w * x for w, (x, _) in zip(gradient, pairs, strict=True)), aggregate.item()


def test_an_aggregate_of_three_kinds_trains(trainer):
    rewards, kinds = RecordedRewards(), {"tokens": "bon:4", "late": "wor:3", "alike": "rao"}
    functions = [getattr(rewards, name) for name in kinds]
    advantages, logs = trained(trainer, aggregated(functions, list(kinds.values()), M, "smooth_min:0.7"))
    for step in range(3):
        pairs = [expected(objective, rewards.seen[name][step]) for name, objective in kinds.items()]
        truth, aggregate = of_aggregate(lambda R: -(-0.7 * R).exp().mean().log() / 0.7, pairs)
        close(advantages[step], truth)
        assert logs[step]["objective/aggregate"] == pytest.approx(aggregate, rel=1e-5, abs=1e-5)
        for name, (_, value) in zip(kinds, pairs, strict=True):
            assert logs[step][f"objective/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-5)
        for name in ("tokens", "late"):
            mean = rewards.seen[name][step].mean().item()
            assert logs[step][f"rewards/{name}/mean"] == pytest.approx(mean, rel=1e-5, abs=1e-5)


# ---- gradients of TRL's losses ----


def gradient_of(loss, model):
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()))]).double()


@pytest.fixture(scope="module")
def step(trainer):
    """A batch that TRL sampled for best-of-4, and the mean of A_j grad log pi(y_j) over its completions."""
    trainer.reward_funcs, trainer.reward_func_names = [linearized(RecordedRewards().tokens, "bon:4", M)], ["tokens"]
    trainer.reward_processing_classes, trainer.reward_weights = [None], torch.ones(1)
    trainer.current_gradient_accumulation_steps, trainer.advantages = 1, []
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": f"w{4 + i // M}"} for i in range(P * M)])
    ids, mask = inputs["completion_ids"], inputs["completion_mask"]
    assert len(set(mask.sum(1).tolist())) > 1, "completions of several lengths"
    sequences = torch.cat((inputs["prompt_ids"], ids), 1)
    logits = trainer.model(sequences, attention_mask=torch.cat((inputs["prompt_mask"], mask), 1)).logits
    logprobs = logits[:, -1 - ids.shape[1] : -1].log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return inputs, gradient_of(-(inputs["advantages"] * (logprobs * mask).sum(1)).mean(), trainer.model)


@pytest.mark.parametrize("loss", ["dr_grpo", "luspo", "dapo", "cispo", "vespo", "grpo", "sapo"])
def test_the_gradient_of_each_loss_type(trainer, step, monkeypatch, loss):
    inputs, truth = step
    monkeypatch.setattr(trainer, "loss_type", loss)
    if loss == "cispo":
        monkeypatch.setattr(trainer, "epsilon_high", 5.0)
    ours = gradient_of(trainer._compute_loss(trainer.model, dict(inputs)), trainer.model)
    cosine = torch.nn.functional.cosine_similarity(ours, truth, dim=0).item()
    if loss in ("grpo", "sapo"):
        assert cosine < 0.999
    else:
        assert cosine == pytest.approx(1, abs=1e-6)
    if loss in ("dr_grpo", "luspo"):
        constant = 1 if loss == "luspo" else trainer.max_completion_length
        torch.testing.assert_close(constant * ours, truth, rtol=1e-3, atol=1e-5)


def test_trls_default_scaling_logs_a_warning(trainer, caplog, monkeypatch):
    monkeypatch.setattr(trainer, "scale_rewards", "group")
    function = linearized(lambda **_: [1.0, 2.0, 3.0, 3.0], "bon:4", M)
    function(prompts=["p"] * M, completions=["c"] * M, log_metric=trainer._log_metric)
    trainer._pending_metrics.clear()
    assert 'set scale_rewards="none"' in caplog.text
