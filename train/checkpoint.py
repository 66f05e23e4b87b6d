"""Training checkpoints: folders that appear whole or not at all, rotated, with the best kept.

train/checkpoint-00000200/
    drafter/model.safetensors   float32, served names, d2t and t2d; what `draftsmith convert` reads
    drafter/drafter.json        DrafterSpec and provenance
    state/                      accelerate's state: optimiser, masters, random numbers of every process
    trainer.json                step, and the hash of everything that fixes the order and the maths of the run
train/best.json                 names the checkpoint with the highest accept length on held-out conversations
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import TEMPORARY_MARK, fsync_path, read_json, remove_folder, write_json

PREFIX = "checkpoint-"
SCHEMA = 1


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first. A folder without its final name was never finished and is not listed."""
    return sorted(p for p in folder.glob(f"{PREFIX}[0-9]*") if (p / "trainer.json").is_file())


def best_checkpoint(folder: Path) -> Path:
    """The checkpoint that best.json names, else the newest.

    Raises:
        DraftsmithError: there is none.
    """
    best = folder / "best.json"
    if best.is_file():
        name = read_json(best, what="the mark of the best checkpoint").get("checkpoint")
        if isinstance(name, str) and (folder / name / "trainer.json").is_file():
            return folder / name
    found = checkpoints(folder)
    if not found:
        raise DraftsmithError("there is no checkpoint", where=folder, mend="draftsmith train CONFIG")
    return found[-1]


def save_checkpoint(
    accelerator: Accelerator,
    folder: Path,
    step: int,
    drafter_tensors: dict[str, Tensor],
    spec: DrafterSpec,
    provenance: dict[str, Any],
    run_hash: str,
) -> Path:
    """Write one checkpoint from all processes; the rename at the end is made by the first process alone.

    Args:
        drafter_tensors: served name -> tensor; needed on the first process only.
        run_hash: what `load_state` compares.
    """
    final = folder / f"{PREFIX}{step:08d}"
    temporary = folder / f".{final.name}{TEMPORARY_MARK}write"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(temporary / "state"), safe_serialization=True)
    if accelerator.is_main_process:
        (temporary / "drafter").mkdir()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter_tensors.items()}
        save_file(tensors, temporary / "drafter" / "model.safetensors")
        write_json(
            temporary / "drafter" / "drafter.json",
            {"schema": SCHEMA, "spec": spec.model_dump(mode="json"), "provenance": provenance | {"step": step}},
        )
        write_json(
            temporary / "trainer.json",
            {"schema": SCHEMA, "step": step, "run": run_hash, "processes": accelerator.num_processes},
        )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for entry in temporary.rglob("*"):
            fsync_path(entry)
        remove_folder(final)
        temporary.rename(final)
        fsync_path(folder)
    accelerator.wait_for_everyone()
    return final


def load_state(accelerator: Accelerator, folder: Path, run_hash: str) -> int:
    """Restore the newest checkpoint of `folder` if there is one; returns the number of finished optimiser steps.

    Raises:
        DraftsmithError: the checkpoint belongs to another run (configuration, data or draft vocabulary), or was
            written by another number of processes in a way that cannot be restored.
    """
    newest = max(checkpoints(folder), default=None)
    step = int(newest.name.removeprefix(PREFIX)) if newest else 0
    everywhere = accelerator.gather(torch.tensor([step], device=accelerator.device)).tolist()
    if len(set(everywhere)) > 1:
        raise DraftsmithError(
            "the processes do not see the same checkpoints",
            where=folder,
            found=f"newest steps {everywhere}",
            expected="one run folder for all machines",
            mend="put `runs` on storage that all machines share",
        )
    if newest is None:
        return 0
    state = read_json(newest / "trainer.json", what="the checkpoint's trainer.json", mend=f"rm -r {newest}")
    if state.get("run") != run_hash:
        raise DraftsmithError(
            "the checkpoint belongs to another run: configuration, store, target or draft vocabulary differ",
            where=newest,
            found=state.get("run"),
            expected=run_hash,
            mend=f"restore the old configuration, or start afresh with another `name`, or: rm -r {folder}",
        )
    if state.get("processes") != accelerator.num_processes:
        raise DraftsmithError(
            "the checkpoint was written by another number of processes",
            where=newest,
            found=state.get("processes"),
            expected=accelerator.num_processes,
            mend=f"launch with {state.get('processes')} processes",
        )
    accelerator.load_state(str(newest / "state"))
    return step


def rotate(folder: Path, keep: int) -> None:
    """Delete old checkpoints: the newest `keep` and the best one stay; leftovers of unfinished writes go."""
    best = best_checkpoint(folder)
    for old in checkpoints(folder)[:-keep]:
        if old != best:
            remove_folder(old)
    for leftover in folder.glob(f".*{TEMPORARY_MARK}*"):
        shutil.rmtree(leftover, ignore_errors=True)


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
    from safetensors.torch import load_file

    spec, provenance = read_drafter_record(checkpoint)
    return spec, load_file(checkpoint / "drafter" / "model.safetensors"), provenance


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


def append_metrics(file: Path, row: dict[str, Any]) -> None:
    """Add one line to metrics.jsonl."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(row) + "\n")


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """All whole lines of metrics.jsonl; a torn last line is passed over."""
    if not file.is_file():
        return []
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def truncate_metrics(file: Path, step: int) -> None:
    """Forget rows after `step`, which a resumed run will write again."""
    if file.is_file():
        kept = [row for row in read_metrics(file) if row["step"] <= step]
        temporary = file.with_name(f".{file.name}{TEMPORARY_MARK}cut")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        temporary.replace(file)


def full_drafter_tensors(accelerator: Accelerator, unroll: torch.nn.Module) -> dict[str, Tensor]:
    """The trainable tensors by served name, gathered from all processes; float32."""
    state = accelerator.get_state_dict(unroll)
    return {
        name.removeprefix("drafter."): tensor.float()
        for name, tensor in (state or {}).items()
        if name.startswith("drafter.")
    }
