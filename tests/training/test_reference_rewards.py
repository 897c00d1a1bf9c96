"""Calibrated rewards: against direct counting, and by the distributions that training leads to."""

import json
import math
import statistics
from dataclasses import replace

import pytest
import torch
from support.helpers import WORDS, tiny_model

from nlgrpo import cli, train
from nlgrpo.calibration.transforms import parse_transform
from nlgrpo.config import validate
from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import CalibrationConfig, Config, LossConfig, RewardConfig, RolloutConfig
from nlgrpo.engine.backends import NativeEngine
from nlgrpo.engine.rollouts.reference_rollouts import load_rollouts
from nlgrpo.model import decoder
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training import policy
from nlgrpo.training.build import build_setup
from nlgrpo.training.rollouts import Rollouts
from nlgrpo.training.trainer import Progress

pytestmark = pytest.mark.usefixtures("no_figures")

PROMPTS = ["w1 w2", "w3", "w4 w5 w6", "w7"]
REWARDS = """
def first(completion_ids, **_):
    # The reward of a token is its number modulo 8: some tie.
    return [float(ids[0] % 8) for ids in completion_ids]

def mostly(completion_ids, **_):
    return [None if ids[0] % 5 == 0 else float(ids[0]) for ids in completion_ids]

def of_its_task(prompts, completion_ids, **_):
    # Not for "w3", and not for every completion of the other prompts.
    rows = zip(prompts, completion_ids)
    return [None if p == "w3" or ids[0] % 5 == 0 else float(ids[0] % 8) for p, ids in rows]

def never(completion_ids, **_):
    return [None for _ in completion_ids]

def fails(completion_ids, **_):
    raise ConnectionError("down")
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("held")
    tiny_model(root / "model", "gpt2", scale=0.6)
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    (root / "rewards.py").write_text(REWARDS)
    return root


def options(root, **more):
    """One token per completion, so all strings can be enumerated."""
    given = {
        "model.path": root / "model",
        "model.dtype": "float64",
        "data.source": root / "prompts.jsonl",
        "data.evaluation": root / "prompts.jsonl",
        "rollout.prompts": 4,
        "rollout.samples": 16,
        "rollout.max_new_tokens": 1,
        "rewards.first.function": f"{root / 'rewards.py'}:first",
        "rewards.first.objective": "mean",
        "loss.beta": 1.0,
        "loss.kl_in": "reward",
        "train.steps": 2,
        "evaluation.prompts": 0,
    }
    given |= {name.replace("__", "."): value for name, value in more.items()}
    return ["blank", *(part for name, value in given.items() for part in (f"--{name}", str(value)))]


@pytest.fixture(scope="module")
def rollouts(root):
    assert cli.main(["rollout", *options(root), "--samples", "50", "--out", str(root / "rollouts")]) == 0
    return root / "rollouts"


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def calibrated_of(root, **more):
    """Data of the first step of a run: rollout, rewards, calibrated rewards, and the numbers of the reference."""
    cfg, _ = from_arguments(options(root, **more))
    run = build_setup(cfg, Ranks(0, 1, torch.device("cpu")))
    learner = policy.load_learner(run)
    progress = Progress(beta=cfg.loss.beta)
    rollouts = Rollouts(run, run.sampler, learner, NativeEngine(learner.model), progress, lambda: None)
    drawn = rollouts.next()
    ref = learner.reference_logprobs(drawn.rollout)
    scores, calibrated = rollouts.score(drawn, ref)
    return run, drawn.batch, drawn.rollout, scores, calibrated, ref


# --- by counting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "phi"), [("identity", lambda u: u), ("exp:3", lambda u: math.exp(3 * u))])
def test_a_calibrated_reward_is_the_share_of_samples_that_it_beats(root, rollouts, text, phi):
    more = {"rewards__first__transform": text, "calibration__rollouts": rollouts}
    _, batch, _, scores, calibrated, _ = calibrated_of(root, **more)
    kept = load_rollouts(rollouts)
    for p, ids in enumerate(batch.ids):
        theirs = kept.rewards["first"][kept.row(ids)].tolist()
        assert len(theirs) == 50
        for m, r in enumerate(scores.values["first"][p].tolist()):
            u = sum((r > x) + (r == x) / 2 for x in theirs) / 50
            assert float(calibrated["first"].ranks[p, m]) == pytest.approx(u, abs=1e-12)
            assert float(calibrated["first"].values[p, m]) == pytest.approx(phi(u), rel=1e-12)


@pytest.mark.parametrize("by", ["pooled", "median"])
def test_other_calibrations_count_other_samples(root, rollouts, by):
    """Pooled: the samples of all prompts. Median: the logistic function of the distance to the prompt's median."""
    more = {"rewards__first__transform": "exp:3", "calibration__rollouts": rollouts}
    _, batch, _, scores, calibrated, _ = calibrated_of(root, **more, calibration__by=by)
    *_, usual, _ = calibrated_of(root, **more)
    kept = load_rollouts(rollouts)
    pool = kept.rewards["first"].flatten().tolist()
    assert len(pool) == 50 * len(PROMPTS)
    for p, ids in enumerate(batch.ids):
        median = statistics.median(kept.rewards["first"][kept.row(ids)].tolist())
        for m, r in enumerate(scores.values["first"][p].tolist()):
            pooled = sum((r > x) + (r == x) / 2 for x in pool) / len(pool)
            u = pooled if by == "pooled" else 1 / (1 + math.exp(median - r))
            assert float(calibrated["first"].values[p, m]) == pytest.approx(math.exp(3 * u), rel=1e-12)
    assert torch.equal(calibrated["first"].ranks, usual["first"].ranks)  # the win rate is in the prompt all the same
    assert not torch.allclose(calibrated["first"].values, usual["first"].values)


