"""What a comparison can show, before it is trained: exact optima on samples of the reference.

    python -m experiments.predicted_gains.predict_gain experiments/configs/opposed.toml [--out runs/predicted/opposed]
        [--kls 0.25 1 2.5] [--weights 0.2 0.5 0.8] [-- --rewards.sad.objective wor:4 ...]
    python -m experiments.predicted_gains.predict_gain experiments/configs/alignment.toml
        --transforms identity exp:10 exp:-10 raw vbon

Samples and scores the reference (`nlgrpo rollout`; finished work is reused). A policy is then a probability for each of
a prompt's K samples, and its optimum at a KL per sequence is exact. Prints what the objectives of the configuration
gain over the mean at equal KL, and for one reward the win rates of transforms; writes both to predicted.json, with
predicted.png. A trained model shares its parameters between prompts and reaches less. Arguments after ``--`` are keys
of the configuration.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from experiments import quick
from experiments.predicted_gains import predictions
from experiments.predicted_gains.exact_optimum import Goal
from experiments.predicted_gains.predictions import Row
from nlgrpo.apps.report import figures
from nlgrpo.apps.sweep import launchers
from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import Config
from nlgrpo.engine.rollouts import reference_rollouts
from nlgrpo.objectives import aggregation, registry
from nlgrpo.runtime import user_code
from nlgrpo.runtime.atomic_files import atomic_write, atomic_write_bytes

TRANSFORMS = ["identity", "exp:10", "exp:-10", "log", "bon_fp", "won_fp", "rank", "raw", "vbon", "vbon:bound"]
GAIN_COLUMNS = {
    "KL": "{kl:g}",
    "gain over the mean": "{gain:+.4f}",
    "95% over prompts": "{low:+.4f} to {high:+.4f}",
    "K/2": "{gain_half:+.4f}",
    "beta": "{beta:.3g}",
    "beta, mean": "{beta_mean:.3g}",
    "single": "{single:.4f}",
    "single, mean": "{single_mean:.4f}",
    "signal/noise": "{ratio:.3f}",
    "completions": "{completions:.0f}",
}
RATE_COLUMNS = {
    "transform": "{name}",
    "KL": "{kl:g}",
    "single": "{single:.2%} ({inf_single})",
    "best of N": "{best:.2%} ({inf_best})",
    "worst of N": "{worst:.2%} ({inf_worst})",
    "deviation": "{deviation:.2g}",
    "beta": "{beta:.3g}",
    "K/2, best, worst": "{best_half:+.2%}, {worst_half:+.2%}",
}

# --- samples and goals ------------------------------------------------------------------------------------------------


def goal_of(config: Config, rewards: Mapping[str, Tensor]) -> Goal:
    """Build the goal of a configuration from rewards (P, K). Raises ValueError for objectives of kernels."""
    used = {name: reward for name, reward in config.rewards.items() if reward.weight}
    objectives = [registry.parse(reward.objective, user_code.function) for reward in used.values()]
    for name, objective in zip(used, objectives, strict=True):
        if objective.pairwise:
            raise ValueError(f"reward {name!r} has the objective {objective}; expected one of rewards, not of kernels")
        if used[name].transform:
            raise ValueError(f"reward {name!r} has a transform; leave it out, and use --transforms")
    if config.loss.aggregate == "min" or config.loss.aggregate_at == "prompt":
        raise ValueError("expected loss.aggregate 'sum' or 'smooth_min:GAMMA' of the means over the batch")
    aggregate = aggregation.parse_aggregate(config.loss.aggregate, [reward.weight for reward in used.values()])
    return Goal([rewards[name] for name in used], objectives, aggregate)


def halves(rewards: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Split the samples of each prompt into two halves."""
    K = min(x.shape[1] for x in rewards.values()) // 2
    return [{name: x[:, i * K : (i + 1) * K] for name, x in rewards.items()} for i in (0, 1)]


def load(folder: Path, prompts: int | None) -> dict[str, Tensor]:
    """Load the rewards (P, K) of each name. Raises ValueError if one abstained or does not vary."""
    rollouts = reference_rollouts.load_rollouts(folder)
    for name, values in rollouts.rewards.items():
        rollouts.ecdf(name)  # refuses abstentions
        if not (values.amax(1) > values.amin(1)).any():
            raise ValueError(f"reward {name!r} is the same for all samples of each prompt: nothing can be learned")
    return {name: values[:prompts] for name, values in rollouts.rewards.items()}


