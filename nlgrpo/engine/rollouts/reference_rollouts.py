"""Reference rollouts, sampled and scored once before training: `nlgrpo rollout` writes them, `load` reads them.

``rollouts.json`` in their folder describes the model, prompts, sampling and rewards. Completions and scores are in the
subfolder ``samples`` (see `store`). Shapes: P prompts, K samples per prompt.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from nlgrpo.errors import UserError
from nlgrpo.runtime import atomic_files

ROLLOUTS_FILE = "rollouts.json"
SAMPLES = "samples"  # folder of completions and scores

# --- rollouts.json ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scoring:
    """Settings of a reward when it was scored, and a digest of its settings, code and files."""

    spec: str
    digest: str


@dataclass(frozen=True)
class Index:
    """Content of ``rollouts.json``.

    ``model``: path or name of the reference. ``prompts``: digests of their token ids, in the order of the source.
    ``columns``: digests of the data columns at the time of scoring, "" without columns. ``files``: names of the files
    with completions in ``samples/STORE``, and their numbers of prompts.
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
    def of(cls, collector: RolloutCollector, origin: Provenance, scorers: Sequence[Scorer], seed: int) -> Index:
        """Build the index of the rollouts that ``collector`` samples and ``scorers`` score."""
        return cls(
            model=collector.label,
            origin=origin,
            seed=seed,
            samples=collector.sampler.samples,
            prompts=[digest_of_prompt(ids) for ids in collector.batch.ids],
            columns=digests_of_columns(collector.batch.columns, len(collector.batch.ids)),
            rewards={scorer.name: Scoring(scorer.spec, scorer.digest) for scorer in scorers},
            store=collector.store.digest,
            files=[(chunk_name(chunk.index, chunk.ids), len(chunk.ids)) for chunk in collector.chunks],
            versions={"nlgrpo": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        )

    def write(self, folder: Path) -> None:
        atomic_files.atomic_write(folder / ROLLOUTS_FILE, json.dumps(asdict(self), indent=1) + "\n")


def read_index(folder: Path) -> Index:
    """Read ``rollouts.json``. Raises UserError if it is missing or damaged."""
    path = folder / ROLLOUTS_FILE
    if not path.is_file():
        raise UserError(f"{path} is missing; expected the --out folder of `nlgrpo rollout`")
    try:
        data = json.loads(path.read_text("utf-8"))
        data["origin"]["sampling"]["stop_ids"] = tuple(data["origin"]["sampling"]["stop_ids"])
        data["origin"]["sampling"] = Sampling(**data["origin"]["sampling"])
        data["origin"] = Provenance(**data["origin"])
        data["rewards"] = {name: Scoring(**scoring) for name, scoring in data["rewards"].items()}
        data["files"] = [(str(name), int(prompts)) for name, prompts in data["files"]]
        data.setdefault("columns", [""] * len(data["prompts"]))  # written by an older version
        return Index(**data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read ({error!r}); run the same `nlgrpo rollout` to write it again"
        ) from error


# --- samples ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReferenceRollouts:
    """K samples of the reference per prompt, for P prompts; read them with `load`.

    ``rewards[name]`` (P, K) float64: scaled as configured, NaN where the reward abstained. ``logprobs`` (P, K) float64:
    log-prob of each completion in nats, summed over its tokens, under the sampling distribution (with temperature,
    top-k, top-p and min-p). ``lengths`` (P, K) int64: in tokens. ``finished`` (P, K) bool: whether a stop id ended the
    completion, rather than max_new_tokens.
    """

    folder: Path
    index: Index
    rewards: dict[str, Tensor]
    logprobs: Tensor
    lengths: Tensor
    finished: Tensor

    def row(self, prompt_ids: Sequence[int]) -> int | None:
        """Return the index of the first prompt with these token ids; None if there is no such prompt."""
        return self._rows.get(digest_of_prompt(prompt_ids))

    def ids(self, row: int) -> list[list[int]]:
        """Read the token ids of a prompt's K completions. Raises UserError if their file is missing or damaged."""
        number = bisect.bisect_right(self._starts, row) - 1
        name, _ = self.index.files[number]
        tensors = _store(self.folder, self.index).read(name, ("tokens",))
        if tensors is None:
            raise UserError(
                f"{self.folder}: completions of prompt {row} are missing or damaged; run the same `nlgrpo rollout` to "
                "resume"
            )
        tokens = tensors["tokens"][row - self._starts[number]].tolist()
        return [row_ids[:length] for row_ids, length in zip(tokens, self.lengths[row].tolist(), strict=True)]

    def tokens(self) -> Iterator[tuple[list[int], list[list[int]]]]:
        """Yield the token ids of each prompt and of its K completions. Raises UserError for a damaged file."""
        for name, _ in self.index.files:
            tensors = _store(self.folder, self.index).read(name, ("prompts", "prompt_lengths", "tokens", "lengths"))
            if tensors is None:
                raise UserError(
                    f"{self.folder}: completions are missing or damaged, or were written by a version that did not "
                    "save their prompts; run `nlgrpo rollout` with a new --out folder"
                )
            prompts = [ids.tolist() for ids in tensors["prompts"].split(tensors["prompt_lengths"].tolist())]
            for prompt, rows, lengths in zip(prompts, tensors["tokens"], tensors["lengths"].tolist(), strict=True):
                yield prompt, [ids[:n] for ids, n in zip(rows.tolist(), lengths, strict=True)]

    def reward(self, name: str) -> Tensor:
        """Return the values (P, K) of a reward. Raises UserError if it was not scored."""
        if name not in self.rewards:
            raise UserError(f"{self.folder}: {_not_scored(name, self.index)}")
        return self.rewards[name]

    def ecdf(self, name: str) -> ECDF:
        """Return the empirical CDF of each prompt. Raises UserError for a reward that was not scored or abstained."""
        values = self.reward(name)
        absent = values.isnan()
        if absent.any():
            raise UserError(
                f"{self.folder}: reward {name!r} abstained for {int(absent.sum())} of {absent.numel()} samples, of "
                f"{int(absent.any(1).sum())} of {len(values)} prompts, and these CDFs are over the same number of "
                "samples at each prompt: return a number there and run `nlgrpo rollout` again, or take the samples "
                "that have the reward from reward(name), as ragged rows of an ECDF"
            )
        return ECDF(values)

    def check(self, origin: Provenance, scorers: Sequence[Scorer]) -> None:
        """Check that the rollouts have the reference, tokenizer, sampling and rewards of a run.

        ``origin`` and ``scorers`` describe the run (`Provenance.of`, `collect.scorers`). The rollouts may have more
        rewards and prompts, and another compute dtype. Raises UserError with a list of the differences.
        """
        conflicts = differences(self.index, origin) + _differences_of_rewards(self.index, scorers)
        if conflicts:
            advice = "run `nlgrpo rollout` with the configuration of the run and another --out folder"
            if not differences(self.index, origin):
                advice = (
                    f"run `nlgrpo rollout` with the rewards of the run and --out {self.folder} to score these samples"
                )
            raise UserError("\n  ".join([f"the rollouts in {self.folder} do not fit the run:", *conflicts, advice]))

    def check_columns(self, prompts: PromptSet) -> None:
        """Raise UserError if data columns of ``prompts``, such as an answer, have changed since scoring."""
        scored = set(zip(self.index.prompts, self.index.columns, strict=True))
        given = zip(map(digest_of_prompt, prompts.ids), digests_of_columns(prompts.columns, len(prompts)), strict=True)
        changed = sum(
            prompt in self._rows and (prompt, columns) not in scored and (prompt, "") not in scored
            for prompt, columns in given
        )
        if changed:
            raise UserError(
                f"the data columns of {changed} of {len(prompts)} prompts have changed since the rollouts in "
                f"{self.folder} were scored; run `nlgrpo rollout` with the data of the run and --out {self.folder} to "
                "score them again"
            )

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {digest: row for row, digest in reversed(list(enumerate(self.index.prompts)))}

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((prompts for _, prompts in self.index.files), initial=0))[:-1]


