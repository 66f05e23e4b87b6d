"""DrafterSpec out of a foreign config.json, by a dialect's table of fields. Nothing is invented: what the config
lacks is read off a tensor's shape or stops the reading."""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftsmith.configs.drafter import DrafterSpec, RopeSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import Target, read_rope
from draftsmith.convert.dialects import MISSING, Dialect, Field, look_up
from draftsmith.convert.layer_ids import engine_default, resolve_sglang
from draftsmith.convert.rope import check_rope, without_bridge
from draftsmith.convert.tensors import Tensor

NESTED_IDS = "eagle_config.eagle_aux_hidden_state_layer_ids"
TOP_IDS = "eagle_aux_hidden_state_layer_ids"


def make_spec(values: Mapping[str, Any], where: object) -> DrafterSpec:
    """DrafterSpec from plain values; a value it refuses becomes one DraftsmithError."""
    try:
        return DrafterSpec(**values)
    except ValidationError as error:
        lines = [
            ".".join(str(part) for part in fault["loc"]) + (": " if fault["loc"] else "") + fault["msg"]
            for fault in error.errors()
        ]
        raise DraftsmithError(
            "these dimensions describe no drafter that engines can serve:\n  " + "\n  ".join(lines), where=where
        ) from None


def spec_from_config(
    dialect: Dialect, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target, where: Path
) -> tuple[DrafterSpec, list[str]]:
    """Read the dimensions of a foreign drafter; returns notes on what the config left open.

    Raises:
        DraftsmithError: a value that cannot be carried over, a field that neither config nor tensors tell, or layer
            ids or RoPE blocks that contradict each other.
    """
    refuse(dialect, config, where)
    taps, rope = config_taps(config, target, where), config_rope(config, where)
    return read_dimensions(dialect, config, tensors, target, where, taps=taps, rope=rope)


def read_dimensions(
    dialect: Dialect,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: Target,
    where: Path,
    *,
    taps: tuple[int, ...],
    rope: RopeSpec,
) -> tuple[DrafterSpec, list[str]]:
    """The dimensions alone, for given taps and RoPE; returns notes on what was read off tensors.

    Raises:
        DraftsmithError: a field that neither config nor tensors tell, or dimensions that fit no drafter.
    """
    notes: list[str] = []
    values: dict[str, Any] = {"target_num_layers": target.num_layers, "taps": taps, "rope": rope}
    for name, field in dialect.fields.items():
        values[name] = _value(field, config, tensors, where, notes)
    values["target_hidden_size"] = values["target_hidden_size"] or target.hidden_size
    return make_spec(values, where), notes


def refuse(dialect: Dialect, config: Mapping[str, Any], where: Path) -> None:
    """Stop at the values that the dialect's table calls impossible to carry over, all of them in one error."""
    lines = []
    for refused in dialect.refused:
        value = look_up(config, refused.path)
        if not any(value is allowed or value == allowed for allowed in refused.allowed):
            lines.append(f"{refused.path}: {'absent' if value is MISSING else value}; {refused.reason}")
    if lines:
        raise DraftsmithError(
            "this drafter computes something that SGLang's drafter class does not:\n  " + "\n  ".join(lines),
            where=where,
            mend="if the weights were trained without it, correct the field; else train again without it",
        )


def config_taps(config: Mapping[str, Any], target: Target, where: Path) -> tuple[int, ...]:
    """The taps that a config asks for, if SGLang and vLLM read the same ones in it."""
    nested, top = look_up(config, NESTED_IDS), look_up(config, TOP_IDS)
    asked: dict[str, tuple[int, ...]] = {}
    for label, ids in (("nested", nested), ("top", top)):
        if ids is MISSING or ids is None:
            continue
        if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise DraftsmithError("layer ids must be a list of integers", where=where, found=ids)
        ascending = tuple(sorted(ids))
        asked[label] = resolve_sglang(target.architecture, ids, target.num_layers) if label == "nested" else ascending
    if len(set(asked.values())) > 1:
        raise DraftsmithError(
            f"the config asks SGLang and vLLM for different taps of a {target.architecture}",
            where=where,
            found=f"{NESTED_IDS} {nested}: taps {list(asked['nested'])}; {TOP_IDS} {top}: taps {list(asked['top'])}",
            mend="keep only the list that matches training",
        )
    return next(iter(asked.values()), engine_default(target.num_layers))


def config_rope(config: Mapping[str, Any], where: Path) -> RopeSpec:
    """The RoPE that every spelling in a config agrees on.

    Raises:
        DraftsmithError: no base at all (engines would take 10000 in silence), or two spellings that differ.
    """
    found: dict[str, RopeSpec] = {}
    theta = config.get("rope_theta")
    for key in ("rope_theta", "rope_scaling.rope_theta", "rope_parameters.rope_theta"):
        base = look_up(config, key)
        if base is not MISSING and base is not None and (type(base) not in (int, float) or base <= 0):
            raise DraftsmithError(f"the config's {key} is no positive number", where=where, found=base)
    for key in ("rope_scaling", "rope_parameters"):
        if config.get(key):
            found[key] = read_rope({"rope_theta": theta, key: config[key]})
    if theta is not None and not found:
        found["rope_theta"] = read_rope({"rope_theta": theta})
    bases = {key: rope.theta for key, rope in found.items()}
    if theta is None and not any("rope_theta" in (config.get(key) or {}) for key in found):
        raise DraftsmithError(
            "the config has no rope_theta; engines would take 10000 in silence",
            where=where,
            mend="write the base that the drafter was trained with",
        )
    if theta is not None:
        bases["rope_theta"] = float(theta)
    ropes = list(found.values())
    scalings = [without_bridge(rope).scaling for rope in ropes]
    if any(scaling != scalings[0] for scaling in scalings) or not all(
        isclose(base, ropes[0].theta) for base in bases.values()
    ):
        raise DraftsmithError(
            "the config spells RoPE in two ways that differ",
            where=where,
            found="; ".join(f"{key} {config.get(key)}" for key in sorted(bases)),
            expected="one base and one scaling, as in training",
            mend="correct the one that training did not use",
        )
    check_rope(ropes[0], where=where)
    return without_bridge(ropes[0])


def _value(
    field: Field, config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: Path, notes: list[str]
) -> Any:
    path, value = next(
        ((path, found) for path in field.paths if (found := look_up(config, path)) is not MISSING),
        (field.paths[0], MISSING),
    )
    if value is MISSING or value is None:
        if field.shape and field.shape[0] in tensors and len(tensors[field.shape[0]].shape) > field.shape[1]:
            size = tensors[field.shape[0]].shape[field.shape[1]]
            notes.append(f"{path} is {'null' if value is None else 'absent'}; {size} is what {field.shape[0]} says")
            return size
        if field.default is not MISSING:
            return field.default
        raise DraftsmithError(
            f"the config does not say {path}", where=where, found=None if value is MISSING else "null",
            expected="the value that training used", mend="write it into the config",
        )  # fmt: skip
    wanted: tuple[type, ...] = (int, float) if field.kind is float else (field.kind,)
    if not isinstance(value, wanted) or (field.kind is not bool and isinstance(value, bool)):
        raise DraftsmithError(f"the config's {path} is no {field.kind.__name__}", where=where, found=repr(value))
    return value
