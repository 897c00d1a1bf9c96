"""Completions that share a prompt: the log-probs, values, losses and gradients of each sequence computed alone."""

import random
from functools import partial

import pytest
import torch
from support.helpers import as_exported, run_ranks
from support.random_models import CASES, random_model

from nlgrpo.kernels import Segments, linear_logprob, packed_attention_torch
from nlgrpo.losses.bradley_terry import bradley_terry_loss
from nlgrpo.model import decoder
from nlgrpo.model.fsdp import shard
from nlgrpo.model.packing import empty_micro_batch, pack, pack_pairs
from nlgrpo.model.reward_model import score, scores, with_score_head
from nlgrpo.runtime.distributed import Ranks

CONFIGURATIONS = 20
FAMILY_CASES = sorted(CASES)
COTANGENT = 5


def build(case, seed):
    """A random float64 model of ``case``, with weights that are large enough for sharp attention."""
    model = decoder.build(random_model(case).config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64) + (p.dim() == 1))
    return model


def groups(seed, vocab=99):
    """Prompts, one per completion, and completions: a group per prompt, two groups with equal prompts."""
    rng = random.Random(seed)
    ids = lambda n: [rng.randrange(3, vocab) for _ in range(n)]  # noqa: E731
    distinct = [ids(rng.choice((1, 2, 9, 24))) for _ in range(rng.randint(2, 4))]
    distinct.append(list(distinct[0]))
    prompts = [prompt for prompt in distinct for _ in range(rng.randint(2, 6))]
    return prompts, [ids(rng.choice((1, 1, 2, 3, 8, 20))) for _ in prompts]


def logprobs_and_gradients(model, batches, shape):
    """Log-probs (R, L) of all batches, and the gradients of a random linear function of them."""
    cotangent = torch.randn(shape, generator=torch.Generator().manual_seed(COTANGENT), dtype=torch.float64)
    out = torch.zeros(shape, dtype=torch.float64)
    for batch in batches:
        logprob, _ = model(batch.tokens, batch.segments, batch.select, partial(linear_logprob, targets=batch.targets))
        (logprob * batch.pick(cotangent)).sum().backward()
        out[batch.row, batch.offset] = logprob.detach().double()
    gradients = {name: p.grad.double() for name, p in model.named_parameters()}
    model.zero_grad()
    return out, gradients


def assert_close(ours, truth, tolerance=1e-11):
    """Compare with the largest entry of each tensor as the scale."""
    for mine, its in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=tolerance * max(1.0, float(its.abs().max())))


def alone(prompts, completions):
    return [batch for r in range(len(prompts)) for batch in pack(prompts, completions, [r], 10**6)]


def compare(seed, max_tokens, dtype=torch.float64, tolerance=1e-11):
    """Compare shared computation with separate computation in float64 for one random configuration."""
    case = FAMILY_CASES[seed % len(FAMILY_CASES)]
    model = build(case, seed)
    prompts, completions = groups(seed)
    shape = (len(prompts), max(map(len, completions)))
    truth = logprobs_and_gradients(model, alone(prompts, completions), shape)
    model = model.to(dtype)
    model.activation_checkpointing = seed % 2 == 0
    batches = pack(prompts, completions, range(len(prompts)), max_tokens)
    assert any(batch.segments.shared for batch in batches)
    ours = logprobs_and_gradients(model, batches, shape)
    assert_close([ours[0], *ours[1].values()], [truth[0], *truth[1].values()], tolerance)


SINGLE = {"dtype": torch.float32, "tolerance": 3e-5}  # runs the compiled attention


@pytest.mark.sampled(5)
@pytest.mark.parametrize("precision", [{}, SINGLE], ids=["float64", "float32"])
@pytest.mark.parametrize("seed", range(CONFIGURATIONS))
def test_random_configurations(seed, precision):
    compare(seed, (45, 80, 10**6)[seed % 3], **precision)


def test_every_case_is_among_them():
    assert len(FAMILY_CASES) <= CONFIGURATIONS


def _ignore_prompts(patch):
    cross = packed_attention_torch._cross_parts
    patch.setattr(packed_attention_torch, "_cross_parts", lambda start, n, *rest: cross(start, n, *rest)[1:])
    table = Segments.tensor.func
    alone = torch.tensor([1, 0]), torch.tensor([0, -1])
    patch.setattr(Segments, "tensor", property(lambda self: table(self) * alone[0] + alone[1]))


def _add_parts_without_weights(patch):
    patch.setattr(torch, "logaddexp", lambda before, _: before)


def _start_positions_too_early(patch):
    offsets = Segments.offsets.fget
    patch.setattr(Segments, "offsets", property(lambda self: [max(n - 1, 0) for n in offsets(self)]))


