"""The runner of the GPU kit: limits, failures, skips and kills leave what was measured in the JSON."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu_kit import __main__, child, machine, plan
from gpu_kit.plan import Step
from gpu_kit.runner import LEAST, Runner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# A step is a program with the path of its values as its argument.
PUT = "import json, sys; json.dump({'values': {'x': 1.5}%s}, open(sys.argv[1], 'w'))"
GOOD = PUT % ", 'status': 'ok'"
BAD = "print('what it printed'); raise SystemExit(7)"
SKIPS = PUT % ", 'status': 'skipped', 'error': 'no such card'"
# Its grandchild has a process group of its own, as the ranks of torchrun have.
HANGS = (
    PUT % "" + "; import subprocess, time; "
    "p = subprocess.Popen(['sleep', '300'], start_new_session=True); "
    "json.dump({'values': {'x': 1.5, 'grandchild': p.pid}}, open(sys.argv[1], 'w')); time.sleep(300)"
)


def runner(path, programs, **options):
    """A runner of steps that are ``programs``, by name."""

    def command(step, out, limit):
        return [sys.executable, "-c", programs[step.name], str(out)]

    record = {"steps": {}}
    return Runner(path, record, lambda: dict(os.environ), command=command, **options)


def steps(*names, seconds=60.0):
    return [Step(name, "check", seconds, "", "") for name in names]


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_failed_step_does_not_stop_the_next_and_each_is_written_at_once(tmp_path, capsys):
    path = tmp_path / "result.json"
    look = f"import json; assert json.load(open({str(path)!r}))['steps']['bad']['status'] == 'failed'; " + GOOD
    status = runner(path, {"bad": BAD, "skips": SKIPS, "good": look}).run(steps("bad", "skips", "good"))
    found = json.loads(path.read_text())["steps"]
    assert status == 1
    assert [entry["status"] for entry in found.values()] == ["failed", "skipped", "ok"]
    assert found["bad"]["error"] == "the process ended with status 7"
    assert "what it printed" in found["bad"]["output"]
    assert found["skips"]["error"] == "no such card"
    assert found["good"]["values"] == {"x": 1.5}
    assert "what it printed" in capsys.readouterr().err


def test_a_step_without_failures_ends_with_0(tmp_path):
    path = tmp_path / "result.json"
    assert runner(path, {"good": GOOD, "skips": SKIPS}).run(steps("good", "skips")) == 0


@pytest.mark.slow
def test_a_step_is_stopped_at_its_limit_with_all_its_processes_and_keeps_its_values(tmp_path):
    path = tmp_path / "result.json"
    begin = time.perf_counter()
    status = runner(path, {"hangs": HANGS, "good": GOOD}).run([*steps("hangs", seconds=6), *steps("good")])
    assert time.perf_counter() - begin < 100
    found = json.loads(path.read_text())["steps"]
    assert status == 1
    assert found["hangs"]["status"] == "failed"
    assert found["hangs"]["error"] == "stopped at its time limit of 6 s"
    assert found["hangs"]["values"]["x"] == 1.5
    assert not alive(found["hangs"]["values"]["grandchild"])
    assert found["good"]["status"] == "ok"


def test_a_group_has_a_limit_of_its_own(tmp_path):
    path = tmp_path / "result.json"
    limited = runner(path, {"good": GOOD}, group_seconds={"check": LEAST / 2})
    assert limited.run(steps("good")) == 0
    entry = json.loads(path.read_text())["steps"]["good"]
    assert entry["status"] == "skipped"
    assert "no time left" in entry["error"]


DRIVER = """
import sys
sys.path[:0] = [{tests!r}, {scripts!r}]
from pathlib import Path
import test_kit_runner as kit
bound = "from gpu_kit.child import end_with_the_parent; end_with_the_parent(); "
programs = dict(good=kit.GOOD, hangs=bound + kit.HANGS)
sys.exit(kit.runner(Path({path!r}), programs).run(kit.steps("good", "hangs", seconds=200)))
"""


def interrupted(path, number):
    """Run a good step and one that hangs; send ``number`` to the runner when the latter has written its values."""
    here = Path(__file__).parent
    scripts = str(plan.ROOT / "scripts")
    code = DRIVER.format(tests=str(here), scripts=scripts, path=str(path))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([scripts, str(plan.ROOT)]), "TMPDIR": str(path.parent)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=plan.ROOT)
    try:
        end = time.perf_counter() + 100
        while not (written := [*path.parent.glob("nlgrpo-gpu-*/values.json")]) or "grand" not in written[0].read_text():
            assert time.perf_counter() < end
            time.sleep(0.05)
        values = json.loads(written[0].read_text())["values"]
        process.send_signal(number)
        return process.wait(60), values
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_keeps_what_was_measured(number, tmp_path):
    path = tmp_path / "result.json"
    status, values = interrupted(path, number)
    assert status == 128 + number
    found = json.loads(path.read_text())["steps"]
    assert found["good"]["status"] == "ok"
    assert found["good"]["values"] == {"x": 1.5}
    assert found["hangs"]["status"] == "stopped"
    assert found["hangs"]["values"] == values
    assert not alive(values["grandchild"])
    assert not [*tmp_path.glob("nlgrpo-gpu-*")]


def test_a_kill_keeps_the_finished_steps(tmp_path):
    path = tmp_path / "result.json"
    status, values = interrupted(path, signal.SIGKILL)
    os.kill(values["grandchild"], signal.SIGKILL)
    assert status == -signal.SIGKILL
    found = json.loads(path.read_text())["steps"]
    assert found["good"]["status"] == "ok"
    assert found["good"]["values"] == {"x": 1.5}
    assert "hangs" not in found


# --- a step -----------------------------------------------------------------------------------------------------------


def run_child(tmp_path, monkeypatch, run):
    """Run the step `smoke` with the function ``run`` in place of its own; return its status and what it wrote."""
    monkeypatch.setitem(sys.modules, "gpu_kit.check_smoke", SimpleNamespace(run=run))
    kit = child.Kit(tmp_path / "values.json", True, tmp_path)
    status = child.run("smoke", kit)
    return status, json.loads(kit.out.read_text())


def test_a_step_that_cannot_run_is_skipped_with_its_reason(tmp_path, monkeypatch):
    def run(kit):
        kit.put(seen=True)
        raise child.Skip("too little memory: needs 80.0 GiB, 24.0 GiB are free")

    status, written = run_child(tmp_path, monkeypatch, run)
    assert status == 0
    assert written == {
        "values": {"seen": True},
        "status": "skipped",
        "error": "too little memory: needs 80.0 GiB, 24.0 GiB are free",
    }


@pytest.mark.parametrize("error", [RuntimeError("two\nlines"), SystemExit("two\nlines")])
def test_a_step_that_raises_has_failed_with_one_line(tmp_path, monkeypatch, error, capsys):
    def run(kit):
        raise error

    status, written = run_child(tmp_path, monkeypatch, run)
    assert status == 1
    assert written["status"] == "failed"
    assert written["error"] == f"{type(error).__name__}: two lines"
    assert "Traceback" in capsys.readouterr().err


def test_values_name_no_folder_of_the_user(tmp_path):
    text = plan.tidy(f"{plan.ROOT}/nlgrpo/train.py, {sys.base_prefix}/lib/x.py and {Path.home()}/models")
    assert text == "nlgrpo/train.py, <python>/lib/x.py and ~/models"


# --- the command line -------------------------------------------------------------------------------------------------


def gpu(*arguments):
    command = [str(plan.ROOT / "scripts" / "gpu.sh"), *arguments]
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "--only", "smok"], "no step is named 'smok'; did you mean 'smoke'?"),
        (["check", "--only", "ops"], "--only ops: check has none of these steps"),
        (["chek"], "invalid choice: 'chek'"),
        (["check", "--rehearse", "--out", "/dev/null/results"], "cannot write into /dev/null/results: "),
        (["check", "--rehearse", "--out", "bench/results/gpu"], "a rehearsal does not write among the results of GPUs"),
    ],
)
def test_what_cannot_run_is_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(machine, "probe", lambda environment: {"card": None})
    try:
        status = __main__.main(arguments)
    except SystemExit as ended:  # for an argument that cannot be parsed
        status = ended.code
    assert status == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not shown.out


@pytest.mark.slow
def test_without_a_gpu_the_script_says_so():
    done = gpu("check")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "finds no GPU; --rehearse runs every step on a CPU" in line
    assert not done.stdout


def test_the_steps_are_listed():
    done = gpu("--list")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(plan.NAMES)
    assert done.returncode == 0


def test_every_step_has_a_module_and_a_limit_within_its_group():
    for step in plan.STEPS:
        assert (plan.ROOT / "scripts" / f"{step.module.replace('.', '/')}.py").is_file()
        assert step.seconds <= plan.GROUP_SECONDS[step.group]
        assert step.rehearsal
    assert max(plan.GROUP_SECONDS.values()) < 5 * 60
