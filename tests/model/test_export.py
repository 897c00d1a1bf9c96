"""Sharded models are saved and read tensor by tensor: the same bytes for any number of ranks, in every family."""

import os
import resource
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.helpers import full_tensors, run_ranks, tiny_model
from support.random_models import CASES, random_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from nlgrpo.model import architectures, decoder, fsdp, reward_model, shards
from nlgrpo.runtime import checkpoint
from nlgrpo.runtime.distributed import Ranks

CPU = torch.device("cpu")
FAMILIES = ["llama", "llama-tied-bias", "mistral", "qwen2", "qwen3-tied", "neox", "gpt2", "gpt2-untied"]
CHECKPOINT = "reward/checkpoints/step-00000001"
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Random models, a run of a reward model with a checkpoint, and what 2, 3 and 4 ranks made of them.

    No size but the head count is a multiple of all numbers of ranks: V = 99, D = 48, a score head has one row.
    """
    root = tmp_path_factory.mktemp("export")
    tiny_model(root / "words")
    for case in FAMILIES:
        random_model(case).save_pretrained(root / case)
    model, _ = reward_model.load_reward_model(str(root / "llama"), seed=5)
    (root / "reward").mkdir()
    (root / "reward" / "config.json").write_text(f'{{"model": {{"path": "{root / "llama"}"}}}}')
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    checkpoint.save(root / "reward" / "checkpoints", 1, model=model, optimizer=sgd(model), state={})
    for ranks in (2, 3):
        run_ranks(on_rank, root, ranks, ranks=ranks)
    run_ranks(on_mesh, root, ranks=4)
    return root


def sgd(model):
    return torch.optim.SGD(model.parameters())


def on_rank(rank, root, world):
    """Read and save every family; the gathered parameters are compared with DTensor's own."""
    ranks = Ranks(rank, world, CPU)
    shard = partial(fsdp.shard, ranks=ranks, compute=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(root / "words")
    read = {}
    for case in FAMILIES:
        model = decoder.load(root / case, shard=shard)
        assert all(p.to_local().shape[0] == -(-len(p) // world) for p in model.parameters() if rank == 0)
        read[case] = full_tensors(model)
        check_each_full(model, read[case], rank)
        for dtype in (torch.float32, torch.bfloat16):
            folder = root / f"{case} {dtype} {world}"
            write = partial(decoder.save, model, folder, dtype=dtype)
            fsdp.save_on_first(model, dtype, ranks, folder, lambda pairs, write=write: write(parameters=pairs))
            assert (folder / FILE).is_file()  # on every rank: complete on return
    for name in (*FAMILIES, CHECKPOINT):
        model, trained = reward_model.load_reward_model(str(root / name), seed=3, shard=shard)
        assert trained == (name == CHECKPOINT)
        read[f"{name} score"] = full_tensors(model)
        folder = root / f"{name} score {world}"
        write = partial(reward_model.save, model, folder, tokenizer=tokenizer, pad=0, max_length=64)
        write = partial(write, dtype=torch.float32)
        fsdp.save_on_first(model, torch.float32, ranks, folder, lambda pairs, write=write: write(parameters=pairs))
    torch.save(read, root / f"{world}-{rank}.pt")
    full_disk(rank, ranks, root, model)


def check_each_full(model, truth, rank):
    names = []
    for name, value in fsdp.each_full(model, torch.float64):
        names.append(name)
        assert (value is None) == (rank > 0)
        assert value is None or torch.equal(value, truth[name]), name
    assert names == list(truth)


def full_disk(rank, ranks, root, model):
    """Rank 0 cannot write more than 9,000 bytes into a file: every rank raises, and none waits for another."""
    folder, before = root / "full", resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, before[1]))
    write = partial(decoder.save, decoder.load(root / "llama"), folder, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"cannot write into {folder}: {os.strerror(27)}. Complete files stay"):
        fsdp.save_on_first(model, torch.float32, ranks, folder, lambda pairs: write(parameters=pairs))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(folder.glob("*.safetensors*"))
    assert ranks.gather_objects(rank) == list(range(ranks.world))  # the group still works


def on_mesh(rank, root):
    """HSDP: two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = decoder.load(root / "neox", shard=lambda model: fully_shard(model, mesh=mesh))
    assert shards.rows(model.embed.weight) == (slice(0, 50), slice(50, 99))[rank % 2]
    found, truth = full_tensors(model), full_tensors(decoder.load(root / "neox"))
    assert all(torch.equal(found[name], truth[name]) for name in truth)
    check_each_full(model, truth, rank)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_shards_that_are_read_make_the_model_of_one_rank(work, case):
    truth = full_tensors(decoder.load(work / case))
    theirs = full_tensors(reward_model.load_reward_model(str(work / case), seed=3)[0])
    for world in (2, 3):
        for rank in range(world):
            found = torch.load(work / f"{world}-{rank}.pt")
            for expected, ours in ((truth, found[case]), (theirs, found[f"{case} score"])):
                assert ours.keys() == expected.keys()
                assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_checkpoint_is_read_sharded(work):
    begun, begun_trained = reward_model.load_reward_model(str(work / "llama"), seed=5)
    saved, trained = reward_model.load_reward_model(str(work / CHECKPOINT), seed=3)
    assert (begun_trained, trained) == (False, True)
    for rank in range(2):
        found = torch.load(work / f"2-{rank}.pt")[f"{CHECKPOINT} score"]
        for (name, value), (_, before) in zip(saved.named_parameters(), begun.named_parameters(), strict=True):
            assert torch.equal(value, before + 0.5)
            assert torch.equal(found[name], value.double())


@pytest.mark.slow
def test_a_checkpoint_is_read_in_another_dtype(work):
    exact, _ = reward_model.load_reward_model(str(work / CHECKPOINT))
    rounded, _ = reward_model.load_reward_model(str(work / CHECKPOINT), dtype=torch.bfloat16)
    for ours, truth in zip(rounded.parameters(), exact.parameters(), strict=True):
        assert torch.equal(ours, truth.bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", FAMILIES)
def test_transformers_reads_the_same_tensors_from_any_number_of_ranks(work, case, dtype, tmp_path):
    theirs = AutoModelForCausalLM.from_pretrained(work / case, dtype=dtype)
    decoder.save(decoder.load(work / case, dtype=dtype), tmp_path)
    for folder in (tmp_path, work / f"{case} {dtype} 2", work / f"{case} {dtype} 3"):
        assert (folder / FILE).read_bytes() == (tmp_path / FILE).read_bytes()
        again, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
        assert not any(report.values()), report
        assert again.dtype == dtype
        weights, truth = again.state_dict(), theirs.state_dict()
        assert weights.keys() == truth.keys()
        assert all(torch.equal(weights[name], truth[name]) for name in truth)
    stored = load_file(tmp_path / FILE)
    head = "embed_out.weight" if case == "neox" else "lm_head.weight"
    assert (head in stored) == (not theirs.config.tie_word_embeddings)  # tied weights are stored once


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, CHECKPOINT])
def test_transformers_reads_the_same_classifier_from_any_number_of_ranks(work, name, tmp_path):
    ours, _ = reward_model.load_reward_model(str(work / name), seed=3)
    tokenizer = AutoTokenizer.from_pretrained(work / "words")
    reward_model.save(ours, tmp_path, tokenizer=tokenizer, pad=0, max_length=64)
    for folder in (tmp_path, work / f"{name} score 2", work / f"{name} score 3"):
        assert (folder / FILE).read_bytes() == (tmp_path / FILE).read_bytes()
    again, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(again.score.weight, ours.head.weight)
    embedding = again.get_input_embeddings().weight
    assert torch.equal(embedding, ours.embed.weight)
    if name in FAMILIES:
        assert torch.equal(embedding, AutoModelForCausalLM.from_pretrained(work / name).get_input_embeddings().weight)


@pytest.mark.parametrize("case", ["llama", "neox", "gpt2"])
def test_reading_some_rows_equals_reading_all(tmp_path, case):
    """Rows that begin and end anywhere, so also within a head or in one of the fused projections."""
    random_model(case).save_pretrained(tmp_path)
    model = decoder.load(tmp_path)
    files = decoder.hf_weights.Checkpoint(tmp_path)
    for name, source in decoder.tensor_map(model.shape).items():
        whole = model.get_parameter(name).detach()
        for rows in (slice(0, 1), slice(1, 6), slice(7, len(whole)), slice(5, 5), slice(0, len(whole))):
            out = torch.full_like(whole[rows], torch.nan)
            decoder.hf_weights._read_rows(files.find(source), source.layout, model.shape, rows, out)
            assert torch.equal(out, whole[rows]), name


def test_parts_that_do_not_fit_together_are_refused(tmp_path):
    theirs = random_model("llama")
    theirs.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.randn(72, 47))
    theirs.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"up_proj.* has shape \(\(72, 48\), \(72, 47\)\), but .* requires \(144, 48\)"
    ):
        decoder.load(tmp_path)


def test_every_family_is_covered():
    kinds = {CASES[case][0] for case in FAMILIES}
    assert kinds == {kind for kind, _ in CASES.values()}
    assert len(kinds) == len(architectures.FAMILIES)
    assert all(hasattr(transformers, kind) for kind in kinds)
