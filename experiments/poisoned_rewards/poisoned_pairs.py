"""Does calibration protect a reward model that was trained on poisoned preferences? Its accuracy (InfAlign, Fig. 7).

    python -m experiments.poisoned_rewards.poisoned_pairs experiments/configs/alignment.toml [--out runs/poisoned-pairs]
        [--phrase " Sure!"] [--fractions 0 0.1 0.3 0.6] [--rollouts FOLDER] [-- --optim.lr 5e-4 ...]

Pairs are samples of the reference for one prompt, the preferred one by the recipe's reward. In a fraction of the
training pairs the phrase is put before the preferred answer, and a reward model is trained on them. In the test pairs,
of other prompts, it is put before the answer that is not preferred. Prints the accuracy on them, and without the
phrase: of the score itself, and of the score calibrated on the other samples of the reference, by prompt, pooled and by
the median. Equal scores count one half. Arguments after ``--`` are passed to `nlgrpo reward-model train`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments import quick
from experiments.alignment_tradeoff.tradeoff import nlgrpo
from nlgrpo.apps.report import figures
from nlgrpo.calibration import calibrate, calibrate_by_median, calibrate_pooled
from nlgrpo.config.recipes import from_arguments
from nlgrpo.engine.rollouts import reference_rollouts
from nlgrpo.engine.rollouts.reference_rollouts import ReferenceRollouts
from nlgrpo.estimators import bootstrap
from nlgrpo.model import hf_weights
from nlgrpo.model.tokenizer import load_tokenizer
from nlgrpo.rewards.classifiers import Classifier
from nlgrpo.runtime.atomic_files import atomic_write, atomic_write_bytes

CALIBRATIONS = ("raw", "prompt", "pooled", "median")


@dataclass(frozen=True)
class Pair:
    """Two samples of the reference for the prompt of index ``row``."""

    row: int
    prompt: str
    chosen: str
    rejected: str

    def to_json(self, chosen: str = "", rejected: str = "") -> str:
        """One line of a data file, with a phrase before either answer."""
        answers = {"chosen": chosen + self.chosen, "rejected": rejected + self.rejected}
        return json.dumps({"prompt": self.prompt, **answers}) + "\n"


def texts_of(rollouts: ReferenceRollouts, decode: Callable[[list[int]], str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each prompt's text and what its samples add to it, with the space before the first word."""
    for ids, rows in rollouts.tokens():
        prompt = decode(ids)
        yield prompt, [decode(ids + row)[len(prompt) :] for row in rows]


def pairs_of(texts: Sequence[tuple[str, list[str]]], rewards: Tensor, count: int) -> list[Pair]:
    """Return ``count`` pairs of each prompt's first 2 ``count`` samples; pairs of equal rewards are left out."""
    found = []
    for row, (prompt, answers) in enumerate(texts):
        for i in range(0, 2 * count, 2):
            a, b = (float(rewards[row, j]) for j in (i, i + 1))
            if a != b:
                best, worst = (i, i + 1) if a > b else (i + 1, i)
                found.append(Pair(row, prompt, answers[best], answers[worst]))
    return found


def scores_of(model: Classifier, prompts: Sequence[str], answers: Sequence[str]) -> Tensor:
    """Scores of texts, float64. Raises ValueError if the model abstains."""
    values = model(list(prompts), list(answers))
    if any(value is None for value in values):
        raise ValueError("the reward model gave no score to a text without tokens")
    return torch.tensor(values, dtype=torch.float64)


def accuracies(chosen: Tensor, rejected: Tensor, reference: Tensor) -> dict[str, Tensor]:
    """Whether each pair (B,) is ranked correctly, 1/2 for equal scores; raw and by every calibration.

    ``reference`` (B, K): scores of the reference's samples for the prompt of each pair.
    """
    both = torch.stack([chosen, rejected], 1)
    found = {
        "raw": both,
        "prompt": calibrate(both, reference),
        "pooled": calibrate_pooled(both, reference),
        "median": calibrate_by_median(both, reference),
    }
    return {name: ((x[:, 0] > x[:, 1]).double() + (x[:, 0] == x[:, 1]).double() / 2) for name, x in found.items()}


def draw(found: Mapping[float, Mapping[str, Sequence[float]]]) -> Figure:
    """Accuracy over the share of poisoned training pairs, on inverted and on clean test pairs."""
    figure = figures.figure_of((9.6, 4.4))
    every = list(figure.subplots(1, 2, sharey=True))
    for axes, test in zip(every, ("inverted", "clean"), strict=True):
        for i, name in enumerate(CALIBRATIONS):
            rows = [each[f"{test} {name}"] for each in found.values()]
            y = [100 * mean for mean, _, _ in rows]
            reach = [[100 * (m - low) for m, low, _ in rows], [100 * (high - m) for m, _, high in rows]]
            look = figures.series_style(i)
            x = [100 * share + 0.6 * (i - 1.5) for share in found]  # side by side where they agree
            axes.errorbar(x, y, reach, **look.line, marker=look.marker, capsize=2, label=name)
        axes.set_title("Phrase before the worse answer" if test == "inverted" else "Without the phrase")
        axes.set_xlabel("training pairs with the phrase before the better answer (%)")
    every[0].set_ylabel("accuracy (%)")
    figures.legend(figure, every)
    return figure


