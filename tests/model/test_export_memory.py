"""Host memory of exports and of reading reward models, measured on two ranks by bench/bench_export.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "bench_export.py"
SLACK = 25  # MiB; the benchmark's own bound, for a larger model, has 50


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory of a process is only known on Linux")
def test_a_rank_holds_one_full_tensor_beside_its_shard():
    """Gathering or reading the whole model takes more, so the measurement would see it."""
    done = subprocess.run([sys.executable, BENCH, "--quick"], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert len(rows) == 4 * 2 * 2
    for row in rows:
        allowed = row["largest_mib"] + SLACK
        assert (row["peak_mib"] <= allowed) == (row["side"] == "stream"), (row, allowed)
