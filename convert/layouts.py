"""The forms that a drafter is written in: the portable one that SGLang and vLLM both load, vLLM's speculators format,
and SafeAILab's. Every field that an engine would otherwise fill in by itself is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import Target
from draftsmith.convert.layer_ids import encode, engine_default
from draftsmith.convert.rope import rope_fields

LayoutName = Literal["sglang", "vllm", "eagle"]

SPECULATORS_VERSION = "0.9.0"
"""The release of speculators whose fields are written."""

DRAFTED = 3
"""Tokens a chain that a speculators config asks vLLM for."""


@dataclass(frozen=True)
class Layout:
    """One form.

    Attributes:
        config: (spec, target, dtype) -> config.json.
        faults: what of a spec this form, or the engine that loads it, cannot carry; one sentence each.
        names: canonical beginning of a tensor name -> how it is written.
    """

    name: LayoutName
    title: str
    config: Callable[[DrafterSpec, Target, str], dict[str, Any]]
    faults: Callable[[DrafterSpec, Target], Iterator[str]]
    names: Mapping[str, str] = field(default_factory=dict)

    def written_name(self, name: str) -> str:
        """How this form calls a tensor."""
        for ours, theirs in self.names.items():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    def check(self, spec: DrafterSpec, target: Target, where: object) -> None:
        """Stop at what this form cannot carry, all of it in one error."""
        lines = list(self.faults(spec, target))
        if lines:
            raise DraftsmithError(
                f"this drafter cannot be written as {self.title}:\n  " + "\n  ".join(lines), where=where,
                mend="choose another form with --to" if self.name != "sglang" else "write it for vLLM with --to vllm",
            )  # fmt: skip


def portable_config(spec: DrafterSpec, target: Target, dtype: str) -> dict[str, Any]:
    """config.json for both engines; the context length is the target's longest, whatever training's was.

    Raises:
        DraftsmithError: SGLang cannot capture these taps of the target's class.
    """
    ids = encode(spec.taps, target)
    config: dict[str, Any] = {
        "architectures": [spec.architecture],
        # vLLM takes a drafter of model_type deepseek_v3 for a multi-token predictor and refuses it.
        "model_type": "llama" if spec.mla is None else "kimi_k2",
        **_layer_fields(spec, target),
        "draft_vocab_size": spec.draft_vocab_size,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
        "target_hidden_size": spec.target_hidden_size,
        "num_aux_hidden_states": len(spec.taps),
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(ids.nested)},
        "eagle_aux_hidden_state_layer_ids": list(ids.top),
    }
    for flag in ("fc_norm", "norm_output", "norm_before_fc"):
        if getattr(spec, flag):
            config[flag] = True
    if spec.fc_bias:
        config["bias"] = True
    return config


def speculators_config(spec: DrafterSpec, target: Target, dtype: str) -> dict[str, Any]:
    """config.json in the speculators format: the decoder layer's own config nested, layer ids as layer inputs."""
    layer = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **_layer_fields(spec, target),
        "num_aux_hidden_states": len(spec.taps),
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": spec.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(spec.taps),
        # vLLM takes true when this is absent, speculators itself false.
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": DRAFTED,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": str(target.config.get("_name_or_path") or target.path.resolve()),
                "architectures": [target.architecture],
            },
        },
    }


def eagle_config(spec: DrafterSpec, target: Target, dtype: str) -> dict[str, Any]:
    """config.json of SafeAILab's form: a plain Llama config with a draft vocabulary; the taps are in its code."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_layer_fields(spec, target),
        "draft_vocab_size": spec.draft_vocab_size,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _layer_fields(spec: DrafterSpec, target: Target) -> dict[str, Any]:
    """What a Llama or DeepSeek config of transformers says of one decoder layer."""
    fields: dict[str, Any] = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": spec.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": target.longest_context,
        **rope_fields(spec.rope),
    }
    if spec.rope.scaling is not None and spec.rope.scaling["rope_type"] == "linear":
        # SGLang multiplies the context by a linear factor unless it finds the original length.
        original = int(target.longest_context / float(spec.rope.scaling["factor"]))
        for key in ("rope_scaling", "rope_parameters"):
            fields[key].setdefault("original_max_position_embeddings", original)
    if spec.sliding_window is not None:
        fields |= {"sliding_window": spec.sliding_window, "layer_types": ["sliding_attention"]}
    if spec.mla is not None:
        fields |= spec.mla.model_dump()
    return fields


def _portable_faults(spec: DrafterSpec, target: Target) -> Iterator[str]:
    if spec.norm_before_residual:
        yield (
            "norm_before_residual is true: SGLang adds the un-normed hidden state whatever the config says, and no "
            "weights can make up for it, since the norm is applied anew to each step's own state"
        )
    scaling = (spec.rope.scaling or {}).get("rope_type")
    if spec.mla is not None and scaling not in (None, "yarn"):
        yield f"latent attention with {scaling} RoPE: both engines compute YaRN in its place"


def _speculators_faults(spec: DrafterSpec, target: Target) -> Iterator[str]:
    if spec.mla is not None:
        yield "latent attention: the speculators format knows llama and qwen3 layers; vLLM loads the form of --to sglang"
    if spec.fc_bias:
        yield "fc has a bias: vLLM builds fc without one and drops it in silence"


def _eagle_faults(spec: DrafterSpec, target: Target) -> Iterator[str]:
    for name in ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual", "sliding_window"):
        if getattr(spec, name):
            yield f"{name}: SafeAILab's drafter does not have it"
    if spec.mla is not None:
        yield "latent attention: SafeAILab's drafter does not have it"
    if spec.taps != engine_default(target.num_layers):
        yield f"taps {list(spec.taps)}: SafeAILab's code always takes {list(engine_default(target.num_layers))}"


SGLANG_LAYOUT = Layout("sglang", "the portable form for SGLang and vLLM", portable_config, _portable_faults)
SPECULATORS_LAYOUT = Layout(
    "vllm",
    "the speculators format for vLLM",
    speculators_config,
    _speculators_faults,
    {"midlayer.": "layers.0."},
)
EAGLE_LAYOUT = Layout("eagle", "SafeAILab's form", eagle_config, _eagle_faults)

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (SGLANG_LAYOUT, SPECULATORS_LAYOUT, EAGLE_LAYOUT)}
