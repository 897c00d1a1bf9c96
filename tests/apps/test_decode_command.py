"""``nlgrpo decode``: methods compared with the engine, the search or a loop over transformers' model; resuming."""

import hashlib
import json
import math
import shutil

import pytest
import torch
from support.helpers import EOS, tiny_model
from support.search_truths import TextValue
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from nlgrpo import cli
from nlgrpo.apps.guided import decoding
from nlgrpo.apps.guided.decoding_methods import DecodingMethod, GivenModels, decoding_method
from nlgrpo.engine import cascade_sampling, guided_search, guides
from nlgrpo.engine.cascade_sampling import Cascade
from nlgrpo.engine.generation import generate
from nlgrpo.engine.guided_search import Search
from nlgrpo.engine.rollouts.store import digest_of_prompt
from nlgrpo.engine.sampling import Sampling
from nlgrpo.model import decoder, reward_model
from nlgrpo.rewards.builtin import final_answer

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

PROMPTS = [f"w{i} w{(3 * i + 1) % 28}" for i in range(10)]
HELD = PROMPTS[-3:]
LENGTH = 6
SEED = 1 << 62
REWARDS = """
def low(completion_ids, **_):
    return [sum((7 * i) % 11 for i in ids) / 6 for ids in completion_ids]

def begins(prompts, completions, **_):
    return [float(c.split()[:1] == p.split()[:1]) for p, c in zip(prompts, completions)]

def high(completion_ids, **_):
    return [sum((5 * i) % 7 for i in ids) - 0.1 * len(ids) for ids in completion_ids]

def silent(completion_ids, **_):
    return [None for _ in completion_ids]
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    root = tmp_path_factory.mktemp("work")
    tiny_model(root / "policy", "gpt2", scale=0.3)
    tokenizer = AutoTokenizer.from_pretrained(root / "policy")
    for seed, name in enumerate(("one", "two")):
        tiny_model(root / "base", "gpt2", seed=seed + 1)
        value, _ = reward_model.load_reward_model(str(root / "base"), seed=seed)
        with torch.no_grad():
            value.head.weight.mul_(5.0)
        reward_model.save(value, root / name, tokenizer=tokenizer, pad=0, max_length=64)
    tiny_model(root / "tuned", "gpt2", scale=0.4, seed=3)
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    (root / "rewards.py").write_text(REWARDS)
    return root


def arguments(work, out, *more, **changes):
    options = {
        "model.path": work / "policy",
        "model.dtype": "float64",
        "data.source": work / "prompts.jsonl",
        "data.shuffle": "false",
        "rollout.max_new_tokens": LENGTH,
        "rollout.max_rows": 8,
        "evaluation.prompts": len(HELD),
        "rewards.low.function": f"{work / 'rewards.py'}:low",
        "rewards.low.weight": 2.0,
        "rewards.begins.function": f"{work / 'rewards.py'}:begins",
        "guide": (work / "one", work / "two"),
        "betas": (1.0, 0.5),
        "methods": ("bon", "iro"),
        "budgets": (4,),
        "chunk": 2,
        "out": work / out,
    }
    options |= {name.replace("__", "."): value for name, value in changes.items()}
    given = []
    for name, value in options.items():
        given += [f"--{name}", *(map(str, value) if isinstance(value, tuple) else (str(value),))]
    return ["decode", "blank", *given, *more]


def results(work, out):
    return {(row["method"], row["budget"]): row for row in json.loads((work / out / "decode.json").read_text())}


def worth(prompt, ids, tokenizer):
    """Weighted sum of the rewards, computed here."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return 2.0 * sum((7 * i) % 11 for i in ids) / 6 + float(text.split()[:1] == prompt.split()[:1])


def loaded(work):
    return decoder.load(work / "policy", dtype=torch.float64), AutoTokenizer.from_pretrained(work / "policy")


