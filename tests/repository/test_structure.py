"""Structure of the package, as far as the import contracts in pyproject.toml cannot check it.

No name shadows another package, rooms have docstrings, pure modules stay pure, and the trainer imports what it uses.
`lint-imports` (in ``make check``) checks the order of the rooms.
"""

import ast
import importlib
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from nlgrpo.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nlgrpo"


def dotted(path):
    """Module name: ``nlgrpo/model/decoder.py`` -> "nlgrpo.model.decoder"; a room's ``__init__.py`` -> the room."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("nlgrpo", *parts) if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {dotted(path): path for folder in (PACKAGE, ROOT / "kernels") for path in sorted(folder.rglob("*.py"))}
ROOMS = sorted(name for name, path in FILES.items() if path.name == "__init__.py")
KERNELS = [name for name in FILES if name.startswith("nlgrpo.kernels")]
PURE_ROOMS = ("nlgrpo.objectives", "nlgrpo.calibration", "nlgrpo.losses")
PURE = [
    *(name for name in FILES if name.startswith(PURE_ROOMS) and name != "nlgrpo.calibration.ecdf"),  # has `all_reduce`
    "nlgrpo.estimators",
]
# Names of other packages that `torchrun nlgrpo/train.py` would hide, installed here or not.
TAKEN = {"accelerate", "datasets", "deepspeed", "evaluate", "guidance", "peft", "tables", "tokenizers", "trl", "vllm"}


@cache
def parsed(path):
    return ast.parse(path.read_text("utf-8"))


@cache
def imports(path):
    """Dotted names that a file imports, also inside functions; relative imports are resolved."""
    package = dotted(path).split(".")[: None if path.name == "__init__.py" else -1]
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return frozenset(found)


def ours(path):
    """Modules of the project that a file imports."""
    return (imports(path) & FILES.keys()) - {"nlgrpo"}


def reached(name):
    """Modules of the project that importing ``name`` loads, including itself."""
    seen, ahead = set(), [name]
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen.add(module)
            ahead += ours(FILES[module])
    return seen


def room(name):
    """The first folder below ``nlgrpo``, or the module next to the folders."""
    return ".".join(name.split(".")[:2])


def test_imports_are_read_correctly():
    assert {"nlgrpo.training.trainer", "nlgrpo.apps.plan.table"} <= ours(FILES["nlgrpo.train"])
    assert {"nlgrpo.kernels.linearize", "nlgrpo.kernels.logprob"} <= ours(FILES["nlgrpo.kernels"])
    assert "nlgrpo.kernels.linearize" in reached("nlgrpo.objectives.registry")
    assert "torch.distributed" in imports(FILES["nlgrpo.runtime.distributed"])


@pytest.mark.parametrize("name", [name for name in ROOMS if name != "nlgrpo.kernels"])
def test_a_room_has_a_docstring(name):
    text = ast.get_docstring(parsed(FILES[name]))
    assert text
    words = " ".join(text.split())
    assert "Read `" in words or "mports " in words, (
        "the docstring must say what the room imports, or what to read first"
    )
    for word in text.split("`")[1::2]:
        if word.endswith(".py"):
            assert (FILES[name].parent / word).is_file() or (PACKAGE / word).is_file(), word


APPS = [name for name in ROOMS if name.startswith("nlgrpo.apps.")]


@pytest.mark.parametrize("name", [name for name in APPS if name != "nlgrpo.apps.shell"])
def test_an_application_names_its_command_and_its_guide(name):
    text = ast.get_docstring(parsed(FILES[name]))
    commands = [command for command, (target, _) in COMMANDS.items() if target.startswith(f"{name}.")]
    assert commands
    for command in commands:
        assert f"``nlgrpo {command}``" in text or f"``{command}``" in text, command
    (guide,) = re.findall(r"``(docs/[^`]+\.md)``", text)
    assert (ROOT / guide).is_file()


def floors(imported):
    """Length of the longest chain of imports that begins at each key of ``imported``."""

    @cache
    def floor(of):
        return 1 + max((floor(below) for below in imported[of]), default=0)

    return {name: floor(name) for name in imported}


def test_no_chain_of_rooms_is_longer_than_eight():
    imported = {}
    for name, path in FILES.items():
        if name != "nlgrpo":
            imported.setdefault(room(name), set()).update({room(module) for module in ours(path)} - {room(name)})
    found = floors(imported)
    assert found["nlgrpo.kernels"] == 1
    assert found["nlgrpo.train"] == max(found.values()) <= 8, found


@pytest.mark.parametrize(
    ("public", "inside"),
    [
        ("nlgrpo.aggregation", ["nlgrpo.objectives.aggregation"]),
        ("nlgrpo.diversity", ["nlgrpo.objectives.diversity"]),
        ("nlgrpo.ecdf", ["nlgrpo.calibration.ecdf"]),
        ("nlgrpo.evaluation", ["nlgrpo.estimators"]),
        ("nlgrpo.inference", [f"nlgrpo.apps.respond.{name}" for name in ("choosing", "procedures", "responder")]),
        ("nlgrpo.variational", ["nlgrpo.calibration.variational"]),
    ],
)
def test_short_modules_have_the_public_names_of_modules_inside_a_room(public, inside):
    short = importlib.import_module(public)
    whole = [importlib.import_module(name) for name in inside]
    for name in short.__all__:
        assert any(getattr(short, name) is vars(module).get(name) for module in whole), name
    if len(inside) == 1 and public != "nlgrpo.evaluation":  # which has those that README and docs mention
        defined = {name for name, value in vars(whole[0]).items() if getattr(value, "__module__", "") == inside[0]}
        public_names = getattr(whole[0], "__all__", {name for name in defined if not name.startswith("_")})
        assert set(short.__all__) == set(public_names)


def loaded_by(code):
    """Modules of the project that a new process has loaded at the end of ``code``."""
    code += "\nimport sys; print(*(name for name in sys.modules if name.split('.')[0] == 'nlgrpo'), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[-1].split()


def test_the_trainer_imports_what_most_runs_use():
    """The rest, such as vLLM, LoRA, a critic, calibration and reports, is imported where it is used."""
    loaded = loaded_by("import nlgrpo.train")
    assert not [name for name in loaded if name.startswith("nlgrpo.apps.report")]
    assert len(loaded) <= 120
    assert sum(len(FILES[name].read_text("utf-8").splitlines()) for name in loaded) <= 18_000


@pytest.mark.slow
def test_one_step_loads_at_most_150_modules(tmp_path):
    run = f"""
