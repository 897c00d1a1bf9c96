"""A headless Chromium that opens a file and reports on it, over the DevTools protocol through a pipe."""

import base64
import json
import os
import select
import shutil
import subprocess
import time

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "no Chromium is installed (chromium, chromium-browser or google-chrome on the PATH)"
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)


class Browser:
    """One page. ``console`` has its console messages and errors, ``requests`` the addresses that it requested."""

    def __init__(self, folder, seconds=60):  # limit for one answer, and for loading one page
        self.console, self.requests, self._count, self._rest = [], [], 0, b""
        self._seconds = seconds
        read, self._out = os.pipe()
        self._in, write = os.pipe()
        environment = {**os.environ, "HOME": str(folder)}

        def connect():  # file descriptors of the protocol
            a, b = os.dup(read), os.dup(write)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self._process = subprocess.Popen(
            [PROGRAM, *SWITCHES, f"--user-data-dir={folder}/browser", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=connect,
            close_fds=False,
            env=environment,
            start_new_session=True,
        )
        os.close(read)
        os.close(write)
        self._session = None
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def call(self, method, **parameters):
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self._seconds
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path, width=1000, dark=False):
        """Load the file in a window of ``width`` pixels."""
        self.visit(path.resolve().as_uri(), width, dark)

    def visit(self, url, width=1000, dark=False):
        """Load the page at ``url``."""
        phone = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + self._seconds
        while self.run("document.readyState + [...document.images].every(i => i.complete)") != "completetrue":
            assert time.monotonic() < deadline, "the page does not finish loading"
            time.sleep(0.05)

    def run(self, script):
        """Return the value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key, code):
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def mouse(self, kind, x, y, **more):
        """Send "mouseMoved", "mousePressed" or "mouseReleased" at a place of the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", **more)

    def drag(self, start, end, y):
        """Press the mouse at ``start``, move it to ``end``, and release it."""
        self.mouse("mouseMoved", start, y)
        self.mouse("mousePressed", start, y, clickCount=1)
        self.mouse("mouseMoved", (start + end) / 2, y, buttons=1)
        self.mouse("mouseMoved", end, y, buttons=1)
        self.mouse("mouseReleased", end, y, clickCount=1)

    def until(self, script):
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + self._seconds
        while not self.run(script):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.02)

    def screenshot(self, path):
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def _read(self, deadline):
        """Return the next message; record requests and console messages."""
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            assert left > 0, "the browser does not answer"
            assert select.select([self._in], [], [], left)[0], "the browser does not answer"
            more = os.read(self._in, 2**16)
            assert more, "the browser has ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        method, parameters = message.get("method"), message.get("params")
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.console.append(parameters)
        return message
