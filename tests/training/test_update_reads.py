"""What an update reads from its device, and what it packs: on a GPU each read waits for all the work before it."""

import sys
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.helpers import tiny_model
from support.updates import LIMIT, M, P, make_learner, make_rollout, some_advantages, update
from torch.utils._python_dispatch import TorchDispatchMode

import nlgrpo
from nlgrpo import kernels
from nlgrpo.config.schema import CriticConfig, LossConfig, OfflineConfig
from nlgrpo.losses.correction import correct
from nlgrpo.model import decoder, packing
from nlgrpo.objectives.importance_sampling import Correction
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training import critic, learner, offline
from nlgrpo.training.learner import make_optimizer

CPU = torch.device("cpu")
PACKAGE = Path(nlgrpo.__file__).parent
OPS = Path(kernels.__file__).parent
READS = {"_local_scalar_dense", "nonzero", "unique_consecutive", "_unique2", "masked_select", "equal"}


class HostReads(TorchDispatchMode):
    """Counts, by line of the package, the ops after which the host knows what a tensor holds.

    Not those of the ops in kernels/: on a CPU they check the range of their targets.
    """

    def __init__(self):
        super().__init__()
        self.lines = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        masked = name in ("index", "index_put_") and any(x is not None and x.dtype == torch.bool for x in args[1])
        if name in READS or masked:
            stack = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_stack(sys._getframe())]
            own = [(path, line) for path, line in stack if path.is_relative_to(PACKAGE) or path.is_relative_to(OPS)]
            if own and not own[-1][0].is_relative_to(OPS):
                path, line = own[-1]
                self.lines[f"{path.relative_to(PACKAGE)}:{line}"] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("policy", "reference")):
        tiny_model(folder / name, "gpt2", seed=seed)
    return folder


def with_critic(root, loss, micro, trunk):
    plain = make_learner(root, loss, micro=micro)
    module = decoder.load(root / "reference", dtype=torch.float64)
    if trunk == "shared":
        module = torch.nn.Linear(plain.model.shape.width, 1, bias=False, dtype=torch.float64)
    value = critic.Critic(CriticConfig(trunk=trunk), module, Ranks(0, 1, CPU))
    return replace(plain, critic=value, optimizer=make_optimizer(plain.model, plain.optim, module))


CASES = {
    "grpo": LossConfig(beta=0.1),
    "off-policy": LossConfig(beta=0.1, epochs=2, minibatches=2, dual_clip=3.0),
    "gspo": LossConfig(beta=0.1, level="sequence"),
    "corrected": LossConfig(beta=0.1, correction="tis:2"),
    "ppo": LossConfig("ppo", beta=0.1, kl_in="reward"),
    "ppo, shared": LossConfig("ppo", beta=0.1),
}


def reads_of(root, case, micro):
    """Reads of an update by line, and its number of micro-batches."""
    loss = CASES[case]
    trained = make_learner(root, loss, micro=micro)
    if loss.algorithm == "ppo":
        trained = with_critic(root, loss, micro, "shared" if "shared" in case else "own")
    rollout = make_rollout()
    ref = trained.reference_logprobs(rollout)
    corrected = None
    if loss.correction != "none":
        policy = trained.logprobs_of(trained.model, rollout)
        corrected = correct(Correction("tis", 0.0, 2.0, "token"), policy, rollout.logprobs, rollout.lengths)
    count = len(trained.micro_batches(rollout, list(range(P * M))))
    with HostReads() as reads:
        trained.update(
            rollout, some_advantages(), step=0, lr=0.01, beta=0.1, ref_logprobs=ref, corrected=corrected,
            dropped=torch.tensor([False, True, False, False]) if case == "grpo" else None,
        )  # fmt: skip
    return reads.lines, count


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_the_number_of_reads_does_not_grow_with_the_micro_batches(root, case):
    few, one = reads_of(root, case, 10**6)
    many, several = reads_of(root, case, 20)
    assert one == 1
    assert several >= 5
    assert few == many
    assert few  # the norm of the gradient, and the metrics