from nlgrpo import train
train.PolicyTrainer.finish = lambda *_: None
out = ["--train.out", {str(tmp_path / "run")!r}, "--train.steps", "1"]
evaluation = ["--evaluation.prompts", "2", "--evaluation.samples", "2", "--evaluation.ns", "1", "2"]
assert train.main(["maze", *out, *evaluation, "--rollout.prompts", "2"]) == 0
"""
    assert len(loaded_by(run)) <= 150


def test_no_module_shadows_another():
    """``torchrun nlgrpo/train.py`` puts ``nlgrpo/`` itself first on ``sys.path``."""
    taken = {name.lower() for name in sys.stdlib_module_names | packages_distributions().keys()} - {"nlgrpo"} | TAKEN
    modules = {path.stem.lower() for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert not modules & taken
    assert {"torch", "datasets", "tokenizers", "json"} <= taken  # important names are covered


def test_kernels_import_nothing_of_nlgrpo():
    for name in KERNELS:
        outside = {n for n in imports(FILES[name]) if n.split(".")[0] == "nlgrpo"}
        assert all(n.startswith("nlgrpo.kernels") for n in outside), name


@pytest.mark.parametrize("name", PURE)
def test_tensor_functions_stay_pure(name):
    """No collective and no output, which import contracts cannot check. `errors` has the words of their messages."""
    below = {"nlgrpo.errors", "nlgrpo.sections"}
    assert reached(name) <= {*PURE, *KERNELS, *below}
    for module in reached(name) - below:
        if module != "nlgrpo.kernels.head":  # gathers a head that FSDP2 has sharded
            assert not {n for n in imports(FILES[module]) if n.startswith("torch.distributed")}, module
        source = FILES[module].read_text("utf-8")
        assert "dist." not in source, module
        assert "print(" not in source, module


def test_no_test_imports_another_test():
    """What tests share is in ``tests/support``."""
    tests = ROOT / "tests"
    modules = {path.stem for path in tests.rglob("test_*.py")}
    found = {}
    for path in sorted(tests.rglob("*.py")):
        if imported := {name for name in imports(path) if modules & set(name.split("."))}:
            found[str(path.relative_to(ROOT))] = imported
    assert len(modules) > 100
    assert not found


def test_integrations_import_objectives_and_reward_calling_only():
    allowed = {*PURE, *KERNELS, "nlgrpo.rewards"}
    allowed |= {f"nlgrpo.rewards.{name}" for name in ("calling", "history", "outputs")}
    allowed |= {f"nlgrpo.runtime.supervision.{name}" for name in ("threads", "time_limit", "terminator")}
    allowed |= {"nlgrpo.errors", "nlgrpo.sections", "nlgrpo.integrations", "nlgrpo.runtime.supervision"}
    allowed |= {name for name in FILES if name.startswith("nlgrpo.integrations.")}
    assert "nlgrpo.objectives.registry" in reached("nlgrpo.integrations.trl") <= allowed
