"""A server with the protocol of vLLM 0.32 that samples with nlgrpo's engine, and can be made to fail."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import torch

from nlgrpo.engine import generation
from nlgrpo.engine.sampling import Sampling
from nlgrpo.model import decoder


@dataclass
class FakeVLLM:
    """Starts with the weights in ``source``. Its attributes may be changed at any time; ``calls`` counts requests."""

    source: Path
    port: int = 0
    context: int = 160
    version: str = "default"
    delay: float = 0.0
    """Seconds that a request takes."""
    status: int = 200
    """Of requests for completions."""
    error: str = "out of memory"
    gate: threading.Event | None = None
    """Requests for completions wait for it."""
    without_worker: bool = False
    """Started without the worker extension."""
    shift: float = 0.0
    """Added to the log-probs of all tokens, but not to those of the first weights."""
    raw: bool = False
    """Returns log-probs before filters."""
    paused: bool = False
    aborts: int = 0
    """Requests that it aborts next."""
    lying: str = ""
    """Version that completions claim."""
    fault: str = ""
    """What is wrong with completions: "fewer", "nan", "vocabulary", "cut", "nothing", "no log-probs"."""
    calls: list[str] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    number: str = "0.32.0"
    most: int = 0
    """Largest number of requests for completions at the same time."""

    def __enter__(self) -> FakeVLLM:
        self.start()
        return self

    def __exit__(self, *error) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, or start again on the same port with the first weights."""
        self.model, self.version, self.running = decoder.load(self.source), "default", 0
        self.loaded, self.adapters = "", {}
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args) -> None:
                pass

            def do_GET(self) -> None:
                self.respond()

            def do_POST(self) -> None:
                self.respond()

            def respond(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = fake.answer(urlsplit(self.path).path, json.loads(body) if body else {})
                content = json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:  # the client has gone
                    pass

        ThreadingHTTPServer.allow_reuse_address = True
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """End it as a kill does: nothing answers any more."""
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path: str, body: dict) -> tuple[int, dict]:
        self.calls.append(path)
        if path == "/version":
            return 200, {"version": self.number}
        if path == "/weight_info":
            return 200, {"weight_version": self.version}
        if path == "/v1/models":
            return 200, {"data": [{"id": "policy", "max_model_len": self.context}]}
        if path == "/is_paused":
            return 200, {"is_paused": self.paused}
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/collective_rpc":
            if body["method"] == "loaded_policy":
                return 200, {"results": [{"name": self.loaded}]}
            folder = Path(body["kwargs"]["folder"])
            if self.without_worker:
                return 500, {"error": {"message": "Worker failed: 'CPUWorker' object has no attribute 'load_policy'"}}
            if not folder.is_dir():
                return 500, {
                    "error": {"message": f"{folder} does not exist here: the server and the trainer need a shared disk"}
                }
            self.model, self.loaded = decoder.load(folder), body["kwargs"]["name"]
        if path == "/inference/v1/generate":
            return self.generate(body)
        return 200, {}

    def generate(self, body: dict) -> tuple[int, dict]:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            return self._generate(body)
        finally:
            with self.lock:
                self.running -= 1

    def _generate(self, body: dict) -> tuple[int, dict]:
        time.sleep(self.delay)
        if self.gate is not None:
            self.gate.wait(60)
        while self.paused:
            time.sleep(0.01)
        if self.status != 200:
            return self.status, {"error": {"message": self.error}}
        asked, ids, version = body["sampling_params"], body["token_ids"], self.lying or self.version
        if asked["top_k"] != 1:  # not the probe of a connection
            self.prompts.append(ids)
        sampling = Sampling(
            temperature=asked["temperature"], top_k=asked["top_k"], top_p=asked["top_p"], min_p=asked["min_p"],
            max_new_tokens=asked["max_tokens"], stop_ids=tuple(asked["stop_token_ids"]),
        )  # fmt: skip
        with self.lock:  # PyTorch's threads
            rollout = generation.generate(self.model, [ids], asked["n"], sampling, seed=asked["seed"])
        if self.raw:
            rollout.logprobs.fill_(-0.7)
        choices = []
        for i, tokens in enumerate(rollout.completion_ids()):
            shift = self.shift if self.version != "default" else 0.0
            logprobs = (rollout.logprobs[0, i, : len(tokens)] + shift).tolist()
            choices.append(self._choice(i, tokens, logprobs, version, rollout.finish_reasons()[i]))
        if self.aborts > 0:
            self.aborts -= 1
            for choice in choices:
                choice["finish_reason"] = "abort"
        return 200, {"model": "policy", "choices": choices[: -1 if self.fault == "fewer" else None]}

    def _choice(self, index: int, tokens: list[int], logprobs: list[float | None], version: str, reason: str) -> dict:
        if self.fault == "nan":
            logprobs = [None, *logprobs[1:]]
        if self.fault == "vocabulary":
            tokens = [5000, *tokens[1:]]
        if self.fault == "cut":
            tokens, logprobs, reason = tokens[:-1] or [7], logprobs[:-1] or [-1.0], "length"
        if self.fault == "nothing":
            tokens, logprobs = [], []
        if self.fault == "no log-probs":
            logprobs = []
        content = [{"token_id": t, "logprob": x} for t, x in zip(tokens, logprobs, strict=False)]
        spans = [{"version": version, "start": 0, "end": len(tokens)}]
        return {"index": index, "token_ids": tokens, "finish_reason": reason, "logprobs": {"content": content},
                "weight_versions": spans}  # fmt: skip


def gap(rollout, model) -> float:
    """Largest difference of the rollout's log-probs from those of a model, by `generate`'s own definition."""
    from nlgrpo.engine import logprobs
    from nlgrpo.model.packing import pack

    samples = rollout.tokens.shape[1]
    prompts = [prompt for prompt in rollout.prompt_ids for _ in range(samples)]
    rows = list(range(len(prompts)))
    packed = pack(prompts, rollout.completion_ids(), rows, 10**6, torch.device("cpu"), group_tokens=10**6)
    own = logprobs.completion_logprobs(model, rollout, packed, 1.0)
    return float((own - rollout.logprobs.flatten(0, 1)).abs().max())
