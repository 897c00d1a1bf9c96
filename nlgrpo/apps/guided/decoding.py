"""Comparison of decoding methods for a frozen model at equal budgets."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from nlgrpo.apps.guided import implicit_reward, value_dataset
from nlgrpo.apps.guided.decoding_methods import DecodingMethod, GivenModels, decoding_method, theory
from nlgrpo.apps.guided.implicit_reward import TextImplicitReward
from nlgrpo.apps.guided.options import ComparisonOptions
from nlgrpo.apps.respond.choosing import Chooser
from nlgrpo.config.schema import Config
from nlgrpo.data.prompt_dataset import Batch, PromptSet
from nlgrpo.engine import cascade_sampling, guided_search, guides, transformers_backend
from nlgrpo.engine.cascade_sampling import Cascade
from nlgrpo.engine.chunked_decoding import ImplicitReward, ModelValue, Prefixes
from nlgrpo.engine.decoding_memory import ROWS
from nlgrpo.engine.guided_search import Candidate, Cost, Search, Value
from nlgrpo.engine.rollouts import convert
from nlgrpo.engine.rollouts.collect import Provenance, Scorer, refuse_pairwise, scorers
from nlgrpo.engine.rollouts.inputs import find_columns, load_rewards, read_prompts, refuse_environment, sampling_of
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.engine.rollouts.store import digest_of_prompt, digests_of_columns
from nlgrpo.engine.transformers_backend import TransformersModel
from nlgrpo.errors import UserError
from nlgrpo.estimators import bootstrap
from nlgrpo.model import decoder, hf_weights
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.tokenizer import count_tokens, load_tokenizer
from nlgrpo.objectives.aggregation import sum_of_applicable
from nlgrpo.rewards import reward_functions
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.device import compute_dtype
from nlgrpo.runtime.timing import PeakMemory, machine
from nlgrpo.runtime.work_queue import WorkQueue

RESULTS = "decode.json"
OF_MODELS = (ModelValue, guides.TextValue, ImplicitReward, TextImplicitReward)


@dataclass(frozen=True)
class Comparison:
    """Model, prompts, rewards, value models and methods of a comparison."""

    options: ComparisonOptions
    cfg: Config
    folder: Path
    source: Path
    dtype: torch.dtype
    batch: Batch
    held_out: bool
    """Whether the prompts are held out in runs of this configuration; otherwise runs train on them."""
    left_out: int
    """Number of prompts left out: repeats, and those that runs or the value models are trained on."""
    dropped: dict[str, int]
    """Numbers of prompts that the model cannot be asked, by reason."""
    sampler: Sampler
    scorers: list[Scorer]
    gold: Scorer | None
    """Reward that evaluates and does not choose."""
    pair: implicit_reward.Pair | None
    """Tuned and untuned model of the implicit reward."""
    paths: list[Path]
    betas: list[float]
    methods: list[DecodingMethod]
    queue: WorkQueue

    @cached_property
    def model(self) -> Decoder | TransformersModel:
        """The model, after a first search, so that timings exclude the warm-up of the libraries."""
        device = self.queue.ranks.device
        tokens = count_tokens(self.sampler.tokenizer)
        model = transformers_backend.load_frozen(self.source, dtype=self.dtype, device=device, tokens=tokens)
        warm = dataclasses.replace(self.sampler.sampling, max_new_tokens=min(4, self.sampler.sampling.max_new_tokens))
        guided_search.search(model, self.batch.ids[:1], Search(2, 2, 2), warm, [])
        return model

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything besides the method that the results depend on."""
        sampling = self.sampler.sampling
        tokenizer = self.sampler.tokenizer
        return {
            "origin": Provenance.of(self.source, tokenizer, self.dtype, sampling).identity(),
            "prompts": self.prompts,
            "columns": digests_of_columns(self.batch.columns, len(self.batch.ids)),
            "rewards": {s.name: [s.digest, self.cfg.rewards[s.name].weight] for s in self.scorers},
            "seed": self.sampler.seed,
            "choose": self.options.choose,
            "costs": [self.sampler.max_rows, machine(self.queue.ranks.device)],  # they change time and memory
        } | ({"gold": [self.gold.name, self.gold.digest]} if self.gold else {})

    @cached_property
    def prompts(self) -> list[str]:
        """Digests of the prompts."""
        return [digest_of_prompt(ids) for ids in self.batch.ids]

    @cached_property
    def digests(self) -> list[str]:
        """Digests of the value models."""
        return [guides.digest_of_value(path) for path in self.paths]

    @cached_property
    def implicit_digests(self) -> list[str]:
        """Digests of the tuned and the untuned model."""
        return implicit_reward.digests(self.pair) if self.pair else []

    def file(self, method: DecodingMethod) -> Path:
        """Results file of a method. Equal methods, such as "iro" and "iro:3" with three value models, share it."""
        settings = {
            "values": [[self.digests[i], self.betas[i]] for i in method.values],
            "budget": method.budget,
            "search": method.search.settings(),
            "weight": method.weight,
        }
        settings |= {"implicit": [self.implicit_digests, method.own_choice]} if method.implicit else {}
        settings |= {"cascade": asdict(method.cascade)} if method.cascade else {}
        text = json.dumps([self.identity, settings], sort_keys=True)
        return self.folder / "ways" / f"{method.budget}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def describe_value(self, i: int) -> str:
        """Description of value model ``i`` and its beta."""
        folder = guides.folder_of(self.paths[i])
        note = guides.note(folder, self.sampler.tokenizer)
        missing = " (its rollouts are missing: it may be trained on these prompts)"
        return f"{self.paths[i]} / {self.betas[i]:g}{note}{missing * (value_dataset.learned_from(folder) is None)}"

    def values(self, method: DecodingMethod) -> list[tuple[Value, float]]:
        if method.weight is not None:
            return [(RewardOfPrefixes(self, method.weight), 1.0)]
        sampler = self.sampler
        device = self.queue.ranks.device
        if method.implicit:
            assert self.pair is not None
            value = implicit_reward.load_implicit_reward(
                self.pair, sampler.tokenizer, sampler.sampling, dtype=self.dtype, device=device
            )
            return [(value, 1.0)]
        paths = [self.paths[i] for i in method.values]
        betas = [self.betas[i] for i in method.values]
        return guides.load_values(paths, betas, sampler.tokenizer, sampler.sampling, dtype=self.dtype, device=device)

    def final_rewards(self, batch: Batch, completions: Sequence[Sequence[int]], samples: int) -> Tensor:
        """Return the weighted sums of the rewards that apply, (P, samples). Raises UserError if one fails."""
        return self.total(self.score(self.scorers, batch, completions, samples))

    def total(self, scored: Mapping[str, Tensor]) -> Tensor:
        """Weighted sums of the rewards {name: (P, samples)} that apply; NaN where one of these abstains."""
        return sum_of_applicable(torch.stack(list(scored.values())), [self.cfg.rewards[name].weight for name in scored])

    def score(
        self, scorers: Sequence[Scorer], batch: Batch, completions: Sequence[Sequence[int]], samples: int
    ) -> dict[str, Tensor]:
        """Return the rewards (P, samples) of each scorer. Raises UserError if one fails."""
        sampler = dataclasses.replace(self.sampler, samples=samples, rewards=[s.reward for s in scorers])
        scored = sampler.score(batch, convert.padded(batch.ids, completions, samples), first_prompt=batch.index[0])
        return scored.values


