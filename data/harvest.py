"""The target's hidden states over the conversations, into a store.

Only the trunk runs. Hooks take the residual stream where it enters each tapped layer; the head is applied to a slice of
rows at a time, for the argmax alone, so that full logits never exist. Batches are right-padded without an attention
mask: under causal attention no real token ever sees padding behind it. Which conversations share a shard and a batch is
settled beforehand by their order and lengths, so that an interrupted harvest ends with the bytes of an unbroken one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from draftsmith.configs.console import closing, console, meter, warn
from draftsmith.configs.drafter import default_taps
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import sha256_file
from draftsmith.configs.schema import RunConfig, Split, TargetSection
from draftsmith.configs.target import Target, read_target
from draftsmith.data.store import MANIFEST, HarvestedConversation, HarvestReader, Provenance, read_manifest
from draftsmith.data.store_writer import StoreWriter, plan_shards, refuse_other_provenance
from draftsmith.data.synthesize import finished_conversations
from draftsmith.data.target_model import LoadedTarget, load_target, split_dtype, target_mark
from draftsmith.data.workers import side_by_side

if TYPE_CHECKING:
    from draftsmith.data.conversations import Conversation

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
"""A conversation's taps (T, K, H) and final state (T, H) as the bits of bf16 in int16, and argmax int64 (T,)."""

ARGMAX_ROWS = 512
"""Rows of logits that exist at once."""


def harvest(config: RunConfig, split: Split) -> Path:
    """Write the store `config.store(split)` from `config.conversations(split)`; returns its path.

    Raises:
        DraftsmithError: conversations missing, unfinished or from another target; a store there that was harvested
            otherwise; taps that the target does not have; states that are not finite.
    """
    target = read_target(config.target.path)
    path = config.store(split)
    taps = config.target.taps or default_taps(target.num_layers)
    _check_taps(taps, target)
    longest = min(config.harvest.max_length or target.context_length, target.context_length)
    conversations = finished_conversations(config, split)
    provenance = Provenance(
        target=target.fingerprint(),
        target_mark=target_mark(target),
        taps=taps,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        computed_in=split_dtype(config, split, target),
        source=sha256_file(config.conversations(split)),
        planned=len(conversations),
        max_length=longest,
        shard_tokens=config.harvest.shard_tokens,
    )
    if (path / MANIFEST).exists():
        manifest = read_manifest(path)
        refuse_other_provenance(path, manifest, provenance)
        if manifest.complete:
            closing(f"nothing: {path} is complete already ({manifest.tokens:,} tokens)")
            return path
    lengths = [min(len(conversation.input_ids), longest) for conversation in conversations]
    with StoreWriter(path, provenance) as writer:
        console.print(
            f"harvest {split}: {len(conversations) - writer.done:,} of {len(conversations):,} conversations, "
            f"taps {', '.join(map(str, taps))} of {target.num_layers} layers, {provenance.computed_in}"
        )
        _harvest_shards(config, conversations, lengths, writer, provenance)
    _report(config, split, conversations, lengths)
    return path


def forward_states(
    target: LoadedTarget, rows: Sequence[Sequence[int]], taps: Sequence[int]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """One forward pass of the trunk over several token sequences.

    Args:
        rows: token ids, one sequence a row, of any lengths.
        taps: layer-input indices.

    Returns:
        For each row on the CPU, in the target's dtype: taps (T, K, H), final (T, H), and argmax int64 (T,).

    Raises:
        DraftsmithError: the trunk's output is not its final norm's output, or a tapped layer did not run.
    """
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    seen: dict[Any, torch.Tensor] = {}
    with torch.no_grad(), ExitStack() as hooks:
        for tap in taps:
            handle = target.layers[tap].register_forward_pre_hook(_take_input(seen, tap), with_kwargs=True)
            hooks.callback(handle.remove)
        handle = target.norm.register_forward_hook(lambda module, inputs, output: seen.__setitem__("norm", output))
        hooks.callback(handle.remove)
        final = target.trunk(input_ids=ids.to(target.device), use_cache=False).last_hidden_state
        missing = [key for key in (*taps, "norm") if key not in seen]
        if missing or not torch.allclose(final, seen["norm"].to(final.device), rtol=0, atol=0, equal_nan=True):
            raise DraftsmithError(
                "the trunk's last hidden state is not what its final norm gives, or a tapped layer did not run",
                where=type(target.trunk).__name__,
                found=f"no call of {missing}" if missing else "another value",
                expected="embeddings -> layers -> norm",
            )
        states = []
        for index, row in enumerate(rows):
            tapped = torch.stack([seen[tap][index, : len(row)].cpu() for tap in taps], dim=1)
            states.append((tapped, final[index, : len(row)].cpu(), _argmax(target, final[index, : len(row)])))
    return states


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices grouped so that rows x longest row stays within `batch_tokens`; longest first, a longer one stands alone."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _harvest_shards(
    config: RunConfig,
    conversations: Sequence[Conversation],
    lengths: Sequence[int],
    writer: StoreWriter,
    provenance: Provenance,
) -> None:
    done = writer.done
    shards = [shard for shard in plan_shards(lengths, provenance.shard_tokens) if shard.start >= done]
    plan = [
        [
            [shard[position] for position in batch]
            for batch in plan_batches([lengths[i] for i in shard], config.harvest.batch_tokens)
        ]
        for shard in shards
    ]
    rows = [[conversations[i].input_ids[: lengths[i]] for i in batch] for batches in plan for batch in batches]
    states = side_by_side(
        _prepare,
        (config.target, provenance.computed_in, provenance.taps),
        rows,
        config.harvest.workers,
        setting="harvest.workers",
    )
    with meter("harvest", sum(lengths), "tokens", done=sum(lengths[:done])) as progress:
        for shard, batches in zip(shards, plan, strict=True):
            harvested: dict[int, HarvestedConversation] = {}
            for batch in batches:
                for index, arrays in zip(batch, next(states), strict=True):
                    harvested[index] = _bring_together(conversations[index], lengths[index], arrays)
                progress.advance(sum(lengths[index] for index in batch))
            for index in shard:
                writer.append(harvested.pop(index))


