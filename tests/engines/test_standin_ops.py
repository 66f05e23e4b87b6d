"""Every operator of the PyTorch stand-in for sgl_kernel against an independent reference: float64, one number at a time.

The package is loaded from its file and its registrations are undone afterwards, so that nothing of it stays behind.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.engine
PACKAGE = Path(__file__).parents[2] / "scripts" / "engines" / "sglang_cpu" / "sgl_kernel"
HEADS, GROUPS, DIM = 6, 2, 8


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("sgl_kernel", PACKAGE / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["sgl_kernel"] = module
    spec.loader.exec_module(module)
    yield module
    sys.modules["sgl_kernel._registry"]._LIBRARY._destroy()
    for name in [name for name in sys.modules if name.split(".")[0] == "sgl_kernel"]:
        del sys.modules[name]


@pytest.fixture
def ops(kernel: ModuleType):
    return torch.ops.sgl_kernel


@pytest.fixture(autouse=True)
def fresh_numbers() -> None:
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    print(f"torch.manual_seed({seed})")  # pytest shows it when a test fails


def close(ours: torch.Tensor, reference: torch.Tensor) -> bool:
    return torch.allclose(ours.double(), reference.double(), rtol=2e-5, atol=2e-6)


# ---- norms, activation, RoPE, linear --------------------------------------------------------------------------------


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows = []
    for row in x.double():
        scale = math.sqrt(sum(v.item() ** 2 for v in row) / len(row) + eps)
        rows.append(row / scale * weight.double())
    return torch.stack(rows)


def test_rmsnorm(ops):
    x, weight = torch.randn(5, 12), torch.randn(12)
    assert close(ops.rmsnorm_cpu(x, weight, 1e-5), rms(x, weight, 1e-5))


def test_fused_add_rmsnorm_changes_both_tensors_in_place(ops):
    x, residual, weight = torch.randn(5, 12), torch.randn(5, 12), torch.randn(12)
    total = x.double() + residual.double()
    ops.fused_add_rmsnorm_cpu(x, residual, weight, 1e-6)
    assert close(residual, total)
    assert close(x, rms(total, weight, 1e-6))


def test_rmsnorm_in_bfloat16_rounds_once(ops):
    x, weight = torch.randn(5, 12).bfloat16(), torch.randn(12).bfloat16()
    assert torch.equal(ops.rmsnorm_cpu(x, weight, 1e-5), rms(x, weight, 1e-5).float().bfloat16())


def test_silu_and_mul(ops):
    x = torch.randn(4, 10)
    gate, up = x[:, :5].double(), x[:, 5:].double()
    assert close(ops.silu_and_mul_cpu(x), gate / (1 + torch.exp(-gate)) * up)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [DIM, DIM // 2])
def test_rope_is_a_rotation_of_number_pairs(ops, neox, rotary_dim):
    half = rotary_dim // 2
    angles = torch.arange(50)[:, None] * torch.rand(half)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.tensor([0, 3, 49, 3])
    q, k = torch.randn(4, HEADS * DIM), torch.randn(4, GROUPS * DIM)
    ours = ops.rotary_embedding_cpu(positions, q, k, DIM, table, neox)
    for states, turned in zip((q, k), ours, strict=True):
        expected = states.double().view(4, -1, DIM).clone()
        for token, head, i in [(t, h, i) for t in range(4) for h in range(expected.shape[1]) for i in range(half)]:
            first, second = (i, i + half) if neox else (2 * i, 2 * i + 1)
            number = complex(expected[token, head, first], expected[token, head, second])
            number *= complex(math.cos(a := angles[positions[token], i].item()), math.sin(a))
            expected[token, head, first], expected[token, head, second] = number.real, number.imag
        assert turned.shape == states.shape
        assert close(turned, expected.view_as(states))


def test_packed_linear_reads_the_weight_it_was_given(ops):
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    packed = ops.convert_weight_packed(weight)
    assert packed.data_ptr() == weight.data_ptr()
    assert close(ops.weight_packed_linear(x, packed, None, True), x.double() @ weight.double().T)
    assert close(ops.weight_packed_linear(x, packed, bias, True), x.double() @ weight.double().T + bias.double())


def test_more_than_one_rank_is_refused(ops):
    ops.initialize(1, 0)
    with pytest.raises(NotImplementedError, match="tensor parallel size 1, found 2"):
        ops.initialize(2, 0)


# ---- attention ------------------------------------------------------------------------------------------------------


class Cache:
    """A paged KV cache with three requests whose slots are scattered; unused slots hold NaN."""

    def __init__(self, lengths: list[int]) -> None:
        self.seq_lens = torch.tensor(lengths)
        slots = torch.randperm(64)
        self.req_to_token = torch.zeros(5, 32, dtype=torch.int32)
        self.req_pool = torch.tensor([4, 0, 2])[: len(lengths)]
        self.k = torch.full((64, GROUPS, DIM), float("nan"))
        self.v = self.k.clone()
        for row, request in enumerate(self.req_pool.tolist()):
            own, slots = slots[: lengths[row]], slots[lengths[row] :]
            self.req_to_token[request] = slots[-1]  # beyond the request's end: somebody's stale NaN slot
            self.req_to_token[request, : lengths[row]] = own.int()
            self.k[own], self.v[own] = torch.randn(2, len(own), GROUPS, DIM)

    def attend(self, row: int, query: torch.Tensor, keys: list[int], scale: float, cap: float = 0.0) -> torch.Tensor:
        """Attention of one query (heads, dim) of request `row` over the positions `keys`, in float64."""
        out = torch.zeros(HEADS, DIM, dtype=torch.float64)
        slots = [int(self.req_to_token[self.req_pool[row], key]) for key in keys]
        for head in range(HEADS):
            group = head * GROUPS // HEADS
            scores = [float(query[head].double() @ self.k[slot, group].double()) * scale for slot in slots]
            if cap:
                scores = [cap * math.tanh(score / cap) for score in scores]
            total = sum(math.exp(score) for score in scores)
            for slot, score in zip(slots, scores, strict=True):
                out[head] += math.exp(score) / total * self.v[slot, group].double()
        return out


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (3, 0.0), (0, 5.0)])
def test_decode_writes_its_key_and_attends_to_everything(ops, window, cap):
    cache = Cache([9, 4, 13])
    last = [int(cache.req_to_token[r, n - 1]) for r, n in zip(cache.req_pool, cache.seq_lens, strict=True)]
    k, v = torch.randn(3, GROUPS, DIM), torch.randn(3, GROUPS, DIM)
    q, out = torch.randn(3, HEADS, DIM), torch.empty(3, HEADS, DIM)
    ops.decode_attention_cpu(
        *(q, cache.k, cache.v, 1.0, 1.0, out, k.view(3, -1), v.view(3, -1), torch.tensor(last), torch.empty(0)),
        *(cache.req_to_token, cache.req_pool, cache.seq_lens, 0.3, cap, False, window, None, None),
    )
    assert torch.equal(cache.k[last], k)
    assert torch.equal(cache.v[last], v)
    for row, length in enumerate(cache.seq_lens.tolist()):
        keys = list(range(length))[-window:] if window else list(range(length))
        assert close(out[row], cache.attend(row, q[row], keys, 0.3, cap))


def extend(ops, cache: Cache, lengths: list[int], tree=None, causal=True, window=0):
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    q, out = torch.randn(sum(lengths), HEADS, DIM), torch.empty(sum(lengths), HEADS, DIM)
    ops.extend_attention_cpu(
        *(q, None, None, out, cache.k, cache.v, 1.0, 1.0, cache.req_to_token, cache.req_pool, cache.seq_lens),
        *(torch.tensor(lengths), torch.tensor(starts), max(lengths), 0.3, 0.0, False, window, None, None, tree, causal),
    )
    return q, out, starts


@pytest.mark.parametrize("lengths", [[9, 2, 5], [4, 4, 4], [1, 4, 0]])
def test_extend_is_causal_over_prefix_and_new_tokens(ops, lengths):
    cache = Cache([9, 4, 13])
    q, out, starts = extend(ops, cache, lengths)
    for row, new in enumerate(lengths):
        for i in range(new):
            position = int(cache.seq_lens[row]) - new + i
            assert close(out[starts[row] + i], cache.attend(row, q[starts[row] + i], list(range(position + 1)), 0.3))


def test_extend_without_causality_sees_the_whole_request(ops):
    cache = Cache([9, 4, 13])
    q, out, _ = extend(ops, cache, [2, 2, 2], causal=False)
    for row in range(3):
        assert close(out[2 * row], cache.attend(row, q[2 * row], list(range(int(cache.seq_lens[row]))), 0.3))


def test_extend_window_keeps_the_newest_keys(ops):
    cache = Cache([9, 4, 13])
    q, out, starts = extend(ops, cache, [3, 1, 2], window=4)
    for row, new in enumerate([3, 1, 2]):
        position = int(cache.seq_lens[row]) - new
        keys = list(range(max(0, position - 3), position + 1))
        assert close(out[starts[row]], cache.attend(row, q[starts[row]], keys, 0.3))


def test_a_tree_mask_hides_every_node_that_is_no_ancestor(ops):
    cache, nodes = Cache([9, 5, 13]), 4
    masks = torch.rand(3, nodes, nodes) < 0.5
    masks[:, range(nodes), range(nodes)] = True
    q, out, _ = extend(ops, cache, [nodes] * 3, tree=masks.flatten())
    for row, length in enumerate(cache.seq_lens.tolist()):
        prefix = length - nodes
        for i in range(nodes):
            keys = list(range(prefix)) + [prefix + j for j in range(nodes) if masks[row, i, j]]
            assert close(out[row * nodes + i], cache.attend(row, q[row * nodes + i], keys, 0.3))


def test_store_cache_writes_only_its_slots(ops):
    k_cache, v_cache = torch.zeros(10, GROUPS, DIM), torch.zeros(10, GROUPS, DIM)
    k, v, slots = torch.randn(3, GROUPS, DIM), torch.randn(3, GROUPS, DIM), torch.tensor([7, 0, 4])
    ops.store_cache_cpu(k, v, k_cache, v_cache, slots, GROUPS * DIM)
    assert torch.equal(k_cache[slots], k)
    assert torch.equal(v_cache[slots], v)
    assert int((k_cache != 0).any(-1).any(-1).sum()) == 3


def test_sinks_and_cross_attention_are_refused(ops):
    cache = Cache([3])
    with pytest.raises(NotImplementedError, match="no attention sinks"):
        ops.decode_attention_cpu(
            *(torch.randn(1, HEADS, DIM), cache.k, cache.v, 1.0, 1.0, torch.empty(1, HEADS, DIM), None, None),
            *(torch.tensor([0]), torch.empty(0), cache.req_to_token, cache.req_pool, cache.seq_lens, 0.3, 0.0),
            *(False, 0, None, torch.zeros(HEADS)),
        )


# ---- draft trees ----------------------------------------------------------------------------------------------------


def random_trees(topk: int, depth: int, nodes: int, batch: int):
    """Trees as sglang grows them: level 0 has topk candidates under the root, later levels topk children of each of the
    topk kept ones. Returns (parent_list, selected, parents): parents[b][i] is the parent node of node i."""
    parent_lists, selections, parents = [], [], []
    for _ in range(batch):
        kept = list(range(topk))  # candidate numbers kept at the current level
        owner = {candidate: None for candidate in kept}  # parent candidate of every candidate; None: the root
        groups = [-1, *kept]
        for level in range(1, depth):
            first = topk + (level - 1) * topk * topk
            children = {first + j * topk + c: kept[j] for j in range(topk) for c in range(topk)}
            owner |= children
            kept = sorted(children)
            kept = [kept[i] for i in torch.randperm(len(kept))[:topk].tolist()]
            groups += kept
        chosen: list[int] = []
        while len(chosen) < nodes - 1:  # ancestors first, as cumulative scores make sure
            open_ = [c for c, parent in owner.items() if c not in chosen and (parent is None or parent in chosen)]
            chosen.append(open_[torch.randint(len(open_), ()).item()])
        chosen.sort()
        selections.append(chosen)
        parent_lists.append(groups[: 1 + topk * (depth - 1)] if depth > 1 else [])
        parents.append([None] + [0 if owner[c] is None else chosen.index(owner[c]) + 1 for c in chosen])
    return torch.tensor(parent_lists), torch.tensor(selections), parents


def build(kernel, parent_list, selected, seq_lens, topk, depth, nodes):
    batch = len(selected)
    mask = torch.ones(batch * nodes * nodes, dtype=torch.bool)
    positions = torch.empty(batch * nodes, dtype=torch.long)
    index, child, sibling = torch.full((3, batch, nodes), -1)
    kernel.build_tree_kernel_efficient_cpu(
        parent_list, selected, seq_lens, mask, positions, index, child, sibling, topk, depth, nodes, 1
    )
    return mask.view(batch, nodes, nodes), positions.view(batch, nodes), index, child, sibling


def path_to_root(parents: list, node: int) -> list[int]:
    return [node] if parents[node] is None else [node, *path_to_root(parents, parents[node])]


@pytest.mark.parametrize(("topk", "depth", "nodes"), [(1, 3, 4), (1, 1, 2), (4, 3, 8), (4, 4, 16)])
def test_tree_building(kernel, topk, depth, nodes):
    seq_lens = torch.tensor([7, 20, 3])
    parent_list, selected, parents = random_trees(topk, depth, nodes, 3)
    mask, positions, index, child, sibling = build(kernel, parent_list, selected, seq_lens, topk, depth, nodes)
    assert index.tolist() == [list(range(b * nodes, (b + 1) * nodes)) for b in range(3)]
    for b in range(3):
        for node in range(nodes):
            path = path_to_root(parents[b], node)
            assert mask[b, node].nonzero().flatten().tolist() == sorted(path)
            assert positions[b, node] == seq_lens[b] + len(path) - 1
            children, at = [], int(child[b, node])
            while at != -1:
                children.append(at)
                at = int(sibling[b, at])
            assert children == [other for other in range(nodes) if parents[b][other] == node]


def test_another_mask_mode_is_refused(kernel):
    with pytest.raises(NotImplementedError, match="QLEN_ONLY"):
        kernel.build_tree_kernel_efficient_cpu(*[torch.empty(0)] * 8, 1, 1, 2, 0)


@pytest.mark.parametrize(("topk", "depth", "nodes"), [(1, 3, 4), (4, 3, 8), (4, 4, 16)])
def test_greedy_verification_follows_the_target_down_the_tree(kernel, topk, depth, nodes):
    batch = 40
    parent_list, selected, parents = random_trees(topk, depth, nodes, batch)
    _, _, index, child, sibling = build(kernel, parent_list, selected, torch.full((batch,), 5), topk, depth, nodes)
    tokens, target = torch.randint(3, (batch, nodes)), torch.randint(3, (batch, nodes))  # few tokens: many matches
    accept_index = torch.full((batch, depth + 1), -1, dtype=torch.int32)
    accepted = torch.empty(batch, dtype=torch.int32)
    predicts = torch.zeros(batch * nodes, dtype=torch.int32)
    kernel.verify_tree_greedy_cpu(
        predicts=predicts, accept_index=accept_index, accept_token_num=accepted, candidates=tokens,
        retrive_index=index, retrive_next_token=child, retrive_next_sibling=sibling, target_predict=target,
    )  # fmt: skip
    for b in range(batch):
        path = [0]
        while True:
            matching = [n for n in range(nodes) if parents[b][n] == path[-1] and tokens[b, n] == target[b, path[-1]]]
            if not matching or len(path) > depth:
                break
            path.append(matching[0])
        flat = [b * nodes + node for node in path]
        assert accepted[b] == len(path) - 1
        assert accept_index[b].tolist() == flat + [-1] * (depth + 1 - len(path))
        assert [int(predicts[f]) for f in flat] == [int(target[b, node]) for node in path]
    assert accepted.max() > 0


# ---- cache slots ----------------------------------------------------------------------------------------------------


def test_slots_go_into_the_request_table_and_come_back(kernel):
    table = torch.zeros(4, 20, dtype=torch.int32)
    pool, start, end = torch.tensor([3, 1]), torch.tensor([2, 0]), torch.tensor([5, 4])
    kernel.assign_req_to_token_pool_cpu(pool, table, start, end, torch.arange(11, 18), 20)
    assert table[3, 1:6].tolist() == [0, 11, 12, 13, 0]
    assert table[1, :5].tolist() == [14, 15, 16, 17, 0]
    back = torch.zeros(7, dtype=torch.int64)
    kernel.assign_extend_cache_locs_cpu(pool, table, start, end, back, 20)
    assert back.tolist() == list(range(11, 18))


def test_draft_slots_and_tables_of_branches(kernel):
    table = torch.arange(3 * 16, dtype=torch.int32).view(3, 16)
    pool, lengths = torch.tensor([2, 0]), torch.tensor([3, 5])
    slots = torch.empty(2 * 2 * 3, dtype=torch.int64)
    kernel.assign_draft_cache_locs_contiguous_cpu(pool, table, lengths, slots, 16, 2, 3)
    assert slots.tolist() == [*range(35, 41), *range(5, 11)]
    branches = kernel.build_draft_decode_metadata_cpu(table, pool, lengths, 2, 3, 16)
    assert branches[0, :7].tolist() == [32, 33, 34, 35, 36, 37, 0]
    assert branches[1, :7].tolist() == [32, 33, 34, 38, 39, 40, 0]
    assert branches[3, :9].tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 0]


def test_bonus_tokens_and_accepted_slots(kernel):
    bonus = torch.empty(2, dtype=torch.int32)
    kernel.fill_bonus_tokens_cpu(torch.tensor([[5, 6, 0], [7, 8, 9]]), torch.tensor([2, 3]), bonus, 3)
    assert bonus.tolist() == [6, 9]
    out = torch.full((6,), -7)
    accept_index = torch.tensor([[0, 2, -1], [3, -1, -1]])
    kernel.fill_accept_out_cache_loc_cpu(accept_index, torch.tensor([50, 51, 52, 53, 54, 55]), out)
    assert out.tolist() == [50, 52, 53, -7, -7, -7]


def test_cache_rows_move_in_every_buffer_even_when_they_overlap(kernel):
    buffers = [torch.randn(8, 4), torch.randn(8, 6).bfloat16()]
    before = [buffer.clone() for buffer in buffers]
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    strides = torch.tensor([buffer.stride(0) * buffer.element_size() for buffer in buffers])
    kernel.copy_all_layer_kv_cache_cpu(pointers, strides, torch.tensor([2, 3, 4]), torch.tensor([3, 4, 7]))
    for buffer, old in zip(buffers, before, strict=True):
        assert torch.equal(buffer, old[[0, 1, 3, 4, 7, 5, 6, 7]])


def test_operators_that_are_not_covered_say_so(kernel, ops):
    with pytest.raises(NotImplementedError):
        ops.fused_moe_router_cpu()
    with pytest.raises(NotImplementedError, match="one-layer EAGLE-3"):
        kernel.rotate_input_ids_cpu()
