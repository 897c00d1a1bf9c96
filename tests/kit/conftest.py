"""The GPU kit is a package of ``scripts/``, which no installation has."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
for folder in ("bench", "scripts"):
    sys.path.insert(0, str(ROOT / folder))