def _prepare(
    section: TargetSection, dtype: str, taps: tuple[int, ...]
) -> Callable[[list[Sequence[int]]], list[Arrays]]:
    """Load the target; the work is a batch's states in bf16, as arrays of their bits (cheap to send between processes)."""
    target = load_target(section, dtype)

    def work(rows: list[Sequence[int]]) -> list[Arrays]:
        return [
            (_bits(tapped), _bits(final), argmax.numpy())
            for tapped, final, argmax in forward_states(target, rows, taps)
        ]

    return work


def _bits(states: torch.Tensor) -> np.ndarray:
    return states.to(torch.bfloat16).view(torch.int16).numpy()


def _bring_together(conversation: Conversation, length: int, arrays: Arrays) -> HarvestedConversation:
    taps, final, argmax = (torch.from_numpy(array) for array in arrays)
    return HarvestedConversation(
        id=conversation.id,
        input_ids=torch.tensor(conversation.input_ids[:length]),
        generated=conversation.generated_mask()[:length],
        taps=taps.view(torch.bfloat16),
        final=final.view(torch.bfloat16),
        argmax=argmax,
        greedy=conversation.greedy,
        mean_logprob=conversation.mean_logprob,
    )


def _take_input(seen: dict[Any, torch.Tensor], tap: int) -> Any:
    """A pre-hook that keeps the layer's first argument, the residual stream."""

    def hook(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen[tap] = arguments[0] if arguments else named["hidden_states"]

    return hook


def _argmax(target: LoadedTarget, final: torch.Tensor) -> torch.Tensor:
    """int64 (T,) on the CPU from final (T, H), a slice of rows at a time; widened first, as a CPU is slow at bf16 argmax."""
    return torch.cat([target.head(rows).float().argmax(dim=-1).cpu() for rows in final.split(ARGMAX_ROWS)])


def _check_taps(taps: Sequence[int], target: Target) -> None:
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= target.num_layers:
        raise DraftsmithError(
            "the taps do not fit the target",
            where="target.taps",
            found=list(taps),
            expected=f"ascending layer-input indices within 0..{target.num_layers - 1}",
            mend=f"target.taps={list(default_taps(target.num_layers))}, the default",
        )


def _report(config: RunConfig, split: Split, conversations: Sequence[Conversation], lengths: Sequence[int]) -> None:
    path = config.store(split)
    reader = HarvestReader(path)
    manifest, agreement = reader.manifest, reader.agreement()
    cut = sum(length < len(one.input_ids) for length, one in zip(lengths, conversations, strict=True))
    bare = sum(one.generated == 0 for one in manifest.stored)
    if cut:
        warn(f"{cut:,} conversations were cut at {manifest.max_length:,} tokens (harvest.max_length)")
    if bare:
        warn(f"{bare:,} of them have no generated token left and train nothing")
    if agreement is not None:
        console.print(f"the target's argmax agrees with {agreement:.2%} of the tokens that it wrote", highlight=False)
    size = sum(shard.bytes for shard in manifest.shards)
    closing(
        f"{path}: {len(manifest.stored):,} conversations, {manifest.tokens:,} tokens, "
        f"{len(manifest.shards)} shards, {size / 1e9:.2f} GB",
        None if split == "heldout" else "draftsmith train CONFIG",
    )
