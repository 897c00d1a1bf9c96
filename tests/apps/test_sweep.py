"""Sweeps: which points a command makes, their names, what the manifest says, and a grid that is stopped and resumes."""

import fcntl
import hashlib
import itertools
import json
import os
import re
import select
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.helpers import environment, tiny_model
from support.sweep_runs import CODE, EVALUATION

from nlgrpo import cli
from nlgrpo.apps.sweep import grid, launchers, runner, sweep
from nlgrpo.apps.sweep.state import SWEEP_FILE, Point, read_sweep_state
from nlgrpo.config.recipes import from_arguments

REWARDS = '''
import os
import time
from pathlib import Path

HERE = Path(__file__).parent


def near(completion_ids, target=3, **kwargs):
    return [-abs(len(ids) - target) / 10 for ids in completion_ids]


def fickle(completion_ids, trainer_state, **kwargs):
    """Fails where a step has 6 completions, as long as a file says so; at step 1 it waits for another one to go."""
    if (HERE / "broken").exists() and len(completion_ids) == 6:
        raise KeyError("no such word")
    if (HERE / "hold").exists() and trainer_state.global_step == 1:
        (HERE / "held.tmp").write_text(str(os.getpid()))
        (HERE / "held.tmp").rename(HERE / "held")
        while (HERE / "hold").exists():
            time.sleep(0.02)
    return near(completion_ids)
'''


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with a model, prompts and rewards."""
    root = tmp_path_factory.mktemp("work")
    tiny_model(root / "model")
    prompts = [" ".join(f"w{(3 * i + j) % 28}" for j in range(1 + i % 4)) for i in range(10)]
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (root / "rewards.py").write_text(REWARDS)
    return root


@pytest.fixture(autouse=True)
def _handlers():
    """Pytest's own signal handlers afterwards."""
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def call(capsys):
    """Exit status, stdout and stderr of ``nlgrpo sweep *arguments``."""

    def run(*arguments):
        try:
            status = cli.main(["sweep", *map(str, arguments)])
        except SystemExit as ended:
            status = ended.code
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


# --- which values an option has ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-2,1e-1", ["1e-2", "1e-1"]),
        ("mean, bon:4", ["mean", "bon:4"]),
        ("mean", ["mean"]),
        ("length(target=25, scale=128)", ["length(target=25, scale=128)"]),
        ("ngrams(n=2, of='words'),equal()", ["ngrams(n=2, of='words')", "equal()"]),
        ("regex(pattern='[(,'),regex(pattern=r'\\','),x", ["regex(pattern='[(,')", "regex(pattern=r'\\',')", "x"]),
        ("'distortion:0,1,2',mean", ["distortion:0,1,2", "mean"]),
        ('"a, b"', ["a, b"]),
        ("'',a", ["", "a"]),
        ("'a','b'", ["a", "b"]),
        ("don't,can't", ["don't", "can't"]),
        ("{a, b},[c, (d, e)]", ["{a, b}", "[c, (d, e)]"]),
        ("(", ["("]),
        ("'x'", ["'x'"]),
        ("", [""]),
    ],
)
def test_commas_outside_of_brackets_and_quotes_part_values(text, values):
    assert grid.split(text) == values


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("f(a,b", "unbalanced bracket"),
        ("a),b", "unbalanced bracket"),
        (")(,a", "unbalanced bracket"),
        ("'a,b", "unbalanced quote"),
        ("a,,b", "empty value between commas"),
        ("a,", "empty value between commas"),
        (",", "empty value between commas"),
    ],
)
def test_values_that_cannot_be_parted(text, said):
    with pytest.raises(ValueError, match=said):
        grid.split(text)


def points(*arguments):
    """The points of a command as (overrides, configuration)."""
    command = grid.read_grid(arguments)
    return [(s.overrides, s.config) for s in grid.settings(command.start, command.rows(), command.axes())]


def test_the_cross_product_of_what_has_several_values():
    found = points(
        "length-bon", "--loss.beta", "1e-2,1", "--seed=0,1,2", "--train.steps", "7", "--optim.betas", "0.5", "0.6"
    )
    truth = [{"loss.beta": beta, "train.seed": seed} for beta in (0.01, 1.0) for seed in (0, 1, 2)]
    assert [overrides for overrides, _ in found] == truth
    for overrides, config in found:
        assert (config.loss.beta, config.train.seed) == tuple(overrides.values())
        assert (config.train.steps, config.optim.betas, config.recipe) == (7, (0.5, 0.6), "length-bon")


