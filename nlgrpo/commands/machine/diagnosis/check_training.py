"""A training step of a small random model, compared with transformers and autograd in float64.

Packing, shared prompts, the fused loss, the KL penalty and the optimizer run as in training. The truth is the formula
of the loss, one sequence at a time, in transformers' model, of which only the norms compute in float32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nlgrpo.commands.machine.diagnosis.findings import Result, attempt

PROMPTS, SAMPLES, LONGEST, VOCABULARY = (5, 9, 3), 4, 12, 64
TEMPERATURE, BETA, LR, EPS, SHIFT = 0.8, 0.3, 1e-2, 0.1, 1e-2
BOUND = 1e-4  # relative error in float32; about 100 roundings of a sum over two layers
CPU_ADVICE = "run again with NLGRPO_EXT=0; if that passes, a compiled CPU op is wrong, and NLGRPO_EXT=0 avoids it"
GPU_ADVICE = "run again with NLGRPO_TRITON=0; if that passes, a Triton kernel is wrong, and NLGRPO_TRITON=0 avoids it"


class Step(NamedTuple):
    """Result of one optimizer step: loss, norm of the gradient, and the change of every parameter by its name."""

    loss: float
    grad_norm: float
    change: dict[str, Tensor]


def training() -> Iterator[Result]:
    """Compare a step in float32 on the CPU, and on the first GPU if there is one, with the same in float64."""
    with tempfile.TemporaryDirectory() as folder:
        start = random_model(Path(folder))
        truth = plain_step(start)
        yield attempt("cpu", partial(compare, Path(folder), "cpu", truth, start, CPU_ADVICE), CPU_ADVICE)
        if torch.cuda.is_available():
            yield attempt("cuda", partial(compare, Path(folder), "cuda", truth, start, GPU_ADVICE), GPU_ADVICE)
        else:
            yield Result("skipped", "no GPU", part="cuda")


def compare(folder: Path, device: str, truth: Step, start: Any, advice: str) -> Result:
    """Compare loss, norm of the gradient and parameters after the step. Errors are relative to the largest value."""
    ours = learner_step(folder, device, start)
    errors = {"loss": abs(ours.loss - truth.loss) / abs(truth.loss)}
    errors["gradient norm"] = abs(ours.grad_norm - truth.grad_norm) / truth.grad_norm
    largest = max(float(change.abs().max()) for change in truth.change.values())
    differences = [(ours.change[name] - change).abs().max() for name, change in truth.change.items()]
    errors["update"] = float(torch.stack(differences).max()) / largest
    detail = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    detail = f"relative error of {detail} (bound {BOUND:g}) in float32"
    numbers = {f"{name.replace(' ', '_')}_error": error for name, error in errors.items()} | {"bound": BOUND}
    right = all(error <= BOUND for error in errors.values())  # false for NaN
    return Result("ok", detail, numbers=numbers) if right else Result("failed", detail, advice, numbers=numbers)


def random_model(folder: Path) -> Any:
    """Save a random Llama of about 40,000 parameters to ``folder``, and return it in float64."""
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": VOCABULARY}
    sizes: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**ids, **sizes, **heads)).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.15 * noise + (1.0 if parameter.dim() == 1 else 0.0))
    model.save_pretrained(folder)
    return model.double()


def batch() -> tuple[list[list[int]], Tensor, Tensor, Tensor]:
    """Random prompts, completions (P, M, L) with 0 past their ends, their lengths (P, M), and advantages (P, M)."""
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randint, generator=generator)
    prompts = [draw(3, VOCABULARY, (n,)).tolist() for n in PROMPTS]
    lengths = draw(1, LONGEST + 1, (len(PROMPTS), SAMPLES))
    lengths[0, 0] = LONGEST
    tokens = draw(3, VOCABULARY, (*lengths.shape, LONGEST))
    tokens[torch.arange(LONGEST) >= lengths[..., None]] = 0
    advantages = torch.randn(lengths.shape, generator=generator, dtype=torch.float64)
    return prompts, tokens, lengths, advantages


def learner_step(folder: Path, device: str, start: Any) -> Step:
    """One update by `Learner`. The reference model is the policy plus `SHIFT`, so that the KL penalty is not 0."""
    from nlgrpo.config.schema import LossConfig, OptimConfig
    from nlgrpo.engine.generation import Rollout
    from nlgrpo.model import decoder, hf_weights
    from nlgrpo.model.architectures import tensor_map
    from nlgrpo.runtime.device import micro_batch_limit
    from nlgrpo.runtime.distributed import Ranks
    from nlgrpo.training.learner import Learner, make_optimizer

    where, optim = torch.device(device), OptimConfig(eps=EPS, max_grad_norm=0.0)
    policy, reference = (decoder.load(folder, device=where) for _ in range(2))
    shift(reference.requires_grad_(False))
    prompts, tokens, lengths, advantages = batch()
    tokens, lengths, advantages = (x.to(where) for x in (tokens, lengths, advantages.float()))
    rollout = Rollout(prompts, tokens, torch.zeros(tokens.shape, device=where), lengths, lengths < LONGEST)
    learner = Learner(
        model=policy,
        reference=reference,
        optimizer=make_optimizer(policy, optim),
        loss=LossConfig(beta=BETA),
        optim=optim,
        ranks=Ranks(0, 1, where),
        temperature=TEMPERATURE,
        max_new_tokens=LONGEST,
        micro_batch_limit=micro_batch_limit(None, where),
        seed=0,
    )
    ref = learner.reference_logprobs(rollout)
    metrics = learner.update(rollout, advantages, step=0, lr=LR, beta=BETA, ref_logprobs=ref)
    values = ((name, parameter.detach().double().cpu()) for name, parameter in policy.named_parameters())
    after = dict(hf_weights.all_stored(values, policy.shape, tensor_map(policy.shape)))
    return Step(metrics["loss"], metrics["grad_norm"], changes(start, after))


def plain_step(start: Any) -> Step:
    """The same step in float64, one sequence at a time.

    loss = sum over tokens (-A exp(log p - sg(log p)) + beta (e^d - d - 1)) / tokens,   d = log p_ref - log p
    """
    import copy

    policy, reference = copy.deepcopy(start), copy.deepcopy(start)
    shift(reference)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    prompts, tokens, lengths, advantages = batch()
    loss = torch.zeros((), dtype=torch.float64)
    for p, prompt in enumerate(prompts):
        for m in range(SAMPLES):
            completion = tokens[p, m, : lengths[p, m]]
            logp = logprobs(policy, prompt, completion)
            with torch.no_grad():
                ref = logprobs(reference, prompt, completion)
            d = ref - logp
            terms = -advantages[p, m] * (logp - logp.detach()).exp() + BETA * (d.exp() - d - 1)
            loss = loss + terms.sum() / lengths.sum()
    loss.backward()
    norm = torch.stack([parameter.grad.square().sum() for parameter in policy.parameters()]).sum().sqrt()
    optimizer.step()
    after = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    return Step(float(loss.detach()), float(norm), changes(start, after))


def logprobs(model: Any, prompt: list[int], completion: Tensor) -> Tensor:
    """Log-probs (L,) of the tokens of a completion by a transformers model."""
    sequence = torch.cat((torch.tensor(prompt), completion))
    scores = model(sequence[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return scores.log_softmax(-1).gather(-1, completion[:, None])[:, 0]


def shift(model: Any) -> None:
    """Multiply every parameter by 1 + `SHIFT`, in any layout of the weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + SHIFT)


def changes(start: Any, after: dict[str, Tensor]) -> dict[str, Tensor]:
    """Difference of every parameter from that of ``start``, by transformers' names."""
    before = dict(start.named_parameters())
    return {name: value - before[name].detach() for name, value in after.items()}
