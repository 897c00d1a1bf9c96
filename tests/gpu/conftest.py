"""Tests of what runs on a GPU: each runs on a CUDA device (marked ``gpu``), and without one as a rehearsal.

A rehearsal runs the same body, so that a typo does not wait for a GPU; of a test with several cases, only the first is
rehearsed. Tests with the fixture `gpu` are rehearsed in a process with the fake device of `fake_cuda`, tests with
`gpu_or_cpu` on the CPU: those use what the fake device does not have, such as FSDP2. There, bounds for bfloat16 hold as
well, but say nothing about the kernels of a GPU.
"""

import pytest
import torch
from support.fake_cuda import on_fake_cuda
from support.random_models import CASES, random_model

HERE = torch.cuda.is_available()
ON_CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a CUDA device, and there is none")]
)


def pytest_collection_modifyitems(config, items):
    """Leave out all but the first rehearsal of a test: `test_fake_configurations.py` runs the cases on the fake device.

    Beside a real device, skip the counts on the fake one, for which Triton does not compile its kernels.
    """
    rehearsed = set()
    kept = []
    left_out = []
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        is_rehearsal = parameters.get("gpu") == "fake" or parameters.get("gpu_or_cpu") == "cpu"
        if is_rehearsal and item.function in rehearsed:
            left_out.append(item)
            continue
        if is_rehearsal:
            rehearsed.add(item.function)
        kept.append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
    for item in items:
        if HERE and item.path.parent.name == "gpu" and item.path.name.startswith("test_fake_"):
            item.add_marker(pytest.mark.skip(reason="there is a CUDA device, so the fake one is not used"))


@pytest.fixture(params=[ON_CUDA] if HERE else [ON_CUDA, "fake"])
def gpu(request):
    """The CUDA device, or the fake one."""
    return torch.device("cuda", 0)


@pytest.fixture(params=[ON_CUDA] if HERE else [ON_CUDA, "cpu"])
def gpu_or_cpu(request):
    """The CUDA device, or the CPU."""
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a rehearsal on the fake device in a process that has one. Its fixtures are made before, in this process."""
    parameters = pyfuncitem.callspec.params if hasattr(pyfuncitem, "callspec") else {}
    if parameters.get("gpu") != "fake":
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    on_fake_cuda(lambda device: pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Return the folder of a random model in float32 with two layers, by its name in ``random_models.CASES``."""
    root = tmp_path_factory.mktemp("models")

    def folder(case):
        if not (root / case).is_dir():
            kind, sizes = CASES[case]
            layers = "n_layer" if "n_layer" in sizes else "num_hidden_layers"
            with pytest.MonkeyPatch.context() as patched:
                patched.setitem(CASES, case, (kind, sizes | {layers: 2}))
                random_model(case).save_pretrained(root / case)
        return root / case

    return folder
