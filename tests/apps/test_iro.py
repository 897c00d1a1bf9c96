"""``nlgrpo iro``: the whole loop on a tiny model, its stages by themselves, stops and kills, bad input."""

import hashlib
import json
import shutil
import signal

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from support.helpers import EOS, Job, fork_ranks, run_all, tiny_model
from transformers import AutoTokenizer

from nlgrpo import cli
from nlgrpo.apps.guided import iro
from nlgrpo.apps.guided.value_dataset import Outcomes
from nlgrpo.apps.guided.value_loop import Loop, distinct_prefixes
from nlgrpo.engine import guided_search, guides
from nlgrpo.engine.chunked_decoding import ModelValue
from nlgrpo.engine.guided_search import Candidate
from nlgrpo.engine.rollouts import convert
from nlgrpo.engine.rollouts.reference_rollouts import load_rollouts
from nlgrpo.engine.sampling import Sampling
from nlgrpo.model import decoder
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.work_queue import WorkQueue

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

PROMPTS = [f"w{i} w{(3 * i + 1) % 28}" for i in range(12)]
REWARDS = """
def low(completion_ids, **_):
    # Many tokens below 16: what is good can be seen before the end.
    return [sum(i < 16 for i in ids) / 6 for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    root = tmp_path_factory.mktemp("work")
    tiny_model(root / "policy", "gpt2", scale=0.2)
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    (root / "rewards.py").write_text(REWARDS)
    return root


def arguments(work, out, *more, **changes):
    options = {
        "model.path": work / "policy",
        "model.dtype": "float64",
        "data.source": work / "prompts.jsonl",
        "rollout.max_new_tokens": 6,
        "rollout.max_rows": 24,
        "evaluation.prompts": 2,
        "rewards.low.function": f"{work / 'rewards.py'}:low",
        "rewards.low.weight": 2.0,
        "out": work / out,
        "iterations": 2,
        "samples": 16,
        "beams": 2,
        "successors": 4,
        "chunk": 2,
        "betas": (1.0, 0.5),
        "value.lr": 1e-2,
        "value.epochs": 4,
        "value.completions": 32,
        "value.held_out": 2,
    }
    options |= {name.replace("__", "."): value for name, value in changes.items()}
    given = []
    for name, value in options.items():
        given += [f"--{name}", *(map(str, value) if isinstance(value, tuple) else (str(value),))]
    return ["iro", "blank", *given, *more]


@pytest.fixture(scope="module")
def whole(work):
    """An undisturbed run."""
    torch.set_num_threads(1)
    assert cli.main(arguments(work, "whole")) == 0
    return work / "whole"


# --- the loop ---------------------------------------------------------------------------------------------------------


def test_what_the_loop_leaves(work, whole, capsys):
    folders = {"iteration-1", "iteration-2", "compressed-2"}
    files = {"config.json", "iro.json", "guide.json", "threads.json"}
    assert {path.name for path in whole.iterdir() if not path.name.startswith(".lock")} == folders | files
    first, second = json.loads((whole / "iro.json").read_text())
    assert (first["samples"], second["samples"]) == (16, 8)
    assert [(row["value"], row["beta"]) for row in (first, second)] == [
        ("iteration-1/value", 1.0), ("iteration-2/value", 0.5)
    ]  # fmt: skip
    worth = 2.0 * load_rollouts(whole / "iteration-1" / "rollouts").rewards["low"]
    more = 2.0 * load_rollouts(whole / "iteration-2" / "rollouts").rewards["low"].mean(1) - worth.mean(1)
    assert more.mean() > 2 * more.std() / len(more) ** 0.5
    assert second["mean"]["value"] - first["mean"]["value"] == pytest.approx(more.mean().item())
    assert first["mean"]["value"] == pytest.approx(worth.mean().item())
    assert first["best"]["value"] == pytest.approx(worth.amax(1).mean().item())
    begun = [
        json.loads((whole / f"iteration-{t}" / "value" / "config.json").read_text())["model"]["path"] for t in (1, 2)
    ]
    assert begun == [str(work / "policy"), str(whole / "iteration-1" / "value")]
    compressed = json.loads((whole / "compressed-2" / "config.json").read_text())
    assert compressed["compress"]["betas"] == [1.0, 0.5]
    assert compressed["data"]["rollouts"] == [str(whole / f"iteration-{t}" / "rollouts") for t in (1, 2)]

    assert guides.read_guide(whole).compressed == whole / "compressed-2"

    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*.safetensors")}
    assert cli.main(arguments(work, "whole")) == 0
    assert "is already done" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*.safetensors")} == before


@pytest.mark.slow
def test_two_ranks_are_as_one(work, whole):
    """Rollouts to the token; values to rounding, because sums over two ranks have another order."""

    def run(command):
        ended = fork_ranks(lambda: cli.main(command))
        assert [end.status for end in ended] == [0, 0], ended[0].output
        return "".join(end.output for end in ended)

    shown = run(arguments(work, "pair"))
    assert shown.count(f"guide   {work}") == 1
    for t in (1, 2):
        one, two = (load_rollouts(folder / f"iteration-{t}" / "rollouts") for folder in (whole, work / "pair"))
        assert list(one.tokens()) == list(two.tokens())
    for part in ("iteration-1/value", "iteration-2/value", "compressed-2"):
        one, two = (load_file(folder / part / "model" / "model.safetensors") for folder in (whole, work / "pair"))
        for name, weight in one.items():
            torch.testing.assert_close(two[name], weight, atol=1e-5, rtol=1e-5)
    ways = ["--methods", "bon", "iro", "compressed", "--budgets", "4", "--chunk", "2"]
    given, kept = arguments(work, "pair"), ("--model.", "--data.", "--rollout.", "--evaluation.", "--rewards.")
    config = [word for i, name in enumerate(given) if name.startswith(kept) for word in (name, given[i + 1])]
    found = []
    for place, command in enumerate((run, lambda command: cli.main(command))):
        out = work / f"decoded-{place}"
        command(["decode", "blank", *config, f"--guide={work / 'pair'}", *ways, f"--out={out}"])
        rows = json.loads((out / "decode.json").read_text())
        found.append([[row["method"], row["rewards"], row["tokens"]] for row in rows])
    assert found[0] == found[1]


@pytest.mark.slow
def test_another_loop_is_refused_and_more_iterations_are_not(work, whole, capsys):
    for changes, said in (
        ({"value__lr": 0.02}, "iro.value.lr: 0.01 -> 0.02"),
        ({"prompts": 3}, "iro.prompts: None -> 3"),
        ({"rewards__low__weight": 1.0}, "config.rewards.low.weight: 2.0 -> 1.0"),
    ):
        assert cli.main(arguments(work, "whole", **changes)) == 2
        told = capsys.readouterr().err
        assert said in told
        assert "Choose another folder with --out" in told
    code = (work / "rewards.py").read_text()
    (work / "rewards.py").write_text(code + "# mended\n")
    assert cli.main(arguments(work, "whole")) == 2
    assert "contents.rewards.low" in capsys.readouterr().err
    (work / "rewards.py").write_text(code)
    longer = (work / "prompts.jsonl").read_text()
    (work / "prompts.jsonl").write_text(longer + json.dumps({"prompt": "w9"}) + "\n")
    assert cli.main(arguments(work, "whole")) == 2
    assert "contents.prompts" in capsys.readouterr().err
    (work / "prompts.jsonl").write_text(longer)
    shutil.copytree(whole, work / "more")
    assert cli.main(arguments(work, "more", iterations=3, betas=(1.0, 0.5, 2.0), samples=16)) == 2
    assert "data.rollouts" in capsys.readouterr().err  # its runs name the folder that they were made in
    options = {"iterations": 3, "betas": (1.0, 0.5, 2.0)}
    assert cli.main(arguments(work, "whole", **options)) == 0
    assert len(json.loads((whole / "iro.json").read_text())) == 3
    assert (whole / "compressed-3").is_dir()
    assert cli.main(arguments(work, "whole")) == 0  # and back
    assert len(json.loads((whole / "iro.json").read_text())) == 2
    shutil.rmtree(whole / "compressed-3")
    shutil.rmtree(whole / "iteration-3")
    assert cli.main(arguments(work, "whole", betas=(1.0, 0.25))) == 2  # this changes only the compressed value model
    said = capsys.readouterr().err
    assert "compress.betas" in said
    assert "--out, or --no-compress" in said


@pytest.fixture(scope="module")
def by_text(work):
    """A loop whose values have a tokenizer of their own, in which two words have changed places."""
    torch.set_num_threads(1)
    tiny_model(work / "reader", "llama", scale=0.3)
    tokens = json.loads((work / "reader" / "tokenizer.json").read_text())
    words = tokens["model"]["vocab"]
    words["w0"], words["w1"] = words["w1"], words["w0"]
    (work / "reader" / "tokenizer.json").write_text(json.dumps(tokens))
    options = {"value__path": work / "reader", "value__epochs": 1}
    assert cli.main(arguments(work, "by text", **options)) == 0
    return work / "by text"


@pytest.mark.parametrize(("loop", "reads"), [("whole", ModelValue), ("by_text", guides.TextValue)])
def test_guided_rollouts_are_those_of_the_search(work, loop, reads, request):
    whole = request.getfixturevalue(loop)
    tokenizer, model = (
        AutoTokenizer.from_pretrained(work / "policy"),
        decoder.load(work / "policy", dtype=torch.float64),
    )
    rollouts = load_rollouts(whole / "iteration-2" / "rollouts")
    sampling = Sampling(max_new_tokens=6, stop_ids=(EOS,))
    values = guides.load_values([whole / "iteration-1" / "value"], [1.0], tokenizer, sampling, dtype=torch.float64)
    assert isinstance(values[0][0], reads)
    compressed = json.loads((whole / "compressed-2" / "value.json").read_text())
    assert compressed["after"]["mse"] < compressed["before"]["mse"]
    seed = 0 ^ (1 << 61) ^ (2 << 48)
    for row, (prompt, own) in enumerate(rollouts.tokens()):
        assert tokenizer.decode(prompt) == PROMPTS[row]
        [found], _ = guided_search.search(
            model, [prompt], guided_search.Search(2, 4, 2), sampling, values, seed=seed, index=[row]
        )
        assert own == [list(one.tokens) for one in found for _ in range(one.places)]
        logprobs = [one.logprob for one in found for _ in range(one.places)]
        assert rollouts.logprobs[row].tolist() == pytest.approx(logprobs, abs=1e-5)
    assert row == len(PROMPTS) - 3  # two are held out


def test_the_best_of_each_search_is_kept(work, capsys):
    """Algorithm 4 returns one response: of every search, with its own noise, the one with the largest reward."""
    options = {"keep": "best", "searches": 3, "value__epochs": 1, "value__head_only": True, "softmax": True}
    flags = [f"--{name.replace('_', '-')}" for name in ("softmax", "value.head_only")]
    changes = {name: value for name, value in options.items() if value is not True}
    command = arguments(work, "best", *flags, "--no-compress", **changes)
    assert cli.main(command) == 0
    assert "the best of 2 beams x 4 chunks" in " ".join(capsys.readouterr().out.split())
    tokenizer, model = (
        AutoTokenizer.from_pretrained(work / "policy"),
        decoder.load(work / "policy", dtype=torch.float64),
    )
    sampling = Sampling(max_new_tokens=6, stop_ids=(EOS,))
    values = guides.load_values(
        [work / "best" / "iteration-1" / "value"], [1.0], tokenizer, sampling, dtype=torch.float64
    )
    rollouts, how = load_rollouts(work / "best" / "iteration-2" / "rollouts"), guided_search.Search(2, 4, 2)
    seeds = [0 ^ (1 << 61) ^ (2 << 48) ^ (number << 32) for number in range(3)]
    different = 0
    for row, (prompt, own) in enumerate(rollouts.tokens()):
        expected = []
        for seed in seeds:
            [found], _ = guided_search.search(model, [prompt], how, sampling, values, seed=seed, index=[row])
            expected.append(max(found, key=lambda one: sum(i < 16 for i in one.tokens)))
        assert own == [list(one.tokens) for one in expected]
        assert rollouts.logprobs[row].tolist() == pytest.approx([one.logprob for one in expected], abs=1e-5)
        different += len({one.tokens for one in expected})
    _, second = json.loads((work / "best" / "iro.json").read_text())
    assert second["samples"] == 3
    assert second["distinct_prefixes"]["6"] == pytest.approx(different / (row + 1))
    assert different > row + 1
    policy = load_file(work / "policy" / "model.safetensors")
    for t in (1, 2):  # SPI, Remark 3.2
        value = load_file(work / "best" / f"iteration-{t}" / "value" / "model" / "model.safetensors")
        same = [name for name, weight in value.items() if name in policy and torch.equal(weight, policy[name])]
        assert len(same) == len(value) - 1
    assert cli.main(command) == 0  # finished
    assert cli.main(arguments(work, "best", *flags, "--no-compress", **changes | {"keep": "all"})) == 2
    assert "iro.keep: 'best' -> 'all'" in capsys.readouterr().err


def test_loops_of_older_versions_resume(work, whole, capsys):
    """Their config.json lacks the options that were added since."""
    saved = json.loads((whole / "config.json").read_text())
    for name in ("softmax", "keep", "searches"):
        del saved["iro"][name]
    for name in ("drop_equal", "head_only"):
        del saved["iro"]["value"][name]
    (whole / "config.json").write_text(json.dumps(saved))
    assert cli.main(arguments(work, "whole", keep="best")) == 2
    assert "iro.keep: 'all' -> 'best'" in capsys.readouterr().err
    assert cli.main(arguments(work, "whole")) == 0
    assert "is already done" in capsys.readouterr().out
    guide = guides.read_guide(whole)
    fields = {"beams": 2, "successors": 4, "chunk": 2, "temperature": 0.0, "diverse": True, "likeliest": False}
    models = [guides.digest_of_value(path) for path in guide.values]
    digest = hashlib.sha256(json.dumps([models, [1.0, 0.5], fields]).encode()).hexdigest()[:16]
    assert guide.digest() == digest  # of guided rollouts, as before there was a softmax


def test_distinct_prefixes():
    completions = [[[1, 2, 3], [1, 2, 4], [1, 5]], [[7], [7], [7, 8]]]
    assert [distinct_prefixes(completions, n) for n in (1, 2, 3)] == [1.0, 2.0, 2.5]


def test_guided_rollouts_are_not_taken_for_the_references(work, whole, capsys):
    command = [*arguments(work, "whole")[1:]]
    train = ["train", *command[: command.index("--out")], "--train.steps", "1", "--train.out", str(work / "t")]
    train += ["--calibration.rollouts", str(whole / "iteration-2" / "rollouts"), "--rewards.low.transform", "exp:2"]
    train += ["--rewards.low.objective", "mean", "--rollout.prompts", "2", "--rollout.samples", "2"]
    assert cli.main(train) == 2
    said = capsys.readouterr().err
    assert "responses of a search guided by value models, but the run needs samples of the model without" in said


def test_candidates_that_ended_early_fill_their_places():
    found = [
        [Candidate((1, 2), True, 0.0, (-1.0, -2.0), 2), Candidate((3,), False, 0.0, (-3.0,), 1)],
        [Candidate((4,), False, 0.0, (-4.0,), 1)] * 3,
    ]
    rollout = convert.as_rollout([[7], [8, 9]], found)
    assert rollout.completion_ids() == [[1, 2], [1, 2], [3], [4], [4], [4]]
    assert rollout.finished.tolist() == [[True, True, False], [False] * 3]
    assert rollout.logprobs.sum(-1).tolist() == [[-3.0, -3.0, -3.0], [-4.0] * 3]


def test_each_iteration_takes_the_next_prompts(work, monkeypatch):
    changes = {"prompts": 5, "iterations": 3, "betas": ()}
    options, cfg = iro.read_arguments(arguments(work, "none", **changes)[1:])
    loop = Loop(options, cfg, WorkQueue(Ranks(0, 1, torch.device("cpu")), Console(quiet=True)), work / "none")
    monkeypatch.setattr(guides.Guide, "digest", lambda _: "")  # of values that are not there yet
    # ten are for training, and no value learns from the last two of them; two are held out
    new = [[0, 1, 2], [3, 4, 5], [6, 7, 0]]
    for t, own in enumerate(new, 1):
        assert loop.job(t).batch.index == [*own, 8, 9]
        assert loop.job(t).batch.prompts == [PROMPTS[i] for i in [*own, 8, 9]]
    asked = [(i,) for own in new for i in (*own, 8, 9)]
    kept = [prompt for prompt in asked if prompt != (9,)]  # no reward judges the last prompt
    empty = [[] for _ in kept]
    learned, held = Outcomes(kept, empty, empty, torch.zeros(len(kept)), asked).split(2)  # as the compressed value does
    assert (set(learned.asked), set(held.asked)) == ({(i,) for i in range(8)}, {(8,)})
    ids = [*"abcdefbgg"]  # of a repeated prompt, no value learns where it is held out
    assert [[ids[i] for i in loop._prompts(t, ids)] for t in (1, 2, 3)] == [[*"acdbg"], [*"efabg"], [*"cdebg"]]
    assert [loop._prompts(t, ["a", "a", "a"]) for t in (1, 2)] == [[0, 1, 2], [0, 1, 2]]
    seeds = {loop._seed(t) for t in range(1, 100)}
    assert len(seeds) == 99


def test_no_stage_holds_out_more_than_an_iteration_does(work):
    """Of five prompts two are held out, whatever is requested, and the compressed value holds out no others."""
    changes = {"prompts": 5, "value__held_out": 16, "value__epochs": 1, "samples": 4}
    assert cli.main(arguments(work, "few", **changes)) == 0
    configs = [
        json.loads((work / "few" / run / "config.json").read_text())
        for run in ("iteration-1/value", "iteration-2/value", "compressed-2")
    ]
    assert [config["evaluation"]["prompts"] for config in configs] == [2, 2, 2]
    assert configs[2]["data"]["rewards"] == []


def test_generation_with_what_was_learned(work, whole, capsys):
    common = ["generate", *PROMPTS[:2], "--model", str(work / "policy"), "--max-new-tokens", "6", "--beams", "2"]
    common += ["--successors", "3", "--chunk", "2", "--json"]
    assert cli.main([*common, "--guide", str(whole)]) == 0
    ours, said = capsys.readouterr()
    assert "2 beams x 3 chunks of 2 tokens" in said
    assert cli.main([*common[: common.index("--beams")], "--guide", str(whole)]) == 0
    assert "2 beams x 4 chunks of 2 tokens" in capsys.readouterr().err  # as it was learned with
    named = [str(whole / f"iteration-{t}" / "value") for t in (1, 2)]
    assert cli.main([*common, "--guide", *named, "--betas", "1", "0.5"]) == 0
    assert capsys.readouterr().out == ours
    assert cli.main([*common, "--guide", str(whole / "compressed-2")]) == 0
    assert capsys.readouterr().out.count("finish_reason") == 2
    assert cli.main([*common[: common.index("--beams")], "--guide", str(whole / "compressed-2")]) == 0
    assert "2 beams x 4 chunks of 2 tokens" in capsys.readouterr().err
    moved = whole.rename(work / "moved")
    assert cli.main([*common, "--guide", str(moved)]) == 0
    assert capsys.readouterr().out == ours
    moved.rename(whole)
    text = (whole / "guide.json").read_text()
    (whole / "guide.json").write_text(text[:-20])
    assert cli.main([*common, "--guide", str(whole)]) == 2
    assert "guide.json cannot be read" in capsys.readouterr().err
    (whole / "guide.json").write_text(text)


@pytest.mark.slow
def test_what_was_killed_or_stopped_goes_on(work, whole):
    stages = {
        "in the first rollouts": ("nlgrpo.engine.rollouts.collect:RolloutCollector.score", 2),
        "in the first value": ("nlgrpo.training.scalar_heads:ScalarHeadTrainer.update", 3),
        "in guided rollouts": ("nlgrpo.engine.rollouts.collect:RolloutCollector.score", 9),
        "in the second value": ("nlgrpo.training.scalar_heads:ScalarHeadTrainer.update", 27),
        "while it is compressed": ("nlgrpo.training.scalar_heads:ScalarHeadTrainer.update", 38),
    }
    command, jobs = {"main": "nlgrpo.cli:main"}, []
    for name, order in stages.items():
        for number in (signal.SIGKILL, signal.SIGTERM):
            jobs.append(Job(arguments(work, f"{name} {number}"), *order, number, **command))
            jobs.append(Job(arguments(work, f"{name} {number}"), **command))
    ended = run_all(jobs)
    for i, name in enumerate(stages):
        killed, again, stopped, going_on = ended[4 * i : 4 * i + 4]
        assert (killed.status, again.status) == (-signal.SIGKILL, 0), again.output
        assert (stopped.status, going_on.status) == (0, 0), stopped.output
        assert "stopped and saved" in stopped.output, name
        for number in (signal.SIGKILL, signal.SIGTERM):
            folder = work / f"{name} {int(number)}"
            for file in ("iro.json", "compressed-2/model/model.safetensors", "iteration-2/value/value.json"):
                assert (folder / file).read_bytes() == (whole / file).read_bytes(), (name, file)


PARTLY = """
def low(prompts, completion_ids, **_):
    return [None if p == "w0 w1" else sum(i < 16 for i in ids) / 6 for p, ids in zip(prompts, completion_ids)]
