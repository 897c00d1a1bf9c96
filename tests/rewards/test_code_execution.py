"""The reward ``code``: programs that pass, fail, cheat, hang, and try to leave their sandbox."""

import os
import socket
import threading
import time

import pytest

from nlgrpo.rewards.processes import code_execution
from nlgrpo.rewards.processes.code_execution import Code, Run, program_of
from nlgrpo.rewards.reward_functions import RewardError, score
from nlgrpo.rewards.specs import load_reward


def sandboxed():
    try:
        Code(seconds=5)
    except ValueError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(sandboxed()), reason=f"no sandbox: {sandboxed()}")

ADD = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
# The form of HumanEval's tests.
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n"


@pytest.fixture(scope="module")
def code():
    return Code(seconds=2.0, memory=512)


def scores(spec, completions, prompts=None, **columns):
    count = len(completions)
    found = score([load_reward("code", spec)], prompts=prompts or ["p"] * count, completions=completions, step=0,
                  completion_ids=[[1]] * count, columns=columns, samples=count, total_steps=1)  # fmt: skip
    return found.values["code"].flatten().tolist(), found.metrics


# --- programs and tests -----------------------------------------------------------------------------------------------


def test_humaneval():
    prompt = 'def add(a, b):\n    """Add two numbers."""\n'
    completions = ["    return a + b\n", "    return a * b\n", f"Here it is:\n```python\n{ADD}```\n", "    return a +"]
    values, metrics = scores("code(column='test', entry='entry_point', continue_prompt=True)", completions,
                             prompts=[prompt] * 4, test=[CHECK] * 4, entry_point=["add"] * 4)  # fmt: skip
    assert values == [1.0, 0.0, 1.0, 0.0]
    assert metrics == {"code/timeouts": [0.0]}


def test_lists_of_tests_as_in_mbpp():
    tests = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(2, 2) == 5"]
    completions = [f"```\n{ADD}```", WRONG, "```python\nx = ("]
    assert scores("code(column='test_list')", completions, test_list=[tests[:2]] * 3)[0] == [1.0, 0.0, 0.0]
    values = scores("code(column='test_list', partial=True)", completions, test_list=[tests] * 3)[0]
    assert values == pytest.approx([2 / 3, 1 / 3, 0.0])
    values = scores("code(column='test_list', partial=True)", completions[:1], test_list=[[]])[0]
    assert values[0] != values[0]  # no tests: it abstains


def test_the_program_of_a_completion():
    assert program_of("x = 1") == "x = 1"
    assert program_of("    return 1", "def f():\n") == "def f():\n    return 1"
    assert program_of("a\n```python\nx = 1\n```\nb\n```py\nx = 2\n```\nc", "def f():\n") == "x = 2\n"
    assert program_of("```\nx = 3") == "x = 3"  # the closing fence was cut off
    assert program_of("") == ""


@pytest.mark.parametrize("trick", ["import os; os._exit(0)", "raise SystemExit", "import sys; sys.exit(0)", "quit()"])
def test_a_program_that_ends_before_the_tests_has_not_passed(code, trick):
    assert code.run(f"{ADD}\n{trick}", "assert add(1, 2) == 4").status == "failed"


def test_a_program_that_hangs_is_counted():
    values, metrics = scores("code(seconds=0.5)", ["while True: pass", "import time; time.sleep(9)", "x = 1"],
                             test=["assert True"] * 3)  # fmt: skip
    assert values == [0.0, 0.0, 1.0]
    assert metrics == {"code/timeouts": [2.0]}


def test_programs_run_at_the_same_time():
    reward = Code(seconds=5.0, workers=8)
    start = time.monotonic()
    values = reward(prompts=["p"] * 8, completions=["import time; time.sleep(0.5)"] * 8, test=["pass"] * 8)
    assert values == [1.0] * 8
    assert time.monotonic() - start < 3.0


# --- the sandbox ------------------------------------------------------------------------------------------------------


