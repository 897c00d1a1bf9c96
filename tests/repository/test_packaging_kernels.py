"""``kernels/`` at the root of the repository must not hide Hugging Face's package of the same name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def python(code, *path):
    """Last line that ``python -c code`` prints in the repository's root, with ``path`` as PYTHONPATH."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture
def real(tmp_path):
    """A folder of installed packages with a fake ``kernels`` package of Hugging Face, including metadata."""
    package = tmp_path / "site" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from kernels.utils import answer\n__version__ = '9.9.9'\n")
    (package / "utils.py").write_text("answer = 42\n")
    info = tmp_path / "site" / "kernels-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 9.9.9\n")
    return tmp_path / "site"


def test_transformers_sees_no_kernels_package_and_ours_works():
    code = (
        "import transformers, nlgrpo.kernels, torch; from transformers.utils import is_kernels_available as there;"
        "print(there(), nlgrpo.kernels.linearize(torch.tensor([[1., 2.]]), torch.ones(2)).tolist())"
    )
    assert python(code) == "False [[-1.0, 0.0]]"


def test_without_the_real_package_the_folder_is_an_empty_namespace():
    code = "import kernels as k, sys; print(hasattr(k, '__file__'), hasattr(k, 'linearize'), 'torch' in sys.modules)"
    assert python(code) == "False False False"
    refused = "\ntry:\n    {}\nexcept ImportError as e: print(type(e).__name__)"
    assert python(refused.format("import kernels.reference")) == "ModuleNotFoundError"
    assert python(refused.format("from kernels import get_kernel")) == "ImportError"


def test_ops_are_loaded_once():
    code = "import kernels, nlgrpo.kernels, kernels as again, sys; print([m for m in sys.modules if 'linearize' in m])"
    assert python(code) == "['nlgrpo.kernels.linearize']"


def test_the_real_package_is_found_although_ours_comes_first(real):
    code = (
        "import kernels, kernels.utils, nlgrpo.kernels; print(kernels.__file__, kernels.utils.answer, kernels.answer)"
    )
    assert python(code, real) == f"{real / 'kernels' / '__init__.py'} 42 42"
    code = "import kernels, importlib.util; print(importlib.util.find_spec('kernels').origin)"
    assert python(code, real) == str(real / "kernels" / "__init__.py")


def test_two_clones_leave_the_name_to_the_real_package(real, tmp_path):
    """A second clone of this repository on the path is not taken for the real package."""
    clone = tmp_path / "clone"
    clone.mkdir()
    shutil.copytree(ROOT / "kernels", clone / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    code = "import kernels; print(getattr(kernels, '__version__', None), hasattr(kernels, '__file__'))"
    assert python(code, clone) == "None False"
    assert python(code, clone, real) == "9.9.9 True"


def test_transformers_reads_the_version_of_the_real_package(real):
    code = (
        "from transformers.utils.import_utils import _is_package_available as there; import kernels;"
        "print(there('kernels', return_version=True), kernels.__version__)"
    )
    assert python(code, real) == "(True, '9.9.9') 9.9.9"


def test_an_import_error_of_the_real_package_is_raised(real):
    (real / "kernels" / "__init__.py").write_text("import no_such_dependency\n")
    code = "\ntry:\n    import kernels\nexcept ImportError as e: print(e)"
    assert python(code, real) == "No module named 'no_such_dependency'"
