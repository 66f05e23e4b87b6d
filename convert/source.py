"""Find a drafter's folder and its tensors, in whichever kind of storage they lie."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import TEMPORARY_MARK, read_json
from draftsmith.configs.target import INDEX, INDEX_MEND
from draftsmith.convert.storage.groups import Group, Refused, groups_of, holds_weights, joined, subfolders
from draftsmith.convert.storage.index import check_index, read_index
from draftsmith.convert.storage.names import Named, may_be_part, only_placeholders
from draftsmith.convert.tensors import FLOATS, CastTensor, FileTensor, Tensor, file_tensors

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Weights:
    """The tensors of a drafter, still on disk.

    Attributes:
        folder: the folder that was read.
        named: bare name (without wrappers) and tensor.
        kind: `safetensors`, `torch`, `deepspeed-zero1`, `deepspeed-zero2`, `deepspeed-zero3` or `dcp`.
        notes: in words, what was chosen, what was passed over and why.
    """

    folder: Path
    named: Named
    kind: str
    notes: tuple[str, ...]


def locate_source(path: Path) -> tuple[Path, tuple[str, ...]]:
    """The folder with the drafter's weights, and notes on how it was chosen.

    Args:
        path: a folder with weights in any kind of storage, a training checkpoint, its drafter/ folder, a training
            folder (then the checkpoint that best.json names, else the newest complete one), or a state of accelerate
            that keeps its weights in a sub-folder.

    Raises:
        DraftsmithError: there is no such folder, or nothing in it is a drafter.
    """
    mend = "name a training folder (runs/NAME/train), one of its checkpoints, or a converted drafter"
    if not path.is_dir():
        problem = "the drafter must be a folder, not a file" if path.exists() else "the drafter folder does not exist"
        raise DraftsmithError(problem, where=path, mend=mend)
    if (path / "drafter" / "drafter.json").is_file():
        return path / "drafter", ()
    if any((path / name).is_file() for name in ("drafter.json", "config.json")):
        return path, ()
    complete = [
        folder
        for folder in sorted(path.glob("checkpoint-*"))
        if TEMPORARY_MARK not in folder.name and (folder / "drafter" / "drafter.json").is_file()
    ]
    if not complete and holds_weights(path):
        return path, ()
    if not complete and (inner := subfolders(path)):
        if len(inner) > 1:
            return path, ()
        return inner[0], (f"took the sub-folder {inner[0].name}, the only one with weights",)
    if not complete:
        held = sorted(entry.name for entry in path.iterdir())
        raise DraftsmithError(
            "the folder holds neither a drafter nor a complete checkpoint",
            where=path,
            found=", ".join(held[:8]) + (", ..." if len(held) > 8 else "") if held else "nothing",
            expected="drafter.json, config.json, weights, or checkpoint-*/drafter/drafter.json",
            mend=mend,
        )
    if not (path / "best.json").is_file():
        return complete[-1] / "drafter", (f"no best.json: took the newest checkpoint, {complete[-1].name}",)
    best = read_json(path / "best.json", what="the mark of the best checkpoint").get("checkpoint")
    if best not in [folder.name for folder in complete]:
        raise DraftsmithError(
            "best.json names a checkpoint that is not there",
            where=path / "best.json",
            found=best,
            expected=f"one of {', '.join(folder.name for folder in complete)}",
            mend=f"name the checkpoint: {complete[-1]}",
        )
    return path / str(best) / "drafter", (f"took {best}, which best.json names",)


def drafter_weights(folder: Path) -> Weights:
    """The tensors of the drafter in `folder`, or in the sub-folder where accelerate.save_state leaves weights.

    Every set of weights is judged by the names of its tensors. Where the same drafter lies there twice (float32
    masters and a rounded copy, say), the more precise is taken; where two differ, nothing is chosen.

    Raises:
        DraftsmithError: no weights, none or several that hold a drafter, or weights that cannot be read.
    """
    groups: list[Group] = []
    refused: list[Refused] = []
    for place in (folder, *subfolders(folder)):
        if any(group.folder == place for group in groups):
            continue  # the folder that `latest` names
        found, failed = groups_of(place)
        groups, refused = groups + found, refused + failed
    notes: list[str] = []
    candidates = _joined(folder, groups, notes)
    chosen = _agreed(folder, candidates, notes) if candidates else _sole(folder, groups, refused)
    notes += [f"passed over {', '.join(bad.files)}: {bad.error.problem}" for bad in refused]
    inside = () if chosen.folder == folder else (f"read {chosen.folder.name}/ in {folder}",)
    return Weights(chosen.folder, chosen.named, chosen.kind, (*inside, *chosen.notes, *notes))


def _joined(folder: Path, groups: list[Group], notes: list[str]) -> list[Group]:
    """The sets that hold a drafter, one for each folder and kind, together with their parts in other files."""
    candidates = []
    for key in dict.fromkeys((group.folder, group.kind) for group in groups):
        same = [group for group in groups if (group.folder, group.kind) == key]
        members = [group for group in same if group.qualifies]
        for one, other in combinations(members, 2):
            both = sorted({name for name, _ in one.named} & {name for name, _ in other.named})
            if both:
                raise DraftsmithError(
                    "two files hold a drafter, and nothing says which counts",
                    where=one.folder,
                    found=f"{one.label} and {other.label}, both with {', '.join(both[:3])}",
                    mend=f"delete or move one of them: {one.folder / other.files[0]}",
                )
        for group in same:
            if group.qualifies:
                continue
            taken = [name for member in members for name, _ in member.named]
            if members and may_be_part(group.named, taken):
                members.append(group)
            else:
                notes.append(f"passed over {group.label}, which holds no drafter: {group.contents()}")
        if members:
            indexed = next((group.index for group in members if group.index is not None), None)
            if indexed is not None and len(members) > 1:
                left_out = [name for group in members if group.index is None for name in group.files]
                raise _left_out(indexed, left_out)
            if len(members) > 1:
                notes.append(f"took {', '.join(group.label for group in members)} together, by the names they hold")
            candidates.append(joined(members))
    return candidates


def _agreed(folder: Path, candidates: list[Group], notes: list[str]) -> Group:
    """The one candidate, or the most precise of several that hold the same drafter."""
    order = ("deepspeed", "dcp", "safetensors", "torch")
    ranked = sorted(candidates, key=lambda group: order.index(group.kind.split("-")[0]))
    best = ranked[0]
    for other in ranked[1:]:
        fault = _difference(best, other)
        if fault:
            raise DraftsmithError(
                "two kinds of weights hold a drafter, and they differ",
                where=folder,
                found=f"{best.label} and {other.label}: {fault}",
                mend=f"delete the stale one: {' or '.join(str(group.folder / (group.files or ('',))[0]) for group in (other, best))}",
            )
        notes.append(f"{other.label} holds the same drafter; took {best.label}")
    return best


def _sole(folder: Path, groups: list[Group], refused: list[Refused]) -> Group:
    """The only set of weights, though it lacks what marks a drafter: what is missing is for later checks to list."""
    full = [group for group in groups if group.named]
    if len(full) == 1 and not refused and not only_placeholders(full[0].named):
        return full[0]
    if len(refused) == 1 and not full:
        raise refused[0].error
    empty = next((group for group in full if only_placeholders(group.named)), None)
    if empty is not None:
        raise DraftsmithError(
            "the weights are placeholders without elements: ZeRO-3 saved them without gathering",
            where=empty.folder / (empty.files or ("",))[0],
            expected="zero_pp_rank_* files beside it, or gathered weights",
            mend="name the DeepSpeed checkpoint folder, the one with the file latest",
        )
    if full or refused:
        lines = [f"{group.label}: {group.contents()}" for group in full]
        lines += [f"{', '.join(bad.files)}: {bad.error.problem} ({bad.error.found})" for bad in refused]
        raise DraftsmithError(
            "none of the files holds a drafter",
            where=folder,
            found="; ".join(lines),
            expected="tensors fc.*, midlayer.* or layers.0.hidden_norm.*",
        )
    raise DraftsmithError(
        "the folder has no weights",
        where=folder,
        found=", ".join(group.label for group in groups) or None,
        expected="model.safetensors",
        mend="fetch the folder again",
    )


def _difference(one: Group, other: Group) -> str | None:
    """In what two sets differ, of one and the same drafter at most rounded; none if in nothing."""
    first, second = dict(one.named), dict(other.named)
    if first.keys() != second.keys():
        return f"{', '.join(sorted(first.keys() ^ second.keys())[:3])} is in one alone"
    for name in sorted(first):
        if not _same(first[name], second[name]):
            return f"{name} has other values"
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit by bit, or one is the other rounded."""
    if one.shape != other.shape:
        return False
    if one.dtype != other.dtype:
        if not {one.dtype, other.dtype} <= set(FLOATS):
            return False
        wide, narrow = (one, other) if one.dtype == "F32" else (other, one)
        one, other = CastTensor("a copy", wide, narrow.dtype), narrow
    return all(
        np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(one.pieces(), other.pieces(), strict=True)
    )


