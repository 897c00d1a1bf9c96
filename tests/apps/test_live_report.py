"""`nlgrpo watch`: the page in a real browser while metrics arrive, several runs, and folders that are not there yet."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from support import browser

from nlgrpo.apps.report.live_report import LiveReport, server

needs_browser = pytest.mark.skipif(browser.PROGRAM is None, reason=browser.MISSING)
pytestmark = pytest.mark.usefixtures("one_thread")


def write_run(folder, steps, total=10):
    folder.mkdir(parents=True, exist_ok=True)
    config = {"train": {"steps": total}, "rewards": {"short": {"function": "length(target=25)", "objective": "bon:4"}}}
    (folder / "config.json").write_text(json.dumps(config))
    metrics = ("objective/short", "kl", "entropy", "grad_norm", "loss", "completions/mean_length")
    lines = [{"step": i, "reward": i / 10, **dict.fromkeys(metrics, i / 5)} for i in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def serve(tmp_path):
    """A function that serves the report of folders; returns it and its address."""
    started = []

    def start(*folders):
        (tmp_path / "page").mkdir()
        live = LiveReport(folders, tmp_path / "page")
        served = server(live, "127.0.0.1", 0)
        threading.Thread(target=served.serve_forever, args=(0.02,), daemon=True).start()
        started.append(served)
        return live, f"http://127.0.0.1:{served.server_address[1]}"

    yield start
    for served in started:
        served.shutdown()
        served.server_close()


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as response:
        return response.read().decode()


@pytest.mark.slow
def test_the_report_is_rebuilt_when_a_file_changes_and_not_else(tmp_path, serve):
    run = tmp_path / "run"
    live, url = serve(run)
    assert json.loads(get(f"{url}/state")) == {"version": 0, "lines": []}
    assert live.update()
    assert json.loads(get(f"{url}/state")) == {"version": 1, "lines": [f"waiting for {run}"]}
    assert "no run yet" in get(f"{url}/report")
    write_run(run, 3)
    assert live.update()
    assert not live.update()
    state = json.loads(get(f"{url}/state"))
    assert state["version"] == 2
    [line] = state["lines"]
    assert re.fullmatch(r"run: 3/10, logged 0:\d\d ago", line)
    first = get(f"{url}/report")
    assert "bon:4" in first
    write_run(run, 6)
    assert live.update()
    assert get(f"{url}/report") != first
    (run / "metrics.jsonl").write_text('{"step": 0, "re')  # a reader may see half of a line
    assert live.update()
    assert json.loads(get(f"{url}/state"))["lines"][0].startswith("run: 0/10")
    assert not any((run / name).exists() for name in ("report.html", "curves.png"))  # it writes nothing into the run


def test_several_runs_a_sweep_and_one_that_is_not_there_yet(tmp_path, serve):
    write_run(tmp_path / "a", 2)
    for point in ("0", "1"):
        write_run(tmp_path / "sweep" / point, 4)
    live, url = serve(tmp_path / "a", tmp_path / "sweep", tmp_path / "b")
    live.update()
    lines = json.loads(get(f"{url}/state"))["lines"]
    assert [line.partition(",")[0] for line in lines] == [
        f"waiting for {tmp_path / 'b'}",
        "a: 2/10",
        "sweep/0: 4/10",
        "sweep/1: 4/10",
    ]


def test_other_hosts_and_paths_are_refused(tmp_path, serve):
    _, url = serve(tmp_path)
    for address, headers, status in ((f"{url}/state", {"Host": "evil.example"}, 403), (f"{url}/etc/passwd", {}, 404)):
        with pytest.raises(urllib.error.HTTPError) as error:
            get(address, **headers)
        assert error.value.code == status


@pytest.mark.slow
@needs_browser
def test_a_browser_follows_a_run(tmp_path, serve):
    run = tmp_path / "run"
    write_run(run, 2)
    live, url = serve(run)
    live.update()
    with browser.Browser(tmp_path / "home") as page:
        page.visit(f"{url}/")
        wait_for(lambda: "run: 2/10" in page.run("document.querySelector('p').textContent"))
        frame = "document.querySelector('iframe')"
        window = f"{frame}.contentWindow"
        # there is no document during navigation
        curves = f"{frame}.contentDocument?.getElementById('charts-data')?.textContent ?? ''"
        wait_for(lambda: page.run(curves))
        wait_for(lambda: page.run(f"{frame}.contentDocument.querySelectorAll('.uplot').length"))
        scroll = f"{window}.scrollTo(0, 120), {window}.scrollY"
        wait_for(lambda: page.run(scroll) == 120)  # once the report is that high
        page.run(f"{frame}.dispatchEvent(new Event('load'))")
        assert page.run(f"{window}.scrollY") == 120
        address, drawn = page.run(f"{frame}.src"), page.run(curves)
        write_run(run, 9)
        live.update()
        wait_for(lambda: page.run(f"{frame}.src") != address)
        wait_for(lambda: "run: 9/10" in page.run("document.querySelector('p').textContent"))
        wait_for(lambda: page.run(curves) not in ("", drawn))
        wait_for(lambda: page.run(f"{window}.scrollY") == 120)
        page.screenshot(tmp_path / "watch.png")
        assert page.console == []
        assert all(request.startswith((url, "data:")) for request in page.requests)


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.1)


@pytest.mark.slow
def test_the_command_serves_until_ctrl_c(tmp_path):
    write_run(tmp_path / "run", 3)
    command = [sys.executable, "-m", "nlgrpo.cli", "watch", str(tmp_path / "run"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split()[0]
        wait_for(lambda: json.loads(get(f"{url}/state"))["version"] == 1, 60)
        assert "<iframe" in get(f"{url}/")
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert err == ""
    assert out == ""


@pytest.mark.slow
def test_a_port_in_use_is_named(tmp_path, serve):
    _, url = serve(tmp_path)
    port = url.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "nlgrpo.cli", "watch", str(tmp_path), "--port", port], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.strip() == f"error: cannot serve on 127.0.0.1:{port}: Address already in use; try --port 0"


@pytest.mark.slow
def test_folders_are_needed():
    done = subprocess.run([sys.executable, "-m", "nlgrpo.cli", "watch"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no folder given")
