"""The command ``nlgrpo evaluate``: value and win rate of models under each inference procedure, with intervals.

    nlgrpo evaluate runs/maze runs/maze-grpo --n 64 --ns 1,2,4,8,16
    nlgrpo evaluate runs/sweep half=runs/maze/checkpoints/step-00000200
    torchrun --nproc-per-node 8 -m nlgrpo.cli evaluate my-model --reference base --file evaluation.toml

Every model samples n completions of the same prompts with the same noise. Completions and scores are stored by content
(`engine.rollouts.store`), so the same command resumes, and another command that needs the same completions reuses them.
Ranks share the work, and the folder.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from nlgrpo.apps.evaluate import results
from nlgrpo.apps.evaluate.model_evaluation import EvaluationOptions, build_evaluation, evaluate
from nlgrpo.apps.evaluate.named_models import NamedModel, named
from nlgrpo.apps.evaluate.options import read_options
from nlgrpo.config import recipes, schema, validate
from nlgrpo.config.overrides import override
from nlgrpo.config.schema import Config
from nlgrpo.engine.rollouts.evaluation_samples import write_evaluation
from nlgrpo.errors import UserError
from nlgrpo.runtime.supervision import process_group
from nlgrpo.training.evaluation_entries import expanded

# --- arguments --------------------------------------------------------------------------------------------------------


def read_arguments(arguments: Sequence[str]) -> tuple[EvaluationOptions, Config]:
    """Parse ``MODEL... [--reference REF] [--file TOML] [--n 64] [--ns 1,2] [--procedures ..] [--gold ..] [--key x]``.

    Starts from the configuration of the first model that is the folder of a run; otherwise from the file, or from the
    recipe `blank`. Raises UserError for invalid options.
    """
    names, known, rest = read_options(arguments)
    if not names:
        raise UserError("no model to evaluate; name runs or models first: nlgrpo evaluate runs/a")
    models = named(names)
    base, of_run = _base(models, known.file)
    cfg = _override(base, rest, known.n, of_run)
    ns = tuple(dict.fromkeys(_integers(known.ns)))
    if not ns or not all(1 <= n <= known.n for n in ns):
        raise UserError(f"--ns {known.ns}: expected numbers between 1 and --n {known.n}, the completions per prompt")
    gold = tuple(name for name in known.gold.split(",") if name)
    unknown = [name for name in gold if name not in cfg.rewards]
    if unknown:
        raise UserError(f"--gold {unknown[0]}: unknown reward; the rewards are {', '.join(cfg.rewards)}")
    procedures = tuple(expanded(known.procedures.split(","), ns, known.n, "--procedures", "--n"))
    reference = known.reference or cfg.model.path
    return EvaluationOptions(models, reference, known.out, procedures, ns, gold, not known.no_kl), cfg


def _base(models: Sequence[NamedModel], file: Path | None) -> tuple[Config, bool]:
    """Return the configuration that the options override, and whether it is that of a run."""
    if file is not None:
        return schema.read_toml(file, recipes.recipe("blank")), False
    runs = [model.run for model in models if model.run is not None]
    if not runs:
        return recipes.recipe("blank"), False
    known = runs[0] / "config.json"
    return schema.from_dict(json.loads(known.read_text("utf-8")), where=str(known)), True


def _override(base: Config, rest: Sequence[str], n: int, of_run: bool) -> Config:
    evaluation = dataclasses.replace(base.evaluation, samples=n, ns=(1,))
    cfg = override(dataclasses.replace(base, evaluation=evaluation), rest, program="nlgrpo evaluate")
    if not of_run and not cfg.data.evaluation:  # nothing was trained on these prompts: use all of them
        cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, evaluation=cfg.data.source))
    if cfg.evaluation.prompts < 1:
        raise UserError(f"evaluation.prompts = {cfg.evaluation.prompts}: an evaluation needs at least one prompt")
    validate.check_config(cfg)
    return cfg


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"--ns {text}: expected whole numbers separated by commas, such as 1,2,4") from None


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Evaluate, write the results and print them. Raises UserError for user errors."""
    options, cfg = read_arguments(arguments)
    with process_group.start(cfg.limits()) as ranks:
        e = build_evaluation(options, cfg, ranks)
        found = evaluate(e)
        if ranks.first:
            write_evaluation(options.out, **found)
            results.write(found, options.procedures, options.gold, cfg, options.out)
            for table in results.tables(found, options.procedures, options.gold):
                e.console.print(table)
            e.console.print(f"results  {options.out}", highlight=False, soft_wrap=True)
    return 0