def test_an_objective_of_all_rewards_gives_way_to_a_rewards_own():
    more = ("--rewards.other.function", "gsm8k()", "--rewards.long.objective", "wor:2")
    for arguments in (("--objective", "mean,bon:2", *more), (*more, "--objective=mean,bon:2")):
        found = points("length-bon", *arguments)
        assert [overrides for overrides, _ in found] == [{"objective": "mean"}, {"objective": "bon:2"}]
        for overrides, config in found:
            each = {name: reward.objective for name, reward in config.rewards.items()}
            assert each == {"short": overrides["objective"], "long": "wor:2", "other": overrides["objective"]}


@pytest.mark.slow
def test_lists_switches_functions_and_nothing():
    found = points("length-bon", "--evaluation.ns", "[1,4],[8]", "--data.shuffle", "true,false")
    assert [(c.evaluation.ns, c.data.shuffle) for _, c in found] == [
        ((1, 4), True),
        ((1, 4), False),
        ((8,), True),
        ((8,), False),
    ]
    assert found[0][0] == {"evaluation.ns": [1, 4], "data.shuffle": True}
    assert [c.evaluation.ns for _, c in points("length-bon", "--evaluation.ns", "1", "4", "--seed", "1,2")] == [
        (1, 4)
    ] * 2
    assert [c.rollout.stop_ids for _, c in points("length-bon", "--rollout.stop-ids", "[],[3]")] == [(), (3,)]
    assert [c.loss.target_kl for _, c in points("length-bon", "--loss.target-kl", "none,0.1".title())] == [None, 0.1]
    functions = "length(target=1, scale=2),length(target=3, scale=4)"
    found = points("length-bon", "--rewards.short.function", functions, "--rewards.short.scale", "-1,1")
    assert {c.rewards["short"].function for _, c in found} == {"length(target=1, scale=2)", "length(target=3, scale=4)"}
    assert [c.rewards["short"].scale for _, c in found] == [-1, 1, -1, 1]


def test_what_goes_to_train_makes_the_same_configuration(tmp_path):
    (tmp_path / "my.toml").write_text('recipe = "length-mean"\n[loss]\nbeta = 0.5\n')
    arguments = [str(tmp_path / "my.toml"), "--optim.lr", "1e-3,1e-4", "--data.no-shuffle", "--objective", "bon:2"]
    command = grid.read_grid(arguments)
    for setting in grid.settings(command.start, command.rows(), command.axes()):
        config, dry = from_arguments(setting.arguments)
        assert config == setting.config
        assert (config.loss.beta, config.data.shuffle, config.rewards["long"].objective, dry) == (
            0.5,
            False,
            "bon:2",
            False,
        )


# --- names ------------------------------------------------------------------------------------------------------------


def test_names_are_readable_and_tell_points_apart():
    assert grid.folder_name({"loss.beta": 0.01, "objective": "bon:4"}) == "beta=0.01,objective=bon-4"
    assert grid.folder_name({"rewards.short.weight": 1e-5, "train.seed": 3}) == "short.weight=1e-05,seed=3"
    assert (
        grid.folder_name({"evaluation.ns": [1, 4], "data.shuffle": True, "data.limit": None})
        == "ns=1+4,shuffle=true,limit=none"
    )
    assert grid.short_names(["rollout.samples", "evaluation.samples", "objective", "rewards.a.objective"]) == [
        "rollout.samples", "evaluation.samples", "objective", "a.objective",
    ]  # fmt: skip
    values = [
        0.1,
        -0.1,
        1 / 3,
        0.333333,
        "a b",
        "a-b",
        "a/b",
        "../..",
        "",
        "é",
        "\x00\n",
        "x" * 300,
        "x" * 301,
        "A",
        "a",
        "bon:4",
        "bon-4",
    ]
    names = []
    for value in values:
        names.append(grid.folder_name({"model.path": value}, names))
    assert len({name.casefold() for name in names}) == len(values)
    assert all(re.fullmatch(r"[A-Za-z0-9_=.+,-]{1,140}", name) for name in names)
    long = grid.folder_name({f"rewards.r{i}.function": "y" * 50 for i in range(30)})
    assert len(long) < 140


def test_names_are_the_same_in_every_process_and_among_all_points():
    overrides = {"rewards.short.function": "length(target=25, scale=128)", "loss.beta": 0.1}
    values = '{"loss.beta": 0.1, "rewards.short.function": "length(target=25, scale=128)"}'
    digest = hashlib.sha256(values.encode()).hexdigest()[:8]
    for taken in ([], ["something", "else"]):
        assert grid.folder_name(overrides, taken) == f"short.function=length-target=25-scale=128,beta=0.1,{digest}"


# --- the states of points, with runs that do nothing but end ----------------------------------------------------------


