"""Going on from a drafter that exists: its weights, its dimensions and its draft vocabulary.

Any form is read by convert/, the one place that knows them. Rooms import from convert/ towards configs/ otherwise; here
the import waits until a drafter is named, and nothing in convert/'s readers imports train/.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.configs.console import warn
from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import sha256_json
from draftsmith.configs.schema import RunConfig
from draftsmith.configs.target import Target
from draftsmith.data.target_model import target_mark
from draftsmith.data.vocab import DraftVocab


@dataclass(frozen=True)
class WarmStart:
    """A drafter to go on from: dimensions, float32 weights by served name, its maps, and a hash over all of them."""

    origin: Path
    spec: DrafterSpec
    weights: dict[str, Tensor]
    d2t: Tensor
    t2d: Tensor
    sha256: str


def read_warm_start(config: RunConfig, target: Target, trained_length: int) -> WarmStart:
    """Read `train.init_from`.

    Args:
        trained_length: of the run's conversations; the drafter's own counts where it is longer.

    Raises:
        DraftsmithError: no drafter that can be read, one of another target, or one whose dimensions contradict what the
            configuration's drafter section asks for.
    """
    from draftsmith.convert.read import read_drafter
    from draftsmith.convert.tensors import read_array, to_float32

    source = config.train.init_from
    assert source is not None
    drafter = read_drafter(source, target)
    if wrong := contradictions(config, drafter.spec):
        raise DraftsmithError(
            "the drafter to start from has other dimensions than the configuration asks for",
            where=source,
            found=", ".join(f"{key}={theirs}" for key, theirs, _ in wrong),
            expected=", ".join(f"{key}={ours}" for key, _, ours in wrong),
            mend=f"leave {', '.join(key for key, _, _ in wrong)} out of the configuration, or name the drafter's values, "
            "or train without init_from",
        )
    names = list(drafter.spec.trainable_shapes())
    stored = {name: drafter.tensors[name] for name in names}
    weights = {name: torch.from_numpy(to_float32(read_array(t), t.dtype).copy()) for name, t in stored.items()}
    d2t, t2d = (torch.from_numpy(read_array(drafter.tensors[name]).copy()) for name in ("d2t", "t2d"))
    longest = max(trained_length, drafter.spec.trained_length or 0)
    spec = drafter.spec.model_copy(update={"trained_length": longest})
    hashes = {name: hashlib.sha256(weights[name].numpy().tobytes()).hexdigest() for name in names}
    mark = sha256_json({"weights": hashes, "spec": drafter.spec.model_dump(mode="json"), "d2t": d2t.tolist()})
    return WarmStart(drafter.origin, spec, weights, d2t.long(), t2d.bool(), mark)


def contradictions(config: RunConfig, spec: DrafterSpec) -> list[tuple[str, Any, Any]]:
    """(setting, the drafter's value, the configuration's) where what the configuration says outright is not so."""
    found = []
    for key, value in config.drafter.model_dump(exclude_unset=True).items():
        if value is not None and getattr(spec, key, value) != value:
            found.append((f"drafter.{key}", getattr(spec, key), value))
    if "size" in config.vocab.model_fields_set and min(config.vocab.size, spec.vocab_size) != spec.draft_vocab_size:
        found.append(("vocab.size", spec.draft_vocab_size, config.vocab.size))
    if config.target.taps is not None and config.target.taps != spec.taps:
        found.append(("target.taps", list(spec.taps), list(config.target.taps)))
    return found


def warn_of_idle(config: RunConfig) -> None:
    """Name what the configuration says outright and what only a new drafter would heed."""
    idle = [key for key in ("head_init", "layer_init") if key in config.train.model_fields_set]
    if config.train.init_from is not None and idle:
        said = ", ".join(f"train.{key}={getattr(config.train, key)}" for key in idle)
        warn(f"{said} has no effect: all weights come from {config.train.init_from}")


def drafters_vocabulary(start: WarmStart, target: Target) -> DraftVocab:
    """The drafter's own draft vocabulary, for a run that has none; nothing was counted."""
    counts = torch.zeros(len(start.t2d), dtype=torch.int64)
    return DraftVocab(start.d2t, start.t2d, counts, f"drafter {start.sha256}", target_mark(target))


def check_vocabulary(start: WarmStart, vocab: DraftVocab, config: RunConfig) -> None:
    """The run's draft vocabulary must be the drafter's own: the head's rows mean nothing under another one.

    Raises:
        DraftsmithError: they differ; the mend takes the drafter's.
    """
    if torch.equal(start.t2d, vocab.t2d):
        return
    shared = int((start.t2d & vocab.t2d).sum()) if len(start.t2d) == len(vocab.t2d) else 0
    raise DraftsmithError(
        "the run's draft vocabulary is not that of the drafter to start from",
        where=config.vocab_file,
        found=f"{vocab.size:,} ids, {shared:,} of them in the drafter's",
        expected=f"the {len(start.d2t):,} ids of {start.origin}",
        mend=f"rm {config.vocab_file}; and train with the same --init-from again, which then takes the drafter's",
    )
