"""Fixtures shared by the tests."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of real models and data that the project does not ship; ``NLGRPO_SHARED`` names another one."""
    folder = Path(os.environ.get("NLGRPO_SHARED", Path(__file__).parents[2] / "shared"))
    if not (folder / "models").is_dir():
        pytest.skip(f"real models and data are not at {folder} (set NLGRPO_SHARED)")
    return folder