def test_a_read_in_a_micro_batch_is_seen(root, monkeypatch):
    """A fault, planted: the loss of each micro-batch as a number."""
    add = learner._Totals.add
    monkeypatch.setattr(
        learner._Totals, "add", lambda self, loss, *rest: (float(loss.detach()), add(self, loss, *rest))
    )
    (few, one), (many, several) = (reads_of(root, "gspo", micro) for micro in (10**6, 20))
    assert sum(many.values()) - sum(few.values()) >= several - one > 0


@pytest.mark.parametrize("algorithm", ["dpo", "bon_sft"])
def test_offline_updates_read_no_micro_batch(root, algorithm):
    counts = []
    for micro in (10**6, 20):
        trained = make_learner(root, LossConfig(algorithm, beta=0.1 * (algorithm == "dpo")), micro=micro)
        ids = make_rollout()
        prompts = [prompt for prompt in ids.prompt_ids for _ in range(M)]
        width = 2 if algorithm == "dpo" else 1
        chosen = offline.OfflineBatch(prompts, ids.completion_ids(), width, P * M // width)
        with HostReads() as reads:
            offline.update(trained, chosen, OfflineConfig(), 0.01)
        counts.append(reads.lines)
    assert counts[0] == counts[1]


# --- packing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def packed_rows(monkeypatch):
    """Number of rows of each call of `pack`."""
    calls = []

    def counted(prompts, completions, rows, *arguments, **options):
        calls.append(len(rows))
        return packing.pack(prompts, completions, rows, *arguments, **options)

    monkeypatch.setattr(learner, "pack", counted)
    return calls


def test_a_step_packs_its_rollout_once(root, packed_rows):
    """For the reference, the policy's score, the critic, and the update; the next step packs its own."""
    trained = with_critic(root, LossConfig("ppo", beta=0.1, kl_in="reward"), 40, "own")
    for _ in range(2):
        rollout = make_rollout()
        update(trained, rollout, some_advantages())
        assert trained.packed.rollout is None  # nothing outlives the step
        assert trained.packed.batches == []
    assert packed_rows == [P * M, P * M]


def test_other_rows_and_other_rollouts_are_packed_on_their_own(root, packed_rows):
    trained = make_learner(root, LossConfig(beta=0.1))
    rollout, other = make_rollout(), make_rollout()
    dropped = torch.tensor([False, True, False, False])
    update(trained, rollout, some_advantages(), dropped=dropped)
    assert packed_rows == [P * M, (P - 1) * M]
    first = trained.logprobs_of(trained.model, rollout)
    tokens = (other.tokens + 1) % 20 + 3
    changed = trained.logprobs_of(trained.model, replace(other, tokens=tokens))
    assert packed_rows[2:] == [P * M, P * M]
    assert not torch.equal(first, changed)


def test_the_completions_of_a_micro_batch_are_those_of_its_targets():
    """Against what the columns say; one completion is empty."""
    prompts = [[1, 2], [1, 2], [3], [4, 5, 6]]
    completions = [[7, 8, 9], [], [7], [8] * LIMIT]
    seen = []
    for batch in packing.pack(prompts, completions, range(4), 8):
        present, sequence = batch.row.unique_consecutive(return_inverse=True)
        assert torch.equal(batch.present, present)
        assert torch.equal(batch.sequence, sequence)
        assert batch.lengths == [len(completions[r]) for r in batch.completions]
        assert torch.equal(batch.sets(2), batch.row.div(2, rounding_mode="floor").unique())
        seen += batch.completions
    assert sorted(seen) == [0, 2, 3]
    empty = packing.empty_micro_batch()
    assert len(empty.present) == len(empty.sequence) == len(empty.sets(2)) == 0


def test_a_statistic_that_is_nan_is_left_out_of_the_maxima():
    """The sums show it."""
    totals = learner._Totals(Ranks(0, 1, CPU), None)
    stats = {"ratio_max": torch.tensor(torch.nan), "tokens": torch.tensor(2.0), "ratios": torch.tensor(2.0)}
    stats |= {name: torch.tensor(0.0) for name in ("entropy", "clip_low", "clip_high", "clip_region")}
    totals.add(torch.tensor(1.5), stats, None)
    totals.add(torch.tensor(torch.nan), stats | {"ratio_max": torch.tensor(1.25)}, None)
    metrics = totals.metrics()
    assert metrics["ratio/max"] == 1.25
    assert metrics["loss"] != metrics["loss"]