@pytest.mark.parametrize("bound", [False, True])
def test_a_vbon_reward_counts_in_a_total_order(root, rollouts, bound):
    from nlgrpo.calibration.variational import string_keys

    text = "vbon:4" + ":bound" * bound
    _, batch, rollout, scores, calibrated, ref = calibrated_of(
        root, rewards__first__transform=text, calibration__rollouts=rollouts
    )
    kept = load_rollouts(rollouts)
    own = rollout.completion_ids()
    for p, ids in enumerate(batch.ids):
        row = kept.row(ids)
        theirs = [
            (r, int(string_keys([y])[0]))
            for r, y in zip(kept.rewards["first"][row].tolist(), kept.ids(row), strict=True)
        ]
        for m in range(16):
            y = own[p * 16 + m]
            place = (float(scores.values["first"][p, m]), int(string_keys([y])[0]))
            F = (sum(x < place for x in theirs) + 0.5) / 51
            log_p = float(ref[p * 16 + m].sum())
            truth = 3 * math.log(F) if bound else min(0, math.log((F + math.exp(log_p)) ** 4 - F**4)) - log_p
            assert float(calibrated["first"].values[p, m]) == pytest.approx(truth, rel=1e-9)


def test_rollouts_of_another_reward_are_refused(root, rollouts):
    function = f"{root / 'rewards.py'}:mostly"
    more = {"rewards__first__function": function, "rewards__first__transform": "identity"}
    with pytest.raises(ValueError, match=r"reward 'first' is .*:first x 1.0 in the rollouts, but .*:mostly x 1.0"):
        calibrated_of(root, **more, calibration__rollouts=rollouts)


