"""Checks of IRO: what a guided search costs and finds (Prop. 1), the convergence of iterated values (Thm 1), Fig. 2.

The search is that of the package, on a small decoder over A tokens, guided by exact values of token trees (`tree`).
Shapes: K beams, B successors, U = K B; A tokens, H steps, A^H leaves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

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
        return torch.tensor([self.values[len(y)][tree.number(y, self.A)] for y in self.rows], dtype=torch.float64)

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


def decoder(A: int, context: int, *, uniform: bool) -> Decoder:
    """A decoder of one layer over A tokens with random weights; ``uniform``: all tokens are equally likely."""
    shape = Shape(
        family="gpt2", vocab=A, width=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn=8, context=context,
        norm="layer", activation="gelu_new", gated=False, windows=(None,), scales=(8**-0.5,),
    )  # fmt: skip
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
    counted = [_counts(*case) for case in itertools.product((1, 2), (2, 3), (1, 2, 4), (1, 3))]
    tokens, queries, unscored = (max(abs(error) for error in errors) for errors in zip(*counted, strict=True))
    cases = "K = 1 and 2, B = 2 and 3, L = 1, 2 and 4, I = 1 and 3, H = 4, A = 2"
    results = [
        Result("The search samples U H tokens", "Prop. 1, Eq. 44", "largest difference", tokens, at_most=0, note=cases),
        Result("Value models score U I H / L candidates", "Prop. 1, Eq. 44", "largest difference", queries, at_most=0,
               note="with complete candidates, as for a choice by value"),
        Result("Without complete ones U I (H / L - 1)", "Prop. 1, Alg. 4", "largest difference", unscored, at_most=0,
               note="Alg. 2 and 4 choose among complete candidates by reward; Eq. 44 counts this round as well"),
        _within("Best-of-N finds the best response as in Eq. 34", "Prop. 1, Eq. 34", _rate(1, 8, 3, trials),
                one_beam(8, 1, 27), trials, "N = 8, A = H = 3"),
        *_success(trials),
        _equal_cost(),
    ]  # fmt: skip
    return Proof(results)


def _counts(K: int, B: int, L: int, values: int, H: int = 4) -> tuple[int, int, int]:
    """Tokens and queries of 5 searches, with and without complete candidates, minus U H, U I H/L and U I (H/L - 1)."""
    model = decoder(2, H + 1, uniform=True)
    how = Search(K, B, L)
    exactly = tree.values(tree.random_policy(2, H, 0.0, 0), torch.arange(2.0**H, dtype=torch.float64))
    guides = [(TreeValue(exactly, 2), 1.0 + i) for i in range(values)]
    cost, short = (guided(model, 5, how, H, guides, valued=valued)[1] for valued in (True, False))
    U = 5 * K * B
    rounds = H // L
    return cost.tokens - U * H, cost.queries - U * values * rounds, short.queries - U * values * (rounds - 1)


def _rate(K: int, B: int, L: int, trials: int, *, A: int = 3, H: int = 3) -> float:
    """Share of searches by V* whose candidates have the best leaf."""
    rewards = torch.rand(A**H, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    guide = TreeValue(tree.best_values(tree.random_policy(A, H, 0.0, 0), rewards), A)
    found, _ = guided(decoder(A, H + 1, uniform=True), trials, Search(K, B, L), H, [(guide, 1.0)])
    best = int(rewards.argmax())
    return sum(any(tree.number(c.tokens, A) == best for c in of_one) for of_one in found) / trials


def _within(claim: str, source: str, rate: float, truth: float, trials: int, note: str) -> Result:
    """Compare a rate with its probability, in standard errors."""
    off = abs(rate - truth) / math.sqrt(truth * (1 - truth) / trials)
    return Result(claim, source, "error, in standard errors", off, at_most=4.5,
                  note=f"{note}: {rate:.3f}, exactly {truth:.3f}")  # fmt: skip


def one_beam(U: int, chunks: int, actions: float) -> float:
    """Eq. 38 before its approximation: the best of A^L actions is among U at each of H/L steps."""
    return (1 - (1 - 1 / actions) ** U) ** chunks


def two_beams(B: int, H: int, A: int) -> float:
    """Rate of success of two diverse beams with B successors each and chunks of one token.

    The state is the number of beams that have the best prefix: two only if all candidates are that prefix.
    """
    state = {1: 0.0, 2: 0.0}
    miss = (1 - 1 / A) ** (2 * B)
    both = A ** (-2.0 * B)
    state[2] = both
    state[1] = 1 - miss - both
    for _ in range(H - 2):
        single = 1 - (1 - 1 / A) ** B  # of the best beam; the other beam's successors are other prefixes
        state = {1: state[1] * single + state[2] * (1 - miss - both), 2: state[2] * both}
    return state[1] * (1 - (1 - 1 / A) ** B) + state[2] * (1 - miss)


def _success(trials: int) -> list[Result]:
    source = "Prop. 1, Eq. 38"
    of_one = _rate(1, 4, 1, trials)
    of_two = _rate(2, 2, 1, trials)
    chunked = _rate(1, 4, 2, trials, H=4)
    same = one_beam(4, 3, 3)
    return [
        _within("One beam finds the best response as in Eq. 38", source, of_one, same, trials, "U = 4, A = H = 3"),
        _within("Also with chunks, of A^L actions", source, chunked, one_beam(4, 2, 9), trials, "U = 4, L = 2, H = 4"),
        _within("Two beams find it less often, as B of U extend it", source, of_two, two_beams(2, 3, 3), trials,
                "K = B = 2"),
        Result("Eq. 38 is for one beam", "not in Prop. 1", "success of 2 beams / Eq. 38", two_beams(2, 3, 3) / same,
               at_most=0.8, note="same U = 4 and tokens; A = H = 3"),
    ]  # fmt: skip


def _equal_cost() -> Result:
    """N of best-of-N with the same success, exactly, over U^{H/L}: 1 in the limit of many actions."""
    shares = {}
    for A, U, chunks in ((2, 2, 4), (100, 4, 4), (50_000, 16, 8)):
        log_miss = math.log1p(-one_beam(U, chunks, A))
        shares[A] = log_miss / math.log1p(-(float(A) ** -chunks)) / float(U) ** chunks
    text = ", ".join(f"{share:.3f} for A^L = {A:,}" for A, share in shares.items())
    return Result("Best-of-N needs N = U^{H/L} samples", "Prop. 1, Eq. 43", "N / U^{H/L}", shares[50_000],
                  at_least=0.99, at_most=1.0, note=f"an approximation for U much smaller than A^L: {text}")  # fmt: skip


# --- Theorem 1 --------------------------------------------------------------------------------------------------------


def theorem_1(quick: bool) -> Proof:
    """Iterate exact values with beta_t = sqrt(t + 1) / omega on three trees, and compare the gap with Eq. 12 at each T.

    The values are exact, so the term of m samples is absent. omega depends on T: all T are run at once, (R, A^h, A).
    """
    horizons = torch.tensor([2**k for k in range(1, 13 if quick else 15)])
    found = {name: _iterate(base, rewards, horizons) for name, (base, rewards) in trees().items()}
    share = max((gaps / bounds).max().item() for gaps, bounds, *_ in found.values())
    averaged = max(average for *_, average, _ in found.values())
    fall = max(fall for *_, fall in found.values())
    first = {name: next((int(T) for T, b in zip(horizons, bounds, strict=True) if b < 1), None)
             for name, (_, bounds, *_) in found.items()}  # fmt: skip
    note = f"T = 2 to {horizons[-1]:,}; the bound is below r_max first at T = " + ", ".join(
        f"{T if T else '-'} ({name})" for name, T in first.items()
    )
    results = [
        Result("The gap is within the bound at every T", "Thm 1, Eq. 12", "gap / bound, largest", share, at_most=1.0,
               note=note),
        Result("The weighted mean of gaps is within the bound", "App. B.2, Eq. 25", "mean / bound, largest", averaged,
               at_most=1.0, note="also without the factor H of Lemma 3: 1 / C_ST is the probability of the best leaf"),
        Result("No update lowers the reward", "Eq. 4", "largest fall of J", fall, at_most=1e-13,
               note="so the last policy keeps the bound as well"),
    ]  # fmt: skip
    drawn = {name: (gaps, bounds) for name, (gaps, bounds, *_) in found.items()}
    return Proof(results, {"horizons": horizons, "lines": drawn})


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


def _iterate(base: tree.Policy, rewards: Tensor, horizons: Tensor) -> tuple[Tensor, Tensor, float, float]:
    """Smallest gap over t < T and the bound, (R,) each; the largest share of Eq. 25, and the largest fall of J.

    r_max is 1. omega = sqrt(2 log C / log T).
    """
    H = len(base)
    log_C = math.log(tree.concentrability(base, rewards))
    best = rewards.max()
    log_T = horizons.double().log()
    omega = (2 * log_C / log_T).sqrt()
    policy = [step.expand(len(horizons), *step.shape) for step in base]
    smallest = torch.full_like(omega, math.inf)
    last = torch.full_like(omega, -math.inf)
    paid, squares, fall = (torch.zeros_like(omega) for _ in range(3))
    for t in range(int(horizons[-1])):
        running = t < horizons
        values = tree.values(policy, rewards.expand(len(horizons), -1))
        J = values[0][:, 0]
        # 1 / beta_t
        gap = best - J
        rate = omega / math.sqrt(t + 1)
        smallest = torch.where(running, torch.minimum(smallest, gap), smallest)
        fall = torch.where(running, torch.maximum(fall, last - J), fall)
        paid = paid + running * rate * gap
        squares = squares + running * rate.square()
        policy = tree.reweighted(policy, values, (1 / rate)[:, None, None])
        last = J
    bounds = 2 * H * (log_T * log_C / horizons).sqrt()
    return smallest, bounds, (paid / (log_C + H * squares / 2)).max().item(), fall.max().item()


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
    model = decoder(3, 4, uniform=False)
    rewards = torch.rand(A**H, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    base = _policy_of(model, A, H)
    policy = base
    guides = list[tuple[TreeValue, float]]()
    off = []
    means = []
    for t in range(4):
        values = tree.values(policy, rewards)
        guides.append((TreeValue(values, A), 0.3 * math.sqrt(t + 1)))
        policy = tree.reweighted(policy, values, guides[-1][1])
        how = Search(beams=1, successors=A, chunk=1, temperature=1.0, likeliest=True)
        found, _ = guided(model, trials, how, H, guides, valued=True)
        mean, error = _expected_reward(found, rewards, A)
        truth = tree.values(policy, rewards)[0].item()
        means.append(f"{truth:.3f}")
        off.append(abs(mean - truth) / error)
    note = (
        f"J after 0 to 4 updates: {tree.values(base, rewards)[0].item():.3f}, {', '.join(means)}; {trials:,} searches"
    )
    return Result("The search samples from the reweighted base policy", "Eq. 8", "error of J, in standard errors",
                  max(off), at_most=4.5, note=note)  # fmt: skip


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
    weights = torch.tensor([[c.value for c in of_one] for of_one in found], dtype=torch.float64).softmax(-1)
    leaves = torch.tensor([[tree.number(c.tokens, A) for c in of_one] for of_one in found])
    means = (weights * rewards[leaves]).sum(-1)
    return means.mean().item(), means.std().item() / math.sqrt(len(means))


def toy_rewards() -> Tensor:
    """Rewards of the 16 leaves: random ones up to 0.6, and 1 in the half of the tree with the lower mean."""
    rewards = torch.rand(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.6
    halves = rewards.view(2, 8)
    halves[int(halves.mean(1).argmin()), 5] = 1.0
    return rewards


def _toy_tree() -> list[Result]:
    """Fig. 2: of the 30 nodes a search that keeps the best of two tokens sees 8, and finds the best leaf."""
    base, rewards = trees()["two tokens"]
    model = decoder(2, 5, uniform=True)
    how = Search(beams=1, successors=2, chunk=1, likeliest=True)
    policy = base
    guides = list[tuple[TreeValue, float]]()
    reached = []
    visited = []
    for t in range(12):
        values = tree.values(policy, rewards)
        guides.append((TreeValue(values, 2), math.sqrt(t + 1)))
        found, cost = guided(model, 1, how, 4, guides, valued=True)
        chosen = max(found[0], key=lambda c: rewards[tree.number(c.tokens, 2)].item())
        reached.append(rewards[tree.number(chosen.tokens, 2)].item())
        visited.append(cost.tokens)
        policy = tree.reweighted(policy, values, guides[-1][1])
    first = next((t for t, r in enumerate(reached, 1) if r == 1.0), math.inf)
    everything = sum(2**h for h in range(1, 5))
    return [
        Result("Guided search visits 8 nodes of the toy tree", "Fig. 2", "largest difference from 8",
               max(abs(nodes - 8) for nodes in visited), at_most=0,
               note=f"of {everything}; best-of-16 of all leaves has {4 * 16} tokens, as it shares no prefixes"),
        Result("Its values find the best leaf after some updates", "Fig. 2", "last reward", reached[-1], at_least=1.0,
               note=f"rewards of the searches: {', '.join(f'{r:.2f}' for r in reached)}; first with {first} values"),
    ]  # fmt: skip
