"""What a command leaves: the files that have to be equal in each run, and those that may not stay."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any

TIMED = re.compile(r"^(time|perf)/|step_time|^(seconds|created|date|begun|ended|attempts|status)$")
# Files with times, figures, and locks; older checkpoints depend on where a run was stopped.
UNEQUAL = re.compile(r"(^|/)(\.lock.*|report\.html|.*\.png|.*\.log|checkpoints/.*)$")
PARTIAL = re.compile(r"\.(tmp|partial|old|gone)(\.|/|$)")


def results(out: Path) -> dict[str, str]:
    """Digests of the files that have to be equal in each run, by name."""
    found = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.is_file() and not UNEQUAL.search(name):
            found[name] = _digest(path, out)
    for folder in sorted(out.rglob("checkpoints")):
        for path in max(folder.glob("step-*")).iterdir():
            if path.name != "manifest.json":  # it has digests of files with the name of the run's folder
                found[f"{folder.relative_to(out)}/newest/{path.name}"] = _digest(path, out)
    return found


def _digest(path: Path, out: Path) -> str:
    """Digest of the content of a file; of JSON without times and the name of the folder ``out``."""
    content = path.read_bytes()
    with contextlib.suppress(ValueError):  # it is damaged
        if path.suffix in (".json", ".jsonl"):
            text = content.decode().replace(str(out), "OUT")
            values = [json.loads(line) for line in (text.splitlines() if path.suffix == ".jsonl" else [text])]
            if path.name == "inputs.json":
                values[0].pop("files")  # sizes and times of the files that the process has read
            content = json.dumps([_without_times(value) for value in values]).encode()
        elif path.suffix == ".safetensors":
            content = _tensors(content)
    return hashlib.sha256(content).hexdigest()


def _tensors(content: bytes) -> bytes:
    """The tensors of a safetensors file by name: their order in a sharded checkpoint is not always the same."""
    begin = 8 + int.from_bytes(content[:8], "little")
    tensors = sorted((name, entry) for name, entry in json.loads(content[8:begin]).items() if name != "__metadata__")
    spans = [entry.pop("data_offsets") for _, entry in tensors]
    parts = [content[begin + first : begin + last] for first, last in spans]
    return b"".join([json.dumps(tensors, sort_keys=True).encode(), *parts])


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(part) for key, part in value.items() if not TIMED.search(key)}
    return [_without_times(part) for part in value] if isinstance(value, list) else value


def _can_be_damaged(path: Path) -> bool:
    """Whether a command that is started again reads the file, and can do without it."""
    run = path.parents[2] if path.parents[1].name == "checkpoints" else path.parent
    saved = sorted(run.glob("checkpoints/step-*"))
    if (run / "value.json").exists():  # this part of the work is finished
        return False
    if path.suffix == ".jsonl":  # lines before a checkpoint are on the disk before it
        last = json.loads(path.read_text("utf-8").splitlines()[-1])
        return not saved or last["step"] >= int(saved[-1].name[5:])
    return run == path.parent or len(saved) > 1  # or it resumes from the checkpoint before


def partial_files(out: Path) -> list[str]:
    return [str(path.relative_to(out)) for path in out.rglob("*") if PARTIAL.search(path.name)]


def damage_newest(out: Path, rng: random.Random) -> str:
    """Damage the newest file of a checkpoint, of samples or of logs; returns which.

    Models are not damaged: transformers and others read them too, and their files have no digests. Logs lose a part of
    their last line, as in a power cut. Others are cut, filled with zeros, or have one bit flipped.
    """
    groups: dict[str, list[Path]] = {}
    for path in out.rglob("*"):
        name = str(path.relative_to(out))
        if path.name == "model.safetensors" or not path.stat().st_size or PARTIAL.search(name):
            continue
        if path.suffix in (".jsonl", ".safetensors") and _can_be_damaged(path):
            groups.setdefault("checkpoint" if "checkpoints/" in name else path.suffix, []).append(path)
    if not groups:
        return "no file to damage"
    path = max(groups[rng.choice(sorted(groups))], key=lambda path: path.stat().st_mtime_ns)
    content = bytearray(path.read_bytes())
    how = "cut" if path.suffix == ".jsonl" else rng.choice(("cut", "zeros", "bit"))
    if path.suffix == ".jsonl":
        last = content.rstrip(b"\n").rfind(b"\n") + 1
        content = content[: rng.randrange(last, len(content))]
    elif how == "cut":
        content = content[: rng.randrange(len(content))]
    elif how == "zeros":
        begin = rng.randrange(len(content))
        content[begin:] = bytes(len(content) - begin)
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"{how} {path.relative_to(out)}"
