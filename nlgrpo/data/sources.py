"""Read the examples of a source as rows, dicts from column to value.

A source is a file (``.jsonl .json .csv .txt``, each also with ``.gz``, or ``.parquet``), a folder of such files, a
folder saved with ``datasets``' ``save_to_disk``, the name of a data set on the hub (``owner/name`` or
``owner/name:config``), or a set of mazes (`MAZES`), drawn when it is read. Every error is a UserError that names
the file and the line.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
import re
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from nlgrpo.data.folders import SUFFIXES, by_split, describes_itself, files_of, kind_of
from nlgrpo.errors import UserError, did_you_mean, nearest
from nlgrpo.runtime.atomic_files import POINTER, is_pointer

Row = dict[str, Any]
MAZES = ("maze-train", "maze-validation", "maze-test", "maze-long", "maze-large")  # sets that `mazes` draws
# Columns that reward functions do not get: names of their other arguments, and names that TRL withholds.
RESERVED = frozenset({"prompt", "prompts", "completion", "completions", "completion_ids"})


def read_rows(source: str, split: str = "train", separator: str | None = None) -> Iterator[Row]:
    """Iterate over the rows of ``source``, lazily.

    ``split``: split of a data set or folder; a single file has only "train". A text file has one prompt per line, or
    with ``separator`` one per document, stripped of white space; its only column is ``prompt``.

    Raises UserError for a missing or unreadable source, and for a folder with files that would not be read.
    """
    if source in MAZES:
        from nlgrpo.data import mazes

        if split != "train":
            raise UserError(f"split = {split!r}, but {source!r} has no splits. The sets: {', '.join(MAZES)}.")
        if separator is not None:
            raise UserError(_no_text(separator, source))
        return iter(mazes.SETS[source].rows())
    path = _local(source, split, separator)
    if (files := _files(path, split, separator)) is not None:
        return _read_files(files, separator)
    return iter(_load_datasets(source, path, split))


def is_file(source: str) -> bool:
    """Whether a source is a single file, or made by nlgrpo, which has no splits."""
    return source in MAZES or os.path.isfile(os.path.expanduser(source))


def unread(read: Collection[tuple[str, str]]) -> list[str]:
    """Say which files of folders belong to splits that are not among ``read``, pairs of a source and a split."""
    lines = []
    for source in dict.fromkeys(source for source, _ in read):
        folder = Path(os.path.expanduser(source))
        splits = by_split(folder) if _is_plain_folder(folder) else {}
        for split, paths in sorted(splits.items()):
            if (source, split) not in read:
                names = ", ".join(str(path.relative_to(folder)) for path in paths[:5])
                more = f" and {len(paths) - 5:,} more" * (len(paths) > 5)
                lines.append(f"not read in {source}: {names}{more} (split {split!r})")
    return lines


def _local(source: str, split: str, separator: str | None) -> Path:
    """Return the path of a source, which need not exist if it can be the name of a data set."""
    path = Path(os.path.expanduser(source))
    if not os.path.exists(path) and not _is_hub_name(source):
        raise UserError(_missing(path))
    if separator is not None and kind_of(path) != ".txt" and not _is_plain_folder(path):
        raise UserError(_no_text(separator, source))
    if path.is_file() and split != "train":
        raise UserError(
            f"split = {split!r}, but {source} is a single file, which has no splits. Set the split to 'train', or "
            f"name the file of {split!r}."
        )
    return path


def _no_text(separator: str, source: str | Path) -> str:
    return f"separator = {separator!r} is for the documents of a text file (.txt); {source} is not one."


def _is_plain_folder(path: Path) -> bool:
    """Whether a path is a folder of data files, not one that `datasets` has to read."""
    return path.is_dir() and not _is_saved(path) and not describes_itself(path)


def _is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote a folder: it leaves one of two files there."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _files(path: Path, split: str, separator: str | None) -> list[Path] | None:
    """Return the files of a source; None for one that `datasets` reads. Raises UserError for files left out."""
    if path.is_file():
        return [path]
    if not _is_plain_folder(path):
        return None
    files = files_of(path, split)
    for file in files:
        if separator is not None and kind_of(file) != ".txt":
            raise UserError(_no_text(separator, file))
    return files


def _read_files(paths: Iterable[Path], separator: str | None) -> Iterator[Row]:
    for path in paths:
        yield from _read_file(path, separator)


def stream(
    source: str,
    split: str = "train",
    separator: str | None = None,
    *,
    limit: int | None = None,
    skip: int = 0,
    buffer: int = 0,
    seed: int = 0,
    epoch: int = 0,
) -> Iterable[Row]:
    """Iterate over the rows of ``source`` without loading it: the first ``limit`` ones but the first ``skip``.

    With ``buffer`` > 0 each row is drawn at random from the next ``buffer`` rows, and the shards of a data set or the
    files of a folder are shuffled (`datasets.IterableDataset.shuffle`), by ``seed`` and ``epoch``. Raises UserError as
    `read`.
    """
    import datasets

    path = Path(source) if source in MAZES else _local(source, split, separator)
    if is_file(source):
        options = {"source": source, "split": split, "separator": separator}
        data = datasets.IterableDataset.from_generator(read_rows, gen_kwargs=options)
    elif (files := _files(path, split, separator)) is not None:
        data = datasets.IterableDataset.from_generator(_read_files, gen_kwargs={"paths": files, "separator": separator})
    else:
        data = _load_datasets(source, path, split, streaming=True)
    if limit is not None:
        data = data.take(limit)
    if skip:
        data = data.skip(skip)
    if buffer:
        data = data.shuffle(seed=seed, buffer_size=buffer)
        data.set_epoch(epoch)
    return data


def _is_hub_name(source: str) -> bool:
    name = source.split(":", 1)[0]
    return kind_of(Path(name)) is None and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None


def _missing(path: Path) -> str:
    if not os.path.isdir(path.parent):
        return f"There is no file {path}: its folder {path.parent} does not exist."
    beside = [other.name for other in path.parent.iterdir()]
    return f"There is no file {path}{did_you_mean(nearest(path.name, beside, n=3))}"


def _read_file(path: Path, separator: str | None) -> Iterator[Row]:
    if is_pointer(path):
        raise UserError(f"{path} {POINTER}.")
    match kind_of(path):
        case ".jsonl":
            return _read_json_lines(path)
        case ".json":
            return _read_json(path)
        case ".txt":
            return _read_text(path, separator)
        case ".csv":
            return _read_csv(path)
        case ".parquet":
            return _read_parquet(path)
    raise UserError(f"{path}: unknown file type. Supported: {' '.join(SUFFIXES)}; all but the last also with .gz.")


class _BoundedGzip(gzip.GzipFile):
    """Raises UserError for a file made to fill the memory: text does not expand by a factor of 200."""

    ALWAYS_ALLOWED = 2**30
    FACTOR = 200

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.expanded = 0
        self.most = max(self.ALWAYS_ALLOWED, self.FACTOR * path.stat().st_size)

    def read1(self, size: int = -1) -> bytes:
        content = super().read1(size)
        self.expanded += len(content)
        if self.expanded > self.most:
            raise UserError(f"{self.name} expands to more than {self.most:,} bytes, {self.FACTOR} times its size")
        return content


def _open(path: Path, newline: str | None = None) -> TextIO:
    # utf-8-sig drops the byte order mark that some editors write.
    if path.name.lower().endswith(".gz"):
        return io.TextIOWrapper(_BoundedGzip(path), encoding="utf-8-sig", newline=newline)
    return path.open("rt", encoding="utf-8-sig", newline=newline)


def _lines(path: Path, newline: str | None = None) -> Iterator[tuple[int, str]]:
    """Iterate over numbered lines. The UserError for invalid UTF-8 or gzip names the line before it."""
    number = 0
    try:
        with _open(path, newline) as file:
            for number, line in enumerate(file, 1):
                yield number, line
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}, after line {number}: not readable as UTF-8 text ({error}).") from error


def _read_json_lines(path: Path) -> Iterator[Row]:
    found = False
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            advice = _layout(path) if isinstance(error, json.JSONDecodeError) and not found else ""
            raise UserError(f"{path}, line {number}: {_cause(error)}: {line[:60]!r}{advice}") from error
        yield _as_row(row, f"{path}, line {number}")
        found = True


def _layout(path: Path) -> str:
    """Return the end of a message about the first line of a file, if the file is JSON as a whole."""
    try:
        whole = json.loads("".join(line for _, line in _lines(path)))
    except (ValueError, RecursionError):
        return ""
    kind = "object"
    advice = "write each row into one line"
    if isinstance(whole, list):
        kind = "list"
        advice = "name the file .json"
    return f". The whole file is one JSON {kind}, and a .jsonl file has one object per line: {advice}."


def _read_json(path: Path) -> Iterator[Row]:
    """Read a list of objects, or one object per line: both are common in ``.json`` files."""
    text = "".join(line for _, line in _lines(path))
    whole = _whole_object(text)
    if whole is not None and (len(text.strip().splitlines()) > 1 or _list_of_rows(whole) is not None):
        found = _list_of_rows(whole)
        advice = f" Its rows seem to be the list {found[:80]}: write that list alone into the file." if found else ""
        raise UserError(
            f"{path} has one object, with the keys {str(list(whole))[1:-1][:80]}, where a list of objects is "
            f"expected, such as [{{'prompt': '..'}}], or one object per line.{advice}"
        )
    if not text.lstrip().startswith("["):
        yield from _read_json_lines(path)
        return
    try:
        rows = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(f"{path}{line}: {_cause(error)}.") from error
    for number, row in enumerate(rows, 1):
        yield _as_row(row, f"{path}, element {number}")


def _whole_object(text: str) -> dict[str, Any] | None:
    """Return the object that a whole text is; None for one object per line, a list, and what is not JSON."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _list_of_rows(value: dict[str, Any], within: str = "") -> str | None:
    """Return the name of a list of objects, such as 'data' or 'data.train', in an object; None without one.

    Messages and tools are also lists of objects, of one row.
    """
    if within.count(".") == 4:
        return None
    for key, part in value.items():
        if isinstance(part, list) and part and all(isinstance(row, dict) for row in part):
            if not any({"role", "from", "function"} & row.keys() for row in part):
                return f"{within}{key}"
        elif isinstance(part, dict) and (found := _list_of_rows(part, f"{within}{key}.")) is not None:
            return found
    return None


