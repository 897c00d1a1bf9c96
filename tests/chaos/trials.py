"""The command of `chaos`: the injections one after another, and their table."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from helpers import training_folder

from chaos import __main__, commands, processes
from chaos.injection import Outcome, Workload, inject, undisturbed
from chaos.server import RewardServer

DISK = ("disk full", "I/O error", "slow disk")
COMMON = ("process killed", "all killed", "suspended", "SIGTERM", "SIGINT", *DISK, "clock jump", "newest file damaged")
RANKS = (*COMMON, "launcher killed", "rank stopped", "rank lost")
WORKLOADS = (
    Workload("train", commands.on_ranks(commands.train, 2), 2, RANKS),
    Workload("train-server", commands.train_with_server, 0, ("server down", "server hangs")),
    Workload("rollout", commands.on_ranks(commands.rollout, 2), 2, RANKS),
    Workload("sweep", commands.sweep, 0, ("all killed", "launcher killed", "SIGTERM", "disk full"), 240.0),
    Workload("iro", commands.iro, 0, COMMON),
    Workload("generate", commands.generate, 0, COMMON),
    Workload("serve", commands.serve, 0, ("launcher killed", "suspended", "SIGTERM", "clock jump"), target="child"),
)


def schedule(injections: int, only: str) -> Iterator[tuple[Workload, str, str]]:
    """Workload, kind and name of each injection; all pairs of workload and kind in turn."""
    pairs = [(workload, kind) for workload in WORKLOADS for kind in workload.kinds]
    for number in range(injections):
        workload, kind = pairs[number % len(pairs)]
        name = f"{workload.name}:{kind}:{number // len(pairs)}".replace(" ", "-").replace("/", "")
        if f"{name}:".startswith(f"{only}:" if only else ""):
            yield workload, kind, name


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    processes.adopt_orphans()
    torch.set_num_threads(1)
    work = Path(tempfile.mkdtemp(prefix="chaos-", dir=args.folder)).resolve()
    training_folder(work, commands.REWARDS)
    server = RewardServer()
    (work / "url").write_text(server.url, "utf-8")
    print(f"seed {args.seed}, {args.injections} injections, in {work}", flush=True)
    outcomes, truths, begun = [], {}, time.monotonic()
    try:
        for workload, kind, name in schedule(args.injections, args.only):
            if workload.name not in truths:
                truths[workload.name] = undisturbed(workload, work)
            outcome = inject(workload, kind, work, f"{args.seed}:{name}", truths[workload.name], server)
            outcomes.append((workload.name, kind, outcome))
            show(name, outcome)
            if outcome.lost and args.stop:
                break
            if not outcome.lost:
                for path in work.glob(f"{args.seed}:{name}*"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        server.end()
    table(outcomes)
    lost = sum(bool(outcome.lost) for *_, outcome in outcomes)
    print(f"{len(outcomes)} injections in {(time.monotonic() - begun) / 60:.0f} minutes, {lost} lost")
    if lost:
        print(f"the folders of those are in {work}")
        return 1
    shutil.rmtree(work)
    return 0


def state(outcome: Outcome) -> str:
    return "LOST" if outcome.lost else "no fault" if not outcome.fired else "resumed" if outcome.resumed else "finished"


def show(name: str, outcome: Outcome) -> None:
    said = "; ".join((outcome.place, *outcome.notes, *([outcome.lost] if outcome.lost else [])))
    print(f"{name:36s} {state(outcome):9s} {outcome.seconds:6.1f} s  {said}", flush=True)


def table(outcomes: list[tuple[str, str, Outcome]]) -> None:
    """Print one line per kind: injections, without a second start, with one, lost."""
    print(f"\n{'':24s} injections  finished  resumed  lost")
    for kind in dict.fromkeys(kind for _, kind, _ in outcomes):
        found = Counter(state(outcome) for _, other, outcome in outcomes if other == kind)
        counts = [found.total() - found["no fault"], found["finished"], found["resumed"], found["LOST"]]
        print(f"{kind:24s} {counts[0]:10d} {counts[1]:9d} {counts[2]:8d} {counts[3]:5d}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="chaos", description=__main__.__doc__, formatter_class=shown)
    parser.add_argument("--injections", type=int, default=220, help="number of injections (default: 220)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the places (default: 0)")
    parser.add_argument("--only", default="", help="COMMAND, COMMAND:KIND or COMMAND:KIND:NUMBER, as printed")
    parser.add_argument("--stop", action="store_true", help="stop at the first that is lost")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