@pytest.fixture
def fake(tmp_path, monkeypatch, call):
    """``nlgrpo sweep`` into ``tmp_path / "out"``, whose points end as ``how`` says; returns which of them ran."""
    monkeypatch.setattr(
        launchers, "command", lambda arguments, ranks, nodes=1: [sys.executable, "-c", CODE, *arguments]
    )

    def run(*arguments, **how):
        (tmp_path / "how").write_text(json.dumps({f"beta={name[1:]}": way for name, way in how.items()}))
        (tmp_path / "ran").write_text("")
        status, out, err = call("length-bon", "--out", tmp_path / "out", *arguments)
        return status, (tmp_path / "ran").read_text().split(), out + err

    return run


def states(folder):
    return {point.name: point.state for point in read_sweep_state(folder)}


@pytest.mark.slow
def test_failed_points_do_not_stop_the_others_and_run_again_when_told_to(fake, tmp_path):
    axis = ("--loss.beta", "1,2,3,4,5")
    status, ran, out = fake(*axis, b1="fail", b2="kill", b3="raise", b5="save")
    assert status == 1
    assert ran == [f"beta={i}" for i in range(1, 6)]
    found = {point.name: point for point in read_sweep_state(tmp_path / "out")}
    assert [p.state for p in found.values()] == ["failed", "failed", "failed", "done", "stopped"]
    assert [p.status for p in found.values()] == [1, -signal.SIGKILL, 1, 0, 0]
    errors = ["error: the second", "killed by SIGKILL", "KeyError: 'unnamed'", "", ""]
    assert [p.error for p in found.values()] == errors
    assert [p.overrides for p in found.values()] == [{"loss.beta": float(i)} for i in range(1, 6)]
    assert all(0 < p.seconds < 60 for p in found.values())
    assert "failed: beta=2: killed by SIGKILL" in out
    assert found["beta=1"].log.read_text().startswith(f"$ {shlex.quote(sys.executable)} -c")

    status, ran, out = fake(*axis)
    assert (status, ran) == (1, ["beta=5"])
    assert "failed: beta=1: error: the second" in out
    status, ran, out = fake(*axis, "--retry", b2="fail")
    assert (status, ran) == (1, ["beta=1", "beta=2", "beta=3"])
    assert states(tmp_path / "out") == {f"beta={i}": "failed" if i == 2 else "done" for i in range(1, 6)}
    status, ran, out = fake(*axis, "--retry")
    assert (status, ran) == (0, ["beta=2"])
    assert fake(*axis, "--retry")[:2] == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["full", "full log"])
def test_a_full_disk_ends_the_sweep_and_the_same_command_goes_on(fake, tmp_path, how):
    axis = ("--loss.beta", "1,2,3")
    status, ran, out = fake(*axis, b2=how)
    assert (status, ran) == (2, ["beta=1", "beta=2"])
    said = "cannot write into there: no room" if how == "full" else "No space left on device"
    assert "error: beta=2: " in out.splitlines()[-1]
    assert said in out.splitlines()[-1]
    assert states(tmp_path / "out") == {"beta=1": "done", "beta=2": "stopped", "beta=3": "waiting"}
    assert fake(*axis)[:2] == (0, ["beta=2", "beta=3"])


@pytest.mark.slow
def test_a_manifest_that_has_no_room(fake, tmp_path, monkeypatch):
    fake("--loss.beta", "1,2", b1="fail")
    before = (tmp_path / "out" / SWEEP_FILE).read_bytes()
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(full))
        status, ran, out = fake("--loss.beta", "1,2,3", "--retry")
    assert (status, ran) == (2, [])
    assert f"error: cannot write into {tmp_path / 'out'}: No space left on device." in out
    assert (tmp_path / "out" / SWEEP_FILE).read_bytes() == before
    assert fake("--loss.beta", "1,2,3", "--retry")[:2] == (0, ["beta=1", "beta=3"])


def test_points_are_added_and_kept(fake, tmp_path):
    assert fake("--loss.beta", "1,2")[0] == 0
    before = {point.name: point for point in read_sweep_state(tmp_path / "out")}
    status, ran, out = fake("--loss.beta", "3,1.0", "--dry-run")
    assert (status, ran) == (0, [])
    assert "2 points, 1 to run" in out
    assert {p.name: p for p in read_sweep_state(tmp_path / "out")} == before
    status, ran, _ = fake("--loss.beta", "3,1.0")
    assert (status, ran) == (0, ["beta=3"])
    after = {point.name: point for point in read_sweep_state(tmp_path / "out")}
    assert list(after) == ["beta=1", "beta=2", "beta=3"]
    assert before.items() <= after.items()
    status, ran, _ = fake("--loss.beta", "4")  # one value of what varies is a point of it
    assert (status, ran) == (0, ["beta=4"])


