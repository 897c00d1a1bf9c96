"""vLLM servers as the engine of a policy: prompts spread by load, weights by a directory, failures survived."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from nlgrpo.config.schema import VLLMConfig
from nlgrpo.engine.backends.base import Completion, EngineError
from nlgrpo.engine.backends.vllm_engine import Request, VLLMEngine, version_of
from nlgrpo.engine.backends.vllm_http import STARTED_BY, Server, ServerDown
from nlgrpo.engine.generation import ModelLimits
from nlgrpo.engine.logprobs import next_token_logprobs
from nlgrpo.model import adapters, decoder, fsdp, lora
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.lora import LoraConfig
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.supervision.threads import in_thread

# seconds until a server that failed is called again: doubled after each failure
SOON = 2.0
LATE = 30.0
LONGER = 10.0  # seconds that other servers get for new weights after the first has them
GRACE = 20.0  # seconds for what servers do when the user stops the run
Result = TypeVar("Result")


SHARED_MEMORY = Path("/dev/shm")  # nosec B108 - a directory of this user, made with the mode 0700


def on_this_machine(urls: Sequence[str]) -> bool:
    """Whether all servers are on this machine, by the names in their URLs."""
    names = {"localhost", "127.0.0.1", "::1", socket.gethostname()}
    return bool(urls) and all(urlsplit(url).hostname in names for url in urls)


def weights_folder(options: VLLMConfig, run: Path, ranks: Ranks, size: float) -> Path:
    """Return the directory in which the servers find the weights; collective, the same on all ranks.

    It is vllm.folder if that is set. If the servers and all ranks are on this machine, it is in the shared memory, if
    two versions of ``size`` bytes fit there, and only this user can read it. Else it is in the folder of the run. What
    a killed trainer of this run left in either of the two is removed.
    """
    if options.folder:
        return Path(options.folder)
    found: Path = ranks.gather_objects(_own_folder(options, run, ranks, size) if ranks.first else None)[0]
    return found


def _own_folder(options: VLLMConfig, run: Path, ranks: Ranks, size: float) -> Path:
    """`weights_folder` on the first rank."""
    beside = run / "engine"
    atomic_files.remove(beside)
    one_machine = ranks.world == int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not (one_machine and on_this_machine(options.servers) and SHARED_MEMORY.is_dir()):
        return beside
    shared = SHARED_MEMORY / f"nlgrpo-{os.getuid()}-{_digest(str(run.resolve()))}"
    if shared.is_dir() and not shared.is_symlink() and shared.stat().st_uid == os.getuid():
        atomic_files.remove(shared)
    if shutil.disk_usage(SHARED_MEMORY).free < 2 * size:
        return beside
    try:
        shared.mkdir(mode=0o700)
    except OSError:  # somebody else has the name, or the memory cannot be written
        return beside
    return shared


@dataclass(kw_only=True)
class VLLMServers(VLLMEngine):
    """Samples on vLLM servers, which `take` gives the weights of the policy.

    Every completion names the weights that sampled each of its tokens. Names are unique for a run, a step and a start
    of the trainer, so a server that was restarted, or serves somebody else, is noticed: it gets the weights again, and
    the prompt is sampled again.
    """

    servers: list[Server]
    compute: torch.dtype
    timeout: float
    stopping: Callable[[], bool] = lambda: False
    """Whether the user wants the run to stop; it does not wait for servers then."""
    adapter: LoraConfig | None = None
    """Settings of adapters that the servers get as such; None: they get all weights, with adapters merged."""
    frozen: Path | None = None
    """Directory of a model that is not trained."""
    base_logprobs: Tensor | None = None
    """Log-probs (V,) of the token after `_probe` under the model without adapters, with which servers are checked."""
    names: list[str] = field(default_factory=list)
    """Of all weights that were given to the servers, in their order."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def connect(
        cls,
        options: VLLMConfig,
        shape: ModelLimits,
        *,
        ranks: Ranks,
        compute: torch.dtype,
        context: int,
        folder: Path,
        pauses: Path | None = None,
        adapter: LoraConfig | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> VLLMServers:
        """Connect to the servers; collective. Waits for one that is still starting.

        ``pauses``: folder of this run only, in which the first rank records which servers it has paused, so that the
        next start resumes them at once if this one is killed meanwhile.

        Raises EngineError if none answers in options.timeout, and for a server that cannot serve the policy.
        """
        servers = [
            Server(url, options.timeout, pause_file=pauses / _digest(url) if pauses and ranks.first else None)
            for url in (given.rstrip("/") for given in options.servers)
        ]
        run = ranks.gather_objects(uuid.uuid4().hex[:8])[0]
        takes_adapters = adapter is not None and options.adapters and not adapter.modules_to_save
        as_adapter = adapter if takes_adapters else None
        engine = cls(
            servers=servers, shape=shape, ranks=ranks, compute=compute, folder=folder, run=run, adapter=as_adapter,
            timeout=options.timeout, stopping=stopping,
        )  # fmt: skip
        ranks.agree(lambda: engine._on_all(lambda server: server.check(context)))
        return engine

    # --- weights ------------------------------------------------------------------------------------------------------

    def take(self, model: Decoder, version: int) -> None:
        name = f"{self.run}:{version}"
        if self.adapter is not None and self.base_logprobs is None:
            tokens = model.tokens
            model.limit_vocabulary(None)  # the probe samples from all rows
            with lora.disabled(model):
                self.base_logprobs = next_token_logprobs(model, self._probe()).cpu()
            model.limit_vocabulary(tokens)
        self._save(model, self._folder(name))
        self._announce(name)
        self.version = version

    def take_directory(self, source: Path) -> None:
        """Sample from the weights in a Hugging Face directory, which the servers read; collective."""
        self.frozen = source.resolve()
        self.adapter = None
        self._announce(f"{self.run}:0")

    def _announce(self, name: str) -> None:
        """Sample from the weights ``name`` from now on, and give them to the servers; collective."""
        if name not in self.names[-1:]:  # the evaluation before training has the weights of step 0 too
            self.names.append(name)

        def give() -> None:
            if self.ranks.first:
                self._on_all(self._give_newest)

        self.ranks.agree(give)
        if self.frozen is None:
            self.keep_weights({self._folder(own) for own in self.names[-2:]})

    def _probe(self) -> list[int]:
        """Return the prompt by which `vllm_http.Server.check_base` knows a model."""
        return [i % self.shape.vocab for i in range(1, 17)]

    def _folder(self, name: str) -> Path:
        own = self.own_folder()
        assert own is not None
        return self.frozen or own / f"policy-{version_of(name)}"

    def _save(self, model: Decoder, folder: Path) -> None:
        """Save the policy, or its adapters, for the servers; collective."""

        def write(parameters: Iterator[tuple[str, Tensor]]) -> None:
            atomic_files.remove(folder)
            if self.adapter is None:
                merged = lora.merged(model, parameters, self.compute)
                decoder.save(model, folder, parameters=merged, dtype=self.compute)
            else:
                adapters.save(model, folder, self.adapter, parameters, base="")

        if self.adapter is None:
            fsdp.save_on_first(model, None if lora.adapted(model) else self.compute, self.ranks, folder, write)
        else:
            fsdp.save_on_first(model, None, self.ranks, folder, write, only=lambda name: lora.is_saved(model, name))

    def _give_newest(self, server: Server) -> None:
        """Give a server the newest weights, unless it has them; one thread at a time."""
        with server.lock:
            name = self.names[-1]
            if self.adapter is None and server.version() == name:
                server.weights = name
            elif self.adapter is None:
                server.load(str(self._folder(name)), name)
            elif server.has_adapter(name):
                server.weights = name
            else:
                assert self.base_logprobs is not None
                server.check_base(self._probe(), self.base_logprobs)
                server.load_adapter(str(self._folder(name)), name)
                if len(self.names) > 2 and server.has_adapter(self.names[-3]):
                    server.unload_adapter(self.names[-3])

    # --- sampling -----------------------------------------------------------------------------------------------------

    def _sample(
        self, requests: Sequence[Request], together: int, report: Callable[[int], None]
    ) -> list[list[Completion]]:
        """Sample each request in a thread. Raises EngineError if no server samples, or one has a fault."""
        since = len(self.names) - 1
        room = threading.Semaphore(together)
        failed = threading.Event()

        def sample(request: Request) -> list[Completion]:
            with room:
                return self._sample_one(request, since, failed)

        jobs = [in_thread(partial(sample, request)) for request in requests]
        try:
            found = []
            for job in jobs:
                found.append(self._result(job))
                report(sum(map(len, found)))
            return found
        finally:
            failed.set()  # if one failed, the others stop

    def _result(self, job: Future[Result]) -> Result:
        """Wait for a job. Raises EngineError if it takes longer than `GRACE` after the user stopped the run."""
        stopped: float | None = None
        while True:
            with contextlib.suppress(TimeoutError):
                return job.result(timeout=0.2)
            if stopped is None and self.stopping():
                stopped = time.monotonic()
            if stopped is not None and time.monotonic() > stopped + GRACE:
                raise EngineError("the run was stopped while vLLM sampled")

    def _sample_one(self, request: Request, since: int, failed: threading.Event) -> list[Completion]:
        """Sample one prompt on the server with the fewest completions to sample, and again elsewhere if it fails.

        ``since``: number in `names` of the weights at the time of the request. Newer ones are allowed too: a server
        continues with them. ``failed``: set when the completions are not needed any more.
        """
        samples = int(request[1]["n"])

        def attempt(server: Server) -> list[Completion]:
            weights = server.weights
            if weights not in self.names[since:]:
                self._give_newest(server)
                weights = server.weights
            found = server.generate(*request, weights if self.adapter else None)
            allowed = set(self.names[since:])
            for completion in found:
                if completion.finish_reason == "abort":
                    raise ServerDown("it aborted the request")
                if not completion.versions or not set(completion.versions) <= allowed:
                    used = completion.versions
                    raise ServerDown(f"it sampled with the weights {used}, not with {self.names[-1]!r}")
            return found

        while not failed.is_set() and not self.closed.is_set():
            server = self._least_busy(samples)
            if server is None:
                self._wait()
                continue
            try:
                found = self._try(attempt, server)
            finally:
                self._done(server, samples)
            if found is not None:
                return found
        raise EngineError("the completions are not needed any more")

    def _least_busy(self, samples: int) -> Server | None:
        """Reserve the server with the fewest completions to sample; None if all failed a moment ago."""
        with self.lock:
            ready = [server for server in self.servers if server.retry_at <= time.monotonic()]
            if not ready:
                return None
            server = min(ready, key=lambda server: (not server.down, server.busy))
            server.busy += samples
            if server.down:  # only this thread tries it, so that it is used again if it is up
                server.retry_at = math.inf
            return server

    def _done(self, server: Server, samples: int) -> None:
        with self.lock:
            server.busy -= samples

    def _on_all(self, work: Callable[[Server], None]) -> None:
        """Run ``work`` on all servers at the same time; one must succeed. The others are tried again when needed.

        Servers that take `LONGER` than the first to succeed are not waited for.
        """

        def succeeds(server: Server) -> bool:
            work(server)
            return True

        while True:
            ready = [server for server in self.servers if server.retry_at <= time.monotonic()]
            jobs = [in_thread(partial(self._try, succeeds, server)) for server in ready]
            until: float | None = None
            while not all(job.done() for job in jobs) and (until is None or time.monotonic() < until):
                wait(jobs, 0.2, FIRST_EXCEPTION)
                if until is None and any(job.done() and job.result() for job in jobs):
                    until = time.monotonic() + LONGER
                if self.stopping() and until is None:
                    until = time.monotonic() + GRACE
            if any(job.done() and job.result() for job in jobs):
                return
            self._wait()

    def _try(self, work: Callable[[Server], Result], server: Server) -> Result | None:
        """Run ``work`` on a server; None if it is down. Says so once, and when it is up again."""
        start = time.monotonic()
        try:
            result = work(server)
        except ServerDown as error:
            now = time.monotonic()
            if not server.down:
                self._say(f"{server.url} does not sample: {error}")
                server.down_at = now
            server.down = str(error) or "no reason"
            server.weights = ""
            server.failures = server.failures + 1
            soon = min(SOON * 2 ** min(server.failures - 1, 10), LATE)
            server.retry_at = now + max(soon, now - start)  # a hung server is tried for at most half of the time
            return None
        except BaseException:
            server.retry_at = 0.0
            raise
        if server.down:
            self._say(f"{server.url} samples again")
        server.down = ""
        server.failures = 0
        server.retry_at = 0.0
        return result

    def _wait(self) -> None:
        """Wait a moment for a server. Raises EngineError if all have been down for too long, or the run is stopped."""
        down = all(server.down for server in self.servers)
        late = down and time.monotonic() > max(server.down_at for server in self.servers) + self.timeout
        if late or (down and self.stopping()):
            after = "the run was stopped" if self.stopping() else f"after {self.timeout:g} s (vllm.timeout)"
            why = "; ".join(f"{server.url}: {server.down}" for server in self.servers)
            raise EngineError(f"no vLLM server samples, {after}: {why}. Start one with: {STARTED_BY}")
        time.sleep(0.1)

    def _say(self, text: str) -> None:
        print(f"vLLM: {text}", file=sys.stderr, flush=True)

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        self.closed.set()
        if self.frozen is None:
            self.remove_folder()


def _digest(url: str) -> str:
    """Return a file name for a server, without the password that its URL may have."""
    return hashlib.sha256(url.encode()).hexdigest()[:16]