class _RepeatedKey(UserError):
    """An object has a key twice; `json` would keep the last value."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise _RepeatedKey(f"an object has the key {repeated!r} twice")
    return found


def _cause(error: Exception) -> str:
    """Say what is wrong with a JSON text: it also can be nested too deeply, or have a number of too many digits."""
    if isinstance(error, _RepeatedKey):
        return str(error)
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg} at column {error.colno})"
    if isinstance(error, RecursionError):
        return "not JSON (nested too deeply)"
    return f"not JSON ({str(error).partition(';')[0]})"


def _as_row(row: object, where: str) -> Row:
    if isinstance(row, dict):
        return row
    raise UserError(f"{where}: a {type(row).__name__} instead of an object with columns, such as {{'prompt': '..'}}.")


def _read_text(path: Path, separator: str | None) -> Iterator[Row]:
    """Read one prompt per line, or one per document between separators; empty ones are skipped."""
    if separator == "":
        raise UserError("separator is empty; omit it for one prompt per line.")
    texts: Iterable[str] = (line for _, line in _lines(path))
    if separator is not None:
        texts = "".join(texts).split(separator)
    for text in texts:
        if text.strip():
            yield {"prompt": text.strip()}


def _read_csv(path: Path) -> Iterator[Row]:
    """Read texts, and numbers in a column whose values are all written as Python writes them: 7 or 0.5, not 007 or 1e3.

    Columns without a name and values, which spreadsheets write, are dropped.
    """
    csv.field_size_limit(sys.maxsize)  # a document may be longer than 128 KiB
    reader = csv.reader((line for _, line in _lines(path, newline="")), strict=True)
    try:
        names = next(reader, [])
        rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not readable as CSV ({error}).") from error
    named = [name for name in names if name]
    if len(set(named)) < len(named):
        raise UserError(f"{path}: the first line repeats a column name: {', '.join(names)}.")
    for number, row in rows:
        if len(row) != len(names):
            raise UserError(
                f"{path}, line {number}: not readable as CSV ({len(row)} values, but the first line has {len(names)} "
                "columns)."
            )
    columns: dict[str, list[Any]] = {}
    for i, name in enumerate(names):
        columns[name] = [row[i] for _, row in rows]
    if not any(columns.get("", ())):
        columns.pop("", None)
    columns = {name: _typed(texts) for name, texts in columns.items()}
    if not columns:
        return
    for i in range(len(rows)):
        yield {name: values[i] for name, values in columns.items()}


def _typed(texts: list[str]) -> list[Any]:
    """Return the values of a column as numbers (None if empty) if Python writes all of them so, else as texts."""
    if not any(texts):
        return list(texts)
    numbers: list[Any] = []
    for text in texts:
        number = _number(text) if text else None
        if text and number is None:
            return list(texts)
        numbers.append(number)
    return numbers


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            number: int | float = kind(text)
        except ValueError:
            continue
        if str(number) == text and math.isfinite(number):
            return number
    return None


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as Parquet ({error}).") from error


def _load_datasets(source: str, path: Path, split: str, *, streaming: bool = False) -> Any:
    """Open a folder or a data set of the hub."""
    import datasets

    local = os.path.isdir(path)
    saved = local and _is_saved(path)
    try:
        if saved:
            data = datasets.load_from_disk(str(path))
        elif local:
            data = datasets.load_dataset(str(path), split=split, streaming=streaming)
        else:
            name, _, config = source.partition(":")
            data = datasets.load_dataset(name, config or None, split=split, streaming=streaming)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        hint = "" if local else f"\n  There is no local file or folder {source} either."
        raise UserError(f"{source} (split {split!r}) cannot be loaded as a data set: {error}{hint}") from error
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise UserError(
                f"{source} has no split {split!r}{did_you_mean(nearest(split, data))} It has {', '.join(data)}."
            )
        data = data[split]
    elif saved and split not in ("train", str(data.split)):
        raise UserError(f"{source} is one saved data set, without splits, but split = {split!r}. Remove the split.")
    return data.to_iterable_dataset() if saved and streaming else data
