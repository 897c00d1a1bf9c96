"""Fuzz the compiled CPU ops: build the target in ``ops.cpp`` with clang, run it for each op, and print one table.

``make fuzz`` runs it; ``experiments/fuzzing/README.md`` says what is drawn, what is a fault, and what was found. Inputs
that reach new code are collected in ``build/fuzz/inputs``, and inputs that fail in ``build/fuzz/faults``.
"""

import argparse
import base64
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "fuzz"
# Inputs of each op in base64: the fewest that reach all code that was reached, and those that found a fault.
CORPUS, FIXED = HERE / "corpus.json", HERE / "fixed.json"
CLANGS = ("clang++", "clang++-19", "clang++-16", "clang++-14")
# Processors that the ops have code for, and the flag by which Linux says that this machine can run it.
MARCHES = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}
COMPILE = [
    *("-std=c++20", "-gline-tables-only", "-O2", "-fopenmp-simd", "-fno-omit-frame-pointer"),
    *("-fno-math-errno", "-fno-trapping-math", "-D_GLIBCXX_ASSERTIONS"),
    *("-Wall", "-Wextra", "-Wno-pass-failed"),  # the sanitizers keep loops from being vectorised
]
# For the ops, not for the target. libFuzzer keeps inputs that reach new code of theirs; it is not shown comparisons of
# numbers, which would take more time than the sanitizers.
OF_OPS = [
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    *("-fsanitize-coverage=inline-8bit-counters,pc-table", "-DTORCH_TARGET_VERSION=0x020a000000000000"),
]
LINES = ("-fprofile-instr-generate", "-fcoverage-mapping")
# Leaks are not looked for, as torch keeps memory until it exits. The rest saves time: freed memory is soon used again,
# and a report shows few callers.
ASAN = (
    *("detect_leaks=0", "allocator_may_return_null=0", "quarantine_size_mb=16", "malloc_context_size=3"),
    "allocator_release_to_os_interval_ms=-1",
)
# Seconds of a case, MiB of all memory and of one allocation, bytes of an input.
LIMITS = ("-timeout=20", "-rss_limit_mb=4096", "-malloc_limit_mb=1024", "-max_len=400")


@dataclass
class Result:
    """Of one op: cases, how many of them it refused, edges of its control flow that were reached, files that fail."""

    op: str
    cases: int
    refused: int
    edges: int
    seconds: float
    faults: list[str]
    log: str


def clang():
    """Path of the compiler, or None."""
    return next(filter(None, map(shutil.which, CLANGS)), None)


def marches():
    """The processors of `MARCHES` whose code this machine can run, the most capable one last."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return [march for march, flag in MARCHES.items() if flag in flags]


def ops():
    """Names of all ops, from their schemas."""
    return re.findall(r'm\.def\(\s*"(\w+)\(', (ROOT / "csrc" / "library.cpp").read_text())


def runs_of(names, runs):
    """Cases of each op: most for those whose cases are fast, hardly any for one without arguments."""
    slow = re.compile("ecdf|linear|decode|attention")
    shares = {op: 0.01 if op == "other_avx512" else 1 if slow.search(op) else 6 for op in names}
    return {op: math.ceil(runs * share / sum(shares.values())) for op, share in shares.items()}


def build(march, folder=None, csrc=ROOT / "csrc", flags=()):
    """Compile what has changed, and link it; the path of the target."""
    folder = folder or BUILD / march
    folder.mkdir(parents=True, exist_ok=True)
    includes = [word for path in include_paths() for word in ("-isystem", path)]

    def compiled(source):
        out = folder / f"{source.stem}.o"
        if older(out, source, Path(__file__), *source.parent.glob("*.h")):
            own = () if source.parent == HERE else (*OF_OPS, *flags)
            call(clang(), *COMPILE, *own, f"-march={march}", *includes, "-c", source, "-o", out)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, [HERE / "ops.cpp", *sorted(csrc.glob("*.cpp"))]))
    target = folder / "ops"
    if older(target, *objects):
        paths = [word for path in library_paths() for word in (f"-L{path}", f"-Wl,-rpath,{path}")]
        libraries = ("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10")
        call(clang(), "-fsanitize=fuzzer,address,undefined", *flags, *objects, *paths, *libraries, "-o", target)
    return target


def older(built, *sources):
    """Whether a file must be built, again or for the first time."""
    return not built.is_file() or built.stat().st_mtime < max(path.stat().st_mtime for path in sources)


def call(*command):
    """Run a tool; its output."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stderr}{command[0]} failed")
    return done.stdout