class RewardOfPrefixes(Prefixes):
    """Value function of ARGS: a weight times the reward of each prefix, scored like a complete response."""

    name = "the reward of a prefix"

    def __init__(self, comparison: Comparison, weight: float) -> None:
        self.comparison = comparison
        self.weight = weight
        self.place = {tuple(ids): i for i, ids in enumerate(comparison.batch.ids)}  # unique

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        super().begin(prompts)
        self.batch = self.comparison.batch.only([self.place[tuple(ids)] for ids in prompts])

    def score(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> Tensor:
        self.grow(rows, chunks)
        places = [p for p, _ in self.rows]
        batch = self.batch.only(places)
        return self.weight * self.comparison.final_rewards(batch, [tokens for _, tokens in self.rows], 1)[:, 0]


def _unseen(held_out: PromptSet, training: PromptSet, values: Sequence[Path]) -> PromptSet:
    """Return the held-out prompts that neither runs nor value models are trained on. Raises UserError if none."""
    learned = set[str]().union(*(value_dataset.learned_from(guides.folder_of(path)) or () for path in values))
    different = held_out.distinct(training.ids)
    unseen = different.only([i for i, ids in enumerate(different.ids) if digest_of_prompt(ids) not in learned])
    if not len(unseen):
        raise UserError(
            "every held-out prompt is also a training prompt or in the rollouts of the value models: set other "
            "prompts in data.evaluation"
        )
    return unseen


def _check_gold(gold: str | None, cfg: Config) -> None:
    """Raise UserError for a gold reward that does not exist or takes part in the choice."""
    if gold is None:
        return
    if gold not in cfg.rewards:
        raise UserError(f"--gold {gold}: expected a reward of the configuration: {', '.join(cfg.rewards)}")
    weights = {name: reward.weight for name, reward in cfg.rewards.items() if reward.weight != 0}
    if gold in weights and len(weights) == 1:
        raise UserError(
            f"--gold {gold}: it is the only reward that chooses, and would evaluate its own choice; add another reward "
            f"and set rewards.{gold}.weight = 0"
        )
    if gold in weights:
        raise UserError(
            f"--gold {gold}: rewards.{gold} has weight {weights[gold]:g}, so it takes part in choosing the responses; "
            f"set rewards.{gold}.weight = 0"
        )


def _refuse_learned(gold: str | None, values: Sequence[Path]) -> None:
    """Raise UserError if a value model was fitted to the gold reward."""
    for path in values:
        if gold is not None and gold in value_dataset.rewards_of(guides.folder_of(path)):
            raise UserError(f"--gold {gold}: the value model {path} was fitted to it; learn values from other rewards")


def _pair(options: ComparisonOptions) -> implicit_reward.Pair | None:
    """Return the models of the implicit reward, if any. Raises UserError for one alone, or two that do not match."""
    if bool(options.tuned) != bool(options.untuned):
        given, missing = ("tuned", "untuned") if options.tuned else ("untuned", "tuned")
        raise UserError(f"--{given} without --{missing}: an implicit reward is the difference of two models' log-probs")
    if not options.tuned:
        return None
    implicit_reward.check_pair((options.tuned, options.untuned))
    return options.tuned, options.untuned


def build_comparison(options: ComparisonOptions, cfg: Config, queue: WorkQueue) -> Comparison:
    """Load tokenizer, prompts and rewards. Raises UserError for a configuration that cannot be run."""
    refuse_environment(cfg, "nlgrpo decode")
    source = hf_weights.locate(cfg.model.path)
    tokenizer = load_tokenizer(source)
    limits = transformers_backend.limits_of(decoder.read_config(source))
    # Load with seed 0, for the same prompts in the same order with every sampling seed.
    seed_0 = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, seed=0))
    training, held_out = read_prompts(seed_0, tokenizer, limits)
    objectives, loaded = load_rewards(cfg, queue.ranks.device)
    _check_gold(options.gold, cfg)
    weighted = [reward for reward in loaded if cfg.rewards[reward.name].weight != 0]
    evaluating = [reward for reward in loaded if reward.name == options.gold]
    find_columns(cfg, [*weighted, *evaluating], training, held_out)
    reward_functions.check_columns([*weighted, *evaluating], held_out.names)
    reward_functions.check_rows([*weighted, *evaluating], held_out.prompts, held_out.rows)
    reward_scorers = scorers(cfg.rewards, objectives, weighted)
    gold = scorers(cfg.rewards, objectives, evaluating)
    refuse_pairwise([*reward_scorers, *gold])
    pair = _pair(options)
    learned = guides.read_guide(options.guide[0]) if len(options.guide) == 1 else None
    paths, compressed = (learned.values, learned.compressed) if learned else (list(options.guide), None)
    betas = list(options.betas) or (learned.betas if learned else [1.0] * len(paths))
    if len(betas) != len(paths):
        raise UserError(
            f"{len(betas)} betas for {len(paths)} value models: give one beta per model, or none for 1 each"
        )
    search = learned.search if learned else Search()
    search = dataclasses.replace(search, chunk=options.chunk or search.chunk)
    value_paths = [*paths, *([compressed] if compressed else [])]
    _refuse_learned(options.gold, value_paths)
    unseen = held_out.distinct() if held_out is training else _unseen(held_out, training.all(), value_paths)
    sampling = sampling_of(cfg, tokenizer, source)
    sampler = Sampler(
        tokenizer=tokenizer,
        sampling=sampling,
        samples=1,
        max_rows=cfg.rollout.max_rows or ROWS,
        seed=cfg.train.seed ^ (1 << 62),
        rewards=[],
    )
    given = GivenModels(len(paths), compressed is not None, pair is not None)
    by_value = options.choose == "value"
    methods = []
    for name in dict.fromkeys(options.methods):
        for budget in dict.fromkeys(options.budgets):
            methods.append(decoding_method(name, budget, search, sampling.max_new_tokens, given, by_value=by_value))
    return Comparison(
        options=dataclasses.replace(options, chunk=search.chunk),
        cfg=cfg,
        folder=options.out or Path(f"runs/{cfg.recipe}-decode"),
        source=source,
        dtype=compute_dtype(cfg.model.dtype, queue.ranks.device),
        batch=unseen.take(0, min(cfg.evaluation.prompts or len(unseen), len(unseen))),
        held_out=held_out is not training,
        left_out=len(held_out) - len(unseen),
        dropped=held_out.left_out,
        sampler=sampler,
        scorers=reward_scorers,
        gold=gold[0] if gold else None,
        pair=pair,
        paths=value_paths,
        betas=[*betas, *([1.0] if compressed else [])],
        methods=methods,
        queue=queue,
    )


