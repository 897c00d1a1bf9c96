"""The command ``nlgrpo iro``: learn value models that guide a frozen model (IRO, Alg. 3; SPI, Alg. 1).

    for t in 1 .. T:
        rollouts    <- completions of the next prompts, by the model alone (t = 1) or guided by values 1 .. t-1; scored
        value t     <- fitted to their rewards on every prefix, starting from value t-1
    compressed      <- one value model for sum_t V_t / beta_t, fitted on the prefixes of all rollouts

Each stage has its own folder, ``iteration-t/rollouts``, ``iteration-t/value`` and ``compressed-T``, in the formats of
`nlgrpo rollout` and `nlgrpo value`. A stopped stage resumes, and a finished stage is not repeated.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from nlgrpo.apps.guided.options import LoopOptions, read_iro
from nlgrpo.apps.guided.value_loop import RESULTS, Loop, results
from nlgrpo.apps.report import result_tables
from nlgrpo.config import validate
from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import Config
from nlgrpo.engine import guides, transformers_backend
from nlgrpo.engine.rollouts.collect import refuse_pairwise
from nlgrpo.errors import UserError
from nlgrpo.model import reward_model
from nlgrpo.runtime import atomic_files, cpu_threads
from nlgrpo.runtime.console import how_to_resume, named_lines
from nlgrpo.runtime.supervision import process_group
from nlgrpo.runtime.supervision.stop_signal import StopSignal
from nlgrpo.runtime.work_queue import WorkQueue
from nlgrpo.training import scalar_heads


def read_arguments(arguments: Sequence[str]) -> tuple[LoopOptions, Config]:
    """Parse the command line. Raises UserError for options that cannot be run."""
    options, rest = read_iro(arguments)
    cfg, _ = from_arguments(rest)
    options.out = options.out or Path(f"runs/{cfg.recipe}-iro")
    _ = options.search  # raises UserError for values out of range
    faults = [
        "" if options.iterations >= 1 else f"--iterations {options.iterations}: allowed is >= 1",
        "" if 2 <= options.samples < 2**31 else f"--samples {options.samples}: allowed is 2 to 2^31 - 1",
        "" if options.prompts is None or options.prompts >= 1 else f"--prompts {options.prompts}: allowed is >= 1",
        ""
        if not options.betas or len(options.betas) == options.iterations
        else f"--betas: {len(options.betas)} numbers for {options.iterations} iterations",
        *(f"--betas {b:g}: allowed is > 0" for b in options.betas if not (b > 0 and math.isfinite(b + 1 / b))),
        "" if options.searches >= 1 else f"--searches {options.searches}: allowed is >= 1",
        ""
        if not options.value.drop_equal or options.iterations == 1 or options.guided_samples > 1
        else "--value.drop-equal with --keep best needs --searches of 2 or more: one completion per prompt is equal "
        "to itself",
        *options.value.faults(),
        ""
        if not cfg.train.restart
        else "--train.restart is for `nlgrpo train`: `iro` always resumes; choose another --out to restart",
    ]
    validate.refuse(faults)
    validate.check_config(cfg)
    return options, cfg


# --- plan -------------------------------------------------------------------------------------------------------------


def plan(loop: Loop) -> Table:
    """Build the table that describes the loop. Raises UserError for models that do not fit the completions."""
    options = loop.options
    job = loop.job(1)
    refuse_pairwise([scorer for scorer in job.scorers if loop.cfg.rewards[scorer.name].weight != 0])
    limit = job.origin.sampling.max_new_tokens
    if options.chunk >= limit and options.iterations > 1:
        raise UserError(
            f"--chunk {options.chunk}: responses have at most {limit} tokens (rollout.max_new_tokens), so no value "
            f"would guide them; allowed is < {limit}"
        )
    if not options.value.path and transformers_backend.note(job.source):
        raise UserError(
            f"--value.path is empty, and a value model cannot start from {loop.cfg.model.path}, whose architecture is "
            "not supported by nlgrpo's decoder; name a reward model or causal model that is"
        )
    initial = options.value.path or loop.cfg.model.path
    context = scalar_heads.max_length(initial, None)
    by_text = guides.note(reward_model.locate(initial)[0], job.sampler.tokenizer)
    longest = max(map(len, job.prompts.ids)) + limit
    if longest > context and not by_text:
        raise UserError(
            f"--value.path: {initial} has a context of {context} tokens, but prompt and completion can have {longest}"
        )
    search = options.search
    fit = options.value
    count = len(job.batch.ids)
    others = ", different ones in each iteration" * (count < loop.training_prompts(job))
    rows = {
        "model": f"{loop.cfg.model.path}, frozen{transformers_backend.note(job.source)}",
        "prompts": f"{count:,} of {job.prompts!r}{others}",
        "rollouts": f"{options.samples} per prompt in iteration 1, then {options.guided_samples}: "
        + ("the best of " * (options.keep == "best"))
        + f"{search.beams} beams x {search.successors} chunks of {search.chunk} tokens, up to {limit} tokens"
        + f", in {options.searches} searches" * (options.searches > 1),
        "values": f"{options.iterations}, starting from {initial}{by_text}; betas "
        f"{', '.join(f'{beta:g}' for beta in options.weights)}",
        "fit": f"{fit.kind}, lambda {fit.lam:g}, gamma {fit.gamma:g}; learning rate {fit.lr:g}, {fit.epochs:g} epochs, "
        f"{fit.completions} completions per step{', the head alone' * fit.head_only}"
        f"{', without prompts of equal rewards' * fit.drop_equal}; [optim] of the configuration is not used",
        "folder": str(loop.folder),
    }
    return named_lines("iro", rows)


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Return exit status 0 when done, or saved after a signal. Raises UserError for user errors."""
    options, cfg = read_arguments(arguments)
    disable_progress_bar()  # of transformers, for every model
    with StopSignal() as stop, process_group.start(cfg.limits()) as ranks:
        assert options.out is not None
        if note := cpu_threads.use(options.out, ranks):
            Console(quiet=not ranks.first).print(note, highlight=False)
        loop = Loop(options, cfg, WorkQueue(ranks, Console(quiet=not ranks.first), stop), options.out)
        loop.queue.console.print(plan(loop))
        if not options.dry_run:
            _run(loop)
    return 0


def _run(loop: Loop) -> None:
    say = loop.queue.console.print
    if not loop.run():
        say(f"stopped and saved; {how_to_resume()}", highlight=False, soft_wrap=True)
    elif loop.queue.ranks.first:
        with atomic_files.into(loop.folder):
            compressed = loop.compressed if loop.options.compress else None
            dataclasses.replace(loop.guide(loop.options.iterations), compressed=compressed).write(loop.folder)
        found = results(loop)
        with atomic_files.into(loop.folder):
            atomic_files.atomic_write(loop.folder / RESULTS, json.dumps(found, indent=1, allow_nan=False) + "\n")
        say(result_tables.iterations_table(found))
        say(f"guide   {loop.folder}", highlight=False, soft_wrap=True)
