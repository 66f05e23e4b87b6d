"""Bring a run as far as training needs it."""

from __future__ import annotations

from draftsmith.configs.schema import RunConfig
from draftsmith.data.harvest import harvest
from draftsmith.data.synthesize import synthesize
from draftsmith.data.vocab import build_vocab


def make_ready(config: RunConfig) -> RunConfig:
    """Both splits answered and harvested, and the draft vocabulary counted."""
    for split in ("train", "heldout"):
        synthesize(config, split)
    build_vocab(config)
    for split in ("train", "heldout"):
        harvest(config, split)
    return config
