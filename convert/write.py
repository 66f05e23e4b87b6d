"""Write a drafter as engines load it: config.json, model.safetensors, and draftsmith.json for the record.

The tensors are streamed from the source, cast and checked on the way; the folder appears when all of it is on disk.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.configs.console import closing, console, meter, warn
from draftsmith.configs.errors import DraftsmithError, sensible
from draftsmith.configs.files import atomic_folder, read_json, sweep_unfinished, write_json
from draftsmith.configs.target import Target, read_target
from draftsmith.convert.canonical import O_BIAS, CanonicalDrafter
from draftsmith.convert.dialects import is_speculators
from draftsmith.convert.foreign import ReadOptions
from draftsmith.convert.layer_ids import engine_lines
from draftsmith.convert.layouts import LAYOUTS, Layout
from draftsmith.convert.read import read_drafter
from draftsmith.convert.record import OUR_FILES, RECORD, make_record
from draftsmith.convert.rope import prove_unchanged
from draftsmith.convert.tensors import (
    TORCH_NAMES,
    CastTensor,
    Tensor,
    ValueTensor,
    read_array,
    stored_bytes,
    write_tensors,
)

WEIGHTS = "model.safetensors"

WORTH_SHOWING = 256_000_000
"""Bytes from which writing takes long enough to show its progress."""

LONGEST_NAME = 200


def convert(
    source: Path,
    target_path: Path,
    out: Path,
    *,
    to: str = "sglang",
    dtype: str | None = None,
    overwrite: bool = False,
    options: ReadOptions | None = None,
) -> Path:
    """Read the drafter at `source` and write the folder `out` that engines load.

    Args:
        source: a drafter in any known form, a checkpoint, or a training folder.
        target_path: the target's folder.
        to: sglang (the portable form, which vLLM loads too), vllm (the speculators format) or eagle (SafeAILab's).
        dtype: bfloat16, float16 or float32; none: the target's.
        overwrite: replace an existing drafter folder, in one step.
        options: what only the user can know of a foreign checkpoint.

    Returns:
        `out`.

    Raises:
        DraftsmithError: whatever `read_drafter` refuses, what the form cannot carry, values that are not finite, a
            target that SGLang cannot serve these taps of, or a destination that cannot be written. `out` is then as it
            was before.
    """
    layout = _layout(to)
    target = read_target(target_path)
    precision = _dtype(dtype, target)
    _check_destination(source, out, target, overwrite=overwrite)
    drafter = read_drafter(source, target, options)
    layout.check(drafter.spec, target, drafter.origin)
    with sensible("the drafter's config", drafter.origin):
        config = layout.config(drafter.spec, target, precision)
    notes = [*drafter.notes, *_config_changes(drafter.origin, config)]
    notes.append(prove_unchanged(drafter.spec, config, target.longest_context))
    sweep_unfinished(out)
    tensors = output_tensors(drafter, layout, precision)
    size = stored_bytes(tensors)
    with atomic_folder(out, replace=overwrite) as folder:
        with meter("convert", size / 1e6, "MB", quiet=size < WORTH_SHOWING) as bar:
            hashes = write_tensors(folder / WEIGHTS, tensors, lambda name, count: bar.advance(count / 1e6, name))
        write_json(folder / "config.json", config)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        write_json(folder / RECORD, make_record(drafter, target, precision, shapes, hashes))
    for note in notes:
        if note.startswith("WARNING: "):
            warn(note.removeprefix("WARNING: "))
        else:
            console.print(f"  {note}", markup=False, highlight=False)
    for line in engine_lines(config, target):
        console.print(f"  {line}", markup=False, highlight=False)
    changed = "" if precision == "float32" else f", {precision}"
    closing(
        f"{out}: {len(hashes)} tensors{changed}, {layout.title}, taps {', '.join(map(str, drafter.spec.taps))} of "
        f"{target.architecture}",
        shlex.join(["draftsmith", "verify", str(out), "--target", str(target_path), "--deep"])
        if layout.name != "eagle"
        else None,
    )
    return out


def _layout(to: str) -> Layout:
    if to not in LAYOUTS:
        raise DraftsmithError(
            "drafters are not written in this form", where="--to", found=to,
            expected=", ".join(f"{name} ({layout.title})" for name, layout in LAYOUTS.items()), mend="pass --to sglang",
        )  # fmt: skip
    return LAYOUTS[to]


def output_tensors(drafter: CanonicalDrafter, layout: Layout, dtype: str) -> dict[str, Tensor]:
    """The tensors as they go to disk: floating-point ones in `dtype`, d2t int64, t2d bool."""
    spec = drafter.spec
    tensors: dict[str, Tensor] = {}
    for name, tensor in drafter.tensors.items():
        if name in ("d2t", "t2d") and spec.draft_vocab_size == spec.vocab_size:
            continue  # vLLM refuses a d2t that it does not need; SGLang takes draft ids for target ids without one
        if name == "d2t":
            tensors[name] = ValueTensor(read_array(tensor).astype("<i8"), tensor.origin)
        elif name == "t2d":
            tensors[name] = tensor
        else:
            tensors[layout.written_name(name)] = CastTensor(name, tensor, TORCH_NAMES[dtype])
    if spec.fc_bias:
        # SGLang builds an o_proj.bias too where fc has one, and leaves it uninitialised if the file lacks it.
        zeros = ValueTensor(np.zeros(spec.hidden_size, np.float32), "zeros, since SGLang builds it beside fc.bias")
        tensors[O_BIAS] = CastTensor(O_BIAS, zeros, TORCH_NAMES[dtype])
    return tensors


def config_differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """`key: value found, expected value` for every field that differs, absent ones included."""
    lines = []
    for key in sorted(found.keys() | expected.keys()):
        ours, theirs = (json.dumps(c[key]) if key in c else "absent" for c in (found, expected))
        if ours != theirs:
            lines.append(f"{key}: {ours}, expected {theirs}")
    return lines


def _config_changes(origin: Path, config: Mapping[str, Any]) -> list[str]:
    file = origin / "config.json"
    if not file.is_file():
        return []
    found = read_json(file, what="config.json")
    if is_speculators(found) != is_speculators(config):
        return ["config.json is written anew: the forms have other fields"]
    return [f"config.json mended: {line}" for line in config_differences(found, config)]


def _dtype(wanted: str | None, target: Target) -> str:
    dtype = wanted or target.dtype.removeprefix("torch.")
    if dtype not in TORCH_NAMES:
        raise DraftsmithError(
            "drafters are not written in this dtype",
            where="--dtype" if wanted else target.path / "config.json",
            found=dtype,
            expected=", ".join(TORCH_NAMES),
            mend="pass --dtype bfloat16",
        )
    return dtype


def _check_destination(source: Path, out: Path, target: Target, *, overwrite: bool) -> None:
    """Refuse a destination whose replacement would take something else with it."""
    if len(out.name) > LONGEST_NAME:
        raise DraftsmithError("the destination's name is too long", where="--out", found=f"{len(out.name)} characters")
    place = out.resolve()
    for label, kept in (("source", source.resolve()), ("target", target.path.resolve())):
        if kept != place and kept.is_relative_to(place):
            raise DraftsmithError(
                f"the destination contains the {label}", where=out, found=kept, mend="name another folder with --out"
            )
    if place == target.path.resolve():
        raise DraftsmithError("the destination is the target's folder", where=out, mend="name another with --out")
    if out.is_symlink():
        raise DraftsmithError(
            "the destination is a link", where=out, found=f"-> {out.readlink()}",
            mend="name a folder; `latest` of an export is flipped by draftsmith export",
        )  # fmt: skip
    if (out / "manifest.json").is_file():
        raise DraftsmithError(
            "the destination is a delivered version, which never changes", where=out,
            mend="name another folder with --out, then: draftsmith export",
        )  # fmt: skip
    if not out.exists():
        return
    if not overwrite:
        raise DraftsmithError(
            "the destination exists already", where=out, mend="name another folder or pass --overwrite"
        )
    foreign = (
        sorted(entry.name for entry in out.iterdir() if entry.name not in OUR_FILES) if out.is_dir() else [out.name]
    )
    if foreign:
        raise DraftsmithError(
            "the destination holds files that are no part of a drafter; it is not overwritten",
            where=out,
            found=", ".join(foreign[:8]),
            mend="name another folder with --out",
        )