def sample(start: Sequence[str], given: argparse.Namespace) -> Path:
    """Run ``nlgrpo rollout`` and return its folder. Exits with its status if it fails."""
    folder, log = given.out / "rollouts", given.out / "rollout.log"
    given.out.mkdir(parents=True, exist_ok=True)
    arguments = ["rollout", *start, f"--samples={given.samples}", f"--prompts={given.prompts}", f"--out={folder}"]
    with log.open("w") as file:
        done = subprocess.run(launchers.command(arguments, 1), stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        print(log.read_text(), file=sys.stderr)
        sys.exit(done.returncode)
    return folder


# --- predictions ------------------------------------------------------------------------------------------------------


def gains(config: Config, rewards: Mapping[str, Tensor], kls: Sequence[float]) -> list[Row]:
    """One row per KL: `predictions.gain`, and the change of the gain on half of the samples."""
    goal, parts = goal_of(config, rewards), [goal_of(config, half) for half in halves(rewards)]
    rows = []
    for kl in kls:
        row = predictions.gain(goal, kl, config.rollout.samples)
        few = [predictions.gain(part, kl, config.rollout.samples)["gain"] for part in parts]
        rows.append(row | {"gain_half": sum(few) / 2 - row["gain"], "ratio": abs(row["signal"]) / row["noise"]})
    return rows


def rates(names: Sequence[str], rewards: Tensor, kls: Sequence[float], n: int) -> list[dict[str, Any]]:
    """One row per transform and KL: `predictions.of_method`, and the changes on half of the samples."""
    rows: list[dict[str, Any]] = []
    for name in names:
        named = f"rank:{n}" if name == "rank" else f"{name}:{n}" if name in ("bon_fp", "won_fp") else name
        for kl in kls:
            row = predictions.of_method(named, rewards, kl, n)
            few = [predictions.of_method(named, half["r"], kl, n) for half in halves({"r": rewards})]
            changes = {f"{key}_half": (few[0][key] + few[1][key]) / 2 - row[key] for key in ("single", "best", "worst")}
            rows.append({"name": named} | row | changes)
    return rows


# --- the command ------------------------------------------------------------------------------------------------------


def table(title: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> Table:
    found = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for column in columns:
        found.add_column(column, justify="left" if column == "transform" else "right")
    for row in rows:
        shown = {key: "-" if value is None else value for key, value in row.items()}
        shown |= {key: f"{value:.2%}" for key, value in row.items() if key.startswith("inf_") and value is not None}
        found.add_row(*(text.format(**shown) for text in columns.values()))
    return found


def draw(content: Mapping[str, Any], n: int) -> Figure:
    """Gains over KL, the front of the last KL of two rewards, and win rates over KL."""
    panels = [_draw_gains] * bool(content["gains"]) + [_draw_front] * bool(content["front"])
    panels += [functools.partial(_draw_rates, key=key) for key in ("single", "best", "worst")] * bool(content["rates"])
    figure = figures.figure_of((4.8 * len(panels), 4.6))
    every = list(figure.subplots(1, len(panels), squeeze=False)[0])
    for axes, panel in zip(every, panels, strict=True):
        panel(axes, content, n)
    figures.legend(figure, every)
    return figure


def _draw_gains(axes: Axes, content: Mapping[str, Any], n: int) -> None:
    rows = sorted(content["gains"], key=lambda row: row["kl"])
    look, kls = figures.series_style(0), [row["kl"] for row in rows]
    axes.plot(kls, [row["gain"] for row in rows], **look.line, marker=look.marker)
    if not any(math.isnan(row["low"]) for row in rows):
        axes.fill_between(
            kls, [row["low"] for row in rows], [row["high"] for row in rows], color=look.colour, alpha=0.2
        )
    axes.axhline(0, color=figures.GREY, linewidth=1)
    axes.set_xlabel("KL to the reference (nats per sequence)")
    axes.set_title("Gain of training for the objective\nover training for the mean")


def _draw_front(axes: Axes, content: Mapping[str, Any], n: int) -> None:
    first, second = content["rewards"]
    kinds = [("single", "single", True), ("best", f"best of {n}", False)]
    for place, (own, label) in enumerate([(1.0, "for the objective"), (0.0, "for the mean")]):
        rows = [row for row in content["front"] if row["own"] == own]
        for key, kind, pale in kinds:
            look = figures.series_style(place)
            axes.plot(
                [row[f"{key}_0"] for row in rows], [row[f"{key}_1"] for row in rows],
                color=look.colour, marker=look.marker, alpha=0.45 if pale else 1.0,
                linestyle=":" if pale else "-", label=f"{label}, {kind}",
            )  # fmt: skip
    axes.set_xlabel(first)
    axes.set_ylabel(second)
    axes.set_title(f"Rewards of the optima at KL {content['front_kl']:g}")


def _draw_rates(axes: Axes, content: Mapping[str, Any], n: int, *, key: str) -> None:
    for place, name in enumerate(dict.fromkeys(row["name"] for row in content["rates"])):
        rows = sorted((row for row in content["rates"] if row["name"] == name), key=lambda row: row["kl"])
        look = figures.series_style(place)
        axes.plot(
            [row["kl"] for row in rows], [100 * row[key] for row in rows], **look.line, marker=look.marker, label=name
        )
    title = {"single": "One completion", "best": f"Best of {n} each", "worst": f"Worst of {n} each"}[key]
    axes.set_title(f"{title}: win rate (%)")
    axes.set_xlabel("KL to the reference (nats per sequence)")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("recipe", help="recipe or TOML file")
    found.add_argument("--out", type=Path, default=Path("runs/predicted"), help="output folder")
    found.add_argument("--rollouts", type=Path, help="folder of `nlgrpo rollout` instead of new samples")
    found.add_argument("--samples", type=int, default=512, help="K, samples of the reference per prompt")
    found.add_argument("--prompts", type=int, default=128, help="the first prompts of the source")
    found.add_argument("--kls", nargs="+", type=float, default=[0.25, 1.0, 2.5], help="nats per sequence")
    found.add_argument(
        "--weights", nargs="*", type=float, default=[], help="of the first of two rewards, for the front"
    )
    found.add_argument("--front-kl", type=float, default=1.0, help="KL of the front")
    found.add_argument("--transforms", nargs="*", default=None, help=f"of one reward; {' '.join(TRANSFORMS)}")
    found.add_argument("--n", type=int, default=4, help="N of best-of-N and worst-of-N")
    return found


def predict(given: argparse.Namespace, config: Config, rewards: dict[str, Tensor], console: Console) -> dict[str, Any]:
    """Compute and print all predictions. Raises ValueError for settings that have none."""
    missing = set(config.rewards) - set(rewards)
    if missing:
        raise ValueError(f"reward {min(missing)!r} was not scored; scored rewards: {', '.join(rewards)}")
    rewards = {name: rewards[name] for name in config.rewards if config.rewards[name].weight}
    P, K = next(iter(rewards.values())).shape
    content: dict[str, Any] = {"recipe": given.recipe, "prompts": P, "samples": K, "rewards": list(rewards)}
    content |= {"gains": [], "front": [], "front_kl": given.front_kl, "rates": []}
    content["correlations"] = predictions.correlations(rewards)
    console.print(f"{P} prompts x {K} samples of the reference")
    for pair, value in content["correlations"].items():
        console.print(f"correlation within a prompt of {pair}: {value:+.3f}")
    goal = goal_of(config, rewards)
    if any(objective.name != "mean" for objective in goal.objectives):
        content["gains"] = gains(config, rewards, given.kls)
        title = " + ".join(f"{o}({name})" for o, name in zip(goal.objectives, rewards, strict=True))
        console.print(table(f"{title} over the mean, M = {config.rollout.samples}", GAIN_COLUMNS, content["gains"]))
    if given.weights:
        if len(rewards) != 2:
            raise ValueError(f"--weights: {given.recipe} has {len(rewards)} rewards; expected two")
        content["front"] = predictions.front(goal, given.front_kl, sorted(given.weights), given.n)
    names = given.transforms if given.transforms is not None else TRANSFORMS * (len(rewards) == 1)
    if names:
        if len(rewards) != 1:
            raise ValueError(f"--transforms: {given.recipe} has {len(rewards)} rewards; expected one")
        content["rates"] = rates(names, next(iter(rewards.values())), given.kls, given.n)
        title = f"win rates against the reference, N = {given.n} (in brackets: infinitely many samples)"
        console.print(table(title, RATE_COLUMNS, content["rates"]))
    return content


QUICK = [
    "two.toml", "--samples", "16", "--prompts", "4", "--kls", "0.25", "--weights", "0.5",
]  # fmt: skip


def main() -> int:
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    arguments = parser()
    given, more = arguments.parse_args(own), sys.argv[2 + len(own) :]
    console = Console(width=160)
    try:
        config, _ = from_arguments([given.recipe, *more])
        if not config.rewards:
            raise ValueError(f"{given.recipe} has no reward")
        if given.samples < 4 or given.prompts < 1 or given.n < 1:
            raise ValueError(f"--samples {given.samples} --prompts {given.prompts} --n {given.n}: expected >= 4, 1, 1")
        folder = given.rollouts or sample([given.recipe, *more], given)
        content = predict(given, config, load(folder, given.prompts), console)
    except ValueError as error:
        arguments.error(str(error))
    given.out.mkdir(parents=True, exist_ok=True)
    atomic_write(given.out / "predicted.json", json.dumps(content, indent=1) + "\n")
    if content["gains"] or content["front"] or content["rates"]:
        picture = figures.render(functools.partial(draw, content, given.n))
        atomic_write_bytes(given.out / "predicted.png", picture)
    print(given.out / "predicted.json", given.out / "predicted.png", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(quick.run(main, QUICK))
