"""A vLLM server, over HTTP: completions with log-probs, weights, and their version."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from torch import Tensor

from nlgrpo.engine.backends.base import UNKNOWN, Completion, EngineError

STARTED_BY = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --tokens-only --skip-tokenizer-init --logprobs-mode processed_logprobs "
    "--worker-extension-cls nlgrpo.engine.backends.vllm_worker.Worker"
)

# vLLM's type of the error for a model or an adapter that it does not have. A path that it does not have is "Not Found".
UNKNOWN_MODEL = "NotFoundError"
# Only the text tells a server without the worker extension: status and type are those of every failure in a worker.
WITHOUT_WORKER = "has no attribute 'load_policy'"


class ServerDown(Exception):
    """A server cannot be reached, did not answer in time, or failed; the request may succeed later or elsewhere."""


class Refused(ServerDown):
    """A server answered that it failed."""


PROBE = {"n": 1, "max_tokens": 1, "top_k": 1, "temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "logprobs": 0,
         "stop_token_ids": [], "ignore_eos": True, "detokenize": False, "seed": 0}  # fmt: skip
STARTED_WITH = "default"  # vLLM's name of the weights that a server was started with
SAME_BASE = 0.25  # nats: log-probs of one model differ by less, also in bfloat16 and with quantized weights
PAUSED = 15.0  # seconds that another run may have a server paused


@dataclass
class Server:
    """One server; its methods may be called from several threads."""

    url: str
    timeout: float
    """Seconds until an answer."""
    busy: int = 0
    """Completions that it is sampling for this process."""
    down: str = ""
    """Why the last call failed; "" if it did not."""
    failures: int = 0
    """Calls in a row that failed."""
    down_at: float = 0.0
    """When the first of these calls failed, on the clock of `time.monotonic`."""
    retry_at: float = 0.0
    """When to call it again."""
    weights: str = ""
    """Name of the weights that this process knows it has."""
    base: str = ""
    """Name of the weights that it had at the connection; those under adapters."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """For loading weights."""
    pause_file: Path | None = None
    """Exists while this run has the server paused, so that the next start knows who paused it. None: not recorded."""

    def check(self, context: int) -> None:
        """Check version and limits. Raises EngineError for a server that cannot serve the policy, and ServerDown."""
        numbers = re.findall(r"\d+", str(self._call("GET", "/version", 10.0).get("version", "")))
        if tuple(map(int, numbers[:2])) < (0, 32):
            raise EngineError(f"{self.url} runs vLLM {'.'.join(numbers)}; 0.32 or newer is needed")
        self.base = self.version()
        models = self._call("GET", "/v1/models", 10.0).get("data") or [{}]
        limit = models[0].get("max_model_len")
        if isinstance(limit, int) and limit < context:
            raise EngineError(
                f"{self.url} allows {limit} tokens, but a prompt and its completion can have {context}; start it with "
                f"--max-model-len {context}"
            )
        self._resume_if_abandoned()
        [one] = self.generate([1], PROBE)
        if not one.logprobs or abs(one.logprobs[0]) > 1e-3:
            raise EngineError(
                f"{self.url} returns log-probs {one.logprobs} for the only token that top_k = 1 allows: start it with "
                "--logprobs-mode processed_logprobs"
            )

    def _resume_if_abandoned(self) -> None:
        """Resume a server that a trainer paused for new weights, and that was killed before it resumed it.

        At once if that was an earlier start of this run; after `PAUSED` seconds if it may be another run, still alive.
        """
        ours = self.pause_file is not None and self.pause_file.exists()
        until = time.monotonic() + (0.0 if ours else PAUSED)
        while self._call("GET", "/is_paused", 10.0).get("is_paused"):
            if time.monotonic() > until:
                self._call("POST", "/resume", 60.0)
                break
            time.sleep(0.2)
        self._record_pause(False)

    def version(self) -> str:
        """Name of the weights that the server has."""
        return str(self._call("GET", "/weight_info", 10.0).get("weight_version"))

    def load(self, folder: str, version: str) -> None:
        """Load the weights in ``folder``, and name them ``version``. Requests in flight continue with them."""
        self.pause()
        try:
            self._load_policy(folder, version)
            self._check_loaded(version)
        except (ServerDown, EngineError):
            with contextlib.suppress(ServerDown, EngineError):
                self.resume(UNKNOWN)  # it may have loaded them
            raise
        self.resume(version)
        try:
            self._check_loaded(version)
        except ServerDown:
            self.resume(UNKNOWN)
            raise

    def _load_policy(self, folder: str, version: str) -> None:
        """Call `vllm_worker.Worker.load_policy`. Raises EngineError if it refuses the folder, and ServerDown."""
        for answer in self._rpc("load_policy", folder=folder, name=version):
            if not isinstance(answer, dict):
                continue
            if refused := answer.get("refused"):
                raise EngineError(f"{self.url}: {refused}")
            if outdated := answer.get("outdated"):
                raise ServerDown(outdated)

    def _check_loaded(self, version: str) -> None:
        """Raises ServerDown if the workers have other weights, which another process gave them meanwhile."""
        found = [worker.get("name") for worker in self._rpc("loaded_policy") if isinstance(worker, dict)]
        if set(found) != {version}:
            raise ServerDown(f"another process gave it the weights {found} at the same time")

    def pause(self) -> None:
        """Stop sampling, and keep the requests."""
        self._record_pause(True)
        self._call("POST", "/pause?" + urlencode({"mode": "keep"}), 60.0)

    def resume(self, version: str) -> None:
        """Continue with new weights, named ``version``."""
        self._call("POST", "/reset_prefix_cache", 60.0)
        self._call("POST", "/update_weight_version", 60.0, {"new_version": version})
        self._call("POST", "/resume", 60.0)
        self._record_pause(False)
        self.weights = version

    def _record_pause(self, paused: bool) -> None:
        """Create or remove `pause_file`. Without it the next start only waits longer, so a full disk is no error."""
        if self.pause_file is None:
            return
        with contextlib.suppress(OSError):
            if paused:
                self.pause_file.parent.mkdir(parents=True, exist_ok=True)
                self.pause_file.touch()
            else:
                self.pause_file.unlink(missing_ok=True)
                self.pause_file.parent.rmdir()  # unless other servers are paused

    def check_base(self, ids: Sequence[int], logprobs: Tensor) -> None:
        """Check the model under the adapters by the log-probs (V,) that it must give the token after ``ids``.

        Raises EngineError for another model: if other weights than those of its start were loaded, or if the log-probs
        of 8 samples differ by more than `SAME_BASE` on average.
        """
        if self.base != STARTED_WITH:
            raise EngineError(
                f"{self.url} has the weights {self.base!r} of another run under the adapters; restart it, or set "
                "vllm.adapters = false"
            )
        found = self.generate(ids, PROBE | {"n": 8, "top_k": 0})
        pairs = [(one.tokens[0], one.logprobs[0]) for one in found if one.tokens and one.logprobs]
        gaps = [abs(x - float(logprobs[t])) if 0 <= t < len(logprobs) else math.inf for t, x in pairs]
        gap = sum(gaps) / len(gaps) if gaps else math.inf
        if not gap <= SAME_BASE:  # it may be NaN
            raise EngineError(
                f"{self.url} was started with another model than the one under the adapters: its log-probs differ by "
                f"{gap:.2g} nats; start it with the directory of model.path, or set vllm.adapters = false"
            )

    def load_adapter(self, folder: str, version: str) -> None:
        """Load the adapter in ``folder``; requests name it by ``version``. Raises EngineError if it is refused."""
        try:
            self._call("POST", "/v1/load_lora_adapter", self.timeout, {"lora_name": version, "lora_path": folder})
        except (Refused, EngineError) as error:
            # It refuses an adapter that another rank has loaded meanwhile.
            if not self.has_adapter(version):
                raise EngineError(
                    f"{error}. For adapters, start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora "
                    "and --max-lora-rank RANK; vllm.adapters = false sends merged weights instead"
                ) from error
        self.weights = version

    def has_adapter(self, version: str) -> bool:
        """Whether the server knows the adapter."""
        return any(model.get("id") == version for model in self._call("GET", "/v1/models", 10.0).get("data") or [])

    def unload_adapter(self, version: str) -> None:
        self._call("POST", "/v1/unload_lora_adapter", 60.0, {"lora_name": version})

    def generate(self, ids: Sequence[int], request: Mapping[str, Any], adapter: str | None = None) -> list[Completion]:
        """Sample the completions of one prompt; ``request``: sampling parameters."""
        body = {"token_ids": list(ids), "sampling_params": dict(request)} | ({"model": adapter} if adapter else {})
        answer = self._call("POST", "/inference/v1/generate", self.timeout, body)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            found = [_completion(choice) for choice in choices]
            if adapter is None:
                return found
            name = str(answer["model"])  # of the adapter, on the weights that the spans name
            return [replace(one, versions=[name if set(one.versions) == {self.base} else UNKNOWN]) for one in found]
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"{self.url} returned something else than completions: {error!r}") from error

    def _rpc(self, method: str, **arguments: str) -> list[Any]:
        answer = self._call("POST", "/collective_rpc", self.timeout, {"method": method, "kwargs": arguments})
        return list(answer.get("results") or [])

    def _call(self, method: str, path: str, timeout: float, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        connection = kind(parts.hostname or "", parts.port or (443 if secure else 80), timeout=timeout)
        try:
            connection.request(
                method, parts.path.rstrip("/") + path, None if body is None else json.dumps(body), headers
            )
            response = connection.getresponse()
            status = response.status
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerDown(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        return self._answer(path, status, content)

    def _answer(self, path: str, status: int, content: bytes) -> dict[str, Any]:
        """Return the content of an answer, or raise its error: ServerDown if the request may succeed later."""
        try:
            answer = json.loads(content) if content else {}
        except ValueError:
            answer = {}
        if not isinstance(answer, dict):
            answer = {}
        if status == 200:
            return answer
        error = answer.get("error") or content[:200].decode("utf-8", "replace")
        kind = ""
        message = str(error)
        if isinstance(error, dict):
            kind = str(error.get("type"))
            message = str(error.get("message"))
        if kind == UNKNOWN_MODEL and path == "/inference/v1/generate":
            raise ServerDown(f"it does not know the adapter ({message})")
        if status in (403, 404, 405) or WITHOUT_WORKER in message:
            raise EngineError(
                f"{self.url}{path.partition('?')[0]} is not available ({status}: {message}); start the server with: "
                f"{STARTED_BY}"
            )
        if status >= 500:
            raise Refused(f"status {status}: {message}")
        raise EngineError(f"{self.url}: {message}")


def _completion(choice: Mapping[str, Any]) -> Completion:
    content = (choice.get("logprobs") or {}).get("content") or []
    tokens = list(choice["token_ids"] or [])
    logprobs = [float("nan") if one["logprob"] is None else float(one["logprob"]) for one in content]
    versions = [str(span["version"]) for span in choice.get("weight_versions") or []]
    return Completion(tokens, logprobs, str(choice.get("finish_reason")), versions)
