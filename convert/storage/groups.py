"""The sets of weights in one folder, one a file or one a set of shards, each with the tensors it holds.

Which of them is the drafter is for `convert.source` to decide, by names of tensors and never by names of files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import TEMPORARY_MARK
from draftsmith.configs.target import INDEX
from draftsmith.convert.storage.dcp import METADATA, read_dcp
from draftsmith.convert.storage.index import check_index, counted_sets, read_index
from draftsmith.convert.storage.names import NESTED, Named, drafter_names, has_marks, only_placeholders
from draftsmith.convert.storage.pickles import RawTensor
from draftsmith.convert.storage.torch_file import read_torch_file
from draftsmith.convert.storage.zero import STATE_FILES, read_zero, tag_folder
from draftsmith.convert.tensors import file_tensors

TORCH_INDEX = "pytorch_model.bin.index.json"
TORCH_FILES = (".bin", ".pt", ".pth", ".ckpt")
SUBFOLDERS = ("model", "pytorch_model*")
"""Where accelerate.save_state leaves the weights of DeepSpeed and FSDP."""


@dataclass(frozen=True)
class Group:
    """One set of weights: the folder and files it lies in, its tensors by bare name, its kind, notes on reading it."""

    folder: Path
    files: tuple[str, ...]
    named: Named
    kind: str
    notes: tuple[str, ...] = ()
    index: Path | None = None

    @property
    def label(self) -> str:
        """The files, for messages."""
        shown = ", ".join(self.files[:3]) + (", ..." if len(self.files) > 3 else "")
        return f"{self.folder.name}/ ({self.kind})" if not self.files else shown

    @property
    def qualifies(self) -> bool:
        """Whether it holds a drafter."""
        return has_marks(self.named)

    def contents(self) -> str:
        """What it holds, for messages."""
        if not self.named:
            return "no weights"
        if only_placeholders(self.named):
            return "placeholders without elements, as ZeRO-3 leaves them"
        names = sorted(name for name, _ in self.named)
        return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


@dataclass(frozen=True)
class Refused:
    """A torch file that could not be read, and why."""

    files: tuple[str, ...]
    error: DraftsmithError


def holds_weights(folder: Path) -> bool:
    """Whether anything in the folder itself looks like weights, by names of files alone."""
    return (
        bool(_safetensors(folder) or _torch_files(folder))
        or (folder / METADATA).is_file()
        or any(entry.name.endswith(STATE_FILES) for entry in [*folder.iterdir(), *folder.glob("*/*_states.pt")])
        or (folder / "latest").is_file()
    )


def subfolders(folder: Path) -> list[Path]:
    """The folders inside that accelerate names for weights and that hold some."""
    found = {entry for pattern in SUBFOLDERS for entry in folder.glob(pattern) if entry.is_dir()}
    return sorted(entry for entry in found if holds_weights(entry))


def groups_of(folder: Path) -> tuple[list[Group], list[Refused]]:
    """Every set of weights in `folder`, and the torch files that could not be read.

    Raises:
        DraftsmithError: a damaged safetensors file, DeepSpeed or DCP folder; an index that is wrong; a missing shard.
    """
    groups = _safetensors_groups(folder)
    torch_groups, refused = _torch_groups(folder)
    groups += torch_groups
    if (folder / METADATA).is_file():
        raw, notes = read_dcp(folder)
        groups.append(_group(folder, (), raw, "dcp", tuple(notes)))
    tagged = tag_folder(folder)
    if tagged is not None:
        tag, chosen = tagged
        zero = read_zero(tag)
        groups.append(_group(tag, (), zero.named, zero.kind, (*chosen, *zero.notes)))
    return groups, refused


def _group(
    folder: Path, files: tuple[str, ...], raw: Named, kind: str, notes: tuple[str, ...] = (), index: Path | None = None
) -> Group:
    named, said = drafter_names(raw, folder)
    return Group(folder, files, named, kind, (*notes, *said), index)


def _safetensors(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.safetensors") if TEMPORARY_MARK not in file.name and file.is_file())


def _torch_files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.iterdir()
        if file.suffix in TORCH_FILES
        and TEMPORARY_MARK not in file.name
        and not file.name.endswith(STATE_FILES)
        and file.is_file()
    )


def _sets(folder: Path, files: list[Path], index: Path) -> list[tuple[list[Path], dict[str, str] | None]]:
    """Sets of files that belong together: those of the index with its map, counted shards, single files."""
    if not index.is_file():
        return [(members, None) for members in counted_sets(files)]
    weight_map = read_index(index)
    listed = [folder / name for name in sorted(set(weight_map.values()))]
    return [
        (listed, weight_map),
        *((members, None) for members in counted_sets(file for file in files if file not in listed)),
    ]


def _safetensors_groups(folder: Path) -> list[Group]:
    groups = []
    for members, weight_map in _sets(folder, _safetensors(folder), folder / INDEX):
        tensors = [tensor for file in members for tensor in file_tensors(file)]
        if weight_map is not None:
            check_index(folder / INDEX, weight_map, ((tensor.name, tensor.file.name) for tensor in tensors))
        raw: Named = [(tensor.name, tensor) for tensor in tensors]
        files = tuple(file.name for file in members)
        groups.append(
            _group(folder, files, raw, "safetensors", index=folder / INDEX if weight_map is not None else None)
        )
    return groups


def _torch_groups(folder: Path) -> tuple[list[Group], list[Refused]]:
    groups: list[Group] = []
    refused: list[Refused] = []
    try:
        sets = _sets(folder, _torch_files(folder), folder / TORCH_INDEX)
    except DraftsmithError as error:
        return [], [Refused(tuple(file.name for file in _torch_files(folder)) or (TORCH_INDEX,), error)]
    for members, weight_map in sets:
        names = tuple(file.name for file in members)
        try:
            parts = [_torch_file(file) for file in members]
            if weight_map is not None:
                check_index(
                    folder / TORCH_INDEX,
                    weight_map,
                    ((name, file.name) for file, part in zip(members, parts, strict=True) for name, _ in part[0]),
                )
            raw = [pair for named, _ in parts for pair in named]
            notes = tuple(note for _, said in parts for note in said)
            index = folder / TORCH_INDEX if weight_map is not None else None
            groups.append(_group(folder, names, raw, "torch", notes, index))
        except DraftsmithError as error:
            refused.append(Refused(names, error))
    return groups, refused


def _torch_file(file: Path) -> tuple[Named, list[str]]:
    """The tensors of one file, out of the state dict that may lie under one of NESTED, and notes.

    Raises:
        DraftsmithError: a file that cannot be read, or several state dicts that hold a drafter.
    """
    opened = read_torch_file(file)
    found = [(path, tensors) for path, tensors in _state_dicts(opened.tree, ()) if tensors]
    if not found:
        return [], []
    read = [(path, [(name, opened.tensor(name, raw)) for name, raw in tensors.items()]) for path, tensors in found]
    drafters = [(path, named) for path, named in read if has_marks(drafter_names(list(named), file)[0])]
    if len(drafters) > 1:
        raise DraftsmithError(
            "a file holds several state dicts of a drafter",
            where=file,
            found=", ".join(".".join(path) or "the file itself" for path, _ in drafters),
            mend="save the one that counts alone, with safetensors.torch.save_file",
        )
    path, named = (drafters or read)[0]
    return list(named), [f"took the state dict under {'.'.join(path)!r} in {file.name}"] if path else []


def _state_dicts(tree: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], dict[str, RawTensor]]]:
    """Key path -> tensors, of the mapping itself and of those under NESTED keys."""
    if not isinstance(tree, dict) or len(path) > 3:
        return []
    tensors = {key: raw for key, raw in tree.items() if isinstance(key, str) and isinstance(raw, RawTensor)}
    nested = [pair for key in NESTED if key in tree for pair in _state_dicts(tree[key], (*path, key))]
    return [(path, tensors), *nested]


def joined(groups: list[Group]) -> Group:
    """Several sets of one folder as one."""
    first = groups[0]
    if len(groups) == 1:
        return first
    named = [pair for group in groups for pair in group.named]
    files = tuple(name for group in groups for name in group.files)
    return replace(first, files=files, named=named, notes=tuple(note for group in groups for note in group.notes))
