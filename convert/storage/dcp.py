"""Folders of torch.distributed.checkpoint: `.metadata` says which chunks of each tensor lie where in *.distcp files."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.storage.names import NESTED, TRAINING_STATE, Named
from draftsmith.convert.storage.pickles import BYTES, ForeignNameError, Inert, RawTensor, SafeUnpickler
from draftsmith.convert.storage.runs import Run, RunTensor
from draftsmith.convert.storage.torch_file import MAX_PICKLE, read_torch_file
from draftsmith.convert.tensors import Tensor

METADATA = ".metadata"
MEND = "copy the whole checkpoint folder again"


@dataclass(frozen=True)
class _Chunk:
    """A block of a tensor: where it starts, its lengths, and its values in the block's own order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    run: Run


@dataclass(frozen=True)
class _Blocks:
    """The runs of a tensor that blocks tile, in the tensor's order."""

    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]
    itemsize: int

    def __iter__(self) -> Iterator[Run]:
        chunks = sorted(self.chunks, key=lambda chunk: chunk.offsets)
        if all(chunk.sizes[1:] == self.shape[1:] for chunk in chunks):
            yield from (chunk.run for chunk in chunks)
            return
        for row in itertools.product(*(range(length) for length in self.shape[:-1])):
            for chunk in chunks:
                *heights, width = chunk.sizes
                inner = [place - start for place, start in zip(row, chunk.offsets[:-1], strict=True)]
                if all(0 <= place < size for place, size in zip(inner, heights, strict=True)):
                    start = 0
                    for place, size in zip(inner, heights, strict=True):
                        start = start * size + place
                    yield Run(chunk.run.file, chunk.run.offset + start * width * self.itemsize, width)