def drafter_files(folder: Path) -> list[FileTensor]:
    """Every tensor of the safetensors files in `folder`, as an engine sees them; two of one name stay two.

    Raises:
        DraftsmithError: no safetensors file, only pickles, a damaged file, or an index that names a file outside the
            folder or an absent one, or disagrees with what the files hold.
    """
    files = sorted(file for file in folder.glob("*.safetensors") if TEMPORARY_MARK not in file.name)
    if not files:
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
        if pickles:
            raise DraftsmithError(
                "pickled weights are not read: loading them can run code",
                where=folder,
                found=", ".join(pickles),
                expected="*.safetensors",
                mend="save the tensors with safetensors.torch.save_file",
            )
        raise DraftsmithError(
            "the folder has no weights", where=folder, expected="model.safetensors", mend="fetch the folder again"
        )
    tensors = [tensor for file in files for tensor in file_tensors(file)]
    index = folder / INDEX
    if index.is_file():
        weight_map = read_index(index)
        left_out = sorted({file.name for file in files} - set(weight_map.values()))
        if left_out:
            raise _left_out(index, left_out)
        check_index(index, weight_map, ((tensor.name, tensor.file.name) for tensor in tensors))
    return tensors


def _left_out(index: Path, files: list[str]) -> DraftsmithError:
    return DraftsmithError(
        "the weight index leaves out safetensors files, which engines then ignore"
        if index.name == INDEX
        else "the weight index leaves out files that hold a part of the drafter",
        where=index,
        found=", ".join(files),
        mend=INDEX_MEND,
    )
