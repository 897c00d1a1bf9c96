"""The command ``nlgrpo rollout``: K samples of the reference for every prompt, drawn and scored once, for later stages.

    nlgrpo rollout my.toml --samples 100 --out runs/rollouts
    torchrun --nproc-per-node 8 -m nlgrpo.cli rollout my.toml --samples 100 --out runs/rollouts

`reference_rollouts.load` reads the folder. Ranks share the prompts file by file (`draws`), and the folder.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from time import perf_counter

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from nlgrpo.calibration import kolmogorov_smirnov
from nlgrpo.config import validate
from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import Config
from nlgrpo.data.prompt_dataset import Batch, PromptSet
from nlgrpo.engine import builders, transformers_backend
from nlgrpo.engine.rollouts import reference_rollouts
from nlgrpo.engine.rollouts.collect import Provenance, RolloutCollector, Scorer, open_store, scorers
from nlgrpo.engine.rollouts.reference_rollouts import Index, ReferenceRollouts
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.engine.transformers_backend import TransformersModel
from nlgrpo.evaluation import calibration_figures, figures
from nlgrpo.model import decoder, hf_weights
from nlgrpo.model.decoder import Decoder
from nlgrpo.rewards import reward_functions
from nlgrpo.runtime import atomic_files, distributed
from nlgrpo.runtime.console import named_lines
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.timing import StopSignal, as_clock
from nlgrpo.runtime.work_queue import WorkQueue

ABOUT = """Draw and score samples of the reference: nlgrpo rollout [recipe] [file.toml] [--section.key value ...]