def decode(c: Comparison, method: DecodingMethod) -> dict[str, Any]:
    """Decode with a method. Returns the rewards of its responses and the total cost, including their choice."""
    model = c.model
    values = c.values(method)
    device = c.queue.ranks.device
    by_reward = c.options.choose == "reward" and not method.own_choice and method.cascade is None
    peak = PeakMemory(device)
    began = perf_counter()
    if method.cascade is not None:
        found, cost = _cascade(c, method.cascade)
        answers = [one for [one] in found]
    else:
        choose = "value" if method.own_choice else c.options.choose
        found, cost = guided_search.search(
            model, c.batch.ids, method.search, c.sampler.sampling, values,
            seed=c.sampler.seed, index=c.batch.index, max_rows=c.sampler.max_rows or ROWS, valued=choose == "value",
        )  # fmt: skip
        answers = _by_reward(c, found) if by_reward else _by_chooser(c, found, choose)
    seconds = perf_counter() - began
    peak_bytes = peak.bytes()
    used = [model for value, _ in values if isinstance(value, OF_MODELS) for model in value.models]
    of_prefixes = cost.queries * (method.weight is not None or method.cascade is not None)
    tokens = [one.tokens for one in answers]
    scored = c.score(c.scorers, c.batch, tokens, 1)
    gold = {}
    if c.gold is not None:
        scores = c.score([c.gold], c.batch, tokens, 1)[c.gold.name]
        gold = {"gold": {"reward": c.gold.name, "rewards": _one_each(scores)}}
    return {
        "prompts": c.prompts,
        "search": asdict(method.search),
        "rewards": _one_each(c.total(scored)),
        "unscored": {name: _places(values.isnan()) for name, values in scored.items()},
        "tokens": cost.tokens,
        "queries": cost.queries - of_prefixes,
        "reward_queries": of_prefixes + sum(map(len, found)) * by_reward,
        "seconds": seconds,
        "value_bytes": sum({p.data_ptr(): p.nbytes for m in used for p in m.parameters()}.values()),
        "cache_bytes": cost.cache_bytes,
        "peak_bytes": peak_bytes,
        "theory": theory(method, c.sampler.sampling.max_new_tokens),
    } | gold


