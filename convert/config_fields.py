"""What a foreign config says of taps and RoPE, the two things that go wrong most and that no tensor tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isclose
from pathlib import Path
from typing import Any

from draftsmith.configs.drafter import RopeSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import Target, read_rope
from draftsmith.convert.dialects import MISSING, REFUSED, Convention, Dialect, look_up
from draftsmith.convert.layer_ids import engine_default, resolve_sglang
from draftsmith.convert.rope import check_rope, without_bridge
from draftsmith.convert.tensors import FLOATS, Tensor


def refuse(dialect: Dialect, config: Mapping[str, Any], where: Path) -> None:
    """Stop at values that no output form can carry, all of them in one error."""
    lines = []
    for refused in REFUSED:
        for path in dialect.places(refused.path):
            value = look_up(config, path)
            if not any(value is allowed or value == allowed for allowed in refused.allowed):
                lines.append(f"{path}: {value}; {refused.reason}")
    if lines:
        raise DraftsmithError(
            "this drafter computes something that the engines' drafter classes do not:\n  " + "\n  ".join(lines),
            where=where,
            mend="if the weights were trained without it, correct the field; else train again without it",
        )


def quantisation(
    dialect: Dialect, config: Mapping[str, Any], named: Sequence[tuple[str, Tensor]], where: Path
) -> list[str]:
    """A note that a quantization_config was copied from the target, where no tensor is quantised.

    Raises:
        DraftsmithError: the drafter itself is quantised.
    """
    if not any(look_up(config, place) not in (MISSING, None, {}) for place in dialect.places("quantization_config")):
        return []
    quantised = [
        name
        for name, tensor in named
        if name not in ("d2t", "t2d") and (tensor.dtype not in FLOATS or "scale" in name or "zero_point" in name)
    ]
    if quantised:
        raise DraftsmithError(
            "the drafter is quantised, which cannot be turned back without loss",
            where=where,
            found=f"quantization_config, and tensors {', '.join(quantised[:4])}",
            expected="tensors in float32, bfloat16 or float16",
            mend="convert the checkpoint from before its quantisation",
        )
    return ["quantization_config left out: no tensor is quantised; it was copied from the target"]


def config_taps(
    dialect: Dialect,
    config: Mapping[str, Any],
    target: Target,
    count: int,
    where: Path,
    convention: Convention | None = None,
) -> tuple[tuple[int, ...], list[str]]:
    """The taps that a config names, as layer-input indices, and notes on how they were found.

    Args:
        count: of the taps that fc was trained for.
        convention: what the ids mean, if the user says so; else what the dialect's table says.

    Raises:
        DraftsmithError: ids that are no list of integers, that contradict each other, or that fc was not made for.
    """
    asked: dict[str, tuple[int, ...]] = {}
    said: list[str] = []
    for path, meant in dialect.ids:
        ids = look_up(config, path)
        if ids is MISSING or ids is None:
            continue
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise DraftsmithError(f"{path} must be a list of integers", where=where, found=ids)
        read_as = convention or meant
        taps = taps_of(_without_last(ids, count, target, said), read_as, target)
        asked[f"{path} {ids}, read as {read_as}"] = taps
        if convention is not None:  # the user vouches for the first list
            break
    if not asked:
        taps = engine_default(target.num_layers)
        said.append(f"no layer ids: taps {list(taps)}, which every engine takes by default")
    else:
        taps = next(iter(asked.values()))
        if any(other != taps for other in asked.values()):
            raise DraftsmithError(
                f"the config asks for different taps of a {target.architecture} in two places",
                where=where,
                found="; ".join(f"{label}: taps {list(found)}" for label, found in asked.items()),
                mend="keep only the list that matches training, or say what the nested ids are with --ids-are",
            )
    if len(taps) != count:
        raise DraftsmithError(
            "the layer ids are not those that fc was trained for",
            where=where,
            found=f"taps {list(taps)}; fc has columns for {count}",
            expected=f"{count} layer ids",
            mend=f"write the ids of training into {dialect.ids[0][0]}",
        )
    return taps, said


def taps_of(ids: Sequence[int], convention: Convention, target: Target) -> tuple[int, ...]:
    """Layer ids of a convention as taps, ascending."""
    if convention == "sglang-served":
        return resolve_sglang(target.architecture, ids, target.num_layers)
    return tuple(sorted({layer + (convention == "layer-output") for layer in ids}))


def _without_last(ids: list[int], count: int, target: Target, said: list[str]) -> list[int]:
    """Some trainers list, after the taps, the last layer that their loss alone reads."""
    if len(ids) == count + 1 and max(ids) == ids[-1] >= target.num_layers - 1:
        said.append(f"layer id {ids[-1]} is the last layer, which only the training's loss read: left out")
        return ids[:-1]
    return ids


def config_rope(config: Mapping[str, Any], where: Path, *, base: float | None = None) -> RopeSpec:
    """The RoPE that every spelling in a config agrees on.

    Args:
        base: theta, if the user says it; the config's own spellings of it then do not count.

    Raises:
        DraftsmithError: no base at all (engines would take 10000 in silence), two spellings that differ, or a kind of
            scaling that trainer and engines do not compute alike.
    """
    if base is not None:
        config = _with_base(config, base)
    found: dict[str, RopeSpec] = {}
    theta = config.get("rope_theta")
    for key in ("rope_theta", "rope_scaling.rope_theta", "rope_parameters.rope_theta"):
        value = look_up(config, key)
        if value is not MISSING and value is not None and (type(value) not in (int, float) or value <= 0):
            raise DraftsmithError(f"the config's {key} is no positive number", where=where, found=value)
    for key in ("rope_scaling", "rope_parameters"):
        if config.get(key) is not None and not isinstance(config[key], Mapping):
            raise DraftsmithError(f"the config's {key} is no object", where=where, found=repr(config[key]))
        if config.get(key):
            _check_plain(config[key], f"{where}: {key}")
            found[key] = read_rope({"rope_theta": theta, key: config[key]})
    if theta is not None and not found:
        found["rope_theta"] = read_rope({"rope_theta": theta})
    bases = {key: rope.theta for key, rope in found.items()}
    if theta is None and not any("rope_theta" in (config.get(key) or {}) for key in found):
        raise DraftsmithError(
            "the config has no rope_theta; engines would take 10000 in silence",
            where=where,
            mend="pass the base that the drafter was trained with: --rope-theta",
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


def _with_base(config: Mapping[str, Any], base: float) -> dict[str, Any]:
    changed = dict(config) | {"rope_theta": base}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(changed.get(key), Mapping):
            changed[key] = {name: value for name, value in changed[key].items() if name != "rope_theta"}
    return changed


def _check_plain(block: Any, where: str) -> None:
    """A block without a kind of scaling must not hide one: mrope sections, per-layer bases."""
    if not isinstance(block, Mapping):
        raise DraftsmithError("the RoPE block is no object", where=where, found=block)
    kind = block.get("rope_type") or block.get("type") or "default"
    extra = sorted(set(block) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    if kind == "default" and extra and any(block[key] is not None for key in extra):
        raise DraftsmithError(
            "the RoPE block names no kind of scaling but has its parameters",
            where=where,
            found=", ".join(f"{key} {block[key]}" for key in extra),
            expected="rope_theta alone, or a rope_type of linear, llama3 or yarn",
            mend="train a text-only drafter with plain RoPE, or write the rope_type that training used",
        )
    if block.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise DraftsmithError(
            "only part of a head is rotated", where=where, found=block["partial_rotary_factor"], expected=1
        )


def settle_theta(own: RopeSpec, target: Target, where: Path, *, said: bool) -> None:
    """Stop where the drafter's base differs from its target's and nobody said which one training used.

    Config templates with another base than training used are common, in both directions: only the trainer knows.
    """
    if said or isclose(own.theta, target.rope.theta):
        return
    raise DraftsmithError(
        "the drafter's rope_theta is not its target's; which one did training use?",
        where=where,
        found=f"drafter {own.theta:g}, target {target.rope.theta:g}",
        mend=f"pass --rope-theta {own.theta:g} if its config tells the truth, or the base that training really used",
    )
