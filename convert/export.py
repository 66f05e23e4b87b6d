"""Deliver a drafter to storage that many servers read: whole or not at all, versions side by side, `latest` last.

How each kind of storage does that is said in convert/delivery.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from draftsmith.configs.console import closing, console
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import read_json
from draftsmith.configs.target import read_target
from draftsmith.convert.card import model_card
from draftsmith.convert.delivery.destination import open_destination
from draftsmith.convert.delivery.local import LocalFolder
from draftsmith.convert.delivery.version import check_label, make_version
from draftsmith.convert.record import RECORD, Record, read_record
from draftsmith.convert.verify import verify


def export(drafter: Path, destination: str | Path, target: Path | None = None, *, version: str | None = None) -> str:
    """Verify `drafter` and deliver it as DESTINATION/VERSION; the pointer to the latest moves to it afterwards.

    A version that is there already is checked file by file and left alone; a damaged one is delivered again. An
    interrupted export is gone on with.

    Args:
        destination: a folder, s3://BUCKET/PREFIX or another fsspec URL, or hf://NAMESPACE/NAME[@BRANCH].
        target: the target's folder; none: the one that training or conversion recorded.
        version: its name; none: twelve digits of a hash over all its files.

    Returns:
        The version's address.

    Raises:
        DraftsmithError: a check fails, the version's name is taken by other files, or the destination cannot be
            written. No version that was there before has then changed.
    """
    place = open_destination(str(destination))
    if version is not None:
        check_label(version)
    record = read_record(drafter)
    target = target or _recorded_target(drafter, record)
    if isinstance(place, LocalFolder):
        _check_outside(place.root, {"drafter": drafter, "target": target})
    place.prepare()
    faults = [check for check in verify(drafter, target, deep=True) if check.status == "fail"]
    if faults:
        raise DraftsmithError(
            "the drafter does not pass verification:\n  " + "\n  ".join(f"{f.name}: {f.message}" for f in faults),
            where=drafter,
            mend=faults[0].mend,
        )
    if record is None:
        raise DraftsmithError(
            "the drafter has no record of its training", where=drafter / RECORD,
            mend=f"draftsmith convert {drafter} --target {target} --out {drafter} --overwrite",
        )  # fmt: skip
    served = read_target(target)
    config = read_json(drafter / "config.json", what="the drafter's config.json")
    delivered = make_version(drafter, model_card(drafter, served, record, config), version)
    address = place.address(delivered.label)
    wrote = place.deliver(delivered)
    if not wrote:
        console.print(f"  {address} is there already, every file as it should be", markup=False, highlight=False)
    place.point(delivered)
    sent = f"{len(delivered.files) + 1} files, {delivered.size / 1e6:,.1f} MB" if wrote else "nothing new"
    closing(f"{address} ({sent}), {place.pointer()}", place.launch(delivered.label, served, config))
    return address


def _check_outside(root: Path, folders: Mapping[str, Path]) -> None:
    """Versions inside a model's own folder would become part of it."""
    for label, folder in folders.items():
        if root.resolve().is_relative_to(folder.resolve()):
            raise DraftsmithError(
                f"the destination lies in the {label}'s own folder", where=root, found=folder.resolve(),
                mend="name another folder",
            )  # fmt: skip


def _recorded_target(drafter: Path, record: Record | None) -> Path:
    """The target's folder as training recorded it.

    Raises:
        DraftsmithError: none is recorded, or it is not on this machine.
    """
    mend = "name the target's folder: --target TARGET"
    if not drafter.is_dir():
        raise DraftsmithError(
            "the drafter folder does not exist", where=drafter, mend="draftsmith convert ... --out " + str(drafter)
        )
    recorded = record.provenance.get("target_path") if record else None
    if not isinstance(recorded, str) or not recorded:
        raise DraftsmithError("the drafter's record names no target folder", where=drafter / RECORD, mend=mend)
    if not Path(recorded).is_dir():
        raise DraftsmithError(
            "the target that was recorded is not on this machine",
            where=drafter / RECORD, found=recorded, mend=mend,
        )  # fmt: skip
    return Path(recorded)
