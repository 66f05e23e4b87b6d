"""Attention of the unroll: step-0 keys of earlier indices, and the same index's own keys of later steps.

A query at index t of step i sees the step-0 keys of indices <= t of its own conversation and, of steps 1..i, only the
key at index t: exactly the cache that an engine has grown when it drafts token i of a chain that starts at t. There is
one softmax over both kinds of key. No mask of (all tokens) x (all tokens) exists; each conversation is a segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from draftsmith.train import flash
from draftsmith.train.flash import OwnKeys
from draftsmith.train.rows import wide


@dataclass(frozen=True)
class Segments:
    """Where each conversation's rows lie: keys `[key_bounds[s], key_bounds[s+1])`, queries likewise, as host integers.

    Attributes:
        rows: int64 (queries,), each query's own row among the keys; it sees the keys of its segment up to that row.
        bounds: int32, `key_bounds` beside the keys.
    """

    key_bounds: list[int]
    query_bounds: list[int]
    rows: Tensor
    bounds: Tensor

    @staticmethod
    def of(key_bounds: list[int], query_bounds: list[int], rows: Tensor) -> Segments:
        """From host integers; `bounds` goes where `rows` is."""
        return Segments(key_bounds, query_bounds, rows, torch.tensor(key_bounds, dtype=torch.int32, device=rows.device))

    @cached_property
    def lengths(self) -> list[int]:
        """Rows of each segment."""
        return [last - first for first, last in pairwise(self.key_bounds)]

    @property
    def dense(self) -> bool:
        """Whether every key row has its query."""
        return self.query_bounds == self.key_bounds


class Keys:
    """Keys and values of one unroll: step 0's for every row, then one row a query for each later step.

    Args:
        steps: most later steps.
    """

    def __init__(self, steps: int) -> None:
        self.first: tuple[Tensor, Tensor] | None = None
        self.later: list[tuple[Tensor, Tensor]] = []
        self.own = OwnKeys(steps)

    def add(self, key: Tensor, value: Tensor) -> None:
        """(rows, kv_heads, head_dim), rotated, and (rows, kv_heads, value_dim) of the next step."""
        if self.first is None:
            self.first = key, value
        elif flash.usable(key):
            self.own.add(key, value)
        else:
            self.later.append((key, value))


def unroll_attention(query: Tensor, keys: Keys, segments: Segments, scale: float) -> Tensor:
    """Attention output (queries, heads, value_dim) in the dtype of `query`; scores and softmax are float32 at least.

    Args:
        query: (queries, heads, head_dim), rotated.
        keys: of all steps up to this one.
        segments: which rows belong together.
        scale: factor on the scores.
    """
    assert keys.first is not None
    if not flash.usable(query):
        return plain_attention(query, *keys.first, keys.later, segments, scale)
    where = None if segments.dense else segments.rows
    return flash.flash_attention(query, *keys.first, keys.own, where, segments.bounds, segments.lengths, scale)


def plain_attention(
    query: Tensor, keys: Tensor, values: Tensor, own: list[tuple[Tensor, Tensor]], segments: Segments, scale: float
) -> Tensor:
    """`unroll_attention` by scores and softmax of each conversation, for devices and dtypes without a flash kernel."""
    count, heads, dim = query.shape
    kv_heads = keys.shape[1]
    grouped = wide(query.view(count, kv_heads, heads // kv_heads, dim)) * scale
    own_scores = [torch.einsum("nkgd,nkd->nkg", grouped, wide(key)) for key, _ in own]
    outputs = []
    for segment in range(len(segments.query_bounds) - 1):
        first, last = segments.query_bounds[segment], segments.query_bounds[segment + 1]
        if first == last:
            continue
        start, stop = segments.key_bounds[segment], segments.key_bounds[segment + 1]
        scores = torch.einsum("nkgd,mkd->kgnm", grouped[first:last], wide(keys[start:stop]))
        reach = torch.arange(start, stop, device=query.device)
        scores = scores.masked_fill(reach[None, :] > segments.rows[first:last, None], float("-inf"))
        more = [score[first:last].permute(1, 2, 0)[..., None] for score in own_scores]
        weights = torch.cat([scores, *more], dim=-1).softmax(dim=-1)
        mixed = torch.einsum("kgnm,mkd->nkgd", weights[..., : stop - start], wide(values[start:stop]))
        for step, (_, value) in enumerate(own):
            share = weights[..., stop - start + step].permute(2, 0, 1)[..., None]
            mixed = mixed + share * wide(value[first:last, :, None])
        outputs.append(mixed)
    return torch.cat(outputs).reshape(count, heads, values.shape[-1]).to(query.dtype)
