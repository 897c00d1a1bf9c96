"""Two ranks compared with one: collectives, sharding, and equal updates for any distribution of the completions."""

import signal
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from support.helpers import counted_sums, full_tensors, random_rollout, run_ranks, tiny_model

from nlgrpo.config.schema import Config, CriticConfig, LossConfig, ModelConfig, OfflineConfig, OptimConfig
from nlgrpo.engine import cascade_sampling, generation, guided_search
from nlgrpo.engine.generation import Rollout
from nlgrpo.engine.kv_cache import KVCache
from nlgrpo.engine.sampling import Sampling
from nlgrpo.errors import UserError
from nlgrpo.model import adapters, decoder, lora
from nlgrpo.model.fsdp import gathered, shard
from nlgrpo.model.lora import LoraConfig
from nlgrpo.objectives.advantages import advantages as to_advantages
from nlgrpo.runtime import checkpoint
from nlgrpo.runtime.device import MicroBatchLimit
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.sections import ParallelConfig
from nlgrpo.training import critic, offline
from nlgrpo.training.learner import Learner, make_optimizer

CPU = torch.device("cpu")
OPTIM = OptimConfig(eps=1e-3, max_grad_norm=0.5, weight_decay=0.1)
MUON = replace(OPTIM, algorithm="muon")
# the second rank's completions are short: it has fewer micro-batches, and in some minibatches none
LENGTHS = torch.tensor([[9, 8, 9], [7, 9, 8], [1, 2, 1], [2, 1, 1]])
SAMPLING = Sampling(max_new_tokens=8, stop_ids=(2, 5, 8, 11, 14, 17, 20))
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
    "another sampler": Case(LossConfig(beta=0.3, correction="tis:0.5")),
    "another sampler, by token": Case(
        LossConfig(level="sequence", beta=0.3, minibatches=3, correction="mis:0.2:1.5", correction_level="token")
    ),
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
    "a second term": Case(LossConfig(beta=0.3, jeffreys=0.4, minibatches=2)),
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
            adapters.init_adapters(model, case.lora, seed=5)
        models_.append(shard(model, ranks, compute, parallel))
    where = ModelConfig(str(root / f"{case.family}-policy"))
    config = Config(model=where, loss=case.loss, critic=case.critic, parallel=parallel)
    adapter = case.lora if case.lora.enabled else None
    value = None
    if case.loss.algorithm == "ppo":
        value = critic.make_critic(config, models_[0], ranks, compute, adapter)
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


