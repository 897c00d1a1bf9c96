"""The update on a GPU in float32 compared with the CPU: metrics and trained parameters, for losses and optimizers."""

from dataclasses import replace

import pytest
import torch
from precision import check
from support.helpers import random_rollout

from nlgrpo.config.schema import Config, CriticConfig, LossConfig, ModelConfig, OptimConfig
from nlgrpo.model import adapters, decoder, lora
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime.device import MicroBatchLimit
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training import critic
from nlgrpo.training.learner import Learner, make_optimizer

P, M, LIMIT = 3, 3, 7
ADAM = OptimConfig(eps=1e-3)  # far above the rounding of gradients that are mathematically 0
MUON = OptimConfig(algorithm="muon", eps=1e-3)
ADAPTER = LoraConfig(rank=3, alpha=6.0)
CASES = {
    "grpo": Config(loss=LossConfig(beta=0.1), optim=ADAM),
    "minibatches": Config(loss=LossConfig(beta=0.1, epochs=2, minibatches=2), optim=ADAM),
    "gspo": Config(loss=LossConfig(beta=0.0, level="sequence", epochs=2), optim=ADAM),
    "cispo, corrected": Config(loss=LossConfig(beta=0.0, surrogate="cispo", correction="tis:2"), optim=ADAM),
    "ppo, own critic": Config(loss=LossConfig(algorithm="ppo", beta=0.1, kl_in="reward"), optim=ADAM),
    "ppo, shared": Config(loss=LossConfig(algorithm="ppo", beta=0.0), critic=CriticConfig(trunk="shared"), optim=ADAM),
    "muon": Config(loss=LossConfig(beta=0.1), optim=MUON),
    "lora": Config(loss=LossConfig(beta=0.1), lora=ADAPTER, optim=ADAM),
    "lora, muon": Config(loss=LossConfig(beta=0.1), lora=replace(ADAPTER, rslora=True), optim=MUON),
    "checkpointing": Config(
        model=ModelConfig(activation_checkpointing=True), loss=LossConfig(beta=0.1, normalization="grpo"), optim=ADAM
    ),
}
# Newton-Schulz iterations amplify the rounding of the gradient.
BOUNDS = {"muon": 0.05, "lora, muon": 0.05}


def trained(cfg, folder, device, *, flipped=False):
    """Changes of the parameters, one after another, and metrics of an update; ``flipped``: wrong advantages."""
    ranks = Ranks(0, 1, torch.device(device))
    adapter = cfg.lora if cfg.lora.enabled else None
    prepared = None if adapter is None else lambda model: lora.attach(model, adapter, torch.float32)
    model = decoder.load(folder, device=device, shard=prepared)
    if adapter is not None:
        adapters.init_adapters(model, adapter, 0)
    model.configure(cfg.model.activation_checkpointing)
    reference = model
    if adapter is None:
        reference = decoder.load(folder, device=device).requires_grad_(False)
    cfg = replace(cfg, model=replace(cfg.model, path=str(folder)))
    value = critic.make_critic(cfg, model, ranks, torch.float32) if cfg.loss.algorithm == "ppo" else None
    learner = Learner(
        model=model,
        reference=reference if cfg.loss.beta > 0 else None,
        optimizer=make_optimizer(model, cfg.optim, None if value is None else value.module),
        loss=cfg.loss,
        optim=cfg.optim,
        ranks=ranks,
        temperature=0.8,
        max_new_tokens=LIMIT,
        micro_batch_limit=MicroBatchLimit(40, 40),
        seed=5,
        critic=value,
    )
    lengths = torch.randint(1, LIMIT + 1, (P, M), generator=torch.Generator().manual_seed(0))
    rollout = random_rollout(lengths, [1, 4, 6])
    rollout = replace(
        rollout,
        **{name: getattr(rollout, name).to(device) for name in ("tokens", "logprobs", "lengths", "finished")},
    )
    advantages = torch.randn(P, M, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if flipped:
        advantages[:, 0] *= -1
    before = {name: p.detach().clone() for name, p in learner.trained.named_parameters() if p.requires_grad}
    metrics = learner.update(
        rollout,
        advantages.to(device),
        step=0,
        lr=0.01,
        critic_lr=0.02,
        beta=cfg.loss.beta,
        ref_logprobs=learner.reference_logprobs(rollout),
        corrected=learner.corrected(rollout),
    )
    after = dict(learner.trained.named_parameters())
    changes = [(after[name].detach() - value).flatten().cpu() for name, value in before.items()]
    return torch.cat(changes), torch.tensor([metrics[name] for name in sorted(metrics)], dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_an_update_in_float32(gpu, models, case):
    bound = BOUNDS.get(case, 5e-4)
    found = trained(CASES[case], models("qwen2"), gpu)
    truth = trained(CASES[case], models("qwen2"), "cpu")
    planted = trained(CASES[case], models("qwen2"), "cpu", flipped=True)
    (changes, metrics), (true_changes, true_metrics), (wrong_changes, wrong_metrics) = found, truth, planted
    check(changes, true_changes, bound, planted=wrong_changes)
    scale = true_metrics.abs().clamp(min=1e-3)  # each metric counts, also beside large ones
    check(metrics / scale, true_metrics / scale, bound, planted=wrong_metrics / scale)
