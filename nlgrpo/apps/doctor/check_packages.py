"""Installed versions compared with the supported ranges."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

from nlgrpo import __version__
from nlgrpo.apps.doctor.findings import Result

PYTHON = ">=3.11"
# The ranges of pyproject.toml, which is not part of an installed package; a test compares them.
REQUIRED = {
    "torch": ">=2.11,<2.16",
    "transformers": ">=5.0,<6",
    "tokenizers": ">=0.22",
    "safetensors": ">=0.5",
    "datasets": ">=4.0",
    "numpy": ">=1.26",
    "pyarrow": ">=15",
    "scipy": ">=1.12",
    "tyro": ">=0.9",
    "shtab": ">=1.7",
    "rich": ">=13.7",
    "matplotlib": ">=3.8",
    "jinja2": ">=3.1",
}
OPTIONAL = {
    "triton": ">=3.6",
    "flash-attn": ">=2.7",
    "wandb": ">=0.20",
    "trackio": ">=0.40",
    "mlflow-skinny": ">=3.5",
    "comet-ml": ">=3.49",
    "tensorboard": ">=2.16",
    "fastapi": ">=0.115",
    "uvicorn": ">=0.32",
}
SHOWN = ("torch", "triton", "transformers")


def versions() -> dict[str, str | None]:
    """Versions of Python, of this package, and of the packages it needs or can use; None for one not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "nlgrpo": __version__}
    for name in (*REQUIRED, *OPTIONAL):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def packages() -> Iterator[Result]:
    """Compare the version of Python and of every package with its supported range."""
    from packaging.specifiers import SpecifierSet

    found = versions()
    wrong = {}
    for name, supported in ({"python": PYTHON} | REQUIRED | OPTIONAL).items():
        version = found[name]
        if version is None and name in REQUIRED:
            wrong[name] = "not installed"
        elif version is not None and not SpecifierSet(supported).contains(version, prereleases=True):
            wrong[name] = version
    detail = ", ".join(f"{name} {found[name] or 'not installed'}" for name in ("nlgrpo", "python", *SHOWN))
    if not wrong:
        yield Result("ok", detail)
        return
    ranges = {"python": PYTHON} | REQUIRED | OPTIONAL
    problems = ", ".join(f"{name} {version}, expected {ranges[name]}" for name, version in wrong.items())
    install = " ".join(f"'{name}{ranges[name]}'" for name in wrong if name != "python")
    advice = f"pip install {install}" if install else f"install Python {PYTHON}"
    yield Result("failed", f"{problems}; {detail}", advice)
