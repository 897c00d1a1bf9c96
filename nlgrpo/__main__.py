"""``python -m nlgrpo`` is the command ``nlgrpo``."""

import sys

from nlgrpo.cli import main

sys.exit(main())
