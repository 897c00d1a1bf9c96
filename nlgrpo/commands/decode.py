"""The command ``nlgrpo decode``: ways to decode a frozen model, held against each other at the same budgets.

    nlgrpo decode my.toml --guide runs/iro --methods bon cd args iro:1 iro --budgets 4 16 64 --out runs/decode

A budget is N = K B, the candidates of a prompt at any time: at every position a method draws at most N tokens. Whatever
the method, the rewards (or the values, or the majority of answers) choose among the candidates that it ends with. P
prompts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from nlgrpo.commands.decode_methods import DecodingMethod, theory, way
from nlgrpo.config import validate
from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import Config
from nlgrpo.data.prompt_dataset import Batch, PromptSet
from nlgrpo.engine import builders, guided_search, transformers_backend
from nlgrpo.engine.chunked_decoding import ModelValue, Prefixes
from nlgrpo.engine.guided_search import Candidate, Search, Value
from nlgrpo.engine.rollouts import guided_responses
from nlgrpo.engine.rollouts.collect import Provenance, Scorer, refuse_pairwise, scorers
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.engine.rollouts.store import digest_of_prompt, digests_of_columns
from nlgrpo.engine.transformers_backend import TransformersModel
from nlgrpo.evaluation.estimators import bootstrap
from nlgrpo.model import decoder, hf_weights
from nlgrpo.model.decoder import Decoder
from nlgrpo.rewards import reward_functions
from nlgrpo.rewards.reward_functions import RewardError
from nlgrpo.runtime import atomic_files, distributed
from nlgrpo.runtime.console import named_lines
from nlgrpo.runtime.timing import PeakMemory, StopSignal, machine
from nlgrpo.runtime.work_queue import WorkQueue
from nlgrpo.training.scalar_heads import value_dataset

ABOUT = """Hold ways to decode a frozen model against each other: nlgrpo decode [recipe] [file.toml] --guide OUT [..]