def load_rollouts(folder: str | Path) -> ReferenceRollouts:
    """Load the rollouts that `nlgrpo rollout` wrote into ``folder``.

    Raises UserError if completions or scores of some prompts are missing or damaged.
    """
    folder = Path(folder)
    index = read_index(folder)
    store = _store(folder, index)
    ends = list(accumulate(prompts for _, prompts in index.files))
    parts = [index.columns[end - prompts : end] for end, (_, prompts) in zip(ends, index.files, strict=True)]
    found = [_read(store, name, columns, index.rewards) for (name, _), columns in zip(index.files, parts, strict=True)]
    missing = sum(prompts for (_, prompts), tensors in zip(index.files, found, strict=True) if tensors is None)
    if missing:
        raise UserError(
            f"{folder}: the rollouts of {missing} of {len(index.prompts)} prompts are missing, damaged or not scored; "
            "run the same `nlgrpo rollout` again to resume"
        )
    joined = {key: torch.cat([tensors[key] for tensors in found if tensors]) for key in found[0] or {}}
    rewards = {name: joined[f"rewards/{name}"].double() for name in index.rewards}
    return ReferenceRollouts(folder, index, rewards, joined["logprobs"], joined["lengths"], joined["finished"])


def load_checked(
    folder: str | Path, origin: Callable[[], Provenance], scorers: Sequence[Scorer], prompts: PromptSet
) -> ReferenceRollouts:
    """Load rollouts and check that a run with ``prompts`` and the rewards of ``scorers`` can use them.

    ``origin`` reads all weights of the model; it is only called if the rollouts are complete.
    Raises the errors of `load`, `ReferenceRollouts.check` and `check_columns`.
    """
    rollouts = load_rollouts(folder)
    rollouts.check(origin(), scorers)
    rollouts.check_columns(prompts)
    return rollouts


