"""The forms that drafters come in, as tables: what marks a form, how its names map to ours, what its fields mean.

A new dialect is a new entry here; reading is one path for all of them. Canonical names are those of SGLang's
`LlamaForCausalLMEagle3` without a `model.` prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ARCHITECTURE = "LlamaForCausalLMEagle3"

MISSING: Any = object()
"""Stands for a field that the config does not have; null is a value."""


@dataclass(frozen=True)
class Field:
    """Where a config keeps one of DrafterSpec's dimensions.

    Attributes:
        paths: dotted keys, the first that is present counts.
        kind: how the value is read.
        default: the value that engines take when it is absent; MISSING: absence is an error.
        shape: (tensor, axis) that the value can be read off when the config lacks it.
    """

    paths: tuple[str, ...]
    kind: type[int] | type[float] | type[bool]
    default: Any = MISSING
    shape: tuple[str, int] | None = None


@dataclass(frozen=True)
class Refused:
    """A value that changes what the drafter computes and that SGLang's drafter class does not have."""

    path: str
    allowed: tuple[Any, ...]
    reason: str


@dataclass(frozen=True)
class Dialect:
    """One form of checkpoint.

    Attributes:
        marker_file: the JSON file beside the weights that belongs to this form.
        marker_keys: fields of that file that must be there.
        marker_tensors: beginnings of tensor names, one of which must occur.
        renames: beginning of a foreign tensor name -> canonical beginning.
        fields: DrafterSpec dimension -> where the config keeps it; empty if the file holds the spec itself.
        refused: values that cannot be carried over.
        derivable: maps that may be absent and follow from the rest (t2d from d2t, both when D == V).
        foreign_embedding: whether a copy of the target's embedding may lie among the tensors.
    """

    name: Literal["draftsmith", "sglang"]
    title: str
    marker_file: str
    marker_keys: tuple[str, ...]
    marker_tensors: tuple[str, ...]
    renames: Mapping[str, str]
    fields: Mapping[str, Field]
    refused: tuple[Refused, ...]
    derivable: bool
    foreign_embedding: bool


DRAFTSMITH = Dialect(
    name="draftsmith",
    title="a training checkpoint of draftsmith",
    marker_file="drafter.json",
    marker_keys=("schema", "spec"),
    marker_tensors=("midlayer.",),
    renames={},
    fields={},
    refused=(),
    derivable=False,
    foreign_embedding=False,
)

SGLANG = Dialect(
    name="sglang",
    title="a folder that SGLang loads",
    marker_file="config.json",
    marker_keys=("architectures", "hidden_size"),
    marker_tensors=("midlayer.", "layers.0."),
    renames={"layers.0.": "midlayer."},
    fields={
        "hidden_size": Field(("hidden_size",), int),
        "intermediate_size": Field(("intermediate_size",), int, shape=("midlayer.mlp.gate_proj.weight", 0)),
        "num_attention_heads": Field(("num_attention_heads",), int),
        "num_key_value_heads": Field(("num_key_value_heads",), int),
        "head_dim": Field(("head_dim",), int),
        "vocab_size": Field(("vocab_size",), int),
        "draft_vocab_size": Field(("draft_vocab_size",), int, shape=("lm_head.weight", 0)),
        "target_hidden_size": Field(("target_hidden_size",), int, default=None),
        "rms_norm_eps": Field(("rms_norm_eps",), float),
        "max_position_embeddings": Field(("max_position_embeddings",), int),
        "fc_norm": Field(("fc_norm", "use_aux_norm"), bool, default=False),
        "norm_output": Field(("norm_output",), bool, default=False),
    },
    refused=(
        Refused("num_hidden_layers", (1,), "drafters of this tool have one decoder layer"),
        Refused("norm_before_residual", (MISSING, None, False), "SGLang adds the un-normed hidden state; no weights can make up for it"),
        Refused("norm_before_fc", (MISSING, None, False), "a norm over the concatenated taps is not supported"),
        Refused("eagle_config.norm_before_fc", (MISSING, None, False), "a norm over the concatenated taps is not supported"),
        Refused("eagle_config.use_aux_hidden_state", (MISSING, None, True), "without taps it is no EAGLE-3 drafter"),
        Refused("attention_bias", (MISSING, None, False), "SGLang builds q, k and v without bias"),
        Refused("bias", (MISSING, None, False), "fc and o_proj have no bias here"),
        Refused("mlp_bias", (MISSING, None, False), "SGLang builds the MLP without bias"),
        Refused("hidden_act", (MISSING, None, "silu"), "SGLang's drafter knows silu alone"),
        Refused("partial_rotary_factor", (MISSING, None, 1, 1.0), "all of a head's dimensions are rotated here"),
        Refused("quantization_config", (MISSING, None), "quantised drafters are not supported"),
    ),
    derivable=True,
    foreign_embedding=True,
)  # fmt: skip

DIALECTS: tuple[Dialect, ...] = (DRAFTSMITH, SGLANG)
"""In the order in which they are tried."""


def look_up(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, MISSING if any part of it is absent."""
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value