def unpack(op, folder):
    """Write the inputs of an op that the repository has."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in filter(Path.is_file, (CORPUS, FIXED)):
        for line in json.loads(file.read_text()).get(op, []):
            content = base64.b64decode(line)
            (folder / hashlib.sha1(content).hexdigest()).write_bytes(content)  # libFuzzer's name, so there is no copy


def start(target, op, *arguments):
    """Run the target for an op; the completed process."""
    env = os.environ | {
        "NLGRPO_FUZZ_OP": op,
        "OMP_WAIT_POLICY": "passive",
        "ASAN_OPTIONS": ":".join(ASAN),
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [str(word) for word in (target, *LIMITS, *arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", check=False)


def fuzz(target, op, runs, seed, folder=BUILD):
    """Run the inputs that are known and then new ones, ``runs`` in total, or until one fails."""
    inputs, faults = folder / "inputs" / op, folder / "faults"
    unpack(op, inputs)
    faults.mkdir(exist_ok=True)
    before, begin = set(faults.iterdir()), time.monotonic()
    options = (f"-runs={runs}", f"-seed={seed}", "-entropic_scale_per_exec_time=1", "-print_final_stats=1")
    done = start(target, op, *options, f"-artifact_prefix={faults}/{op}-", inputs)
    counted = re.search(r"cases: (\d+), refused: (\d+)", done.stderr)
    last = [int(number) for number in re.findall(r"^#(\d+)", done.stderr, re.MULTILINE)]
    found = sorted(str(path) for path in set(faults.iterdir()) - before)
    assert found or done.returncode == 0, done.stderr
    return Result(
        op=op,
        cases=int(counted[1]) if counted else max(last, default=0),
        refused=int(counted[2]) if counted else 0,
        edges=max((int(number) for number in re.findall(r" cov: (\d+)", done.stderr)), default=0),
        seconds=round(time.monotonic() - begin, 1),
        faults=found,
        log=done.stderr,
    )


def lines(march):
    """Replay the inputs with clang's coverage; the share of the lines of each file of csrc that they reach."""
    folder = BUILD / f"{march}-lines"
    target = build(march, folder, flags=LINES)
    for op in ops():
        unpack(op, BUILD / "inputs" / op)
        os.environ["LLVM_PROFILE_FILE"] = str(folder / f"{op}.profraw")
        done = start(target, op, "-runs=0", BUILD / "inputs" / op)
        assert done.returncode == 0, done.stderr
    version = re.search(r"version (\d+)", call(clang(), "--version"))[1]
    tools = [shutil.which(f"{tool}-{version}") or tool for tool in ("llvm-profdata", "llvm-cov")]
    call(tools[0], "merge", *folder.glob("*.profraw"), "-o", folder / "profile")
    exported = call(tools[1], "export", "-summary-only", f"-instr-profile={folder / 'profile'}", target)
    files = [file for file in json.loads(exported)["data"][0]["files"] if "/csrc/" in file["filename"]]
    return {Path(file["filename"]).name: round(file["summary"]["lines"]["percent"], 1) for file in files}


def reduce(march):
    """Write ``corpus.json``: for each op the fewest inputs that reach all edges that known inputs reach."""
    target, corpus = build(march), {}
    for op in ops():
        unpack(op, BUILD / "inputs" / op)
        fewest = BUILD / "fewest" / op
        shutil.rmtree(fewest, ignore_errors=True)
        fewest.mkdir(parents=True)
        done = start(target, op, "-merge=1", "-use_counters=0", fewest, BUILD / "inputs" / op)
        assert done.returncode == 0, done.stderr
        corpus[op] = [base64.b64encode(path.read_bytes()).decode() for path in sorted(fewest.iterdir())]
    CORPUS.write_text(json.dumps(corpus, indent=0) + "\n")


def report(result):
    """A row of the table."""
    share, rate = result.refused / max(1, result.cases), result.cases / max(1e-9, result.seconds)
    row = f"{result.op:26} {result.cases:>10,} {share:>8.1%} {result.edges:>6,} {rate:>8,.0f} {len(result.faults):>6}"
    print(row, flush=True)
    for path in result.faults:
        found = re.search(r"^.*(ERROR: \w+:|runtime error:|FAULT:)", result.log, re.MULTILINE)
        print(f"  {path}:\n{result.log[found.start() if found else -2000 :][:2000]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000_000, help="cases, over all ops")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ops", nargs="+", default=ops(), choices=ops())
    parser.add_argument("--march", choices=MARCHES, help="processor to compile for; default: the most capable one here")
    parser.add_argument("--save", action="store_true", help="write the table to bench/results")
    parser.add_argument("--lines", action="store_true", help="only print the share of lines that known inputs reach")
    parser.add_argument("--reduce", action="store_true", help="only make corpus.json from all known inputs")
    options = parser.parse_args()
    if clang() is None:
        sys.exit("make fuzz needs clang, with libFuzzer: apt-get install clang (Debian, Ubuntu)")
    march = options.march or marches()[-1]
    if options.reduce:
        return reduce(march)
    if options.lines:
        for file, reached in lines(march).items():
            print(f"{file:26} {reached:5.1f}%")
        return None
    target = build(march)
    print(f"{march}, seed {options.seed}")
    print(f"{'op':26} {'cases':>10} {'refused':>8} {'edges':>6} {'cases/s':>8} {'faults':>6}")
    results = []
    for op, runs in runs_of(options.ops, options.runs).items():
        results.append(fuzz(target, op, runs, options.seed))
        report(results[-1])
    if options.save:
        sys.path.append(str(ROOT / "bench"))
        import common

        rows = [{key: value for key, value in asdict(result).items() if key != "log"} for result in results]
        facts = {"bench": "fuzz", "march": march, "seed": options.seed, "rows": rows, "machine": common.machine()}
        print(common.save(f"fuzz_{march}", facts))
    if any(result.faults for result in results):
        sys.exit("faults were found; an input that fails is run again by its path as the target's argument")


if __name__ == "__main__":
    main()
