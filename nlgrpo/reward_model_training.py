"""``nlgrpo reward-model train``: Bradley-Terry on preference pairs, from a causal model or a classifier.

On several ranks: ``torchrun --nproc-per-node=8 -m nlgrpo.cli reward-model train pairs.toml``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from nlgrpo import metrics, parallel, run_folder
from nlgrpo.attention import implementation
from nlgrpo.parallel import Ranks
from nlgrpo.reward_model_config import RewardModelConfig, from_arguments
from nlgrpo.reward_model_run import FREE, RESULTS, WRITTEN, Run, build
from nlgrpo.seeding import seed_everything
from nlgrpo.tables import named_lines
from nlgrpo.timing import Clock, StopSignal, flops_utilisation


def train(run: Run, stop: StopSignal, log: metrics.MetricsLogger) -> bool:
    """The loop, from where the run stands. Returns False where a signal ended it early, after a checkpoint."""
    cfg, ranks, progress = run.config.train, run.ranks, run.progress
    for step in range(progress.step, run.steps):
        clock = Clock(ranks.device)
        cursor = step * cfg.pairs
        rows = run.pairs.rows(cursor, min(cfg.pairs, run.visits - cursor), cfg.seed)
        stats = run.update(rows)
        clock.lap("update")
        tokens = int(stats.pop("tokens"))
        progress.step, progress.num_tokens = step + 1, progress.num_tokens + tokens
        stats |= {"epoch": (cursor + len(rows)) / len(run.pairs), "num_tokens": progress.num_tokens}
        stats |= clock.metrics(tokens)
        flops = 6 * sum(p.numel() for p in run.model.parameters()) * tokens / ranks.world
        stats |= flops_utilisation(ranks.device, flops, stats["step_time"])
        if every(run.config.evaluation.every, step + 1) and run.held_out is not None:
            found = run.evaluate()
            stats |= {f"held_out/{name}": found[name] for name in ("accuracy", "log_loss", "ece")}
        log.log(step, stats)
        stopping = ranks.any(stop.received)
        if stopping or step + 1 == run.steps or every(cfg.checkpoint_every, step + 1):
            run.save()
        if stopping:
            return step + 1 == run.steps
    return True


def every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


def evaluate_before(run: Run) -> dict[str, Any]:
    """What the untrained head is worth; taken from the folder where an earlier start of the run has measured it."""
    known = run.folder / RESULTS
    found: list[Any] = [None]
    if run.ranks.first and known.is_file():
        found = [json.loads(known.read_text("utf-8")).get("before")]
    before = run.ranks.gather_objects(found[0])[0]
    if before is None:
        before = run.evaluate()
        run.write_results(before=before)
    return before


def launch(cfg: RewardModelConfig, *, dry_run: bool = False) -> None:
    """Run a configuration on the ranks that the launcher started, from its newest checkpoint if there is one."""
    stop = StopSignal()
    disable_progress_bar()
    with parallel.start() as ranks:
        _launch(cfg, ranks, stop, dry_run)  # whose model, and with it the group's handles, is gone on return


def _launch(cfg: RewardModelConfig, ranks: Ranks, stop: StopSignal, dry_run: bool) -> None:
    console = Console(quiet=not ranks.first)
    seed_everything(cfg.train.seed)
    run = build(cfg, ranks)
    console.print(plan(run))
    if dry_run:
        return
    run_folder.claim(run.folder, cfg, ranks, free=FREE, restart=cfg.train.restart, removed=WRITTEN)
    before = evaluate_before(run)
    if run.restore():
        console.print(f"going on from step {run.progress.step}")
    with run.logger() as log:
        finished = train(run, stop, log)
    if not finished:
        console.print(f"stopped and saved at step {run.progress.step}; the same command goes on from there")
        return
    exported, after = run.export(), run.evaluate()
    run.write_results(before=before, after=after)
    if after:
        console.print(held_out_table(before, after))
    console.print(f"model   {exported}", highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """``reward-model train ...``. Exit status: 0 when done, or saved on SIGTERM; 1, with a message, for bad input."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if list(arguments) in (["-h"], ["--help"]):
            arguments = ["train", "--help"]
        if list(arguments[:1]) != ["train"]:
            came = f", got {arguments[0]!r}" if arguments else ""
            raise ValueError(f"expected: nlgrpo reward-model train [file.toml] [--section.key value ...]{came}")
        cfg, dry_run = from_arguments(arguments[1:])
        launch(cfg, dry_run=dry_run)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


# --- what is shown ----------------------------------------------------------------------------------------------------


def plan(run: Run) -> Table:
    """What is going to happen; what ``--dry-run`` prints."""
    cfg, shape = run.config, run.model.shape
    count = sum(p.numel() for p in run.model.parameters())
    head = "the classifier's head" if run.trained else f"a new head, seed {cfg.train.seed}"
    terms = ["-log sigmoid(r_chosen - r_rejected" + (f" - {cfg.loss.margin:g}" if cfg.loss.margin else "") + ")"]
    terms += [f"{cfg.loss.centering:g} (r_chosen + r_rejected)^2"] if cfg.loss.centering else []
    rows = {
        "model": f"{cfg.model.path} ({shape.family}, {count:,} parameters, {head}, computes in "
        f"{str(run.compute).removeprefix('torch.')})",
        "ranks": f"{run.ranks.world} on {run.ranks.device.type}, attention by "
        f"{implementation(run.ranks.device.type, run.compute)}",
        "data": f"{run.pairs!r}",
        "held out": "nothing" if run.held_out is None else f"{run.held_out!r}",
        "texts": f"up to {run.max_length} tokens; {_padding(run)}",
        "loss": " + ".join(terms),
        "training": f"{run.steps} step{'s' * (run.steps > 1)} of {cfg.train.pairs} pairs, {cfg.train.epochs:g} epochs; "
        f"learning rate {cfg.optim.lr:g} {cfg.optim.schedule}",
        "folder": str(run.folder),
    }
    return named_lines("plan", rows)


def _padding(run: Run) -> str:
    if run.pad is None:
        return "no padding id, so transformers can score single texts only"
    token = run.tokenizer.convert_ids_to_tokens(run.pad)
    if run.pad == run.tokenizer.eos_token_id:
        return f"padding is EOS itself (id {run.pad}, {token}): the score is read one token before it"
    return f"padding id {run.pad} ({token})"


def held_out_table(before: dict[str, Any], after: dict[str, Any]) -> Table:
    """The table that ends a run: what `evaluate_pairs` found before and after training."""
    table = Table(title=f"{after['pairs']} pairs held out (95% intervals)", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("", "before", "after"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, shown in (
        ("accuracy", lambda e: f"{e['accuracy']:.3f} [{e['low']:.3f}, {e['high']:.3f}]"),
        ("log loss", lambda e: f"{e['log_loss']:.4f}"),
        ("Brier score", lambda e: f"{e['brier']:.4f}"),
        ("calibration error", lambda e: f"{e['ece']:.4f}"),
        ("margin, mean and std", lambda e: f"{e['margin']['mean']:.3f}, {e['margin']['std']:.3f}"),
        ("margin, 5% to 95%", lambda e: "{5%:.3f} to {95%:.3f}".format(**e["margin"]["quantiles"])),
        ("score, mean and std", lambda e: f"{e['reward']['mean']:.3f}, {e['reward']['std']:.3f}"),
    ):
        table.add_row(name, shown(before), shown(after))
    return table
