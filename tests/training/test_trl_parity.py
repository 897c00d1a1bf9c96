"""With the objective "mean", loss and gradients equal those of TRL 1.16.0's GRPOTrainer on the same tokens.

TRL's side is its own ``_compute_loss`` on a padded batch; ours is the plain forward of the same random Llama, its
completion tokens packed into one row, and `packed_loss`. Both in float32.
"""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from nlgrpo.kernels.reference import PolicyLossSettings
from nlgrpo.losses.policy import packed_loss, token_weights
from nlgrpo.objectives import importance_sampling
from nlgrpo.objectives.advantages import advantages
from nlgrpo.objectives.registry import Mean

V, MAX_LENGTH = 40, 9
GENERATION_TOKENS = 70  # of a generation batch that makes two optimiser steps, the one tested being smaller
PROMPTS = torch.tensor([3, 3, 3, 5, 5, 5])  # lengths; two prompts of three samples each
LENGTHS = torch.tensor([9, 1, 4, 7, 2, 6])


def random_llama(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
        pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(V)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", bos_token="w2")
    args = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")), use_cpu=True, bf16=False, report_to="none", num_generations=3,
        per_device_train_batch_size=6, max_completion_length=MAX_LENGTH, gradient_checkpointing=False,
        epsilon=0.1, epsilon_high=0.2, temperature=0.7,
    )  # fmt: skip
    trainer = GRPOTrainer(
        random_llama(0), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w4 w5", "w6 w7"]}), processing_class=tokenizer,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps, trainer.args.steps_per_generation = 1, 2
    trainer.model.train()
    return trainer


def left_padded(lengths, width):
    return (torch.arange(width) >= width - lengths[:, None]).long()


def completion_logprob(model, inputs, temperature):
    """Log-probabilities of the completion, (R, L), by the model's own forward."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    width = inputs["completion_ids"].shape[1]
    logits = LlamaForCausalLM.forward(model, input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]


@pytest.fixture(scope="module")
def inputs(trainer):
    """A padded batch as TRL's loss takes it, with log-probabilities of a perturbed sampler and of another reference."""
    g = torch.Generator().manual_seed(1)
    rewards = torch.randn(2, 3, generator=g)
    batch = {
        "prompt_ids": torch.randint(3, V, (6, 5), generator=g),
        "prompt_mask": left_padded(PROMPTS, 5),
        "completion_ids": torch.randint(3, V, (6, MAX_LENGTH), generator=g),
        "completion_mask": (torch.arange(MAX_LENGTH) < LENGTHS[:, None]).long(),
        "advantages": advantages(Mean().linearize(rewards), scale="group").flatten(),
        "num_items_in_batch": torch.tensor(GENERATION_TOKENS),
    }
    with torch.no_grad():
        here = completion_logprob(trainer.model, batch, trainer.temperature)
        there = completion_logprob(random_llama(7), batch, trainer.temperature)
    batch["old_per_token_logps"] = here + 0.2 * torch.randn(here.shape, generator=g)
    batch["ref_per_token_logps"] = here + 0.1 * (there - here)
    return batch


def theirs(trainer, inputs, loss_type, beta, bias_correction, level):
    trainer.loss_type, trainer.beta, trainer.importance_sampling_level = loss_type, beta, level
    trainer.args.use_bias_correction_kl = bias_correction
    trainer._metrics["train"].clear()
    loss = trainer._compute_loss(trainer.model, inputs)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


def ours(trainer, inputs, loss_type, beta, bias_correction, level, token_ratios=None, **options):
    keep = inputs["completion_mask"].bool()
    old, ref = inputs.get("old_per_token_logps"), inputs["ref_per_token_logps"]
    tokens = GENERATION_TOKENS / 2 if loss_type == "dapo" else int(LENGTHS.sum())
    weights = token_weights(loss_type, LENGTHS, sequences=6, tokens=tokens, max_length=MAX_LENGTH)
    return packed_loss(
        completion_logprob(trainer.model, inputs, trainer.temperature)[keep], None if old is None else old[keep],
        inputs["advantages"], keep.nonzero()[:, 0], weights, ref_logprob=ref[keep], level=level,
        token_ratios=token_ratios,
        settings=PolicyLossSettings(0.1, 0.2, beta=beta, kl="k3_iw" if bias_correction else "k3", **options),
    )  # fmt: skip


@pytest.mark.parametrize(("beta", "bias_correction"), [(0.0, False), (0.04, False), (0.04, True)])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("moved", [0, 1, 4])
def test_cispo_is_that_of_trl(trainer, inputs, beta, bias_correction, level, moved, monkeypatch):
    """On policy, off policy, and far off policy as after many epochs; TRL's epsilon_high is the cap itself."""
    monkeypatch.setattr(trainer, "epsilon_high", 1.2)
    keep = inputs["completion_mask"].bool()
    with torch.no_grad():
        here = completion_logprob(trainer.model, inputs, trainer.temperature)
    old = here + moved * (inputs["old_per_token_logps"] - here)
    inputs = {**inputs, "old_per_token_logps": old if moved else None}
    loss, metrics = theirs(trainer, inputs, "cispo", beta, bias_correction, level)
    truth = gradients(trainer.model, loss)
    our_loss, stats = ours(trainer, inputs, "dapo", beta, bias_correction, level, surrogate="cispo")
    mine = gradients(trainer.model, our_loss)
    assert our_loss.item() == pytest.approx(loss.item(), abs=1e-5, rel=1e-5)
    for name, gradient in truth.items():
        scale = gradient.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")
    ratio = (here - old).exp()[keep] if level == "token" else torch.stack(
        [(row[kept].mean()).exp() for row, kept in zip(here - old, keep, strict=True)]
    )  # fmt: skip
    assert stats["clip_high"] == (ratio > 1.2).sum()
    assert stats["clip_low"] == 0
    assert not moved or level == "sequence" or stats["clip_high"] > 0
    if level == "token":  # TRL counts those of A > 0 only
        positive = inputs["advantages"][keep.nonzero()[:, 0]] > 0
        share = ((ratio > 1.2) & positive).sum() / keep.sum()
        assert metrics["cispo_clip_ratio"] == pytest.approx(share.item(), abs=1e-6)
    if beta:
        assert (stats["kl"] / stats["tokens"]).item() == pytest.approx(metrics["kl"], rel=1e-4)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize(("beta", "bias_correction"), [(0.0, False), (0.0, True), (0.04, False), (0.04, True)])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_loss_and_gradients_are_those_of_trl(trainer, inputs, loss_type, beta, bias_correction, level, on_policy):
    settings = (loss_type, beta, bias_correction, level)
    if on_policy:
        inputs = {name: x for name, x in inputs.items() if name != "old_per_token_logps"}
    loss, metrics = theirs(trainer, inputs, *settings)
    truth = gradients(trainer.model, loss)
    our_loss, stats = ours(trainer, inputs, *settings)
    mine = gradients(trainer.model, our_loss)
    assert our_loss.item() == pytest.approx(loss.item(), abs=1e-5)
    for name, gradient in truth.items():
        scale = gradient.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")
    for part in ("low", "high", "region"):
        ratio = (stats[f"clip_{part}"] / stats["ratios"]).item()
        assert ratio == pytest.approx(metrics[f"clip_ratio/{part}_mean"], abs=1e-6)
    assert on_policy or level == "sequence" or stats["clip_low"] * stats["clip_high"] > 0, "both clips have to be met"
    if beta:
        assert (stats["kl"] / stats["tokens"]).item() == pytest.approx(metrics["kl"], rel=1e-4)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_dual_clip_is_trls_delta(trainer, inputs, level, monkeypatch):
    settings, delta = ("dapo", 0.04, False, level), 1.21
    without, _ = theirs(trainer, inputs, *settings)
    monkeypatch.setattr(trainer.args, "delta", delta)
    loss, _ = theirs(trainer, inputs, *settings)
    truth = gradients(trainer.model, loss)
    our_loss, stats = ours(trainer, inputs, *settings, dual_clip=delta)
    mine = gradients(trainer.model, our_loss)
    assert our_loss.item() == pytest.approx(loss.item(), abs=1e-5)
    assert level == "sequence" or (stats["clip_dual"] > 0 and abs(loss.item() - without.item()) > 1e-4)
    for name, gradient in truth.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


def test_advantages_are_those_of_trl(trainer):
    """TRL's formula for scale_rewards="group": its nanstd, then 1e-4."""
    from trl.trainer.utils import nanstd

    rewards = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    truth = (rewards - rewards.mean(1, keepdim=True)) / (nanstd(rewards, dim=1)[:, None] + 1e-4)
    torch.testing.assert_close(advantages(Mean().linearize(rewards), scale="group"), truth, atol=1e-5, rtol=1e-5)


# --- importance sampling ----------------------------------------------------------------------------------------------

CORRECTIONS = {
    "token_truncate": ("tis:1.1", "token", None, 1.1),
    "token_mask": ("mis:0.9:1.1", "token", 0.9, 1.1),
    "sequence_truncate": ("tis:1.05", "sequence", None, 1.05),
    "sequence_mask": ("mis:0.6:1.4", "sequence", 0.6, 1.4),
}


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("mode", CORRECTIONS)
def test_importance_sampling_is_that_of_trl(trainer, inputs, mode, loss_type, monkeypatch):
    """TRL computes ratios, metrics and loss from completions that a ``rollout_func`` returns with their log-probs."""
    text, level, low, high = CORRECTIONS[mode]
    prompts = [row[mask.bool()].tolist() for row, mask in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)]
    ids = [row[:n].tolist() for row, n in zip(inputs["completion_ids"], LENGTHS.tolist(), strict=True)]
    with torch.no_grad():
        here = completion_logprob(trainer.model, inputs, trainer.temperature)
    sampler = here + 0.2 * torch.randn(here.shape, generator=torch.Generator().manual_seed(5))
    rollout = {
        "prompt_ids": prompts,
        "completion_ids": ids,
        "logprobs": [row[:n].tolist() for row, n in zip(sampler, LENGTHS.tolist(), strict=True)],
    }
    for name, value in (
        ("use_vllm", True), ("vllm_importance_sampling_correction", True), ("vllm_importance_sampling_mode", mode),
        ("vllm_importance_sampling_clip_min", low), ("vllm_importance_sampling_clip_max", high),
        ("rollout_func", lambda prompts, trainer: rollout), ("_last_loaded_step", trainer.state.global_step),
        ("beta", 0.0), ("loss_type", loss_type), ("importance_sampling_level", "token"),
    ):  # fmt: skip
        monkeypatch.setattr(trainer, name, value, raising=False)
    trainer._metrics["train"].clear()
    scored = trainer._generate_and_score_completions([{"prompt": "w4"}] * 6)
    scored |= {name: inputs[name] for name in ("advantages", "num_items_in_batch")}
    loss = trainer._compute_loss(trainer.model, scored)
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    truth = gradients(trainer.model, loss)

    keep = inputs["completion_mask"].bool()
    correction = importance_sampling.parse_correction(text, level)
    ratios = correction.ratios(here, sampler, LENGTHS)
    assert (ratios.weights != ratios.uncut).any()
    assert (ratios.weights == ratios.uncut).any()
    our_inputs = inputs | {"old_per_token_logps": None}
    our_loss, _ = ours(trainer, our_inputs, loss_type, 0.0, False, "token", token_ratios=ratios.tokens[keep])
    mine = gradients(trainer.model, our_loss)
    assert our_loss.item() == pytest.approx(loss.item(), abs=1e-5)
    for name, gradient in truth.items():
        scale = gradient.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")
    for part in ("min", "mean", "max"):
        value = float(getattr(ratios.weights, part)())
        assert value == pytest.approx(metrics[f"sampling/importance_sampling_ratio/{part}"], rel=1e-5), part
