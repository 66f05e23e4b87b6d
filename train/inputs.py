"""What a training run reads, checked against each other before anything is computed."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftsmith import __version__
from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import sha256_json
from draftsmith.configs.schema import RunConfig
from draftsmith.configs.target import Target, default_drafter, read_target
from draftsmith.data.store import HarvestReader
from draftsmith.data.vocab import DraftVocab
from draftsmith.train.warm import WarmStart, check_vocabulary, drafters_vocabulary, read_warm_start


@dataclass(frozen=True)
class Inputs:
    """Target, stores, draft vocabulary and the drafter's dimensions of one run.

    `targets` int64 (D,): arange + d2t. `start`: the drafter that training goes on from, if one was named.
    """

    target: Target
    train: HarvestReader
    heldout: HarvestReader | None
    vocab: DraftVocab
    targets: Tensor
    spec: DrafterSpec
    start: WarmStart | None = None

    def provenance(self, config: RunConfig) -> dict[str, Any]:
        """What a checkpoint says of its origin."""
        manifest = self.train.manifest
        return {
            "tool_version": __version__,
            "run": config.name,
            "target": self.target.fingerprint(),
            "target_path": str(self.target.path),
            "store": {
                "conversations": len(self.train),
                "tokens": sum(self.train.lengths),
                "manifest": sha256_json(manifest.model_dump(mode="json")),
            },
            "vocab_sha256": hashlib.sha256(self.vocab.d2t.numpy().tobytes()).hexdigest(),
            "unroll_steps": config.train.unroll_steps,
            "step_decay": config.train.step_decay,
            "mask": config.train.mask,
            "init_from": None if self.start is None else self.start.sha256,
        }


def read_inputs(config: RunConfig, *, without: Collection[str] = ()) -> Inputs:
    """Open everything a run needs.

    Args:
        without: shards of the training store to leave out.

    Raises:
        DraftsmithError: something is missing, or store, vocabulary, target and the drafter to start from do not belong
            together.
    """
    target = read_target(config.target.path)
    train = HarvestReader(config.store("train"), without=without)
    heldout = HarvestReader(config.store("heldout")) if (config.store("heldout") / "manifest.json").is_file() else None
    seen = min(max(train.lengths), config.train.max_length, config.train.batch_tokens)
    if config.train.init_from is None:
        start, vocab = None, DraftVocab.load(config.vocab_file)
        spec = drafter_spec(config, target, len(vocab.d2t), seen)
    else:
        start = read_warm_start(config, target, seen)
        spec = start.spec
        vocab = (
            DraftVocab.load(config.vocab_file) if config.vocab_file.is_file() else drafters_vocabulary(start, target)
        )
        check_vocabulary(start, vocab, config)
    if spec.sliding_window is not None and max(train.lengths) > spec.sliding_window:
        raise DraftsmithError(
            "training does not restrict attention to a sliding window, and conversations reach beyond it",
            where=config.train.init_from, found=f"sliding_window {spec.sliding_window:,}", expected="none",
            mend=f"harvest.max_length={spec.sliding_window}, or a drafter without a window",
        )  # fmt: skip
    if spec.hidden_size != target.hidden_size:
        raise DraftsmithError(
            "the drafter reads the target's embeddings, so its width is the target's",
            where="drafter.hidden_size", found=spec.hidden_size, expected=target.hidden_size,
        )  # fmt: skip
    for reader in (train, heldout):
        if reader is not None:
            check_store(reader, target, spec.taps)
    if len(vocab.t2d) != target.vocab_size:
        raise DraftsmithError(
            "the draft vocabulary was made for another target",
            where=config.vocab_file,
            found=f"{len(vocab.t2d)} target ids",
            expected=target.vocab_size,
            mend=f"rm {config.vocab_file}; draftsmith vocab CONFIG",
        )
    return Inputs(target, train, heldout, vocab, vocab.target_ids, spec, start)


def drafter_spec(config: RunConfig, target: Target, draft_vocab_size: int, trained_length: int | None) -> DrafterSpec:
    """The drafter's dimensions under `config`: the target's, unless the drafter section says otherwise."""
    return default_drafter(
        target,
        draft_vocab_size,
        taps=config.target.taps,
        trained_length=trained_length,
        **config.drafter.model_dump(),
    )


def check_store(reader: HarvestReader, target: Target, taps: tuple[int, ...]) -> None:
    """Refuse a store whose taps, width or target differ from the run's."""
    manifest = reader.manifest
    facts = [
        ("taps", list(manifest.taps), list(taps)),
        ("tap convention", manifest.tap_convention, "layer-input"),
        ("final state", manifest.final_state, "post-norm"),
        ("hidden size", manifest.hidden_size, target.hidden_size),
    ]
    ours = target.fingerprint()
    facts += [
        (f"target's {key}", manifest.target[key], ours[key]) for key in sorted(manifest.target.keys() & ours.keys())
    ]
    for label, found, expected in facts:
        if found != expected:
            raise DraftsmithError(
                f"the store does not fit this run: {label} differ"
                + ("s" if label.startswith(("target", "hidden", "tap c", "final")) else ""),
                where=reader.path / "manifest.json",
                found=found,
                expected=expected,
                mend="draftsmith harvest CONFIG into another run name, or name the target and taps it was harvested with",
            )
