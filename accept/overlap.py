"""Whether text that acceptance is measured on was trained on: a drafter accepts what it has memorised, whatever is wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from draftsmith.configs.console import warn
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig
from draftsmith.data.conversations import read_conversations
from draftsmith.data.store import HarvestReader

Tokens = Sequence[int] | np.ndarray

NAMED = 4
"""Ids that a warning lists."""


def first_prompts(reader: HarvestReader) -> Iterator[tuple[str, Tokens]]:
    """Id and tokens before the first generated one of each conversation of a store; its states are not read."""
    number = 0
    for shard, described in enumerate(reader.manifest.shards):
        ids, generated = (part.numpy() for part in reader.shard_tokens(shard))
        start = 0
        for conversation in described.conversations:
            stop = start + conversation.length
            wrote = generated[start:stop]
            yield reader.ids[number], ids[start : start + (int(wrote.argmax()) if wrote.any() else len(wrote))]
            number, start = number + 1, stop


def trained_on(config: RunConfig, asked: Mapping[str, Tokens]) -> list[str] | None:
    """Which conversations begin with a prompt of the run's training text.

    Prompts are compared token by token: an answer to the same prompt differs with precision and temperature, and ids
    are as the prompts' files give them.

    Args:
        asked: id -> tokens before the first generated one.

    Returns:
        Their ids in the order of `asked`; None where neither the training store nor the training conversations are there.
    """
    keys = {name: _key(tokens) for name, tokens in asked.items() if len(tokens)}
    wanted = set(keys.values())
    known = _known(config, wanted)
    return None if known is None else [name for name, key in keys.items() if key in known]


def warn_of_trained(found: Collection[str] | None) -> None:
    """Say which of the conversations were trained on, if any were."""
    if found:
        warn(trained_text(found))


def trained_text(found: Collection[str]) -> str:
    """The warning in words."""
    names = ", ".join(list(found)[:NAMED]) + (", ..." if len(found) > NAMED else "")
    return (
        f"{len(found)} of these conversations were trained on ({names}): their prompts stand in the training "
        "text. A drafter accepts what it has memorised even when its taps are wrong; measure on held-out text"
    )


def _key(tokens: Tokens) -> bytes:
    return np.asarray(tokens, dtype=np.int32).tobytes()


def _known(config: RunConfig, wanted: Collection[bytes]) -> set[bytes] | None:
    """Those of `wanted` that are prompts of the training text."""
    try:
        reader = HarvestReader(config.store("train"))
        return {key for _, tokens in first_prompts(reader) if (key := _key(tokens)) in wanted}
    except DraftsmithError:  # no store, or one that is unfinished: what it was to be harvested from will do
        pass
    file = config.conversations("train")
    if not file.is_file():
        return None
    first = (_key(one.input_ids[: one.spans[0][0]]) for one in read_conversations(file))
    return {key for key in first if key in wanted}
