"""The plan's memory of models on several ranks against PyTorch's tracker, by bench/bench_plan_sharded.py.

Tensors are fake, so models of any width take the same time: these have 2 blocks of Llama-2-7B.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCH = Path(__file__).parents[2] / "bench"
LAYERS = 2
SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(BENCH)!r})
from bench_plan_sharded import LLAMA_7B, Configuration, compare, quick
configurations = json.loads(sys.argv[1])
configurations = {{name: quick(Configuration(LLAMA_7B, **fields), {LAYERS}) for name, fields in configurations.items()}}
print(json.dumps({{name: compare(configuration) for name, configuration in configurations.items()}}))
"""
RANKS = {
    "8 ranks": {"ranks": 8},
    "2 x 4 ranks": {"ranks": 8, "replicate": 2},
    "LoRA, 2 ranks": {"ranks": 2, "rank": 16},
    "LoRA, 1 rank": {"ranks": 1, "rank": 16},
}
CONFIGURATIONS = {
    f"{name}{', checkpointing' * checkpointing}": {"prompt": 128, "columns": 113, "checkpointing": checkpointing}
    | ranks
    for name, ranks in RANKS.items()
    for checkpointing in (False, True)
}


@pytest.fixture(scope="module")
def results():
    """Planned and tracked bytes by configuration and part, from a process of its own: it has a fake process group."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(CONFIGURATIONS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_parameters_gradients_and_optimizer_states_are_exact(results, name):
    """AdamW also has a step counter for each trained tensor, 4 bytes, which the plan leaves out."""
    trained = LAYERS * 7 * 2 if "LoRA" in name else LAYERS * 6 + 3
    for part, extra in {"parameters": 0, "gradients": 0, "optimizer state": 4 * trained}.items():
        planned, tracked = results[name][part]
        assert planned + extra == tracked, part


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_peak_of_the_update_is_within_5_percent(results, name):
    planned, tracked = results[name]["peak of the update"]
    assert planned == pytest.approx(tracked, rel=0.05)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_optimizer_step_adds_nothing(results, name):
    """Its peak is that of parameters, gradients and states; the tracker also counts the positions' frequencies."""
    planned, tracked = results[name]["peak of the optimizer step"]
    assert planned == pytest.approx(tracked, rel=1e-3)
