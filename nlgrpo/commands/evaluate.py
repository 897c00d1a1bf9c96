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
from collections.abc import Sequence
from pathlib import Path

from nlgrpo.config import recipes, schema, validate
from nlgrpo.config.overrides import override
from nlgrpo.config.schema import Config
from nlgrpo.engine.rollouts.evaluation_samples import write_evaluation
from nlgrpo.evaluation import results, rewind
from nlgrpo.evaluation.model_evaluation import EvaluationOptions, build, evaluate, is_run, path_of
from nlgrpo.objectives.registry import parse
from nlgrpo.runtime import distributed, user_code

# --- arguments --------------------------------------------------------------------------------------------------------


def read_arguments(arguments: Sequence[str]) -> tuple[EvaluationOptions, Config]:
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
    return EvaluationOptions(tuple(named), known.reference or cfg.model.path, known.out, procedures, ns, gold), cfg


ABOUT = """What models are worth under each inference procedure, against a reference.

Before the options stand the models: folders of runs, Hugging Face directories, or hub names; LABEL=PATH names one.
Other options are those of a configuration, such as --data.source, --rewards.NAME.function, --rollout.temperature,
--evaluation.prompts; they come on top of the run's own, where the first model is a run. Under torchrun, which takes
--n for one of its own, write --samples."""


def _base(named: Sequence[str], file: Path | None) -> tuple[Config, bool]:
    """What the options are laid over, and whether it is that of a run."""
    if file is not None:
        return schema.read_toml(file, recipes.recipe("blank")), False
    known = next((path_of(name) / "config.json" for name in named if is_run(path_of(name))), None)
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


# --- the command ------------------------------------------------------------------------------------------------------


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
