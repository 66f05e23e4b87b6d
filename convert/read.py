"""Read a drafter of any known dialect. The form is recognised by what a folder holds, never by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.errors import DraftsmithError, sensible
from draftsmith.configs.files import read_json
from draftsmith.configs.target import Target
from draftsmith.convert.canonical import EMBEDDING, O_BIAS, CanonicalDrafter, check_tensors
from draftsmith.convert.dialects import DIALECTS, DRAFTSMITH, MISSING, Dialect, look_up
from draftsmith.convert.dimensions import make_spec
from draftsmith.convert.embedding import without_copy
from draftsmith.convert.foreign import ReadOptions, canonical_name, read_foreign
from draftsmith.convert.record import RECORD, Record, read_record
from draftsmith.convert.rope import check_rope
from draftsmith.convert.source import drafter_weights, locate_source
from draftsmith.convert.tensors import Tensor, read_array
from draftsmith.convert.vocab_map import d2t_fault, identity_maps, t2d_fault

MEND = "point at the folder that training or conversion wrote"


def read_drafter(source: Path, target: Target, options: ReadOptions | None = None) -> CanonicalDrafter:
    """Read a drafter for `target`: names, shapes, maps and dimensions checked, tensors still on disk.

    Args:
        source: whatever `locate_source` takes.
        options: what only the user can know of a foreign checkpoint.

    Raises:
        DraftsmithError: an unknown form, or a drafter that is incomplete, contradicts itself or belongs to a target
            of other dimensions.
    """
    options = options or ReadOptions()
    with sensible("the drafter", source, "correct it, or fetch the drafter again"):
        return _read(source, target, options)


def _read(source: Path, target: Target, options: ReadOptions) -> CanonicalDrafter:
    folder, found = locate_source(source)
    weights = drafter_weights(folder)
    dialect, described, file = recognise(folder, [name for name, _ in weights.named], options.config)
    record = None if dialect is DRAFTSMITH else read_record(folder)
    if (dialect is DRAFTSMITH or record is not None) and options.given:
        raise DraftsmithError(
            f"{', '.join(options.given)}: this drafter has a record of what it is, which these options cannot change",
            where=folder / (RECORD if record else dialect.marker_file),
            mend="convert the checkpoint that it was made from, with these options; or leave them out",
        )
    if dialect is DRAFTSMITH or record is not None:
        drafter = _read_own(dialect, described, record, weights.named, target, file)
    else:
        drafter = read_foreign(dialect, described, weights.named, target, file, folder, options)
        check_target(drafter.spec, target, folder)
    notes = (f"read as {dialect.title}", *found, *weights.notes, *drafter.notes)
    return replace(drafter, origin=folder, notes=notes)


def recognise(folder: Path, names: list[str], config: Path | None = None) -> tuple[Dialect, dict[str, Any], Path]:
    """The dialect of a folder, by its description and the names of its tensors; the description and its file.

    Args:
        config: the description, if it does not lie in the folder or the one above.

    Raises:
        DraftsmithError: nothing describes the drafter, or the form is unknown.
    """
    seen = []
    descriptions = {}
    for name in dict.fromkeys(dialect.marker_file for dialect in DIALECTS):
        file = _description(folder, name, config)
        if file is not None:
            descriptions[name] = file, read_json(file, what=f"the drafter's {file.name}")
    for dialect in DIALECTS:
        if dialect.marker_file not in descriptions:
            continue
        file, described = descriptions[dialect.marker_file]
        if not _described_by(dialect, described):
            continue
        if any(name.startswith(dialect.tensors) for name in names):
            return dialect, described, file
        seen.append(f"{file.name} looks like {dialect.title}")
    if not seen and "config.json" not in descriptions:
        raise DraftsmithError(
            "nothing describes this drafter: there is no config.json", where=folder,
            found=f"{len(names)} tensors: {', '.join(sorted(names)[:4])}, ...", expected="config.json beside the weights",
            mend="name the drafter's config with --config FILE",
        )  # fmt: skip
    raise DraftsmithError(
        "the folder is in no form that is known",
        where=folder,
        found="; ".join([*seen, f"tensors {', '.join(sorted(names)[:4])}{', ...' if len(names) > 4 else ''}"]),
        expected="; ".join(f"{d.title} (tensors {' or '.join(p + '*' for p in d.tensors)})" for d in DIALECTS),
        mend=MEND,
    )


def _description(folder: Path, name: str, config: Path | None) -> Path | None:
    """Training dumps of weights lie one or two folders below the config of their run."""
    if config is not None and name == "config.json":
        return config
    candidates = [folder / name, *(parent / name for parent in list(folder.parents)[:2])]
    if name != "config.json":
        candidates = candidates[:1]
    return next((file for file in candidates if file.is_file()), None)


def _described_by(dialect: Dialect, described: Mapping[str, Any]) -> bool:
    classes = described.get("architectures")
    if dialect.architectures and not (isinstance(classes, list) and set(classes) & set(dialect.architectures)):
        return False
    return not dialect.marks or any(look_up(described, mark) is not MISSING for mark in dialect.marks)


def _read_own(
    dialect: Dialect,
    described: Mapping[str, Any],
    record: Record | None,
    named: list[tuple[str, Tensor]],
    target: Target,
    where: Path,
) -> CanonicalDrafter:
    """A checkpoint or converted folder of ours: what training recorded counts, and nothing needs mending."""
    folder, notes = where.parent, list[str]()
    if record is None:
        spec, provenance = _trained_spec(described, where)
    else:
        spec, provenance = record.spec, record.provenance
        notes.append(f"dimensions, taps and RoPE are those recorded in {RECORD}")
    check_target(spec, target, folder)
    named = [(canonical_name(dialect, name), tensor) for name, tensor in named]
    if any(name == EMBEDDING for name, _ in named):
        named, said = without_copy(named, spec, target, folder, trained=False)
        notes.append(said)
    if spec.draft_vocab_size == spec.vocab_size and not any(name in ("d2t", "t2d") for name, _ in named):
        named += identity_maps(spec.vocab_size).items()
    if spec.fc_bias:  # writing adds zeros, since SGLang builds both
        named = [(name, tensor) for name, tensor in named if name != O_BIAS]
    tensors = check_tensors(spec, named, where=folder)
    check_maps(tensors, spec, where=folder)
    return CanonicalDrafter(spec, tensors, dialect.name, folder, provenance, tuple(notes))


def check_maps(tensors: Mapping[str, Tensor], spec: DrafterSpec, *, where: object) -> None:
    """Stop at a d2t or t2d that would make engines draft other tokens than training meant."""
    d2t = read_array(tensors["d2t"])
    fault = d2t_fault(d2t, spec.draft_vocab_size, spec.vocab_size)
    fault = fault or t2d_fault(read_array(tensors["t2d"]), d2t, spec.vocab_size)
    if fault:
        raise DraftsmithError(
            f"the draft vocabulary's map is wrong: {fault}",
            where=where,
            expected="d2t int64 offsets with arange(D) + d2t ascending, t2d True exactly there",
            mend="convert a checkpoint that still has the map it was trained with",
        )


def _trained_spec(described: Mapping[str, Any], where: Path) -> tuple[DrafterSpec, dict[str, Any]]:
    values, provenance = described.get("spec"), described.get("provenance", {})
    for key, value in (("spec", values), ("provenance", provenance)):
        if not isinstance(value, dict):
            raise DraftsmithError(
                f"the checkpoint's {key} is no object", where=where, found=value, expected=f'"{key}": {{...}}'
            )
    assert isinstance(values, dict)
    spec = make_spec(values, where)
    check_rope(spec.rope, where=where)
    return spec, provenance


def check_target(spec: DrafterSpec, target: Target, folder: Path) -> None:
    """Stop at a drafter whose target has other dimensions."""
    pairs = (
        ("hidden size", spec.target_hidden_size, target.hidden_size),
        ("layers", spec.target_num_layers, target.num_layers),
        ("vocabulary", spec.vocab_size, target.vocab_size),
    )
    wrong = [f"{label} {ours}, the target's {theirs}" for label, ours, theirs in pairs if ours != theirs]
    if wrong:
        raise DraftsmithError(
            "the drafter was made for another target",
            where=folder,
            found="; ".join(wrong),
            expected=str(target.path),
            mend="name the target that it was trained on with --target",
        )
