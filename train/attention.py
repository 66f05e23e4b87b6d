"""Attention of the unroll: step-0 keys of earlier indices, and the same index's own keys of later steps.

A query at index t of step i sees the step-0 keys of indices <= t of its own conversation and, of steps 1..i, only the
key at index t: exactly the cache that an engine has grown when it drafts token i of a chain that starts at t. There is
one softmax over both kinds of key. No mask of (all tokens) x (all tokens) exists; each conversation is a segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Where each conversation's rows lie: keys `[key_bounds[s], key_bounds[s+1])`, queries likewise, as host integers.

    `visible` int64 (queries,): for each query, how many keys of its own segment it sees (its index within it, plus 1).
    """

    key_bounds: list[int]
    query_bounds: list[int]
    visible: Tensor


def unroll_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
    segments: Segments,
    scale: float,
) -> Tensor:
    """Attention output (queries, heads, value_dim) in the dtype of `query`; scores and softmax are float32.

    Args:
        query: (queries, heads, head_dim), rotated.
        keys, values: (rows, kv_heads, head_dim) and (rows, kv_heads, value_dim) of step 0, keys rotated.
        own_keys, own_values: the same for each later step up to this one, one row a query, at its index.
        segments: which rows belong together.
        scale: factor on the scores.
    """
    count, heads, dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.view(count, kv_heads, heads // kv_heads, dim).float() * scale
    own_scores = [torch.einsum("nkgd,nkd->nkg", grouped, key.float()) for key in own_keys]
    outputs = []
    for segment in range(len(segments.query_bounds) - 1):
        first, last = segments.query_bounds[segment], segments.query_bounds[segment + 1]
        if first == last:
            continue
        seen = slice(segments.key_bounds[segment], segments.key_bounds[segment + 1])
        scores = torch.einsum("nkgd,mkd->kgnm", grouped[first:last], keys[seen].float())
        reach = torch.arange(scores.shape[-1], device=query.device)
        scores = scores.masked_fill(reach[None, :] >= segments.visible[first:last, None], float("-inf"))
        own = [score[first:last].permute(1, 2, 0)[..., None] for score in own_scores]
        weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1)
        mixed = torch.einsum("kgnm,mkd->nkgd", weights[..., : scores.shape[-1]], values[seen].float())
        for step, value in enumerate(own_values):
            share = weights[..., scores.shape[-1] + step].permute(2, 0, 1)[..., None]
            mixed = mixed + share * value[first:last, :, None].float()
        outputs.append(mixed)
    return torch.cat(outputs).reshape(count, heads, values.shape[-1]).to(query.dtype)
