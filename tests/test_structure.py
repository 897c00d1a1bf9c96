"""What holds the tree together: names that shadow nothing, imports that go one way, functions that fit a screen."""

import ast
import sys
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = {f"nlgrpo.{path.stem}": path for path in (ROOT / "nlgrpo").glob("*.py") if path.stem != "__init__"}
KERNELS = {f"nlgrpo.kernels.{path.stem}": path for path in (ROOT / "kernels").glob("*.py") if path.stem != "__init__"}
KERNELS["nlgrpo.kernels"] = ROOT / "kernels" / "__init__.py"
INTEGRATIONS = {
    f"nlgrpo.integrations.{path.stem}": path
    for path in (ROOT / "nlgrpo" / "integrations").glob("*.py")
    if path.stem != "__init__"
}
INTEGRATIONS["nlgrpo.integrations"] = ROOT / "nlgrpo" / "integrations" / "__init__.py"
FILES = MODULES | INTEGRATIONS | KERNELS | {"nlgrpo": ROOT / "nlgrpo" / "__init__.py"}

PURE = [
    "functional",
    "rank_based",
    "tilted",
    "diversity",
    "smoothing",
    "objectives",
    "aggregation",
    "advantages",
    "kl",
    "policy_losses",
    "rewind",
    "gae",
    "bradley_terry",
    "preference_losses",
    "variational",
    "log_cdf",
    "kolmogorov_smirnov",
    "quadrature",
    "fixed_point",
    "transforms",
    "calibration",
    "tabular",
    "exact",
    "claims",
    "proofs_estimators",
    "proofs_shape",
    "proofs_training",
]
PURE = [f"nlgrpo.{name}" for name in PURE]
TOP = ("train", "cli", "commands", "run", "plan", "fitting", "reward_model_training", "value_training", "iro", "decode")
TOP = {f"nlgrpo.{name}" for name in TOP}
FRAMEWORKS = {"trl", "accelerate", "deepspeed", "ray", "lightning", "pytorch_lightning", "verl", "vllm"}


@cache
def imports(path):
    """Dotted names that a file imports, inside functions too; relative ones are resolved."""
    inner = path.parent.name in ("kernels", "integrations")
    package = f"nlgrpo.{path.parent.name}" if inner else "nlgrpo"
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return frozenset(found)


def ours(path):
    """Names of the project's own modules that a file imports."""
    return (imports(path) & FILES.keys()) - {"nlgrpo"}


def reached(name):
    """The modules of the project that are loaded with ``name``, itself included."""
    seen, ahead = set(), [name]
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen.add(module)
            ahead += ours(FILES[module])
    return seen


def functions(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield f"{path.name}:{node.lineno} {node.name}", node.end_lineno - first + 1


def test_the_reader_of_imports_reads_what_there_is():
    assert {"nlgrpo.run", "nlgrpo.plan"} <= ours(MODULES["nlgrpo.train"])
    assert {"nlgrpo.kernels.linearize", "nlgrpo.kernels.logprob"} <= ours(KERNELS["nlgrpo.kernels"])
    assert "nlgrpo.kernels.linearize" in reached("nlgrpo.objectives")
    assert "torch.distributed" in imports(MODULES["nlgrpo.parallel"])


def test_no_module_shadows_another():
    """``torchrun nlgrpo/train.py`` puts ``nlgrpo/`` itself first on ``sys.path``."""
    taken = {name.lower() for name in sys.stdlib_module_names | packages_distributions().keys()} - {"nlgrpo"}
    stems = {path.stem.lower() for path in MODULES.values()} | {
        p.name for p in (ROOT / "nlgrpo").iterdir() if p.is_dir()
    }
    assert not stems & taken
    assert {"torch", "datasets", "tokenizers", "json"} <= taken  # the names that would bite are looked at


def test_kernels_import_nothing_of_nlgrpo():
    for path in KERNELS.values():
        assert not {n for n in imports(path) if n.split(".")[0] == "nlgrpo" and not n.startswith("nlgrpo.kernels")}, (
            path
        )


@pytest.mark.parametrize("name", PURE)
def test_tensor_functions_stay_pure(name):
    """Objectives, aggregation, losses and proofs: no config object, no distributed call, no logging."""
    allowed = {*PURE, *KERNELS}
    assert reached(name) <= allowed, "what is pure imports what is pure, and the kernels"
    for module in reached(name):
        outside = {n for n in imports(FILES[module]) if n.split(".")[0] in ("logging", "rich", "tyro", "transformers")}
        assert not outside, module
        if module != "nlgrpo.kernels.sharded":  # gathers a head that FSDP2 has sharded, when one is given
            assert not {n for n in imports(FILES[module]) if n.startswith("torch.distributed")}, module
        source = FILES[module].read_text("utf-8")
        assert "dist." not in source, module
        assert "print(" not in source, module


def test_what_is_verified_does_not_know_its_proofs():
    """The truth is written by itself: nothing that trains uses it, and it uses nothing that is to be verified."""
    proofs = {f"nlgrpo.{name}" for name in ("claims", "exact", "tabular", "verify", "verify_figures")}
    proofs |= {f"nlgrpo.{name}" for name in ("proofs_estimators", "proofs_shape", "proofs_training")}
    for name in MODULES.keys() - proofs:
        assert not ours(MODULES[name]) & proofs, name
    for name in ("exact", "tabular"):
        assert not ours(MODULES[f"nlgrpo.{name}"]), name


def test_lower_rooms_do_not_know_the_loop():
    for name, path in MODULES.items():
        if name not in TOP:
            assert not ours(path) & TOP, name
    assert not ours(MODULES["nlgrpo.run"]) & {"nlgrpo.train", "nlgrpo.cli", "nlgrpo.commands", "nlgrpo.plan"}
    assert "nlgrpo.cli" not in {module for path in MODULES.values() for module in ours(path)}


def test_integrations_bring_no_trainer():
    """Of ours neither: who trains elsewhere gets objectives, aggregates, and how functions are called."""
    allowed = {*PURE, *KERNELS, *INTEGRATIONS, "nlgrpo.reward_calls"}
    assert "nlgrpo.objectives" in reached("nlgrpo.integrations.trl") <= allowed
    for name, path in MODULES.items():
        assert not ours(path) & INTEGRATIONS.keys(), name


def test_no_circle_of_imports():
    for name, path in (MODULES | INTEGRATIONS).items():
        for module in ours(path):
            assert name not in reached(module), f"{name} and {module} import each other"


@pytest.mark.parametrize("path", FILES.values(), ids=FILES.keys())
def test_files_and_functions_fit_the_eye(path):
    assert len(path.read_text("utf-8").splitlines()) < (250 if path.name == "train.py" else 450)
    assert not [f"{name}: {length} lines" for name, length in functions(path) if length > 100]


def test_most_functions_are_short():
    lengths = sorted(length for path in FILES.values() for _, length in functions(path))
    assert len(lengths) > 300
    assert lengths[len(lengths) // 2] <= 15


def test_no_other_trainer_is_imported():
    for name, path in FILES.items():
        assert not {n.split(".")[0] for n in imports(path)} & FRAMEWORKS, name
