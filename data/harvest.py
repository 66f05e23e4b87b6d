"""The target's hidden states over the conversations, into a store; by one process, or by all of `accelerate launch`.

Shards, and batches within a shard, are planned from the conversations' order and lengths alone; processes take whole
shards. So a conversation is always computed in the same batch, and neither the number of processes nor an interruption
changes a bit of the finished store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from draftsmith.configs.console import closing, console, meter, warn
from draftsmith.configs.drafter import default_taps
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import sha256_file
from draftsmith.configs.schema import RunConfig, Split, TargetSection
from draftsmith.configs.target import Target, read_target
from draftsmith.data.codec import Codec
from draftsmith.data.conversations import ConversationFile
from draftsmith.data.ranks import Rank, this_rank
from draftsmith.data.rows import Block, Task
from draftsmith.data.shard_queue import Piece, ShardQueue
from draftsmith.data.store import Provenance, read_manifest
from draftsmith.data.store_writer import StoreWriter, plan_shards
from draftsmith.data.synthesize import finished_conversations
from draftsmith.data.target_model import load_target, split_dtype, target_mark
from draftsmith.data.trunk import Trunk
from draftsmith.data.workers import side_by_side

CODECS: dict[str, Codec] = {"bf16": "bfloat16", "fp8": "fp8"}

PROBE_EVERY = 32
"""Of greedy conversations one in so many goes through the head, to tell whether states and text belong together."""


def harvest(config: RunConfig, split: Split) -> Path:
    """Write the store `config.store(split)` from `config.conversations(split)`; returns its path.

    Raises:
        DraftsmithError: conversations missing, unfinished or from another target; a store there that was harvested
            otherwise or is being written; taps that the target does not have; states that are not finite or repeat.
    """
    target, rank = read_target(config.target.path), this_rank(products=config.harvest.tensor_parallel)
    together = rank.count if config.harvest.tensor_parallel else 1
    path = config.store(split)
    taps = config.target.taps or default_taps(target.num_layers)
    _check_taps(taps, target)
    if config.harvest.backend != "transformers":
        _check_engine(target, rank)
    longest = min(config.harvest.max_length or target.context_length, target.context_length)
    conversations = finished_conversations(config, split)
    provenance = Provenance(
        target=target.fingerprint(),
        target_mark=target_mark(target),
        taps=taps,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        computed_in=split_dtype(config, split, target),
        computed_by=config.harvest.backend,
        computed_over=together,
        stored_in=CODECS[config.harvest.codec],
        source=sha256_file(config.conversations(split)),
        planned=len(conversations),
        max_length=longest,
        shard_tokens=config.harvest.shard_tokens,
        location=None if config.harvest.location is None else f"{config.harvest.location.rstrip('/')}/{split}",
    )
    work = _Work(config, target, provenance, conversations, rank)
    with _open_store(path, provenance, rank) as (writer, left):
        if left is None:
            if rank.index == 0:
                closing(f"nothing: {path} is complete already ({int(work.lengths.sum()):,} tokens)")
            return path
        shards = [number for number in range(len(work.shards)) if number not in left]
        if rank.index == 0:
            todo = sum(len(work.shards[number]) for number in shards)
            console.print(
                f"harvest {split}: {todo:,} of {len(conversations):,} conversations, "
                f"taps {', '.join(map(str, taps))} of {target.num_layers} layers, {provenance.computed_in}, "
                f"stored in {provenance.stored_in}"
                + (f", {rank.count} processes" if rank.count > 1 else "")
                + (" with one target" if together > 1 else "")
            )
            if together == 1 and len(shards) < rank.count:
                warn(
                    f"{len(shards)} shards for {rank.count} processes: some have nothing to do "
                    "(a smaller harvest.shard_tokens makes more shards)"
                )
        work.run(writer, shards if together > 1 else shards[rank.index :: rank.count])
    if together > 1 and rank.index > 0:
        return path
    _report(config, split, work)
    return path


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices grouped so that rows x longest row stays within `batch_tokens`; longest first, a longer one stands alone."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@contextmanager
def _open_store(path: Path, provenance: Provenance, rank: Rank) -> Iterator[tuple[StoreWriter, frozenset[int] | None]]:
    """The store, and the numbers of its finished shards, the same on all ranks; None if it is complete."""
    writer = StoreWriter(path, provenance, join=rank.index > 0)

    def finished() -> frozenset[int] | None:
        writer.__enter__()
        return None if writer.complete else frozenset(writer.finished)

    if rank.index == 0:
        done = rank.lead(finished)
    else:
        done = rank.follow()
        writer.__enter__()
    try:
        yield writer, done
    except BaseException as error:
        writer.__exit__(type(error), error, error.__traceback__)
        raise
    writer.__exit__(None, None, None)


class _Work:
    """What is harvested, and in which shards and batches."""

    def __init__(
        self, config: RunConfig, target: Target, provenance: Provenance, conversations: ConversationFile, rank: Rank
    ) -> None:
        self.conversations, self.provenance, self._config, self._rank = conversations, provenance, config, rank
        self.lengths = np.minimum(conversations.lengths, provenance.max_length)
        self.shards = plan_shards(self.lengths.tolist(), provenance.shard_tokens)
        self.agreement: float | None = None
        chunk = config.harvest.chunk_tokens or config.harvest.batch_tokens
        self._target = target
        self._chunk = None if whole_pass_only(target) else chunk

    def run(self, writer: StoreWriter, numbers: Sequence[int]) -> None:
        """Harvest these shards."""
        batches = {number: self._batches(number) for number in numbers}
        pieces: deque[list[Piece]] = deque()

        def tasks() -> Iterator[Task]:
            for number in numbers:
                for batch in batches[number]:
                    pieces.append([self._piece(number, index) for index in batch])
                    yield Task([piece.ids for piece in pieces[-1]], [piece.wanted for piece in pieces[-1]])

        if self.provenance.computed_over > 1 and self._rank.index > 0:  # its part of every product, and nothing else
            with self._blocks(tasks(), sum(map(len, batches.values()))) as blocks:
                deque(blocks, maxlen=0)
            return
        total = int(self.lengths.sum()) * self.provenance.computed_over // self._rank.count
        done = total - int(sum(self.lengths[index] for number in numbers for index in self.shards[number]))
        count = sum(map(len, batches.values()))
        with (
            self._blocks(tasks(), count) as blocks,
            ShardQueue(writer) as queue,
            meter("harvest", total, "tokens", done=max(0, done), quiet=self._rank.index > 0) as progress,
        ):
            for number in numbers:
                queue.open(number, [int(self.lengths[index]) for index in self.shards[number]])
                for batch in batches[number]:
                    block = next(blocks)
                    queue.put(pieces.popleft(), block)
                    progress.advance(int(sum(self.lengths[index] for index in batch)))
                queue.close()
        self.agreement = queue.agreed / queue.asked if queue.asked else None

    @contextmanager
    def _blocks(self, tasks: Iterator[Task], count: int) -> Iterator[Iterator[Block]]:
        """The rows of the tasks, in order, from passes here or from an engine that ends with the block."""
        about, section = self.provenance, self._config.harvest
        if section.backend == "transformers" or not count:
            arguments = (
                self._config.target, about.computed_in, about.taps, about.stored_in, self._chunk,
                (self._rank.local_index, self._rank.local_count), about.computed_over,
            )  # fmt: skip
            yield side_by_side(_prepare, arguments, tasks, min(section.workers, count), setting="harvest.workers")
            return
        from draftsmith.data.served import served_target

        longest = int(self.lengths.max())
        with served_target(section, self._target, about.taps, about.stored_in, about.computed_in, longest) as served:
            yield map(served.run, tasks)

    def _batches(self, number: int) -> list[list[int]]:
        shard = self.shards[number]
        plan = plan_batches([int(self.lengths[index]) for index in shard], self._config.harvest.batch_tokens)
        return [[shard[position] for position in batch] for batch in plan]

    def _piece(self, number: int, index: int) -> Piece:
        return Piece.of(
            self.conversations[index], int(self.lengths[index]), index - self.shards[number].start,
            probe=index % PROBE_EVERY == 0,
        )  # fmt: skip


def whole_pass_only(target: Target) -> bool:
    """Whether the target's RoPE looks at the length of the whole sequence, so that a chunk of it would be another text."""
    return (target.rope.scaling or {}).get("rope_type") in ("dynamic", "longrope")


