"""Sampling at the shapes of 0.5B and 7B: time and launches of a token, the sampler, the attention, memory, peers."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import torch
from random_models import random_prompts, word_tokenizer
from samplers import by_nlgrpo, by_transformers, by_vllm
from transformers import AutoModelForCausalLM

from gpu_kit.child import Kit, Skip, message
from gpu_kit.measuring import need, peak, profiled, regions, release, synchronize
from gpu_kit.models import config_of, decoder_of, fill
from nlgrpo.apps.plan import ahead, memory
from nlgrpo.config.schema import Config, from_dict
from nlgrpo.engine import sampling as engine_sampling
from nlgrpo.kernels import decode
from nlgrpo.model import decoder as decoder_module
from nlgrpo.model.decoder import Decoder

SAMPLES, PROMPT = 8, 256  # completions of a prompt; its tokens, about
TOKENS, PROFILED = 33, 3  # of a completion; the first comes from the prefill
ROWS = (64, 256, 1024)
PEERS_AT = 256  # rows


def run(kit: Kit) -> None:
    shapes = kit.pick(("0.5B", "7B"), ("tiny", "tiny, untied"))
    for number, name in enumerate(shapes):
        try:
            sampled(kit, name)
        except Skip as reason:
            kit.put(**{name: f"skipped: {reason}"})
            continue
        if number == 0:
            peers(kit, name)


def sampled(kit: Kit, name: str) -> None:
    """Measure our engine at one shape for several numbers of rows."""
    config = config_of(name)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    need(2.2 * parameters, kit.device)
    model = decoder_of(config, kit.device)
    found: list[dict[str, Any]] = []
    for rows in kit.pick(ROWS, (8, 16)):
        try:
            found.append(one(kit, model, name, rows))
        except torch.OutOfMemoryError:
            found.append({"rows": rows, "error": "out of memory"})
        kit.put(**{name: {"parameters": parameters, "rows": found}})
        release(kit.device)
    del model
    release(kit.device)
    if "error" in found[0]:
        raise RuntimeError(f"{name}: out of memory at {found[0]['rows']} rows")


def one(kit: Kit, model: Decoder, name: str, rows: int) -> dict[str, Any]:
    """Measure one number of rows: a run of many tokens less one of a single token is the decoding."""
    prompts = inputs(kit, rows, model.shape.vocab)
    long, middle, short = (by_nlgrpo(model, SAMPLES, limit, rows=rows, stop_ids=()) for limit in (TOKENS, PROFILED, 1))
    long(prompts, 0)  # compiles, and fills the allocator
    with peak(kit.device) as largest:
        all_tokens = timed(kit, long, prompts)
        measured_peak = largest()
    prefill = timed(kit, short, prompts)
    token = (all_tokens - prefill) / (TOKENS - 1)
    with regions(attention=(decode, "branch_attention"), sampler=(engine_sampling, "sample_tokens")):
        whole = profiled(lambda: middle(prompts, 2), kit.device)
        begun = profiled(lambda: short(prompts, 2), kit.device)
    count = PROFILED - 1
    return {
        "rows": rows,
        "prefill_seconds": prefill,
        "seconds_per_token": token,
        "tokens_per_second": rows / token,
        "kernel_seconds_per_token": (whole.seconds - begun.seconds) / count,
        "launches_per_token": (whole.launches - begun.launches) / count,
        "launches_per_layer": (whole.launches - begun.launches) / count / model.shape.layers,
        **{
            f"{region}_seconds_per_token": (whole.regions[region] - begun.regions.get(region, 0.0)) / count
            for region in ("attention", "sampler")
        },
        "peak_bytes": measured_peak,
        "planned_bytes": planned(kit, name, rows),
        "top": whole.top,
    }


def inputs(kit: Kit, rows: int, vocab: int) -> list[list[int]]:
    return random_prompts(rows // SAMPLES, kit.pick(PROMPT, 12), vocab)


def timed(kit: Kit, sample: Any, prompts: list[list[int]]) -> float:
    synchronize(kit.device)
    begin = time.perf_counter()
    sample(prompts, 1)
    synchronize(kit.device)
    return time.perf_counter() - begin


def planned(kit: Kit, name: str, rows: int) -> float:
    """Bytes of weights, cache and decoding that the plan counts for this sampling."""
    folder = kit.folder / name.replace(" ", "")
    config_of(name).save_pretrained(folder)
    settings = {
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "rollout": {"prompts": rows // SAMPLES, "samples": SAMPLES, "max_new_tokens": TOKENS, "max_rows": rows},
        "rewards": {"length": {"function": "length(target=30, scale=128)"}},
    }
    longest = max(map(len, inputs(kit, rows, config_of(name).vocab_size)))
    work = ahead.workload(from_dict(settings, Config()), gpus=1, prompt=longest).work
    uses = memory.estimate(work).phases["sampling"]
    return sum(size for use, size in uses.items() if use != "optimizer")


# --- peers ------------------------------------------------------------------------------------------------------------


def peers(kit: Kit, name: str) -> None:
    """transformers' ``generate``, and vLLM if it is there, at one size. A peer that fails is reported."""
    rows = kit.pick(PEERS_AT, 8)
    found: dict[str, Any] = {}
    for peer, measure in (("transformers", transformers), ("vllm", vllm)):
        try:
            found[peer] = measure(kit, name, rows)
        except Exception as error:
            found[peer] = {"error": message(error)[:300]}
        kit.put(peers={"model": name, "rows": rows} | found)
        release(kit.device)
    if kit.rehearse and "error" in found["transformers"]:
        raise RuntimeError(f"transformers: {found['transformers']['error']}")


def transformers(kit: Kit, name: str, rows: int) -> dict[str, Any]:
    config = config_of(name)
    with torch.device(kit.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    fill(model)
    prompts = inputs(kit, rows, config.vocab_size)
    long, short = (by_transformers(model, SAMPLES, limit, to_the_end=True) for limit in (TOKENS, 1))
    return rate(kit, rows, prompts, long, short)


def vllm(kit: Kit, name: str, rows: int) -> dict[str, Any]:
    if importlib.util.find_spec("vllm") is None:
        return {"error": "not installed"}
    config = config_of(name)
    folder = Path(kit.folder) / "for-vllm"
    decoder_module.save(decoder_of(config, kit.device), folder, tokenizer=word_tokenizer(config.vocab_size))
    prompts = inputs(kit, rows, config.vocab_size)
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": rows,
        "gpu_memory_utilization": 0.5,
    }
    long = by_vllm(folder, SAMPLES, TOKENS, stop_ids=(), **options)
    return rate(kit, rows, prompts, long)


def rate(kit: Kit, rows: int, prompts: list[list[int]], long: Any, short: Any = None) -> dict[str, Any]:
    """Seconds of a batch, and of a token after the first, by a run of one token, where the peer can do it."""
    long(prompts, 0)
    batch = timed(kit, long, prompts)
    found = {"seconds": batch, "tokens_per_second_with_prefill": rows * TOKENS / batch}
    if short is not None:
        token = (batch - timed(kit, short, prompts)) / (TOKENS - 1)
        found |= {"seconds_per_token": token, "tokens_per_second": rows / token}
    return found
