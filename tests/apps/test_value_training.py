"""``nlgrpo value``: targets by recursion, steps against transformers and autograd, toy cases with known values."""

import dataclasses
import json
import signal

import pytest
import torch
from support.helpers import EOS, Job, counted_sums, full_tensors, run_all, run_ranks, tiny_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nlgrpo import cli
from nlgrpo.apps.guided import value_dataset
from nlgrpo.apps.guided import value_training as training
from nlgrpo.apps.guided.value_config import ValueConfig, check_value_config, from_arguments
from nlgrpo.engine import chunked_decoding
from nlgrpo.engine.rollouts.reference_rollouts import load_rollouts
from nlgrpo.losses.gae import lambda_returns
from nlgrpo.model import reward_model
from nlgrpo.model.value_model import kind_of
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.tracking.run_files import read_jsonl

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)
PROMPTS = ["w1 w2", "w3", "w4 w5 w6", "w7", "w8 w9"]
SAMPLES = 12
REWARDS = """
def first(completion_ids, **_):
    return [float(ids[0] % 8) for ids in completion_ids]

def even(completion_ids, **_):
    return [float(ids[0] % 2 == 0) for ids in completion_ids]

def mostly(completion_ids, **_):
    return [None if ids[0] % 5 == 0 else float(ids[0] % 8) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with models, and rollouts of one of them."""
    root = tmp_path_factory.mktemp("work")
    tiny_model(root / "policy", "gpt2", scale=0.6)
    tiny_model(root / "other", "gpt2", seed=1)
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    (root / "rewards.py").write_text(REWARDS)
    assert cli.main(rolled_out(root, "rollouts")) == 0
    return root


def rolled_out(work, out, samples=SAMPLES, **changes):
    options = {
        "model.path": work / "policy",
        "model.dtype": "float64",
        "data.source": work / "prompts.jsonl",
        "rollout.max_new_tokens": 6,
        "rollout.temperature": 3.0,
        "samples": samples,
        "out": work / out,
    }
    options |= {f"rewards.{name}.function": f"{work / 'rewards.py'}:{name}" for name in ("first", "even", "mostly")}
    options |= {name.replace("__", "."): value for name, value in changes.items()}
    return ["rollout", "blank", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]


def arguments(work, out, mode="train", *more, **changes):
    options = {
        "model.path": work / "policy",
        "model.dtype": "float64",
        "data.rollouts": work / "rollouts",
        "data.rewards": "first",
        "evaluation.prompts": 2,
        "train.completions": 9,
        "train.epochs": 2,
        "train.out": work / out,
        "optim.lr": 0.01,
        "optim.eps": 1e-3,
    }
    if mode == "compress":
        del options["data.rewards"]
    options |= {name.replace("__", "."): value for name, value in changes.items()}
    given = []
    for name, value in options.items():
        given += [f"--{name}", *(map(str, value) if isinstance(value, tuple) else (str(value),))]
    return ["value", mode, *given, *more]


def config(work, out="none", mode="train", **changes):
    return from_arguments(arguments(work, out, mode, **changes)[2:], compress=mode == "compress")


def by_hand(values, reward, gamma, lam):
    """The lambda-return of every prefix, from its definition."""
    H = len(values) - 1
    found = [0.0] * H + [reward]
    for h in reversed(range(H)):
        found[h] = reward if h == H - 1 else gamma * ((1 - lam) * values[h + 1] + lam * found[h + 1])
    return found


# --- targets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.0), (0.9, 0.7), (0.5, 1.0), (0.0, 0.5)])
def test_lambda_returns_are_those_of_the_recursion(gamma, lam):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 7, dtype=torch.float64, generator=generator)
    rewards, lengths = torch.randn(4, dtype=torch.float64, generator=generator), torch.tensor([6, 1, 4, 2])
    found = lambda_returns(values, rewards, lengths, gamma=gamma, lam=lam)
    for i, H in enumerate(lengths.tolist()):
        expected = by_hand(values[i, : H + 1].tolist(), rewards[i].item(), gamma, lam)
        assert found[i].tolist() == pytest.approx(expected + [0.0] * (6 - H))


# --- the update -------------------------------------------------------------------------------------------------------