def _cascade(c: Comparison, how: Cascade) -> tuple[list[list[Candidate]], Cost]:
    """Sample one response per prompt by CARDS, which asks the rewards about beginnings of responses."""
    if not isinstance(c.model, Decoder):
        raise UserError(f"method 'cards' does not support the architecture of {c.cfg.model.path}")

    def rewards(prompts: Sequence[int], responses: Sequence[Sequence[int]]) -> Tensor:
        return c.final_rewards(c.batch.only(prompts), responses, 1)[:, 0]

    responses, cost = cascade_sampling.sample(
        c.model, c.batch.ids, how, c.sampler.sampling, rewards,
        seed=c.sampler.seed, index=c.batch.index, max_rows=c.sampler.max_rows or ROWS,
    )  # fmt: skip
    return [[response] for response in responses], cost


def _by_reward(c: Comparison, found: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """Candidate with the largest reward, per prompt; the first one where the rewards abstain for all of them."""
    # Prompts can have fewer candidates, if a beam ends early or ARGS has fewer tokens: repeat the last candidate.
    most = max(map(len, found))
    rows = [[*candidates, *[candidates[-1]] * (most - len(candidates))] for candidates in found]
    tokens = [candidate.tokens for row in rows for candidate in row]
    rewards = c.final_rewards(c.batch, tokens, most).nan_to_num(nan=-math.inf)
    return [row[i] for row, i in zip(rows, rewards.argmax(1).tolist(), strict=True)]


def _by_chooser(c: Comparison, found: Sequence[Sequence[Candidate]], how: str) -> list[Candidate]:
    """Candidate with the largest value, or chosen by majority, per prompt."""
    chooser = Chooser(how)
    pairs = zip(c.batch.ids, found, strict=True)
    rollouts = [convert.padded([ids], [one.tokens for one in own], len(own)) for ids, own in pairs]
    texts = [c.sampler.texts([p], rollout) for p, rollout in zip(c.batch.prompts, rollouts, strict=True)]
    return [own[chooser.choose(p, own, t)[0]] for p, own, t in zip(c.batch.prompts, found, texts, strict=True)]


def _places(absent: Tensor) -> list[int]:
    """Numbers of the prompts whose response is ``absent``, (P, 1) bool."""
    return absent[:, 0].nonzero()[:, 0].tolist()


def _one_each(rewards: Tensor) -> list[float | None]:
    """List the rewards (P, 1) of the responses, None where they abstain. Raises UserError if they do for all."""
    if rewards.isnan().all():
        raise UserError(f"the rewards abstain for all {len(rewards)} responses: choose prompts that they score")
    return [None if math.isnan(reward) else reward for reward in rewards.flatten().tolist()]


def run(c: Comparison) -> bool:
    """Decode with the methods that are missing. Returns False if a signal ended it early. Collective."""

    def make(method: DecodingMethod) -> None:
        path = c.file(method)
        found = decode(c, method)
        with atomic_files.into(c.folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_files.atomic_write(path, json.dumps(found, allow_nan=False) + "\n")

    different = list({c.file(method): method for method in c.methods}.values())
    missing = c.queue.missing(different, lambda method: c.file(method).is_file())
    return c.queue.work("decoding methods", missing, make)


def results(c: Comparison) -> list[dict[str, Any]]:
    """Return the mean reward of each method and its difference to best-of-N, over the prompts that have a reward."""
    found = [
        {"method": method.name, "budget": method.budget} | json.loads(c.file(method).read_text("utf-8"))
        for method in c.methods
    ]
    _add_intervals(found, found)
    if c.gold is not None:
        _add_intervals(found, [row["gold"] for row in found])
    return found


def _add_intervals(found: Sequence[Mapping[str, Any]], evaluations: Sequence[dict[str, Any]]) -> None:
    """Add "mean" and "over_bon" to the evaluations, one for each row of ``found``.

    Sums of several rewards are compared at the prompts at which the same ones score both responses.
    """
    rows = [[math.nan if x is None else x for x in evaluation["rewards"]] for evaluation in evaluations]
    each = [torch.tensor(row, dtype=torch.float64) for row in rows]
    unscored = [evaluation.get("unscored", {}) for evaluation in evaluations]
    bon = {row["budget"]: i for i, row in enumerate(found) if row["method"] == "bon"}
    for i, (row, evaluation, rewards) in enumerate(zip(found, evaluations, each, strict=True)):
        there = rewards[~rewards.isnan()]
        evaluation["mean"] = [float(x) for x in bootstrap(there)] if len(there) > 1 else [float(there[0])] * 3
        evaluation["mean_prompts"] = len(there)
        if row["method"] == "bon" or row["budget"] not in bon:
            continue
        other = bon[row["budget"]]
        over = rewards - each[other]
        for name in unscored[i] | unscored[other]:
            of_one = set(unscored[i].get(name, ())) ^ set(unscored[other].get(name, ()))
            over[sorted(of_one)] = math.nan
        over = over[~over.isnan()]
        if len(over) > 1:
            evaluation["over_bon"] = [float(x) for x in bootstrap(over)]
            evaluation["over_bon_prompts"] = len(over)
