"""The draft vocabulary: the target's most frequent generated tokens, special tokens always in.

d2t holds offsets: target_id = draft_id + d2t[draft_id], draft ids in ascending order of target id. t2d is True where a
target id has a draft id. Invariant: arange(D) + d2t == nonzero(t2d).
"""

from __future__ import annotations

import itertools
import json
import os
from array import array
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from draftsmith import __version__
from draftsmith.configs.console import closing, console, warn
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import sha256_file
from draftsmith.configs.schema import RunConfig
from draftsmith.configs.target import read_target
from draftsmith.data.chat import ChatFormat
from draftsmith.data.conversations import Conversation, read_conversations
from draftsmith.data.store import HarvestReader
from draftsmith.data.store_writer import save_tensors
from draftsmith.data.synthesize import finished_conversations
from draftsmith.data.target_model import configured_stop_ids, load_tokenizer, target_mark

MEND = "draftsmith vocab CONFIG"

CHUNK = 1 << 20
"""Ids that are counted at once."""


@dataclass(frozen=True)
class DraftVocab:
    """A draft vocabulary of D ids over a target's V.

    Attributes:
        d2t: int64 (D,), offsets.
        t2d: bool (V,).
        counts: int64 (V,), how often each target id was generated in the conversations it was built from.
        source: sha256 of the conversations file.
        target: short hash of the target's fingerprint.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor
    counts: torch.Tensor
    source: str
    target: str

    @property
    def size(self) -> int:
        """D."""
        return len(self.d2t)

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 (D,), the target id of each draft id, ascending."""
        return torch.arange(self.size) + self.d2t

    def coverage(self, counts: torch.Tensor) -> float:
        """Share of tokens, counted by target id in int64 (V,), that the draft vocabulary can say."""
        total = int(counts.sum())
        return int(counts[self.t2d].sum()) / total if total else 1.0

    def save(self, path: Path) -> None:
        """Write one safetensors file, atomically."""
        note = {"schema_version": 1, "source": self.source, "target": self.target, "tool_version": __version__}
        tensors = {"d2t": self.d2t, "t2d": self.t2d, "counts": self.counts}
        save_tensors(path, tensors, note)

    @classmethod
    def load(cls, path: Path, *, mend: str | None = None) -> DraftVocab:
        """Read and check.

        Args:
            mend: what helps if `path` is no such file; none: it is the run's own and is written again.

        Raises:
            DraftsmithError: missing or damaged file, a tensor with another dtype or shape, or d2t and t2d that do not
                describe the same ids.
        """
        if not path.is_file():
            raise DraftsmithError("the draft vocabulary is missing", where=path, mend=mend or MEND)
        mend = mend or f"rm {path}; {MEND}"
        try:
            with safe_open(path, framework="pt") as handle:
                note = json.loads((handle.metadata() or {}).get("draftsmith", "{}"))
                tensors = {name: handle.get_tensor(name) for name in ("d2t", "t2d", "counts")}
        except (SafetensorError, json.JSONDecodeError) as error:
            raise DraftsmithError(f"the draft vocabulary cannot be read: {error}", where=path, mend=mend) from None
        if note.get("schema_version") != 1:
            raise DraftsmithError(
                "the draft vocabulary has another schema version",
                where=path,
                found=note.get("schema_version"),
                expected=1,
                mend=mend,
            )
        check_maps(tensors["d2t"], tensors["t2d"], where=path, mend=mend)
        counts = tensors["counts"]
        if counts.dtype != torch.int64 or counts.shape != tensors["t2d"].shape or bool((counts < 0).any()):
            raise DraftsmithError(
                "counts of the draft vocabulary do not fit",
                where=path,
                found=f"{counts.dtype} {tuple(counts.shape)}",
                expected=f"non-negative torch.int64 {tuple(tensors['t2d'].shape)}",
                mend=mend,
            )
        return cls(**tensors, source=note["source"], target=note["target"])


