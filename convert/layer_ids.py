"""Which taps an engine feeds for the layer ids in a drafter's config, and which ids to write for wanted taps.

Inside the project a tap is a layer-input index: tap k is the residual stream entering 0-based layer k. SGLang reads
ids from `eagle_config` and shifts them by a rule that depends on the target's class; vLLM reads them at the top level
and takes them as taps. The rules are those of SGLang 0.5.23 and vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import Target
from draftsmith.convert.dialects import is_speculators

Rule = Literal["plus-one", "deepseek", "gpt-oss", "minimax-m3"]
Runner = Literal["v1", "v2"]

_PLUS_ONE = """
    ApertusForCausalLM BailingMoEForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM
    Cosmos3ForConditionalGeneration ExaoneMoEForCausalLM ExaoneMoeForCausalLM Gemma3ForCausalLM
    Gemma3ForConditionalGeneration Gemma4ForCausalLM Gemma4ForConditionalGeneration
    Gemma4UnifiedForConditionalGeneration Glm4MoeForCausalLM Glm5NextForConditionalGeneration IQuestCoderForCausalLM
    InternLM3ForCausalLM InternS1ProForConditionalGeneration InternS2MobiusForConditionalGeneration
    InternS2PreviewForConditionalGeneration Llama4ForCausalLM Llama4ForConditionalGeneration LlamaForCausalLM
    LongcatFlashForCausalLM MellumForCausalLM MindSporeForCausalLM MiniMaxM2ForCausalLM MiniMaxM3SparseForCausalLM
    Ministral3ForCausalLM MistralForCausalLM Phi3ForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM
    Qwen2_5_VLForConditionalGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
    Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration Qwen3_5ForCausalLM
    Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration
    Qwen4ExpForConditionalGeneration SarvamMoEForCausalLM TeleFLMForCausalLM
"""
_DEEPSEEK = """
    DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM GlmMoeDsaForCausalLM
    MistralLarge3ForCausalLM Glm4MoeLiteForCausalLM KimiK25ForConditionalGeneration
"""

RULES: dict[str, Rule] = {
    **dict.fromkeys(_PLUS_ONE.split(), "plus-one"),
    **dict.fromkeys(_DEEPSEEK.split(), "deepseek"),
    "GptOssForCausalLM": "gpt-oss",
    "MiniMaxM3SparseForConditionalGeneration": "minimax-m3",
}
"""Target class -> the rule of its `set_eagle3_layers_to_capture`; a class that is absent here cannot serve EAGLE-3."""


@dataclass(frozen=True)
class EngineIds:
    """`nested` goes to eagle_config.eagle_aux_hidden_state_layer_ids (SGLang), `top` to the top level (vLLM)."""

    nested: tuple[int, ...]
    top: tuple[int, ...]


def rule_of(architecture: str) -> Rule | None:
    """The rule of a target class, None if SGLang 0.5.23 has no EAGLE-3 capture for it."""
    return RULES.get(architecture)


def engine_default(num_layers: int) -> tuple[int, ...]:
    """What an engine captures when it finds no ids: `[2, L//2, L-3]`."""
    return tuple(sorted({2, num_layers // 2, num_layers - 3}))


def resolve_sglang(architecture: str, nested: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """The taps, ascending, that SGLang captures of a target class for the ids in `eagle_config` (None: absent).

    A class without a rule of its own is resolved by the commonest rule, plus one.
    """
    rule = rule_of(architecture) or "plus-one"
    if nested is None:
        shift = rule == "minimax-m3"
        return tuple(tap + shift for tap in engine_default(num_layers))
    shift = True
    if rule == "deepseek":
        shift = bool(nested) and nested[0] == 1
    elif rule == "gpt-oss":
        shift = not nested or max(nested) != num_layers
    return tuple(sorted({layer + shift for layer in nested}))


def resolve_vllm(
    runner: Runner,
    top: Sequence[int] | None,
    nested: Sequence[int] | None,
    num_layers: int,
    *,
    layer_ids: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The taps, ascending, that vLLM's runner captures.

    Args:
        top: `eagle_aux_hidden_state_layer_ids` at the top level; both runners prefer it.
        nested: the same key inside `eagle_config`; only the V1 runner falls back to it.
        layer_ids: `eagle_config.layer_ids`; only the V2 runner (the default on CUDA) falls back to it.
    """
    ids = top or (nested if runner == "v1" else layer_ids)
    return tuple(sorted(set(ids))) if ids else engine_default(num_layers)


def encode(taps: Sequence[int], target: Target) -> EngineIds:
    """Ids that make both engines capture exactly `taps` of `target`.

    Raises:
        DraftsmithError: SGLang's rule for the target's class cannot express these taps.
    """
    wanted = tuple(sorted(taps))
    for nested in (tuple(tap - 1 for tap in wanted), wanted):
        if min(nested) >= 0 and resolve_sglang(target.architecture, nested, target.num_layers) == wanted:
            return EngineIds(nested, wanted)
    raise DraftsmithError(
        f"SGLang cannot capture these taps of a {target.architecture}",
        where="taps",
        found=list(wanted),
        expected=f"a lowest tap of 2 or more, for instance {list(engine_default(target.num_layers))}",
        mend="harvest and train with target.taps that both engines can capture",
    )


def engine_lines(config: Mapping[str, Any], target: Target) -> list[str]:
    """In words, which taps each engine will feed for the ids in a config.json; a speculators config is vLLM's alone."""
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    top = config.get("eagle_aux_hidden_state_layer_ids")
    lines = []
    if not is_speculators(config):
        taps = resolve_sglang(target.architecture, nested, target.num_layers)
        lines.append(f"SGLang feeds taps {list(taps)} of {target.architecture} (ids {nested})")
    runners: tuple[Runner, ...] = ("v1", "v2")
    for runner in runners:
        taps = resolve_vllm(runner, top, nested, target.num_layers)
        lines.append(f"vLLM's {runner.upper()} runner feeds taps {list(taps)} (ids {top})")
    return lines
