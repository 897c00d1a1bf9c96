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
from common import machine, save
from support.helpers import training_folder

from chaos import __main__, commands, processes
from chaos.injection import Outcome, Workload, inject, undisturbed
from chaos.server import RewardServer

DISK = ("disk full", "I/O error", "slow disk")
COMMON = ("process killed", "all killed", "suspended", "SIGTERM", "SIGINT", *DISK, "clock jump", "newest file damaged")
RANKS = (*COMMON, "launcher killed", "rank stopped", "rank lost")
WORKLOADS = (
    Workload("train", commands.on_ranks(commands.train, 2), RANKS),
    Workload("train-server", commands.train_with_server, ("server down", "server hangs")),
    Workload("rollout", commands.on_ranks(commands.rollout, 2), RANKS),
    Workload("sweep", commands.sweep, ("all killed", "launcher killed", "SIGTERM", "disk full"), 240.0),
    Workload("iro", commands.iro, COMMON),
    Workload("generate", commands.generate, COMMON),
    Workload("serve", commands.serve, ("launcher killed", "suspended", "SIGTERM", "clock jump"), target="child"),
)


def schedule(injections: int, only: str) -> Iterator[tuple[Workload, str, str]]:
    """Workload, kind and name of each injection; all pairs of workload and kind in turn.

    ``only``: the beginnings of names, separated by commas; "" for all.
    """
    chosen = only.split(",")
    pairs = [(workload, kind) for workload in WORKLOADS for kind in workload.kinds]
    for number in range(injections):
        workload, kind = pairs[number % len(pairs)]
        name = f"{workload.name}:{kind}:{number // len(pairs)}".replace(" ", "-").replace("/", "")
        if not only or any(f"{name}:".startswith(f"{one}:") for one in chosen):
            yield workload, kind, name


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    processes.adopt_orphans()
    torch.set_num_threads(1)
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
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
    seconds, counts = time.monotonic() - begun, table(outcomes)
    injected = sum(outcome.fired for *_, outcome in outcomes)
    lost = sum(bool(outcome.lost) for *_, outcome in outcomes)
    print(f"{injected} injections in {seconds / 60:.0f} minutes, {lost} lost")
    if args.save:
        facts = {"seed": args.seed, "injections": injected, "lost": lost, "seconds": round(seconds)}
        print(f"saved {save('chaos', facts | {'counts': counts, 'machine': machine()})}")
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


def table(outcomes: list[tuple[str, str, Outcome]]) -> dict[str, dict[str, int]]:
    """Print and return the counts by kind, and by command: finished, with a second start, lost, without a fault."""
    counts: dict[str, dict[str, int]] = {}
    print(f"\n{'':24s} injections  finished  resumed  lost  no fault")
    for i in (1, 0):
        for label in dict.fromkeys(row[i] for row in outcomes):
            found = Counter(state(row[2]) for row in outcomes if row[i] == label)
            shown = [found.total(), *(found[name] for name in ("finished", "resumed", "LOST", "no fault"))]
            counts[label] = dict(zip(("injections", "finished", "resumed", "lost", "no fault"), shown, strict=True))
            print(f"{label:24s} {shown[0]:10d} {shown[1]:9d} {shown[2]:8d} {shown[3]:5d} {shown[4]:9d}")
        print()
    return counts


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="chaos", description=__main__.__doc__, formatter_class=shown)
    parser.add_argument("--injections", type=int, default=224, help="number of injections (default: 224)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the places (default: 0)")
    parser.add_argument("--only", default="", help="COMMAND, COMMAND:KIND or COMMAND:KIND:NUMBER, also several: A,B")
    parser.add_argument("--save", action="store_true", help="write bench/results/cpu/chaos.json")
    parser.add_argument("--stop", action="store_true", help="stop at the first that is lost")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