def read_dcp(folder: Path) -> tuple[Named, list[str]]:
    """Every tensor by its flattened name, but for those of the optimizer, and notes.

    Raises:
        DraftsmithError: metadata that names code or makes no sense, a missing or outside file, a chunk that is not
            what the metadata says, or chunks that do not tile their tensor.
    """
    file = folder / METADATA
    metadata = _metadata(file)
    described, stored = metadata.field("state_dict_metadata"), metadata.field("storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise _foreign(file, "no state_dict_metadata or storage_data")
    places: dict[tuple[Any, Any], Inert] = {}
    for index, info in stored.items():
        if isinstance(index, Inert) and isinstance(info, Inert):
            offset = index.field("offset")
            key = (index.field("fqn"), offset if isinstance(offset, tuple) else None)
            if all(isinstance(part, str | tuple | None) for part in key):
                places[key] = info
    entries: dict[str, Inert] = {}
    for name, entry in described.items():
        if not isinstance(name, str) or not isinstance(entry, Inert):
            raise _foreign(file, f"an entry {name!r}")
        if type(entry).__name__.endswith(".TensorStorageMetadata"):
            entries[name] = entry
    kept = _network(entries, metadata.field("planner_data"))
    passed = len(entries) - len(kept)
    notes = [f"passed over {passed:,} tensors of the optimizer and the run"] if passed else []
    return [(name, _tensor(folder, full, entries[full], places)) for full, name in kept], notes


def _network(entries: Iterable[str], planner_data: Any) -> list[tuple[str, str]]:
    """Flattened name and name in the state dict of the tensors that are the network's.

    The keys that a name was flattened from tell a state dict under a key of NESTED, which holds the network alone,
    from a wrapper of the same name.
    """
    flat, nested = [], []
    for full in entries:
        path = planner_data.get(full) if isinstance(planner_data, dict) else None
        keys = [str(key) for key in path] if isinstance(path, tuple) and path else [full]
        if set(keys[:2]) & set(TRAINING_STATE) or full.split(".")[0] in TRAINING_STATE:
            continue
        flat.append((full, full))
        place = next((place for place, key in enumerate(keys[:-1][:3]) if key in NESTED), None)
        if place is not None:
            nested.append((full, ".".join(keys[place + 1 :])))
    return nested or flat


def _metadata(file: Path) -> Inert:
    try:
        if file.stat().st_size > MAX_PICKLE:
            raise ValueError("it is too large")
        with file.open("rb") as handle:
            metadata = SafeUnpickler(handle).load()
    except ForeignNameError as error:
        raise DraftsmithError(
            "the metadata names code, which is never run here",
            where=file,
            found=str(error),
            expected="the classes of torch.distributed.checkpoint alone",
            mend="save the weights again with torch.distributed.checkpoint.save",
        ) from None
    except Exception as error:  # a hostile or damaged pickle can fail in any way
        raise _foreign(file, f"{type(error).__name__}: {error}") from None
    if not isinstance(metadata, Inert):
        raise _foreign(file, "no Metadata")
    return metadata


def _tensor(folder: Path, name: str, entry: Inert, places: dict[tuple[Any, Any], Inert]) -> Tensor:
    where = folder / METADATA
    shape, listed = _sizes(entry.field("size")), entry.field("chunks")
    properties = entry.field("properties")
    dtype = properties.state[0] if isinstance(properties, Inert) and isinstance(properties.state, tuple) else None
    if shape is None or not isinstance(listed, list) or not isinstance(dtype, str) or dtype not in BYTES:
        raise _foreign(where, f"the description of {name}")
    chunks = []
    for chunk in listed:
        offsets = _sizes(chunk.field("offsets")) if isinstance(chunk, Inert) else None
        sizes = _sizes(chunk.field("sizes")) if isinstance(chunk, Inert) else None
        if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(shape):
            raise _foreign(where, f"the chunks of {name}")
        info = places.get((name, offsets))
        if info is None:
            raise DraftsmithError(f"a chunk of {name} lies nowhere", where=where, found=f"offset {list(offsets)}")
        chunks.append(_Chunk(offsets, sizes, _blob(folder, name, info, sizes, dtype)))
    chunks = [chunk for chunk in chunks if prod(chunk.sizes)]
    _check_tiling(name, shape, chunks, where)
    return RunTensor(name, f"{name} in {folder}", shape, dtype, _Blocks(shape, tuple(chunks), BYTES[dtype]))


def _blob(folder: Path, name: str, info: Inert, sizes: tuple[int, ...], dtype: str) -> Run:
    """Where the values of one chunk lie; a chunk is a file of torch.save inside a .distcp file."""
    path, offset, length = info.field("relative_path"), info.field("offset"), info.field("length")
    where = folder / METADATA
    if not isinstance(path, str) or Path(path).name != path or path in ("", ".", ".."):
        raise DraftsmithError(
            "the metadata names a file outside the folder", where=where, found=path, expected="a bare file name"
        )
    if type(offset) is not int or type(length) is not int:
        raise _foreign(where, f"the place of {name}")
    if info.field("transform_descriptors"):
        raise DraftsmithError(
            "a transformed (compressed) chunk is not read",
            where=where,
            found=f"{name}: {info.field('transform_descriptors')}",
            mend="save the checkpoint without transforms",
        )
    file = folder / path
    if not file.is_file():
        raise DraftsmithError("the metadata names a file that is not there", where=where, found=path, mend=MEND)
    blob = read_torch_file(file, offset, length)
    tensor = blob.tensor(name, blob.tree) if isinstance(blob.tree, RawTensor) else None
    if not isinstance(tensor, RunTensor) or tensor.shape != sizes or tensor.dtype != dtype:
        raise DraftsmithError(
            f"a chunk of {name} is not what the metadata says",
            where=file,
            found=f"{tensor.dtype} {list(tensor.shape)}" if tensor else "no tensor",
            expected=f"{dtype} {list(sizes)}, contiguous",
            mend=MEND,
        )
    return next(iter(tensor.runs))


def _check_tiling(name: str, shape: tuple[int, ...], chunks: list[_Chunk], where: Path) -> None:
    inside = all(
        start + size <= length
        for chunk in chunks
        for start, size, length in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )
    overlap = any(
        all(a < b + m and b < a + n for a, n, b, m in zip(one.offsets, one.sizes, two.offsets, two.sizes, strict=True))
        for one, two in itertools.combinations(chunks, 2)
    )
    held = sum(prod(chunk.sizes) for chunk in chunks)
    if not inside or overlap or held != prod(shape):
        raise DraftsmithError(
            f"the chunks of {name} do not make up the tensor",
            where=where,
            found=f"{held:,} elements" + ", overlapping" * overlap + ", some outside" * (not inside),
            expected=f"{prod(shape):,} in shape {list(shape)}",
            mend=MEND,
        )


def _sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, tuple) and all(type(number) is int and number >= 0 for number in value):
        return value
    return None


def _foreign(file: Path, found: str) -> DraftsmithError:
    return DraftsmithError(
        "the file is no metadata of torch.distributed.checkpoint that is known", where=file, found=found, mend=MEND
    )
