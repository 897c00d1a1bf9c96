"""The command ``nlgrpo evaluate``: what models are worth under each procedure, how far they went, how sure that is.

    nlgrpo evaluate runs/length-bon runs/length-mean --n 64 --ns 1,2,4,8,16
    torchrun --nproc-per-node 8 -m nlgrpo.cli evaluate my-model --reference base --file evaluation.toml

Every model draws n completions of the same prompts with the same noise; they are kept, and scored, under names that
their content determines (`sample_store`), so that the same command goes on where it was stopped, and another one that
needs the same completions finds them. Ranks share the work chunk by chunk, and the folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from nlgrpo.config import recipes, schema, validate
from nlgrpo.config.overrides import override
from nlgrpo.config.schema import Config
from nlgrpo.data.prompt_dataset import Batch, plain_text
from nlgrpo.engine import builders, logprobs
from nlgrpo.engine.rollouts.collect import Provenance, RolloutCollector, Scorer, open_store, scorers
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, write_evaluation
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.engine.rollouts.store import chunk_name
from nlgrpo.evaluation import results, rewind
from nlgrpo.evaluation.estimators import distinct_n
from nlgrpo.model import decoder, hf_weights
from nlgrpo.model.architectures import shape_of
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.packing import pack
from nlgrpo.objectives.registry import Objective, parse
from nlgrpo.rewards import reward_functions
from nlgrpo.runtime import distributed, user_code
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.work_queue import WorkQueue
from nlgrpo.training.losses import kl

REFERENCE = "reference"
CHUNK = 4  # prompts in a file of completions


@dataclass(frozen=True)
class Options:
    """What is asked for beside the configuration."""

    models: tuple[str, ...]
    reference: str
    out: Path
    procedures: tuple[str, ...]
    ns: tuple[int, ...]
    gold: tuple[str, ...]


@dataclass(frozen=True)
class Evaluation:
    """All that an evaluation needs."""

    cfg: Config
    options: Options
    ranks: Ranks
    candidates: list[RolloutCollector]  # the reference first; each has its own tokens of the prompts
    objectives: dict[str, Objective]
    scorers: list[Scorer]
    console: Console = field(default_factory=Console)

    @property
    def samples(self) -> int:
        return self.cfg.evaluation.samples

    @property
    def queue(self) -> WorkQueue:
        return WorkQueue(self.ranks, self.console)


# --- arguments --------------------------------------------------------------------------------------------------------


def read_arguments(arguments: Sequence[str]) -> tuple[Options, Config]:
    """``MODEL... [--reference REF] [--file TOML] [--n 64] [--ns 1,2,4] [--procedures ..] [--gold ..] [--key value]``.

    Begins at the configuration of the first model that is a run's folder, else at the blank recipe, or at the file.
    Raises ValueError for what does not fit.
    """
    given = list(arguments)
    named: list[str] = []
    while given and not given[0].startswith("-"):
        named.append(given.pop(0))
    parser = argparse.ArgumentParser(prog="nlgrpo evaluate", allow_abbrev=False, description=ABOUT)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--reference", help="model that the others are held against; default: the one of the run")
    parser.add_argument("--file", type=Path, help="TOML file with data, rewards, .. as for training")
    parser.add_argument("--out", type=Path, default=Path("runs/evaluation"), help="folder of samples and results")
    parser.add_argument(
        "--n", "--samples", type=int, default=64, help="completions of a prompt; torchrun takes --samples"
    )
    parser.add_argument("--ns", default="1,2,4,8,16", help="N of best-of-N and worst-of-N")
    parser.add_argument(
        "--procedures",
        default="bon,wor",
        help='"bon", "wor" (for every N), "soft:0.1", "cvar:0.1", "rewind:0.85:32", ..',
    )
    parser.add_argument("--gold", default="", help="rewards by which the choice of the others is judged")
    known, rest = parser.parse_known_args(given)
    if not named:
        raise ValueError("there is no model to evaluate; name folders of runs or models first: nlgrpo evaluate runs/a")
    base, of_run = _base(named, known.file)
    cfg = _override(base, rest, known.n, of_run)
    ns = tuple(dict.fromkeys(_integers(known.ns)))
    if not ns or not all(1 <= n <= known.n for n in ns):
        raise ValueError(f"--ns {known.ns}: expected numbers between 1 and --n {known.n}, the completions of a prompt")
    gold = tuple(name for name in known.gold.split(",") if name)
    unknown = [name for name in gold if name not in cfg.rewards]
    if unknown:
        raise ValueError(f"--gold {unknown[0]}: there is no such reward; there are {', '.join(cfg.rewards)}")
    procedures = tuple(_expanded(known.procedures.split(","), ns, known.n))
    return Options(tuple(named), known.reference or cfg.model.path, known.out, procedures, ns, gold), cfg


ABOUT = """What models are worth under each inference procedure, against a reference.