Recipe, file and keys are those of `nlgrpo train`; the prompts are those that a run holds out, and the weighted sum of
the rewards chooses. Methods: "bon", best-of-N; "iro", the search guided by all values of --guide, "iro:2" by the first
two, "compressed" by the one that `nlgrpo iro` has made of all; "cd", chunks behind one beam by the first value; "args"
or "args:WEIGHT", the likeliest tokens by their log-prob and WEIGHT times the reward of the prefix."""
RESULTS = "decode.json"
LARGEST = 1 << 20  # candidates of a prompt


@dataclass
class Options:
    """What the comparison takes besides the keys of a configuration."""

    guide: tuple[Path, ...] = ()
    """A folder of `nlgrpo iro`, or value models."""
    betas: tuple[float, ...] = ()
    """Of the value models; none: those of the folder, or 1 each."""
    methods: tuple[str, ...] = ("bon", "iro")
    """What is compared."""
    budgets: tuple[int, ...] = (4, 16, 64)
    """N = K B, candidates of a prompt at any time; of a search K is the largest divisor up to the root of N."""
    chunk: int | None = None
    """L, tokens of a chunk; none: as the values of the folder were learned with, or 16."""
    choose: Literal["reward", "value", "majority"] = "reward"
    """What answers: the candidate with the largest reward or value, or the first with the most frequent final answer.

    By value, best-of-N reads its samples with all value models, and every other method with those that guide it.
    """
    out: Path | None = None
    """Folder of the results; none: runs/<recipe>-decode."""
    dry_run: bool = False
    """Say what there is to do; do nothing."""


# --- what is asked for ------------------------------------------------------------------------------------------------


def read_arguments(arguments: Sequence[str]) -> tuple[Options, Config]:
    """Raises ValueError for what cannot be run."""
    options, rest = tyro.cli(
        Options, args=list(arguments), prog="nlgrpo decode", description=ABOUT, return_unknown_args=True
    )
    cfg, _ = from_arguments(rest)
    validate.refuse(
        [
            "" if options.methods else "--methods: name one or more",
            "" if options.budgets else "--budgets: name one or more",
            *(f"--budgets {n}: allowed is 1 to {LARGEST:,}" for n in options.budgets if not 1 <= n <= LARGEST),
            "" if options.chunk is None or options.chunk >= 1 else f"--chunk {options.chunk}: allowed is >= 1",
        ]
    )
    validate.check(cfg)
    return options, cfg


@dataclass(frozen=True)
class Comparison:
    """All that the command works with."""

    options: Options
    cfg: Config
    folder: Path
    source: Path
    dtype: torch.dtype
    batch: Batch
    held_out: bool
    """By runs of this configuration; otherwise they train on these prompts."""
    left_out: int
    """Prompts that are there twice, or held out and yet among those that runs or the value models learn from."""
    sampler: Sampler
    scorers: list[Scorer]
    paths: list[Path]
    betas: list[float]
    ways: list[DecodingMethod]
    queue: WorkQueue

    @cached_property
    def model(self) -> Decoder | TransformersModel:
        """Loaded, and searched with once: what libraries make ready at the first call is no way's time."""
        model = transformers_backend.load(self.source, dtype=self.dtype, device=self.queue.ranks.device)
        warm = dataclasses.replace(self.sampler.sampling, max_new_tokens=min(4, self.sampler.sampling.max_new_tokens))
        guided_search.search(model, self.batch.ids[:1], Search(2, 2, 2), warm, [])
        return model

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the results depend on besides the way."""
        sampling, tokenizer = self.sampler.sampling, self.sampler.tokenizer
        return {
            "origin": asdict(Provenance.of(self.source, tokenizer, self.dtype, sampling)),
            "prompts": self.prompts,
            "columns": digests_of_columns(self.batch.columns, len(self.batch.ids)),
            "rewards": {s.name: [s.digest, self.cfg.rewards[s.name].weight] for s in self.scorers},
            "seed": self.sampler.seed,
            "choose": self.options.choose,
            "costs": [
                self.sampler.max_rows,
                machine(self.queue.ranks.device),
            ],  # what time and memory depend on besides
        }

    @cached_property
    def prompts(self) -> list[str]:
        """What tells one from another."""
        return [digest_of_prompt(ids) for ids in self.batch.ids]

    @cached_property
    def digests(self) -> list[str]:
        """Of the value models."""
        return [guided_responses.digest_of_value(path) for path in self.paths]

    def file(self, way: DecodingMethod) -> Path:
        """Ways that are one by two names, as "iro" and "iro:3" of three values are, share it."""
        guides = [[self.digests[i], self.betas[i]] for i in way.values]
        what = {"values": guides, "budget": way.budget, "search": asdict(way.search), "weight": way.weight}
        whole = json.dumps([self.identity, what], sort_keys=True)
        return self.folder / "ways" / f"{way.budget}-{hashlib.sha256(whole.encode()).hexdigest()[:16]}.json"

    def said_of(self, i: int) -> str:
        """A value model and its beta."""
        folder = guided_responses.folder_of(self.paths[i])
        note = guided_responses.note(folder, self.sampler.tokenizer)
        gone = " (its rollouts are gone: it may have learned from these prompts)"
        return f"{self.paths[i]} / {self.betas[i]:g}{note}{gone * (value_dataset.learned_from(folder) is None)}"

    def values(self, way: DecodingMethod) -> list[tuple[Value, float]]:
        if way.weight is not None:
            return [(RewardOfPrefixes(self, way.weight), 1.0)]
        sampler, device = self.sampler, self.queue.ranks.device
        paths, betas = [self.paths[i] for i in way.values], [self.betas[i] for i in way.values]
        return guided_responses.load_values(
            paths, betas, sampler.tokenizer, sampler.sampling, dtype=self.dtype, device=device
        )

    def worth(self, batch: Batch, completions: Sequence[Sequence[int]], samples: int) -> Tensor:
        """(P, samples) weighted sums of the rewards, NaN where one abstains. ValueError where one fails."""
        sampler = dataclasses.replace(self.sampler, samples=samples, rewards=[s.reward for s in self.scorers])
        try:
            found = sampler.score(
                batch, guided_responses.padded(batch.ids, completions, samples), first_prompt=batch.index[0]
            )
        except RewardError as error:
            raise ValueError(str(error)) from error
        return torch.stack([self.cfg.rewards[name].weight * x for name, x in found.values.items()]).sum(0)


class RewardOfPrefixes(Prefixes):
    """The rewards of prefixes as if they were whole, times a weight: a value that nobody trained, as in ARGS."""

    name = "the reward of a prefix"

    def __init__(self, comparison: Comparison, weight: float) -> None:
        self.comparison, self.weight = comparison, weight
        self.place = {tuple(ids): i for i, ids in enumerate(comparison.batch.ids)}  # all are different

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        super().begin(prompts)
        self.batch = self.comparison.batch.only([self.place[tuple(ids)] for ids in prompts])

    def score(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> Tensor:
        self.grow(rows, chunks)
        places = [p for p, _ in self.rows]
        batch = self.batch.only(places)
        return self.weight * self.comparison.worth(batch, [tokens for _, tokens in self.rows], 1)[:, 0]


def _unseen(held_out: PromptSet, training: PromptSet, values: Sequence[Path]) -> PromptSet:
    """The prompts held out that neither runs nor the value models have learned from. ValueError where there is none."""
    learned = set[str]().union(*(value_dataset.learned_from(guided_responses.folder_of(path)) or () for path in values))
    different = held_out.distinct(training.ids)
    unseen = different.only([i for i, ids in enumerate(different.ids) if digest_of_prompt(ids) not in learned])
    if not len(unseen):
        raise ValueError(
            "every prompt that is held out is among those of training, or of the rollouts of the value models: name "
            "others in data.evaluation"
        )
    return unseen


def build(options: Options, cfg: Config, queue: WorkQueue) -> Comparison:
    """Read tokenizer, prompts and rewards. Raises ValueError for what cannot be run."""
    source = hf_weights.locate(cfg.model.path)
    tokenizer = builders.load_tokenizer(source)
    limits = transformers_backend.limits_of(decoder.read_config(source))
    in_one_order = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, seed=0))  # for every seed of draws
    training, held_out = builders.load_prompts(in_one_order, tokenizer, limits)
    objectives, loaded = builders.load_rewards(cfg, queue.ranks.device)
    counting = [reward for reward in loaded if cfg.rewards[reward.name].weight != 0]
    reward_functions.check_columns(counting, held_out.names)
    judges = scorers(cfg.rewards, objectives, counting)
    refuse_pairwise(judges)
    learned = guided_responses.read_guide(options.guide[0]) if len(options.guide) == 1 else None
    paths, compressed = (learned.values, learned.compressed) if learned else (list(options.guide), None)
    betas = list(options.betas) or (learned.betas if learned else [1.0] * len(paths))
    if len(betas) != len(paths):
        raise ValueError(f"{len(betas)} betas for {len(paths)} value models: give one each, or none for 1 each")
    search = learned.search if learned else Search()
    search = dataclasses.replace(search, chunk=options.chunk or search.chunk)
    whole = [*paths, *([compressed] if compressed else [])]
    unseen = held_out.distinct() if held_out is training else _unseen(held_out, training, whole)
    sampling = builders.sampling_of(cfg, tokenizer, source)
    longest = sampling.max_new_tokens
    return Comparison(
        options=dataclasses.replace(options, chunk=search.chunk),
        cfg=cfg,
        folder=options.out or Path(f"runs/{cfg.recipe}-decode"),
        source=source,
        dtype=builders.compute_dtype(cfg.model.dtype, queue.ranks.device),
        batch=unseen.take(0, min(cfg.evaluation.prompts or len(unseen), len(unseen))),
        held_out=held_out is not training,
        left_out=len(held_out) - len(unseen),
        sampler=Sampler(tokenizer, sampling, 1, cfg.rollout.max_rows, cfg.train.seed ^ (1 << 62), []),
        scorers=judges,
        paths=whole,
        betas=[*betas, *([1.0] if compressed else [])],
        ways=[
            way(method, budget, search, longest, len(paths), compressed is not None, options.choose == "value")
            for method in dict.fromkeys(options.methods)
            for budget in dict.fromkeys(options.budgets)
        ],
        queue=queue,
    )


# --- decoding ---------------------------------------------------------------------------------------------------------


def decode(c: Comparison, way: DecodingMethod) -> dict[str, Any]:
    """The rewards of the way's answers, and what finding them has cost for all prompts, their choice included."""
    model, values, device, by_reward = c.model, c.values(way), c.queue.ranks.device, c.options.choose == "reward"
    peak, began = PeakMemory(device), perf_counter()
    found, cost = guided_search.search(
        model, c.batch.ids, way.search, c.sampler.sampling, values,
        seed=c.sampler.seed, index=c.batch.index, max_rows=c.sampler.max_rows, valued=c.options.choose == "value",
    )  # fmt: skip
    answers = _by_reward(c, found) if by_reward else _by_chooser(c, found)
    seconds, peak_bytes = perf_counter() - began, peak.bytes()
    used = [value.model for value, _ in values if isinstance(value, ModelValue | guided_responses.TextValue)]
    of_prefixes = cost.queries * (way.weight is not None)
    return {
        "prompts": c.prompts,
        "search": asdict(way.search),
        "rewards": _judged(c, c.worth(c.batch, [one.tokens for one in answers], 1)).flatten().tolist(),
        "tokens": cost.tokens,
        "queries": cost.queries - of_prefixes,
        "reward_queries": of_prefixes + sum(map(len, found)) * by_reward,
        "seconds": seconds,
        "value_bytes": sum(p.numel() * p.element_size() for m in used for p in m.parameters()),
        "cache_bytes": cost.cache_bytes,
        "peak_bytes": peak_bytes,
        "theory": theory(way, c.sampler.sampling.max_new_tokens),
    }


