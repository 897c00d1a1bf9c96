"""Updates of a learner on a tiny GPT-2 in float64, and the same in plain PyTorch on transformers' model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from support.helpers import as_exported, random_rollout

from nlgrpo.config.schema import LossConfig, OptimConfig
from nlgrpo.model import decoder
from nlgrpo.objectives.advantages import advantages as to_advantages
from nlgrpo.runtime.device import MicroBatchLimit
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.learner import Learner, make_optimizer

P, M, LIMIT, TEMPERATURE, SEED = 4, 3, 9, 0.8, 5
EPS = 1e-3  # of Adam: far above the rounding of gradients that are mathematically 0, such as those of the keys' biases


@dataclass
class Recorder:
    """Keeps the gradients of every optimiser step and then takes the step."""

    optimizer: torch.optim.Optimizer
    gradients: list[list[torch.Tensor]] = field(default_factory=list)

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        with torch.no_grad():
            self.gradients.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
        self.optimizer.step()


def make_rollout():
    lengths = torch.randint(1, LIMIT + 1, (P, M), generator=torch.Generator().manual_seed(0))
    lengths[0, 0] = LIMIT
    return random_rollout(lengths, [1, 4, 2, 6])


def make_learner(root, loss, *, micro=10**6, optim=None):
    optim = optim or OptimConfig(eps=EPS, max_grad_norm=0.0)
    policy = decoder.load(root / "policy", dtype=torch.float64)
    reference = decoder.load(root / "reference", dtype=torch.float64).requires_grad_(False) if loss.beta > 0 else None
    return Learner(
        model=policy,
        reference=reference,
        optimizer=Recorder(make_optimizer(policy, optim)),
        loss=loss,
        optim=optim,
        ranks=Ranks(0, 1, torch.device("cpu")),
        temperature=TEMPERATURE,
        max_new_tokens=LIMIT,
        micro_batch_limit=MicroBatchLimit(micro, micro),
        seed=SEED,
    )


def update(learner, rollout, adv, *, step=0, lr=0.01, beta=None, dropped=None):
    ref = learner.reference_logprobs(rollout)
    beta = learner.loss.beta if beta is None else beta
    return learner.update(rollout, adv, step=step, lr=lr, beta=beta, ref_logprobs=ref, dropped=dropped)


def some_advantages(seed=1):
    return to_advantages(torch.randn(P, M, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def logprobs_of(theirs, rollout, rows=range(P * M)):
    """One list entry for each of the completions ``rows``: (length,) log-probs and entropies."""
    found, completions = [], rollout.completion_ids()
    for r in rows:
        prompt, completion = rollout.prompt_ids[r // M], completions[r]
        logits = theirs(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        logp = logits.log_softmax(-1)
        found.append((logp[torch.arange(len(completion)), completion], -(logp.exp() * logp).sum(-1)))
    return found


def plain_loss(cfg, logp, old, ref, adv, divide):
    """Terms (length,) of one completion; ``divide`` is its denominator."""
    ratio = (logp - old).exp() if cfg.level == "token" else (logp - old).mean().exp().expand_as(logp)
    clipped = torch.clip(ratio, 1 - cfg.eps_low, 1 + cfg.eps_high)
    gain = torch.min(ratio * adv, clipped * adv)
    counts = ratio if cfg.level == "token" else ratio[:1]
    dual = torch.zeros(())
    if cfg.dual_clip is not None and adv < 0:
        gain, dual = torch.max(gain, cfg.dual_clip * adv), (counts > cfg.dual_clip).sum()
    loss = -gain
    if cfg.surrogate != "ppo":
        loss = -adv * logp * (ratio.detach().clamp(max=1 + cfg.eps_high) if cfg.surrogate == "cispo" else 1)
    kl = torch.zeros_like(logp)
    if ref is not None:
        kl = {
            "k1": logp - ref,
            "k2": (logp - ref) ** 2 / 2,
            "k3": (ref - logp).exp() - (ref - logp) - 1,
        }[cfg.kl] * (ratio if cfg.weights_kl else 1)
        loss = loss + (cfg.beta * kl if cfg.kl_in == "loss" else 0)
    high, low = (counts > 1 + cfg.eps_high) & (adv > 0), (counts < 1 - cfg.eps_low) & (adv < 0)
    if cfg.surrogate != "ppo":
        high, low = (counts > 1 + cfg.eps_high) & (cfg.surrogate == "cispo"), torch.zeros_like(low)
    return (loss / divide).sum(), kl.detach().sum(), counts.detach(), low.sum(), high.sum(), dual


def by_name(learner, gradients):
    numbers = {id(p): g for g, p in zip(gradients, (p for x in learner.optimizer.param_groups for p in x["params"]))}
    return as_exported(learner.model, {name: numbers[id(p)] for name, p in learner.model.named_parameters()})


def assert_near(ours, truth, rtol=1e-9):
    """The tolerance is relative to the largest entry of the tensor."""
    assert ours.keys() <= truth.keys()  # a tied head has one name here and maybe two there
    for name, value in ours.items():
        bound = rtol * float(truth[name].detach().abs().max()) + 1e-15
        torch.testing.assert_close(value, truth[name], rtol=0, atol=bound, msg=lambda m, name=name: f"{name}: {m}")


CASES = {
    "token": LossConfig(beta=0.3, eps_low=0.05, eps_high=0.1),
    "sequence": LossConfig(level="sequence", normalization="grpo", beta=0.3, eps_low=0.01, eps_high=0.02),
    "bnpo, k2": LossConfig(normalization="bnpo", beta=0.3, kl="k2"),
    "dr_grpo, k1": LossConfig(normalization="dr_grpo", beta=0.3, kl="k1"),
    "k3 without the ratio": LossConfig(normalization="grpo", beta=0.3, kl_importance=False),
    "kl in the reward": LossConfig(beta=0.3, kl_in="reward"),
    "no reference": LossConfig(beta=0.0, eps_low=0.05, eps_high=0.1),
    "cispo": LossConfig(surrogate="cispo", beta=0.3, eps_high=0.01),
    "cispo, sequence": LossConfig(surrogate="cispo", level="sequence", beta=0.3, eps_high=0.005),
    "reinforce": LossConfig(surrogate="reinforce", beta=0.3),
    "dual clip": LossConfig(beta=0.3, eps_low=0.01, eps_high=0.01, dual_clip=1.02),
    "dual clip, sequence": LossConfig(level="sequence", beta=0.3, eps_low=0.005, eps_high=0.005, dual_clip=1.01),
}
