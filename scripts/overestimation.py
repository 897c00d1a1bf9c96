"""What value models say of the answers that they choose, beside what these are worth: is it their errors that win?

    python scripts/overestimation.py my.toml --guide runs/iro/iteration-1 --methods bon iro cd --budgets 16 64

Takes what ``nlgrpo decode`` takes, and lets the values choose. Prints for each way the mean over prompts, with its
interval, of V, sum_i (V_i / beta_i) / sum_i (1 / beta_i) of the answer, and of the answer's reward. For values that
were fitted to that reward the two are alike where they are right.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from rich.console import Console
from torch import Tensor

from nlgrpo.commands import decode
from nlgrpo.engine import guided_search
from nlgrpo.evaluation.decoding_methods import DecodingMethod
from nlgrpo.evaluation.estimators import bootstrap
from nlgrpo.runtime import distributed
from nlgrpo.runtime.work_queue import WorkQueue


def said_and_worth(c: decode.Comparison, method: DecodingMethod) -> tuple[Tensor, Tensor]:
    """(P,) values of the answers, and (P,) their rewards. ValueError for a way that no value model guides."""
    if not method.values:
        raise ValueError(f"method {method.name!r} asks no value model: name bon, cd, iro, iro:NUMBER or compressed")
    found, _ = guided_search.search(
        c.model, c.batch.ids, method.search, c.sampler.sampling, c.values(method),
        seed=c.sampler.seed, index=c.batch.index, max_rows=c.sampler.max_rows, valued=True,
    )  # fmt: skip
    answers = [max(own, key=lambda one: one.value) for own in found]
    weight = sum(1 / c.betas[i] for i in method.values)
    values = torch.tensor([one.value for one in answers], dtype=torch.float64) / weight
    return values, c.worth(c.batch, [one.tokens for one in answers], 1)[:, 0]


def main() -> None:
    try:
        options, cfg = decode.read_arguments(sys.argv[1:])
        with distributed.start() as ranks:
            c = decode.build(replace(options, choose="value"), cfg, WorkQueue(ranks, Console()))
            print(f"{len(c.batch.ids)} prompts, {len(c.methods)} ways")
            for method in c.methods:
                said, worth = (
                    "{:.3f} [{:.3f}, {:.3f}]".format(*(float(x) for x in bootstrap(each)))
                    for each in said_and_worth(c, method)
                )
                print(f"{method.name:12} N = {method.budget:<4} V {said}   reward {worth}", flush=True)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
