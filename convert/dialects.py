"""The forms that drafters come in, as tables: what marks a form, how its names map to ours, what its fields mean.

A new dialect is a new entry here; reading is one path for all of them. Canonical names are those of SGLang's
`LlamaForCausalLMEagle3` without a `model.` prefix. Tables are tried in order; the first that fits counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from draftsmith.configs.drafter import LLAMA, MLA

MISSING: Any = object()
"""Stands for a field that the config does not have; null is a value."""

Convention = Literal["layer-input", "layer-output", "sglang-served"]
"""What layer id k means: the stream entering layer k; what leaves it; whatever SGLang captures of this target for it."""

CONVENTIONS: tuple[Convention, ...] = ("layer-input", "layer-output", "sglang-served")

DialectName = Literal["draftsmith", "speculators", "modelopt", "angelslim", "torchspec", "sglang", "safeailab"]

NESTED_IDS = "eagle_config.eagle_aux_hidden_state_layer_ids"
TOP_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Refused:
    """A value that changes what the drafter computes and that no output form can carry."""

    path: str
    allowed: tuple[Any, ...]
    reason: str


@dataclass(frozen=True)
class Dialect:
    """One form of checkpoint.

    Attributes:
        marker_file: the JSON file beside the weights that belongs to this form.
        marks: dotted paths of that file, one of which must be there.
        architectures: class names, one of which the config must name; empty: any.
        tensors: beginnings of tensor names, one of which must occur.
        renames: beginning of a foreign tensor name -> canonical beginning.
        nested: the object inside the config that holds the decoder layer's dimensions; empty: the top level.
        defaults: values of fields that this form leaves out because its own config class has them.
        ids: where layer ids stand, and what they mean there; the first that is present counts.
    """

    name: DialectName
    title: str
    marker_file: str = "config.json"
    marks: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ("midlayer.", "layers.0.")
    renames: Mapping[str, str] = field(default_factory=dict)
    nested: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ids: tuple[tuple[str, Convention], ...] = ()

    def places(self, path: str) -> tuple[str, ...]:
        """Where a field may stand: at the top level, and in the nested object if there is one."""
        return (path, f"{self.nested}.{path}") if self.nested else (path,)


LAYER = {"layers.0.": "midlayer."}

LEGACY_NORMS = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}

FLAT_IDS: tuple[tuple[str, Convention], ...] = ((NESTED_IDS, "sglang-served"), (TOP_IDS, "layer-input"))

DRAFTSMITH = Dialect(
    name="draftsmith",
    title="a training checkpoint of draftsmith",
    marker_file="drafter.json",
    marks=("spec",),
    tensors=("midlayer.",),
)

SPECULATORS = Dialect(
    name="speculators",
    title="the speculators format, which vLLM loads",
    marks=("transformer_layer_config",),
    renames=LAYER,
    nested="transformer_layer_config",
    # Its configs are written as the difference to transformers' LlamaConfig or Qwen3Config.
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu"},
    ids=((TOP_IDS, "layer-input"), ("transformer_layer_config." + TOP_IDS, "layer-input")),
)

MODELOPT = Dialect(
    name="modelopt",
    title="an export of Model-Optimizer",
    marks=(
        "eagle_config.use_input_layernorm_in_first_layer",
        "eagle_config.next_layer_regular",
        "eagle_config.use_last_layernorm",
        "eagle_config.use_mtp_layernorm",
    ),
    renames={**LAYER, "input_embeds_norm.": "midlayer.input_layernorm."},
    ids=((NESTED_IDS, "layer-output"), (TOP_IDS, "layer-input")),
)

ANGELSLIM = Dialect(
    name="angelslim",
    title="AngelSlim's form",
    architectures=("Eagle3LlamaForCausalLM",),
    renames=LAYER,
    ids=FLAT_IDS,
)

TORCHSPEC = Dialect(
    name="torchspec",
    title="a converted file of TorchSpec",
    architectures=("DeepSeekForCausalLMEagle3", "DeepseekForCausalLMEagle3"),
    renames=LAYER,
    ids=FLAT_IDS,
)

SGLANG = Dialect(
    name="sglang",
    title="the form that SGLang loads (SpecForge, TorchSpec)",
    architectures=(LLAMA, MLA),
    renames={**LAYER, **LEGACY_NORMS},
    ids=FLAT_IDS,
)

SAFEAILAB = Dialect(
    name="safeailab",
    title="SafeAILab's form",
    marks=("hidden_size", "num_attention_heads"),
    tensors=("midlayer.",),
    ids=FLAT_IDS,
)

DIALECTS: tuple[Dialect, ...] = (DRAFTSMITH, SPECULATORS, MODELOPT, ANGELSLIM, TORCHSPEC, SGLANG, SAFEAILAB)
"""In the order in which they are tried."""

REFUSED = (
    Refused("eagle_config.use_aux_hidden_state", (MISSING, None, True), "without taps it is no EAGLE-3 drafter"),
    Refused("hidden_act", (MISSING, None, "silu"), "the drafter classes of both engines know silu alone"),
    Refused("partial_rotary_factor", (MISSING, None, 1, 1.0), "all of a head's rotary dimensions are turned here"),
)
"""For every dialect, at the top level and in its nested object."""


def look_up(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, MISSING if any part of it is absent."""
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is in the speculators format, which vLLM alone loads."""
    return isinstance(config.get(SPECULATORS.nested), Mapping)


def attention_window(config: Mapping[str, Any]) -> int | None:
    """The sliding window of the drafter's layer in tokens, None if it attends to all."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    used = config.get("use_sliding_window") is not False
    listed = isinstance(kinds, list) and "sliding_attention" in kinds
    return window if used and listed and type(window) is int else None


def flattened(dialect: Dialect, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its nested object's fields at the top; the top level wins, null and absent fields are dropped.

    Fields that the dialect's own config class would fill in get those values.
    """
    nested = look_up(config, dialect.nested) if dialect.nested else {}
    inner = {key: value for key, value in nested.items() if value is not None} if isinstance(nested, Mapping) else {}
    outer = {key: value for key, value in config.items() if value is not None and key != dialect.nested}
    flat = {**inner, **outer}
    blocks = [flat[key] for key in ("rope_scaling", "rope_parameters") if isinstance(flat.get(key), Mapping)]
    for key, value in dialect.defaults.items():
        if key != "rope_theta" or not any("rope_theta" in block for block in blocks):
            flat.setdefault(key, value)
    return flat
