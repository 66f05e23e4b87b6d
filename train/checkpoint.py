"""Training checkpoints: folders that appear whole or not at all, rotated, with the best kept.

train/checkpoint-00000200/
    drafter/model.safetensors        float32 master weights by served name, d2t and t2d; what `draftsmith convert` reads
    drafter/drafter.json             DrafterSpec and provenance
    state/moments.safetensors        AdamW's moments by parameter name, float32
    trainer.json                     step, what the run is, size and xxh3 of every other file; written last
train/best.json                      names the checkpoint with the highest accept length on held-out conversations

Nothing in it depends on the number of processes or on the back end. There is no other state: the learning rate, the
order of the data and the seeds of random numbers are functions of the step.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.configs.console import warn
from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import TEMPORARY_MARK, atomic_folder, read_json, remove_folder, write_json
from draftsmith.train.folders import DESCRIPTION, PREFIX, checkpoints

SCHEMA = 2


def best_checkpoint(folder: Path) -> Path:
    """The checkpoint that best.json names, whole or not, else the newest.

    Raises:
        DraftsmithError: there is none, or best.json is damaged.
    """
    best = _marked(folder)
    if best is not None and best.is_dir():
        return best
    found = checkpoints(folder)
    if not found:
        raise DraftsmithError("there is no checkpoint", where=folder, mend="draftsmith train CONFIG")
    return found[-1]


def save_checkpoint(
    folder: Path,
    step: int,
    drafter_tensors: dict[str, Tensor],
    moments: dict[str, Tensor],
    spec: DrafterSpec,
    provenance: dict[str, Any],
    run: dict[str, Any],
) -> Path:
    """Write one checkpoint; the first process alone calls this.

    Args:
        drafter_tensors: served name -> tensor.
        moments: as `gather_moments` gives them.
        run: what `resume_point` compares.

    Raises:
        DraftsmithError: a tensor that is not finite (nothing is written), or no space.
    """
    for name, tensor in (drafter_tensors | moments).items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DraftsmithError(
                "training stopped: weights or moments are not finite, and no checkpoint is made of them",
                where=f"step {step}, {name}", mend="lower train.learning_rate; the last checkpoint is untouched",
            )  # fmt: skip
    final = folder / f"{PREFIX}{step:08d}"
    with atomic_folder(final, replace=True) as temporary:
        for part in ("drafter", "state"):
            (temporary / part).mkdir()
        _save(drafter_tensors, temporary / "drafter" / "model.safetensors")
        write_json(
            temporary / "drafter" / "drafter.json",
            {"schema": SCHEMA, "spec": spec.model_dump(mode="json"), "provenance": provenance | {"step": step}},
        )
        _save(moments, temporary / "state" / "moments.safetensors")
        written = {str(f.relative_to(temporary)): f for f in sorted(temporary.rglob("*")) if f.is_file()}
        described = {
            "schema": SCHEMA, "step": step, "run": run,
            "files": {name: file.stat().st_size for name, file in written.items()},
            "xxh3": {name: _digest(file) for name, file in written.items()},
        }  # fmt: skip
        write_json(temporary / DESCRIPTION, described)
    return final


def resume_point(folder: Path, run: dict[str, Any]) -> tuple[int, Path | None]:
    """Number of finished optimiser steps and the newest checkpoint, (0, None) if there is none.

    Raises:
        DraftsmithError: the newest checkpoint lacks files or some are cut off, has another format, or belongs to
            another run; the fields that differ are named.
    """
    newest = max((p for p in folder.glob(f"{PREFIX}*") if p.is_dir()), default=None)
    if newest is None:
        return 0, None
    described = _described(newest, "a checkpoint", _away(newest))
    theirs, step = described["run"], described["step"]
    differing = [key for key in sorted(theirs.keys() | run.keys()) if theirs.get(key) != run.get(key)]
    if differing:
        raise DraftsmithError(
            f"the checkpoint belongs to another run: {', '.join(differing[:6])} differ{'s' if len(differing) == 1 else ''}",
            where=newest,
            found="; ".join(f"{key} = {theirs.get(key)}" for key in differing[:6]),
            expected="; ".join(f"{key} = {run.get(key)}" for key in differing[:6]),
            mend=f"restore the old configuration, or start afresh with another `name`, or: rm -r {folder}",
        )
    return step, newest


def check_bytes(folder: Path, first: int) -> None:
    """Compare every byte of the checkpoint of step `first` and of the best one with what was written.

    Raises:
        DraftsmithError: one of them has changed, or a file of the best one is missing or cut off.
    """
    newest = folder / f"{PREFIX}{first:08d}"
    if first:
        _compare_bytes(newest, _described(newest, "a checkpoint", _away(newest)), "a checkpoint", _away(newest))
    best = _marked(folder)
    if best is not None and best != newest and best.is_dir():
        check_best(folder)


def check_best(folder: Path) -> Path:
    """The best checkpoint, read and found whole.

    Raises:
        DraftsmithError: there is none, or a file of it is missing, cut off or changed.
    """
    best = best_checkpoint(folder)
    away = f"rm -r {best}; the same command then marks the best of the other checkpoints"
    _compare_bytes(best, _described(best, "the best checkpoint", away), "the best checkpoint", away)
    return best


def _away(checkpoint: Path) -> str:
    return f"rm -r {checkpoint} (the run then goes on from an older one, if there is one)"


def _marked(folder: Path) -> Path | None:
    """The folder that best.json names, which need not be there."""
    mark = folder / "best.json"
    if not mark.is_file():
        return None
    mend = f"rm {mark}; the same command marks the best checkpoint again"
    name = read_json(mark, what="the mark of the best checkpoint", mend=mend).get("checkpoint")
    if not isinstance(name, str) or not name.startswith(PREFIX):
        raise DraftsmithError("the mark of the best checkpoint names none", where=mark, found=name, mend=mend)
    return folder / name


def _described(checkpoint: Path, what: str, mend: str) -> dict[str, Any]:
    """trainer.json of a checkpoint whose files have the sizes that it tells.

    Raises:
        DraftsmithError: it is missing, damaged or of another format, or a file is missing or cut off; `what` names the
            checkpoint.
    """
    described = read_json(checkpoint / DESCRIPTION, what=f"{DESCRIPTION} of {what}", mend=mend)
    if described.get("schema") != SCHEMA:
        raise DraftsmithError(
            f"{what} has another format", where=checkpoint, found=described.get("schema"), expected=SCHEMA, mend=mend
        )
    files, run, step = described.get("files"), described.get("run"), described.get("step")
    if (
        not (isinstance(files, dict) and isinstance(run, dict) and isinstance(step, int))
        or checkpoint.name != f"{PREFIX}{step:08d}"
    ):
        raise DraftsmithError(f"{DESCRIPTION} of {what} is damaged", where=checkpoint / DESCRIPTION, mend=mend)
    for name, size in files.items():
        file = checkpoint / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise DraftsmithError(
                f"{what} is incomplete: a file is missing or cut off",
                where=file,
                found="no such file" if found is None else f"{found:,} bytes",
                expected=f"{size:,} bytes",
                mend=mend,
            )
    return described


def _compare_bytes(checkpoint: Path, described: dict[str, Any], what: str, mend: str) -> None:
    """Digests of all files with those of trainer.json; checkpoints of earlier versions have none."""
    recorded = described.get("xxh3", {})
    for name in described["files"]:
        if name in recorded and _digest(checkpoint / name) != recorded[name]:
            raise DraftsmithError(
                f"a file of {what} is damaged: its bytes have changed since it was written",
                where=checkpoint / name, mend=mend,
            )  # fmt: skip


def _digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, xxhash.xxh3_128).hexdigest()


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file)
    except SafetensorError as error:
        raise DraftsmithError(
            f"a checkpoint cannot be written: {error}", where=file,
            mend="free some space; the same command goes on from the last checkpoint",
        ) from None  # fmt: skip


def _load(file: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint's file.

    Raises:
        DraftsmithError: the file cannot be read, or a tensor is not finite.
    """
    mend = f"rm -r {file.parents[1]} (the run then goes on from an older checkpoint, if there is one)"
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise DraftsmithError(f"a checkpoint's file cannot be read: {error}", where=file, mend=mend) from None
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DraftsmithError("a checkpoint's tensor is not finite", where=f"{file}: {name}", mend=mend)
    return tensors


