"""The dimensions as an engine takes them from config.json: nothing is corrected by what the tensors say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.configs.drafter import LLAMA, MLA, DrafterSpec, RopeSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import Target
from draftsmith.convert.dialects import attention_window
from draftsmith.convert.dimensions import make_spec

SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "draft_vocab_size", "max_position_embeddings",
)  # fmt: skip
FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def served_spec(
    config: Mapping[str, Any], target: Target, where: Path, *, taps: tuple[int, ...], rope: RopeSpec, fc_bias: bool
) -> DrafterSpec:
    """The drafter that an engine builds, for given taps and RoPE.

    Raises:
        DraftsmithError: a field is missing, of another type, or fits no drafter.
    """
    latent = config.get("architectures") == [MLA]
    values: dict[str, Any] = {
        "architecture": MLA if latent else LLAMA,
        "target_num_layers": target.num_layers,
        "taps": taps,
        "rope": rope,
        "fc_bias": fc_bias,
        "rms_norm_eps": _value(config, "rms_norm_eps", (int, float), where),
        "target_hidden_size": config.get("target_hidden_size") or target.hidden_size,
    }
    skipped = ("num_key_value_heads", "head_dim") if latent else ()
    values |= {name: _value(config, name, (int,), where) for name in SIZES if name not in skipped}
    inner = config.get("eagle_config")
    inner = inner if isinstance(inner, Mapping) else {}
    for name in FLAGS:
        found = config.get(name)
        found = inner.get(name) if found is None and name == "norm_before_fc" else found
        values[name] = False if found is None else _typed(found, name, (bool,), where)
    values["fc_norm"] = values["fc_norm"] or bool(config.get("use_aux_norm"))
    if latent:
        values["mla"] = {name: _value(config, name, (int,), where) for name in LATENT}
        values["mla"]["rope_interleave"] = config.get("rope_interleave", True)
        values["num_key_value_heads"] = values["num_attention_heads"]
        values["head_dim"] = values["mla"]["qk_rope_head_dim"]
    values["sliding_window"] = attention_window(config)
    return make_spec(values, where)


def _value(config: Mapping[str, Any], name: str, kinds: tuple[type, ...], where: Path) -> Any:
    found = config.get(name)
    if found is None:
        raise DraftsmithError(
            f"the config does not say {name}", where=where, found="null" if name in config else None,
            expected="the value that training used", mend="write it into the config",
        )  # fmt: skip
    return _typed(found, name, kinds, where)


def _typed(found: Any, name: str, kinds: tuple[type, ...], where: Path) -> Any:
    if not isinstance(found, kinds) or (bool not in kinds and isinstance(found, bool)):
        raise DraftsmithError(f"the config's {name} is no {kinds[-1].__name__}", where=where, found=repr(found))
    return found