def test_a_sweep_of_an_older_version_goes_on(fake, tmp_path):
    """Its manifest lacks keys that did not exist: they have their defaults, and nothing else does."""
    assert fake("--loss.beta", "1,2")[0] == 0
    manifest = json.loads((tmp_path / "out" / SWEEP_FILE).read_text())
    for section, key in (("loss", "jeffreys"), ("loss", "epochs"), ("calibration", "by")):
        del manifest["base"][section][key]
    (tmp_path / "out" / SWEEP_FILE).write_text(json.dumps(manifest))
    assert fake("--loss.beta", "3")[:2] == (0, ["beta=3"])
    (tmp_path / "out" / SWEEP_FILE).write_text(json.dumps(manifest))
    status, ran, out = fake("--loss.beta", "4", "--loss.epochs", "2")
    assert (status, ran) == (2, [])
    assert "loss.epochs: 1 -> 2" in out


def test_a_run_that_ended_before_its_report_is_not_done(fake, tmp_path):
    assert fake("--loss.beta", "1,2", b1="unreported")[:2] == (1, ["beta=1", "beta=2"])
    assert states(tmp_path / "out") == {"beta=1": "failed", "beta=2": "done"}
    data = json.loads((tmp_path / "out" / SWEEP_FILE).read_text())
    data["points"][0]["state"] = "running"  # the sweep was killed with its run
    (tmp_path / "out" / SWEEP_FILE).write_text(json.dumps(data))
    assert fake("--loss.beta", "1,2")[:2] == (0, ["beta=1"])
    assert states(tmp_path / "out") == {"beta=1": "done", "beta=2": "done"}


@pytest.mark.slow
def test_axes_in_another_order_are_the_same_points(fake, tmp_path):
    assert fake("--loss.beta", "1,2", "--seed", "0,1")[1] == [f"beta={b},seed={s}" for b in (1, 2) for s in (0, 1)]
    assert fake("--seed", "2,0", "--loss.beta", "1,2")[1] == ["beta=1,seed=2", "beta=2,seed=2"]
    assert all(list(p.overrides) == ["loss.beta", "train.seed"] for p in read_sweep_state(tmp_path / "out"))


@pytest.mark.slow
def test_folders_are_believed_before_the_manifest(fake, tmp_path):
    axis, out = ("--loss.beta", "1,2,3,4"), tmp_path / "out"
    assert fake(*axis, b4="fail")[0] == 1
    (out / "beta=1" / "evaluation.json").write_text("{")
    (out / "beta=2").rename(out / "away")
    for name in ("evaluation.json", "report.html"):
        (out / "away" / name).rename(out / "beta=4" / name)
    data = json.loads((out / SWEEP_FILE).read_text())
    data["points"][2]["state"] = "running"
    (out / SWEEP_FILE).write_text(json.dumps(data))
    status, ran, shown = fake(*axis, "--dry-run")
    assert re.findall(r"(done|stopped|waiting) *\n", shown) == ["stopped", "waiting", "done", "done"]
    status, ran, _ = fake(*axis)
    assert (status, ran) == (0, ["beta=1", "beta=2"])


def test_what_is_printed(fake):
    axes = ("--loss.beta", "1,2", "--seed", "3,4")
    _, _, out = fake(*axes, "--evaluation.ns", "1", "2")
    assert "[2/4] beta=1,seed=4: starts\n[2/4] beta=1,seed=4: done after 0:00:0" in out
    assert re.search(r"\[3/4\].*; about 0:00:\d\d left\n", out)
    values = EVALUATION["rewards"]["short"]
    pairs = [statistics.mean(map(max, itertools.combinations(row, 2))) for row in values]
    table = out[out.index("\n beta") :]
    assert table.split()[:7] == ["beta", "seed", "mean", "best-of-2", "KL", "time", "state"]
    numbers = (statistics.mean(map(statistics.mean, values)), statistics.mean(pairs), 0.125)
    assert [table.count(f" {number:.4f} ") for number in numbers] == [4, 4, 4]


@pytest.mark.slow
def test_a_signal_ends_the_sweep_with_its_run(fake, tmp_path):
    def kill():
        while not (tmp_path / "held").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=kill).start()
    status, ran, out = fake("--loss.beta", "1,2,3", b1="fail", b2="hold")
    assert (status, ran) == (0, ["beta=1", "beta=2"])
    assert out.endswith("stopped; run the same command again to resume\n")
    assert states(tmp_path / "out") == {"beta=1": "failed", "beta=2": "stopped", "beta=3": "waiting"}
    assert fake("--loss.beta", "1,2,3")[:2] == (1, ["beta=2", "beta=3"])