def test_rollouts_scored_with_other_columns_are_refused(root, tmp_path):
    """For instance an answer that was corrected since."""
    rows = [json.loads(line) | {"answer": i} for i, line in enumerate((root / "prompts.jsonl").open())]
    source, folder = tmp_path / "rows.jsonl", tmp_path / "rollouts"
    more = {"data__source": source, "rewards__first__transform": "identity", "calibration__rollouts": folder}
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["rollout", *options(root, data__source=source), "--samples", "4", "--out", str(folder)]) == 0
    calibrated_of(root, **more)
    source.write_text("".join(json.dumps(row | {"answer": max(row["answer"], 1)}) + "\n" for row in rows))
    with pytest.raises(ValueError, match=rf"columns of 1 of {len(rows)} prompts have changed since the rollouts"):
        calibrated_of(root, **more)
    assert cli.main(["rollout", *options(root, data__source=source), "--samples", "4", "--out", str(folder)]) == 0
    calibrated_of(root, **more)


def test_abstentions_are_not_calibrated(root, rollouts):
    run, batch, rollout, scores, calibrated, ref = calibrated_of(
        root, rewards__first__transform="identity", calibration__rollouts=rollouts
    )
    absent = torch.arange(scores.values["first"].numel()).view_as(scores.values["first"]) % 3 == 1
    rewards = {"first": scores.values["first"].masked_fill(absent, torch.nan)}
    found = run.references.calibrate(rewards, batch, rollout, ref, None)["first"]
    for ours, whole in ((found.values, calibrated["first"].values), (found.ranks, calibrated["first"].ranks)):
        assert torch.equal(ours.isnan(), absent)
        assert torch.equal(ours[~absent], whole[~absent])
    groups = torch.arange(len(absent)) == 1
    dropped = found.without(groups)
    assert dropped.values[groups].isnan().all()
    assert dropped.ranks[groups].isnan().all()
    assert torch.equal(dropped.values[~groups].isnan(), absent[~groups])


def of_task(root, **more):
    return {"rewards__first__function": f"{root / 'rewards.py'}:of_its_task", **more}


@pytest.fixture(scope="module")
def partly_scored(root):
    given = options(root, **of_task(root))
    assert cli.main(["rollout", *given, "--samples", "50", "--out", str(root / "partly")]) == 0
    return root / "partly"


@pytest.mark.parametrize(
    ("text", "by"), [("log", "prompt"), ("exp:3", "median"), ("exp:3", "pooled"), ("vbon:4:bound", "prompt")]
)
def test_ranks_are_among_the_samples_of_the_reference_that_have_the_reward(root, partly_scored, text, by):
    """Others count nowhere, and a prompt without any has no rank. Log clamps at one sample of those that count."""
    from nlgrpo.calibration.variational import string_keys

    more = of_task(root, rewards__first__transform=text, calibration__rollouts=partly_scored, calibration__by=by)
    _, batch, rollout, scores, calibrated, _ = calibrated_of(root, **more)
    kept, own = load_rollouts(partly_scored), rollout.completion_ids()
    pool = [r for r in kept.rewards["first"].flatten().tolist() if r == r]
    sizes = set()
    for p, ids in enumerate(batch.ids):
        row = kept.row(ids)
        theirs = [
            (r, int(string_keys([y])[0]))
            for r, y in zip(kept.rewards["first"][row].tolist(), kept.ids(row), strict=True)
            if r == r
        ]
        sizes.add(len(theirs))
        numbers = [r for r, _ in theirs]
        for m, r in enumerate(scores.values["first"][p].tolist()):
            found, rank = calibrated["first"].values[p, m], calibrated["first"].ranks[p, m]
            if r != r:
                assert found.isnan()
                assert rank.isnan()
                continue
            u = sum((r > x) + (r == x) / 2 for x in numbers) / len(numbers)
            place = (r, int(string_keys([own[p * 16 + m]])[0]))
            F = (sum(x < place for x in theirs) + 0.5) / (len(theirs) + 1)
            pooled = sum((r > x) + (r == x) / 2 for x in pool) / len(pool)
            expected = {
                "log": math.log(max(u, 0.5 / len(numbers))),
                "exp:3": math.exp(
                    3 * (pooled if by == "pooled" else 1 / (1 + math.exp(statistics.median(numbers) - r)))
                ),
                "vbon:4:bound": 3 * math.log(F),
            }
            assert float(rank) == pytest.approx(u, abs=1e-12)
            assert float(found) == pytest.approx(expected[text], rel=1e-9)
    assert len(sizes) > 2
    assert 0 in sizes


