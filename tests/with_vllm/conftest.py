"""Tests with vLLM itself, which ``make test-vllm`` installs into an environment of its own; skipped elsewhere.

The folder is not named ``vllm``: `tests` is on the path, and TRL would take it for the package.
"""

import importlib.util
import os
from pathlib import Path

import pytest
from vllm_processes import STORY, RealServer, write_model

HERE = Path(__file__).parent

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm"))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Directories of a GPT-2 with a tied head, two Llamas, and a Qwen3."""
    root = tmp_path_factory.mktemp("models")
    return {"gpt2": STORY} | {kind: write_model(root / kind, kind) for kind in ("llama", "tied llama", "qwen3")}


@pytest.fixture
def serve(tmp_path):
    """A function that starts a server; all are killed at the end."""
    started = []

    def start(source: Path, *options: str, samples: bool = True, **environment: str) -> RealServer:
        server = RealServer(source, tmp_path / f"server-{len(started)}.log", list(options), environment, samples)
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        if server.process.poll() is None:
            server.kill()
