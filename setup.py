"""Packaging that pyproject.toml cannot express: ``kernels/`` becomes ``nlgrpo.kernels``, with compiled CPU ops.

The CPU ops in ``csrc/`` are optional. Without torch or a compiler, the package is installed without them, a message
reports it, and plain PyTorch is used instead. ``NLGRPO_BUILD_EXT=1`` makes this an error, ``=0`` skips the build.
The ops use the stable ABIs of PyTorch and Python, so one file works with Python 3.11 or later and torch 2.10 or later.
An isolated build has no torch (requiring it would download gigabytes), so its wheel has no ops and fits any machine;
``pip install --no-build-isolation .`` and ``python -m build --no-isolation`` build the ops against the installed torch.

``NLGRPO_SANITIZE=1`` builds ``_sanitized`` instead of ``_ext``, with AddressSanitizer and UBSan, or fails. An install
never loads a file of that name; ``make test-asan`` builds it and runs the tests with it.
"""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

WANTED = os.environ.get("NLGRPO_BUILD_EXT", "")
SANITIZE = os.environ.get("NLGRPO_SANITIZE") == "1"
TORCH_2_10 = "0x020a000000000000"
FAST = ["-O3", "-g0"]  # Python's flags add debugging information, which makes the file six times larger
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SANITIZED = [
    *SANITIZERS,
    "-g",
    "-O1",
    "-fno-omit-frame-pointer",
    "-fno-wrapv",  # Python's flags have -fwrapv, which makes signed integer overflow legal
    "-U_FORTIFY_SOURCE",  # it replaces functions such as memcpy by ones that AddressSanitizer does not check
    "-D_GLIBCXX_ASSERTIONS",
]


class OptionalBuild(build_ext):
    """Compile against the installed torch. A failure costs only speed, unless the extension was requested."""

    def build_extension(self, ext: Extension) -> None:
        try:
            add_torch(ext)
            with parallel_compilation(self.compiler):
                super().build_extension(ext)
        except Exception as error:  # errors of the compiler and of torch have no common base class
            if WANTED == "1" or SANITIZE:
                raise
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            print(f"nlgrpo: installing without the compiled CPU ops ({reason[0]})", file=sys.stderr)
            ext.optional = True  # later steps of setuptools then do not copy the missing file


@contextmanager
def parallel_compilation(compiler: Any) -> Iterator[None]:
    """Make ``compiler`` compile its sources in parallel; setuptools compiles them one after another."""
    one_by_one = compiler.compile

    def compile_all(sources: list[str], **options: Any) -> list[str]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = pool.map(lambda source: one_by_one([source], **options), sources)
            return [name for names in objects for name in names]

    compiler.compile = compile_all
    try:
        yield
    finally:
        compiler.compile = one_by_one


class TaggedWheel(bdist_wheel):
    """Tag a wheel without the ops as platform-independent."""

    def get_tag(self) -> tuple[str, str, str]:
        self.root_is_pure = not self.distribution.has_ext_modules() or bool(extension.optional)
        return super().get_tag()


def add_torch(ext: Extension) -> None:
    """Add torch's headers (as system headers, without their warnings) and libraries."""
    try:
        from torch.utils.cpp_extension import include_paths, library_paths
    except ImportError as error:
        hint = "an isolated build cannot use the installed torch; use pip --no-build-isolation or build --no-isolation"
        raise ImportError(f"{error}; {hint}") from error

    ext.extra_compile_args += [flag for path in include_paths() for flag in ("-isystem", path)]
    ext.library_dirs += library_paths()
    ext.libraries += ["c10", "torch", "torch_cpu"]


extension = Extension(
    "nlgrpo.kernels._sanitized" if SANITIZE else "nlgrpo.kernels._ext",
    sources=sorted(str(path) for path in Path("csrc").glob("*.cpp")),
    depends=["setup.py", *sorted(str(path) for path in Path("csrc").glob("*.h"))],
    define_macros=[("Py_LIMITED_API", "0x030b0000"), ("TORCH_TARGET_VERSION", TORCH_2_10)],
    extra_compile_args=[
        "-std=c++20",
        *(SANITIZED if SANITIZE else FAST),
        "-fopenmp-simd",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Werror",
    ],
    extra_link_args=SANITIZERS if SANITIZE else [],
    py_limited_api=True,
)

setup(
    packages=[*find_packages(include=["nlgrpo", "nlgrpo.*"]), "nlgrpo.kernels"],
    package_dir={"nlgrpo.kernels": "kernels"},
    package_data={
        "nlgrpo": ["py.typed"],
        "nlgrpo.kernels": ["py.typed"],
        "nlgrpo.data": ["assets/**/*"],
        "nlgrpo.apps.report": ["templates/*"],
    },
    ext_modules=[] if WANTED == "0" else [extension],
    cmdclass={"build_ext": OptionalBuild, "bdist_wheel": TaggedWheel},
    options={} if WANTED == "0" else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
