"""Makes this tree importable without an installation; Python runs it at the start if its folder is on PYTHONPATH.

`nlgrpo.kernels` is the folder ``kernels/`` of the repository. The unpacked wheels go last on the path, so that they
never replace a package of the machine. Subprocesses inherit PYTHONPATH: torchrun's ranks and pytest's workers too.
"""

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


class KernelsFinder(MetaPathFinder):
    """Finds ``nlgrpo.kernels`` in ``kernels/``."""

    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        if name != "nlgrpo.kernels":
            return None
        folder = ROOT / "kernels"
        return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])


def run_the_next_one() -> None:
    """Run the ``sitecustomize`` that this one hides, if the machine has one."""
    others = [folder for folder in sys.path if Path(folder).absolute() != HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


sys.path.insert(0, str(ROOT))  # before another tree that the machine has installed
sys.meta_path.insert(0, KernelsFinder())
if wheels := os.environ.get("NLGRPO_KIT_WHEELS"):
    sys.path.append(wheels)
run_the_next_one()
