"""The environment of a step: import paths without an installation, no network, the compiled ops."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from gpu_kit.plan import BUILD, ROOT

WHEELS = BUILD / "gpu-wheels"
OPS = BUILD / "gpu-ops"  # where the step `build` puts the compiled ops
OPS_FILE = OPS / "nlgrpo" / "kernels" / "_ext.abi3.so"


def environment(rehearse: bool) -> dict[str, str]:
    """Return the environment of a step.

    PYTHONPATH begins with the folder of `sitecustomize`, which adds this tree, its kernels and the unpacked wheels.
    NLGRPO_EXT is the library that the step `build` made here, or 0 if there is none. It is left alone if it is set, and
    if an installation has put a library into ``kernels/``.
    """
    here = Path(__file__).parent
    paths = [here / "importing", ROOT / "scripts", ROOT / "bench"]
    old = os.environ.get("PYTHONPATH")
    found = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, [old])]),
        "NLGRPO_KIT_WHEELS": str(WHEELS),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if "NLGRPO_EXT" not in os.environ and not installed_ops():
        found["NLGRPO_EXT"] = str(OPS_FILE) if OPS_FILE.is_file() else "0"
    if rehearse:
        found |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return found


def installed_ops() -> bool:
    """Whether an installation of this tree has built the compiled ops."""
    return any((ROOT / "kernels").glob("_ext*.so"))


def has_compiler() -> bool:
    """Whether the C++ compiler is there that Python's build settings, or CXX, name."""
    name = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    return shutil.which(name.split()[0]) is not None