def check_maps(d2t: torch.Tensor, t2d: torch.Tensor, *, where: object = None, mend: str = MEND) -> None:
    """Stop unless d2t int64 (D,) and t2d bool (V,) describe the same ascending ids.

    Raises:
        DraftsmithError: names the map and the first draft id at fault.
    """
    for name, tensor, dtype in (("d2t", d2t, torch.int64), ("t2d", t2d, torch.bool)):
        if tensor.dtype != dtype or tensor.dim() != 1:
            raise DraftsmithError(
                f"{name} has another dtype or shape",
                where=where,
                found=f"{tensor.dtype} {tuple(tensor.shape)}",
                expected=f"{dtype}, one dimension",
                mend=mend,
            )
    ids = torch.arange(len(d2t)) + d2t
    expected = t2d.nonzero()[:, 0]
    if len(ids) != len(expected):
        raise DraftsmithError(
            "d2t and t2d name different numbers of ids",
            where=where,
            found=f"d2t {len(ids):,}",
            expected=f"t2d {len(expected):,}",
            mend=mend,
        )
    if not torch.equal(ids, expected):
        draft = int((ids != expected).nonzero()[0, 0])
        raise DraftsmithError(
            f"d2t sends draft id {draft} to a target id that t2d does not expect",
            where=where,
            found=int(ids[draft]),
            expected=int(expected[draft]),
            mend=f"{mend} (d2t holds offsets, not target ids)",
        )


class TokenCounter:
    """Counts generated tokens by target id; O(tokens + V) in time, and never more than CHUNK ids in memory."""

    def __init__(self, vocab_size: int) -> None:
        self._counts = torch.zeros(vocab_size, dtype=torch.int64)
        self._waiting = array("q")

    def add(self, conversation: Conversation) -> None:
        """Count a conversation's generated tokens.

        Raises:
            DraftsmithError: an id outside the vocabulary.
        """
        ids = [token for start, end in conversation.spans for token in conversation.input_ids[start:end]]
        if max(ids) >= len(self._counts):
            raise _outside(f"conversation {conversation.id}", max(ids), len(self._counts))
        self._waiting.extend(ids)
        if len(self._waiting) >= CHUNK:
            self._flush()

    def counts(self) -> torch.Tensor:
        """int64 (V,) so far."""
        self._flush()
        return self._counts

    def _flush(self) -> None:
        if self._waiting:
            ids = torch.frombuffer(self._waiting, dtype=torch.int64)
            self._counts += torch.bincount(ids, minlength=len(self._counts))
            self._waiting = array("q")


def count_tokens(conversations: Iterable[Conversation], vocab_size: int) -> torch.Tensor:
    """int64 (V,): how often each id stands among the generated tokens.

    Raises:
        DraftsmithError: an id outside the vocabulary.
    """
    counter = TokenCounter(vocab_size)
    for conversation in conversations:
        counter.add(conversation)
    return counter.counts()


def count_store(reader: HarvestReader) -> torch.Tensor:
    """`count_tokens` over a store, its shards side by side in threads.

    Raises:
        DraftsmithError: an id outside the vocabulary.
    """
    size = reader.manifest.vocab_size

    def count(number: int) -> torch.Tensor:
        ids, generated = reader.shard_tokens(number)
        chosen = ids[generated]
        if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < size:
            wrong = int(chosen.max()) if int(chosen.max()) >= size else int(chosen.min())
            raise _outside(str(reader.path / reader.manifest.shards[number].file), wrong, size)
        return torch.bincount(chosen, minlength=size)

    counts, threads = torch.zeros(size, dtype=torch.int64), os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        numbers = iter(range(len(reader.manifest.shards)))
        waiting = deque(pool.submit(count, number) for number in itertools.islice(numbers, threads))
        while waiting:
            counts += waiting.popleft().result()
            waiting.extend(pool.submit(count, number) for number in itertools.islice(numbers, 1))
    return counts


def _outside(where: str, found: int, size: int) -> DraftsmithError:
    return DraftsmithError(
        f"{where} holds a token outside the target's vocabulary", found=found, expected=f"below {size:,}"
    )


