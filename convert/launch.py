"""The command lines that serve a drafter, with every flag whose default would change what it computes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.configs.drafter import MLA
from draftsmith.configs.target import Target
from draftsmith.convert.dialects import attention_window, is_speculators
from draftsmith.convert.layer_ids import rule_of

STEPS = 3
"""Drafted tokens a chain: what both engines take for most targets."""


HERE = Path("DRAFTER")
"""Stands for a folder on the serving machine."""


def sglang_line(drafter: Path, target: Target, *, steps: int = STEPS, config: Mapping[str, Any] | None = None) -> str:
    """SGLang: the three speculative sizes together, the drafter unquantised, its own attention back end behind MLA.

    Args:
        config: the drafter's config.json, for what SGLang reads from the command line alone.
    """
    config = config or {}
    words = ["python", "-m", "sglang.launch_server", "--model-path", str(target.path.resolve())]
    words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(drafter.resolve())]
    words += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1"]
    words += ["--speculative-num-draft-tokens", str(steps + 1), "--speculative-draft-model-quantization", "unquant"]
    window = attention_window(config)
    if window is not None:
        words += ["--speculative-draft-window-size", str(window)]
    if uses_mla(target) and config.get("architectures") != [MLA]:
        words += ["--speculative-draft-attention-backend", "flashinfer"]
    if "auto_map" in target.config:
        words.append("--trust-remote-code")
    return shlex.join(words)


def vllm_line(drafter: Path, target: Target, *, steps: int = STEPS) -> str:
    """vLLM: the method named, because it is otherwise guessed from the path."""
    speculative = {"method": "eagle3", "model": str(drafter.resolve()), "num_speculative_tokens": steps}
    words = ["vllm", "serve", str(target.path.resolve()), "--speculative-config", json.dumps(speculative)]
    if "auto_map" in target.config:
        words.append("--trust-remote-code")
    return shlex.join(words)


def uses_mla(target: Target) -> bool:
    """Whether the target attends through a latent (DeepSeek's MLA), which the drafter does not."""
    return "kv_lora_rank" in target.text_config or rule_of(target.architecture) == "deepseek"


def serving_lines(drafter: Path, target: Target, config: Mapping[str, Any]) -> dict[str, str]:
    """Launch lines by engine; only vLLM reads the speculators form.

    Args:
        drafter: a folder, or HERE, which then stays as it is.
        config: the drafter's config.json.
    """
    lines = {"sglang": sglang_line(drafter, target, config=config), "vllm": vllm_line(drafter, target)}
    if is_speculators(config):
        del lines["sglang"]
    if drafter == HERE:
        lines = {engine: line.replace(str(HERE.resolve()), str(HERE)) for engine, line in lines.items()}
    return lines


def serving_line(drafter: Path, target: Target, config: Mapping[str, Any]) -> str:
    """The line of the first engine that loads the drafter."""
    return next(iter(serving_lines(drafter, target, config).values()))
