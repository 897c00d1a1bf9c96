"""A server with the protocol of vLLM 0.32 that samples with nlgrpo's engine, and can be made to fail."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import torch

from nlgrpo.config.schema import VLLMConfig
from nlgrpo.engine import generation
from nlgrpo.engine.backends import vllm_worker
from nlgrpo.engine.backends.servers import VLLMServers
from nlgrpo.engine.sampling import Sampling
from nlgrpo.model import adapters, decoder, lora
from nlgrpo.runtime.distributed import Ranks

SOURCE = Path(__file__).parents[2] / "nlgrpo" / "data" / "assets" / "story-lm"
ONE = Ranks(0, 1, torch.device("cpu"))
PROMPTS = [[1, 50, 60, 70], [1, 80], [1, 90, 91], [1, 100]]
SAMPLING = Sampling(max_new_tokens=12, stop_ids=(2,))


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
    enable_lora: bool = False
    """Started with --enable-lora; the adapters are in ``adapters``."""
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
        self.worker, self.adapters = FakeWorker(self), {}
        self.lock = threading.Lock()
        self.rpc_lock = threading.Lock()
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
            return 200, {"data": [{"id": name, "max_model_len": self.context} for name in ("policy", *self.adapters)]}
        if path == "/is_paused":
            return 200, {"is_paused": self.paused}
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/collective_rpc":
            if self.without_worker:
                message = "Worker failed: 'CPUWorker' object has no attribute 'load_policy'"
                return failed(500, "InternalServerError", message)
            with self.rpc_lock:  # vLLM's engine runs them one after the other
                return 200, {"results": [getattr(self.worker, body["method"])(**body["kwargs"])]}
        if path == "/v1/load_lora_adapter":
            return self.load_adapter(body["lora_name"], Path(body["lora_path"]))
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        if path == "/inference/v1/generate":
            return self.generate(body)
        return 200, {}

    def load_adapter(self, name: str, folder: Path) -> tuple[int, dict]:
        if not self.enable_lora:
            return failed(404, "Not Found", "Not Found")
        if name in self.adapters:
            return failed(400, "InvalidUserInput", f"The lora adapter '{name}' has already been loaded.")
        model, adapter = decoder.load(self.source), adapters.read_adapter(folder)
        lora.attach(model, adapter.config, torch.float32)
        adapters.load_adapter(model, adapter)
        self.adapters[name] = model
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
            return failed(self.status, HTTPStatus(self.status).phrase, self.error)
        asked, ids, version = body["sampling_params"], body["token_ids"], self.lying or self.version
        name = body.get("model")
        if name is not None and name not in self.adapters:
            return failed(404, "NotFoundError", f"The model `{name}` does not exist.", "model")
        model = self.model if name is None else self.adapters[name]
        if asked["max_tokens"] > 1:  # not a probe
            self.prompts.append(ids)
        sampling = Sampling(
            temperature=asked["temperature"], top_k=asked["top_k"], top_p=asked["top_p"], min_p=asked["min_p"],
            max_new_tokens=asked["max_tokens"], stop_ids=tuple(asked["stop_token_ids"]),
        )  # fmt: skip
        with self.lock:  # PyTorch's threads
            rollout = generation.generate(model, [ids], asked["n"], sampling, seed=asked["seed"])
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
        return 200, {"model": name or "policy", "choices": choices[: -1 if self.fault == "fewer" else None]}

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


def failed(status: int, kind: str, message: str, param: str | None = None) -> tuple[int, dict]:
    """An error as vLLM answers it; for a path that it does not have, ``kind`` is the phrase of the status."""
    return status, {"error": {"message": message, "type": kind, "param": param, "code": status}}


class FakeWorker(vllm_worker.Worker):
    """The worker of a `FakeVLLM`, with what the extension uses of vLLM's."""

    def __init__(self, fake: FakeVLLM) -> None:
        self.fake = fake
        self.model_config = SimpleNamespace(hf_config=decoder.read_config(fake.source))

    def reload_weights(self, weights_path: str) -> None:
        self.fake.model = decoder.load(Path(weights_path))

    def get_model(self) -> object:
        return object()


def connect(folder: Path, *fakes: FakeVLLM, timeout: float = 20.0, ranks: Ranks = ONE, **options) -> VLLMServers:
    """Connect to fake servers as the engine of the embedded model."""
    shape = decoder.load(SOURCE).shape
    settings = VLLMConfig(servers=tuple(fake.url for fake in fakes), timeout=timeout)
    return VLLMServers.connect(
        settings, shape, ranks=ranks, compute=torch.float32, context=60, folder=folder / "engine", **options
    )


def change(model: torch.nn.Module, seed: int = 0) -> None:
    """Add small noise to all parameters, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


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
