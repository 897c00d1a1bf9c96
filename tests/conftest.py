"""Fixtures shared by the tests."""

import gc
import math
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported, so that its kernels run on the CPU


def _interpret_faster() -> None:
    """Let Triton's interpreter patch the language once per module, not at each call of a device function.

    A launch patches what its own module imports; the patches of a device function's module are never undone. Patching
    again took a third of the time of the interpreted kernels.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:  # Triton is installed on Linux only
        return
    patched: set[int] = set()

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **keywords)

    interpreter.InterpretedFunction.__call__ = call


def _interpret_with_numpy_2_4() -> None:
    """Let a scalar of Triton 3.6's interpreter be the bound of a loop.

    The scalar is an array with one dimension, which NumPy 2.4 does not make a Python number. Triton 3.7 squeezes it.
    """
    try:
        import triton
        from triton.runtime import interpreter
    except ImportError:
        return
    if not triton.__version__.startswith("3.6."):
        return
    patch = interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = with_index


if os.environ.get("TRITON_INTERPRET") == "1":
    _interpret_faster()
    _interpret_with_numpy_2_4()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job of a shell; processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The slowest files, which run first: a slow file that starts last leaves the other cores idle.
LONGEST = [
    "chaos", "packaging", "triton_builds", "sweep_slurm", "cluster_examples", "hangs",  # these are slow
    "linear_policy_loss", "logprob", "ecdf_ops", "train", "policy_loss", "rollout_command", "linearize",
    "distributed", "sweep", "schema", "offline", "alignment", "value_training", "critic", "intervals",
    "decode_command", "evaluate", "html_page", "verify", "report", "reference_rewards", "iro", "learner", "curves",
    "transformers_backend", "vllm_servers", "procedures", "doctor_checks", "gpu_update", "gpu_search",
    "gpu_generation", "gpu_runs", "fake_configurations", "fake_update", "fake_decoding", "rollouts_ahead", "serving",
    "decoding_memory", "reward_processes",
]  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    _mark_unsampled(items)


def _mark_unsampled(items: list[pytest.Item]) -> None:
    """Mark all but one in N cases of a test with ``@pytest.mark.sampled(N)`` slow: the same ones each time."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for several in cases.values():
        (every,) = several[0].get_closest_marker("sampled").args
        several.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in several[math.ceil(len(several) / every) :]:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Exclude imported libraries from garbage collection, which takes 0.3 s or more at the end of each run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Device on which an op runs."""
    if torch.cuda.is_available() and request.param == "cpu" and "triton" in request.node.callspec.params.values():
        pytest.skip("Triton's kernels are compiled for the GPU here")
    return request.param


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of real models and data that are not part of the project; ``NLGRPO_SHARED`` sets another one."""
    folder = Path(os.environ.get("NLGRPO_SHARED", Path(__file__).parents[2] / "shared"))
    if not (folder / "models").is_dir():
        pytest.skip(f"real models and data are not at {folder} (set NLGRPO_SHARED)")
    return folder


@pytest.fixture(scope="module")
def no_figures():
    """Commands write no report, and an empty file for each figure: drawing takes longer than a run of a tiny model."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("nlgrpo.apps.report.figures.render", lambda *_, **__: b"")
        patched.setattr("nlgrpo.apps.report.report.write_report", lambda run: run / "report.html")
        yield


@pytest.fixture
def one_thread(monkeypatch):
    """One thread, for reproducible runs in this process, and wide tables; restores pytest's signal handlers."""
    monkeypatch.setenv("COLUMNS", "200")
    threads, handlers = torch.get_num_threads(), {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)
