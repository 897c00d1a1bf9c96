"""`ECDF.all_reduce` over three ranks compared with the ECDF of all samples."""

import pytest
import torch
import torch.distributed as dist
from support.helpers import run_ranks

from nlgrpo.calibration.ecdf import ECDF

pytestmark = pytest.mark.slow

RANKS = 3
SIZES = [[4, 1, 30], [2, 17, 3], [1, 1, 200]]  # sizes of the ragged rows, per rank


def shards(rank):
    """Samples of a rank in each layout and dtype; sizes differ between ranks."""
    g = torch.Generator().manual_seed(rank)
    draw = lambda *shape: (torch.randn(*shape, generator=g) * 3).round() / 3  # noqa: E731
    M, total = 5 + 40 * rank, sum(SIZES[rank])
    offsets = torch.tensor([0, *torch.tensor(SIZES[rank]).cumsum(0)])
    return {
        "one row": {"samples": draw(M)},
        "float64": {"samples": draw(M).double()},
        "bfloat16": {"samples": draw(M).bfloat16()},
        "float16": {"samples": draw(M).half()},
        "dense": {"samples": draw(2, 2, M)},
        "weighted": {"samples": draw(M), "weights": torch.rand(M, generator=g)},
        "no rows": {"samples": draw(0, M)},
        "ragged": {"samples": draw(total), "offsets": offsets},
        "weighted and ragged": {"samples": draw(total), "weights": torch.rand(total, generator=g), "offsets": offsets},
    }


WRONG = {
    "dtype": lambda rank: ECDF(torch.ones(3, dtype=[torch.float32, torch.float64, torch.float32][rank])),
    "rows": lambda rank: ECDF(torch.ones(1 + rank, 3)),
    "weights": lambda rank: ECDF(torch.ones(3), weights=torch.ones(3) if rank == 1 else None),
}


def work(rank, root):
    found = {name: ECDF(**shard).all_reduce() for name, shard in shards(rank).items()}
    refusals = {}
    for name, make in WRONG.items():
        try:
            make(rank).all_reduce()
        except ValueError as error:
            refusals[name] = str(error)
    pair = dist.new_group([0, 2])
    alone = dist.new_group([1])
    part = ECDF(shards(rank)["one row"]["samples"]).all_reduce(alone if rank == 1 else pair)
    torch.save((found, refusals, part), root / f"{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Results, refusals and subgroup result of each rank."""
    root = tmp_path_factory.mktemp("ranks")
    run_ranks(work, root, ranks=RANKS)
    return [torch.load(root / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def merged(name):
    """The ECDF of the samples of all ranks, row by row."""
    parts = [shards(rank)[name] for rank in range(RANKS)]
    if "offsets" not in parts[0]:
        return ECDF(**{key: torch.cat([part[key] for part in parts], -1) for key in parts[0]})
    joined = {
        key: torch.cat([part[key].split(SIZES[rank])[row] for row in range(3) for rank, part in enumerate(parts)])
        for key in parts[0].keys() - {"offsets"}
    }
    return ECDF(**joined, offsets=sum(part["offsets"] for part in parts))


@pytest.mark.parametrize("name", shards(0))
def test_every_rank_gets_the_ecdf_of_all_samples(ranks, name):
    truth, ours = merged(name), [found[name] for found, _, _ in ranks]
    for e in ours:
        assert repr(e) == repr(truth)
        assert torch.equal(e.samples, truth.samples)
        assert truth.weights is None or torch.equal(e.weights, truth.weights)
        assert truth.offsets is None or torch.equal(e.offsets, truth.offsets)
        assert torch.equal(e.samples.view(torch.uint8), ours[0].samples.view(torch.uint8))  # also the signs of zeros


def test_different_layouts_are_refused_on_all_ranks(ranks):
    for _, refusals, _ in ranks:
        assert refusals.keys() == WRONG.keys()
        assert all("per rank" in text for text in refusals.values())


def test_subgroups(ranks):
    samples = [shards(rank)["one row"]["samples"] for rank in range(RANKS)]
    pair = torch.cat((samples[0], samples[2])).sort().values
    for rank, (_, _, part) in enumerate(ranks):
        assert torch.equal(part.samples, samples[1].sort().values if rank == 1 else pair)