def _read_another_prompt(patch):
    groups_of = Segments.groups
    patch.setattr(Segments, "groups", lambda self: [g._replace(start=max(g.start - 1, 0)) for g in groups_of(self)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("fault", "precisions"),
    [
        (_ignore_prompts, ({}, SINGLE)),
        (_start_positions_too_early, ({}, SINGLE)),
        (_add_parts_without_weights, ({},)),
        (_read_another_prompt, ({},)),
    ],
)
def test_planted_faults_are_found(fault, precisions, monkeypatch):
    for precision in precisions:
        compare(5, 10**6, **precision)
    fault(monkeypatch)
    for precision in precisions:
        with pytest.raises(AssertionError):
            compare(5, 10**6, **precision)


@pytest.mark.parametrize("case", ["llama", "mistral-window", "qwen2-window", "qwen3", "neox", "gpt2"])
def test_log_probs_and_gradients_equal_transformers(case, tmp_path):
    theirs = random_model(case).double()
    theirs.save_pretrained(tmp_path)
    ours = decoder.load(tmp_path, dtype=torch.float64)
    prompts, completions = groups(1)
    shape = (len(prompts), max(map(len, completions)))
    cotangent = torch.randn(shape, generator=torch.Generator().manual_seed(COTANGENT), dtype=torch.float64)
    expected = torch.zeros(shape, dtype=torch.float64)
    for r, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        logits = theirs(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logprob = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
        (logprob * cotangent[r, : len(completion)]).sum().backward()
        expected[r, : len(completion)] = logprob.detach()
    found, gradients = logprobs_and_gradients(ours, pack(prompts, completions, range(len(prompts)), 10**6), shape)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    truth = {name: p.grad for name, p in theirs.named_parameters()}
    exported = as_exported(ours, gradients)
    for name, gradient in exported.items():
        its = truth["lm_head.weight" if name == "embed_out.weight" else name]
        torch.testing.assert_close(gradient, its, atol=1e-5 * float(its.abs().max()), rtol=1e-4)


def test_values_of_a_scalar_head():
    model = with_score_head(build("llama", 0)).double()
    prompts, completions = groups(2)
    found = []
    for batches in (pack(prompts, completions, range(len(prompts)), 10**6), alone(prompts, completions)):
        values = torch.zeros(len(prompts), max(map(len, completions)), dtype=torch.float64)
        for batch in batches:
            values[batch.row, batch.offset] = model(batch.tokens, batch.segments, batch.select, score)[:, 0].detach()
        found.append(values)
    torch.testing.assert_close(*found, rtol=0, atol=1e-11)


CHOSEN = [[5, 6, 8, 9, 7, 7], [4, 4], [5, 6, 8], [3, 3, 3], [7, 5, 6]]
REJECTED = [[5, 6, 8, 3], [9], [5, 6, 8, 4, 4], [3, 3, 3], [7, 7]]  # nothing in common, contained, equal


@pytest.mark.parametrize("pad", [None, 7])
@pytest.mark.parametrize("max_tokens", [1, 12, 1000])
def test_pairs_share_their_beginning(pad, max_tokens):
    model = with_score_head(build("qwen2", 0)).double()
    rows = [2, 0, 3, 1, 4, 0]
    batches = pack_pairs(CHOSEN, REJECTED, rows, max_tokens, pad)
    assert sum(len(batch.tokens) for batch in batches) == 5 + 7 + 3 + 3 + 4 + 7
    sides = {r: scores(model, batch) for batch in batches for r in batch.row.tolist()}
    assert sides.keys() == set(rows)
    found, order = [], []
    for batch in batches:
        both = scores(model, batch)
        bradley_terry_loss(*both).sum().backward()
        found.append(torch.stack(both).detach())
        order += batch.row.tolist()
    ours = [torch.cat(found, 1), *_take_gradients(model)]
    truth = torch.stack([torch.stack([_score_alone(model, ids[r], pad) for r in order]) for ids in (CHOSEN, REJECTED)])
    bradley_terry_loss(*truth).sum().backward()
    assert sorted(order) == sorted(rows)
    assert_close(ours, [truth.detach(), *_take_gradients(model)])


def _score_alone(model, ids, pad):
    last = max((i for i, token in enumerate(ids) if token != pad), default=0)
    return model(torch.tensor(ids), [len(ids)], torch.tensor([last]), score)[0, 0]


def _take_gradients(model):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients


# --- ranks ------------------------------------------------------------------------------------------------------------


def _on_a_rank(rank, case, expected, gradients):
    ranks = Ranks(rank, 2, torch.device("cpu"))
    prompts, completions = groups(4)
    model = shard(build(case, 4), ranks, torch.float64)
    rows = [r for r in range(len(prompts)) if r % 2 == rank]  # both ranks have completions of a prompt
    batches = pack(prompts, completions, rows, 40)
    batches += [empty_micro_batch() for _ in range(len(prompts) - len(batches))]
    found, shares = logprobs_and_gradients(model, batches, expected.shape)
    assert_close([found[rows]], [expected[rows]])
    assert_close([2 * share.full_tensor() for share in shares.values()], list(gradients.values()))  # FSDP averages


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mistral-window", "gpt2"])
def test_two_ranks(case):
    prompts, completions = groups(4)
    shape = (len(prompts), max(map(len, completions)))
    run_ranks(_on_a_rank, case, *logprobs_and_gradients(build(case, 4), alone(prompts, completions), shape))
