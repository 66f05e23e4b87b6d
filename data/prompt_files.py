"""Rows of a prompt source, one at a time: jsonl, json, parquet, folders of these, and Hugging Face datasets.

Memory does not grow with the file: jsonl is read line by line, a JSON array piece by piece, parquet in small batches,
datasets as they stream or from their memory map.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.configs.errors import DraftsmithError

FOLDER = Path(__file__).parent / "prompts"
BUILTIN = {"builtin:train": FOLDER / "train.jsonl", "builtin:heldout": FOLDER / "heldout.jsonl"}
DATASET = re.compile(r"hf:(?P<name>[^#]+?)(#(?P<subset>[^:#]+))?(:(?P<split>[\w.-]+))?")
"""`hf:NAME`, `hf:NAME:SPLIT`, `hf:NAME#SUBSET:SPLIT`; NAME is a dataset's name on the hub or a folder."""

FORMS = "a .jsonl, .json or .parquet file, a folder of a saved dataset, hf:NAME[#SUBSET][:SPLIT]"
CHUNK = 1 << 20
BATCH = 256


@dataclass(frozen=True)
class Row:
    """A row as it stands in its source: `number` counts lines of a jsonl file and rows elsewhere, from 1."""

    number: int
    value: Any = None
    fault: str | None = None


def source_name(source: str) -> str:
    """Stem of the ids of prompts that have none of their own."""
    return BUILTIN[source].stem if source in BUILTIN else re.sub(r"\W+", "-", Path(source).stem).strip("-") or "prompt"


def read_rows(source: str) -> Iterator[Row]:
    """Every row of a source, in its order.

    Raises:
        DraftsmithError: the source does not exist or is of no known form.
    """
    if source.startswith("hf:"):
        yield from _read_dataset(source)
        return
    path = BUILTIN.get(source, Path(source).expanduser())
    if path.is_dir():
        yield from _read_folder(path)
    elif not path.is_file():
        raise DraftsmithError("the prompts do not exist", where=path, expected=f"{FORMS}, or {' or '.join(BUILTIN)}")
    elif path.suffix == ".parquet":
        yield from _read_parquet(path)
    elif path.suffix == ".json":
        yield from _read_json(path)
    else:
        yield from _read_jsonl(path)


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            if line.strip():
                try:
                    yield Row(number, json.loads(line))
                except ValueError:  # bad UTF-8 too
                    yield Row(number, fault="not JSON")
                except RecursionError:
                    yield Row(number, fault="nested too deeply")


def _read_json(path: Path) -> Iterator[Row]:
    """Objects of a JSON array; a .json file that does not begin with `[` is read as jsonl."""
    with path.open(encoding="utf-8", errors="surrogateescape") as handle:
        buffer = handle.read(CHUNK).lstrip("\ufeff \t\r\n")
        if not buffer.startswith("["):
            yield from _read_jsonl(path)
            return
        decoder, place, number = json.JSONDecoder(), 1, 0
        while True:
            place = _skip(buffer, place)
            if buffer[place : place + 1] == "]":
                rest = (buffer[place + 1 :] + handle.read(CHUNK)).strip()
                if rest:
                    raise DraftsmithError(
                        f"something stands behind the JSON array of {number:,} rows", where=path, found=rest[:60],
                        expected="the end of the file", mend="write one array, or one object a line (.jsonl)",
                    )  # fmt: skip
                return
            try:
                value, end = decoder.raw_decode(buffer, place)
                if end == len(buffer):
                    raise ValueError  # a number may go on in the next piece
            except ValueError:
                more = handle.read(max(CHUNK, len(buffer) - place))
                if not more:
                    raise DraftsmithError(
                        f"the JSON array breaks off or is malformed after {number:,} rows",
                        where=path,
                        found=buffer[place : place + 60] or "the end of the file",
                        mend="mend the file, or write one object a line (.jsonl): a bad line is then skipped",
                    ) from None
                buffer, place = buffer[place:] + more, 0
                continue
            except RecursionError:
                raise DraftsmithError(
                    f"row {number + 1:,} of the JSON array is nested too deeply to be read", where=path,
                    mend="take the row out, or write one object a line (.jsonl): a bad line is then skipped",
                ) from None  # fmt: skip
            number += 1
            yield Row(number, value)
            place = end


def _skip(buffer: str, place: int) -> int:
    while place < len(buffer) and buffer[place] in " \t\r\n,":
        place += 1
    return place


def _read_parquet(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=BATCH):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(number, _without_nulls(value))
    except (ArrowException, OSError) as error:
        raise DraftsmithError(f"the parquet file cannot be read: {error}", where=path) from None


def _without_nulls(value: Any) -> Any:
    """A row of a table without its null fields: Arrow gives every struct the fields of all of them."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _read_folder(path: Path) -> Iterator[Row]:
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        yield from _read_dataset(f"hf:{path}")
        return
    files = sorted(file for file in path.rglob("*") if file.suffix in (".jsonl", ".json", ".parquet"))
    if not files:
        raise DraftsmithError("the folder holds no prompts", where=path, expected=FORMS)
    number = 0
    for file in files:
        for row in read_rows(str(file)):
            number += 1
            yield Row(number, row.value, row.fault)


def _read_dataset(source: str) -> Iterator[Row]:
    from datasets import Dataset, load_dataset, load_from_disk

    match = DATASET.fullmatch(source)
    if match is None:
        raise DraftsmithError(
            "the name of the dataset cannot be read", found=source, expected="hf:NAME[#SUBSET][:SPLIT]"
        )
    name, split = match["name"], match["split"] or "train"
    folder = Path(name).expanduser()
    try:
        if any((folder / entry).is_file() for entry in ("state.json", "dataset_dict.json")):
            rows: Any = load_from_disk(str(folder))
            if not isinstance(rows, Dataset):
                rows = rows[split]
        else:
            rows = load_dataset(str(folder) if folder.is_dir() else name, match["subset"], split=split, streaming=True)
        for number, value in enumerate(rows, start=1):
            yield Row(number, _without_nulls(value))
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        raise DraftsmithError(
            f"the dataset cannot be read: {type(error).__name__} {reason[0] if reason else ''}",
            where=source,
            expected=f"{FORMS}; without a network, a folder or what HF_HOME has cached",
        ) from error