def of_prefixes(model, prompt, completion):
    """(H + 1,) of transformers' classifier, each prefix a text of its own, whose last token it scores."""
    texts = [prompt + completion[:h] for h in range(len(completion) + 1)]
    return torch.stack([model(torch.tensor([text])).logits[0, 0] for text in texts])


def as_classifier(run, folder):
    """The run's model as transformers has it, scoring the last token of single texts."""
    reward_model.save(run.model, folder, tokenizer=run.tokenizer, pad=None, max_length=64)
    return AutoModelForSequenceClassification.from_pretrained(folder).double().eval()


SETTINGS = {
    "reward": {},
    "GAE": {"loss__lam": 0.6, "loss__gamma": 0.9},
    "TD": {"loss__lam": 0},
    "cross-entropy": {"loss__kind": "bce", "data__rewards": "even", "loss__lam": 0.5},
    "weighted": {"data__rewards": ("first", "even"), "data__weights": (0.5, -2.0)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_those_of_plain_pytorch(work, tmp_path, name):
    run = training.build_value_trainer(config(work, **SETTINGS[name]), ALONE)
    loss = run.config.loss
    theirs = as_classifier(run, tmp_path / "begun")
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01, eps=1e-3, weight_decay=0.0)
    for step in range(2):
        total, states = 0.0, 0
        for i in (rows := run.rows(step)):
            raw = of_prefixes(theirs, run.outcomes.prompts[i], run.outcomes.completions[i])
            values = raw.sigmoid() if loss.kind == "bce" else raw
            reward = run.outcomes.rewards[i].item()
            targets = torch.tensor(by_hand(values.tolist(), reward, loss.gamma, loss.lam), dtype=torch.float64)
            entropy = -(targets * raw.sigmoid().log() + (1 - targets) * (1 - raw.sigmoid()).log())
            total = total + (entropy if loss.kind == "bce" else (raw - targets).square()).sum()
            states += len(raw)
        optimizer.zero_grad()
        (total / states).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + torch.cos(torch.tensor(torch.pi * step / run.steps)).item()) / 2
        optimizer.step()
        stats = run.update(rows)
        run.progress.step += 1
        assert stats["loss"] == pytest.approx((total / states).item(), rel=1e-9)
    after = as_classifier(run, tmp_path / "after")
    for (key, ours), (_, truth) in zip(after.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-7, atol=1e-8, msg=key)


def test_the_head_alone_is_trained(work, tmp_path):
    """SPI, Remark 3.2: AdamW on the head of transformers' classifier; all other weights are those of the policy."""
    settings = {"train__head_only": "True", "optim__weight_decay": 0.1}
    run = training.build_value_trainer(config(work, **settings), ALONE)
    theirs = as_classifier(run, tmp_path / "begun")
    optimizer = torch.optim.AdamW(theirs.score.parameters(), lr=0.01, eps=1e-3, weight_decay=0.1)
    rows = run.rows(0)
    losses = [
        (of_prefixes(theirs, run.outcomes.prompts[i], run.outcomes.completions[i]) - run.outcomes.rewards[i]).square()
        for i in rows
    ]
    torch.cat(losses).mean().backward()
    torch.nn.utils.clip_grad_norm_(theirs.score.parameters(), 1.0)
    optimizer.step()
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    run.update(rows)
    changed = {name for name, p in run.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"head.weight"}
    torch.testing.assert_close(run.model.head.weight, theirs.score.weight, rtol=1e-7, atol=1e-8)
    assert cli.main(arguments(work, "head", **settings)) == 0
    text, _ = reward_model.load_reward_model(str(work / "head"), dtype=torch.float64)
    policy, _ = reward_model.load_reward_model(str(work / "policy"), dtype=torch.float64)
    for (name, ours), (_, start) in zip(text.named_parameters(), policy.named_parameters(), strict=True):
        assert torch.equal(ours, start) == (name != "head.weight"), name


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_held_out_completions_are_evaluated_by_their_discounted_rewards(work, gamma):
    """The targets do not depend on the values, for any lambda."""
    run = training.build_value_trainer(config(work, loss__lam=0.6, loss__gamma=gamma), ALONE)
    run.update(run.rows(0))
    results, held, residuals = run.evaluate(), run.held_out, []
    for prompt, completion, reward in zip(held.prompts, held.completions, held.rewards.tolist(), strict=True):
        H = len(completion)
        for h in range(H + 1):
            tokens = [*prompt, *completion[:h]]
            with torch.no_grad():
                value = run.model(torch.tensor(tokens), [len(tokens)])[-1, 0].item()
            residuals.append((value - gamma ** max(0, H - 1 - h) * reward) ** 2)
    assert results["mse"] == pytest.approx(sum(residuals) / len(residuals), rel=1e-6)