def updated(root, case: Case, ranks: Ranks, before=lambda learner: None, **options):
    """Metrics, full parameters and stored dtypes after two updates. ``before``: called with the learner."""
    learner = make_learner(root, case, ranks, **options)
    before(learner)
    if case.loss.offline:
        chosen = chosen_by(case, ranks)
        stats = [offline.update(learner, chosen, OfflineConfig(n=3, alpha=0.2), 0.01) for _ in range(2)]
        return stats, full_tensors(learner.trained), {p.dtype for p in learner.model.parameters()}
    mine = ranks.share(4)
    adv = to_advantages(torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    rollout, dropped = part_of(random_rollout(LENGTHS, [1, 4, 2, 6]), mine), torch.tensor(case.dropped)[mine]
    ref = learner.reference_logprobs(rollout)
    other = partial(offline.add_likelihood, learner, chosen_by(case, ranks)) if case.loss.jeffreys else None
    given = {"critic_lr": 0.02, "beta": case.loss.beta, "ref_logprobs": ref, "dropped": dropped, "other": other}
    stats = []
    for step in range(2):
        corrected = learner.corrected(rollout)
        stats.append(learner.update(rollout, adv[mine], step=step, lr=0.01, corrected=corrected, **given))
    return stats, full_tensors(learner.trained), {p.dtype for p in learner.model.parameters()}


def chosen_by(case: Case, ranks: Ranks) -> offline.OfflineBatch:
    """This rank's winners or pairs: two of every prompt that is not dropped."""
    rollout = random_rollout(LENGTHS, [1, 4, 2, 6])
    kept = [p for p, dropped in enumerate(case.dropped) if not dropped]
    rows = [3 * p + j for p in kept[ranks.rank :: ranks.world] for j in ((0, 2, 1, 2) if case.loss.paired else (0, 1))]
    ids = [rollout.completion_ids()[r] for r in rows]
    return offline.OfflineBatch([rollout.prompt_ids[r // 3] for r in rows], ids, 1 + case.loss.paired, 2 * len(kept))


PROMPTS = [[1, 5], [7], [9, 4, 4], [6, 5]]


def sampled(model, part: slice, max_rows: int = 256, by_block: bool = False) -> Rollout:
    with gathered(model, by_block=by_block):
        how = {"seed": 11, "index": range(4)[part], "max_rows": max_rows}
        return generation.generate(model, PROMPTS[part], 3, SAMPLING, **how)


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
    for seed, name in enumerate(("policy", "reference")):
        for family in ("llama", "gpt2"):
            tiny_model(root / f"{family}-{name}", family, seed=seed)
        tiny_model(root / f"deep-{name}", seed=seed, num_hidden_layers=5)
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


REPLICAS = ParallelConfig(replicate=2)
HYBRID = {
    "replicas": (CASES["one step"], REPLICAS),
    "replicas with minibatches": (replace(CASES["minibatches"], micro=1), REPLICAS),
    "replicas with a critic": (replace(CASES["a critic"], micro=1), REPLICAS),
    "replicas with adapters": (replace(CASES["adapters"], micro=1), REPLICAS),
    "replicas with Muon": (CASES["muon"], REPLICAS),
    "replicas with pairs": (replace(CASES["pairs"], micro=1), REPLICAS),
    "replicas with a second term": (replace(CASES["a second term"], micro=1), REPLICAS),
    "parameters are kept": (CASES["one step"], ParallelConfig(reshard_after_forward=False)),
    "offloaded": (CASES["one step"], ParallelConfig(offload=True)),
    "offloaded adapters and a critic": (CASES["adapters and a critic"], ParallelConfig(replicate=2, offload=True)),
}
# FSDP's groups with gradients (2 blocks and the rest; adapters are in blocks only), and how often each is summed over
# replicas: once per optimizer step, and once more for a second term
SUMS = {
    "replicas": (3, 2),
    "replicas with minibatches": (3, 12),
    "replicas with a critic": (2 * 3, 12),
    "replicas with adapters": (2, 12),
    "replicas with Muon": (3, 2),
    "replicas with pairs": (3, 2),
    "replicas with a second term": (3, 2 * 4),
    "parameters are kept": (0, 2),
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
        with counted_sums() as counts:
            results[name] = updated(root, case, ranks, parallel=parallel)
        results[f"sums of {name}"] = counts
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


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRID)
def test_two_replicas_of_two_ranks_compute_the_update_of_one(root, four, name):
    truth, parameters, _ = updated(root, HYBRID[name][0], Ranks(0, 1, CPU))
    for found in four:
        assert_same(found[name], truth, parameters)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMS)
def test_replicas_are_summed_once_per_optimizer_step(four, name):
    groups, sums = SUMS[name]
    for found in four:
        counts = found[f"sums of {name}"]
        assert counts["sums"] == groups * sums
        assert counts["backward"] > sums  # several micro-batches


@pytest.mark.slow
def test_replicas_hold_half_of_the_rows_and_sample_the_same(root, four):
    model = decoder.load(root / "llama-policy", dtype=torch.float64)
    rows = len(model.embed.weight) // 2
    assert [found["rows"] for found in four] == [(rows, rows)] * 4
    truth = sampled(model, slice(None)).completion_ids()
    assert [ids for found in four for ids in found["sampled"]] == truth


@pytest.mark.slow
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


# --- sampling by block ------------------------------------------------------------------------------------------------

BY_BLOCK = {
    "decode_block": Case(LossConfig(beta=0.3), family="deep"),
    "Block.forward": CASES["tied embeddings"],
    "adapters": replace(CASES["adapters"], family="deep"),
    "a trained head": CASES["adapters and a trained head"],
}
# ranks have different numbers of prompts, and with 3 rows one wave per prompt; the last of four ranks has none
PARTS = {2: [slice(0, 3), slice(3, 4)], 4: [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 4)]}


def gathered_blocks(model) -> int:
    """Number of blocks that FSDP has gathered or begun to gather, which only private attributes of PyTorch tell."""
    groups = []
    for block in model.blocks:
        state = block._get_fsdp_state()
        # torch 2.11 has one group per module, later versions a list
        groups += state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return sum(group.is_unsharded or group._all_gather_result is not None for group in groups)


@contextmanager
def observed(model, at=lambda number: None):
    """Collect the number of gathered blocks at each block that computes; ``at`` is called with the block's number."""
    seen, run, forward = [], KVCache.run_block, decoder.Block.forward

    def around(original, self, *arguments, **options):
        seen.append(gathered_blocks(model))
        at(len(seen))
        return original(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(KVCache, "run_block", lambda *a, **k: around(run, *a, **k))
        patched.setattr(decoder.Block, "forward", lambda *a, **k: around(forward, *a, **k))
        yield seen


def by_block(root, case: Case, ranks: Ranks) -> dict:
    """Samples before and after two updates, of the first of which nothing else has gathered the model before."""
    part, found, learners = PARTS[ranks.world][ranks.rank], {}, []
    parallel = ParallelConfig(replicate=ranks.world // 2)

    def before(learner: Learner) -> None:
        learners.append(learner)
        shards = [tuple(p.to_local().shape) for p in learner.model.parameters()]
        with observed(learner.model) as seen:
            found["before"] = sampled(learner.model, part, 3, by_block=True)
        found["gathered"], found["after"] = seen, gathered_blocks(learner.model)
        found["sharded"] = shards == [tuple(p.to_local().shape) for p in learner.model.parameters()]

    found["update"] = updated(root, case, ranks, before, parallel=parallel)
    model = learners[0].model
    pairs = [[sampled(model, part, 3, by_block=flag) for flag in (False, True)]]
    with lora.disabled(model):
        pairs.append([sampled(model, part, 3, by_block=flag) for flag in (False, True)])
    return found | {"pairs": pairs}


class Sums:
    """Value function: the sum of the token ids, modulo 7 per chunk."""

    name = "sums"

    def begin(self, prompts) -> None:
        self.sums = [0.0] * len(prompts)

    def score(self, rows, chunks) -> torch.Tensor:
        self.sums = [self.sums[row] + sum(chunk) % 7 for row, chunk in zip(rows, chunks, strict=True)]
        return torch.tensor(self.sums)

    def keep(self, rows) -> None:
        self.sums = [self.sums[row] for row in rows]


def searched(model, part: slice, flag: bool) -> list:
    """Candidates of a guided search, and responses of a cascade of segments."""
    prompts, how = PROMPTS[part], guided_search.Search(2, 2, 3)
    cascade = cascade_sampling.Cascade(4.0, entropy=0.5, tries=3, shortest=1)
    with gathered(model, by_block=flag):
        found = guided_search.search(model, prompts, how, SAMPLING, [(Sums(), 1.0)], seed=3, max_rows=4)[0]
    with gathered(model, by_block=flag):
        rewards = lambda _, tokens: torch.tensor([float(sum(ids) % 5) for ids in tokens])  # noqa: E731
        return [found, cascade_sampling.sample(model, prompts, cascade, SAMPLING, rewards, seed=3, max_rows=2)[0]]


def failing(model, ranks: Ranks, rank: int, number: int) -> str:
    """The message on this rank if ``rank`` fails in the middle of a pass."""

    def at(count: int) -> None:
        if ranks.rank == rank and count == number:
            raise UserError(f"rank {rank} has failed")

    with observed(model, at), pytest.raises(ValueError, match="has failed") as caught:
        ranks.agree(lambda: sampled(model, PARTS[2][ranks.rank], 3, by_block=True))
    return str(caught.value)


def work_by_block(rank: int, root, world: int) -> None:
    signal.alarm(120)  # a rank that waits for another one forever
    ranks = Ranks(rank, world, CPU)
    results = {name: by_block(root, case, ranks) for name, case in BY_BLOCK.items()}
    if world == 2:
        model = make_learner(root, BY_BLOCK["decode_block"], ranks).model
        results["searched"] = [searched(model, PARTS[2][rank], flag) for flag in (False, True)]
        # the third block of the prompts, and of the first token that is read
        results["failures"] = [failing(model, ranks, first, number) for first in (0, 1) for number in (3, 8)]
        results["after failures"] = gathered_blocks(model), sampled(model, PARTS[2][rank], 3, by_block=True)
    torch.save(results, root / f"by-block-{world}-{rank}.pt")


@pytest.fixture(scope="module", params=(2, pytest.param(4, marks=pytest.mark.slow)))
def ranks_by_block(root, request):
    """Results of two ranks, or of four in two replicas."""
    run_ranks(work_by_block, root, request.param, ranks=request.param)
    return [torch.load(root / f"by-block-{request.param}-{r}.pt", weights_only=False) for r in range(request.param)]


def assert_equal(ours: Rollout, theirs: Rollout) -> None:
    """Bit for bit."""
    assert ours.completion_ids() == theirs.completion_ids()
    assert torch.equal(ours.logprobs, theirs.logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_BLOCK)
def test_samples_by_block_are_those_of_the_gathered_model(root, ranks_by_block, name):
    case = BY_BLOCK[name]
    start = sampled(decoder.load(root / f"{case.family}-policy", dtype=torch.float64), slice(None)).completion_ids()
    found = [rank[name] for rank in ranks_by_block]
    assert [ids for rank in found for ids in rank["before"].completion_ids()] == start
    for rank in found:
        for whole, block in rank["pairs"]:
            assert_equal(block, whole)
    tuned = [ids for rank in found for ids in rank["pairs"][0][1].completion_ids()]
    assert tuned != start  # the two updates count
    if case.lora.enabled:
        assert [ids for rank in found for ids in rank["pairs"][1][1].completion_ids()] == start
    assert len({len(rank["gathered"]) for rank in found}) > 1  # passes


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_BLOCK)
def test_at_most_two_blocks_are_gathered_and_then_none(ranks_by_block, name):
    for rank in (found[name] for found in ranks_by_block):
        assert max(rank["gathered"], default=2) == 2  # the next one is gathered meanwhile
        assert rank["after"] == 0
        assert rank["sharded"]


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_BLOCK)
def test_training_after_sampling_by_block(root, ranks_by_block, name):
    truth, parameters, _ = updated(root, BY_BLOCK[name], Ranks(0, 1, CPU))
    for found in ranks_by_block:
        assert_same(found[name]["update"], truth, parameters)


@pytest.mark.slow
@pytest.mark.parametrize("ranks_by_block", [2], indirect=True)
def test_searches_by_block_are_those_of_the_gathered_model(ranks_by_block):
    for whole, block in (rank["searched"] for rank in ranks_by_block):
        assert repr(block) == repr(whole)  # some values are NaN


@pytest.mark.slow
@pytest.mark.parametrize("ranks_by_block", [2], indirect=True)
def test_a_rank_that_fails_in_a_pass_by_block_ends_all_ranks(ranks_by_block):
    expected = [f"rank {rank} has failed" for rank in (0, 0, 1, 1)]
    for found in ranks_by_block:
        assert found["failures"] == expected
        assert found["after failures"][0] == 0
        assert_equal(found["after failures"][1], found["decode_block"]["before"])


def work_mixed(rank: int, root, world: int) -> None:
    signal.alarm(120)
    types = {"dtype": torch.float32, "compute": torch.bfloat16}
    model, part = make_learner(root, BY_BLOCK["decode_block"], Ranks(rank, world, CPU), **types).model, slice(rank, 4)
    assert_equal(sampled(model, part, 3, by_block=True), sampled(model, part, 3))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_samples_by_block_in_bfloat16(root, world):
    """One rank gathers as well: it casts its float32 parameters."""
    run_ranks(work_mixed, root, world, ranks=world)


def test_one_rank_without_shards_samples_by_block_as_otherwise(root):
    model = decoder.load(root / "deep-policy", dtype=torch.float64)
    assert_equal(sampled(model, slice(None), by_block=True), sampled(model, slice(None)))
