"""KV cache writes and attention over the paged KV cache (see the package docstring).

Shapes: a cache is (slots, kv_heads, head_dim); `req_to_token` (pool, max_len) names the slot of every position of a
request; a query belongs to one of `query_heads`, each group of query_heads / kv_heads of them sharing one kv head.
Requests whose queries are equally many (decode, verify, draft extend) go through one padded batch; the uneven ones
(prefill) go one by one.
"""

import torch

from ._registry import operator


@operator("store_cache_cpu(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, int width) -> ()")
def store_cache_cpu(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, width: int
) -> None:
    """Write the rows of k and v (T, kv_heads * head_dim = width) into the slots (T,) of both caches."""
    k_cache.view(-1, width)[slots] = k.reshape(-1, width).to(k_cache.dtype)
    v_cache.view(-1, width)[slots] = v.reshape(-1, width).to(v_cache.dtype)


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    logit_cap: float,
) -> torch.Tensor:
    """Grouped-query attention of q (B, Tq, Hq, D) over slots (B, Tk) where visible (B, Tq, Tk) -> (B, Tq, Hq, Dv).

    Every query must see at least one key. Slots of invisible keys are read too (weight zero): they must hold numbers.
    """
    batch, queries, heads, dim = q.shape
    groups = k_cache.shape[1]
    keys = k_cache[slots].float().permute(0, 2, 3, 1)  # (B, Hkv, D, Tk)
    values = v_cache[slots].float().transpose(1, 2)  # (B, Hkv, Tk, Dv)
    grouped = q.float().view(batch, queries, groups, heads // groups, dim).permute(0, 2, 3, 1, 4)
    scores = grouped.reshape(batch, groups, -1, dim) @ keys * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores = scores.view(batch, groups, heads // groups, queries, -1)
    scores.masked_fill_(~visible[:, None, None], float("-inf"))
    mixed = scores.softmax(-1).view(batch, groups, -1, slots.shape[1]) @ values
    mixed = mixed.view(batch, groups, heads // groups, queries, -1).permute(0, 3, 1, 2, 4)
    return mixed.reshape(batch, queries, heads, -1).to(q.dtype)


def _own_slots(req_to_token: torch.Tensor, req_pool: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Slots (B, max(seq_lens)) of the requests; past a request's end its first slot is repeated as harmless padding."""
    longest = int(seq_lens.max())
    slots = req_to_token[req_pool.long(), :longest].long()
    past_end = torch.arange(longest) >= seq_lens.view(-1, 1)
    return torch.where(past_end, slots[:, :1], slots)


def _visible_keys(
    seq_lens: torch.Tensor, queries: int, keys: int, causal: bool, window: int, tree: torch.Tensor | None
) -> torch.Tensor:
    """Which of `keys` (padded) each of the last `queries` tokens of B requests may attend: bool (B, queries, keys).

    Without a tree, token p sees keys <= p (causal) or the whole request. With one (B, queries, queries), the last
    `queries` tokens are tree nodes: each sees the whole prefix and the nodes its row names. `window` > 0 keeps only
    the `window` newest keys up to the query's own index.
    """
    lengths = seq_lens.view(-1, 1, 1).long()
    key = torch.arange(keys).view(1, 1, -1)
    prefix = lengths - queries
    index = prefix + torch.arange(queries).view(1, -1, 1)
    if tree is not None:
        node = (key - prefix).clamp(0, queries - 1).expand(-1, queries, -1)
        visible = (key < prefix) | ((key < lengths) & tree.bool().gather(2, node))
    else:
        visible = key <= index if causal else key < lengths
    if window > 0:
        visible = visible & (key > index - window)
    return visible.expand(-1, queries, -1)


def _refuse(sinks: torch.Tensor | None, cross_attention: bool) -> None:
    if sinks is not None or cross_attention:
        raise NotImplementedError("the PyTorch stand-in for sgl_kernel has no attention sinks and no cross attention")


@operator(
    "decode_attention_cpu(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, float k_scale, float v_scale, "
    "Tensor(c!) out, Tensor? k, Tensor? v, Tensor slots, Tensor scratch, Tensor req_to_token, Tensor req_pool, "
    "Tensor seq_lens, float scale, float logit_cap, bool cross_attention, int window, Tensor? encoder_lens, "
    "Tensor? sinks) -> ()"
)
def decode_attention_cpu(
    q, k_cache, v_cache, k_scale, v_scale, out, k, v, slots, scratch, req_to_token, req_pool,
    seq_lens, scale, logit_cap, cross_attention, window, encoder_lens, sinks,
) -> None:  # fmt: skip
    """One new token per request: write its k and v into `slots`, then attend over all seq_lens (B,) keys into out.

    q and out are (B, query_heads, head_dim).
    """
    _refuse(sinks, cross_attention)
    if k is not None:
        k_cache[slots] = k.reshape(-1, *k_cache.shape[1:]).to(k_cache.dtype)
        v_cache[slots] = v.reshape(-1, *v_cache.shape[1:]).to(v_cache.dtype)
    own = _own_slots(req_to_token, req_pool, seq_lens)
    visible = _visible_keys(seq_lens, 1, own.shape[1], True, window, None)
    out.copy_(_attend(q.unsqueeze(1), k_cache, v_cache, own, visible, scale, logit_cap).squeeze(1))


@operator(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) out, Tensor k_cache, Tensor v_cache, "
    "float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool, Tensor seq_lens, Tensor extend_lens, "
    "Tensor extend_start, int max_extend, float scale, float logit_cap, bool cross_attention, int window, "
    "Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool causal) -> ()"
)
def extend_attention_cpu(
    q, k, v, out, k_cache, v_cache, k_scale, v_scale, req_to_token, req_pool, seq_lens, extend_lens,
    extend_start, max_extend, scale, logit_cap, cross_attention, window, encoder_lens, sinks, tree_mask, causal,
) -> None:  # fmt: skip
    """The last extend_lens[b] of seq_lens[b] tokens of every request attend over it; their k, v are in the cache.

    q and out are (sum(extend_lens), query_heads, head_dim), request b starting at row extend_start[b]. tree_mask is
    the flattened (extend_lens[b], extend_lens[b]) ancestor matrices of a draft tree, one request after the other.
    """
    _refuse(sinks, cross_attention)
    lengths, starts = extend_lens.tolist(), extend_start.tolist()
    if len(set(lengths)) == 1 and starts == list(range(0, sum(lengths), lengths[0] or 1)):
        batches = [slice(0, len(lengths))]
    else:
        batches = [slice(b, b + 1) for b in range(len(lengths)) if lengths[b]]
    mask_offset = 0
    for batch in batches:
        queries, requests = lengths[batch.start], batch.stop - batch.start
        rows = slice(starts[batch.start], starts[batch.start] + requests * queries)
        tree = None
        if tree_mask is not None:
            size = requests * queries * queries
            tree = tree_mask[mask_offset : mask_offset + size].view(requests, queries, queries)
            mask_offset += size
        own = _own_slots(req_to_token, req_pool[batch], seq_lens[batch])
        visible = _visible_keys(seq_lens[batch], queries, own.shape[1], causal, window, tree)
        batched_q = q[rows].reshape(requests, queries, *q.shape[1:])
        attended = _attend(batched_q, k_cache, v_cache, own, visible, scale, logit_cap)
        out[rows] = attended.flatten(0, 1)