"""


def test_a_prompt_that_no_reward_judges(work):
    """Its completions are left out of what is fitted and of the means; the loop comes to its end."""
    (work / "partly.py").write_text(PARTLY)
    options = {"rewards__low__function": f"{work / 'partly.py'}:low", "iterations": 1, "betas": (), "value__lam": 0.5}
    assert cli.main(arguments(work, "partly", "--no-compress", **options)) == 0
    [found] = json.loads((work / "partly" / "iro.json").read_text())
    worth = 2.0 * load_rollouts(work / "partly" / "iteration-1" / "rollouts").rewards["low"]
    assert worth[0].isnan().all()
    assert found["mean"]["value"] == pytest.approx(worth[1:].mean(1).mean().item())
    assert found["best"]["value"] == pytest.approx(worth[1:].amax(1).mean().item())
    fitted = json.loads((work / "partly" / "iteration-1" / "value" / "config.json").read_text())
    assert fitted["loss"] == {"kind": "mse", "lam": 0.5, "gamma": 1.0}


def test_a_loop_that_has_not_ended(work, tmp_path, capsys):
    (tmp_path / "iteration-1").mkdir()
    assert cli.main(["generate", "w1", "--model", str(work / "policy"), "--guide", str(tmp_path)]) == 2
    assert "has not finished; run it again to resume" in capsys.readouterr().err


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"iterations": 0, "betas": ()}, "--iterations 0: allowed is >= 1"),
        ({"samples": 1}, "--samples 1: allowed is 2 to 2^31 - 1"),
        ({"prompts": 0}, "--prompts 0: allowed is >= 1"),
        ({"betas": (1.0,)}, "--betas: 1 numbers for 2 iterations"),
        ({"betas": (1.0, -1.0)}, "--betas -1: allowed is > 0"),
        ({"beams": 0}, "beams = 0"),
        ({"chunk": 6}, "--chunk 6: responses have at most 6 tokens (rollout.max_new_tokens), so no value would guide"),
        (
            {"rewards__low__function": "ngrams", "rewards__low__objective": "rao"},
            "rewards.low compares completions with each other, but a search scores each one separately",
        ),
        ({"value__epochs": 0}, "--value.epochs 0: allowed is > 0"),
        ({"value__completions": 0}, "--value.completions 0: allowed is >= 1"),
        ({"value__lr": -1}, "--value.lr -1: allowed is > 0"),
        ({"value__held_out": -1}, "--value.held-out -1: allowed is >= 0"),
        ({"value__lam": 2}, "--value.lam 2: allowed is in [0, 1]"),
        ({"searches": 0}, "--searches 0: allowed is >= 1"),
        ({"value__path": "nowhere"}, "nowhere"),
        ({"train__restart": True}, "--train.restart is for `nlgrpo train`"),
        ({"model__path": "nowhere"}, "nowhere"),
        ({"rewards__low__function": "rewards.py:lowest"}, "rewards.py"),
    ],
)
def test_refused(work, capsys, changes, said):
    assert cli.main(arguments(work, "refused", **changes)) == 2
    assert said in capsys.readouterr().err
    assert not (work / "refused").exists()


def test_one_completion_per_prompt_has_no_other_reward(work, capsys):
    assert cli.main(arguments(work, "refused", "--value.drop-equal", keep="best")) == 2
    assert "--value.drop-equal with --keep best needs --searches of 2 or more" in capsys.readouterr().err
    assert not (work / "refused").exists()


def test_a_value_model_that_is_too_short(work, tmp_path, capsys):
    tiny_model(tmp_path / "short", "gpt2", n_positions=8)
    assert cli.main(arguments(work, "refused", value__path=tmp_path / "short", rollout__max_new_tokens=9)) == 2
    assert "short has a context of 8 tokens, but prompt and completion can have" in capsys.readouterr().err
    assert not (work / "refused").exists()


def test_a_plan_makes_nothing(work, capsys):
    assert cli.main(arguments(work, "planned", "--dry-run", prompts=5)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "5 of PromptSet(12 prompts" in shown
    assert "different ones in each iteration" in shown
    assert "16 per prompt in iteration 1, then 8: 2 beams x 4 chunks of 2 tokens" in shown
    assert "betas 1, 0.5" in shown
    assert cli.main(arguments(work, "planned", "--dry-run", prompts=None)) == 0
    assert "different ones in each iteration" not in " ".join(capsys.readouterr().out.split())
    assert not (work / "planned").exists()