def test_micro_batches_change_nothing(work):
    def curve(tokens):
        run = training.build_value_trainer(config(work, train__micro_batch_tokens=tokens, loss__lam=0.5), ALONE)
        found = [run.update(run.rows(step)) for step in range(3)]
        return found, run.evaluate()

    (ours, results), (truth, expected) = curve(1), curve(10**6)
    for mine, its in zip(ours, truth, strict=True):
        assert mine == pytest.approx(its, rel=1e-9)
    assert results["mse"] == pytest.approx(expected["mse"], rel=1e-9)


def of_a_rank(work, ranks, mode, replicate=1):
    how = {"compress__values": (work / "other", work / "policy")} if mode == "compress" else {"loss__lam": 0.5}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            training.reward_model, "load_reward_model", with_a_head(training.reward_model.load_reward_model)
        )
        run = training.build_value_trainer(
            config(work, mode=mode, train__micro_batch_tokens=30, parallel__replicate=replicate, **how), ranks
        )
    with counted_sums() as counts:
        found = [run.update(run.rows(step)) for step in range(3)]
    assert counts["sums"] == (9 if replicate > 1 else 0)  # of two blocks and the rest, once per step
    assert counts["backward"] > 3
    found.append(run.update([0]))  # one completion for two ranks: one of them has nothing to do
    results = run.evaluate()
    return found, {k: results[k] for k in ("states", "mse")}, full_tensors(run.model)


def with_a_head(load):
    """Causal models whose new heads count as trained ones, as teachers need."""
    return lambda *args, **options: (load(*args, **options)[0], True)