def test_best_of_n_equals_the_engine_and_searches_equal_the_search(work):
    methods = ("bon", "iro", "iro:1", "cd")
    assert cli.main(arguments(work, "all", methods=methods, budgets=(4, 6))) == 0
    found, (model, tokenizer) = results(work, "all"), loaded(work)
    ids, sampling = [tokenizer(text).input_ids for text in HELD], Sampling(max_new_tokens=LENGTH, stop_ids=(EOS,))
    for budget in (4, 6):
        rollout = generate(model, ids, budget, sampling, seed=SEED)
        own = rollout.completion_ids()
        best = [max(worth(p, c, tokenizer) for c in own[i * budget : (i + 1) * budget]) for i, p in enumerate(HELD)]
        assert found["bon", budget]["rewards"] == pytest.approx(best)
        assert found["bon", budget]["tokens"] == int(rollout.lengths.sum())
        assert (found["bon", budget]["queries"], found["bon", budget]["reward_queries"]) == (0, 3 * budget)
        for method, values, search in (
            ("iro", 2, Search(2, budget // 2, 2)),
            ("iro:1", 1, Search(2, budget // 2, 2)),
            ("cd", 1, Search(1, budget, 2, diverse=False)),
        ):
            paths, betas = [work / "one", work / "two"][:values], [1.0, 0.5][:values]
            loaded_values = guides.load_values(paths, betas, tokenizer, sampling)
            candidates, cost = guided_search.search(model, ids, search, sampling, loaded_values, seed=SEED)
            best = [max(worth(p, c.tokens, tokenizer) for c in own) for p, own in zip(HELD, candidates, strict=True)]
            row = found[method, budget]
            assert row["rewards"] == pytest.approx(best), method
            assert (row["tokens"], row["queries"]) == (cost.tokens, cost.queries)
            assert row["reward_queries"] == sum(map(len, candidates))  # each once, whatever places it takes
            samples = math.log10(budget ** (LENGTH / 2))  # of best-of-N with the same reward (Eq. 43)
            queries = values * budget * LENGTH / 2
            expected = {"tokens": budget * LENGTH, "value_queries": queries, "log10_samples": samples}
            assert row["theory"] == pytest.approx(expected)
            paired = torch.tensor(best) - torch.tensor(found["bon", budget]["rewards"])
            assert row["over_bon"][0] == pytest.approx(paired.mean().item(), abs=1e-6)
    assert found["bon", 4]["theory"] == {"tokens": 4 * LENGTH, "reward_queries": 4}  # Eq. 36
    assert found["bon", 4]["peak_bytes"] is None  # on a GPU alone
    count = sum(p.numel() for p in reward_model.load_reward_model(str(work / "one"))[0].parameters())
    assert found["iro", 4]["value_bytes"] == 2 * found["iro:1", 4]["value_bytes"] == 2 * 8 * count  # float64, as asked
    assert found["bon", 4]["value_bytes"] == 0 < found["bon", 4]["cache_bytes"] < found["iro", 4]["cache_bytes"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("weight", "choose"), [(-3.0, "reward"), (-0.5, "reward"), (-3.0, "value"), (0.0, "reward")])
def test_args_is_a_loop_over_the_likeliest_tokens(work, weight, choose):
    """Khanov et al. 2024, Eq. 4, "greedy": of the N likeliest next tokens the one with the largest log p + w r."""
    out, N, stops, temperature = f"args {weight} {choose}", 12, (EOS, 30), 4.0
    options = {"methods": (f"args:{weight:g}",), "budgets": (N,), "choose": choose}
    options |= {"rollout__stop_ids": stops, "rollout__temperature": temperature}
    assert cli.main(arguments(work, out, **options)) == 0
    row, tokenizer = results(work, out)[f"args:{weight:g}", N], AutoTokenizer.from_pretrained(work / "policy")
    theirs = AutoModelForCausalLM.from_pretrained(work / "policy").double()
    asked, beams = 0, []
    for prompt, given in zip(HELD, row["rewards"], strict=True):
        ids, beam = tokenizer(prompt).input_ids, []
        while True:
            logp = (theirs(torch.tensor([[*ids, *beam]])).logits[0, -1] / temperature).log_softmax(-1)
            candidates = [[*beam, token] for token in logp.topk(N).indices.tolist()]
            scores = [logp[c[-1]].item() + weight * worth(prompt, c, tokenizer) for c in candidates]
            asked += N
            if len(beam) + 1 == LENGTH:
                break
            beam = candidates[max(range(N), key=lambda i: scores[i])]
            if beam[-1] in stops:
                candidates, scores = [beam], [0.0]
                asked += choose == "reward"
                break
        beams.append(beam)
        rewards = [worth(prompt, c, tokenizer) for c in candidates]
        assert given == pytest.approx(max(rewards) if choose == "reward" else rewards[scores.index(max(scores))])
    assert (row["queries"], row["reward_queries"]) == (0, asked)
    assert row["theory"]["reward_queries"] == N * LENGTH
    likeliest = all(set(beam) == {25} for beam in beams)
    assert likeliest == (weight == 0)  # or the reward has chosen
    assert any(beam[-1] in stops for beam in beams) == (weight == -3)


def test_args_where_prompts_have_other_numbers_of_tokens(work):
    """A filter leaves different numbers of tokens. The choice of a loop, and one reward query per token."""
    options = {"methods": ("args:0",), "budgets": (9,), "rollout__top_p": 0.8, "rollout__max_new_tokens": 1}
    assert cli.main(arguments(work, "filtered", **options)) == 0
    row, tokenizer = results(work, "filtered")["args:0", 9], AutoTokenizer.from_pretrained(work / "policy")
    theirs, counts = AutoModelForCausalLM.from_pretrained(work / "policy").double(), []
    for prompt, given in zip(HELD, row["rewards"], strict=True):
        probs, tokens = theirs(torch.tensor([tokenizer(prompt).input_ids])).logits[0, -1].softmax(-1).sort()
        kept = tokens[probs.cumsum(0) > 1 - 0.8].flip(0)[:9].tolist()
        counts.append(len(kept))
        assert given == pytest.approx(max(worth(prompt, [token], tokenizer) for token in kept))
    assert len(set(counts)) > 1
    assert (row["tokens"], row["reward_queries"]) == (sum(counts), sum(counts))


# --- evaluation by a reward that does not choose ----------------------------------------------------------------------


def gold(work, weight=0.0):
    return {"gold": "high", "rewards__high__function": f"{work / 'rewards.py'}:high", "rewards__high__weight": weight}


@pytest.mark.parametrize("choose", ["reward", "value"])
def test_a_gold_reward_evaluates_what_the_others_chose(work, choose, capsys):
    """Responses and rewards are those without it; its own rewards are computed here from the responses."""
    options = {"methods": ("bon", "iro:1", "args:-1"), "choose": choose, "budgets": (6,)}
    assert cli.main(arguments(work, f"plain {choose}", **options)) == 0
    capsys.readouterr()
    assert cli.main(arguments(work, f"gold {choose}", **options, **gold(work))) == 0
    shown = capsys.readouterr().out
    assert "gold: high" in " ".join(shown.split())
    assert "evaluated by" in shown
    plain, found = results(work, f"plain {choose}"), results(work, f"gold {choose}")
    for key, row in found.items():
        evaluation, costs = row.pop("gold"), ("seconds", "peak_bytes")
        assert {k: v for k, v in row.items() if k not in costs} == {
            k: v for k, v in plain[key].items() if k not in costs
        }
        assert evaluation["reward"] == "high"
        assert len(evaluation["rewards"]) == len(HELD)
        assert evaluation["mean"][0] == pytest.approx(sum(evaluation["rewards"]) / len(HELD))
        assert ("over_bon" in evaluation) == (key[0] != "bon")
    if choose == "value":
        return
    assert cli.main(arguments(work, "gold kept", **options, **gold(work))) == 0
    row, (model, tokenizer) = results(work, "gold kept")["bon", 6], loaded(work)
    ids, sampling = [tokenizer(text).input_ids for text in HELD], Sampling(max_new_tokens=LENGTH, stop_ids=(EOS,))
    own = generate(model, ids, 6, sampling, seed=SEED).completion_ids()
    best = [max(own[6 * i : 6 * i + 6], key=lambda c, p=p: worth(p, c, tokenizer)) for i, p in enumerate(HELD)]
    expected = [sum((5 * i) % 7 for i in ids) - 0.1 * len(ids) for ids in best]
    assert row["gold"]["rewards"] == pytest.approx(expected)
    assert row["gold"]["rewards"] != pytest.approx(row["rewards"])


def test_methods_of_older_versions_keep_their_files(work, monkeypatch):
    """The name of a file is a digest of these fields, as it was before there were gold rewards and other methods."""
    seen, original = [], decoding.decode
    monkeypatch.setattr(decoding, "decode", lambda c, method: seen.append((c, method)) or original(c, method))
    assert cli.main(arguments(work, "old names", methods=("iro",))) == 0
    [(c, method)] = seen
    names = ("beams", "successors", "chunk", "temperature", "diverse", "likeliest")
    settings = {
        "values": [[digest, beta] for digest, beta in zip(c.digests, (1.0, 0.5), strict=True)],
        "budget": 4,
        "search": {name: getattr(method.search, name) for name in names},
        "weight": None,
    }
    keys = {"origin", "prompts", "columns", "rewards", "seed", "choose", "costs"}
    assert set(c.identity) == keys
    digest = hashlib.sha256(json.dumps([c.identity, settings], sort_keys=True).encode()).hexdigest()[:16]
    assert [path.name for path in (work / "old names" / "ways").iterdir()] == [f"4-{digest}.json"]


def test_a_gold_reward_that_chooses_is_refused(work, tmp_path, capsys):
    low = {"rewards__low__function": f"{work / 'rewards.py'}:low"}
    for changes, said in (
        ({"gold": "best"}, "--gold best: expected a reward of the configuration: low, begins"),
        (gold(work, 0.5), "--gold high: rewards.high has weight 0.5, so it takes part in choosing the responses; set"),
        ({"gold": "low", "rewards__begins__weight": 0.0}, "--gold low: it is the only reward that chooses"),
        (
            gold(work) | {"rewards__high__function": "ngrams", "rewards__high__objective": "rao"},
            "rewards.high compares completions with each other",
        ),
    ):
        assert cli.main(arguments(work, "refused", **changes)) == 2
        assert said in capsys.readouterr().err
    assert (
        cli.main(arguments(work, "mute", **gold(work) | {"rewards__high__function": f"{work / 'rewards.py'}:silent"}))
        == 2
    )
    assert "the rewards abstain for all 3 responses" in capsys.readouterr().err
    common = ["--model.dtype=float64", f"--data.source={work / 'prompts.jsonl'}", f"--model.path={work / 'policy'}"]
    common += [
        f"--rewards.low.function={work / 'rewards.py'}:low",
        "--rollout.max_new_tokens=4",
        "--evaluation.prompts=4",
    ]
    learn = ["--iterations=1", "--samples=2", "--chunk=2", "--no-compress", "--value.epochs=1", "--value.held-out=1"]
    assert cli.main(["iro", "blank", *common, *learn, f"--out={tmp_path / 'loop'}"]) == 0
    capsys.readouterr()
    circular = low | {"gold": "low", "rewards__low__weight": 0.0, "guide": tmp_path / "loop", "betas": ()}
    assert cli.main(arguments(work, "refused", **circular)) == 2
    assert "was fitted to it; learn values from other rewards" in capsys.readouterr().err


# --- CARDS and implicit rewards ---------------------------------------------------------------------------------------


def test_cards_samples_by_the_weighted_rewards(work):
    options = {"methods": ("cards:4", "cards:9:0.3:3.3"), "budgets": (3,), "rollout__top_k": 9}
    assert cli.main(arguments(work, "cards", **options)) == 0
    found, (model, tokenizer) = results(work, "cards"), loaded(work)
    ids, sampling = [tokenizer(p).input_ids for p in HELD], Sampling(max_new_tokens=LENGTH, stop_ids=(EOS,), top_k=9)

    def rewards(prompts, responses):
        return torch.tensor([worth(HELD[p], ids, tokenizer) for p, ids in zip(prompts, responses, strict=True)])

    for method, how in (("cards:4", Cascade(4.0, tries=3)), ("cards:9:0.3:3.3", Cascade(9.0, 0.3, 3.3, tries=3))):
        row = found[method, 3]
        own, cost = cascade_sampling.sample(model, ids, how, sampling, rewards, seed=SEED)
        expected = [worth(p, one.tokens, tokenizer) for p, one in zip(HELD, own, strict=True)]
        assert row["rewards"] == pytest.approx(expected)
        assert (row["tokens"], row["queries"], row["reward_queries"]) == (cost.tokens, 0, cost.queries)
        assert row["tokens"] <= len(HELD) * row["theory"]["tokens"] == len(HELD) * 3 * LENGTH
        assert row["reward_queries"] <= len(HELD) * row["theory"]["reward_queries"]


@pytest.mark.parametrize("text", [False, True])
def test_implicit_rewards(work, tmp_path, text):
    """Searches and choices by log p_tuned - log p_untuned of transformers; also of models with another tokenizer."""
    pair = work / "tuned", work / "policy"
    if text:
        pair = tmp_path / "tuned", tmp_path / "untuned"
        for i, folder in enumerate(pair):
            tiny_model(folder, "llama", scale=0.3, seed=i)
            tokens = json.loads((folder / "tokenizer.json").read_text())
            words = tokens["model"]["vocab"]
            words["w0"], words["w1"] = words["w1"], words["w0"]
            (folder / "tokenizer.json").write_text(json.dumps(tokens))
    options = {"tuned": pair[0], "untuned": pair[1], "methods": ("implicit", "weak_to_strong", "bon-i")}
    out = f"implicit {text}"
    assert cli.main(arguments(work, out, **options, budgets=(4,))) == 0
    found, (model, tokenizer) = results(work, out), loaded(work)
    theirs = [AutoModelForCausalLM.from_pretrained(folder).double().eval() for folder in pair]
    reader = AutoTokenizer.from_pretrained(pair[0])

    @torch.no_grad()
    def difference(prompt, tokens):
        before, after = tokenizer(prompt).input_ids, list(tokens)
        if text:
            whole = tokenizer.decode([*before, *tokens], skip_special_tokens=True)
            before = reader(prompt).input_ids
            after = reader(whole).input_ids[len(before) :] + [EOS] * (bool(tokens) and tokens[-1] == EOS)
        logits = [m(torch.tensor([[*before, *after]])).logits[0, len(before) - 1 : -1].log_softmax(-1) for m in theirs]
        tuned, untuned = (logp[range(len(after)), after].sum().item() for logp in logits)
        return tuned - untuned

    sampling = Sampling(max_new_tokens=LENGTH, stop_ids=(EOS,))
    for method, search, own_choice in (
        ("implicit", Search(2, 2, 2), False),
        ("weak_to_strong", Search(2, 2, 2, diverse=False), True),
        ("bon-i", Search(1, 4, LENGTH), True),
    ):
        row, queries, candidates = found[method, 4], 0, 0
        for i, prompt in enumerate(HELD):
            value = TextValue(lambda tokens, prompt=prompt: difference(prompt, tokens))
            ids, index = tokenizer(prompt).input_ids, [i]
            [own], cost = guided_search.search(
                model, [ids], search, sampling, [(value, 1.0)], seed=SEED, index=index, valued=own_choice
            )
            best = max(
                own, key=lambda c, p=prompt: difference(p, c.tokens) if own_choice else worth(p, c.tokens, tokenizer)
            )
            assert row["rewards"][i] == pytest.approx(worth(prompt, best.tokens, tokenizer)), (method, prompt)
            queries, candidates = queries + cost.queries, candidates + len(own)
        assert row["queries"] == queries
        assert row["reward_queries"] == (0 if own_choice else candidates)
        assert row["theory"]["value_queries"] == 4 * LENGTH / search.chunk
        assert row["value_bytes"] > 0


def test_weights_that_several_values_share_are_stored_once(work, tmp_path):
    """Value models that differ in their heads alone (SPI, Remark 3.2): the same rewards, and the memory of one."""
    model, _ = reward_model.load_reward_model(str(work / "one"))
    with torch.no_grad():
        reward_model.head_of(model).weight.mul_(-2.0)
    tokenizer = AutoTokenizer.from_pretrained(work / "policy")
    reward_model.save(model, tmp_path / "head", tokenizer=tokenizer, pad=0, max_length=64)
    assert (
        cli.main(arguments(work, tmp_path / "out", guide=(work / "one", tmp_path / "head"), methods=("iro:1", "iro")))
        == 0
    )
    found, count = results(work, tmp_path / "out"), sum(p.numel() for p in model.parameters())
    assert found["iro:1", 4]["value_bytes"] == 8 * count
    assert found["iro", 4]["value_bytes"] == 8 * (count + model.shape.width)
    # -2 V / 0.5 + V = -3 V: the search of the one value model with the sign changed
    with torch.no_grad():
        reward_model.head_of(model).weight.mul_(1.5)
    reward_model.save(model, tmp_path / "sum", tokenizer=tokenizer, pad=0, max_length=64)
    assert cli.main(arguments(work, tmp_path / "alone", guide=tmp_path / "sum", betas=(1.0,), methods=("iro",))) == 0
    assert results(work, tmp_path / "alone")["iro", 4]["rewards"] == found["iro", 4]["rewards"]


def test_choice_by_majority(work):
    options = {"methods": ("bon",), "budgets": (6,), "choose": "majority", "train__seed": 4}
    assert cli.main(arguments(work, "majority", **options)) == 0
    found, (model, tokenizer) = results(work, "majority")["bon", 6], loaded(work)
    ids, sampling = [tokenizer(text).input_ids for text in HELD], Sampling(max_new_tokens=LENGTH, stop_ids=(EOS,))
    own = generate(model, ids, 6, sampling, seed=SEED ^ 4).completion_ids()
    first = []
    for i, (prompt, given) in enumerate(zip(HELD, found["rewards"], strict=True)):
        rows = own[6 * i : 6 * i + 6]
        answers = [final_answer(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]
        most = max((a for a in answers if a is not None), key=answers.count, default=None)
        first.append(answers.index(most))
        assert given == pytest.approx(worth(prompt, rows[first[-1]], tokenizer))
    assert all(first)  # not the first candidate
    assert found["reward_queries"] == 0


def test_repeats_and_training_prompts_are_left_out(work, capsys):
    """Of five held-out prompts, one is repeated and one is a training prompt."""
    rows = [*PROMPTS[:5], "w20 w21", PROMPTS[1], "w22", "w20 w21", "w23"]
    (work / "repeats.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in rows))
    options = {"data__source": work / "repeats.jsonl", "evaluation__prompts": 5, "methods": ("bon",)}
    assert cli.main(arguments(work, "repeats", **options)) == 0
    assert "3 that runs hold out (2 left out" in " ".join(capsys.readouterr().out.split())
    tokenizer = AutoTokenizer.from_pretrained(work / "policy")
    kept = [digest_of_prompt(tokenizer(prompt).input_ids) for prompt in ("w20 w21", "w22", "w23")]
    assert results(work, "repeats")["bon", 4]["prompts"] == kept
    (work / "repeats.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[:2] * 2))
    assert cli.main(arguments(work, "none", **options | {"evaluation__prompts": 2})) == 2
    assert "every held-out prompt is also a training prompt" in capsys.readouterr().err


def test_training_prompts_of_value_models_are_left_out(work, tmp_path, capsys):
    """Value models fitted to prompts that another configuration holds out; also after their folder was moved."""
    common = ["--model.dtype=float64", f"--data.source={work / 'prompts.jsonl'}", "--data.shuffle=false"]
    common += [f"--model.path={work / 'policy'}", f"--rewards.low.function={work / 'rewards.py'}:low"]
    learn = ["--iterations=1", "--samples=2", "--chunk=2", "--no-compress", "--value.epochs=1", "--value.held-out=1"]
    drawn = ["--rollout.max_new_tokens=4", "--evaluation.prompts=2"]
    assert cli.main(["iro", "blank", *common, *learn, *drawn, f"--out={tmp_path / 'loop'}"]) == 0
    options = {"guide": tmp_path / "loop", "betas": (), "evaluation__prompts": 4}
    capsys.readouterr()
    assert cli.main(arguments(work, tmp_path / "known", **options)) == 0
    assert "2 that runs hold out (2 left out: repeats, or used to learn the values)" in " ".join(
        capsys.readouterr().out.split()
    )
    tokenizer = AutoTokenizer.from_pretrained(work / "policy")
    kept = [digest_of_prompt(tokenizer(prompt).input_ids) for prompt in PROMPTS[-2:]]
    assert results(work, tmp_path / "known")["iro", 4]["prompts"] == kept
    several = options | {"guide": (tmp_path / "loop" / "iteration-1", work / "one")}
    assert cli.main(arguments(work, tmp_path / "several", "--dry-run", **several)) == 0
    assert "2 that runs hold out (2 left out" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "loop").rename(tmp_path / "moved")
    assert cli.main(arguments(work, tmp_path / "again", **options | {"guide": tmp_path / "moved"})) == 0
    assert results(work, tmp_path / "again")["iro", 4]["prompts"] == kept
    shutil.rmtree(tmp_path / "moved" / "iteration-1" / "rollouts")
    capsys.readouterr()
    assert cli.main(arguments(work, tmp_path / "gone", "--dry-run", **options | {"guide": tmp_path / "moved"})) == 0
    assert "its rollouts are missing" in " ".join(capsys.readouterr().out.split())


def test_settings_of_the_search_come_from_the_folder(work):
    """All but K and B, which the budget determines."""
    (work / "sampled").mkdir()
    guides.Guide([work / "one"], [0.5], Search(3, 3, 3, 0.7, False)).write(work / "sampled")
    assert cli.main(arguments(work, "searched", guide=work / "sampled", betas=(), methods=("iro",), chunk=2)) == 0
    row = results(work, "searched")["iro", 4]
    assert Search(**row["search"]) == Search(2, 2, 2, 0.7, False)


def test_choice_by_value(work):
    """Candidates equal those of the choice by reward, values those of transformers; best-of-N uses all value models."""
    options = {"methods": ("bon", "iro", "iro:1", "cd"), "choose": "value"}
    assert cli.main(arguments(work, "by value", **options)) == 0
    found, (model, tokenizer) = results(work, "by value"), loaded(work)
    theirs = [AutoModelForSequenceClassification.from_pretrained(work / name).eval() for name in ("one", "two")]
    ids, sampling = [tokenizer(text).input_ids for text in HELD], Sampling(max_new_tokens=LENGTH, stop_ids=(EOS,))
    missed = 0
    for method, values, search in (
        ("bon", 2, Search(1, 4, LENGTH)),
        ("iro", 2, Search(2, 2, 2)),
        ("iro:1", 1, Search(2, 2, 2)),
        ("cd", 1, Search(1, 4, 2, diverse=False)),
    ):
        loaded_values = guides.load_values(
            [work / "one", work / "two"][:values], [1.0, 0.5][:values], tokenizer, sampling
        )
        loaded_values = loaded_values if method != "bon" else []
        candidates, cost = guided_search.search(model, ids, search, sampling, loaded_values, seed=SEED)
        row = found[method, 4]
        assert (row["tokens"], row["reward_queries"]) == (cost.tokens, 0)
        complete = sum(one.places == 1 for own in candidates for one in own)  # are read as well
        assert row["queries"] == cost.queries + values * complete
        for i, (prompt, own) in enumerate(zip(HELD, candidates, strict=True)):
            worths = []
            for one in own:
                whole = torch.tensor([[*ids[i], *one.tokens]])
                with torch.inference_mode():
                    heads = [m.score(m.transformer(whole).last_hidden_state[0, -1]).item() for m in theirs]
                worths.append(sum(v / beta for v, beta in zip(heads[:values], (1.0, 0.5), strict=False)))
            best = own[worths.index(max(worths))]
            assert row["rewards"][i] == pytest.approx(worth(prompt, best.tokens, tokenizer)), (method, prompt)
            missed += row["rewards"][i] < max(worth(prompt, c.tokens, tokenizer) for c in own)
    assert missed  # or the reward might have chosen
    assert found["bon", 4]["theory"] == pytest.approx(
        {"tokens": 4 * LENGTH, "value_queries": 2 * 4, "log10_samples": math.log10(4)}
    )
    assert found["bon", 4]["value_bytes"] == found["iro", 4]["value_bytes"]


def test_compressed_value_model_of_a_folder(work):
    """It is used alone, with beta 1, and does not change the results of the other methods."""
    (work / "learned").mkdir()
    guides.Guide([work / "one"], [0.5], Search(), work / "two").write(work / "learned")
    assert guides.read_guide(work / "learned").compressed == work / "two"
    options = {"methods": ("iro", "compressed", "iro:1"), "betas": ()}
    assert cli.main(arguments(work, "compressed", guide=work / "learned", **options)) == 0
    assert cli.main(arguments(work, "alone", guide=work / "two", methods=("iro",), betas=(1.0,))) == 0
    found, alone = results(work, "compressed"), results(work, "alone")["iro", 4]
    assert found["compressed", 4]["rewards"] == alone["rewards"] != found["iro", 4]["rewards"]
    assert found["iro", 4]["rewards"] == found["iro:1", 4]["rewards"]
    assert found["compressed", 4]["value_bytes"] == alone["value_bytes"] > 0


@pytest.mark.slow
def test_finished_methods_are_not_decoded_again(work, capsys, monkeypatch):
    assert cli.main(arguments(work, "kept")) == 0
    shown = capsys.readouterr().out
    assert "over best-of-N" in shown
    before = json.loads((work / "kept" / "decode.json").read_text())
    with monkeypatch.context() as patched:
        patched.setattr(decoding, "decode", lambda *_: pytest.fail("it is decoded again"))
        assert cli.main(arguments(work, "kept")) == 0
    assert json.loads((work / "kept" / "decode.json").read_text()) == before
    made, original = [], decoding.decode
    monkeypatch.setattr(
        decoding, "decode", lambda c, method: made.append((method.name, method.budget)) or original(c, method)
    )
    assert cli.main(arguments(work, "kept", budgets=(4, 2), methods=("bon", "iro", "cd"))) == 0
    assert sorted(made) == [("bon", 2), ("cd", 2), ("cd", 4), ("iro", 2)]
    made.clear()
    assert cli.main(arguments(work, "kept", rewards__low__weight=1.0)) == 0
    assert sorted(made) == [("bon", 4), ("iro", 4)]
    made.clear()
    rows = "\n".join(json.dumps({"prompt": prompt, "answer": "A"}) for prompt in PROMPTS)
    for answer in "AB":  # rewards may read the columns
        (work / "answered.jsonl").write_text(rows.replace('"A"', f'"{answer}"'))
        assert cli.main(arguments(work, "kept", data__source=work / "answered.jsonl", methods=("bon",))) == 0
    assert made == [("bon", 4), ("bon", 4)]


def test_one_method_under_two_names_is_decoded_once(work, monkeypatch):
    """ "iro" and "iro:2" with two value models."""
    made, original = [], decoding.decode
    monkeypatch.setattr(decoding, "decode", lambda c, method: made.append(method.name) or original(c, method))
    assert cli.main(arguments(work, "names", methods=("iro", "iro:1", "iro:2"))) == 0
    assert len(made) == 2
    found = results(work, "names")
    assert set(found) == {("iro", 4), ("iro:1", 4), ("iro:2", 4)}
    assert found["iro", 4] | {"method": "iro:2"} == found["iro:2", 4]
    assert found["iro", 4]["value_bytes"] == 2 * found["iro:1", 4]["value_bytes"]


def test_every_seed_has_the_same_prompts_in_the_same_order(work):
    rows = []
    for seed in (1, 2):
        out = f"seed {seed}"
        assert cli.main(arguments(work, out, methods=("bon",), data__shuffle="true", train__seed=seed)) == 0
        rows.append(results(work, out)["bon", 4])
    tokenizer = AutoTokenizer.from_pretrained(work / "policy")
    assert rows[0]["prompts"] == rows[1]["prompts"]
    assert sorted(rows[0]["prompts"]) == sorted(digest_of_prompt(tokenizer(p).input_ids) for p in HELD)
    assert rows[0]["rewards"] != rows[1]["rewards"]


def test_methods():
    like = Search(temperature=0.5, diverse=False)
    none, one, three = GivenModels(), GivenModels(1), GivenModels(3)
    compressed = GivenModels(3, compressed=True)
    assert decoding_method("iro", 8, Search(), 64, three) == DecodingMethod("iro", 8, Search(2, 4, 16), (0, 1, 2))
    assert decoding_method("iro:2", 16, Search(), 64, three) == DecodingMethod("iro:2", 16, Search(4, 4, 16), (0, 1))
    assert decoding_method("iro", 7, Search(), 64, one).search == Search(1, 7, 16)
    assert decoding_method("iro", 8, like, 64, one).search == Search(2, 4, 16, 0.5, False)
    assert decoding_method("bon", 9, like, 64, none) == DecodingMethod("bon", 9, Search(1, 9, 64))
    assert decoding_method("bon", 9, like, 64, compressed, by_value=True) == DecodingMethod(
        "bon", 9, Search(1, 9, 64), (0, 1, 2)
    )
    assert decoding_method("args", 9, like, 64, none, by_value=True) == decoding_method("args", 9, Search(), 64, none)
    assert decoding_method("args", 9, like, 64, none).weight == 1.0
    assert decoding_method("compressed", 8, like, 64, compressed) == DecodingMethod(
        "compressed", 8, Search(2, 4, 16, 0.5, False), (3,)
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"methods": ("best",)},
            "method 'best': expected bon, cd, args, args:WEIGHT, iro, iro:NUMBER, compressed, implicit, ",
        ),
        ({"methods": ("compressed",)}, "method 'compressed' needs a compressed value model: set --guide"),
        ({"methods": ("args:x",)}, "method 'args:x'"),
        ({"methods": ("args:nan",)}, "method 'args:nan'"),
        (
            {"methods": ("iro:3",)},
            "method 'iro:3' needs 3 value models: expected 1 to 2, the number given with --guide",
        ),
        ({"methods": ("iro:0",)}, "method 'iro:0'"),
        ({"methods": ("iro:-1",)}, "method 'iro:-1' needs -1 value models: expected 1 to 2, the number given"),
        ({"budgets": (0,)}, "--budgets 0: allowed is 1 to 1,048,576"),
        ({"budgets": (10**18,)}, "--budgets 1000000000000000000: allowed is 1 to 1,048,576"),
        ({"chunk": 0}, "--chunk 0: allowed is >= 1"),
        ({"betas": (1.0,)}, "1 betas for 2 value models"),
        ({"methods": ("cards",)}, "method 'cards' needs the reward that a response should reach, such as 'cards:0.9'"),
        ({"methods": ("cards:x",)}, "method 'cards:x'"),
        ({"methods": ("cards:1:0",)}, "method 'cards:1:0': temperature = 0.0: expected a finite number > 0"),
        ({"methods": ("cards:1:1:1:1",)}, "method 'cards:1:1:1:1'"),
        (
            {"methods": ("implicit",)},
            "method 'implicit' needs a model before and after tuning: set --tuned and --untuned",
        ),
        ({"tuned": "one"}, "--tuned without --untuned: an implicit reward is the difference of two models' log-probs"),
        ({"untuned": "one"}, "--untuned without --tuned"),
        ({"tuned": "nowhere", "untuned": "nowhere"}, "nowhere"),
        (
            {"choose": "value", "guide": (), "betas": (), "methods": ("bon",)},
            "method 'bon' with --choose value needs a value model: set --guide",
        ),
        ({"guide": "policy", "betas": ()}, "policy"),
        (
            {"rewards__low__function": "ngrams", "rewards__low__objective": "rao"},
            "rewards.low compares completions with each other, but a search scores each one separately",
        ),
        ({"rewards__low__function": "rewards.py:silent"}, "rewards.py"),
    ],
)
def test_invalid_options_are_refused(work, capsys, changes, message):
    assert cli.main(arguments(work, "refused", **changes)) == 2
    assert message in capsys.readouterr().err
    assert not (work / "refused" / "decode.json").exists()


def test_prompts_without_a_reward_are_left_out_and_counted(work, capsys):
    """One reward scores one of the three prompts; the other scores none. The mean is over that prompt."""
    (work / "of_one.py").write_text(
        "def low(prompts, completion_ids, **_):\n"
        f"    return [len(ids) / 6 if p == {HELD[1]!r} else None for p, ids in zip(prompts, completion_ids)]\n"
    )
    some = {"rewards__low__function": f"{work / 'of_one.py'}:low"}
    some["rewards__begins__function"] = f"{work / 'rewards.py'}:silent"
    assert cli.main(arguments(work, "of one", **some)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 of 3 prompts" in shown
    assert "responses with a reward, of 3: low 1 to 1, begins 0 to 0" in shown
    for row in json.loads((work / "of one" / "decode.json").read_text()):
        [scored] = [reward for reward in row["rewards"] if reward is not None]
        assert (row["mean"], row["mean_prompts"]) == ([scored] * 3, 1)
        assert row["rewards"].index(scored) == 1
        assert row["unscored"] == {"low": [0, 2], "begins": [0, 1, 2]}
        assert "over_bon" not in row


def test_sums_of_the_same_rewards_are_compared():
    """At the second prompt one response has both rewards and the other one, so that their sums say nothing."""
    bon = {"method": "bon", "budget": 4, "rewards": [8.0, 5.0, 7.0, None], "unscored": {"a": [3], "b": [1, 3]}}
    iro = {"method": "iro", "budget": 4, "rewards": [9.0, 8.0, 5.0, 1.0], "unscored": {"a": [], "b": [3]}}
    before = {"method": "cd", "budget": 4, "rewards": [9.0, 6.0, 5.0, 1.0]}  # of a version that refused abstentions
    found = [bon, iro, before]
    decoding._add_intervals(found, found)
    assert [row["mean"][0] for row in found] == pytest.approx([20 / 3, 23 / 4, 21 / 4])
    assert [row["mean_prompts"] for row in found] == [3, 4, 4]
    assert "over_bon" not in bon
    assert (iro["over_bon"][0], iro["over_bon_prompts"]) == (pytest.approx((1 - 2) / 2), 2)
    assert (before["over_bon"][0], before["over_bon_prompts"]) == (pytest.approx((1 - 2) / 2), 2)


def test_abstaining_rewards_and_a_dry_run(work, capsys):
    silent = {f"rewards__{name}__function": f"{work / 'rewards.py'}:silent" for name in ("low", "begins")}
    assert cli.main(arguments(work, "silent", **silent)) == 2
    assert "the rewards abstain for all 3 responses" in capsys.readouterr().err
    assert cli.main(arguments(work, "silent", choose="majority", **silent)) == 2
    assert "the rewards abstain for all 3 responses" in capsys.readouterr().err
    assert cli.main(arguments(work, "planned", "--dry-run")) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 that runs hold out" in shown
    assert "bon, iro x N = 4" in shown
    assert "2 low + 1 begins" in shown
    assert not (work / "planned").exists()
    assert cli.main(arguments(work, "planned", "--dry-run", evaluation__prompts=0)) == 0
    assert "10 that runs TRAIN ON (none are held out)" in " ".join(capsys.readouterr().out.split())
