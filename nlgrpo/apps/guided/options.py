"""Options of ``nlgrpo iro`` and ``decode``; without PyTorch, so that ``--help`` takes no seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from nlgrpo.apps.guided.value_config import TrainerOptions

if TYPE_CHECKING:
    from nlgrpo.engine.guided_search import Search

ABOUT_IRO = """Learn value models that guide a frozen model (IRO): nlgrpo iro [recipe] [file.toml] [--section.key value]

Recipe, file and keys are those of `nlgrpo train`: the frozen model is model.path, the prompts are those of data.source,
and the values predict the weighted sum of the rewards. The same command resumes after a stop or a kill. `nlgrpo
generate --guide OUT` decodes with the learned values."""
ABOUT_DECODE = """Compare decoding methods for a frozen model: nlgrpo decode [recipe] [file.toml] --guide OUT [options]

Recipe, file and keys are those of `nlgrpo train`; the prompts are those that a run holds out, and the weighted sum of
the rewards chooses the response. Methods: "bon", best-of-N; "iro", guided search by all values of --guide; "iro:2", by
the first two; "compressed", by the compressed value of `nlgrpo iro`; "cd", chunks after one beam by the first value;
"args" or "args:WEIGHT", the most likely tokens by log-prob plus WEIGHT times the reward of the prefix;
"cards:REWARD", segments that the reward accepts or rejects, where REWARD is its goal. With --tuned and --untuned:
"implicit", guided search by log p_tuned - log p_untuned; "weak_to_strong", the same without a preference for different
beams, where it also chooses the response; "bon-i", best-of-N by it. --gold names a reward of weight 0 that evaluates
the responses."""


@dataclass
class LoopOptions:
    """Options of the loop besides the keys of a configuration."""

    out: Path | None = None
    """Output folder; default: runs/<recipe>-iro."""
    iterations: int = 3
    """T, the number of value models."""
    samples: int = 16
    """Completions per prompt in the first iteration; later iterations have beams x successors."""
    prompts: int | None = None
    """Prompts per iteration; each iteration takes the next ones of the source. Default: all prompts every time."""
    beams: int = 4
    """K, beams of the search."""
    successors: int = 4
    """B, chunks sampled per beam."""
    chunk: int = 16
    """L, tokens per chunk."""
    search_temperature: float = 0.0
    """Above 0, beams are sampled in proportion to exp(V / temperature); 0 keeps the best ones."""
    diverse: bool = True
    """Prefer distinct candidates over duplicates when choosing beams."""
    softmax: bool = False
    """Replace the sum of all values but the last by its softmax over the candidates (SPI, Eq. 14)."""
    keep: Literal["all", "best"] = "all"
    """Completions of a guided search to learn from: all final candidates, or the one with the largest reward, which is
    what IRO's Algorithm 4 returns."""
    searches: int = 1
    """Independent searches per prompt, from the second iteration on."""
    betas: tuple[float, ...] = ()
    """Weights of the value models: V = sum_t V_t / beta_t. Default: 1 each."""
    value: TrainerOptions = field(default_factory=TrainerOptions)
    compress: bool = True
    """At the end, train one value model on the sum of all value models."""
    dry_run: bool = False
    """Print the plan and stop."""

    @property
    def search(self) -> Search:
        from nlgrpo.engine.guided_search import Search

        return Search(
            self.beams, self.successors, self.chunk, self.search_temperature, self.diverse, softmax=self.softmax
        )

    @property
    def guided_samples(self) -> int:
        """Completions per prompt from the second iteration on."""
        return self.searches * (1 if self.keep == "best" else self.search.candidates)

    @property
    def weights(self) -> tuple[float, ...]:
        return self.betas or (1.0,) * self.iterations


@dataclass
class ComparisonOptions:
    """Options in addition to the configuration keys."""

    guide: tuple[Path, ...] = ()
    """The folder of `nlgrpo iro`, or one or more value models."""
    betas: tuple[float, ...] = ()
    """Weights of the value models: V = sum_i V_i / beta_i. Default: those of the folder, else 1 each."""
    methods: tuple[str, ...] = ("bon", "iro")
    """Decoding methods to compare."""
    budgets: tuple[int, ...] = (4, 16, 64)
    """Budgets N = K B, candidates per prompt. K of a search is the largest divisor of N up to its square root."""
    chunk: int | None = None
    """Tokens per chunk, L. None: as in the folder of `nlgrpo iro`, else 16."""
    choose: Literal["reward", "value", "majority"] = "reward"
    """How the response is chosen: the candidate with the largest reward or value, or the first one with the most
    frequent final answer. For "value", best-of-N uses all value models, other methods those that guide them."""
    gold: str | None = None
    """A reward of the configuration, of weight 0, that evaluates the responses and takes no part in choosing them."""
    tuned: str = ""
    """Tuned model of an implicit reward, log p_tuned - log p_untuned: a run, a directory or a hub name."""
    untuned: str = ""
    """Untuned model of the implicit reward: what `tuned` was trained from."""
    out: Path | None = None
    """Folder of the results. None: runs/<recipe>-decode."""
    dry_run: bool = False
    """Print the plan and decode nothing."""


def read_iro(arguments: Sequence[str]) -> tuple[LoopOptions, list[str]]:
    """Return the options of `nlgrpo iro`, and the arguments that are left: those of `nlgrpo train`."""
    return tyro.cli(
        LoopOptions, args=list(arguments), prog="nlgrpo iro", description=ABOUT_IRO, return_unknown_args=True
    )


def read_decode(arguments: Sequence[str]) -> tuple[ComparisonOptions, list[str]]:
    """Return the options of `nlgrpo decode`, and the arguments that are left: those of `nlgrpo train`."""
    return tyro.cli(
        ComparisonOptions,
        args=list(arguments),
        prog="nlgrpo decode",
        description=ABOUT_DECODE,
        return_unknown_args=True,
    )
