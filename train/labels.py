"""What the labels of a store are worth under a draft vocabulary, before any training."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from draftsmith.configs.console import warn
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig
from draftsmith.data.store import HarvestReader
from draftsmith.train.batch import MaskRule, supervised, turns

SAMPLE_LABELS = 4096
"""Labels that are looked at in a good store; the standard error of a share is below 0.01."""

MOSTLY = 0.5
"""Share of labels outside the draft vocabulary above which a run is warned."""


def check_labels(reader: HarvestReader, inside: Tensor, config: RunConfig, *, quiet: bool = False) -> None:
    """Stop a run that could learn nothing, because every label lies outside the draft vocabulary.

    Labels of later unroll steps are labels of the first one at later indices, so that the first one's are enough. A
    spread of conversations is read; all of them only where that spread holds no label inside.

    Args:
        reader: the training store.
        inside: bool (V,), which target ids the drafter can say.
        quiet: do not warn where most of them, but not all, lie outside.

    Raises:
        DraftsmithError: no label lies inside, and positions outside are skipped (train.out_of_vocabulary).
    """
    stride = max(1, len(reader) // 64)
    outside, labels = _count(reader, range(0, len(reader), stride), inside, config.train.mask, SAMPLE_LABELS)
    if labels and outside < labels:
        if outside > MOSTLY * labels and not quiet:
            warn(
                f"{outside / labels:.1%} of the labels lie outside the draft vocabulary of {int(inside.sum()):,} ids "
                f"({outside:,} of {labels:,} looked at): {_meaning(config)}"
            )
        return
    if config.train.out_of_vocabulary == "keep":
        return
    outside, labels = _count(reader, range(len(reader)), inside, config.train.mask, None)
    if outside < labels:
        return
    start = config.train.init_from
    raise DraftsmithError(
        "nothing would be learnt: 100 % of the labels lie outside the draft vocabulary, and such positions are skipped",
        where=f"{config.vocab_file if start is None else start} and {reader.path}",
        found=f"{outside:,} of {labels:,} labels are none of the {int(inside.sum()):,} ids",
        expected="a draft vocabulary counted over this text",
        mend=f"rm {config.vocab_file}; draftsmith vocab CONFIG" + ("; and train without init_from" if start else ""),
    )


def _meaning(config: RunConfig) -> str:
    if config.train.out_of_vocabulary == "keep":
        return "a drafter can never be right there"
    return "they teach nothing and are always missed; was it counted over this text?"


def _count(
    reader: HarvestReader, numbers: Iterable[int], inside: Tensor, rule: MaskRule, enough: int | None
) -> tuple[int, int]:
    """Labels outside, and all labels, of the first unroll step, until `enough` were seen."""
    outside = labels = 0
    for number in numbers:
        found = _labels(reader, number, rule)
        outside += int((~inside[found]).sum())
        labels += len(found)
        if enough is not None and labels >= enough:
            break
    return outside, labels


def _labels(reader: HarvestReader, number: int, rule: MaskRule) -> Tensor:
    """int64: the labels of a conversation at the first unroll step."""
    ids, mask = reader.tokens(number)
    generated = mask.numpy()
    rows = torch.from_numpy(supervised(generated, turns(generated), 0, rule).nonzero()[0])
    return ids[rows + 2] if reader.about(number).greedy else reader.argmax(number)[rows + 1]
