"""Compare the values of the answers that value models choose with the rewards of these answers: do errors win?

    python -m experiments.guided_sums.overestimation my.toml --guide runs/iro/iteration-1
        --methods bon iro cd --budgets 16 64

Takes the arguments of ``nlgrpo decode`` and chooses answers by value. Prints for each method the mean over prompts,
with its interval, of V = sum_i (V_i / beta_i) / sum_i (1 / beta_i) of the answer, and of the answer's reward. If the
values were fitted to that reward and are accurate, both agree.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from rich.console import Console
from torch import Tensor

from experiments import quick
from nlgrpo.apps.guided import decode
from nlgrpo.apps.guided.decoding_methods import DecodingMethod
from nlgrpo.engine import guided_search
from nlgrpo.engine.decoding_memory import ROWS
from nlgrpo.estimators import bootstrap
from nlgrpo.runtime.supervision import process_group
from nlgrpo.runtime.work_queue import WorkQueue


def values_and_rewards(c: decode.Comparison, method: DecodingMethod) -> tuple[Tensor, Tensor]:
    """Values (P,) and rewards (P,) of the answers. Raises ValueError for a method without a value model."""
    if not method.values:
        raise ValueError(f"method {method.name!r} uses no value model; expected bon, cd, iro, iro:NUMBER or compressed")
    found, _ = guided_search.search(
        c.model, c.batch.ids, method.search, c.sampler.sampling, c.values(method),
        seed=c.sampler.seed, index=c.batch.index, max_rows=c.sampler.max_rows or ROWS, valued=True,
    )  # fmt: skip
    answers = [max(own, key=lambda one: one.value) for own in found]
    weight = sum(1 / c.betas[i] for i in method.values)
    values = torch.tensor([one.value for one in answers], dtype=torch.float64) / weight
    return values, c.final_rewards(c.batch, [one.tokens for one in answers], 1)[:, 0]


QUICK = [
    "one.toml", "--chunk", "2", "--guide", "loop", "--betas", "1", "--methods", "bon", "iro:1", "cd", "--budgets", "4",
]  # fmt: skip
LEARN = ("--iterations", "1", "--samples", "4", "--beams", "2", "--successors", "2", "--value.held-out", "1")
BEFORE = [["-m", "nlgrpo.cli", "iro", "one.toml", "--chunk", "2", *LEARN, "--out", "loop"]]


def main() -> None:
    try:
        options, cfg = decode.read_arguments(sys.argv[1:])
        with process_group.start() as ranks:
            c = decode.build_comparison(replace(options, choose="value"), cfg, WorkQueue(ranks, Console()))
            print(f"{len(c.batch.ids)} prompts, {len(c.methods)} methods")
            for method in c.methods:
                value, reward = (
                    "{:.3f} [{:.3f}, {:.3f}]".format(*(float(x) for x in bootstrap(each)))
                    for each in values_and_rewards(c, method)
                )
                print(f"{method.name:12} N = {method.budget:<4} V {value}   reward {reward}", flush=True)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    sys.exit(quick.run(main, QUICK, BEFORE))