def _by_reward(c: Comparison, found: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """The candidate of each prompt with the largest reward."""
    most = max(map(len, found))  # fewer where a beam ended early, or ARGS has fewer tokens: the last one fills its row
    rows = [[*own, *[own[-1]] * (most - len(own))] for own in found]
    worth = _judged(c, c.worth(c.batch, [one.tokens for own in rows for one in own], most))
    return [own[i] for own, i in zip(rows, worth.argmax(1).tolist(), strict=True)]


def _by_chooser(c: Comparison, found: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """The candidate of each prompt that its value, or the majority, chooses."""
    chooser = guided_responses.Chooser(c.options.choose)
    pairs = zip(c.batch.ids, found, strict=True)
    rollouts = [guided_responses.padded([ids], [one.tokens for one in own], len(own)) for ids, own in pairs]
    texts = [c.sampler.texts([p], rollout) for p, rollout in zip(c.batch.prompts, rollouts, strict=True)]
    return [own[chooser.choose(p, own, t)[0]] for p, own, t in zip(c.batch.prompts, found, texts, strict=True)]


def _judged(c: Comparison, worth: Tensor) -> Tensor:
    """``worth`` (P, n), -inf where no reward judges. ValueError for a prompt of which none is judged."""
    worth = worth.nan_to_num(nan=-math.inf)
    unjudged = worth.isneginf().all(1).nonzero()[:, 0].tolist()
    if unjudged:
        what = "what was chosen for" if worth.shape[1] == 1 else "any candidate of"
        raise ValueError(f"the rewards have nothing to say of {what} prompt {c.batch.index[unjudged[0]]}")
    return worth


def run(c: Comparison) -> bool:
    """Make what is missing; False where a signal ended it early. Collective."""

    def make(way: DecodingMethod) -> None:
        path, found = c.file(way), decode(c, way)
        with atomic_files.into(c.folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_files.atomic_write(path, json.dumps(found, allow_nan=False) + "\n")

    different = list({c.file(way): way for way in c.ways}.values())
    missing = c.queue.missing(different, lambda way: c.file(way).is_file())
    return c.queue.work("ways to decode", missing, make)


# --- what came out ----------------------------------------------------------------------------------------------------


def results(c: Comparison) -> list[dict[str, Any]]:
    """Of every way: the mean reward with its interval over prompts, and its lead over best-of-N, prompt by prompt."""
    found = [
        {"method": way.method, "budget": way.budget} | json.loads(c.file(way).read_text("utf-8")) for way in c.ways
    ]
    bon = {row["budget"]: torch.tensor(row["rewards"], dtype=torch.float64) for row in found if row["method"] == "bon"}
    for row in found:
        rewards = torch.tensor(row["rewards"], dtype=torch.float64)
        row["mean"] = [float(x) for x in bootstrap(rewards)] if len(rewards) > 1 else [float(rewards[0])] * 3
        if row["budget"] in bon and row["method"] != "bon" and len(rewards) > 1:
            row["over_bon"] = [float(x) for x in bootstrap(rewards - bon[row["budget"]])]
    return found


def tables(found: Sequence[dict[str, Any]]) -> tuple[Table, Table]:
    """What the responses are worth, and what they have cost."""
    prompts = len(found[0]["rewards"])
    worth, cost = (
        Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
        for title in (f"{prompts} prompts (95% intervals)", "what a prompt costs")
    )
    for shown, headings in (
        (worth, ("method", "N", "reward", "over best-of-N")),
        (cost, ("method", "N", "tokens", "values", "rewards", "seconds", "MiB")),
    ):
        for heading in headings:
            shown.add_column(heading, justify="left" if heading == "method" else "right")
    cost.caption = "values and rewards asked for; MiB of value models, and of the caches of prompts searched together"
    for row in found:
        way = (row["method"], str(row["budget"]))
        over = "{:+.4f} [{:+.4f}, {:+.4f}]".format(*row["over_bon"]) if "over_bon" in row else "-"
        worth.add_row(*way, "{:.4f} [{:.4f}, {:.4f}]".format(*row["mean"]), over)
        each = [f"{row[key] / prompts:,.0f}" for key in ("tokens", "queries", "reward_queries")]
        memory = (row["value_bytes"] + row["cache_bytes"]) / 2**20
        cost.add_row(*way, *each, f"{row['seconds'] / prompts:.3f}", f"{memory:.1f}")
    return worth, cost


def plan(c: Comparison) -> Table:
    sampling, longest = c.sampler.sampling, c.sampler.sampling.max_new_tokens
    weighted = " + ".join(f"{c.cfg.rewards[s.name].weight:g} {s.name}" for s in c.scorers)
    whole = (c.options.chunk or 0) >= longest
    rows = {
        "model": f"{c.cfg.model.path}, frozen, computes in {str(c.dtype).removeprefix('torch.')}"
        f"{transformers_backend.note(c.source)}",
        "prompts": f"{len(c.batch.ids):,} that runs {'hold out' if c.held_out else 'TRAIN ON, as none are held out'}"
        + f" ({c.left_out:,} left out: repeats, or learned from)" * (c.left_out > 0)
        + f"; responses of up to {longest} tokens at temperature {sampling.temperature:g}",
        "ways": f"{', '.join(c.options.methods)} x N = {', '.join(map(str, c.options.budgets))}; chunks of "
        f"{c.options.chunk} tokens" + ", which are whole responses: no value guides" * whole,
        "values": ", ".join(map(c.said_of, range(len(c.paths)))) or "none",
        "chosen by": {"value": "the values of each way", "majority": "the majority of final answers"}.get(
            c.options.choose, weighted
        ),
        "folder": str(c.folder),
    }
    return named_lines("decode", rows)


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Exit status 0: done, or saved on a signal. Raises ValueError for what the user can mend."""
    options, cfg = read_arguments(arguments)
    stop = StopSignal()
    disable_progress_bar()  # transformers' own, of every reward model that is read
    with distributed.start() as ranks:
        comparison = build(options, cfg, WorkQueue(ranks, Console(quiet=not ranks.first), stop))
        say = comparison.queue.console.print
        say(plan(comparison))
        if options.dry_run:
            return 0
        if not run(comparison):
            say("stopped and saved; the same command goes on from there")
        elif ranks.first:
            found = results(comparison)
            atomic_files.atomic_write(comparison.folder / RESULTS, json.dumps(found, indent=1, allow_nan=False) + "\n")
            for shown in tables(found):
                say(shown)
            say(f"results {comparison.folder / RESULTS}", highlight=False, soft_wrap=True)
    return 0
