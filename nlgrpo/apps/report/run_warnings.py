"""What a reader should know before the figures of a run, in sentences: from its logged metrics and configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from nlgrpo.apps.report import configurations
from nlgrpo.apps.report.logged import Logged

CUT = 0.5  # share of completions
CLIPPED = 0.3  # share of tokens
EQUAL = 0.5  # share of groups
FAR = 3.0  # KL of the policy, in units of that of best-of-N
COLLAPSED = 0.1  # entropy at the end, in units of that at the start


def warnings_of(logged: Logged, config: Mapping[str, Any], kl: float) -> Iterator[str]:
    """Yield sentences about the last 10% of the steps. ``kl``: of a completion to the reference in nats, or NaN."""
    cut = logged.last("completions/clipped_ratio")
    if cut >= CUT:
        limit = configurations.section(config, "rollout").get("max_new_tokens", "rollout.max_new_tokens")
        yield (
            f"{cut:.0%} of the completions have no end: they were cut at {limit} tokens. Their rewards are those of "
            "unfinished answers. Raise rollout.max_new_tokens, or penalize length."
        )
    n = _largest_n(config)
    bound = math.log(n) - (n - 1) / n if n > 1 else math.nan
    if kl > FAR * bound and kl > 1:
        yield (
            f"The policy is {kl:.3g} nats from the reference; best-of-{n} of the reference is at most {bound:.2g} nats "
            "from it. A policy this far away often exploits the reward: read its completions, or raise loss.beta."
        )
    equal = logged.last("advantage/frac_zero_std")
    if equal >= EQUAL:
        yield (
            f"{equal:.0%} of the groups have no gradient: all their completions have the same linearized reward. The "
            "prompts may be too easy or too hard."
        )
    clipped = logged.last("clip_ratio/region_mean")
    if clipped >= CLIPPED:
        yield (
            f"{clipped:.0%} of the tokens are clipped: the policy moves further in a step than loss.eps_low and "
            "loss.eps_high allow. Lower optim.lr, or take fewer passes over a batch."
        )
    _, entropy = logged.points("entropy")
    if len(entropy) >= 20 and entropy[0] > 0 and logged.last("entropy") < COLLAPSED * entropy[:2].mean():
        yield (
            f"The entropy fell from {entropy[:2].mean():.2g} to {logged.last('entropy'):.2g} nats per token: the "
            "completions of a prompt are nearly the same."
        )
    if steps := logged.nulls.get("grad_norm"):
        yield f"The gradient norm was not finite in {steps} step{'s' * (steps > 1)}."


def _largest_n(config: Mapping[str, Any]) -> int:
    """Largest N of the best-of-N objectives; 0 if there are none."""
    found = [0]
    for objective in configurations.objectives(config).values():
        kind, _, rest = objective.partition(":")
        number = rest.partition(":")[0]
        if kind == "bon" and number.isdecimal():
            found.append(int(number))
    return max(found)