@pytest.fixture
def listening():
    """A port of this machine, and the list of connections to it."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0.2)
        connections, stopped = [], threading.Event()

        def accept():
            while not stopped.is_set():
                try:
                    connection, address = server.accept()
                    connection.close()
                    connections.append(address)
                except OSError:
                    continue

        thread = threading.Thread(target=accept)
        thread.start()
        yield server.getsockname()[1], connections
        stopped.set()
        thread.join()


def test_no_network(code, listening):
    port, connections = listening
    program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)"
    assert code.run(program, "").status == "failed"
    assert "Network is unreachable" in code.run(program, "").output
    datagram = "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))"
    assert code.run(datagram, "").status == "failed"
    assert connections == []
    assert Code(isolated=False).run(program, "").status == "passed"  # the test above can fail
    time.sleep(0.5)
    assert len(connections) == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "attack",
    [
        "open({path!r}, 'w').write('x')",
        "import os; os.truncate({path!r}, 0)",
        "import os; os.unlink({path!r})",
        "import os; os.rename({path!r}, {path!r} + '2')",
        "import os; os.link({path!r}, 'own')\nopen('own', 'w')",
        "import os; os.symlink({path!r}, 'own')\nopen('own', 'w')",
        "import os; os.chmod({path!r}, 0o777)",
        "import os; os.utime({path!r}, (0, 0))",
        "import os; os.setxattr({path!r}, 'user.x', b'1')",
        "import os; os.mkdir({path!r} + '-folder')",
        "import shutil, os; shutil.rmtree(os.path.dirname({path!r}))",
    ],
)
def test_files_outside_its_folder_stay_as_they_are(code, tmp_path, attack):
    path = tmp_path / "mine" / "file"
    path.parent.mkdir()
    path.write_text("content")
    before = os.stat(path)
    assert code.run(attack.format(path=str(path)), "").status == "failed"
    after = os.stat(path)
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)
    assert path.read_text() == "content"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_its_own_folder_is_its_own_and_is_removed(code):
    program = "import os, tempfile\nopen('a', 'w').write('x')\nwith tempfile.TemporaryFile() as f: f.write(b'y')\n"
    found = code.run(program + "print(os.getcwd())", "assert open('a').read() == 'x'")
    assert found.status == "passed"
    assert not os.path.exists(found.output.splitlines()[0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "attack",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import multiprocessing\nmultiprocessing.get_context('fork').Process(target=print).start()",
        "import ctypes; assert ctypes.CDLL(None).fork() != -1",
        "import os, signal; os.kill(-1, signal.SIGKILL)",
        "import os; os.kill({pid}, 9)",
        "open('/proc/{pid}/environ').read()",
        "x = bytearray(2**30)",
        "open('big', 'wb').write(bytes(32 * 2**20))",
        "print('x' * 40_000_000)",
        "import os\nfor _ in range(100): os.open('/dev/null', 0)",
        "def f(): f()\nf()",
    ],
)
def test_an_attack_fails_and_costs_little(code, attack):
    start = time.monotonic()
    assert code.run(attack.replace("{pid}", str(os.getpid())), "").status == "failed"
    assert time.monotonic() - start < 2.0


def test_threads_are_allowed(code):
    program = "from concurrent.futures import ThreadPoolExecutor as P\nassert list(P(4).map(abs, [-1])) == [1]"
    assert code.run(program, "").status == "passed"


def test_secrets_of_the_trainer_are_not_in_its_environment(code, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert "secret" not in code.run("import os; print(dict(os.environ))", "").output


def test_a_machine_without_a_sandbox_says_what_to_do(monkeypatch):
    monkeypatch.setattr(code_execution, "NOT_ISOLATED", 1)
    monkeypatch.setattr(Code, "run", lambda self, program, tests: Run("not isolated", "unshare: not permitted\n"))
    message = r"cannot be isolated on this machine \(unshare: not permitted\); code\(isolated=False\) runs it"
    with pytest.raises(ValueError, match=message):
        load_reward("x", "code()")
    reward = load_reward("x", "code(isolated=False)")
    with pytest.raises(RewardError, match="raised RuntimeError: a program could not be isolated: unshare"):
        score([reward], prompts=["p"], completions=["x"], completion_ids=[[1]], columns={"test": [""]}, samples=1,
              step=0, total_steps=1)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("seconds=0", "seconds must be above 0"),
        ("memory=1", "memory must be a whole number of at least 64"),
        ("workers=-1", "workers must be a whole number of at least 0"),
        ("x=1", "does not take 'x'"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_reward("x", f"code({arguments})")
