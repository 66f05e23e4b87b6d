"""Bookkeeping of speculative decoding: cache slots, draft trees, greedy verification (see the package docstring).

A draft tree of n nodes per request is stored flat: node 0 is the bonus token (the last one the target produced), nodes
1 .. n-1 the drafts. All functions write into tensors that the caller allocated, as the originals do.
"""

import ctypes

import torch

QLEN_ONLY = 1  # sglang's TreeMaskMode: the (n, n) matrix among draft nodes, without the prefix


def assign_req_to_token_pool_cpu(req_pool, req_to_token, start, end, out_cache_loc, pool_len: int) -> None:
    """Write the packed slots out_cache_loc into req_to_token[request, start:end], request by request."""
    taken = 0
    for request, first, last in zip(req_pool.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[request, first:last] = out_cache_loc[taken : taken + last - first].to(req_to_token.dtype)
        taken += last - first


def assign_extend_cache_locs_cpu(req_pool, req_to_token, start, end, out_cache_loc, pool_len: int) -> None:
    """The reverse: pack req_to_token[request, start:end] of every request into out_cache_loc."""
    taken = 0
    for request, first, last in zip(req_pool.tolist(), start.tolist(), end.tolist(), strict=True):
        out_cache_loc[taken : taken + last - first] = req_to_token[request, first:last].to(out_cache_loc.dtype)
        taken += last - first


def assign_draft_cache_locs_contiguous_cpu(
    req_pool, req_to_token, seq_lens, out_cache_loc, pool_len: int, topk: int, num_steps: int
) -> None:
    """Pack the topk * num_steps slots after each request's end, where its draft tokens' keys go."""
    width = topk * num_steps
    for i, (request, end) in enumerate(zip(req_pool.tolist(), seq_lens.tolist(), strict=True)):
        out_cache_loc[i * width : (i + 1) * width] = req_to_token[request, end : end + width].to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token, req_pool, seq_lens, topk: int, num_steps: int, pool_len: int
) -> torch.Tensor:
    """Slot tables (requests * topk, pool_len) of the draft branches: the shared prefix, then the branch's own slots."""
    tables = torch.zeros(len(req_pool) * topk, pool_len, dtype=req_to_token.dtype)
    for i, (request, end) in enumerate(zip(req_pool.tolist(), seq_lens.tolist(), strict=True)):
        branches = tables[i * topk : (i + 1) * topk]
        branches[:, :end] = req_to_token[request, :end]
        own = req_to_token[request, end : end + topk * num_steps]
        branches[:, end : end + num_steps] = own.view(topk, num_steps)
    return tables


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, stride: int) -> None:
    """bonus_tokens[b] = the last accepted token of request b; its tokens start at b * stride of accept_tokens."""
    last = torch.arange(len(accept_lens)) * stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last])


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc) -> None:
    """Gather the slots of accepted nodes to the front of accept_out_cache_loc; -1 in accept_index means rejected."""
    accepted = accept_index.reshape(-1)
    accepted = accepted[accepted > -1].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def build_tree_kernel_efficient_cpu(
    parent_list, selected_index, seq_lens, tree_mask, positions,
    retrieve_index, retrieve_next_token, retrieve_next_sibling, topk: int, depth: int, num_nodes: int, mode: int,
) -> None:  # fmt: skip
    """Lay out one draft tree per request.

    selected_index (B, n-1): candidate number of nodes 1 .. n-1, ascending. A candidate c was drafted from parent group
    c // topk: group 0 hangs off node 0, group g off the candidate numbered parent_list[b, g]. Written: tree_mask, the
    flattened bool (B, n, n) "row may attend column" matrix (a node sees its ancestors and itself); positions (B * n),
    seq_len + depth of the node; retrieve_index (B, n), the node's flat number; next_token (B, n), the first child;
    next_sibling (B, n), the next child of the same parent; the latter two arrive filled with -1.
    """
    if int(mode) != QLEN_ONLY:
        raise NotImplementedError(f"tree mask mode {mode}: the CPU engine asks for QLEN_ONLY ({QLEN_ONLY})")
    for b, length in enumerate(seq_lens.tolist()):
        selected, parents = selected_index[b].tolist(), parent_list[b].tolist()
        first_child, sibling = [-1] * num_nodes, [-1] * num_nodes
        parent_of, depth_of = [0] * num_nodes, [0] * num_nodes
        mask = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
        mask[0, 0] = True
        for node in range(1, num_nodes):  # candidates ascend, so a parent always precedes its children
            group = selected[node - 1] // topk
            parent = 0 if group == 0 else selected.index(parents[group]) + 1
            parent_of[node], depth_of[node] = parent, depth_of[parent] + 1
            mask[node] = mask[parent]
            mask[node, node] = True
        for node in range(num_nodes - 1, 0, -1):
            sibling[node] = first_child[parent_of[node]]
            first_child[parent_of[node]] = node
        flat = slice(b * num_nodes, (b + 1) * num_nodes)
        positions[flat] = length + torch.tensor(depth_of)
        retrieve_index[b] = torch.arange(flat.start, flat.stop)
        retrieve_next_token[b] = torch.tensor(first_child)
        retrieve_next_sibling[b] = torch.tensor(sibling)
        tree_mask.view(-1)[flat.start * num_nodes : flat.stop * num_nodes] = mask.view(-1).to(tree_mask.dtype)


def verify_tree_greedy_cpu(
    *, predicts, accept_index, accept_token_num, candidates,
    retrive_index, retrive_next_token, retrive_next_sibling, target_predict,
) -> None:  # fmt: skip
    """Walk down each draft tree as long as some child is the token that the target itself would produce next.

    candidates and target_predict are (B, n): the node's token, and the target's argmax after that node. Written:
    accept_index (B, depth), flat numbers of the accepted nodes, node 0 first; accept_token_num (B,), accepted drafts;
    predicts (B * n), at every accepted node the target's next token (the last one is the new bonus token).
    """
    tokens, target = candidates.tolist(), target_predict.reshape(candidates.shape).tolist()
    flat, child, sibling = retrive_index.tolist(), retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for b in range(len(tokens)):
        path = [0]
        while len(path) < accept_index.shape[1]:
            node = child[b][path[-1]]
            while node != -1 and tokens[b][node] != target[b][path[-1]]:
                node = sibling[b][node]
            if node == -1:
                break
            path.append(node)
        accepted = torch.tensor([flat[b][node] for node in path])
        accept_index[b, : len(path)] = accepted.to(accept_index.dtype)
        accept_token_num[b] = len(path) - 1
        predicts[accepted] = torch.tensor([target[b][node] for node in path], dtype=predicts.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, target_slots, source_slots) -> None:
    """Move cache rows in every layer's k and v buffer: data_ptrs are raw addresses, strides bytes per slot.

    All sources are read before any target is written, so overlapping moves are safe.
    """
    sources, targets = source_slots.tolist(), target_slots.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + slot * stride, stride) for slot in sources]
        for slot, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + slot * stride, row, stride)


def rotate_input_ids_cpu(*arguments) -> None:
    """Only drafters with several EAGLE layers call this one."""
    raise NotImplementedError("the PyTorch stand-in for sgl_kernel serves one-layer EAGLE-3 drafters")
