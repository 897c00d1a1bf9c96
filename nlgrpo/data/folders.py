"""Folders of data files: which files there are, and to which split each of them belongs."""

from __future__ import annotations

import re
from pathlib import Path

from nlgrpo.errors import UserError

SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet")

# Words of a file's path that name its split, as in `datasets`.
WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\..+")  # the names that `datasets` gives to the shards of a split
DOCUMENTS = ("readme", "license", "licence", "notice", "citation")
NO_DATA = (*DOCUMENTS, *(f"{name}.txt" for name in DOCUMENTS), "dataset_infos.json", "dataset_info.json", "_success")


def kind_of(path: Path) -> str | None:
    """Return the suffix that selects the reader, without ``.gz``; None if it is unknown."""
    name = path.name.lower()
    plain = name.removesuffix(".gz")
    if plain.endswith(".parquet") and plain != name:
        return None  # Parquet is compressed already and needs random access
    return next((suffix for suffix in SUFFIXES if plain.endswith(suffix)), None)


def files_of(folder: Path, split: str) -> list[Path]:
    """Return the data files of a folder and its subfolders that belong to ``split``, in the order of their paths.

    Raises UserError for a folder without data files or without this split, and for what would be left out: files of
    other types, and links to folders or to nothing. Documents (``.md``, a licence) and hidden files are no data.
    """
    found = by_split(folder)
    if split not in found:
        raise UserError(
            f"{folder} has no split {split!r}. It has {', '.join(sorted(found))}; a word in a file's path, such as "
            "'test', names its split."
        )
    return found[split]


def by_split(folder: Path) -> dict[str, list[Path]]:
    """Return the data files of a folder by their split. Raises UserError as `files_of`."""
    entries = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and path.suffix.lower() != ".md" and path.name.lower() not in NO_DATA:
            entries.append(path)
    files = [path for path in entries if path.is_file()]
    linked = [path for path in entries if path.is_symlink() and not path.is_file()]
    unknown = [str(path.relative_to(folder)) for path in files if kind_of(path) is None]
    unknown += [
        f"{path.relative_to(folder)} (a link to {'a folder' if path.is_dir() else 'nothing'})" for path in linked
    ]
    if unknown:
        named = ", ".join(unknown[:5]) + f" and {len(unknown) - 5:,} more" * (len(unknown) > 5)
        raise UserError(
            f"{folder} has files of other types, which would be left out: {named}. Supported: {' '.join(SUFFIXES)}; "
            "all but the last also with .gz. Convert them, or move them to another folder."
        )
    if not files:
        raise UserError(f"{folder} has no data files. Supported: {' '.join(SUFFIXES)}.")
    found: dict[str, list[Path]] = {}
    for path in files:
        found.setdefault(_split_of(path.relative_to(folder)), []).append(path)
    return found


def describes_itself(folder: Path) -> bool:
    """Whether the README.md of a folder says which files belong to which split, as `datasets` reads it."""
    readme = folder / "README.md"
    if not readme.is_file():
        return False
    _, start, rest = readme.read_text("utf-8", errors="replace").partition("---\n")
    return bool(start) and re.search(r"^(?:configs|data_files):", rest.partition("\n---")[0], re.MULTILINE) is not None


def _split_of(path: Path) -> str:
    """Return the split that the path of a file names, relative to its folder; files that name none are for training."""
    named = [word for word in re.split("[^a-z]+", str(path).lower()) if word in WORDS]
    if not named:
        return "train"
    shard = SHARD.fullmatch(path.name)
    if shard is not None and set(re.split("[^a-z]+", shard[1].lower())) & WORDS.keys():
        return shard[1]  # such as train_sft
    return WORDS[named[-1]]