Before the options stand the models: folders of runs, Hugging Face directories, or hub names; LABEL=PATH names one.
Other options are those of a configuration, such as --data.source, --rewards.NAME.function, --rollout.temperature,
--evaluation.prompts; they come on top of the run's own, where the first model is a run. Under torchrun, which takes
--n for one of its own, write --samples."""


def _base(named: Sequence[str], file: Path | None) -> tuple[Config, bool]:
    """What the options are laid over, and whether it is that of a run."""
    if file is not None:
        return schema.read_toml(file, recipes.recipe("blank")), False
    known = next((_path(name) / "config.json" for name in named if _is_run(_path(name))), None)
    if known is None:
        return recipes.recipe("blank"), False
    return schema.from_dict(json.loads(known.read_text("utf-8")), where=str(known)), True


def _override(base: Config, rest: Sequence[str], n: int, of_run: bool) -> Config:
    evaluation = dataclasses.replace(base.evaluation, samples=n, ns=(1,))
    cfg = override(dataclasses.replace(base, evaluation=evaluation), rest, program="nlgrpo evaluate")
    if not of_run and not cfg.data.evaluation:  # nothing was trained on: all prompts may be taken
        cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, evaluation=cfg.data.source))
    if cfg.evaluation.prompts < 1:
        raise ValueError(f"evaluation.prompts = {cfg.evaluation.prompts}: an evaluation needs one prompt at least")
    validate.check(cfg)
    return cfg


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--ns {text}: expected whole numbers between commas, such as 1,2,4") from None


def _expanded(procedures: Sequence[str], ns: Sequence[int], samples: int) -> list[str]:
    """Names of objectives; "bon" and "wor" for every N, of which N = 1 is "mean" in both; and of rewind-and-repeat."""
    found = []
    for text in filter(None, map(str.strip, procedures)):
        for name in [f"{text}:{n}" for n in ns] if text in ("bon", "wor") else [text]:
            again = rewind.parse(name)
            if again is not None and again.most > samples:
                raise ValueError(f"--procedures {again}: takes up to {again.most} draws, and --n is {samples}")
            chosen = again or parse(name, user_code.function)
            found.append("mean" if name in ("bon:1", "wor:1") else str(chosen))
    return list(dict.fromkeys(found))


def _path(name: str) -> Path:
    return Path(name.partition("=")[2] or name)


def _is_run(path: Path) -> bool:
    return (path / "model" / "config.json").is_file()


def _label(name: str) -> str:
    label, given, path = name.partition("=")
    return label if given and path else Path(name).name or name


# --- what is evaluated ------------------------------------------------------------------------------------------------


def build(options: Options, cfg: Config, ranks: Ranks) -> Evaluation:
    """Read tokenizers, prompts and rewards; weights are read one model at a time, by `draw`."""
    labels = [REFERENCE, *map(_label, options.models)]
    if len(set(labels)) < len(labels):
        raise ValueError(f"models need different labels, got {', '.join(labels)}; give one as LABEL=PATH")
    named = [options.reference, *options.models]
    candidates = [_candidate(label, name, options, cfg, ranks) for label, name in zip(labels, named, strict=True)]
    first = candidates[0]
    for other in candidates[1:]:
        if other.batch.prompts != first.batch.prompts:
            raise ValueError(
                f"{other.label} cannot answer the same prompts as {first.label}: its context or tokenizer leaves out "
                "others as too long. Lower rollout.max_new_tokens, or choose prompts that fit all models."
            )
    objectives, loaded = builders.load_rewards(cfg, ranks.device)
    reward_functions.check_columns(loaded, list(first.batch.columns))
    console = Console(quiet=not ranks.first)
    return Evaluation(cfg, options, ranks, candidates, objectives, scorers(cfg.rewards, objectives, loaded), console)


def _candidate(label: str, name: str, options: Options, cfg: Config, ranks: Ranks) -> RolloutCollector:
    path = _path(name) if label != REFERENCE else Path(name)
    source = hf_weights.locate(path / "model" if _is_run(path) else str(path))
    tokenizer = builders.load_tokenizer(source)
    here = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, path=name))
    _, held_out = builders.load_prompts(here, tokenizer, shape_of(decoder.read_config(source)))
    batch = held_out.take(0, min(cfg.evaluation.prompts, len(held_out)))
    seed = cfg.train.seed ^ (1 << 62)  # that of a run's own evaluation
    sampling = builders.sampling_of(cfg, tokenizer, source)
    sampler = Sampler(tokenizer, sampling, cfg.evaluation.samples, cfg.rollout.max_rows, seed, [])
    dtype = builders.compute_dtype(cfg.model.dtype, ranks.device)
    origin = Provenance.of(source, tokenizer, dtype, sampling)
    store = open_store(options.out / "samples", origin, sampler, first=ranks.first)
    return RolloutCollector(label, source, dtype, batch, sampler, CHUNK, store)


def tokenize_alike(a: RolloutCollector, b: RolloutCollector) -> bool:
    """Whether both have the same tokens, so that one can tell how likely the other's completions are."""
    return a.batch.ids == b.batch.ids and a.sampler.tokenizer.get_vocab() == b.sampler.tokenizer.get_vocab()


