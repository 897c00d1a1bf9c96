"""The command `nlgrpo doctor`: its table, JSON file and exit status. `test_doctor_checks.py` breaks what it checks."""

import getpass
import json
import math
import socket
from pathlib import Path

import pytest

from nlgrpo import cli
from nlgrpo.apps.doctor import check_packages, doctor
from nlgrpo.apps.doctor.findings import Check, Result, without_folders

NAMES = ["packages", "cpu", "gpu", "disk", "shared-memory", "ranks", "attention", "ops", "kernels", "training"]
STATUSES = {"ok", "warning", "failed", "skipped"}


@pytest.fixture
def call(capsys, monkeypatch):
    """Exit status, stdout and stderr of ``nlgrpo doctor *arguments``."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        try:
            status = cli.main(["doctor", *arguments])
        except SystemExit as ended:
            status = ended.code
        shown = capsys.readouterr()
        assert "Traceback" not in shown.out + shown.err
        return status, shown.out, shown.err

    return run


def planted(*results, name="planted"):
    """A check with these results; an exception among them is raised."""

    def find():
        for result in results:
            if isinstance(result, BaseException):
                raise result
            yield result

    return Check(name, "a planted check", find, "the advice of the check")


def check_record(record):
    """Check types and names of everything in a JSON file."""
    assert set(record) == {"format", "date", "versions", "platform", "settings", "passed", "seconds", "results"}
    assert record["format"] == 1
    assert {"python", "nlgrpo", "torch", "triton", "transformers"} <= record["versions"].keys()
    assert set(record["platform"]) == {"system", "machine"}
    for result in record["results"]:
        assert set(result) == {"name", "status", "detail", "advice", "seconds", "numbers"}
        assert result["status"] in STATUSES
        assert result["detail"]
        assert result["status"] != "failed" or result["advice"]
        assert result["seconds"] >= 0
        values = [value for value in result["numbers"].values() if isinstance(value, float)]
        assert all(math.isfinite(value) for value in values)
    assert record["passed"] == all(result["status"] != "failed" for result in record["results"])


def refuse_private(text):
    """No folder, user or host of this machine is in a file that users attach to an issue."""
    assert str(Path.home()) + "/" not in text
    assert str(Path.cwd()) not in text
    assert f"/{getpass.getuser()}/" not in text
    assert f'"{socket.gethostname()}"' not in text


@pytest.mark.slow
def test_this_machine_is_green(call, tmp_path):
    status, out, _ = call("--json", str(tmp_path / "doctor.json"))
    text = (tmp_path / "doctor.json").read_text("utf-8")
    record = json.loads(text)
    check_record(record)
    refuse_private(text)
    assert status == 0, out
    assert {result["name"].split("/")[0] for result in record["results"]} == set(NAMES)
    assert all(f" {result['name']} " in out for result in record["results"])


def test_the_quick_checks_pass_here(call, tmp_path):
    quick = [name for name in NAMES if name not in ("ranks", "kernels")]
    status, out, _ = call("--only", *quick, "--json", str(tmp_path / "doctor.json"))
    record = json.loads((tmp_path / "doctor.json").read_text("utf-8"))
    check_record(record)
    assert status == 0, out
    assert {result["name"].split("/")[0] for result in record["results"]} == set(quick)
    assert f"{len(record['results'])} results: " in out


def test_checks_are_listed_without_running_them(call, monkeypatch):
    monkeypatch.setattr(doctor, "run", None)
    status, out, _ = call("--list")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == NAMES


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "gpus"], "no check is named 'gpus'; the checks are: packages, cpu, gpu"),
        (["--json", "no/such/folder/doctor.json"], "expected a file in a folder that exists"),
        (["--json", "."], "expected a file in a folder that exists"),
        (["--jsn", "x"], "--jsn"),
    ],
)
def test_wrong_options_give_status_2(arguments, said, call):
    status, out, err = call(*arguments)
    assert status == 2
    assert said in " ".join(err.split())
    assert not out


def test_a_check_that_raises_is_a_failed_result_and_the_others_run(call, monkeypatch, tmp_path):
    raising = planted(Result("ok", "first", part="a"), OSError("planted\nsecond line"))
    monkeypatch.setattr(doctor, "CHECKS", (raising, planted(Result("ok", "fine"), name="next")))
    status, out, _ = call("--json", str(tmp_path / "doctor.json"))
    record = json.loads((tmp_path / "doctor.json").read_text("utf-8"))
    check_record(record)
    assert status == 1
    assert [(r["name"], r["status"]) for r in record["results"]] == [
        ("planted/a", "ok"),
        ("planted", "failed"),
        ("next", "ok"),
    ]
    assert record["results"][1]["detail"] == "OSError: planted"
    assert "failed: planted: OSError: planted\n    the advice of the check" in out
    assert "3 results: 2 ok, 1 failed" in out


def test_warnings_and_skipped_checks_do_not_fail(call, monkeypatch):
    results = Result("warning", "little [bold] memory", "close programs"), Result("skipped", "no GPU")
    monkeypatch.setattr(doctor, "CHECKS", (planted(*results),))
    status, out, _ = call()
    assert status == 0
    assert "warning: planted: little [bold] memory\n    close programs" in out
    assert "no GPU" in out


def test_json_on_stdout_is_nothing_but_json(call, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", (planted(Result("failed", "wrong", "avoid it")),))
    status, out, err = call("--json", "-")
    assert status == 1
    check_record(json.loads(out))
    assert "failed: planted: wrong" in err


def test_no_secret_and_no_folder_is_written(call, monkeypatch, tmp_path):
    monkeypatch.setenv("NLGRPO_API_KEY", "planted-secret")
    monkeypatch.setenv("HF_TOKEN", "planted-secret")
    monkeypatch.setenv("NLGRPO_EXT", str(Path.home() / "private" / "ops.so"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    error = FileNotFoundError(f"no {Path.home()}/private/file, nor {Path.cwd()}/other")
    monkeypatch.setattr(doctor, "CHECKS", (planted(error),))
    _, out, _ = call("--json", "-")
    refuse_private(out)
    assert "planted-secret" not in out
    record = json.loads(out)
    assert record["settings"] == {"NLGRPO_EXT": "~/private/ops.so", "OMP_NUM_THREADS": "1"} | {
        name: value for name, value in record["settings"].items() if name in doctor.SETTINGS[:3]
    }
    assert "private/file" in record["results"][0]["detail"]


def test_folders_are_replaced_the_longest_first(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(getpass, "getuser", lambda: "jane")
    text = without_folders(f"{tmp_path}/project/a {tmp_path}/b /data/jane/c")
    assert text == "./a ~/b /data/<user>/c"


def test_versions_are_those_of_the_packages():
    import torch
    import transformers

    found = check_packages.versions()
    # PyPI's wheel is 2.15.0 in its metadata, and 2.15.0+cu130 in Python.
    assert found["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["transformers"] == transformers.__version__
