"""Training steps of a small random model, compared with transformers and autograd in float64.

Packing, shared prompts, the fused loss, the KL penalty and the optimizer run as in training. One step is in float32,
where errors are small. Another one is as on a GPU by default: in bfloat16, with master weights in float32 that FSDP2
shards over a group of one rank. The truth is the formula of the loss, one sequence at a time, in transformers' model,
of which only the norms compute in float32.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nlgrpo.apps.doctor.findings import Result, attempt, message
from nlgrpo.runtime.distributed import Ranks

PROMPTS = (5, 9, 3)
SAMPLES = 4
LONGEST = 12
VOCABULARY = 64
TEMPERATURE = 0.8
BETA = 0.3
LR = 1e-2
EPS = 0.1
SHIFT = 1e-2
# Relative errors: in float32 about 100 roundings of a sum over two layers, in bfloat16 about 12 of its 0.4%.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.05}
CPU_ADVICE = "run again with NLGRPO_EXT=0; if that passes, a compiled CPU op is wrong, and NLGRPO_EXT=0 avoids it"
GPU_ADVICE = "run again with NLGRPO_TRITON=0; if that passes, a Triton kernel is wrong, and NLGRPO_TRITON=0 avoids it"
SHARDED_ADVICE = (
    "if the steps in float32 pass, the attention or the sharding in bfloat16 is wrong: run again with "
    "NLGRPO_ATTENTION=packed, and look at the check attention; model.dtype = 'float32' avoids both"
)
GROUP_ADVICE = (
    "one rank needs no network: set NCCL_SOCKET_IFNAME=lo and GLOO_SOCKET_IFNAME=lo (the loopback interface, lo0 on "
    "macOS), unset MASTER_ADDR, and run again with NCCL_DEBUG=INFO, which says what NCCL misses"
)


class Step(NamedTuple):
    """Result of one optimizer step: loss, norm of the gradient, the change of every parameter by its name, and time."""

    loss: float
    grad_norm: float
    change: dict[str, Tensor]
    seconds: float = 0.0


def training() -> Iterator[Result]:
    """Compare a step in float32 on the CPU and on the first GPU, and one in bfloat16 under FSDP2, with float64."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        on_gpu = torch.cuda.is_available()
        start = random_model(folder)
        truth = plain_step(start)
        yield attempt("cpu", partial(unsharded, folder, "cpu", truth, start, CPU_ADVICE), CPU_ADVICE)
        if on_gpu:
            yield attempt("cuda", partial(unsharded, folder, "cuda", truth, start, GPU_ADVICE), GPU_ADVICE)
        else:
            yield Result("skipped", "no GPU", part="cuda")
        yield attempt("fsdp", partial(sharded, folder, truth, start), SHARDED_ADVICE)


def unsharded(folder: Path, device: str, truth: Step, start: Any, advice: str) -> Result:
    """A step in float32 without a process group."""
    ranks = Ranks(0, 1, torch.device(device))
    return compare(learner_step(folder, ranks, torch.float32, start), truth, torch.float32, advice)


def sharded(folder: Path, truth: Step, start: Any) -> Result:
    """A step in bfloat16 under FSDP2, in the process group that a run without torchrun has: NCCL on a GPU, or gloo."""
    from nlgrpo.runtime.supervision import process_group

    with ExitStack() as group:
        try:
            ranks = group.enter_context(process_group.start())
            dist.all_reduce(torch.ones(1, device=ranks.device))  # NCCL starts with the first collective
        except (RuntimeError, ValueError) as error:
            return Result("failed", f"the process group of one rank does not start: {message(error)}", GROUP_ADVICE)
        try:
            step = learner_step(folder, ranks, torch.bfloat16, start)
        finally:
            gc.collect()  # cycles of a sharded model would keep the group alive after its end
        result = compare(step, truth, torch.bfloat16, SHARDED_ADVICE)
        return replace(result, detail=f"{result.detail} under FSDP2, on {ranks.device}")


def compare(ours: Step, truth: Step, dtype: torch.dtype, advice: str) -> Result:
    """Compare loss, norm of the gradient, and change of the parameters.

    Its error is the largest one in float32. In bfloat16 it is that of the whole vector, as Adam's division by the size
    of a gradient leaves a tenth of the learning rate of error where that size is close to epsilon.
    """
    bound = BOUNDS[dtype]
    errors = {"loss": abs(ours.loss - truth.loss) / abs(truth.loss)}
    errors["gradient norm"] = abs(ours.grad_norm - truth.grad_norm) / truth.grad_norm
    exact = torch.cat([change.flatten() for change in truth.change.values()])
    difference = torch.cat([ours.change[name].flatten() for name in truth.change]) - exact
    order = torch.inf if dtype == torch.float32 else 2
    errors["update"] = float(difference.norm(order) / exact.norm(order))
    found = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    detail = f"a step in {ours.seconds:.2g} s; relative error of {found} (bound {bound:g}) in {str(dtype)[6:]}"
    numbers = {f"{name.replace(' ', '_')}_error": error for name, error in errors.items()}
    numbers |= {"bound": bound, "step_seconds": ours.seconds}
    right = all(error <= bound for error in errors.values())  # false for NaN
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


def learner_step(folder: Path, ranks: Ranks, compute: torch.dtype, start: Any) -> Step:
    """One update by `Learner`, with its time. The reference model is the policy plus `SHIFT`, so that the KL is not 0.

    `fsdp.shard` shards what computes in another dtype than that of its master weights: the policy in bfloat16.
    """
    from nlgrpo.config.schema import LossConfig, OptimConfig
    from nlgrpo.engine.generation import Rollout
    from nlgrpo.model import decoder, fsdp, hf_weights
    from nlgrpo.model.architectures import tensor_map
    from nlgrpo.runtime.device import master_dtype, micro_batch_limit
    from nlgrpo.training.learner import Learner, make_optimizer

    where = ranks.device
    optim = OptimConfig(eps=EPS, max_grad_norm=0.0)
    shard = partial(fsdp.shard, ranks=ranks, compute=compute)
    policy = decoder.load(folder, dtype=master_dtype(compute), device=where, shard=shard)
    reference = decoder.load(folder, dtype=compute, device=where, shard=shard)
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
        ranks=ranks,
        temperature=TEMPERATURE,
        max_new_tokens=LONGEST,
        micro_batch_limit=micro_batch_limit(None, where),
        seed=0,
    )
    begin = time.perf_counter()
    ref = learner.reference_logprobs(rollout)
    metrics = learner.update(rollout, advantages, step=0, lr=LR, beta=BETA, ref_logprobs=ref)
    values = [(name, full.double().cpu()) for name, full in fsdp.each_replicated(policy, None)]  # waits for a GPU
    seconds = time.perf_counter() - begin
    after = dict(hf_weights.all_stored(values, policy.shape, tensor_map(policy.shape)))
    return Step(metrics["loss"], metrics["grad_norm"], changes(start, after), seconds)


def plain_step(start: Any) -> Step:
    """The same step in float64, one sequence at a time.

    loss = sum over tokens ratio (-A + beta (e^d - d - 1)) / tokens
    ratio = exp(log p - sg(log p)),   d = log p_ref - log p
    """
    import copy

    policy = copy.deepcopy(start)
    reference = copy.deepcopy(start)
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
            ratio = (logp - logp.detach()).exp()
            terms = -advantages[p, m] * ratio + BETA * ratio * (d.exp() - d - 1)
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
