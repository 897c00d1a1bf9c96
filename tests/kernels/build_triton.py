"""Compile every Triton kernel for three GPUs on a machine without one; print one JSON object per kernel and target.

`test_triton_builds.py` runs this file in a separate process, as Triton decides once whether it interprets or compiles.
"""

import itertools
import json
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nlgrpo.kernels import epilogue_triton, linearize_triton, policy_loss_triton
from nlgrpo.kernels.policy_loss_triton import SURROGATES

CAPABILITIES = (80, 90, 100)
FLOATS = dict.fromkeys(("logprob", "entropy", "tops", "log_totals", "grad_logprob", "grad_entropy"), "*fp32")
NUMBERS = {"V": "i32", "stride": "i32", "out_stride": "i32", "temperature": "fp32"}


def cases():
    """Yield name, kernel, types of its arguments, constants and options of the launch."""
    for kind in ("bf16", "fp16", "fp32"):
        row = {"logits": f"*{kind}", "out": f"*{kind}", "targets": "*i64"} | FLOATS | NUMBERS
        block, warps = {"BLOCK": epilogue_triton.BLOCK}, {"num_warps": epilogue_triton.WARPS}
        yield f"statistics {kind}", epilogue_triton._statistics_kernel, row, block, warps
        for entropy in (True, False):
            constants = block | {"HAS_ENTROPY": entropy}
            name = f"gradient {kind}{' with entropy' * entropy}"
            yield name, epilogue_triton._gradient_kernel, row, constants, warps
    terms = ("logprob", "old_logprob", "advantages", "log_ratio", "ref_logprob", "loss", "through_ratio", "through_kl")
    types = dict.fromkeys((*terms, "through_score", "statistics"), "*fp32") | {"mask": "*i1", "T": "i32"}
    types |= dict.fromkeys(("low", "high", "dual", "beta"), "fp32")
    block = {"HAS_MASK": True, "BLOCK": policy_loss_triton.BLOCK}
    for (surrogate, number), kind, has_log_ratio in itertools.product(SURROGATES.items(), range(5), (False, True)):
        constants = block | {"KIND": kind, "SURROGATE": number, "HAS_LOG_RATIO": has_log_ratio}
        name = f"policy_loss {surrogate} {kind}{' log_ratio' * has_log_ratio}"
        yield name, policy_loss_triton._policy_loss_kernel, types, constants, {"num_warps": 4}
    yield from linearize_cases()


def linearize_cases():
    """All sizes of groups: in registers, then in chunks."""
    numbers = dict.fromkeys(("P", "M", "chunks", "stride_p", "stride_m"), "i32") | {"memory": "*i64"}
    small, large = linearize_triton._small_kernel, linearize_triton._large_kernel
    small_64, large_64 = linearize_triton._small_kernel_float64, linearize_triton._large_kernel_float64
    most, most_64, four = linearize_triton.ELEMENTS, linearize_triton.GATHERED, {"num_warps": 4}
    types = dict.fromkeys(("rewards", "weights", "out"), "*fp32") | numbers
    for columns in (1, 8, 64, 512, most):
        yield f"linearize {columns}", small, types, {"ROWS": most // columns, "COLUMNS": columns}, four
    yield "linearize chunks", large, types, {"CHUNK": most, "STEPS": most.bit_length() - 1}, four
    types = dict.fromkeys(("rewards", "weights", "out"), "*fp64") | numbers
    for columns in (1, 8, 64, most_64):
        constants = {"ROWS": most // columns, "COLUMNS": columns, "STEPS": columns.bit_length() - 1}
        yield f"linearize {columns} float64", small_64, types, constants, four
    for chunk in (2 * most_64, most):
        constants, options = {"CHUNK": chunk, "STEPS": chunk.bit_length() - 1}, {"maxnreg": linearize_triton.REGISTERS}
        yield f"linearize chunks of {chunk} float64", large_64, types, constants, four | options


def resources(cubin):
    """Registers per thread, and bytes of stack and spills, as reported by cuobjdump."""
    beside = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool = str(beside) if beside.is_file() else shutil.which("cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text.stdout)}


ALIGNED = {"V", "stride", "out_stride", "stride_p"}  # divisible by 16, like every pointer: the usual case


def widest_load(ptx):
    """Largest number of bytes that one instruction loads from global memory."""
    loads = re.findall(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.[bfu](\d+)", ptx)
    return max(int(count or 1) * int(bits) // 8 for count, bits in loads)


def build(job):
    """Compile case number ``job[0]`` for a GPU of capability ``job[1]``, and report the resources it uses."""
    name, kernel, types, constants, options = list(cases())[job[0]]
    names = kernel.arg_names
    signature = {argument: types.get(argument, "constexpr") for argument in names}
    aligned = {a for a in names if str(types.get(a)).startswith("*")} | (ALIGNED & set(names))
    source = ASTSource(
        kernel, signature, {(names.index(k),): v for k, v in constants.items()},
        {(names.index(a),): [["tt.divisibility", 16]] for a in aligned},
    )  # fmt: skip
    built = triton.compile(source, target=GPUTarget("cuda", job[1], 32), options=options)
    facts = {"kernel": name, "sm": job[1], "shared": built.metadata.shared}
    return facts | resources(built.asm["cubin"]) | {"load": widest_load(built.asm["ptx"])}


def main():
    assert not triton.knobs.runtime.interpret, "set TRITON_INTERPRET=0: the kernels must be compiled"
    jobs = list(itertools.product(range(len(list(cases()))), CAPABILITIES))
    with ProcessPoolExecutor() as pool:
        for facts in pool.map(build, reversed(jobs)):  # in reverse, as the last ones are the slowest
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