def _read(store: Store, name: str, columns: Sequence[str], rewards: Mapping[str, Scoring]) -> Tensors | None:
    """Read the tensors of a file and its scores. Returns None if any of them is missing."""
    samples = store.read(name, ("logprobs", "lengths", "finished"))
    scores = {reward: store.read(score_name(name, scoring.digest, columns)) for reward, scoring in rewards.items()}
    values = {f"rewards/{reward}": tensors["values"] for reward, tensors in scores.items() if tensors}
    if samples is None or len(values) < len(rewards):
        return None
    return samples | {"logprobs": samples["logprobs"].double().sum(-1)} | values


def _store(folder: Path, index: Index) -> Store:
    return Store(folder / SAMPLES, index.store)


# --- differences between rollouts and a run ---------------------------------------------------------------------------


def differences(index: Index, origin: Provenance) -> list[str]:
    """Describe each difference between the rollouts and those of ``origin``, one message per difference."""
    found = []
    if index.origin.model != origin.model:
        found.append(
            f"the rollouts are samples of {index.model}, but the reference of the run has other weights "
            f"(digests {index.origin.model} and {origin.model})"
        )
    if index.origin.tokenizer != origin.tokenizer:
        found.append(f"the rollouts have the tokenizer of {index.model}, but the run has another tokenizer")
    if index.origin.guide != origin.guide:
        unguided = "samples of the model without guidance"
        guided = "responses of a search guided by value models"
        stored, needed = (guided if guide else unguided for guide in (index.origin.guide, origin.guide))
        needed = "those of another search" if stored == needed else needed
        found.append(f"the rollouts are {stored}, but the run needs {needed}")
    theirs, ours = ({**asdict(x), "stop_ids": sorted({*x.stop_ids})} for x in (index.origin.sampling, origin.sampling))
    for name in theirs:
        if theirs[name] != ours[name]:
            values = [f"{x:g}" if isinstance(x, float) else f"{x}" for x in (theirs[name], ours[name])]
            found.append(f"the rollouts were sampled with {name} = {values[0]}, but the run has {values[1]}")
    return found


def _differences_of_rewards(index: Index, scorers: Sequence[Scorer]) -> list[str]:
    found = []
    for scorer in scorers:
        scored = index.rewards.get(scorer.name)
        if scored is None:
            found.append(_not_scored(scorer.name, index))
        elif scored.spec != scorer.spec:
            found.append(f"reward {scorer.name!r} is {scored.spec} in the rollouts, but {scorer.spec} in the run")
        elif scored.digest != scorer.digest:
            found.append(
                f"the code or files of reward {scorer.name!r} ({scored.spec}) have changed since it was scored"
            )
    return found


def _not_scored(name: str, index: Index) -> str:
    return f"reward {name!r} was not scored; scored rewards: {', '.join(index.rewards)}"
