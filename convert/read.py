"""Read a drafter of any known dialect. The form is recognised by what a folder holds, never by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import read_json
from draftsmith.configs.target import Target
from draftsmith.convert.canonical import EMBEDDING, CanonicalDrafter, check_tensors
from draftsmith.convert.config_fields import make_spec, spec_from_config
from draftsmith.convert.dialects import DIALECTS, DRAFTSMITH, Dialect
from draftsmith.convert.record import RECORD, read_record
from draftsmith.convert.rope import check_rope
from draftsmith.convert.source import drafter_files, locate_source
from draftsmith.convert.tensors import FileTensor, Tensor, ValueTensor, from_ref, read_array, same_values
from draftsmith.convert.vocab_map import d2t_fault, identity_maps, t2d_fault


def read_drafter(source: Path, target: Target) -> CanonicalDrafter:
    """Read a drafter for `target`: names, shapes, maps and dimensions checked, tensors still on disk.

    Args:
        source: whatever `locate_source` takes.

    Raises:
        DraftsmithError: an unknown form, or a drafter that is incomplete, contradicts itself or belongs to a target
            of other dimensions.
    """
    folder, notes = locate_source(source)
    files = drafter_files(folder)
    dialect, described = recognise(folder, files)
    named = [(canonical_name(dialect, tensor.name), tensor) for tensor in files]
    record = read_record(folder)
    mended: list[str] = list(notes)
    if dialect is DRAFTSMITH:
        spec, provenance = _trained_spec(described, folder / dialect.marker_file)
    elif record is not None:
        spec, provenance = record.spec, record.provenance
        mended.append(f"dimensions and RoPE are those that training recorded in {RECORD}")
    else:
        spec, said = spec_from_config(dialect, described, dict(named), target, folder / dialect.marker_file)
        provenance = {}
        mended += said
    _check_target(spec, target, folder)
    named = list(_without_embedding_copy(dialect, named, spec, target, mended))
    tensors = check_tensors(spec, [*named, *_derived(dialect, dict(named), spec, mended)], where=folder)
    check_maps(tensors, spec, where=folder)
    return CanonicalDrafter(spec, tensors, dialect.name, folder, provenance, tuple(mended))


def recognise(folder: Path, files: list[FileTensor]) -> tuple[Dialect, dict[str, Any]]:
    """The dialect of a folder, by its description and the names of its tensors, and the description itself."""
    seen = []
    for dialect in DIALECTS:
        marker = folder / dialect.marker_file
        if not marker.is_file():
            continue
        described = read_json(marker, what=f"the drafter's {dialect.marker_file}")
        if all(key in described for key in dialect.marker_keys):
            if any(tensor.name.startswith(dialect.marker_tensors) for tensor in files):
                return dialect, described
            seen.append(f"{dialect.marker_file} looks like {dialect.title}")
    names = sorted(tensor.name for tensor in files)
    raise DraftsmithError(
        "the folder is in no form that is known",
        where=folder,
        found="; ".join([*seen, f"tensors {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"]),
        expected=" or ".join(
            f"{d.title} ({d.marker_file}, tensors {' or '.join(p + '*' for p in d.marker_tensors)})" for d in DIALECTS
        ),
        mend="point at the folder that training or conversion wrote",
    )


def canonical_name(dialect: Dialect, name: str) -> str:
    """The canonical name of a tensor that `dialect` calls `name`."""
    for foreign, ours in dialect.renames.items():
        if name.startswith(foreign):
            return ours + name.removeprefix(foreign)
    return name


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


def _check_target(spec: DrafterSpec, target: Target, folder: Path) -> None:
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


def _without_embedding_copy(
    dialect: Dialect, named: list[tuple[str, FileTensor]], spec: DrafterSpec, target: Target, notes: list[str]
) -> Iterator[tuple[str, FileTensor]]:
    """Leave out a copy of the target's embedding, after proving that it is one."""
    for name, tensor in named:
        if name != EMBEDDING or not dialect.foreign_embedding or spec.hidden_size != spec.target_hidden_size:
            yield name, tensor
            continue
        if not same_values(tensor, from_ref(target.require("embedding"))):
            raise DraftsmithError(
                "the drafter's embedding is not the target's",
                where=tensor.origin,
                expected=f"the values of {target.require('embedding').name} in {target.path}",
                mend="name the right target; SGLang would replace this embedding by the target's, vLLM would keep it",
            )
        notes.append(f"{name} equals the target's and is left out; engines share the target's")


def _derived(
    dialect: Dialect, tensors: Mapping[str, Tensor], spec: DrafterSpec, notes: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Maps that a dialect may leave out because they follow from the rest."""
    if not dialect.derivable:
        return
    if spec.draft_vocab_size == spec.vocab_size:
        for name, tensor in identity_maps(spec.vocab_size).items():
            if name not in tensors:
                notes.append(f"{name} is absent; {tensor.origin}")
                yield name, tensor
    elif "t2d" not in tensors and "d2t" in tensors:
        d2t = read_array(tensors["d2t"])
        if d2t_fault(d2t, spec.draft_vocab_size, spec.vocab_size) is None:
            marks = np.zeros(spec.vocab_size, np.bool_)
            marks[d2t + np.arange(d2t.size)] = True
            notes.append("t2d is absent and follows from d2t")
            yield "t2d", ValueTensor(marks, "derived from d2t")
