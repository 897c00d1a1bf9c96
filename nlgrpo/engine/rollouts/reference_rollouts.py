"""Samples of the reference, drawn and scored once before training: `nlgrpo rollout` writes them, `load` reads them.

A folder has ``rollouts.json``, which says what was drawn from what, for which prompts, and how it was scored;
completions and scores lie in files below ``samples`` (`draws`). Shapes: P prompts, K samples per prompt.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
import transformers
from torch import Tensor

from nlgrpo import __version__
from nlgrpo.calibration.ecdf import ECDF
from nlgrpo.data.prompt_dataset import PromptSet
from nlgrpo.engine.rollouts.collect import Provenance, RolloutCollector, Scorer
from nlgrpo.engine.rollouts.store import Store, Tensors, chunk_name, digest_of_prompt, digests_of_columns, score_name
from nlgrpo.engine.sampling import Sampling
from nlgrpo.runtime import atomic_files

FILE = "rollouts.json"
SAMPLES = "samples"  # the folder of completions and scores

# --- rollouts.json ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scoring:
    """How a reward was computed: what the configuration says of it, and a digest of that with its code and files."""

    spec: str
    digest: str


@dataclass(frozen=True)
class Index:
    """What ``rollouts.json`` holds.

    ``model`` is the path or name that the reference was given by. ``prompts`` are digests of token ids, in the order of
    the source, and ``columns`` of the other columns that they had when they were scored, "" without any; ``files``
    those of completions in the folder ``samples/STORE``, with how many prompts each has.
    """

    model: str
    origin: Provenance
    seed: int  # of the configuration
    samples: int  # K
    prompts: list[str]
    columns: list[str]
    rewards: dict[str, Scoring]
    store: str
    files: list[tuple[str, int]]
    versions: dict[str, str]

    @classmethod
    def of(cls, draws: RolloutCollector, origin: Provenance, scorers: Sequence[Scorer], seed: int) -> Index:
        """Of what is drawn and scored, or is going to be."""
        return cls(
            model=draws.label,
            origin=origin,
            seed=seed,
            samples=draws.sampler.samples,
            prompts=[digest_of_prompt(ids) for ids in draws.batch.ids],
            columns=digests_of_columns(draws.batch.columns, len(draws.batch.ids)),
            rewards={scorer.name: Scoring(scorer.spec, scorer.digest) for scorer in scorers},
            store=draws.store.digest,
            files=[(chunk_name(chunk.index, chunk.ids), len(chunk.ids)) for chunk in draws.chunks],
            versions={"nlgrpo": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        )

    def write(self, folder: Path) -> None:
        atomic_files.atomic_write(folder / FILE, json.dumps(asdict(self), indent=1) + "\n")


def read_index(folder: Path) -> Index:
    """Raises ValueError where ``rollouts.json`` is missing or damaged."""
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing; give the --out folder of `nlgrpo rollout`")
    try:
        data = json.loads(path.read_text("utf-8"))
        data["origin"]["sampling"]["stop_ids"] = tuple(data["origin"]["sampling"]["stop_ids"])
        data["origin"]["sampling"] = Sampling(**data["origin"]["sampling"])
        data["origin"] = Provenance(**data["origin"])
        data["rewards"] = {name: Scoring(**scoring) for name, scoring in data["rewards"].items()}
        data["files"] = [(str(name), int(prompts)) for name, prompts in data["files"]]
        data.setdefault("columns", [""] * len(data["prompts"]))  # scored before columns counted
        return Index(**data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}); the same `nlgrpo rollout` writes it again") from error


# --- what was drawn ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReferenceRollouts:
    """K samples of the reference for each of P prompts, in the order in which they were drawn; made by `load`.

    ``rewards[name]`` (P, K) float64, scaled as the configuration says, NaN where the reward abstained. ``logprobs``
    (P, K) float64: log-prob of a completion under the reference, the sum over its tokens in nats, of the distribution
    that was sampled from (at its temperature, within its top-k, top-p and min-p). ``lengths`` (P, K) int64, in tokens;
    ``finished`` (P, K): ended by a stop id, not by the limit.
    """

    folder: Path
    index: Index
    rewards: dict[str, Tensor]
    logprobs: Tensor
    lengths: Tensor
    finished: Tensor

    def row(self, prompt_ids: Sequence[int]) -> int | None:
        """Where the prompt of these token ids is among the P, None if nowhere; of a repeated prompt the first place."""
        return self._rows.get(digest_of_prompt(prompt_ids))

    def ids(self, row: int) -> list[list[int]]:
        """The token ids of a prompt's K completions, read from their file. ValueError where that is gone by now."""
        number = bisect.bisect_right(self._starts, row) - 1
        name, _ = self.index.files[number]
        tensors = _store(self.folder, self.index).read(name, ("tokens",))
        if tensors is None:
            raise ValueError(
                f"{self.folder}: completions of prompt {row} are missing; the same `nlgrpo rollout` goes on"
            )
        tokens = tensors["tokens"][row - self._starts[number]].tolist()
        return [row_ids[:length] for row_ids, length in zip(tokens, self.lengths[row].tolist(), strict=True)]

    def tokens(self) -> Iterator[tuple[list[int], list[list[int]]]]:
        """The token ids of each prompt, and of its K completions. Raises ValueError where a file has none by now."""
        for name, _ in self.index.files:
            tensors = _store(self.folder, self.index).read(name, ("prompts", "prompt_lengths", "tokens", "lengths"))
            if tensors is None:
                raise ValueError(
                    f"{self.folder}: completions are missing, or were drawn before their prompts were kept with them; "
                    "`nlgrpo rollout` into a new folder draws both"
                )
            prompts = [ids.tolist() for ids in tensors["prompts"].split(tensors["prompt_lengths"].tolist())]
            for prompt, rows, lengths in zip(prompts, tensors["tokens"], tensors["lengths"].tolist(), strict=True):
                yield prompt, [ids[:n] for ids, n in zip(rows.tolist(), lengths, strict=True)]

    def reward(self, name: str) -> Tensor:
        """(P, K). Raises ValueError for a reward that was not scored."""
        if name not in self.rewards:
            raise ValueError(f"{self.folder}: {_not_scored(name, self.index)}")
        return self.rewards[name]

    def ecdf(self, name: str) -> ECDF:
        """Each prompt's rewards, sorted. Raises ValueError for a reward that was not scored, or that abstained."""
        values = self.reward(name)
        absent = int(values.isnan().any(1).sum())
        if absent:
            raise ValueError(
                f"{self.folder}: reward {name!r} abstained for samples of {absent} prompts, which have no CDF"
            )
        return ECDF(values)

    def check(self, origin: Provenance, scorers: Sequence[Scorer]) -> None:
        """Refuse to serve a run of another reference, tokenizer, sampling, or rewards, naming each difference.

        ``origin`` and ``scorers`` are the run's own, from `Provenance.of` and `collect.scorers`. Rewards that the run
        does not have, more prompts, and another compute dtype are accepted. Raises ValueError.
        """
        found = differences(self.index, origin) + _differences_of_rewards(self.index, scorers)
        if found:
            advice = "`nlgrpo rollout` with the run's configuration draws its own, into another --out folder"
            if not differences(self.index, origin):
                advice = f"`nlgrpo rollout` with the run's rewards and --out {self.folder} scores what is drawn already"
            raise ValueError("\n  ".join([f"the rollouts in {self.folder} do not fit the run:", *found, advice]))

    def check_columns(self, prompts: PromptSet) -> None:
        """ValueError for prompts that had other columns when they were scored, such as an answer that was corrected."""
        scored = set(zip(self.index.prompts, self.index.columns, strict=True))
        given = zip(map(digest_of_prompt, prompts.ids), digests_of_columns(prompts.columns, len(prompts)), strict=True)
        changed = sum(
            prompt in self._rows and (prompt, own) not in scored and (prompt, "") not in scored for prompt, own in given
        )
        if changed:
            raise ValueError(
                f"the columns of {changed} of {len(prompts)} prompts are others than when the rollouts in "
                f"{self.folder} were scored; `nlgrpo rollout` with the run's data and --out {self.folder} scores again"
            )

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {digest: row for row, digest in reversed(list(enumerate(self.index.prompts)))}

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((prompts for _, prompts in self.index.files), initial=0))[:-1]