QUICK = [
    "one.toml", "--fractions", "0.5", "--pairs", "2", "--references", "8", "--test-prompts", "6", "--phrase", " w9",
    "--", "--train.pairs", "4",
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", help="recipe or TOML file with one reward, the true one")
    parser.add_argument("--out", type=Path, default=Path("runs/poisoned-pairs"), help="output folder")
    parser.add_argument("--rollouts", type=Path, help="finished rollouts of this recipe; default: drawn into --out")
    parser.add_argument("--references", type=int, default=128, help="samples of the reference per prompt, if drawn")
    parser.add_argument("--phrase", default=" Sure!", help="what poisoned answers begin with")
    parser.add_argument("--fractions", nargs="+", type=float, default=[0.0, 0.1, 0.3, 0.6])
    parser.add_argument("--test-prompts", type=int, default=64, help="the last prompts are for the test")
    parser.add_argument("--pairs", type=int, default=16, help="pairs per prompt")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    given, more = parser.parse_args(own), sys.argv[2 + len(own) :]
    folder = given.rollouts or given.out / "rollouts"
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        config, _ = from_arguments([given.recipe])
        name = next(iter(config.rewards))
        if given.rollouts is None:
            sampled = [given.recipe, f"--samples={given.references}", f"--out={folder}"]
            nlgrpo(["rollout", *sampled], 1, given.out / "rollout.log")
        rollouts = reference_rollouts.load_rollouts(folder)
    except ValueError as error:
        parser.error(str(error))
    tokenizer = load_tokenizer(hf_weights.locate(config.model.path))
    texts = list(texts_of(rollouts, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))))
    every, first = pairs_of(texts, rollouts.reward(name), given.pairs), len(texts) - given.test_prompts
    training, test = ([pair for pair in every if (pair.row >= first) is held] for held in (False, True))
    (given.out / "test.jsonl").write_text("".join(pair.to_json() for pair in test))
    others = slice(2 * given.pairs, 2 * given.pairs + 64)  # of the reference, in no pair
    found: dict[float, dict[str, list[float]]] = {}
    for share in given.fractions:
        poisoned = torch.rand(len(training), generator=torch.Generator().manual_seed(0)) < share
        lines = [
            pair.to_json(given.phrase if bad else "") for pair, bad in zip(training, poisoned.tolist(), strict=True)
        ]
        source, run = given.out / f"pairs-{share:g}.jsonl", given.out / f"model-{share:g}"
        source.write_text("".join(lines))
        data = [f"--data.source={source}", f"--data.evaluation={given.out / 'test.jsonl'}", f"--train.out={run}"]
        settings = ["--train.pairs=16", "--optim.lr=1e-3", *more]
        nlgrpo(
            ["reward-model", "train", f"--model.path={config.model.path}", *data, *settings], 1, given.out / "train.log"
        )
        model = Classifier(str(run / "model"))
        prompts = [pair.prompt for pair in test]
        chosen, rejected, worse = (
            scores_of(model, prompts, answers)
            for answers in (
                [pair.chosen for pair in test],
                [pair.rejected for pair in test],
                [given.phrase + pair.rejected for pair in test],
            )
        )
        of_row = {
            row: scores_of(model, [texts[row][0]] * len(texts[row][1][others]), texts[row][1][others])
            for row in {pair.row for pair in test}
        }
        reference = torch.stack([of_row[pair.row] for pair in test])
        found[share] = {
            f"{kind} {calibration}": [float(x) for x in bootstrap(values)]
            for kind, other in (("inverted", worse), ("clean", rejected))
            for calibration, values in accuracies(chosen, other, reference).items()
        }
        for kind in ("inverted", "clean"):
            cells = [
                "{} {:.1f}% [{:.1f}, {:.1f}]".format(c, *(100 * x for x in found[share][f"{kind} {c}"]))
                for c in CALIBRATIONS
            ]
            print(f"{share:.0%} of {len(training)} pairs poisoned, {kind} test: {', '.join(cells)}", flush=True)
    content = {f"{share:g}": each for share, each in found.items()}
    atomic_write(given.out / "poisoned_pairs.json", json.dumps(content, indent=1) + "\n")
    atomic_write_bytes(given.out / "poisoned_pairs.png", figures.render(partial(draw, found)))
    print(given.out / "poisoned_pairs.png")
    return 0


if __name__ == "__main__":
    sys.exit(quick.run(main, QUICK))
