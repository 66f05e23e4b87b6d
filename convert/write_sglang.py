"""Write a drafter as SGLang and vLLM load it: config.json, model.safetensors, and draftsmith.json for the record.

Every field that an engine would otherwise fill in by itself is written out. The tensors are streamed from the source,
cast and checked on the way; the folder appears when all of it is on disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.configs.console import closing, console, meter
from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import atomic_folder, read_json, sweep_unfinished, write_json
from draftsmith.configs.target import Target, read_target
from draftsmith.convert.canonical import CanonicalDrafter
from draftsmith.convert.dialects import ARCHITECTURE
from draftsmith.convert.layer_ids import encode
from draftsmith.convert.read import read_drafter
from draftsmith.convert.record import RECORD, make_record
from draftsmith.convert.rope import rope_fields
from draftsmith.convert.source import INDEX
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

OUR_FILES = frozenset({"config.json", WEIGHTS, RECORD, INDEX, "README.md", "manifest.json"})
"""What a drafter folder may hold; a folder with anything else is never overwritten."""


def convert(source: Path, target_path: Path, out: Path, *, dtype: str | None = None, overwrite: bool = False) -> Path:
    """Read the drafter at `source` and write the folder `out` that engines load.

    Args:
        source: a training folder, a checkpoint, or a converted drafter.
        target_path: the target's folder.
        dtype: bfloat16, float16 or float32; none: the target's.
        overwrite: replace an existing drafter folder, in one step.

    Returns:
        `out`.

    Raises:
        DraftsmithError: whatever `read_drafter` refuses, values that are not finite, a target that SGLang cannot
            serve these taps of, or a destination that cannot be written. `out` is then as it was before.
    """
    target = read_target(target_path)
    precision = _dtype(dtype, target)
    _check_destination(source, out, target, overwrite=overwrite)
    drafter = read_drafter(source, target)
    config = engine_config(drafter.spec, target, precision)
    notes = [*drafter.notes, *_config_changes(drafter.origin, config)]
    sweep_unfinished(out)
    tensors = output_tensors(drafter, precision)
    size = stored_bytes(tensors)
    with atomic_folder(out, replace=overwrite) as folder:
        with meter("convert", size / 1e6, "MB", quiet=size < WORTH_SHOWING) as bar:
            hashes = write_tensors(folder / WEIGHTS, tensors, lambda name, count: bar.advance(count / 1e6, name))
        write_json(folder / "config.json", config)
        write_json(folder / RECORD, make_record(drafter, target, precision, hashes))
    for note in notes:
        console.print(f"  {note}", markup=False, highlight=False)
    changed = "" if precision == "float32" else f", rounded to {precision}"
    closing(
        f"{out}: {len(hashes)} tensors{changed}, taps {', '.join(map(str, drafter.spec.taps))} of {target.architecture}",
        f"draftsmith verify {out} --target {target_path} --deep",
    )
    return out


def engine_config(spec: DrafterSpec, target: Target, dtype: str) -> dict[str, Any]:
    """config.json of `spec` for both engines; the context length is the target's, whatever training's was."""
    ids = encode(spec.taps, target)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "rms_norm_eps": spec.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "max_position_embeddings": target.context_length,
        **rope_fields(spec.rope),
        "dtype": dtype,
        "torch_dtype": dtype,
        "target_hidden_size": spec.target_hidden_size,
        "num_aux_hidden_states": len(spec.taps),
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(ids.nested)},
        "eagle_aux_hidden_state_layer_ids": list(ids.top),
    }
    if spec.rope.scaling is not None and spec.rope.scaling["rope_type"] == "linear":
        # SGLang multiplies the context by a linear factor unless it finds the original length.
        original = int(target.context_length / float(spec.rope.scaling["factor"]))
        for key in ("rope_scaling", "rope_parameters"):
            config[key].setdefault("original_max_position_embeddings", original)
    for flag in ("fc_norm", "norm_output"):
        if getattr(spec, flag):
            config[flag] = True
    return config


def output_tensors(drafter: CanonicalDrafter, dtype: str) -> dict[str, Tensor]:
    """The tensors as they go to disk: floating-point ones in `dtype`, d2t int64, t2d bool."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in drafter.tensors.items():
        if name == "d2t":
            tensors[name] = ValueTensor(read_array(tensor).astype("<i8"), tensor.origin)
        elif name == "t2d":
            tensors[name] = tensor
        else:
            tensors[name] = CastTensor(name, tensor, TORCH_NAMES[dtype])
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
    return [f"config.json mended: {line}" for line in config_differences(read_json(file, what="config.json"), config)]


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
    place = out.resolve()
    for label, kept in (("source", source.resolve()), ("target", target.path.resolve())):
        if kept != place and kept.is_relative_to(place):
            raise DraftsmithError(
                f"the destination contains the {label}", where=out, found=kept, mend="name another folder with --out"
            )
    if place == target.path.resolve():
        raise DraftsmithError("the destination is the target's folder", where=out, mend="name another with --out")
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
