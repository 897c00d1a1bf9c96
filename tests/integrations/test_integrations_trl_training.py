"""Three steps of TRL 1.16's trainer with each kind of objective, and with an aggregate of several.

Rewards are computed from the completions that TRL samples. TRL's advantages are compared with sums over all draws or
all subsets, autograd, and integrals by the trapezoidal rule.
"""

import asyncio
import math

import pytest
import torch
from datasets import Dataset
from support.helpers import tiny_model
from support.trl_truths import PAIRWISE, TRUTH, M, numbers, of_aggregate
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from nlgrpo.integrations.trl import aggregated, linearized

P = 3


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
    untrained: dict[str, torch.Tensor]

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
    trainer = RecordingTrainer(model, functions, args, train_dataset=data, processing_class=tokenizer)
    trainer.untrained = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    return trainer


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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("objective", [name for name in TRUTH if name != "bon:3"])
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
    trainer.model.load_state_dict(trainer.untrained)  # other tests have trained it
    trainer.model.train()
    torch.manual_seed(13)  # with it, half of the completions end early
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