def load(folder: str | Path) -> ReferenceRollouts:
    """The rollouts that `nlgrpo rollout` has written into ``folder``.

    Raises ValueError where they are cut short: completions or scores of some prompts are missing or damaged.
    """
    folder = Path(folder)
    index = read_index(folder)
    store = _store(folder, index)
    ends = list(accumulate(prompts for _, prompts in index.files))
    parts = [index.columns[end - prompts : end] for end, (_, prompts) in zip(ends, index.files, strict=True)]
    found = [_read(store, name, columns, index.rewards) for (name, _), columns in zip(index.files, parts, strict=True)]
    missing = sum(prompts for (_, prompts), tensors in zip(index.files, found, strict=True) if tensors is None)
    if missing:
        raise ValueError(
            f"{folder}: the rollouts of {missing} of {len(index.prompts)} prompts are missing, damaged or not scored; "
            "run the same `nlgrpo rollout` again to resume"
        )
    joined = {key: torch.cat([tensors[key] for tensors in found if tensors]) for key in found[0] or {}}
    rewards = {name: joined[f"rewards/{name}"].double() for name in index.rewards}
    return ReferenceRollouts(folder, index, rewards, joined["logprobs"], joined["lengths"], joined["finished"])


def _read(store: Store, name: str, columns: Sequence[str], rewards: Mapping[str, Scoring]) -> Tensors | None:
    """A file's numbers, and those of its scores; None where one of them is missing."""
    drawn = store.read(name, ("logprobs", "lengths", "finished"))
    scores = {reward: store.read(score_name(name, one.digest, columns)) for reward, one in rewards.items()}
    values = {f"rewards/{reward}": tensors["values"] for reward, tensors in scores.items() if tensors}
    if drawn is None or len(values) < len(rewards):
        return None
    return drawn | {"logprobs": drawn["logprobs"].double().sum(-1)} | values