def read_moments(checkpoint: Path) -> dict[str, Tensor]:
    """AdamW's moments, as `restore_moments` takes them."""
    return _load(checkpoint / "state" / "moments.safetensors")


def rotate(folder: Path, keep: int) -> None:
    """Delete old checkpoints: the newest `keep` and the best one stay; leftovers of unfinished writes go."""
    best = best_checkpoint(folder)
    for old in checkpoints(folder)[:-keep]:
        if old != best:
            remove_folder(old)
    for leftover in folder.glob(f".*{TEMPORARY_MARK}*"):
        shutil.rmtree(leftover, ignore_errors=True)
        leftover.unlink(missing_ok=True)


def mark_best(folder: Path, checkpoint: Path, accept_length: float) -> None:
    """Point best.json at `checkpoint` if no marked one that still exists was better."""
    mark = folder / "best.json"
    if mark.is_file():
        old = read_json(mark, what="the mark of the best checkpoint")
        if (folder / str(old.get("checkpoint"))).is_dir() and float(old.get("accept_length", 0.0)) >= accept_length:
            return
    write_json(mark, {"checkpoint": checkpoint.name, "accept_length": accept_length})


def mark_best_again(folder: Path) -> None:
    """Mark from what the checkpoints themselves record, in case a run was killed between writing one and marking it.

    A marked one that is no longer there loses its mark, and a person is told.
    """
    lost = _marked(folder)
    if lost is not None and not lost.is_dir():
        warn(f"{lost} is not there, although best.json names it: the mark goes to the best of the others")
        (folder / "best.json").unlink()
    for checkpoint in checkpoints(folder):
        measured = read_drafter_record(checkpoint)[1].get("accept_length")
        if isinstance(measured, dict):
            mark_best(folder, checkpoint, float(measured["accept_length"]))


def read_drafter(checkpoint: Path) -> tuple[DrafterSpec, dict[str, Tensor], dict[str, Any]]:
    """Spec, tensors (float32, d2t, t2d) and provenance of a checkpoint of ours."""
    spec, provenance = read_drafter_record(checkpoint)
    return spec, _load(checkpoint / "drafter" / "model.safetensors"), provenance


def read_drafter_record(checkpoint: Path) -> tuple[DrafterSpec, dict[str, Any]]:
    """Spec and provenance of a checkpoint of ours.

    Raises:
        DraftsmithError: drafter.json is missing or damaged.
    """
    file = checkpoint / "drafter" / "drafter.json"
    described = read_json(file, what="the checkpoint's drafter.json", mend="draftsmith train CONFIG")
    try:
        return DrafterSpec(**described["spec"]), described.get("provenance", {})
    except (KeyError, TypeError, ValueError) as error:
        raise DraftsmithError(f"the checkpoint's drafter.json is damaged: {error}", where=file) from None
