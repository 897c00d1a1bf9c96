"""The ops of the vocabulary's size: the head with its loss, forward and backward, and the sampler."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any

import bench_logprob
import torch
import torch.nn.functional as F
from kernels_side import PLAIN, child

from gpu_kit.child import Kit, message
from gpu_kit.measuring import in_turns, need, release
from nlgrpo.kernels import sample_tokens

T, WIDTHS, V = 16_384, (896, 3584), 151_936
TOKENIZER = 151_665  # tokens of Qwen2.5's tokenizer: the head is cut to these rows, and their number is odd
ROWS = (64, 256, 1024)
ROTATED = 2**28  # bytes of logits among which calls take turns: several times the L2 cache


def run(kit: Kit) -> None:
    sampler(kit)
    widths = kit.pick(WIDTHS, (64,))
    cut_logits(kit, widths)
    for width in widths:
        head(kit, width, V, ["ours", *kit.pick(["Liger-Kernel"], []), PLAIN])
    if not kit.rehearse:
        head(kit, widths[0], TOKENIZER, ["ours"])
        head(kit, widths[0], V, ["ours", "torch.compile"])  # compiling takes most of the time of this step


def cut_logits(kit: Kit, widths: tuple[int, ...]) -> None:
    """Logits and a draw with all rows of the head, and with the first rows only, whose number is odd.

    A row of logits then starts at an address that 16 bytes do not divide, which wide loads and tensor cores need.
    """
    dtype, all_rows = kit.pick(torch.bfloat16, torch.float32), kit.pick(V, 1000)
    found: list[dict[str, float]] = []
    for width in widths:
        weight = torch.randn(all_rows, width, device=kit.device, dtype=dtype) / width**0.5
        for rows in kit.pick(ROWS, (4, 8)):
            hidden = torch.randn(rows, width, device=kit.device, dtype=dtype)
            noise = torch.rand(rows, device=kit.device, dtype=torch.float64)
            for vocab in (all_rows, kit.pick(TOKENIZER, 937)):
                head_rows = weight[:vocab]
                product = in_turns([partial(F.linear, hidden, head_rows)] * 4, kit.device)
                logits = F.linear(hidden, head_rows)
                draw = in_turns([partial(sample_tokens, logits, noise)] * 4, kit.device)
                found.append({"width": width, "rows": rows, "vocab": vocab, "product": product, "sampler": draw})
                kit.put(cut_logits=found)
                del logits
                release(kit.device)


def sampler(kit: Kit) -> None:
    """`sample_tokens` at several numbers of rows, and its seconds per byte of logits."""
    dtype, vocab = kit.pick(torch.bfloat16, torch.float32), kit.pick(V, 1000)
    found: list[dict[str, float]] = []
    for rows in kit.pick(ROWS, (4, 8)):
        size = rows * vocab * dtype.itemsize
        copies = kit.pick(max(2, ROTATED // size), 2)
        need(copies * size + 40 * size, kit.device)
        logits = [torch.randn(rows, vocab, device=kit.device, dtype=dtype) for _ in range(copies)]
        noise = torch.rand(rows, device=kit.device, dtype=torch.float64)
        took = in_turns([partial(sample_tokens, x, noise) for x in logits], kit.device)
        found.append({"rows": rows, "seconds": took, "bytes_of_logits": size, "seconds_per_byte": took / size})
        kit.put(sampler=found)
        del logits
        release(kit.device)


def head(kit: Kit, width: int, vocab: int, sides: list[str]) -> None:
    """The head and the loss at one width: milliseconds of ``sides``, and of three bare products."""
    sizes = kit.pick({"T": T, "D": width, "V": vocab}, {})
    args = Namespace(device=kit.device, quick=kit.rehearse, sizes=sizes, repeats=5, op=[])
    case = bench_logprob.linear_policy_loss_case(args)
    x = case.arguments(torch.Generator().manual_seed(0), kit.device)  # drawn on the CPU: once for all sides
    case = replace(case, arguments=lambda *_: x)
    product = in_turns([lambda: torch.mm(x.hidden, x.weight.mT)] * 2, kit.device)
    name = f"linear_policy_loss, T = {case.sizes['T']}, D = {case.sizes['D']}, V = {case.sizes['V']}"
    rows: dict[str, Any] = {"three products": {"ms": 3e3 * product}} | kit.values.get(name, {})
    for side in sides:
        rows[side] = measured(kit, case, side, args)
        kit.put(**{name: rows})
        release(kit.device)
    if "error" in rows["ours"]:
        raise RuntimeError(f"{name}: {rows['ours']['error']}")
    compare(rows, kit.pick(3e-2, 1e-3))
    kit.put(**{name: rows})


def compare(rows: dict[str, Any], tolerance: float) -> None:
    """Replace the time of a side whose loss and gradients have other norms than ours by an error.

    Raises RuntimeError if that is plain PyTorch: then our result is wrong, and its time means nothing.
    """
    ours = rows["ours"]["norms"]
    for side, row in rows.items():
        if any(abs(a - b) > tolerance * abs(b) for a, b in zip(row.get("norms", ours), ours, strict=True)):
            error = f"norms of loss and gradients are {row['norms']}, and ours {ours}"
            if side == PLAIN:
                raise RuntimeError(f"{side}: {error}")
            rows[side] = {"error": error}


def measured(kit: Kit, case: Any, side: str, args: Namespace) -> dict[str, Any]:
    """Time and memory of one side; a peer that fails is reported and does not stop the others."""
    try:
        found = child(case, side, args)
    except Exception as error:
        if side == "ours":
            raise
        return {"error": message(error)[:300]}
    if "error" in found:
        return {"error": found["error"]}
    times = sorted(sum(pair) for pair in found["seconds"])
    return {"ms": 1e3 * times[len(times) // 2], "added_gib": found["bytes"] / 2**30, "norms": found["norms"]}
