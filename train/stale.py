"""Warnings where a run's files come from different conversations: one of them is older than the others, or from elsewhere.

Nothing in them is wrong then, so nothing stops: a store that was merged, or divided, is not of the run's conversations
either. But a store that was not harvested again lacks what was asked since.
"""

from __future__ import annotations

from draftsmith.configs.console import warn
from draftsmith.configs.files import sha256_file
from draftsmith.configs.schema import RunConfig, Split
from draftsmith.data.store import HarvestReader
from draftsmith.data.vocab import DraftVocab


def warn_of_stale_training(config: RunConfig, reader: HarvestReader, vocab: DraftVocab) -> None:
    """Compare what the draft vocabulary counted with what was harvested, and say which of the two is stale."""
    store, counted = reader.manifest.source, vocab.source
    if store == counted or counted.startswith("drafter "):
        return
    now = _conversations(config, "train")
    mend = f"rm {config.vocab_file}; draftsmith vocab CONFIG"
    if now == counted:
        said = _stale_store("train", reader)
    elif now == store:
        said = f"the draft vocabulary {config.vocab_file} was counted over other conversations than those harvested: {mend}"
    else:
        said = (
            f"the draft vocabulary {config.vocab_file} was counted over other text than what {reader.path} holds: "
            f"{mend} --store {reader.path}"
        )
    warn(said)


def warn_of_stale_heldout(config: RunConfig, reader: HarvestReader) -> None:
    """Compare the run's held-out store with its held-out conversations, where both are there."""
    if _conversations(config, "heldout") not in (None, reader.manifest.source):
        warn(_stale_store("heldout", reader))


def _conversations(config: RunConfig, split: Split) -> str | None:
    file = config.conversations(split)
    return sha256_file(file) if file.is_file() else None


def _stale_store(split: Split, reader: HarvestReader) -> str:
    return (
        f"the store {reader.path} was not harvested from the run's {split} conversations as they are now (they have "
        f"changed since, unless it was merged or split): rm -r {reader.path}; draftsmith harvest CONFIG --split {split}"
    )