# --- drawing and scoring ----------------------------------------------------------------------------------------------


def draw(e: Evaluation, candidate: RolloutCollector) -> None:
    """Draw what is not kept yet."""
    model = cache(partial(candidate.load, e.ranks.device))
    missing = e.queue.missing(candidate.chunks, candidate.drawn)
    e.queue.work(f"{candidate.label}: completions", missing, lambda chunk: candidate.draw(model(), chunk))


def measure_kl(e: Evaluation, candidates: Sequence[RolloutCollector]) -> None:
    """Log-ratios of the completions to the reference, by its log-probs: "k1" and "k3", summed over tokens, (p, n)."""
    first = e.candidates[0]
    reference = cache(partial(decoder.load, first.source, dtype=first.dtype, device=e.ranks.device))
    pieces = [(candidate, chunk) for candidate in candidates for chunk in candidate.chunks]
    missing = e.queue.missing(pieces, lambda piece: piece[0].store.has(kl_name(e, piece[1])))
    e.queue.work("KL to the reference", missing, lambda piece: _measure_kl(e, reference(), *piece))


def _measure_kl(e: Evaluation, reference: Decoder, candidate: RolloutCollector, chunk: Batch) -> None:
    device, rollout = e.ranks.device, candidate.rollout(chunk)
    prompts = [prompt for prompt in rollout.prompt_ids for _ in range(e.samples)]
    tokens = builders.micro_batch_tokens(None, device)
    batches = pack(prompts, rollout.completion_ids(), range(len(prompts)), tokens, device)
    theirs = logprobs.completion_logprobs(reference, rollout, batches, candidate.sampler.sampling.temperature).cpu()
    ours = rollout.logprobs.flatten(0, 1).to(theirs)
    found = {kind: kl.estimate(ours, theirs, kind).sum(-1).view(rollout.lengths.shape) for kind in ("k1", "k3")}
    candidate.store.write(kl_name(e, chunk), found)


def kl_name(e: Evaluation, chunk: Batch) -> str:
    return f"{chunk_name(chunk.index, chunk.ids)}.kl-{e.candidates[0].store.digest}"


