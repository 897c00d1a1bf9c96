"""`make help` lists every target, and the workflows, .ci/run and the hooks call what is there."""

import re
import subprocess

import pytest
import yaml
from support.helpers import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (REPOSITORY / "Makefile").read_text("utf-8")
PHONY = set(" ".join(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)).split())


def test_make_lists_every_target():
    # `make test` runs this test, and a make below another make prints the directories that it enters.
    command = ["make", "--no-print-directory"]
    shown = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    described = {line.split()[1] for line in shown.splitlines() if len(line.split()) > 2}
    assert described == PHONY


def targets_of(text):
    """Targets of the calls of make in a shell script."""
    return {word for call in re.findall(r"\bmake ([^\n#]*)", text) for word in call.split() if word in PHONY}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_targets_of_the_makefile(path):
    jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"]
    assert all(job["steps"] and "timeout-minutes" in job for name, job in jobs.items() if name != "deploy")
    steps = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    called = [word for run in steps for word in re.findall(r"\bmake (\S+)", run)]
    assert called
    assert all(word in PHONY or word == "${{" for word in called)


def test_the_workflows_and_the_local_script_call_the_same_tests():
    local = targets_of((REPOSITORY / ".ci" / "run").read_text("utf-8"))
    jobs = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text("utf-8"))["jobs"]
    called = targets_of("\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"]))
    for job in jobs.values():
        called |= set(job.get("strategy", {}).get("matrix", {}).get("target", []))
    assert local <= called
    assert called <= PHONY


def test_hooks_call_the_tools_of_make_check():
    (repository,) = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert repository["repo"] == "local"  # no network
    check = MAKEFILE.partition("\ncheck:")[2].partition("\n\n")[0]
    for hook in repository["hooks"]:
        tool = hook["entry"].removeprefix(".venv/bin/").split()[0]
        assert f"$(RUN){tool}" in check