def in_a_rank(rank, work, *how):
    torch.save(of_a_rank(work, Ranks(rank, 2, CPU), *how), work / f"{rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "replicate"), [("train", 1), ("compress", 1), ("train", 2)])
def test_two_ranks_equal_one(work, mode, replicate):
    """Also if a rank has fewer micro-batches, and with teachers: each forward pass is collective."""
    run_ranks(in_a_rank, work, mode, replicate)
    truth, results, weights = of_a_rank(work, ALONE, mode)
    for rank in range(2):
        ours, found, parameters = torch.load(work / f"{rank}.pt", weights_only=False)
        for mine, its in zip(ours, truth, strict=True):
            assert mine == pytest.approx(its, rel=1e-9, abs=1e-12)
        assert found == pytest.approx(results, rel=1e-9)
        torch.testing.assert_close(parameters, weights, rtol=1e-9, atol=1e-11)


# --- what is learned --------------------------------------------------------------------------------------------------


def spread(rollouts, known):
    """Explained variance of the best prediction of "first" from the prompt alone, or also from the first token."""
    groups, values = {}, []
    for (prompt, own), rewards in zip(rollouts.tokens(), rollouts.reward("first").tolist(), strict=True):
        for completion, value in zip(own, rewards, strict=True):
            groups.setdefault((tuple(prompt), completion[0] if known else None), []).append(value)
            values.append(value)
    mean = sum(values) / len(values)
    inside = sum((v - sum(g) / len(g)) ** 2 for g in groups.values() for v in g)
    return 1 - inside / sum((v - mean) ** 2 for v in values)


def test_a_value_converges_to_the_expected_reward(work):
    """The first token determines the reward: before it V is the mean of the prompt, after it the reward."""
    run = training.build_value_trainer(
        config(work, evaluation__prompts=0, train__epochs=150, train__completions=60), ALONE
    )
    for step in range(run.steps):
        run.update(run.rows(step))
        run.progress.step += 1
    run.held_out = run.outcomes
    results = run.evaluate()
    rollouts = load_rollouts(work / "rollouts")
    assert spread(rollouts, True) == 1
    assert [part["explained_variance"] > 0.9 for part in results["parts"]] == [False, True, True, True, True]
    batches = run.batches(run.outcomes, range(len(run.outcomes)))
    found = torch.cat([training.values_of(batch, run.model)[batch.offset == 0] for batch in batches]).detach()
    rows = torch.cat([batch.row[batch.offset == 0] for batch in batches])
    target = run.outcomes.rewards[rows]
    explained = 1 - ((found - target).square().sum() / (target - target.mean()).square().sum()).item()
    assert explained == pytest.approx(spread(rollouts, False), abs=0.03)


@pytest.mark.slow
def test_one_model_for_the_sum_of_two(work, capsys):
    for out, reward in (("one", "first"), ("two", "even")):
        assert cli.main(arguments(work, out, data__rewards=reward, train__epochs=8)) == 0
    betas = (1.0, 0.25)
    values = {"compress__values": (work / "one", work / "two"), "compress__betas": betas}
    run = training.build_value_trainer(config(work, mode="compress", **values), ALONE)
    teachers = [AutoModelForSequenceClassification.from_pretrained(work / n / "model").double() for n in ("one", "two")]
    for teacher in teachers:
        teacher.config.pad_token_id = None
    for batch in run.batches(run.outcomes, range(3)):
        found = run.targets(run.outcomes, batch, torch.zeros(len(batch.row)), 1.0)
        for i in batch.row.unique().tolist():
            each = [of_prefixes(t, run.outcomes.prompts[i], run.outcomes.completions[i]) for t in teachers]
            expected = sum(x / beta for x, beta in zip(each, betas, strict=True))
            torch.testing.assert_close(found[batch.row == i], expected.detach(), rtol=1e-6, atol=1e-6)
    command = arguments(work, "both", "compress", model__path=work / "one", train__epochs=30, **values)
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert f"{work / 'one'}/1+{work / 'two'}/0.25" in "".join(shown.split())  # the plan breaks lines
    results = json.loads((work / "both" / "value.json").read_text())
    assert results["after"]["mse"] < 0.5 * results["before"]["mse"]
    completions = value_dataset.load_outcomes([str(work / "rollouts")], run.tokenizer, max_length=64).abstained
    assert completions > 0 == run.outcomes.abstained  # no reward is read


def test_the_exported_model_is_read_by_the_search(work):
    for kind, reward in (("mse", "first"), ("bce", "even")):
        assert cli.main(arguments(work, f"of {kind}", loss__kind=kind, data__rewards=reward)) == 0
        model, trained = reward_model.load_reward_model(str(work / f"of {kind}"), dtype=torch.float64)
        assert (trained, kind_of(model)) == (True, kind)
        theirs = AutoModelForSequenceClassification.from_pretrained(work / f"of {kind}" / "model").double().eval()
        theirs.config.pad_token_id = None
        value, prompt, chunk = chunked_decoding.ModelValue("value", model, 8), [4, 5, 6], [7, 8]
        value.begin([prompt])
        raw = theirs(torch.tensor([prompt + chunk])).logits[0]
        expected = raw.sigmoid() if kind == "bce" else raw
        torch.testing.assert_close(value.score([0], [chunk]), expected.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_runs_of_older_versions_resume(work, capsys):
    """Their config.json lacks the keys that were added since; another value of such a key is another run."""
    assert cli.main(arguments(work, "older")) == 0
    file = work / "older" / "config.json"
    saved = json.loads(file.read_text())
    assert saved["data"].pop("drop_equal") is saved["train"].pop("head_only") is False
    file.write_text(json.dumps(saved))
    capsys.readouterr()
    assert cli.main(arguments(work, "older", train__head_only="True")) == 2
    assert "train.head_only: False -> True" in capsys.readouterr().err
    assert cli.main(arguments(work, "older")) == 0
    assert "resuming from step" in capsys.readouterr().out
    assert json.loads(file.read_text())["train"]["head_only"] is False


def test_a_run_resumes_bit_for_bit(work):
    more = {"train__checkpoint_every": 2, "evaluation__every": 3, "train__epochs": 3, "loss__lam": 0.5}
    update = "nlgrpo.training.scalar_heads:ScalarHeadTrainer.update"
    orders = {"truth": (), "term": (update, 4, signal.SIGTERM), "kill": (update, 6)}
    command = {"main": "nlgrpo.cli:main"}
    jobs = [Job(arguments(work, name, **more), *order, **command) for name, order in orders.items()]
    jobs += [Job(arguments(work, name, **more), **command) for name in ("term", "kill")]
    truth, term, kill, *again = run_all(jobs)
    assert (truth.status, term.status, kill.status) == (0, 0, -signal.SIGKILL), truth.output + term.output
    for name, ended in zip(("term", "kill"), again, strict=True):
        assert "resuming from step 4" in ended.output, ended.output
        for file in ("value.json", "model/model.safetensors"):
            assert (work / name / file).read_bytes() == (work / "truth" / file).read_bytes()
    assert "held_out/explained_variance" in read_jsonl(work / "kill" / "metrics.jsonl")[2]


def test_a_completion_without_a_token_is_one_state(work):
    """A completion may have no tokens in another tokenizer."""
    run = training.build_value_trainer(config(work), ALONE)
    bare = dataclasses.replace(run.held_out, completions=[[], *run.held_out.completions[1:]])
    run.held_out = bare
    found = run.evaluate()
    assert found["states"] == sum(len(completion) + 1 for completion in bare.completions)
    assert sum(part["states"] for part in found["parts"]) == found["states"]


# --- data -------------------------------------------------------------------------------------------------------------


def test_outcomes_are_the_drawn_completions(work):
    tokenizer = AutoTokenizer.from_pretrained(work / "policy")
    rollouts = load_rollouts(work / "rollouts")
    found = value_dataset.load_outcomes([str(work / "rollouts")], tokenizer, rewards=["first"], max_length=64)
    assert [tokenizer.decode(ids) for ids in found.prompts[::SAMPLES]] == PROMPTS
    for row in range(len(PROMPTS)):
        assert found.completions[row * SAMPLES : (row + 1) * SAMPLES] == rollouts.ids(row)
    assert found.rewards.tolist() == [float(ids[0] % 8) for ids in found.completions]
    some = value_dataset.load_outcomes([str(work / "rollouts")], tokenizer, rewards=["mostly", "first"], max_length=64)
    abstained = sum(ids[0] % 5 == 0 for ids in found.completions)
    assert (some.abstained, len(some)) == (abstained, len(found) - abstained)
    assert f"{abstained} dropped because a reward abstained" in repr(some)
    short = value_dataset.load_outcomes([str(work / "rollouts")] * 2, tokenizer, rewards=["first"], max_length=8)
    assert short.too_long > 0
    assert len(short) + short.too_long == 2 * len(found)
    assert all(len(p) + len(c) <= 8 for p, c in zip(short.prompts, short.completions, strict=True))


def test_prompts_of_equal_rewards_are_dropped(work, capsys):
    """IRO, H.4: what is all right or all wrong is not trained on. Held-out prompts stay."""
    tokenizer = AutoTokenizer.from_pretrained(work / "policy")
    found = value_dataset.load_outcomes([str(work / "rollouts")], tokenizer, rewards=["even"], max_length=64)
    rewards = found.rewards.view(len(PROMPTS), SAMPLES).clone()
    rewards[1], rewards[3], rewards[4, 1:] = 1.0, 0.0, rewards[4, 0]
    rewards[4, 5] = 1 - rewards[4, 0]
    kept = [i for i, own in enumerate(rewards) if 0 < own.sum() < SAMPLES]
    assert 1 not in kept
    assert 3 not in kept
    assert 4 in kept
    mixed = dataclasses.replace(found, rewards=rewards.flatten()).mixed()
    assert [tokenizer.decode(ids) for ids in mixed.prompts] == [PROMPTS[i] for i in kept for _ in range(SAMPLES)]
    assert mixed.rewards.tolist() == rewards[kept].flatten().tolist()
    assert mixed.known == found.known
    assert mixed.equal == (len(PROMPTS) - len(kept)) * SAMPLES
    assert f"{mixed.equal} dropped because all of their prompt have the same reward" in repr(mixed)
    run = training.build_value_trainer(config(work, data__rewards="even", data__drop_equal="True"), ALONE)
    plain = training.build_value_trainer(config(work, data__rewards="even"), ALONE)
    assert run.held_out.completions == plain.held_out.completions
    assert run.outcomes.completions == plain.outcomes.mixed().completions
    (work / "one.py").write_text("def one(completion_ids, **_):\n    return [1.0 for _ in completion_ids]\n")
    assert cli.main([*rolled_out(work, "ones"), "--rewards.one.function", f"{work / 'one.py'}:one"]) == 0
    capsys.readouterr()
    given = {"data__rollouts": work / "ones", "data__rewards": "one", "data__drop_equal": "True"}
    assert cli.main(arguments(work, "refused", **given)) == 2
    assert "data.drop_equal needs prompts with different rewards" in capsys.readouterr().err


def test_no_prompt_is_on_both_sides(work):
    folders = [str(work / "rollouts")] * 2  # every prompt twice, far from each other
    found = value_dataset.load_outcomes(
        folders, AutoTokenizer.from_pretrained(work / "policy"), rewards=["first"], max_length=64
    )
    for asked, held in ((2, 2), (100, 2), (1, 1)):
        train, rest = found.split(asked)
        assert not {*map(tuple, train.prompts)} & {*map(tuple, rest.prompts)}
        assert (len(rest), len(train) + len(rest)) == (held * 2 * SAMPLES, len(found))
        assert rest.rewards.tolist() == [float(ids[0] % 8) for ids in rest.completions]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__rollouts": "nowhere"}, "rollouts.json is missing"),
        ({"data__rewards": "second"}, "reward 'second' was not scored; scored rewards: first, even, mostly"),
        (
            {"data__rewards": ("first", "even"), "data__weights": (1.0,)},
            "data.weights has 1 numbers for 2 names in data.rewards",
        ),
        ({"loss__kind": "bce"}, "loss.kind = 'bce' needs rewards in [0, 1], but these are in [0,"),
        ({"loss__lam": 1.5}, "loss.lam = 1.5: allowed is in [0, 1]"),
        ({"loss__gamma": -0.5}, "loss.gamma = -0.5: allowed is in [0, 1]"),
        ({"train__completions": 0}, "train.completions = 0: allowed is >= 1"),
        ({"train__epochs": 0}, "train.epochs = 0"),
        ({"optim__algorithm": "muon", "train__head_only": True}, "allowed is 'adamw' with train.head_only"),
        ({"evaluation__prompts": -1}, "evaluation.prompts = -1"),
        ({"data__max_length": 65}, "data.max_length = 65"),
        ({"data__max_length": 2}, "no completion to train on in"),
        ({"compress__values": "runs/value"}, "compress.values is for `nlgrpo value compress`"),
        ({"model__path": "nowhere"}, "nowhere"),
    ],
)
def test_invalid_input_is_refused(work, capsys, changes, message):
    assert cli.main(arguments(work, "refused", **changes)) == 2
    assert message in capsys.readouterr().err
    assert not (work / "refused").exists()