def test_a_run_calibrates_a_reward_that_abstains_on_the_reference(root, tmp_path):
    """Drawn samples; the prompt of the other task trains nothing."""
    more = of_task(root, rewards__first__transform="identity", calibration__missing="draw", calibration__samples=9)
    run, *_ = calibrated_of(root, **more)
    sizes = [int((~one.rewards["first"].isnan()).sum()) for one in run.references.known.values()]
    assert sorted(sizes)[0] == 0
    assert len(set(sizes)) > 1
    assert train.main(options(root, **more, train__steps=1, train__out=tmp_path / "run")) == 0
    [row] = metrics_of(tmp_path / "run")
    assert 0.25 < row["rewards/first/abstained"] < 0.75
    assert 0 < row["win_rate/first"] < 1


def test_a_reward_without_samples_of_the_reference_is_refused(root, tmp_path, capsys):
    more = {"rewards__first__function": f"{root / 'rewards.py'}:never", "rewards__first__transform": "identity"}
    given = options(root, rewards__first__function=more["rewards__first__function"])
    assert cli.main(["rollout", *given, "--samples", "4", "--out", str(tmp_path / "never")]) == 0
    with pytest.raises(ValueError, match=r"'first' scored at most 0 samples of a prompt; a transform needs 2 .*remove"):
        calibrated_of(root, **more, calibration__rollouts=tmp_path / "never")
    more |= {"rewards__first__function": f"{root / 'rewards.py'}:fails", "rewards__first__on_error": "skip"}
    drawn = options(root, **more, calibration__missing="draw", calibration__samples=4, train__out=tmp_path / "fails")
    assert train.main(drawn) == 2
    assert "failed for samples of the reference at 4 of 4 prompts; one of first" in capsys.readouterr().err


