"""The lines that serve a delivered version, wherever it lies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.configs.target import Target
from draftsmith.convert.launch import sglang_line, vllm_line

HERE = Path("DRAFTER")
"""Stands for a folder on the serving machine."""


def serving_lines(drafter: Path, target: Target, config: Mapping[str, Any]) -> dict[str, str]:
    """Launch lines by engine; only vLLM reads the speculators form.

    Args:
        drafter: a folder, or HERE, which then stays as it is.
        config: the drafter's config.json.
    """
    lines = {"sglang": sglang_line(drafter, target, config=config), "vllm": vllm_line(drafter, target)}
    if "transformer_layer_config" in config:
        del lines["sglang"]
    if drafter == HERE:
        lines = {engine: line.replace(str(HERE.resolve()), str(HERE)) for engine, line in lines.items()}
    return lines


def serving_line(drafter: Path, target: Target, config: Mapping[str, Any]) -> str:
    """The line of the first engine that loads the drafter."""
    return next(iter(serving_lines(drafter, target, config).values()))
