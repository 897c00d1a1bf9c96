"""Checks of IRO: what a guided search costs and finds (Prop. 1), the convergence of iterated values (Thm 1), Fig. 2.

The search is that of the package, on a small decoder over A tokens, guided by exact values of token trees (`tree`).
Shapes: K beams, B successors, U = K B; A tokens, H steps, A^H leaves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nlgrpo.apps.verify import tree
from nlgrpo.apps.verify.claims import Proof, Result
from nlgrpo.engine.guided_search import Candidate, Cost, Search, search
from nlgrpo.engine.sampling import Sampling
from nlgrpo.model.architectures import Shape
from nlgrpo.model.decoder import Decoder


class TreeValue:
    """Value model with exact values: V of each prefix of sampled tokens."""

    name = "tree"

    def __init__(self, values: Sequence[Tensor], A: int) -> None:
        self.values = [v.tolist() for v in values]
        self.A = A

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        self.rows: list[tuple[int, ...]] = [()] * len(prompts)

    def score(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> Tensor:
        self.rows = [(*self.rows[row], *chunk) for row, chunk in zip(rows, chunks, strict=True)]
        found = [self.values[len(y)][tree.number(y, self.A)] for y in self.rows]
        return torch.tensor(found, dtype=torch.float64)

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


def decoder(A: int, context: int, *, uniform: bool) -> Decoder:
    """A decoder of one layer over A tokens with random weights; ``uniform``: all tokens are equally likely."""
    shape = Shape(
        family="gpt2",
        vocab=A,
        width=8,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=8,
        ffn=8,
        context=context,
        norm="layer",
        activation="gelu_new",
        gated=False,
        windows=(None,),
        scales=(8**-0.5,),
    )
    model = Decoder(shape).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        if uniform:
            model.head_weight.zero_()
    return model


def guided(
    model: Decoder, trials: int, how: Search, H: int, values: Sequence[tuple[TreeValue, float]], *, valued: bool = False
) -> tuple[list[list[Candidate]], Cost]:
    """Run independent searches for H tokens after the prompt [0]. Return their candidates and their cost together."""
    sampling = Sampling(max_new_tokens=H)
    return search(model, [[0]] * trials, how, sampling, values, seed=1, valued=valued)


# --- Proposition 1 ----------------------------------------------------------------------------------------------------


def proposition_1(quick: bool) -> Proof:
    """Count tokens and queries of the search, and its rate of finding the best leaf, against the formulas of App. B.3.

    The formulas for K = 1 beam are exact. With K > 1 beams only the B successors of the best beam can be right, not all
    U candidates, so Eq. 38 holds for the first chunk only.
    """
    trials = 1000 if quick else 5000
    source = "Prop. 1, Eq. 38"
    of_best = _rate(1, 8, 3, trials)
    of_one = _rate(1, 4, 1, trials)
    chunked = _rate(1, 4, 2, trials, H=4)
    of_two = _rate(2, 2, 1, trials)
    best = "Best-of-N finds the best response as in Eq. 34"
    two = "Two beams find it less often, as B of U extend it"
    one = "One beam finds the best response as in Eq. 38"
    chunks = "Also with chunks, of A^L actions"
    return Proof(
        [
            *_costs(),
            _within(best, "Prop. 1, Eq. 34", of_best, one_beam(8, 1, 27), trials, "N = 8, A = H = 3"),
            _within(one, source, of_one, one_beam(4, 3, 3), trials, "U = 4, A = H = 3"),
            _within(chunks, source, chunked, one_beam(4, 2, 9), trials, "U = 4, L = 2, H = 4"),
            _within(two, source, of_two, two_beams(2, 3, 3), trials, "K = B = 2"),
            Result(
                "Eq. 38 is for one beam",
                "not in Prop. 1",
                "success of 2 beams / Eq. 38",
                two_beams(2, 3, 3) / one_beam(4, 3, 3),
                at_most=0.8,
                note="same U = 4 and tokens; A = H = 3",
            ),
            _equal_cost(),
        ]
    )


def _costs() -> list[Result]:
    """Compare tokens with U H, and queries of I models with U I H/L, or without complete candidates U I (H/L - 1)."""
    H = 4
    searches = 5
    model = decoder(2, H + 1, uniform=True)
    uniform = tree.random_policy(2, H, 0.0, 0)
    exactly = tree.values(uniform, torch.arange(2.0**H, dtype=torch.float64))
    # largest differences
    of_tokens = 0
    of_queries = 0
    of_incomplete = 0
    for K, B, L, models in itertools.product((1, 2), (2, 3), (1, 2, 4), (1, 3)):
        guides = [(TreeValue(exactly, 2), 1.0 + i) for i in range(models)]
        _, cost = guided(model, searches, Search(K, B, L), H, guides, valued=True)
        _, incomplete = guided(model, searches, Search(K, B, L), H, guides, valued=False)
        U = searches * K * B
        rounds = H // L
        of_tokens = max(of_tokens, abs(cost.tokens - U * H))
        of_queries = max(of_queries, abs(cost.queries - U * models * rounds))
        of_incomplete = max(of_incomplete, abs(incomplete.queries - U * models * (rounds - 1)))
    return [
        Result(
            "The search samples U H tokens",
            "Prop. 1, Eq. 44",
            "largest difference",
            of_tokens,
            at_most=0,
            note="K = 1 and 2, B = 2 and 3, L = 1, 2 and 4, I = 1 and 3, H = 4, A = 2",
        ),
        Result(
            "Value models score U I H / L candidates",
            "Prop. 1, Eq. 44",
            "largest difference",
            of_queries,
            at_most=0,
            note="with complete candidates, as for a choice by value",
        ),
        Result(
            "Without complete ones U I (H / L - 1)",
            "Prop. 1, Alg. 4",
            "largest difference",
            of_incomplete,
            at_most=0,
            note="Alg. 2 and 4 choose among complete candidates by reward; Eq. 44 counts this round as well",
        ),
    ]


def _rate(K: int, B: int, L: int, trials: int, *, A: int = 3, H: int = 3) -> float:
    """Share of searches by V* whose candidates have the best leaf."""
    rewards = torch.rand(A**H, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    best = int(rewards.argmax())
    uniform = tree.random_policy(A, H, 0.0, 0)
    guide = TreeValue(tree.best_values(uniform, rewards), A)
    found, _ = guided(decoder(A, H + 1, uniform=True), trials, Search(K, B, L), H, [(guide, 1.0)])
    hits = 0
    for candidates in found:
        hits += any(tree.number(candidate.tokens, A) == best for candidate in candidates)
    return hits / trials


def _within(claim: str, source: str, rate: float, truth: float, trials: int, note: str) -> Result:
    """Compare a rate with its probability, in standard errors."""
    standard_error = math.sqrt(truth * (1 - truth) / trials)
    return Result(
        claim,
        source,
        "error, in standard errors",
        abs(rate - truth) / standard_error,
        at_most=4.5,
        note=f"{note}: {rate:.3f}, exactly {truth:.3f}",
    )


def one_beam(U: int, chunks: int, actions: float) -> float:
    """Eq. 38 before its approximation: the best of A^L actions is among U at each of H/L steps."""
    miss = (1 - 1 / actions) ** U
    return (1 - miss) ** chunks


def two_beams(B: int, H: int, A: int) -> float:
    """Rate of success of two diverse beams with B successors each and chunks of one token.

    The state is the number of beams that have the best prefix: two only if all candidates are that prefix.
    """
    # of all 2 B successors of two beams with the best prefix: none extends it, or all do
    none = (1 - 1 / A) ** (2 * B)
    both = A ** (-2.0 * B)
    # the B successors of one such beam; the other beam's successors are other prefixes
    found = 1 - (1 - 1 / A) ** B
    # probabilities of one and of two beams after the first chunk
    one = 1 - none - both
    two = both
    for _ in range(H - 2):
        one = one * found + two * (1 - none - both)
        two = two * both
    return one * found + two * (1 - none)


def _equal_cost() -> Result:
    """N of best-of-N with the same success, exactly, over U^{H/L}: 1 in the limit of many actions."""
    shares = []
    texts = []
    for A, U, chunks in ((2, 2, 4), (100, 4, 4), (50_000, 16, 8)):
        log_miss_of_search = math.log1p(-one_beam(U, chunks, A))
        log_miss_of_sample = math.log1p(-(float(A) ** -chunks))
        N = log_miss_of_search / log_miss_of_sample
        share = N / float(U) ** chunks
        shares.append(share)
        texts.append(f"{share:.3f} for A^L = {A:,}")
    return Result(
        "Best-of-N needs N = U^{H/L} samples",
        "Prop. 1, Eq. 43",
        "N / U^{H/L}",
        shares[-1],
        at_least=0.99,
        at_most=1.0,
        note=f"an approximation for U much smaller than A^L: {', '.join(texts)}",
    )


# --- Theorem 1 --------------------------------------------------------------------------------------------------------


def theorem_1(quick: bool) -> Proof:
    """Iterate exact values with beta_t = sqrt(t + 1) / omega on three trees, and compare the gap with Eq. 12 at each T.

    The values are exact, so the term of m samples is absent. omega depends on T: all T are run at once, (R, A^h, A).
    """
    horizons = torch.tensor([2**k for k in range(1, 13 if quick else 15)])
    share = 0.0
    averaged = 0.0
    fall = 0.0
    firsts = []
    lines = {}
    for name, (base, rewards) in trees().items():
        run = _iterate(base, rewards, horizons)
        share = max(share, (run.gaps / run.bounds).max().item())
        averaged = max(averaged, run.averaged)
        fall = max(fall, run.fall)
        lines[name] = (run.gaps, run.bounds)
        useful = horizons[run.bounds < 1].tolist()
        firsts.append(f"{useful[0] if useful else '-'} ({name})")
    results = [
        Result(
            "The gap is within the bound at every T",
            "Thm 1, Eq. 12",
            "gap / bound, largest",
            share,
            at_most=1.0,
            note=f"T = 2 to {horizons[-1]:,}; the bound is below r_max first at T = {', '.join(firsts)}",
        ),
        Result(
            "The weighted mean of gaps is within the bound",
            "App. B.2, Eq. 25",
            "mean / bound, largest",
            averaged,
            at_most=1.0,
            note="also without the factor H of Lemma 3: 1 / C_ST is the probability of the best leaf",
        ),
        Result(
            "No update lowers the reward",
            "Eq. 4",
            "largest fall of J",
            fall,
            at_most=1e-13,
            note="so the last policy keeps the bound as well",
        ),
    ]
    return Proof(results, {"horizons": horizons, "lines": lines})


def trees() -> dict[str, tuple[tree.Policy, Tensor]]:
    """Base policies and rewards in [0, 1] of the leaves, with one best leaf of reward 1.

    "two tokens" is the tree of Fig. 2 (A = 2, H = 4). In "trap" the best leaf is rare, the others of its half have 0,
    and those of the other half 0.6: the values of the base policy lead away from the best leaf.
    """
    generator = torch.Generator().manual_seed(2)
    random = torch.rand(27, generator=generator, dtype=torch.float64)
    trap = torch.cat((torch.zeros(8, dtype=torch.float64), torch.full((8,), 0.6, dtype=torch.float64)))
    trap[3] = 1.0
    skewed = [torch.tensor([0.9, 0.1], dtype=torch.float64).expand(2**h, 2) for h in range(4)]
    return {
        "two tokens": (tree.random_policy(2, 4, 0.0, 0), toy_rewards()),
        "three tokens": (tree.random_policy(3, 3, 1.0, 1), random / random.max()),
        "trap": (skewed, trap),
    }


@dataclass(frozen=True)
class Iterated:
    """Smallest gaps over t < T and bounds of Eq. 12, (R,); largest share of the bound of Eq. 25; largest fall of J."""

    gaps: Tensor
    bounds: Tensor
    averaged: float
    fall: float


def _iterate(base: tree.Policy, rewards: Tensor, horizons: Tensor) -> Iterated:
    """Run all T at once. r_max is 1, and omega = sqrt(2 log C / log T)."""
    H = len(base)
    R = len(horizons)
    best = rewards.max()
    log_C = math.log(tree.concentrability(base, rewards))
    log_T = horizons.double().log()
    omega = (2 * log_C / log_T).sqrt()
    policy = [step.expand(R, *step.shape) for step in base]
    smallest = torch.full_like(omega, math.inf)
    fall = torch.zeros_like(omega)
    last_J = torch.full_like(omega, -math.inf)
    # sums of gap / beta_t and 1 / beta_t^2
    paid = torch.zeros_like(omega)
    squares = torch.zeros_like(omega)
    for t in range(int(horizons[-1])):
        running = t < horizons
        values = tree.values(policy, rewards.expand(R, -1))
        J = values[0][:, 0]
        gap = best - J
        # 1 / beta_t
        rate = omega / math.sqrt(t + 1)
        smallest = torch.where(running, torch.minimum(smallest, gap), smallest)
        fall = torch.where(running, torch.maximum(fall, last_J - J), fall)
        paid = paid + running * rate * gap
        squares = squares + running * rate.square()
        policy = tree.reweighted(policy, values, (1 / rate)[:, None, None])
        last_J = J
    bounds = 2 * H * (log_T * log_C / horizons).sqrt()
    of_average = log_C + H * squares / 2
    return Iterated(smallest, bounds, (paid / of_average).max().item(), fall.max().item())


# --- searches guided by iterated values (Eq. 8, Fig. 2) ---------------------------------------------------------------


def iterated_search(quick: bool) -> Proof:
    """Check that the search samples from the policies of Theorem 1, and Fig. 2's search of the tree of 30 nodes."""
    return Proof([_sampled_policies(quick), *_toy_tree()])