def test_a_failed_calibration_stops_the_run_with_a_checkpoint(root, rollouts, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise ValueError("no curve")

    monkeypatch.setattr("nlgrpo.training.reference_rewards.calibrate", fail)
    more = {"rewards__first__transform": "identity", "calibration__rollouts": rollouts}
    assert train.main(options(root, **more, train__out=tmp_path / "run")) == 2
    assert "error: cannot calibrate a reward on samples of the reference: no curve" in capsys.readouterr().err
    assert (tmp_path / "run" / "checkpoints").is_dir()


@pytest.mark.parametrize("transform", ["bon_fp:4", "fp:bop:4.0"])
def test_a_fixed_point_is_that_of_the_weighted_reward(transform, root, rollouts):
    """w Phi - beta KL has the optimum of Phi - beta/w KL."""
    more = {"calibration__rollouts": rollouts, "rewards__first__transform": transform}
    calibrated, half = (
        calibrated_of(root, **more, rewards__first__weight=weight, loss__beta=beta)[4]["first"]
        for weight, beta in ((1.0, 0.5), (0.5, 0.25))
    )
    torch.testing.assert_close(calibrated.values, half.values, rtol=1e-12, atol=0)
    expected = parse_transform(transform, beta=0.5)(calibrated.ranks)
    torch.testing.assert_close(calibrated.values, expected, rtol=1e-12, atol=0)


def test_a_fixed_point_of_cvar_is_linear_up_to_alpha(root, rollouts):
    more = {"calibration__rollouts": rollouts, "rewards__first__transform": "fp:cvar:0.5", "loss__beta": 0.1}
    first = calibrated_of(root, **more)[4]["first"]
    torch.testing.assert_close(first.values, 4 * (first.ranks.clamp(max=0.5) - 0.5), rtol=0, atol=1e-10)


# --- prompts without rollouts -----------------------------------------------------------------------------------------


def test_prompts_without_rollouts_are_reported_before_training(root, tmp_path):
    given = [*options(root), "--samples", "8", "--prompts", "3", "--out", str(tmp_path / "few")]
    assert cli.main(["rollout", *given]) == 0
    more = {"rewards__first__transform": "identity", "calibration__rollouts": tmp_path / "few"}
    with pytest.raises(ValueError, match=r"1 of 4 prompts have no rollouts .*calibration.missing = 'draw'"):
        calibrated_of(root, **more)
    _, batch, _, _, calibrated, _ = calibrated_of(root, **more, calibration__missing="draw")
    kept = load_rollouts(tmp_path / "few")
    (p,) = [p for p, ids in enumerate(batch.ids) if kept.row(ids) is None]
    assert set((calibrated["first"].ranks[p] * 16).round(decimals=9).tolist()) <= set(
        range(17)
    )  # of 8 samples, as the others
    assert calibrated["first"].ranks[p].unique().numel() > 2


def test_drawn_samples_are_the_same_whenever_a_prompt_comes(root, tmp_path):
    more = {"rewards__first__transform": "identity", "calibration__missing": "draw", "calibration__samples": 9}
    once, again = (calibrated_of(root, **more) for _ in range(2))
    assert torch.equal(once[4]["first"].ranks, again[4]["first"].ranks)
    known = {ids: one.rewards["first"] for ids, one in once[0].references.known.items()}
    run, *_ = calibrated_of(root, **more, rollout__prompts=1)
    for ids, one in run.references.known.items():
        assert torch.equal(one.rewards["first"], known[ids])
    assert len(run.references.known) == 1


def test_a_run_that_draws_resumes_bit_for_bit(root, tmp_path):
    more = {"rewards__first__transform": "exp:5", "calibration__missing": "draw", "calibration__samples": 9}
    more |= {"optim__lr": 0.01, "rollout__prompts": 2}
    for name, steps in (("whole", [6]), ("halves", [3, 6])):
        for count in steps:
            given = options(root, **more, train__steps=count, train__out=tmp_path / name)
            assert train.main(given) == 0
    weights = [
        decoder.load(tmp_path / name / "model", dtype=torch.float64).state_dict() for name in ("whole", "halves")
    ]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


# --- where training leads ---------------------------------------------------------------------------------------------


def distributions(folder):
    """pi(y | x) over the tokens, for each prompt, by our decoder (which equals transformers')."""
    model = decoder.load(folder, dtype=torch.float64)
    prompts = [[WORDS.index(word) for word in p.split()] for p in PROMPTS]
    with torch.no_grad():
        logits = [model(torch.tensor(ids), [len(ids)])[-1] for ids in prompts]
    return torch.stack(logits).softmax(-1)


def best_of(p, n):
    """The distribution of the best of n by (token mod 8, key)."""
    from nlgrpo.calibration.variational import string_keys

    keys = string_keys([[y] for y in range(len(WORDS))]).tolist()
    order = sorted(range(len(WORDS)), key=lambda y: (y % 8, keys[y]))
    ordered = p[:, order]
    upto = ordered.cumsum(1)
    out = torch.empty_like(p)
    out[:, order] = upto**n - (upto - ordered).clamp(min=0) ** n
    return out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_vbon_leads_to_the_best_of_n_of_the_reference(root, tmp_path, algorithm):
    """KL(pi | pi_bon), which Eq. 5 minimises, falls to a tenth; plain training on the reward does not reduce it so."""
    reference = distributions(root / "model")
    target = best_of(reference, 4)

    def distance(p):
        return float((p * (p / target.clamp(min=1e-300)).log()).sum(1).mean())

    more = {"calibration__missing": "draw", "calibration__samples": 200, "optim__lr": 0.03, "rollout__samples": 48}
    more |= {"train__steps": 40, "loss__algorithm": algorithm, "critic__lr": 0.02, "critic__whiten": "false"}
    given = options(root, **more, rewards__first__transform="vbon:4", train__out=tmp_path / "vbon")
    assert train.main([*given, "--critic.trunk", "shared"]) == 0
    assert distance(reference) > 0.5
    assert distance(distributions(tmp_path / "vbon" / "model")) < 0.1 * distance(reference)


def test_ctrl_reaches_the_win_rate_of_theorem_3(root, tmp_path):
    """With Phi(u) = u and beta, the density of u becomes e^{u/beta}: the win rate follows, ties counted one half."""
    beta = 0.2
    reference = distributions(root / "model")
    values = torch.arange(len(WORDS), dtype=torch.float64) % 8
    beats = (values[:, None] > values).double() + (values[:, None] == values) / 2
    u = reference @ beats.T
    optimum = reference * (u / beta).exp()
    optimum /= optimum.sum(1, keepdim=True)
    more = {"calibration__missing": "draw", "calibration__samples": 200, "optim__lr": 0.03, "rollout__samples": 48}
    more |= {"train__steps": 40, "loss__beta": beta, "rewards__first__transform": "identity"}
    assert train.main(options(root, **more, train__out=tmp_path / "ctrl")) == 0
    trained = distributions(tmp_path / "ctrl" / "model")
    win = float((trained * u).sum(1).mean())
    assert float((reference * u).sum(1).mean()) == pytest.approx(0.5)
    assert win == pytest.approx(float((optimum * u).sum(1).mean()), abs=0.02)
    logged = metrics_of(tmp_path / "ctrl")
    assert logged[0]["win_rate/first"] == pytest.approx(0.5, abs=0.05)
    assert logged[-1]["win_rate/first"] == pytest.approx(win, abs=0.05)
    assert "rewards/first/mean" in logged[0]


# --- configurations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "loss", "message"),
    [
        ({"transform": "exp:0"}, {}, "rewards.a.transform: exp:0"),
        ({"transform": "idenity"}, {}, "did you mean 'identity'"),
        ({"transform": "vbon:0"}, {}, "expected vbon:N or vbon:N:bound with N >= 1"),
        ({"transform": "vbon:4:up"}, {}, "expected vbon:N or vbon:N:bound"),
        ({"transform": "vbon:4", "objective": "bon:4"}, {}, "needs objective = 'mean', got 'bon:4'"),
        ({"transform": "identity"}, {"beta": 0.0}, "needs loss.beta > 0: with 0"),
        ({"transform": "identity", "objective": "rao", "function": "equal(pattern='a')"}, {}, "takes a similarity"),
        ({"transform": "identity"}, {}, "needs samples of the reference, calibration.rollouts"),
    ],
)
def test_an_invalid_configuration_is_refused(reward, loss, message):
    refused(reward, loss, CalibrationConfig(), message)


