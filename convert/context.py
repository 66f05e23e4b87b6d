"""How long a context each engine allows a drafter, and what it does when the target's is longer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.configs.target import CONTEXT_KEYS, Target, derived_context

OVERRIDE = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


@dataclass(frozen=True)
class ContextReport:
    """`drafter` and `target` are the lengths in tokens that SGLang derives; the sentences say what engines do."""

    drafter: int
    target: int
    fits: bool
    derivation: str
    sglang: str
    vllm: str


def explain_context(config: Mapping[str, Any], target: Target) -> ContextReport:
    """Compare a drafter's config with its target the way SGLang 0.5.23 and vLLM 0.32.0 do.

    SGLang hands the target's context to the drafter's config (`ModelConfig._derive_context_length`); vLLM takes the
    smaller of the two (`SpeculativeConfig._maybe_override_draft_max_model_len`).
    """
    own, theirs = derived_context(dict(config)), target.context_length
    fits = own >= theirs
    if fits:
        sglang = f"SGLang serves the target's {theirs:,} tokens"
        vllm = f"vLLM drafts up to the target's {theirs:,} tokens"
    else:
        sglang = (
            f"SGLang stops at start: ValueError \"Target model's context_length ({theirs}) is greater than the derived "
            f'context_length ({own})". With {OVERRIDE}=1 (or SGLANG_IS_IN_CI) it only warns and stretches the drafter; '
            f"with --context-length {own} or less it starts in silence and serves no more than that"
        )
        vllm = (
            f"vLLM starts without a word; its V1 runner proposes token 0 for the whole batch once a sequence passes "
            f"{own:,} tokens, the V2 runner drafts on"
        )
    return ContextReport(own, theirs, fits, _derivation(config, own), sglang, vllm)


def _derivation(config: Mapping[str, Any], derived: int) -> str:
    key = next((key for key in CONTEXT_KEYS if isinstance(config.get(key), int | float)), None)
    if key is None:
        return f"no length in the config: SGLang takes {derived:,}"
    if int(config[key]) == derived:
        return f"{key} {derived:,}"
    return f"{key} {int(config[key]):,} times the RoPE factor = {derived:,}"