def _prepare(
    section: TargetSection, dtype: str, taps: tuple[int, ...], codec: Codec, chunk: int | None, share: tuple[int, int],
    together: int,
) -> Callable[[Task], Block]:  # fmt: skip
    return Trunk(load_target(section, dtype, share=share, together=together), taps, codec, chunk).run


def _check_taps(taps: Sequence[int], target: Target) -> None:
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= target.num_layers:
        raise DraftsmithError(
            "the taps do not fit the target",
            where="target.taps",
            found=list(taps),
            expected=f"ascending layer-input indices within 0..{target.num_layers - 1}",
            mend=f"target.taps={list(default_taps(target.num_layers))}, the default",
        )


def _check_engine(target: Target, rank: Rank) -> None:
    if rank.count > 1:
        raise DraftsmithError(
            "an engine holds the target for one process", where="harvest.backend", found=f"{rank.count} processes",
            mend="draftsmith harvest CONFIG without a launcher; harvest.engine_options={tensor_parallel_size: N} (SGLang: tp_size)",
        )  # fmt: skip
    if whole_pass_only(target):
        raise DraftsmithError(
            "the engine would not compute this target's RoPE as one pass over each text does", where="harvest.backend",
            found=f"RoPE {(target.rope.scaling or {}).get('rope_type')}, which looks at the text's length",
            mend="harvest.backend=transformers",
        )  # fmt: skip


def _report(config: RunConfig, split: Split, work: _Work) -> None:
    path = config.store(split)
    manifest = read_manifest(path)
    if not manifest.complete:
        console.print("this process has finished its shards; others have not yet")
        return
    cut = int((work.conversations.lengths > manifest.max_length).sum())
    bare = sum(one.generated == 0 for one in manifest.stored)
    if cut:
        warn(f"{cut:,} conversations were cut at {manifest.max_length:,} tokens (harvest.max_length)")
    if bare:
        warn(f"{bare:,} of them have no generated token left and train nothing")
    if work.agreement is not None:
        console.print(
            f"the target's argmax agrees with {work.agreement:.2%} of the tokens that it wrote (a sample)",
            highlight=False,
        )
        if work.agreement < config.train.guard_threshold:
            warn(
                "that is below train.guard_threshold: the text is not this target's, or its states are wrong; "
                f"look closer: draftsmith store check {path} --target {config.target.path}"
            )
    size = sum(shard.bytes for shard in manifest.shards)
    closing(
        f"{path}: {len(manifest.stored):,} conversations, {manifest.tokens:,} tokens, "
        f"{len(manifest.shards)} shards, {size / 1e9:.2f} GB",
        None if split == "heldout" else "draftsmith train CONFIG",
    )
