"""Training checkpoints: folders that appear whole or not at all, rotated, with the best kept.

train/checkpoint-00000200/
    drafter/model.safetensors        float32 master weights by served name, d2t and t2d; what `draftsmith convert` reads
    drafter/drafter.json             DrafterSpec and provenance
    state/moments.safetensors        AdamW's moments by parameter name, float32
    trainer.json                     step, what the run is, and the size of every other file; written last
train/best.json                      names the checkpoint with the highest accept length on held-out conversations

Nothing in it depends on the number of processes or on the back end. There is no other state: the learning rate, the
order of the data and the seeds of random numbers are functions of the step.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import TEMPORARY_MARK, atomic_folder, read_json, remove_folder, write_json

PREFIX = "checkpoint-"
SCHEMA = 2
DESCRIPTION = "trainer.json"


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first. A folder without its final name was never finished and is not listed."""
    return sorted(p for p in folder.glob(f"{PREFIX}[0-9]*") if (p / DESCRIPTION).is_file())


def best_checkpoint(folder: Path) -> Path:
    """The checkpoint that best.json names, else the newest.

    Raises:
        DraftsmithError: there is none.
    """
    best = folder / "best.json"
    if best.is_file():
        name = read_json(best, what="the mark of the best checkpoint").get("checkpoint")
        if isinstance(name, str) and (folder / name / DESCRIPTION).is_file():
            return folder / name
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
        files = {
            str(file.relative_to(temporary)): file.stat().st_size
            for file in sorted(temporary.rglob("*"))
            if file.is_file()
        }
        write_json(temporary / DESCRIPTION, {"schema": SCHEMA, "step": step, "run": run, "files": files})
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
    away = f"rm -r {newest} (the run then goes on from an older one, if there is one)"
    described = read_json(newest / DESCRIPTION, what=f"{DESCRIPTION} of a checkpoint", mend=away)
    if described.get("schema") != SCHEMA:
        raise DraftsmithError(
            "the checkpoint has another format", where=newest, found=described.get("schema"), expected=SCHEMA, mend=away
        )
    files, theirs, step = described.get("files"), described.get("run"), described.get("step")
    if (
        not (isinstance(files, dict) and isinstance(theirs, dict) and isinstance(step, int))
        or newest.name != f"{PREFIX}{step:08d}"
    ):
        raise DraftsmithError(f"{DESCRIPTION} of a checkpoint is damaged", where=newest / DESCRIPTION, mend=away)
    for name, size in files.items():
        file = newest / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise DraftsmithError(
                "a checkpoint is incomplete: a file is missing or cut off",
                where=file,
                found="no such file" if found is None else f"{found:,} bytes",
                expected=f"{size:,} bytes",
                mend=away,
            )
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
    """Mark from what the checkpoints themselves record, in case a run was killed between writing one and marking it."""
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