@pytest.mark.parametrize(
    ("transform", "calibration", "message"),
    [
        ("vbon:4", {"rollouts": "a", "by": "median"}, "needs calibration.by = 'prompt', got 'median'"),
        ("vbon:4:bound", {"rollouts": "a", "by": "pooled"}, "needs calibration.by = 'prompt', got 'pooled'"),
        ("identity", {"by": "pooled", "missing": "draw"}, "needs the samples of all prompts before training"),
        ("identity", {"rollouts": "a", "by": "pooled", "missing": "draw"}, "with calibration.missing = 'error'"),
    ],
)
def test_a_calibration_that_does_not_fit_is_refused(transform, calibration, message):
    refused({"transform": transform}, {}, CalibrationConfig(**calibration), message)


def refused(reward, loss, calibration, message):
    whole = {"function": "length(target=2, scale=8)", "objective": "mean"} | reward
    cfg = Config(
        rewards={"a": RewardConfig(**whole)},
        calibration=calibration,
        rollout=RolloutConfig(samples=4),
        loss=LossConfig(**{"beta": 1.0} | loss),
    )
    with pytest.raises(ValueError, match=message):
        validate.check_config(cfg)
    plain = replace(cfg, rewards={"a": RewardConfig("length(target=2, scale=8)", "mean")})
    validate.check_config(plain)
