"""Synchronizations of a micro-batch in the update, by line, counted on the fake device.

The host must run ahead of the device: each place where it waits costs the time in which the device has nothing to do.
"""

from dataclasses import replace

import pytest
import torch
import transformers
from support.fake_cuda import on_fake_cuda
from support.helpers import random_rollout

from nlgrpo.config.schema import LossConfig, OptimConfig
from nlgrpo.model import adapters, decoder, lora
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime.device import MicroBatchLimit
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.learner import Learner, make_optimizer

SYNCHRONIZATIONS = 3  # of a micro-batch; where the code needs fewer, lower it
SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
P, M = 4, 2
LOSSES = {
    "grpo": LossConfig(beta=0.0),
    "kl": LossConfig(beta=0.1),
    "cispo": LossConfig(beta=0.0, surrogate="cispo"),
    "gspo": LossConfig(beta=0.0, level="sequence"),
    "lora": LossConfig(beta=0.1),
}


def make_learner(loss, micro_batch_tokens, adapter=None):
    model = decoder.build(transformers.Qwen2Config(**SIZES))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2, generator=generator)
    if adapter is None:
        model.to(torch.bfloat16)
    else:
        lora.attach(model, adapter, torch.bfloat16)
        adapters.init_adapters(model, adapter, 0)
    model.to("cuda:0")
    optim = OptimConfig()
    return Learner(
        model=model,
        reference=model if loss.beta > 0 else None,
        optimizer=make_optimizer(model, optim),
        loss=loss,
        optim=optim,
        ranks=Ranks(0, 1, torch.device("cuda", 0)),
        temperature=1.0,
        max_new_tokens=8,
        micro_batch_limit=MicroBatchLimit(micro_batch_tokens, micro_batch_tokens),
        seed=0,
    )


def on_device(rollout):
    names = ("tokens", "logprobs", "lengths", "finished")
    return replace(rollout, **{name: getattr(rollout, name).to("cuda:0") for name in names})


def per_micro_batch(device, name):
    """Counts of a micro-batch in `Learner.update`: the same rollout in four micro-batches, and in two."""
    lengths = torch.full((P, M), 8)
    rollout = on_device(random_rollout(lengths, [5] * P))
    advantages = torch.linspace(-1, 1, P * M, dtype=torch.float64).view(P, M).to("cuda:0")
    counts = {}
    for groups in (1, 2):
        learner = make_learner(LOSSES[name], groups * (5 + 7 * M), LoraConfig(rank=2) if name == "lora" else None)
        assert len(learner.micro_batches(rollout, list(range(P * M)))) == P // groups
        ref = learner.reference_logprobs(rollout)
        with device.counting() as counts[groups]:
            metrics = learner.update(rollout, advantages, step=0, lr=1e-3, beta=learner.loss.beta, ref_logprobs=ref)
        assert metrics["grad_norm"] > 0
    difference = counts[1] - counts[2]
    for counter in vars(difference).values():
        for key in counter:
            assert counter[key] % (P // 2) == 0, (key, counter)
            counter[key] //= P // 2
    return difference


def check(counts):
    """A blocking copy to the device waits, too."""
    waiting = counts.synchronizations + counts.uploads
    found = waiting.total()
    assert found <= SYNCHRONIZATIONS, (
        f"{found} synchronizations, expected at most {SYNCHRONIZATIONS}: {waiting.most_common()}"
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LOSSES)
def test_synchronizations_of_a_micro_batch(name):
    check(on_fake_cuda(per_micro_batch, name))


def test_a_planted_item_is_noticed(monkeypatch):
    """In each micro-batch, as many as are allowed and one more."""
    from nlgrpo.training import learner

    loss = learner.packed_loss_from_hidden

    def with_fault(hidden, *arguments, **options):
        for _ in range(SYNCHRONIZATIONS + 1):
            hidden.sum().item()
        return loss(hidden, *arguments, **options)

    plain = on_fake_cuda(per_micro_batch, "grpo")
    monkeypatch.setattr(learner, "packed_loss_from_hidden", with_fault)
    counts = on_fake_cuda(per_micro_batch, "grpo")
    ((place, number),) = (counts - plain).synchronizations.items()
    assert place.startswith("tests/gpu/test_fake_update.py:")
    assert number == SYNCHRONIZATIONS + 1
    with pytest.raises(AssertionError, match="synchronizations, expected at most 3"):
        check(counts)
