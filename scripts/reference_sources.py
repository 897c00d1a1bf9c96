"""Hook of mkdocs: lay out the sources as they are installed, with ``kernels/`` as ``nlgrpo/kernels``, in ``build/api``.

mkdocs imports this file when it reads its configuration, before mkdocstrings looks for the folder.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
API = ROOT / "build" / "api"


def link_sources() -> None:
    """Create ``build/api/nlgrpo`` with links to the sources, laid out as an installed package."""
    package = API / "nlgrpo"
    package.mkdir(parents=True, exist_ok=True)
    for source in [*(p for p in (ROOT / "nlgrpo").iterdir() if p.name != "__pycache__"), ROOT / "kernels"]:
        link = package / source.name
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(source, target_is_directory=source.is_dir())


link_sources()