Recipe, file and keys are those of `nlgrpo train`; the reference is model.path, the prompts are all of data.source. What
is drawn is kept file by file: the same command goes on where it was stopped or killed, and with other rewards or more
prompts draws what is missing only."""


@dataclass
class Options:
    """What rollouts take besides the keys of a configuration."""

    out: Path | None = None
    """Folder of the rollouts; none: runs/<recipe>-rollouts."""
    samples: int = 100
    """K, completions of each prompt."""
    prompts: int | None = None
    """The first so many prompts of the source; none: all."""
    ks: tuple[int, ...] = ()
    """Numbers of samples, two or more: do so many give another CDF than so many others (vBoN, Table 1)?"""
    ks_nested: bool = False
    """Take the smaller number from among the larger, as the paper does, so that this may be K."""
    dry_run: bool = False
    """Say what there is to do; draw nothing."""


@dataclass(frozen=True)
class Job:
    """All that the command works with; nothing is written yet."""

    cfg: Config
    folder: Path
    source: Path
    dtype: torch.dtype
    origin: Provenance
    prompts: PromptSet
    batch: Batch
    sampler: Sampler
    scorers: list[Scorer]
    queue: WorkQueue


# --- what is asked for ------------------------------------------------------------------------------------------------


def read_arguments(arguments: Sequence[str]) -> tuple[Options, Config]:
    """Raises ValueError for what cannot be run."""
    options, rest = tyro.cli(
        Options, args=list(arguments), prog="nlgrpo rollout", description=ABOUT, return_unknown_args=True
    )
    cfg, _ = from_arguments(rest)
    if options.samples < 2:
        raise ValueError(f"--samples {options.samples}: ranks among a prompt's samples need 2 of them at least")
    if options.samples >= 2**31:
        raise ValueError(f"--samples {options.samples}: expected less than 2^31")
    most = max(options.ks, default=0) if options.ks_nested else sum(sorted(options.ks)[-2:])
    if options.ks and (len(options.ks) < 2 or min(options.ks) < 1 or most > options.samples):
        raise ValueError(
            f"--ks {' '.join(map(str, options.ks))}: expected two numbers or more, any two of which are together at "
            f"most --samples {options.samples}; with --ks-nested each of them"
        )
    if options.prompts is not None and options.prompts < 1:
        raise ValueError(f"--prompts {options.prompts}: expected 1 or more; leave it out for all")
    validate.check(cfg)
    return options, cfg


def build(options: Options, cfg: Config, queue: WorkQueue) -> Job:
    """Read tokenizer, prompts and rewards; the weights are loaded once there is something to draw.

    Raises ValueError for what cannot be run.
    """
    source = hf_weights.locate(cfg.model.path)
    tokenizer = builders.load_tokenizer(source)
    in_order = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, shuffle=False))
    limits = transformers_backend.limits_of(decoder.read_config(source))
    prompts = builders.prompts_of(in_order, cfg.data.source, cfg.data.split, tokenizer, limits)
    objectives, loaded = builders.load_rewards(cfg, queue.ranks.device)
    reward_functions.check_columns(loaded, prompts.names)
    dtype = builders.compute_dtype(cfg.model.dtype, queue.ranks.device)
    origin = Provenance.of(source, tokenizer, dtype, builders.sampling_of(cfg, tokenizer, source))
    seed = cfg.train.seed ^ (1 << 61)  # neither a run's own nor its evaluation's: no noise is met twice
    return Job(
        cfg=cfg,
        folder=options.out or Path(f"runs/{cfg.recipe}-rollouts"),
        source=source,
        dtype=dtype,
        origin=origin,
        prompts=prompts,
        batch=prompts.take(0, min(options.prompts or len(prompts), len(prompts))),
        sampler=Sampler(tokenizer, origin.sampling, options.samples, cfg.rollout.max_rows, seed, []),
        scorers=scorers(cfg.rewards, objectives, loaded),
        queue=queue,
    )


def plan(job: Job) -> Table:
    """What there is to do, for `--dry-run` and the beginning."""
    sampling, P, K = job.origin.sampling, len(job.batch.ids), job.sampler.samples
    filters = [f", {name} {getattr(sampling, name):g}" for name in ("top_k", "top_p", "min_p")]
    rows = {
        "reference": f"{job.cfg.model.path}, computes in {str(job.dtype).removeprefix('torch.')}"
        f"{transformers_backend.note(job.source)}",
        "ranks": f"{job.queue.ranks.world} on {job.queue.ranks.device.type}",
        "prompts": f"the first {P:,} of {job.prompts!r}{_repeated(job.batch)}",
        "samples": f"{K:,} of each, {P * K:,} completions of up to {sampling.max_new_tokens} tokens, at temperature "
        f"{sampling.temperature:g}{''.join(filters) * sampling.filtered}; {_per_file(job)} prompts a file",
        "rewards": "\n".join(f"{scorer.name}: {scorer.spec}" for scorer in job.scorers),
        "folder": str(job.folder),
    }
    return named_lines("rollouts", rows)


def _repeated(batch: Batch) -> str:
    again = len(batch.ids) - len({tuple(ids) for ids in batch.ids})
    return f"; {again:,} are repeated, and looked up as the first of their kind" * bool(again)


def _per_file(job: Job) -> int:
    """What is decoded together is kept together."""
    return max(1, job.sampler.max_rows // job.sampler.samples)


# --- drawing and scoring ----------------------------------------------------------------------------------------------


def open_folder(job: Job) -> RolloutCollector:
    """Write down what the folder is going to hold. Raises ValueError where it holds other rollouts."""
    _refuse_others(job)
    store = open_store(job.folder / reference_rollouts.SAMPLES, job.origin, job.sampler, first=job.queue.ranks.first)
    draws = RolloutCollector(job.cfg.model.path, job.source, job.dtype, job.batch, job.sampler, _per_file(job), store)
    if job.queue.ranks.first:
        Index.of(draws, job.origin, job.scorers, job.cfg.train.seed).write(job.folder)
    return draws


def _refuse_others(job: Job) -> None:
    """Other prompts and rewards are no fault: the completions that they share are kept by content."""
    try:
        known = reference_rollouts.read_index(job.folder)
    except ValueError:  # none yet, or damaged: it is written anew
        return
    found = reference_rollouts.differences(known, job.origin)
    settings = {
        "samples a prompt": (known.samples, job.sampler.samples),
        "train.seed": (known.seed, job.cfg.train.seed),
        "type computed in": (known.origin.dtype, job.origin.dtype),
    }
    found += [f"{name}: {old} there, {new} asked for" for name, (old, new) in settings.items() if old != new]
    if found:
        lines = [f"{job.folder} holds other rollouts:", *found, "Choose another folder with --out"]
        raise ValueError("\n  ".join(lines))


@dataclass
class Drawn:
    """How much this process has drawn, and how long that took."""

    tokens: int = 0
    seconds: float = 0.0

    def over(self, ranks: Ranks) -> Drawn:
        """Of all ranks, which draw side by side; collective."""
        each = ranks.gather_objects(self)
        return Drawn(sum(drawn.tokens for drawn in each), max(drawn.seconds for drawn in each))


def roll_out(job: Job, draws: RolloutCollector) -> Drawn | None:
    """Draw and score what is missing; None where a signal ended it early. Collective.

    A file is scored as soon as it is drawn, so that a reward that fails does so before all is drawn.
    """
    own, model = Drawn(), cache(partial(draws.load, job.queue.ranks.device))
    missing = job.queue.missing(draws.chunks, lambda chunk: draws.drawn(chunk) and not _unscored(job, draws, chunk))
    if len(missing) < len(draws.chunks):
        job.queue.console.print(f"{len(draws.chunks) - len(missing)} of {len(draws.chunks)} files are there")
    what = "completions and rewards, files"
    finished = job.queue.work(what, missing, lambda chunk: _draw_and_score(job, draws, model, chunk, own))
    total = own.over(job.queue.ranks)
    return total if finished else None


def _draw_and_score(
    job: Job, draws: RolloutCollector, model: Callable[[], Decoder | TransformersModel], chunk: Batch, own: Drawn
) -> None:
    if not draws.drawn(chunk):
        loaded, began = model(), perf_counter()
        own.tokens += int(draws.draw(loaded, chunk).lengths.sum())
        own.seconds += perf_counter() - began
    draws.score(chunk, _unscored(job, draws, chunk))


def _unscored(job: Job, draws: RolloutCollector, chunk: Batch) -> list[Scorer]:
    return [scorer for scorer in job.scorers if not draws.scored(chunk, scorer)]


# --- what came out ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardSummary:
    """One reward over all prompts; NaN where nothing was scored."""

    name: str
    mean: float
    deviation: float  # of all completions
    within: float  # mean over prompts of the deviation among a prompt's samples
    one_value: float  # share of prompts whose samples all have one reward: their ranks say nothing
    ties: float  # share of the pairs of a prompt's samples that have the same reward
    abstained: int  # completions


def summarize(name: str, rewards: Tensor) -> RewardSummary:
    """Of rewards (P, K). Prompts of which a sample was not scored count in the mean and the deviation alone."""
    there = rewards[~rewards.isnan()]
    whole = rewards[~rewards.isnan().any(1)].sort(1).values
    K = rewards.shape[1]
    below = torch.searchsorted(whole, whole, right=False)
    upto = torch.searchsorted(whole, whole, right=True)
    tied = (upto - below - 1).double().sum(1) / (K * (K - 1))  # ordered pairs of two samples
    squares = (whole - whole.mean(1, keepdim=True)).square().sum(1)
    return RewardSummary(
        name=name,
        mean=there.mean().item(),
        deviation=there.std().item() if len(there) > 1 else math.nan,
        within=(squares / (K - 1)).sqrt().mean().item(),
        one_value=(whole[:, 0] == whole[:, -1]).double().mean().item(),
        ties=tied.mean().item(),
        abstained=rewards.numel() - len(there),
    )


def table(rollouts: ReferenceRollouts) -> Table:
    """A line a reward, and what the completions are like below."""
    P, K = rollouts.lengths.shape
    found = Table(title=f"{P:,} prompts x {K:,} samples of the reference", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("reward", "mean", "deviation", "within", "one value", "ties", "abstained"):
        found.add_column(heading, justify="left" if heading == "reward" else "right")
    for name, values in rollouts.rewards.items():
        s = summarize(name, values)
        numbers = [f"{s.mean:.4f}", f"{s.deviation:.4f}", f"{s.within:.4f}", f"{s.one_value:.1%}", f"{s.ties:.1%}"]
        found.add_row(Text(name), *("-" if "nan" in text else text for text in numbers), f"{s.abstained:,}")
    length, cut = rollouts.lengths.double().mean().item(), (~rollouts.finished).double().mean().item()
    found.caption_justify = "left"
    found.caption = (
        f"{length:.1f} tokens a completion, {cut:.1%} cut at {rollouts.index.origin.sampling.max_new_tokens}; "
        f"log-prob {rollouts.logprobs.mean().item():.2f}"
    )
    return found


def ks_tables(rollouts: ReferenceRollouts, sizes: Sequence[int], nested: bool) -> Iterator[Table]:
    """A table a reward; prompts of which a sample was not scored are left out."""
    for name, values in rollouts.rewards.items():
        whole = values[~values.isnan().any(1)]
        if not len(whole):
            continue
        how = "the smaller of the larger's own" if nested else "of samples that share none"
        title = f"{name}: two-sample Kolmogorov-Smirnov tests at 5%, {how}"
        found = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for heading in kolmogorov_smirnov.COLUMNS:
            found.add_column(heading, justify="right")
        for row in kolmogorov_smirnov.ks_table(whole, sizes, nested=nested):
            found.add_row(*row.cells())
        yield found


def draw_calibration(rollouts: ReferenceRollouts) -> list[Path]:
    """``calibration-NAME.png`` of every reward, in the folder: rewards over ranks, before and after."""
    written = []
    for name, values in rollouts.rewards.items():
        whole = values[~values.isnan().any(1)]
        if len(whole) and whole.shape[1] >= 4:
            written.append(rollouts.folder / f"calibration-{name}.png")
            atomic_files.atomic_write_bytes(
                written[-1], figures.render(partial(calibration_figures.calibration, whole))
            )
    return written


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Exit status 0: done, or saved on a signal. Raises ValueError for what the user can mend."""
    options, cfg = read_arguments(arguments)
    stop = StopSignal()
    disable_progress_bar()  # transformers' own, of every reward model that is read
    with distributed.start() as ranks:
        job = build(options, cfg, WorkQueue(ranks, Console(quiet=not ranks.first), stop))
        job.queue.console.print(plan(job))
        if not options.dry_run:
            _run(job, options)
    return 0


def _run(job: Job, options: Options) -> None:
    say = partial(job.queue.console.print, highlight=False, soft_wrap=True)
    drawn = roll_out(job, open_folder(job))
    if drawn is None:
        say("stopped and saved; the same command goes on from there")
    elif job.queue.ranks.first:
        rollouts = reference_rollouts.load(job.folder)
        say(table(rollouts))
        for tests in ks_tables(rollouts, options.ks, options.ks_nested) if options.ks else ():
            say(tests)
        if drawn.tokens:
            speed = drawn.tokens / drawn.seconds
            say(f"drew {drawn.tokens:,} tokens in {as_clock(drawn.seconds)}, {speed:,.0f} tokens/s")
        say("\n".join(f"picture   {path}" for path in draw_calibration(rollouts)))
        say(f"rollouts  {job.folder}")