def score(e: Evaluation, candidate: RolloutCollector, scorer: Scorer) -> None:
    """What a reward gives to every completion."""
    missing = e.queue.missing(candidate.chunks, lambda chunk: candidate.scored(chunk, scorer))
    e.queue.work(f"{candidate.label}: {scorer.name}", missing, lambda chunk: candidate.score(chunk, [scorer]))


def collect(e: Evaluation, candidate: RolloutCollector) -> EvaluationSamples:
    """All chunks of a model, which all ranks have written, in the order of the prompts."""
    chunks, read = candidate.chunks, candidate.store.read
    rollouts = [candidate.rollout(chunk) for chunk in chunks]
    texts = [candidate.sampler.texts(c.prompts, rollout) for c, rollout in zip(chunks, rollouts, strict=True)]
    has_kl = all(candidate.store.has(kl_name(e, chunk)) for chunk in chunks)
    ids = [rollout.completion_ids() for rollout in rollouts]
    groups = [rows[i : i + e.samples] for rows in ids for i in range(0, len(rows), e.samples)]
    completions = [rows[i : i + e.samples] for rows in texts for i in range(0, len(rows), e.samples)]
    functions = {scorer.name: scorer.reward.function for scorer in e.scorers}
    return EvaluationSamples(
        rewards={s.name: torch.cat([candidate.scores(chunk, s) for chunk in chunks]).double() for s in e.scorers},
        lengths=torch.cat([rollout.lengths for rollout in rollouts]),
        objectives={name: str(objective) for name, objective in e.objectives.items()},
        weights={name: reward.weight for name, reward in e.cfg.rewards.items()},
        max_length=e.cfg.rollout.max_new_tokens,
        prompts=[plain_text(p) for p in candidate.batch.prompts][:8],
        completions=[rows[:8] for rows in completions[:8]],
        kl=_joined(read(kl_name(e, chunk)) for chunk in chunks) if has_kl else {},
        distinct={str(n): torch.tensor([distinct_n(g, n) for g in groups], dtype=torch.float64) for n in (1, 2, 3)},
        answers={name: _answers(f, completions) for name, f in functions.items() if hasattr(f, "answer")},
    )


def _joined(chunks: Iterator[dict[str, Tensor] | None]) -> dict[str, Tensor]:
    there = [chunk for chunk in chunks if chunk is not None]
    names = sorted(there[0])  # a file has them in any order
    return {name: torch.cat([chunk[name] for chunk in there]).double() for name in names}


def _answers(function: Any, completions: Sequence[Sequence[str]]) -> Tensor:
    rows = []
    for texts in completions:
        known: dict[Any, int] = {}
        given = [function.answer(text) for text in texts]
        rows.append([-1 if answer is None else known.setdefault(answer, len(known)) for answer in given])
    return torch.tensor(rows)


# --- the command ------------------------------------------------------------------------------------------------------


def evaluate(e: Evaluation) -> dict[str, EvaluationSamples]:
    """Draw, score and collect; the results by label, on the first rank. Collective.

    Raises on every rank what one of them met.
    """
    reference, *others = e.candidates
    alike = [c for c in others if tokenize_alike(reference, c)]
    for c in others:
        if c not in alike:
            e.console.print(f"{c.label} has another tokenizer than the reference: no KL, and lengths in its own tokens")
    for c in e.candidates:
        draw(e, c)
    measure_kl(e, alike)
    for c in e.candidates:
        for scorer in e.scorers:
            score(e, c, scorer)
    return {c.label: collect(e, c) for c in e.candidates} if e.ranks.first else {}


def main(arguments: Sequence[str]) -> int:
    """Evaluate, write the results and print them. Raises ValueError for what the user can mend."""
    options, cfg = read_arguments(arguments)
    with distributed.start() as ranks:
        e = build(options, cfg, ranks)
        found = evaluate(e)
        if ranks.first:
            write_evaluation(options.out, **found)
            results.write(found, options.procedures, options.gold, cfg, options.out)
            for table in results.tables(found, options.procedures, options.gold):
                e.console.print(table)
            e.console.print(f"results  {options.out}", highlight=False, soft_wrap=True)
    return 0