def test_several_points_run_at_a_time(fake, tmp_path):
    axis = ("--loss.beta", "1,2,3,4", "--jobs", "2")
    status, ran, _ = fake(*axis, b1="meet", b2="fail")  # 1 ends once another has begun
    assert (status, sorted(ran)) == (1, ["beta=1", "beta=2", "beta=3", "beta=4"])
    assert states(tmp_path / "out") == {"beta=1": "done", "beta=2": "failed", "beta=3": "done", "beta=4": "done"}
    assert fake(*axis, "--retry")[:2] == (0, ["beta=2"])


@pytest.mark.slow
def test_a_signal_ends_all_points_that_run(fake, tmp_path):
    def kill():
        while not (tmp_path / "ran").exists() or len((tmp_path / "ran").read_text().split()) < 2:
            time.sleep(0.02)
        while not (tmp_path / "held").exists():
            time.sleep(0.02)
        time.sleep(0.5)  # the other one has set its handler, too
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=kill).start()
    status, _, _ = fake("--loss.beta", "1,2,3", "--jobs", "2", b1="hold", b2="hold")
    assert status == 0
    assert states(tmp_path / "out") == {"beta=1": "stopped", "beta=2": "stopped", "beta=3": "waiting"}


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("word", ["starts", "done"])
def test_output_that_nobody_reads_ends_the_sweep(fake, tmp_path, monkeypatch, jobs, word):
    say = runner.say

    def gone(line):
        if word in line:
            raise BrokenPipeError(32, "Broken pipe")
        say(line)

    monkeypatch.setattr(runner, "say", gone)
    (tmp_path / "how").write_text("{}")
    with pytest.raises(BrokenPipeError):
        sweep.main(["length-bon", "--out", str(tmp_path / "out"), "--loss.beta", "1,2,3,4", "--jobs", jobs])
    assert set(states(tmp_path / "out").values()) <= {"waiting", "stopped", "done"}
    assert "waiting" in states(tmp_path / "out").values()


@pytest.mark.slow
@pytest.mark.parametrize("other", ["hold", "deaf"])  # it saves, or has not come to where it would
def test_a_full_disk_stops_the_other_points_too(fake, tmp_path, other):
    status, _, out = fake("--loss.beta", "1,2,3", "--jobs", "2", b1=other, b2="full")
    assert status == 2
    assert "beta=2: cannot write into there: no room" in out
    assert states(tmp_path / "out") == {"beta=1": "stopped", "beta=2": "stopped", "beta=3": "waiting"}


def test_signals_do_again_what_they_did(fake):
    before = signal.getsignal(signal.SIGTERM)
    fake("--loss.beta", "1,2")
    assert signal.getsignal(signal.SIGTERM) == before


