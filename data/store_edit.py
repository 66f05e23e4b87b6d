"""`draftsmith store merge` and `store split`: new stores out of finished ones, going on where an earlier try stopped."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from draftsmith.configs.console import closing, meter
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import atomic_file, sha256_json
from draftsmith.data.ids import prompt_of
from draftsmith.data.store import MANIFEST, HarvestReader, Provenance, read_manifest
from draftsmith.data.store_writer import SHARD, StoreWriter, as_bytes, plan_shards, refuse_other_provenance

MUST_AGREE = (
    "target",
    "taps",
    "tap_convention",
    "final_state",
    "hidden_size",
    "vocab_size",
    "stored_in",
    "computed_in",
    "computed_by",
)
"""What the states of one store have in common, in the order in which differences are named."""

OTHER_FOLDER = "name another folder for the new store"


def merge(sources: Sequence[Path], out: Path) -> Path:
    """Put the shards of several stores into one; files are linked where the file system can, else copied.

    Raises:
        DraftsmithError: other targets (config, weights, tokenizer or chat template), taps or codecs; a conversation
            that stands in two of them; a damaged source; another store, or one of the sources, at `out`.
    """
    _refuse_same({"OUT": out}, sources)
    readers = [HarvestReader(source) for source in sources]
    first = readers[0]
    for other in readers[1:]:
        _refuse_difference(first, other)
    origin: dict[str, Path] = {}
    for reader in readers:
        for name in reader.ids:
            if name in origin:
                raise DraftsmithError(
                    f"conversation {name} stands in two of the stores", where=reader.path, found=str(origin[name]),
                    mend="merge stores of different prompts",
                )  # fmt: skip
            origin[name] = reader.path
    manifests = [reader.manifest for reader in readers]
    provenance = Provenance(
        **first.manifest.model_dump(include={*MUST_AGREE, "target_mark"}),
        source=sha256_json([manifest.source for manifest in manifests]),
        planned=len(origin),
        max_length=max(manifest.max_length for manifest in manifests),
        shard_tokens=max(manifest.shard_tokens for manifest in manifests),
    )
    for reader in readers:
        if reader.manifest.location is None:  # what is fetched is checked when it is there
            _refuse_changed(reader, f"check {reader.path.name}")
    shards = [(reader, place) for reader in readers for place in range(len(reader.manifest.shards))]
    with StoreWriter(out, provenance, mend=OTHER_FOLDER) as writer, meter("merge", len(shards), "shards") as progress:
        for number, (reader, place) in enumerate(shards):
            if number not in writer.finished and not writer.complete:
                shard = reader.manifest.shards[place]
                moved = shard.model_copy(update={"file": SHARD.format(number)})
                with reader.shard_file(place) as file:
                    _link_or_copy(reader, place, file, out / moved.file)
                writer.record(moved)
            progress.advance(1)
    tokens = sum(manifest.tokens for manifest in manifests)
    closing(f"{out}: {len(origin):,} conversations, {tokens:,} tokens from {len(readers)} stores")
    return out


def split(source: Path, train: Path, heldout: Path, *, share: float, seed: int) -> tuple[Path, Path]:
    """Divide a store by prompt: `share` of them are held out. Which ones, only seed and ids decide.

    Answers to one prompt (`ID~2`) and the sequences of one conversation (`ID#2`) stay together.

    Raises:
        DraftsmithError: a shard that has changed since it was written; `share` leaves one side empty; another store at `train`
            or `heldout`, or one folder named twice.
    """
    if not 0 < share < 1:
        raise DraftsmithError("no such share", where="--share", found=f"{share:g}", expected="between 0 and 1")
    _refuse_same({"TRAIN": train, "HELDOUT": heldout}, [source])
    reader = HarvestReader(source)
    known = set(reader.ids)

    names = sorted({prompt_of(name, known) for name in reader.ids}, key=lambda name: _draw(seed, name))
    chosen = set(names[: round(share * len(names))])
    if not 0 < len(chosen) < len(names):
        raise DraftsmithError(
            "one side of the split would be empty", where=source, found=f"{share:g} of {len(names):,} prompts",
            expected="a share that leaves at least one on each side",
        )  # fmt: skip
    _refuse_changed(reader, f"check {source.name}")
    parts: list[tuple[Path, list[int]]] = [(train, []), (heldout, [])]
    for index, name in enumerate(reader.ids):
        parts[prompt_of(name, known) in chosen][1].append(index)
    marks = [[reader.manifest.source, seed, share, path == heldout] for path, _ in parts]
    plans = [_provenance(reader, indices, mark) for (_, indices), mark in zip(parts, marks, strict=True)]
    for (path, _), plan in zip(parts, plans, strict=True):  # before either is begun
        if (path / MANIFEST).exists():
            refuse_other_provenance(path, read_manifest(path), plan, OTHER_FOLDER)
    for (path, indices), plan in zip(parts, plans, strict=True):
        _copy(reader, indices, path, plan)
        closing(f"{path}: {len(indices):,} conversations, {sum(reader.lengths[index] for index in indices):,} tokens")
    return train, heldout


def _refuse_same(outputs: dict[str, Path], sources: Sequence[Path]) -> None:
    """Every store that is read or written has a folder of its own."""
    taken = {source.resolve(): f"{source}, which is read" for source in sources}
    for name, path in outputs.items():
        other = taken.setdefault(path.resolve(), f"{name}, {path}")
        if other != f"{name}, {path}":
            raise DraftsmithError(
                "two stores cannot share a folder", where=f"{name}, {path}", found=f"the same folder as {other}",
                mend="name another folder",
            )  # fmt: skip


def _draw(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}\n{name}".encode()).digest()


def _provenance(reader: HarvestReader, indices: Sequence[int], mark: list[object]) -> Provenance:
    """Of a store that holds these conversations of another."""
    return Provenance(
        **reader.manifest.model_dump(include=set(Provenance.model_fields) - {"source", "planned", "location"}),
        source=sha256_json(mark),
        planned=len(indices),
    )


def _copy(reader: HarvestReader, indices: Sequence[int], out: Path, provenance: Provenance) -> None:
    """Write these conversations, bit by bit as they are stored, into a store of their own."""
    lengths = [reader.lengths[index] for index in indices]
    with StoreWriter(out, provenance, mend=OTHER_FOLDER) as writer, meter("split", sum(lengths), "tokens") as progress:
        for number, part in enumerate(plan_shards(lengths, provenance.shard_tokens)):
            if number not in writer.finished:
                shard = writer.shard(number, [lengths[place] for place in part]).open()
                try:
                    for place in part:
                        tokens, states = reader.stored(indices[place])
                        shard.put(
                            place - part.start, reader.about(indices[place]), tokens["input_ids"].numpy(),
                            tokens["generated"].numpy(), tokens["argmax"].numpy(),
                            {name: as_bytes(rows) for name, rows in states.items()},
                        )  # fmt: skip
                except BaseException as error:
                    shard.abandon(error)
                    raise
                writer.record(shard.close())
            progress.advance(sum(lengths[place] for place in part))


def _refuse_changed(reader: HarvestReader, doing: str) -> None:
    """Stop at a shard that is not what its manifest says."""
    with meter(doing, len(reader.manifest.shards), "shards") as progress:
        reader.verify(lambda: progress.advance(1))


def _link_or_copy(reader: HarvestReader, number: int, source: Path, destination: Path) -> None:
    """A shard under another name; of a symbolic link the file it points to. What is no link to a checked file is checked."""
    with atomic_file(destination) as temporary:
        try:
            os.link(source.resolve(), temporary)
            linked = True
        except OSError:
            shutil.copyfile(source, temporary)
            linked = False
        if not linked or reader.manifest.location is not None:
            reader.verify_shard(number, temporary)


def _refuse_difference(first: HarvestReader, other: HarvestReader) -> None:
    for name in MUST_AGREE:
        one, two = getattr(first.manifest, name), getattr(other.manifest, name)
        if one == two:
            continue
        what = {"stored_in": "codec", "computed_in": "dtype while harvesting", "computed_by": "harvest.backend"}.get(
            name, name.replace("_", " ")
        )
        if name == "target":
            keys = [key for key in sorted(one.keys() | two.keys()) if one.get(key) != two.get(key)]
            what = "target: its " + ", ".join(key.replace("_", " ") for key in keys)
            one, two = ({key: mark.get(key) for key in keys} for mark in (one, two))
        raise DraftsmithError(
            f"the stores do not belong together: they differ in {what}", where=f"{first.path} and {other.path}",
            found=two, expected=one, mend="merge only stores of one target, harvested alike",
        )  # fmt: skip
