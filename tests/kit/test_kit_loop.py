"""The reference loop that stands in for TRL where it cannot be imported has TRL's loss."""

from pathlib import Path

import pytest
import torch
from random_models import EOS, random_llama, random_prompts, save_model, save_prompts
from trl_loop import Loop, until_the_end

PROMPTS, SAMPLES, LIMIT = 3, 4, 12


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loop")
    save_model(random_llama(vocab=64, width=16, ffn=32, layers=2, heads=2), folder / "model")
    save_prompts(random_prompts(8, 6, 64), folder / "prompts.jsonl")
    return Loop(Path(folder), "cpu", "float64", lr=1e-3, limit=LIMIT, together=5)


def test_the_loss_is_that_of_each_completion_alone(loop):
    """The truth has no padding: one sequence at a time. The gradient of exp(log p - sg(log p)) is that of log p."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 64, (n,), generator=generator) for n in (2, 5)]
    completions = [torch.randint(3, 64, (n,), generator=generator) for n in (4, 3)]
    ids = torch.zeros(2, 5 + 4, dtype=torch.int64)
    seen = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids[row, 5 - len(prompt) : 5], seen[row, 5 - len(prompt) : 5] = prompt, 1
        ids[row, 5 : 5 + len(completion)], seen[row, 5 : 5 + len(completion)] = completion, 1
    advantages = torch.tensor([0.7, -1.3], dtype=torch.float64)
    parameters = list(loop.model.parameters())
    ours = torch.autograd.grad(loop.loss(ids, seen, seen[:, 5:].bool(), advantages), parameters)
    truth = torch.zeros((), dtype=torch.float64)
    for prompt, completion, advantage in zip(prompts, completions, advantages, strict=True):
        whole = torch.cat((prompt, completion))
        scores = loop.model(whole[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        truth = truth - advantage * scores.gather(-1, completion[:, None]).sum()
    expected = torch.autograd.grad(truth, parameters)
    for mine, right in zip(ours, expected, strict=True):
        # The log-softmax is in float32, as TRL's.
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-6 * float(right.abs().max() + 1))


def test_a_step_changes_the_model_and_counts_tokens_up_to_eos(loop):
    seen = []

    def reward(completion_ids):
        seen.extend(completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    before = [parameter.detach().clone() for parameter in loop.model.parameters()]
    torch.manual_seed(0)
    loop.step(PROMPTS, SAMPLES, reward)
    assert any(not torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))
    assert len(seen) == PROMPTS * SAMPLES
    assert all(EOS not in ids[:-1] for ids in seen)
    tokens = torch.tensor([[5, EOS, 0, 0], [5, 6, 7, 8], [EOS, 0, 0, 0]])
    assert until_the_end(tokens).sum(1).tolist() == [2, 4, 1]