def test_each_of_several_jobs_has_its_own_machine(monkeypatch):
    monkeypatch.setattr(launchers.torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    alone = launchers._environment(0, 2, 1)
    assert not {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"} & set(alone)
    assert [launchers._environment(place, 2, 2)["CUDA_VISIBLE_DEVICES"] for place in (0, 1)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    assert [launchers._environment(place, 1, 4)["CUDA_VISIBLE_DEVICES"] for place in range(4)] == ["7", "5", "3", "1"]
    monkeypatch.setattr(launchers.torch, "get_num_threads", lambda: 12)
    assert [launchers._environment(0, 1, jobs)["OMP_NUM_THREADS"] for jobs in (2, 5, 99)] == ["6", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "12")
    assert launchers._environment(0, 1, 2)["OMP_NUM_THREADS"] == "6"
    with pytest.raises(ValueError, match="3 of 2 ranks each need 6 GPUs, and there are 4"):
        sweep._check([], 2, 3)


def test_runs_look_for_the_package_where_the_sweep_did(fake, tmp_path, monkeypatch):
    log = tmp_path / "out" / "logs" / "beta=1.log"
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    fake("--loss.beta", "1,2")
    assert "SAFE True" in log.read_text()
    monkeypatch.syspath_prepend(os.getcwd())
    (tmp_path / "out" / "beta=1" / "evaluation.json").unlink()
    fake("--loss.beta", "1,2")
    assert "SAFE False" in log.read_text()


STARTS = """
import subprocess, sys, threading
from nlgrpo.runtime.supervision import ending_with_parent
def start():
    subprocess.Popen(ending_with_parent.command(sys.argv[1:]), start_new_session=True).wait()
threads = [threading.Thread(target=threading.Event().wait) for _ in range(300)] + [threading.Thread(target=start)]
for thread in threads: thread.start()
"""
CLAIMS = """
import os, pathlib, signal, sys
from nlgrpo.apps.sweep.runner import locked
folder = pathlib.Path(sys.argv[1])
with locked(folder):
    (folder / "logs").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""
COUNTS = """
import os, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print(os.getpid(), flush=True)
count = 0
while signal.sigtimedwait([signal.SIGTERM], 2 if count else 30): count += 1
print(count, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the signal exists on Linux only")
def test_a_run_gets_one_sigterm_when_its_sweep_is_killed():
    starting = [sys.executable, "-c", STARTS, sys.executable, "-c", COUNTS]
    with subprocess.Popen(starting, stdout=subprocess.PIPE, text=True, env=environment()) as sweeping:
        running = os.pidfd_open(int(sweeping.stdout.readline()))
        sweeping.kill()
        assert sweeping.stdout.read() == "1\n"  # its end: no other process has the pipe
        assert select.select([running], [], [], 10)[0]  # the run has ended
    os.close(running)


def test_several_ranks_are_started_by_torchrun():
    several = launchers.command(["train", "blank"], 2)
    assert several[1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "nlgrpo.cli", "train", "blank"
    ]  # fmt: skip
    assert launchers.command(["train", "blank"], 1)[1:] == ["-m", "nlgrpo.cli", "train", "blank"]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no option has several values"),
        (["--loss.beta", "1"], "no option has several values"),
        (["--loss.beta", "1", "2"], "separate values by commas, without spaces: 1,2"),
        (["--loss.beta", "1,2", "--loss.beta", "3"], "--loss.beta is given twice"),
        (["--loss.target-kl", "1,2", "--loss.target_kl", "3"], "--loss.target_kl is given twice"),
        (["--data.no-shuffle", "--data.shuffle", "true,false"], "--data.shuffle is given twice"),
        (["--data.shuffle", "true,false", "--data.no_shuffle"], "--data.no_shuffle is given twice"),
        (["--seed", "1,2", "--train.seed", "3"], "--train.seed is given twice"),
        (["--loss.beta", "1,2", "--jobs", "1", "--jobs", "2"], "--jobs is given twice"),
        (["--loss.beta", "1,2", "--slurm.nodes", "2"], "--slurm.nodes: only with --launcher slurm"),
        (["--evaluation.ns", "1,4"], "write [1,4] for one value, [1],[4] for 2"),
        (["--evaluation.ns", "[1,4],8"], "write [[1,4],8] for one value"),
        (["--loss.beta", "1,2", "--train.out", "x"], "--train.out cannot be given to a sweep"),
        (["--train.restart", "--loss.beta", "1,2"], "--train.restart cannot be given to a sweep"),
        (["--train.restart", "true", "--loss.beta", "1,2"], "--train.restart cannot be given to a sweep"),
        (["--loss.beta", "1e-2,0.01"], "two points have the same configuration"),
        (
            ["--objective", "mean,bon:2", "--rewards.short.objective=mean", "--rewards.long.objective=mean"],
            "have the same configuration",
        ),
        (["blank", "--objective", "mean,bon:2"], "--objective needs a reward, and there is none"),
        (["--loss.beta", "1,2", "--nproc-per-node", "0"], "--nproc-per-node = 0"),
        (["--loss.beta", "1,2", "--jobs", "0"], "--jobs = 0: allowed is >= 1"),
        (["--loss.beta", "1,2", "--evaluation.prompts", "0"], "a sweep needs the evaluation"),
        (["-x", "--loss.beta", "1,2"], "-x is not an option"),
        (["no-such-recipe", "--loss.beta", "1,2"], "unknown recipe"),
        (["--loss.bta", "1,2"], "--loss.bta"),
        (["--loss.beta", "1,two"], "two"),
        (["--loss.beta", "1,\udc80"], "is not valid UTF-8"),
    ],
)
def test_refused(arguments, said, call, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    named = [] if arguments[:1] and not arguments[0].startswith("-") else ["length-bon"]
    status, _, err = call(*named, *arguments, "--out", tmp_path / "out")
    assert status in (1, 2)
    assert said in " ".join(err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("start", "row", "said"),
    [
        (["length-bon", "--optim.lr", "1e-3"], {"optim.lr": "1e-5"}, "optim.lr = 0.001 is given for all points, and"),
        (["length-bon", "--optim.lr=1e-3"], {"optim.lr": "1e-5"}, "optim.lr = 0.001 is given for all points"),
        (["length-bon", "--data.no-shuffle"], {"data.shuffle": "true"}, "data.shuffle = false is given for all points"),
        (["length-bon", "--rewards.short.objective", "wor:2"], {"objective": "mean"},
         "rewards.short.objective = wor:2 is given for all points, and --objective of the grid overrides it"),
    ],
)  # fmt: skip
def test_an_option_that_the_grid_overrides_is_refused(start, row, said):
    rows = [row | {"train.seed": seed} for seed in "12"]
    with pytest.raises(ValueError, match=re.escape(said)):
        grid.settings(start, rows, ["train.seed"])


def test_an_option_that_a_point_keeps_is_not_refused():
    rows = [{"optim.lr": lr} for lr in ("1e-3", "1e-5")]
    found = grid.settings(["length-bon", "--optim.lr", "1e-3"], rows, ["optim.lr"])
    assert [setting.config.optim.lr for setting in found] == [1e-3, 1e-5]


def test_points_have_the_same_options():
    rows = [{"optim.lr": "1e-3", "train.seed": "1"}, {"optim.lr": "1e-5"}]
    with pytest.raises(ValueError, match=r"point 2 of the grid and the first one differ in the options train\.seed"):
        grid.settings(["length-bon"], rows, ["optim.lr"])


def test_the_arguments_of_a_point_have_each_option_once():
    command = grid.read_grid(["length-bon", "--objective", "mean,bon:2", "--rewards.long.objective", "wor:2"])
    for setting in grid.settings(command.start, command.rows(), command.axes()):
        options = [argument.partition("=")[0] for argument in setting.arguments if argument.startswith("--")]
        assert len(options) == len(set(options)) == 2


def test_all_faults_of_all_points_in_one_message(call, tmp_path):
    axes = ("--loss.beta", "0.1,-1", "--objective", "mean,bom:4", "--rollout.prompts", "3", "--nproc-per-node", "2")
    status, _, err = call("length-bon", "--out", tmp_path / "out", *axes)
    assert status == 2
    assert err.startswith("error: 4 of 4 points cannot be run:\n")
    assert "rollout.prompts = 3: it must be a multiple of the number of ranks, 2 (all)\n" in err
    assert "loss.beta = -1.0: allowed is >= 0 (beta=-1,objective=mean; beta=-1,objective=bom-4)\n" in err
    assert err.count("rewards.short.objective: ") == err.count("rewards.long.objective: ") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_another_sweep_in_the_folder_is_refused(fake, tmp_path):
    assert fake("--loss.beta", "1,2", "--train.steps", "5")[0] == 0
    before = (tmp_path / "out" / SWEEP_FILE).read_bytes()
    for arguments, said in (
        (("--loss.beta", "1,3"), "  train.steps: 5 -> 400\n  Choose another folder with --out"),
        (
            ("--loss.beta", "1,3", "--train.steps", "5", "--seed", "1,2"),
            "over loss.beta, but this one is over loss.beta, train",
        ),
        (("--seed", "1,2", "--train.steps", "5"), "over loss.beta, but this one is over train.seed"),
    ):
        status, ran, out = fake(*arguments)
        assert (status, ran) == (2, [])
        assert said in out
    assert (tmp_path / "out" / SWEEP_FILE).read_bytes() == before


@pytest.mark.slow
def test_a_sweep_that_was_killed_before_its_manifest_starts(fake, tmp_path):
    with subprocess.Popen([sys.executable, "-c", CLAIMS, str(tmp_path / "out")], env=environment()) as killed:
        assert killed.wait() == -signal.SIGKILL
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"logs", "sweep.lock", "sweep.lock.owner"}
    assert fake("--loss.beta", "1,2")[:2] == (0, ["beta=1", "beta=2"])


@pytest.mark.slow
def test_folders_that_are_no_sweeps(call, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thing").write_text("")
    for name in ("file", "other"):
        for more in ((), ("--dry-run",)):
            status, _, err = call("--loss.beta", "1,2", "--out", tmp_path / name, *more)
            assert (status, "exists but holds no sweep" in err) == (2, True)
    status, _, err = call("--loss.beta", "1,2", "--out", tmp_path / "file" / "inside")
    assert (status, "cannot use" in err) == (2, True)


GOOD = {"overrides": {"loss.beta": 1.0}, "folder": "beta=1", "state": "done", "status": 0, "seconds": 1.5, "error": ""}


def test_read_manifest(tmp_path):
    def write(points, base=None):
        (tmp_path / SWEEP_FILE).write_text(json.dumps({"base": base or {}, "points": points}))

    with pytest.raises(ValueError, match=r"sweep\.json is missing"):
        read_sweep_state(tmp_path)
    write([GOOD, GOOD | {"folder": "b", "status": None, "state": "failed", "error": "x"}])
    assert read_sweep_state(tmp_path) == [
        Point({"loss.beta": 1.0}, tmp_path / "beta=1", "done", 0, 1.5, ""),
        Point({"loss.beta": 1.0}, tmp_path / "b", "failed", None, 1.5, "x"),
    ]
    broken = [
        {"state": "well"},
        {"folder": "../x"},
        {"folder": 3},
        {"overrides": []},
        {"seconds": "1"},
        {"error": None},
        {"more": 1},
    ]
    for change in broken:
        write([GOOD, GOOD | change])
        with pytest.raises(ValueError, match="cannot be read"):
            read_sweep_state(tmp_path)
    for text in (
        "",
        "[]",
        "{}",
        '{"points": [], "base": {}}',
        '{"points": 3, "base": {}}',
        '{"points": [3], "base": {}}',
        "\xff",
    ):
        (tmp_path / SWEEP_FILE).write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match="cannot be read"):
            read_sweep_state(tmp_path)


# --- a whole grid -----------------------------------------------------------------------------------------------------


def command(work):
    rewards = work / "rewards.py"
    options = {
        "out": work / "out",
        "model.path": work / "model",
        "data.source": work / "prompts.jsonl",
        "rollout.prompts": 3,
        "rollout.samples": "4,2",
        "rewards.short.function": f"{rewards}:fickle,{rewards}:near(target=5)",
        "rewards.long.function": "length(target=8, scale=10)",
        "rollout.max-new-tokens": 10,
        "optim.lr": 0.01,
        "objective": "bon:2",
        "train.steps": 3,
        "evaluation.prompts": 4,
        "evaluation.samples": 3,
        "evaluation.ns": "[1,2]",
    }
    return ["blank", *(part for key, value in options.items() for part in (f"--{key}", str(value)))]


def wait_for(path):
    ends = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < ends, f"{path} did not come"
        time.sleep(0.02)
    text = path.read_text()
    path.unlink()
    return text


# what `python -m nlgrpo.cli` does with "train", without the pictures, which take longer than the runs
UNDRAWN = """
import sys
from nlgrpo import train
from nlgrpo.apps.report import report
report.write_report = lambda folder: (folder / "report.html").write_text("")
sys.exit(train.main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_a_grid_is_killed_stopped_broken_and_done(work, call, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = work / "out"

    (work / "hold").write_text("")
    arguments = [sys.executable, "-m", "nlgrpo.cli", "sweep", *command(work)]
    with subprocess.Popen(arguments, env=environment(), stdout=subprocess.DEVNULL) as sweeping:
        running = int(wait_for(work / "held"))
        sweeping.kill()
    assert [point.state for point in read_sweep_state(out)] == ["running", "waiting", "waiting", "waiting"]
    status, _, err = call(*command(work))
    assert (status, "a sweep or a run that it started" in err) == (2, True)
    os.kill(running, signal.SIGKILL)
    with (out / runner.LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the run's goes with it

    def stop():
        wait_for(work / "held")
        os.kill(os.getpid(), signal.SIGTERM)

    def terminate(process, original=subprocess.Popen.terminate):
        original(process)
        (work / "hold").unlink()  # the run gets the signal before its step continues

    monkeypatch.setattr(subprocess.Popen, "terminate", terminate)
    monkeypatch.setattr(launchers, "command", lambda given, *_: [sys.executable, "-c", UNDRAWN, *given])
    thread = threading.Thread(target=stop)
    thread.start()
    status, shown, _ = call(*command(work))
    thread.join()
    assert status == 0
    assert shown.endswith("stopped; run the same command again to resume\n")
    first, *others = read_sweep_state(out)
    assert [first.state, *(point.state for point in others)] == ["stopped", "waiting", "waiting", "waiting"]
    assert first.log.read_text().count("stopped and saved at step 2") == 1

    (work / "broken").write_text("")
    status, shown, _ = call(*command(work))
    assert status == 1
    assert first.log.read_text().count("resuming from step 2") == 1
    found = read_sweep_state(out)
    assert [point.state for point in found] == ["done", "done", "failed", "done"]
    assert found[2].overrides["rollout.samples"] == 2
    assert found[2].error.startswith("error: reward 'short'")
    assert found[2].error in shown

    (work / "broken").unlink()
    status, shown, _ = call(*command(work), "--retry")
    assert status == 0
    assert shown.count("done after") == 1
    for point in read_sweep_state(out):
        config = json.loads((point.folder / "config.json").read_text())
        short = config["rewards"]["short"]["function"]
        assert point.overrides == {"rollout.samples": config["rollout"]["samples"], "rewards.short.function": short}
        assert {reward["objective"] for reward in config["rewards"].values()} == {"bon:2"}
        steps = [json.loads(line)["step"] for line in (point.folder / "metrics.jsonl").read_text().splitlines()]
        assert (point.state, steps) == ("done", [0, 1, 2])
