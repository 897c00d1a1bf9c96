"""Sources of examples: a file, a folder or the name of a data set, read as rows of columns.

A source is a file (``.jsonl .json .csv .txt``, each also with ``.gz``, or ``.parquet``), a folder of such files, a
folder that ``datasets`` wrote with ``save_to_disk``, or the name of a data set on the hub (``owner/name`` or
``owner/name:config``). Whatever is wrong with one is a ValueError that names the file and the line.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import json
import math
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

Row = dict[str, Any]

SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet")


def nearest(word: str, words: Iterable[str]) -> str:
    """A hint for an error message: the names most like ``word``, or nothing."""
    close = difflib.get_close_matches(word, list(words), n=3)
    return f" Nearest: {', '.join(map(repr, close))}." if close else ""


def read(source: str, split: str = "train", separator: str | None = None) -> Iterator[Row]:
    """Rows of ``source``, lazily.

    ``split`` is of a data set or folder; a single file has none. A plain text holds a prompt a line, or with
    ``separator`` documents separated by it, stripped of white space; the only column is ``prompt``.
    """
    path = Path(os.path.expanduser(source))
    if not os.path.exists(path) and not _is_hub_name(source):
        raise ValueError(_missing(path))
    if separator is not None and _kind(path) != ".txt":
        raise ValueError(f"separator = {separator!r} parts the documents of a plain text (.txt); {source} is none.")
    if os.path.isfile(path):
        return _read_file(path, separator)
    return _read_datasets(source, path, split)


def _kind(path: Path) -> str | None:
    """The suffix that says how to read a file, without a ``.gz`` behind it; None if it is unknown."""
    name = path.name.lower()
    plain = name.removesuffix(".gz")
    if plain.endswith(".parquet") and plain != name:
        return None  # Parquet compresses itself and is read from its end: a gzip around it helps nobody
    return next((suffix for suffix in SUFFIXES if plain.endswith(suffix)), None)


def _is_hub_name(source: str) -> bool:
    name = source.split(":", 1)[0]
    return _kind(Path(name)) is None and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None


def _missing(path: Path) -> str:
    if not os.path.isdir(path.parent):
        return f"There is no file {path}: its folder {path.parent} does not exist."
    return f"There is no file {path}.{nearest(path.name, (p.name for p in path.parent.iterdir()))}"


def _read_file(path: Path, separator: str | None) -> Iterator[Row]:
    match _kind(path):
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
    raise ValueError(
        f"{path}: no reader for this kind of file. Known: {' '.join(SUFFIXES)}, all but the last also with .gz."
    )


def _open(path: Path, newline: str | None = None) -> TextIO:
    # utf-8-sig: a byte order mark, as some editors write, is not part of the first prompt.
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    return cast(TextIO, opener(path, "rt", encoding="utf-8-sig", newline=newline))


def _lines(path: Path, newline: str | None = None) -> Iterator[tuple[int, str]]:
    """Numbered lines; what is no UTF-8 or no whole gzip is reported with the line before it."""
    number = 0
    try:
        with _open(path, newline) as file:
            for number, line in enumerate(file, 1):
                yield number, line
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}, after line {number}: not readable as UTF-8 text ({error}).") from error


def _read_json_lines(path: Path) -> Iterator[Row]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            what = f"{error.msg} at column {error.colno}"
            raise ValueError(f"{path}, line {number}: not JSON ({what}): {line[:60]!r}") from error
        yield _as_row(row, f"{path}, line {number}")


def _read_json(path: Path) -> Iterator[Row]:
    """A list of objects, or one object a line: both are found under the name ``.json``."""
    text = "".join(line for _, line in _lines(path))
    if not text.lstrip().startswith("["):
        yield from _read_json_lines(path)
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON ({error.msg} at column {error.colno}).") from error
    for number, row in enumerate(rows, 1):
        yield _as_row(row, f"{path}, element {number}")


def _as_row(row: object, where: str) -> Row:
    if isinstance(row, dict):
        return row
    raise ValueError(f"{where}: a {type(row).__name__} instead of an object with columns, such as {{'prompt': '..'}}.")


def _read_text(path: Path, separator: str | None) -> Iterator[Row]:
    """A prompt a line, or the documents between separators; empty ones are left out."""
    if separator == "":
        raise ValueError("separator is empty; leave it out for a prompt a line.")
    lines = (line for _, line in _lines(path))
    for text in lines if separator is None else "".join(lines).split(separator):
        if text.strip():
            yield {"prompt": text.strip()}


def _read_csv(path: Path) -> Iterator[Row]:
    """Values are texts. A column is of numbers where Python writes each of its values so: 7 or 0.5, not 007 or 1e3.

    Columns without a name and a value, as spreadsheets write, are left out.
    """
    csv.field_size_limit(sys.maxsize)  # a document may be longer than 128 KiB
    reader = csv.reader((line for _, line in _lines(path, newline="")), strict=True)
    try:
        names = next(reader, [])
        rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: not readable as CSV ({error}).") from error
    named = [name for name in names if name]
    if len(set(named)) < len(named):
        raise ValueError(f"{path}: two columns have one name in its first line, {', '.join(names)}.")
    for number, row in rows:
        if len(row) != len(names):
            raise ValueError(
                f"{path}, line {number}: not readable as CSV ({len(row)} values, and the first line names "
                f"{len(names)} columns)."
            )
    texts = {name: [row[i] for _, row in rows] for i, name in enumerate(names)}
    columns = {name: _typed(values) for name, values in texts.items() if name or any(values)}
    yield from (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def _typed(texts: list[str]) -> list[Any]:
    """The values of a column as numbers, None where empty, if all are written as Python writes them; else the texts."""
    numbers = [_number(text) if text else None for text in texts]
    written = all(number is not None or not text for number, text in zip(numbers, texts, strict=True))
    return list(numbers) if written and any(texts) else list(texts)


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
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not readable as Parquet ({error}).") from error


def _read_datasets(source: str, path: Path, split: str) -> Iterator[Row]:
    """A folder, or a name on the hub; a folder that ``save_to_disk`` wrote has one of two marks."""
    import datasets

    local = os.path.isdir(path)
    saved = local and ((path / "dataset_dict.json").is_file() or (path / "state.json").is_file())
    name, _, config = (str(path), "", "") if local else source.partition(":")
    try:
        data = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, config or None, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        where = "" if local else f"\n  There is no local file or folder {source} either."
        raise ValueError(f"{source} (split {split!r}) cannot be loaded as a data set: {error}{where}") from error
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise ValueError(f"{source} has no split {split!r}. It has {', '.join(data)}.{nearest(split, data)}")
        data = data[split]
    return iter(data)
