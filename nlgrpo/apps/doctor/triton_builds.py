"""Compile Triton's kernels for GPUs that need not be there. As a script, print one JSON object per kernel and target.

``python -m nlgrpo.apps.doctor.triton_builds`` builds `REPRESENTATIVE`, one case of every kernel. It runs
in a process of its own, as Triton decides once whether it interprets or compiles (``TRITON_INTERPRET``).
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nlgrpo.apps.doctor.findings import message
from nlgrpo.kernels import epilogue_triton, linearize_triton, policy_loss_triton, sample_triton
from nlgrpo.kernels.policy_loss_triton import SURROGATES

Case = tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]
CAPABILITIES = (80, 90, 100)
CHUNK = 64  # rewards sorted at once in the quick builds: 512 and 1,024, which the ops use, take seconds to compile
# One case of every kernel, with its targets: about ten seconds on one core. The sorts are slower to compile.
REPRESENTATIVE = {
    "statistics bf16": CAPABILITIES,
    "gradient bf16 with entropy": CAPABILITIES,
    "policy_loss ppo 4": CAPABILITIES,
    "linearize 8": CAPABILITIES,
    "sample totals bf16": CAPABILITIES,
    "sample draw bf16": CAPABILITIES,
    "linearize 8 float64": (90,),
    f"linearize chunks of {CHUNK}": (90,),
    f"linearize chunks of {CHUNK} float64": (90,),
}
FLOATS = dict.fromkeys(("logprob", "entropy", "tops", "log_totals", "grad_logprob", "grad_entropy"), "*fp32")
NUMBERS = {"V": "i32", "stride": "i32", "out_stride": "i32", "temperature": "fp32"}
SAMPLING = dict.fromkeys(("noise", "totals"), "*fp64") | dict.fromkeys(("tops", "logprobs"), "*fp32") | {
    "tokens": "*i64", "noise_stride": "i32", "blocks": "i32",
}  # fmt: skip
ALIGNED = {"V", "stride", "out_stride", "stride_p"}  # divisible by 16, like every pointer: the usual case


def cases() -> Iterator[Case]:
    """Yield name, kernel, types of its arguments, constants and options of the launches that the ops make."""
    for kind in ("bf16", "fp16", "fp32"):
        row = {"logits": f"*{kind}", "out": f"*{kind}", "targets": "*i64"} | FLOATS | NUMBERS
        block = {"BLOCK": epilogue_triton.BLOCK}
        warps = {"num_warps": epilogue_triton.WARPS}
        yield f"statistics {kind}", epilogue_triton._statistics_kernel, row, block, warps
        for entropy in (True, False):
            constants = block | {"HAS_ENTROPY": entropy}
            name = f"gradient {kind}{' with entropy' * entropy}"
            yield name, epilogue_triton._gradient_kernel, row, constants, warps
        row = {"logits": f"*{kind}"} | SAMPLING | NUMBERS
        block = {"BLOCK": sample_triton.BLOCK}
        warps = {"num_warps": sample_triton.WARPS}
        yield f"sample totals {kind}", sample_triton._totals_kernel, row, block, warps
        yield f"sample draw {kind}", sample_triton._draw_kernel, row, block | {"BLOCKS": 64}, warps
    terms = ("logprob", "old_logprob", "advantages", "log_ratio", "ref_logprob", "loss", "through_ratio", "through_kl")
    types = dict.fromkeys((*terms, "through_score", "statistics"), "*fp32") | {"mask": "*i1", "T": "i32"}
    types |= dict.fromkeys(("low", "high", "dual", "beta"), "fp32")
    block = {"HAS_MASK": True, "BLOCK": policy_loss_triton.BLOCK}
    for (surrogate, number), kl, has_log_ratio in itertools.product(SURROGATES.items(), range(5), (False, True)):
        constants = block | {"KIND": kl, "SURROGATE": number, "HAS_LOG_RATIO": has_log_ratio}
        name = f"policy_loss {surrogate} {kl}{' log_ratio' * has_log_ratio}"
        yield name, policy_loss_triton._policy_loss_kernel, types, constants, {"num_warps": 4}
    yield from linearize_cases()


def linearize_cases() -> Iterator[Case]:
    """All sizes of groups: in registers, then in chunks. The op launches no chunks of `CHUNK`; they compile faster."""
    numbers = dict.fromkeys(("P", "M", "chunks", "stride_p", "stride_m"), "i32") | {"memory": "*i64"}
    small = linearize_triton._small_kernel
    large = linearize_triton._large_kernel
    small_64 = linearize_triton._small_kernel_float64
    large_64 = linearize_triton._large_kernel_float64
    most = linearize_triton.ELEMENTS
    most_64 = linearize_triton.GATHERED
    four = {"num_warps": 4}
    types = dict.fromkeys(("rewards", "weights", "out"), "*fp32") | numbers
    for columns in (1, 8, 64, 512, most):
        yield f"linearize {columns}", small, types, {"ROWS": most // columns, "COLUMNS": columns}, four
    for chunk in (CHUNK, most):
        yield f"linearize chunks of {chunk}", large, types, {"CHUNK": chunk, "STEPS": chunk.bit_length() - 1}, four
    types = dict.fromkeys(("rewards", "weights", "out"), "*fp64") | numbers
    for columns in (1, 8, 64, most_64):
        constants = {"ROWS": most // columns, "COLUMNS": columns, "STEPS": columns.bit_length() - 1}
        yield f"linearize {columns} float64", small_64, types, constants, four
    for chunk in (CHUNK, 2 * most_64, most):
        constants = {"CHUNK": chunk, "STEPS": chunk.bit_length() - 1}
        options = {"maxnreg": linearize_triton.REGISTERS}
        yield f"linearize chunks of {chunk} float64", large_64, types, constants, four | options


def build(name: str, capability: int) -> Any:
    """Compile the case ``name`` for a GPU of ``capability``, and return Triton's compiled kernel."""
    _, kernel, types, constants, options = next(case for case in cases() if case[0] == name)
    names = kernel.arg_names
    signature = {argument: types.get(argument, "constexpr") for argument in names}
    aligned = {a for a in names if str(types.get(a)).startswith("*")} | (ALIGNED & set(names))
    source = ASTSource(
        kernel, signature, {(names.index(k),): v for k, v in constants.items()},
        {(names.index(a),): [["tt.divisibility", 16]] for a in aligned},
    )  # fmt: skip
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def report(name: str, capability: int) -> dict[str, Any]:
    """Build, and return the time and the bytes of shared memory, or the error."""
    start = time.perf_counter()
    try:
        built = build(name, capability)
    except Exception as error:  # Triton's and ptxas' errors have no common base class
        return {"kernel": name, "sm": capability, "error": message(error), "seconds": time.perf_counter() - start}
    shared = built.metadata.shared
    return {"kernel": name, "sm": capability, "shared": shared, "seconds": time.perf_counter() - start}


def main() -> None:
    """Build `REPRESENTATIVE`, at most four cases at a time, and print a line for each in their order."""
    assert not triton.knobs.runtime.interpret, "set TRITON_INTERPRET=0: the kernels must be compiled"
    jobs = [(name, capability) for name, targets in REPRESENTATIVE.items() for capability in targets]
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        building: list[Future[dict[str, Any]]] = [pool.submit(report, *job) for job in reversed(jobs)]  # slowest first
        for future in reversed(building):
            print(json.dumps(future.result()), flush=True)


if __name__ == "__main__":
    main()