def test_tokens_that_a_value_model_does_not_have(work, tmp_path, capsys):
    """A policy's embedding may have more rows than the shared tokenizer and the value model have tokens."""
    tiny_model(tmp_path / "small", "gpt2", vocab_size=8)
    assert cli.main(arguments(work, "refused", model__path=tmp_path / "small")) == 2
    assert "small has a vocabulary of 8, but the rollouts have the token id " in capsys.readouterr().err


def test_compression_that_is_refused(work, tmp_path, capsys):
    def refused(**changes):
        assert cli.main(arguments(work, "refused", "compress", **changes)) == 2
        return capsys.readouterr().err

    assert "compress.values is empty" in refused()
    policy = {"compress__values": (work / "policy",)}
    assert "is not a value model: it has no scalar head" in refused(**policy)
    assert "compress needs kind = 'mse', lam = 1 and gamma = 1" in refused(loss__lam=0.5, **policy)
    assert "compress.betas has 2 numbers for 1 names in compress.values" in refused(
        compress__betas=(1.0, 2.0), **policy
    )
    assert "compress.betas = (0.0,): allowed is numbers > 0" in refused(compress__betas=(0.0,), **policy)
    assert "compress.betas = (1e-320,): allowed is numbers > 0" in refused(compress__betas=(1e-320,), **policy)
    assert "data.rewards = ('first',): allowed is empty" in refused(data__rewards=("first",), **policy)