def _sampled_policies(quick: bool) -> Result:
    """The search with one beam, all successors and temperature 1 samples from Eq. 8 of the values so far.

    The search does not choose among the candidates of the last chunk; their weights e^V give the expected reward.
    """
    A = 3
    H = 3
    trials = 500 if quick else 4000
    model = decoder(A, H + 1, uniform=False)
    rewards = torch.rand(A**H, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    how = Search(beams=1, successors=A, chunk=1, temperature=1.0, likeliest=True)
    policy = _policy_of(model, A, H)
    exact_J = [tree.values(policy, rewards)[0].item()]
    guides = list[tuple[TreeValue, float]]()
    off = []
    for t in range(4):
        values = tree.values(policy, rewards)
        beta = 0.3 * math.sqrt(t + 1)
        guides.append((TreeValue(values, A), beta))
        policy = tree.reweighted(policy, values, beta)
        exact_J.append(tree.values(policy, rewards)[0].item())
        found, _ = guided(model, trials, how, H, guides, valued=True)
        J, standard_error = _expected_reward(found, rewards, A)
        off.append(abs(J - exact_J[-1]) / standard_error)
    texts = ", ".join(f"{J:.3f}" for J in exact_J)
    return Result(
        "The search samples from the reweighted base policy",
        "Eq. 8",
        "error of J, in standard errors",
        max(off),
        at_most=4.5,
        note=f"J after 0 to 4 updates: {texts}; {trials:,} searches",
    )


def _policy_of(model: Decoder, A: int, H: int) -> tree.Policy:
    """Next-token probabilities of the decoder after the prompt [0] and each prefix, by whole forward passes."""
    policy = []
    for h in range(H):
        prefixes = [(0, *y) for y in itertools.product(range(A), repeat=h)]
        with torch.no_grad():
            logits = model(torch.tensor(prefixes).flatten(), [h + 1] * len(prefixes))
        policy.append(logits.view(len(prefixes), h + 1, A)[:, -1].softmax(-1))
    return policy


def _expected_reward(found: Sequence[Sequence[Candidate]], rewards: Tensor, A: int) -> tuple[float, float]:
    """Mean reward of the searches and its standard error; candidates are weighted by e^V."""
    values = []
    leaves = []
    for candidates in found:
        values.append([candidate.value for candidate in candidates])
        leaves.append([tree.number(candidate.tokens, A) for candidate in candidates])
    weights = torch.tensor(values, dtype=torch.float64).softmax(-1)
    means = (weights * rewards[torch.tensor(leaves)]).sum(-1)
    return means.mean().item(), means.std().item() / math.sqrt(len(means))


def toy_rewards() -> Tensor:
    """Rewards of the 16 leaves: random ones up to 0.6, and 1 in the half of the tree with the lower mean."""
    rewards = torch.rand(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.6
    halves = rewards.view(2, 8)
    lower = int(halves.mean(1).argmin())
    halves[lower, 5] = 1.0
    return rewards


def _toy_tree() -> list[Result]:
    """Fig. 2: of the 30 nodes a search that keeps the best of two tokens sees 8, and finds the best leaf."""
    base, rewards = trees()["two tokens"]
    model = decoder(2, 5, uniform=True)
    how = Search(beams=1, successors=2, chunk=1, likeliest=True)
    policy = base
    guides = list[tuple[TreeValue, float]]()
    reached = []
    off = 0
    for t in range(12):
        values = tree.values(policy, rewards)
        beta = math.sqrt(t + 1)
        guides.append((TreeValue(values, 2), beta))
        policy = tree.reweighted(policy, values, beta)
        found, cost = guided(model, 1, how, 4, guides, valued=True)
        reached.append(max(rewards[tree.number(candidate.tokens, 2)].item() for candidate in found[0]))
        off = max(off, abs(cost.tokens - 8))
    first = reached.index(1.0) + 1 if 1.0 in reached else math.inf
    nodes = 2 + 4 + 8 + 16
    tokens = 4 * 16
    return [
        Result(
            "Guided search visits 8 nodes of the toy tree",
            "Fig. 2",
            "largest difference from 8",
            off,
            at_most=0,
            note=f"of {nodes}; best-of-16 of all leaves has {tokens} tokens, as it shares no prefixes",
        ),
        Result(
            "Its values find the best leaf after some updates",
            "Fig. 2",
            "last reward",
            reached[-1],
            at_least=1.0,
            note=f"rewards of the searches: {', '.join(f'{r:.2f}' for r in reached)}; first with {first} values",
        ),
    ]
