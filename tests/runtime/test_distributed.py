"""Two ranks compared with one: collectives, sharding, and equal updates for any distribution of the completions."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from helpers import full_tensors, random_rollout, run_ranks, tiny_model

from nlgrpo.config.schema import Config, CriticConfig, LossConfig, ModelConfig, OfflineConfig, OptimConfig
from nlgrpo.engine import generation
from nlgrpo.engine.generation import Rollout
from nlgrpo.engine.sampling import Sampling
from nlgrpo.model import adapters, decoder, lora
from nlgrpo.model.fsdp import gathered, shard
from nlgrpo.model.lora import LoraConfig
from nlgrpo.objectives.advantages import advantages as to_advantages
from nlgrpo.runtime import checkpoint
from nlgrpo.runtime.device import MicroBatchLimit
from nlgrpo.runtime.distributed import ParallelConfig, Ranks
from nlgrpo.training import critic, offline
from nlgrpo.training.learner import Learner, make_optimizer

CPU = torch.device("cpu")
OPTIM = OptimConfig(eps=1e-3, max_grad_norm=0.5, weight_decay=0.1)
MUON = replace(OPTIM, algorithm="muon")
# the second rank's completions are short: it has fewer micro-batches, and in some minibatches none
LENGTHS = torch.tensor([[9, 8, 9], [7, 9, 8], [1, 2, 1], [2, 1, 1]])
SAMPLING = Sampling(max_new_tokens=8, stop_ids=(2,))
LORA = LoraConfig(rank=3)


@dataclass
class Case:
    loss: LossConfig
    micro: int = 20
    dropped: tuple[bool, ...] = (False,) * 4
    checkpointing: bool = False
    family: str = "llama"
    critic: CriticConfig = field(default_factory=CriticConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=lambda: OPTIM)


CASES = {
    "one step": Case(LossConfig(beta=0.3)),
    "other micro-batches": Case(LossConfig(beta=0.3), micro=10**6),
    "minibatches": Case(LossConfig(normalization="grpo", level="sequence", beta=0.3, epochs=2, minibatches=3)),
    "one completion per minibatch": Case(LossConfig(normalization="bnpo", beta=0.0, minibatches=12)),
    "a whole rank is dropped": Case(LossConfig(normalization="dr_grpo", beta=0.3), dropped=(False, False, True, True)),
    "activation checkpointing": Case(LossConfig(beta=0.3), checkpointing=True),
    "tied embeddings": Case(LossConfig(beta=0.3), family="gpt2"),
    "a critic": Case(
        LossConfig("ppo", beta=0.3, kl_in="reward", epochs=2, minibatches=3), dropped=(True, *[False] * 3)
    ),
    "a head on the policy": Case(LossConfig("ppo", beta=0.3, epochs=2), critic=CriticConfig(trunk="shared")),
    "adapters": Case(LossConfig(beta=0.3, epochs=2, minibatches=3), lora=LORA),
    "adapters and a critic": Case(LossConfig("ppo", beta=0.3, kl_in="reward"), checkpointing=True, lora=LORA),
    "adapters and pairs": Case(LossConfig("dpo", beta=0.3), family="gpt2", lora=LORA),
    "adapters and a trained head": Case(
        LossConfig(beta=0.3), lora=replace(LORA, modules_to_save=("embed_tokens", "lm_head"), rslora=True)
    ),
    "muon": Case(LossConfig(beta=0.3), optim=MUON),
    "muon with a critic": Case(LossConfig("ppo", beta=0.3), optim=MUON),
    "muon, pairs": Case(LossConfig("dpo", beta=0.3), family="gpt2", optim=MUON),
    "winners": Case(LossConfig("bon_sft")),
    "pairs": Case(LossConfig("dpo", beta=0.3), family="gpt2"),
    "pairs in one micro-batch": Case(LossConfig("bonbon"), micro=10**6),
    "a rank without a pair": Case(LossConfig("ipo", beta=0.3), dropped=(False, True, True, True)),
}


def part_of(rollout: Rollout, part: slice) -> Rollout:
    tensors = (x[part] for x in (rollout.tokens, rollout.logprobs, rollout.lengths, rollout.finished))
    return Rollout(rollout.prompt_ids[part], *tensors)


def make_learner(
    root, case: Case, ranks: Ranks, dtype=torch.float64, compute=torch.float64, parallel=ParallelConfig()
) -> Learner:
    models_ = []
    for name in ("policy", "reference"):
        model = decoder.load(root / f"{case.family}-{name}", dtype=dtype)
        model.activation_checkpointing = case.checkpointing
        if case.lora.enabled:
            lora.attach(model, case.lora, compute)
            adapters.begin(model, case.lora, seed=5)
        models_.append(shard(model, ranks, compute, parallel))
    where = ModelConfig(str(root / f"{case.family}-policy"))
    config = Config(model=where, loss=case.loss, critic=case.critic, parallel=parallel)
    adapter = case.lora if case.lora.enabled else None
    value = critic.make(config, models_[0], ranks, compute, adapter)
    optimizer = make_optimizer(models_[0], case.optim, None if value is None else value.module)
    reference = models_[0] if case.lora.enabled else models_[1].requires_grad_(False)
    return Learner(
        models_[0],
        reference if case.loss.has_reference else None,
        optimizer,
        case.loss,
        case.optim,
        ranks,
        0.8,
        9,
        MicroBatchLimit(case.micro, case.micro),
        3,
        value,
    )


def updated(root, case: Case, ranks: Ranks, **dtypes):
    """Metrics, full parameters and stored dtypes after two updates."""
    learner = make_learner(root, case, ranks, **dtypes)
    if case.loss.offline:
        chosen = chosen_by(case, ranks)
        stats = [offline.update(learner, chosen, OfflineConfig(n=3, alpha=0.2), 0.01) for _ in range(2)]
        return stats, full_tensors(learner.trained), {p.dtype for p in learner.model.parameters()}
    mine = ranks.share(4)
    adv = to_advantages(torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    rollout, dropped = part_of(random_rollout(LENGTHS, [1, 4, 2, 6]), mine), torch.tensor(case.dropped)[mine]
    ref = learner.reference_logprobs(rollout)
    stats = [
        learner.update(
            rollout, adv[mine], step=i, lr=0.01, critic_lr=0.02, beta=case.loss.beta, ref_logprobs=ref, dropped=dropped
        )
        for i in range(2)
    ]
    return stats, full_tensors(learner.trained), {p.dtype for p in learner.model.parameters()}


def chosen_by(case: Case, ranks: Ranks) -> offline.OfflineBatch:
    """This rank's winners or pairs: the first (and last) completion of every prompt that is not dropped."""
    rollout = random_rollout(LENGTHS, [1, 4, 2, 6])
    kept = [p for p, dropped in enumerate(case.dropped) if not dropped]
    rows = [3 * p + j for p in kept[ranks.rank :: ranks.world] for j in ((0, 2) if case.loss.paired else (0,))]
    ids = [rollout.completion_ids()[r] for r in rows]
    return offline.OfflineBatch([rollout.prompt_ids[r // 3] for r in rows], ids, 1 + case.loss.paired, len(kept))


def sampled(model, part: slice) -> Rollout:
    prompts = [[1, 5], [7], [9, 4, 4], [6, 5]]
    with gathered(model):
        return generation.generate(model, prompts[part], 3, SAMPLING, seed=11, index=range(4)[part])


def collectives(ranks: Ranks):
    mine = torch.tensor([[1.0, 2.0]]) * (ranks.rank + 1)
    return {
        "sum": ranks.sum(mine.clone()),
        "max": ranks.max(mine.clone()),
        "gather": ranks.gather(mine),
        "objects": ranks.gather_objects({"rank": ranks.rank}),
        "any": [ranks.any(False), ranks.any(ranks.rank == 1), ranks.any(True)],
        "share": [ranks.share(4), ranks.share(6)],
    }


def work(rank: int, root) -> None:
    torch.save(results_of(Ranks(rank, 2, CPU), root), root / f"{rank}.pt")


def results_of(ranks: Ranks, root) -> dict:
    results = {"collectives": collectives(ranks)}
    results["updates"] = {name: updated(root, case, ranks) for name, case in CASES.items()}
    learner = make_learner(root, CASES["one step"], ranks)
    shards = {name: tuple(p.to_local().shape) for name, p in learner.model.named_parameters()}
    results["sampled"] = sampled(learner.model, ranks.share(4))
    after = {name: tuple(p.to_local().shape) for name, p in learner.model.named_parameters()}
    results["shards"] = (shards, after)
    results["bfloat16"] = updated(root, CASES["one step"], ranks, dtype=torch.float32, compute=torch.bfloat16)
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    for family in ("llama", "gpt2"):
        tiny_model(root / f"{family}-policy", family, seed=0)
        tiny_model(root / f"{family}-reference", family, seed=1)
    return root


@pytest.fixture(scope="module")
def two(root):
    """Results of two ranks."""
    run_ranks(work, root)
    return [torch.load(root / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_collectives_of_two_ranks(two):
    for rank, found in enumerate(two):
        found = found["collectives"]
        assert found["sum"].tolist() == [[3, 6]]
        assert found["max"].tolist() == [[2, 4]]
        assert found["gather"].tolist() == [[1, 2], [2, 4]]
        assert found["objects"] == [{"rank": 0}, {"rank": 1}]
        assert found["any"] == [False, True, True]
        assert found["share"] == [slice(rank * 2, rank * 2 + 2), slice(rank * 3, rank * 3 + 3)]


def test_one_rank_needs_no_process_group():
    found = collectives(Ranks(0, 1, CPU))
    assert found["sum"].tolist() == found["max"].tolist() == found["gather"].tolist() == [[1, 2]]
    assert found["objects"] == [{"rank": 0}]
    assert found["any"] == [False, False, True]
    assert found["share"] == [slice(0, 4), slice(0, 6)]


HYBRID = {
    "replicas": ("one step", ParallelConfig(replicate=2)),
    "replicas with a critic": ("a critic", ParallelConfig(replicate=2)),
    "replicas with adapters": ("adapters", ParallelConfig(replicate=2)),
    "replicas with Muon": ("muon", ParallelConfig(replicate=2)),
    "parameters are kept": ("one step", ParallelConfig(reshard_after_forward=False)),
}


def saved_and_resumed(root, ranks: Ranks, parallel: ParallelConfig, resume: bool) -> dict[str, torch.Tensor]:
    """Parameters after two updates with adapters; a checkpoint is saved between them, or loaded before the second."""
    learner, mine = make_learner(root, CASES["adapters"], ranks, parallel=parallel), ranks.share(4)
    rollout = part_of(random_rollout(LENGTHS, [1, 4, 2, 6]), mine)
    adv = to_advantages(torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[mine]
    given = {"model": learner.model, "optimizer": learner.optimizer}
    if resume:
        assert checkpoint.load(root / "hybrid", **given) == {"at": 1}
    for step in (1,) if resume else (0, 1):
        ref = learner.reference_logprobs(rollout)
        learner.update(rollout, adv, step=step, lr=0.01, beta=0.3, ref_logprobs=ref)
        if step == 0:
            checkpoint.save(root / "hybrid", 1, state={"at": 1}, trained_only=True, **given)
    return full_tensors(learner.model)


def work_of_four(rank: int, root) -> None:
    ranks, results = Ranks(rank, 4, CPU), {}
    for name, (case, parallel) in HYBRID.items():
        results[name] = updated(root, CASES[case], ranks, parallel=parallel)
    learner = make_learner(root, CASES["one step"], ranks, parallel=ParallelConfig(replicate=2))
    results["rows"] = len(learner.model.embed.weight.to_local()), len(learner.reference.embed.weight.to_local())
    results["sampled"] = sampled(learner.model, ranks.share(4)).completion_ids()
    results["saved"] = saved_and_resumed(root, ranks, ParallelConfig(replicate=2), resume=False)
    torch.save(results, root / f"four-{rank}.pt")


@pytest.fixture(scope="module")
def four(root):
    """Results of four ranks in two replicas."""
    run_ranks(work_of_four, root, ranks=4)
    return [torch.load(root / f"four-{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.mark.parametrize("name", HYBRID)
def test_two_replicas_of_two_ranks_compute_the_update_of_one(root, four, name):
    truth, parameters, _ = updated(root, CASES[HYBRID[name][0]], Ranks(0, 1, CPU))
    for found in four:
        assert_same(found[name], truth, parameters)


def test_replicas_hold_half_of_the_rows_and_sample_the_same(root, four):
    model = decoder.load(root / "llama-policy", dtype=torch.float64)
    rows = len(model.embed.weight) // 2
    assert [found["rows"] for found in four] == [(rows, rows)] * 4
    truth = sampled(model, slice(None)).completion_ids()
    assert [ids for found in four for ids in found["sampled"]] == truth


def test_one_rank_resumes_what_two_replicas_saved(root, four):
    found = saved_and_resumed(root, Ranks(0, 1, CPU), ParallelConfig(), resume=True)
    for name, value in four[0]["saved"].items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


def test_the_number_of_replicas_divides_the_number_of_ranks():
    assert ParallelConfig(replicate=2).faults(4) == []
    for replicate, world in ((3, 4), (0, 4), (-2, 4), (8, 4)):
        (fault,) = ParallelConfig(replicate=replicate).faults(world)
        assert f"parallel.replicate = {replicate}: allowed is a divisor of the number of ranks, {world}" in fault


def assert_same(found, truth, parameters):
    stats, whole, _ = found
    for ours, theirs in zip(stats, truth, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key
    assert whole.keys() == parameters.keys()
    for key, value in parameters.items():
        torch.testing.assert_close(whole[key], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_the_update_of_one(root, two, name):
    truth, parameters, _ = updated(root, CASES[name], Ranks(0, 1, CPU))
    start = updated(root, replace(CASES[name], dropped=(True,) * 4), Ranks(0, 1, CPU))[1]
    for k in start:
        trained = not CASES[name].lora.enabled or lora.is_adapter(k) or k == "critic.head.weight"
        assert bool((parameters[k] != start[k]).any()) == trained, k
    for found in two:
        assert_same(found["updates"][name], truth, parameters)
    assert two[0]["updates"][name][0] == two[1]["updates"][name][0]  # bit for bit, so both ranks decide alike


def test_two_ranks_sample_the_same_completions_as_one_and_shard_again(root, two):
    truth = sampled(decoder.load(root / "llama-policy", dtype=torch.float64), slice(None))
    ids = [ids for found in two for ids in found["sampled"].completion_ids()]
    assert ids == truth.completion_ids()
    assert len({len(x) for x in ids}) > 1
    whole = {name: tuple(p.shape) for name, p in decoder.load(root / "llama-policy").named_parameters()}
    for found in two:
        before, after = found["shards"]
        assert before == after
        assert all(2 * shape[0] == whole[name][0] for name, shape in after.items())


def test_bfloat16_has_float32_master_weights(root, two):
    truth = updated(root, CASES["one step"], Ranks(0, 1, CPU))
    for found in two:
        stats, parameters, dtypes = found["bfloat16"]
        assert dtypes == {torch.float32}
        assert stats[0]["loss"] == pytest.approx(truth[0][0]["loss"], rel=0.05)
        assert stats[0]["kl"] == pytest.approx(truth[0][0]["kl"], rel=0.05)
        coarse = [(p == p.bfloat16().double()).double().mean() for p in parameters.values()]
        assert max(coarse) < 0.1  # the updates of AdamW are not rounded to 8 bits