def test_a_reward_of_weight_0_does_not_count(work):
    """It abstains on some completions, but none is dropped."""
    given = {"rewards": ["first", "mostly"], "max_length": 64}
    tokenizer = AutoTokenizer.from_pretrained(work / "policy")
    found = value_dataset.load_outcomes([str(work / "rollouts")], tokenizer, weights=[2.0, 0.0], **given)
    alone = value_dataset.load_outcomes(
        [str(work / "rollouts")], tokenizer, rewards=["first"], weights=[2.0], max_length=64
    )
    assert found.abstained == 0 < value_dataset.load_outcomes([str(work / "rollouts")], tokenizer, **given).abstained
    assert torch.equal(found.rewards, alone.rewards)


def test_rollouts_of_another_tokenizer_are_read_as_texts(work, tmp_path, capsys):
    """Two words are swapped in the value model's vocabulary; only their token ids change."""
    tiny_model(tmp_path / "model", "gpt2")
    tokens = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    places = {vocabulary["w0"]: vocabulary["w1"], vocabulary["w1"]: vocabulary["w0"]}
    vocabulary["w0"], vocabulary["w1"] = vocabulary["w1"], vocabulary["w0"]
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokens))
    policy, own = (AutoTokenizer.from_pretrained(folder) for folder in (work / "policy", tmp_path / "model"))
    plain = value_dataset.load_outcomes([str(work / "rollouts")], policy, rewards=["first"], max_length=64)
    found = value_dataset.load_outcomes([str(work / "rollouts")], own, rewards=["first"], max_length=64)
    assert found.asked == [tuple(places.get(i, i) for i in ids) for ids in plain.asked]
    assert torch.equal(found.rewards, plain.rewards)

    def read(ids):
        kept = [places.get(i, i) for i in ids if i not in policy.all_special_ids]
        return kept + [EOS] * (ids[-1] == EOS)

    assert found.prompts == [[places.get(i, i) for i in ids] for ids in plain.prompts]
    assert found.completions == [read(ids) for ids in plain.completions]
    assert any(ids != read(ids) for ids in plain.completions)
    sides = [{tuple(ids) for ids in side.asked} for side in found.split(2)]
    assert not sides[0] & sides[1]
    assert cli.main(arguments(work, "by text", model__path=tmp_path / "model")) == 0

    tiny_model(tmp_path / "theirs", "gpt2")  # with another tokenizer, the prompts are still the same
    (tmp_path / "theirs" / "tokenizer.json").write_text(json.dumps(tokens))
    assert cli.main(rolled_out(work, "theirs", model__path=tmp_path / "theirs")) == 0
    both = value_dataset.load_outcomes(
        [str(work / "rollouts"), str(work / "theirs")], policy, rewards=["first"], max_length=64
    )
    assert len(set(both.asked)) == len(set(plain.asked))
    sides = [{tuple(ids) for ids in side.prompts} for side in both.split(2)]
    assert not sides[0] & sides[1]

    (work / "policy" / "tokenizer.json").rename(tmp_path / "kept.json")
    try:
        (work / "policy" / "tokenizer.json").write_text(json.dumps(tokens | {"added_tokens": []}))
        with pytest.raises(ValueError, match="has changed since the rollouts in"):
            value_dataset.load_outcomes([str(work / "rollouts")], own, rewards=["first"], max_length=64)
    finally:
        (tmp_path / "kept.json").rename(work / "policy" / "tokenizer.json")


def test_the_command(work, capsys):
    assert cli.main(["value"]) == 2
    assert "expected: nlgrpo value (train|compress) [file.toml] [--section.key value ...]" in capsys.readouterr().err
    assert cli.main(["value", "fit"]) == 2
    assert "got 'fit'" in capsys.readouterr().err
    assert cli.main([*arguments(work, "planned"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "36 completions of 3 prompts" in shown
    assert "24 completions of 2 prompts" in shown
    assert "8 steps of 9 completions, 2 epochs" in shown
    assert not (work / "planned").exists()
    check_value_config(config(work))
    assert ValueConfig().run.name == "value"


def test_the_end_token_is_a_state_of_its_own(work):
    """A finished beam is scored at the end of its completion."""
    run = training.build_value_trainer(config(work), ALONE)
    ended = next(i for i, ids in enumerate(run.outcomes.completions) if ids[-1] == EOS)
    [batch] = run.batches(run.outcomes, [ended])
    H = len(run.outcomes.completions[ended])
    assert batch.offset.tolist() == list(range(H + 1))
    assert batch.tokens[batch.select].tolist()[1:] == run.outcomes.completions[ended]