def _store(folder: Path, index: Index) -> Store:
    return Store(folder / SAMPLES, index.store)


# --- what fits --------------------------------------------------------------------------------------------------------


def differences(index: Index, origin: Provenance) -> list[str]:
    """In words, how completions of ``origin`` would be others than those that were drawn."""
    found = []
    if index.origin.model != origin.model:
        found.append(
            f"these rollouts were drawn from {index.model}, and the run's reference has other weights "
            f"(digests {index.origin.model} and {origin.model})"
        )
    if index.origin.tokenizer != origin.tokenizer:
        found.append(f"these rollouts were drawn with the tokenizer of {index.model}, and the run has another one")
    if index.origin.guide != origin.guide:
        alone, guided = "by the model alone", "by a search that value models guide"
        drawn, draws = (guided if guide else alone for guide in (index.origin.guide, origin.guide))
        draws = "by another" if drawn == draws else draws
        found.append(f"these rollouts were drawn {drawn}, and the run draws {draws}")
    theirs, ours = ({**asdict(x), "stop_ids": sorted({*x.stop_ids})} for x in (index.origin.sampling, origin.sampling))
    for name in theirs:
        if theirs[name] != ours[name]:
            words, short = ("at temperature", "at") if name == "temperature" else (f"with {name} =", "with")
            values = [f"{x:g}" if isinstance(x, float) else f"{x}" for x in (theirs[name], ours[name])]
            found.append(f"these rollouts were drawn {words} {values[0]}, and the run samples {short} {values[1]}")
    return found


def _differences_of_rewards(index: Index, scorers: Sequence[Scorer]) -> list[str]:
    found = []
    for scorer in scorers:
        scored = index.rewards.get(scorer.name)
        if scored is None:
            found.append(_not_scored(scorer.name, index))
        elif scored.spec != scorer.spec:
            found.append(f"reward {scorer.name!r} was {scored.spec}, and the run's is {scorer.spec}")
        elif scored.digest != scorer.digest:
            found.append(f"the code or the files of reward {scorer.name!r}, {scored.spec}, have changed since")
    return found


def _not_scored(name: str, index: Index) -> str:
    return f"reward {name!r} was not scored; those that were are {', '.join(index.rewards)}"
