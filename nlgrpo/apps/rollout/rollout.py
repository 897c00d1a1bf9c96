"""The command ``nlgrpo rollout``: sample K completions of the reference per prompt, and score them, for later stages.

    nlgrpo rollout my.toml --samples 100 --out runs/rollouts
    torchrun --nproc-per-node 8 -m nlgrpo.cli rollout my.toml --samples 100 --out runs/rollouts

`load_rollouts` reads the folder. Ranks share the prompts file by file (`job.py`), and the
folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from nlgrpo.apps.rollout.job import Job, build_job, open_folder, prompts_per_file, roll_out
from nlgrpo.apps.rollout.options import Options, read_options
from nlgrpo.apps.rollout.tables import draw_calibration, ks_tables, table
from nlgrpo.config import validate
from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import Config
from nlgrpo.data.prompt_dataset import Batch
from nlgrpo.engine import transformers_backend
from nlgrpo.engine.rollouts import reference_rollouts
from nlgrpo.engine.rollouts.inputs import unread_files
from nlgrpo.errors import UserError
from nlgrpo.runtime.console import first_tokens, how_to_resume, named_lines
from nlgrpo.runtime.supervision import process_group
from nlgrpo.runtime.supervision.stop_signal import StopSignal
from nlgrpo.runtime.timing import as_clock
from nlgrpo.runtime.work_queue import WorkQueue

# --- arguments and plan ----------------------------------------------------------------------------------------------


def read_arguments(arguments: Sequence[str]) -> tuple[Options, Config]:
    """Parse the command line. Raises UserError for options that cannot be run."""
    options, rest = read_options(arguments)
    cfg, _ = from_arguments(rest)
    if options.samples < 2:
        raise UserError(
            f"--samples {options.samples}: expected at least 2, because rewards are ranked among a prompt's samples"
        )
    if options.samples >= 2**31:
        raise UserError(f"--samples {options.samples}: expected less than 2^31")
    most = max(options.ks, default=0) if options.ks_nested else sum(sorted(options.ks)[-2:])
    if options.ks and (len(options.ks) < 2 or min(options.ks) < 1 or most > options.samples):
        raise UserError(
            f"--ks {' '.join(map(str, options.ks))}: expected two or more numbers; any two of them together at most "
            f"--samples {options.samples}, or with --ks-nested each of them"
        )
    if options.prompts is not None and options.prompts < 1:
        raise UserError(f"--prompts {options.prompts}: expected >= 1; omit it for all prompts")
    validate.check_config(cfg)
    return options, cfg


def plan(job: Job) -> Table:
    """Build the table that describes the job."""
    sampling = job.origin.sampling
    P = len(job.batch.ids)
    K = job.sampler.samples
    filters = [f", {name} {getattr(sampling, name):g}" for name in ("top_k", "top_p", "min_p")]
    rows = {
        "reference": f"{job.cfg.model.path}, computes in {str(job.dtype).removeprefix('torch.')}"
        f"{transformers_backend.note(job.source)}",
        "ranks": f"{job.queue.ranks.world} on {job.queue.ranks.device.type}",
        "prompts": "\n".join([f"the first {P:,} of {job.prompts!r}{_repeated(job.batch)}", *unread_files(job.cfg)]),
        **first_tokens("first prompt", job.batch.ids[0], job.sampler.tokenizer),
        "samples": f"{K:,} per prompt, {P * K:,} completions of up to {sampling.max_new_tokens} tokens, at temperature "
        f"{sampling.temperature:g}{''.join(filters) * sampling.filtered}; {prompts_per_file(job)} prompts per file",
        "rewards": "\n".join(f"{scorer.name}: {scorer.spec}" for scorer in job.scorers),
        "folder": str(job.folder),
    }
    return named_lines("rollouts", rows)


def _repeated(batch: Batch) -> str:
    again = len(batch.ids) - len({tuple(ids) for ids in batch.ids})
    return f"; {again:,} are repeats and share the samples of the first" * bool(again)


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Return exit status 0 when done, or saved after a signal. Raises UserError for user errors."""
    options, cfg = read_arguments(arguments)
    disable_progress_bar()  # of transformers, for every reward model
    with StopSignal() as stop, process_group.start(cfg.limits()) as ranks:
        queue = WorkQueue(ranks, Console(quiet=not ranks.first), stop)
        folder = options.out or Path(f"runs/{cfg.recipe}-rollouts")
        job = build_job(cfg, queue, folder, samples=options.samples, prompts=options.prompts)
        job.queue.console.print(plan(job))
        if not options.dry_run:
            _run(job, options)
    return 0


def _run(job: Job, options: Options) -> None:
    say = partial(job.queue.console.print, highlight=False, soft_wrap=True)
    drawn = roll_out(job, open_folder(job))
    if drawn is None:
        say(f"stopped and saved; {how_to_resume()}")
    elif job.queue.ranks.first:
        rollouts = reference_rollouts.load_rollouts(job.folder)
        say(table(rollouts))
        for tests in ks_tables(rollouts, options.ks, options.ks_nested) if options.ks else ():
            say(tests)
        if drawn.tokens:
            speed = drawn.tokens / drawn.seconds
            say(f"sampled {drawn.tokens:,} tokens in {as_clock(drawn.seconds)}, {speed:,.0f} tokens/s")
        say("\n".join(f"picture   {path}" for path in draw_calibration(rollouts)))
        say(f"rollouts  {job.folder}")
