"""`draftsmith store stats`: how much is in a store, of which length, and what a draft vocabulary covers of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.picture import picture
from draftsmith.data.store import HarvestReader
from draftsmith.data.vocab import DraftVocab, count_store

SIZES = (1024, 2048, 4096, 8192, 16384, 32000, 65536, 131072)
"""Draft vocabularies whose best coverage is told."""


@dataclass(frozen=True)
class StoreStats:
    """Figures of a store.

    Attributes:
        lengths: tokens of each conversation, int64 (n,).
        best: share of generated tokens that the most frequent so many ids cover.
        coverage: share that the given draft vocabulary covers; None without one.
    """

    path: Path
    codec: str
    shards: int
    bytes: int
    tokens: int
    generated: int
    lengths: np.ndarray
    distinct: int
    best: dict[int, float]
    coverage: float | None

    def record(self) -> dict[str, Any]:
        """As JSON."""
        quantiles = np.quantile(self.lengths, [0.0, 0.1, 0.5, 0.9, 1.0]).astype(int).tolist()
        return {
            "store": str(self.path), "codec": self.codec, "shards": self.shards, "bytes": self.bytes,
            "bytes_per_token": round(self.bytes / self.tokens, 1), "conversations": len(self.lengths),
            "tokens": self.tokens, "generated": self.generated,
            "generated_share": round(self.generated / self.tokens, 4),
            "length": dict(zip(("min", "p10", "median", "p90", "max"), quantiles, strict=True)),
            "mean_length": round(self.tokens / len(self.lengths), 1), "distinct_generated": self.distinct,
            "best_coverage": {str(size): round(share, 4) for size, share in self.best.items()},
            "coverage": None if self.coverage is None else round(self.coverage, 4),
        }  # fmt: skip


def store_stats(path: Path, vocab_file: Path | None = None) -> StoreStats:
    """Count a finished store; states are not read.

    Raises:
        DraftsmithError: a store that cannot be opened, or a draft vocabulary of another target.
    """
    reader = HarvestReader(path)
    if not len(reader):
        raise DraftsmithError(
            "the store holds no conversation", where=path, mend="draftsmith harvest CONFIG, or another store"
        )
    manifest, counts = reader.manifest, count_store(reader)
    coverage = None
    if vocab_file is not None:
        vocab = DraftVocab.load(vocab_file, mend="name a file that draftsmith vocab wrote")
        if vocab.target != manifest.target_mark:
            raise DraftsmithError(
                "the draft vocabulary belongs to another target than the store",
                where=vocab_file,
                found=vocab.target,
                expected=manifest.target_mark,
            )
        coverage = vocab.coverage(counts)
    cumulated = torch.cumsum(counts.sort(descending=True).values, dim=0)
    total = max(1, int(cumulated[-1]))
    return StoreStats(
        path=path,
        codec=manifest.stored_in,
        shards=len(manifest.shards),
        bytes=sum(shard.bytes for shard in manifest.shards),
        tokens=manifest.tokens,
        generated=sum(one.generated for one in manifest.stored),
        lengths=np.array(reader.lengths),
        distinct=int((counts > 0).sum()),
        best={size: int(cumulated[size - 1]) / total for size in SIZES if size < len(counts)},
        coverage=coverage,
    )


def draw(stats: StoreStats, file: Path) -> None:
    """Lengths of conversations, and coverage by size of the draft vocabulary, side by side."""
    with picture(file, columns=2, size=(9.0, 3.6)) as (left, right):
        left.hist(stats.lengths, bins=40)
        left.set(xlabel="tokens of a conversation", ylabel="conversations")
        right.plot(list(stats.best), [100 * share for share in stats.best.values()], marker="o", label="most frequent")
        if stats.coverage is not None:
            right.axhline(100 * stats.coverage, linestyle="--", color="tab:orange", label="this draft vocabulary")
        right.set(xscale="log", xlabel="draft vocabulary", ylabel="% of generated tokens")
        right.legend()
