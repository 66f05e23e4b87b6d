"""The drafter's rotary embedding as engines compute it: frequencies, amplitude, and the fields of config.json.

Plain numbers, no tensors: the trainer takes transformers' own functions, and `verify` compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from draftsmith.configs.drafter import DrafterSpec, RopeSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import read_rope
from draftsmith.convert.dialects import SPECULATORS, is_speculators

PARAMETERS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "linear": (frozenset({"factor"}), frozenset({"original_max_position_embeddings"})),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
    "yarn": (
        frozenset({"factor", "original_max_position_embeddings"}),
        frozenset(
            {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "attn_factor", "truncate"}
        ),
    ),
}
"""rope_type -> (required, optional) keys. Dynamic NTK, longrope and others differ between trainer and engines."""


LARGEST = 1e15
"""No base, factor or length is as large."""


def check_rope(rope: RopeSpec, *, where: object) -> None:
    """Refuse a scaling that trainer and engines would not compute alike.

    Raises:
        DraftsmithError: an unknown rope_type, a missing parameter, or one that some engine ignores.
    """
    if not 1 < rope.theta < LARGEST:
        raise DraftsmithError("the RoPE base makes no sense", where=where, found=rope.theta, expected="10000, 5e6, ...")
    if rope.scaling is None:
        return
    kind = str(rope.scaling.get("rope_type"))
    if kind not in PARAMETERS:
        raise DraftsmithError(
            "this RoPE scaling is not computed alike by trainer and engines",
            where=where,
            found=f"rope_type {kind}",
            expected=f"none, {', '.join(PARAMETERS)}",
            mend="train the drafter with one of these",
        )
    required, optional = PARAMETERS[kind]
    found = set(rope.scaling) - {"rope_type"}
    missing, unknown = sorted(required - found), sorted(found - required - optional)
    if missing or unknown:
        parts = [f"{word} {', '.join(keys)}" for word, keys in (("missing", missing), ("unknown", unknown)) if keys]
        raise DraftsmithError(
            f"the {kind} scaling of RoPE has other parameters than engines read",
            where=where,
            found="; ".join(parts),
            expected=", ".join(sorted(required)) + f"; optional: {', '.join(sorted(optional)) or 'none'}",
            mend="write the missing ones out and drop the unknown ones, as the trainer used them",
        )
    wrong = {
        key: value
        for key, value in rope.scaling.items()
        if key not in ("rope_type", "truncate")
        and value is not None
        and (type(value) not in (int, float) or not 0 <= value < LARGEST)
    }
    positive = ("factor", "original_max_position_embeddings", "attention_factor", "attn_factor", "high_freq_factor")
    wrong |= {key: rope.scaling[key] for key in positive if key in rope.scaling and rope.scaling[key] == 0}
    wrong |= {key: None for key in required if rope.scaling[key] is None}
    if wrong or type(rope.scaling.get("truncate", True)) is not bool:
        raise DraftsmithError(
            "RoPE parameters must be positive numbers", where=where, found=wrong or rope.scaling,
            mend="write those that training used",
        )  # fmt: skip
    if kind == "llama3" and not rope.scaling["low_freq_factor"] < rope.scaling["high_freq_factor"]:
        raise DraftsmithError(
            "RoPE's low_freq_factor must be below its high_freq_factor", where=where, found=rope.scaling
        )


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> list[float]:
    """Angles per position, head_dim/2 of them: theta ** (-2j/head_dim), rescaled as `rope.scaling` says.

    Sources: YaRN, arXiv 2309.00071, section 3.2; llama3, the frequency rule published with Llama 3.1.
    """
    plain = [rope.theta ** (-2.0 * j / head_dim) for j in range(head_dim // 2)]
    scaling = rope.scaling
    if scaling is None:
        return plain
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return [value / factor for value in plain]
    original = float(scaling["original_max_position_embeddings"])
    if scaling["rope_type"] == "llama3":
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        scaled = []
        for value in plain:
            turns = original * value / (2 * math.pi)
            share = min(1.0, max(0.0, (turns - low) / (high - low)))
            scaled.append((1 - share) * value / factor + share * value)
        return scaled

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    ramp = [min(1.0, max(0.0, (j - first) / (last - first))) for j in range(head_dim // 2)]
    return [value / factor * share + value * (1 - share) for value, share in zip(plain, ramp, strict=True)]


def amplitude(rope: RopeSpec, *, sglang: bool) -> float:
    """The factor on cosine and sine: 1 except for YaRN.

    transformers and vLLM let `attention_factor` replace the value that follows from factor and mscale; SGLang
    ignores it and multiplies by `attn_factor`.
    """
    scaling = rope.scaling
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    derived = _derived_amplitude(scaling)
    if sglang:
        return derived * float(scaling.get("attn_factor", 1.0))
    return float(scaling["attention_factor"]) if scaling.get("attention_factor") is not None else derived


def rope_fields(rope: RopeSpec) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and `rope_parameters`: every spelling that engines look for, all in agreement.

    A YaRN `attention_factor` gets the `attn_factor` beside it that gives SGLang the same amplitude.
    """
    scaling = None if rope.scaling is None else dict(rope.scaling)
    if scaling and scaling.get("attention_factor") is not None:
        scaling["attn_factor"] = float(scaling["attention_factor"]) / _derived_amplitude(scaling)
    return {
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": rope.theta},
    }


def prove_unchanged(spec: DrafterSpec, config: Mapping[str, Any], context: int) -> str:
    """Compute the rotary embedding from a finished config.json and from the drafter, and compare every bit.

    None of the accepted scalings depends on the position, so equal frequencies and amplitude give equal rotations at
    every position up to `context`.

    Raises:
        DraftsmithError: they differ.
    """
    layer = config[SPECULATORS.nested] if is_speculators(config) else config
    written, dim = without_bridge(read_rope(dict(layer))), spec.head_dim
    same = inverse_frequencies(written, dim) == inverse_frequencies(spec.rope, dim)
    if not same or not math.isclose(amplitude(written, sglang=False), amplitude(spec.rope, sglang=False)):
        raise DraftsmithError(
            "the config would change the drafter's rotary embedding", where="config.json",
            found=f"theta {written.theta:g}, scaling {written.scaling}",
            expected=f"theta {spec.rope.theta:g}, scaling {spec.rope.scaling}", mend="report this: it is a fault here",
        )  # fmt: skip
    return (
        f"RoPE: theta {spec.rope.theta:g}, {dim // 2} inverse frequencies equal to the last bit at every position up to "
        f"{context:,}"
    )


def without_bridge(rope: RopeSpec) -> RopeSpec:
    """Take back the `attn_factor` that `rope_fields` put beside an `attention_factor`, if it only says the same."""
    if rope.scaling is None or not {"attention_factor", "attn_factor"} <= rope.scaling.keys():
        return rope
    if not math.isclose(amplitude(rope, sglang=True), amplitude(rope, sglang=False)):
        return rope
    return rope.model_copy(update={"scaling": {k: v for k, v in rope.scaling.items() if k != "attn_factor"}})


def _derived_amplitude(scaling: dict[str, Any]) -> float:
    def grown(mscale: float) -> float:
        factor = float(scaling["factor"])
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return grown(mscale) / grown(all_dim) if mscale and all_dim else grown(1.0)