def choose_vocab(counts: torch.Tensor, size: int, always: Iterable[int], *, source: str, target: str) -> DraftVocab:
    """The `size` most frequent ids, those of `always` first; ties, and ids that never occurred, by the lowest id.

    Args:
        counts: int64 (V,).
        size: D; capped at V.
        always: ids that must be in (special tokens, end of turn).

    Raises:
        DraftsmithError: more ids in `always` than `size`.
    """
    size = min(size, len(counts))
    chosen = torch.zeros(len(counts), dtype=torch.bool)
    chosen[sorted(set(always))] = True
    forced = int(chosen.sum())
    if forced > size:
        raise DraftsmithError(
            "the draft vocabulary is smaller than the target's set of special tokens",
            where="vocab.size",
            found=size,
            expected=f"at least {forced}",
        )
    order = torch.argsort(counts, descending=True, stable=True)
    chosen[order[~chosen[order]][: size - forced]] = True
    ids = chosen.nonzero()[:, 0]
    return DraftVocab(ids - torch.arange(size), chosen, counts, source, target)


def build_vocab(config: RunConfig, store: Path | None = None) -> Path:
    """Write `config.vocab_file` from the training conversations; prints how much of both splits it covers.

    Args:
        store: count over this store instead, such as one that `store merge` made.

    Raises:
        DraftsmithError: training conversations missing, unfinished or from another target; a vocabulary there that was
            built from other conversations or in another size; `vocab.size` below the number of special tokens.
    """
    target = read_target(config.target.path)
    path, mark = config.vocab_file, target_mark(target)
    size = min(config.vocab.size, target.vocab_size)
    if store is None:
        counter = TokenCounter(target.vocab_size)
        conversations = finished_conversations(config, "train", counter.add)
        source, counts = sha256_file(conversations.path), counter.counts()
    else:
        reader = HarvestReader(store)
        source, counts = reader.manifest.source, count_store(reader)
        if reader.manifest.target_mark != mark:
            raise DraftsmithError(
                "the store was harvested from another target", where=store, found=reader.manifest.target_mark,
                expected=f"{mark} (the fingerprint of {config.target.path})",
            )  # fmt: skip
    if path.exists():
        _refuse_other_vocab(DraftVocab.load(path), path, {"source": source, "target": mark, "size": size})
        closing(f"nothing: {path} is complete already ({size:,} ids)")
        return path
    tokenizer = load_tokenizer(config.target)
    chat = ChatFormat(tokenizer, configured_stop_ids(config.target.path))
    always = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values(), *chat.stop_ids}
    inside = [token for token in always if token < target.vocab_size]
    vocab = choose_vocab(counts, size, inside, source=source, target=mark)
    distinct = int((counts > 0).sum())
    if distinct < size:
        warn(
            f"the conversations hold {distinct:,} distinct tokens, fewer than the {size:,} asked for: the rest are "
            "special tokens and the lowest unused ids"
        )
    shares = [f"train {vocab.coverage(counts):.2%}"]
    if config.conversations("heldout").is_file():
        heldout = count_tokens(read_conversations(config.conversations("heldout")), target.vocab_size)
        shares.append(f"held-out {vocab.coverage(heldout):.2%}")
    console.print(f"coverage of generated tokens: {', '.join(shares)}", highlight=False)
    vocab.save(path)
    closing(f"{path}: {size:,} of {target.vocab_size:,} ids, {len(inside):,} special", "draftsmith harvest CONFIG")
    return path


def _refuse_other_vocab(vocab: DraftVocab, path: Path, expected: dict[str, str | int]) -> None:
    for name, value in expected.items():
        found = getattr(vocab, name)
        if found != value:
            raise DraftsmithError(
                f"the draft vocabulary there has another {name}",
                where=path,
                found=found,
                expected=value,
                mend=f"give the run another name, or: rm {path}; {MEND} (drafters trained on it must be trained again)",
            )
