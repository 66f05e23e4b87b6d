"""Flash attention merged with own keys: its bookkeeping and gradients, with the kernel's part written naively in float64.

The kernel itself runs only on a GPU; `scripts/bench_train.py --check` compares it there.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from draftsmith.configs.drafter import DrafterSpec, RopeSpec
from draftsmith.train import flash
from draftsmith.train.attention import Segments, plain_attention
from draftsmith.train.batch import Window, pack
from draftsmith.train.model import Drafter
from draftsmith.train.products import Bank
from draftsmith.train.unroll import Unroll

SCALE = 0.3


def scores_of(query, key, bounds, scale):
    """(heads, rows, rows) with -inf where causality or a border forbids."""
    groups = query.shape[1] // key.shape[1]
    scores = torch.einsum("nhd,mhd->hnm", query, key.repeat_interleave(groups, 1)) * scale
    owner = torch.searchsorted(bounds.long(), torch.arange(len(query)), right=True)
    allowed = (owner[:, None] == owner[None]) & (torch.arange(len(query))[:, None] >= torch.arange(len(query)))
    return scores.masked_fill(~allowed, float("-inf"))


def naive_forward(query, key, value, bounds, lengths, scale):
    scores = scores_of(query, key, bounds, scale)
    groups = query.shape[1] // key.shape[1]
    output = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), value.repeat_interleave(groups, 1))
    return output, scores.logsumexp(-1)


def naive_backward(grad, query, key, value, output, total, bounds, lengths, scale):
    """The formulas of FlashAttention-2, with whatever output and log-sum the caller gives."""
    groups, kv_heads = query.shape[1] // key.shape[1], key.shape[1]
    weights = (scores_of(query, key, bounds, scale) - total[..., None]).exp()
    slope = weights * (
        torch.einsum("nhd,mhd->hnm", grad, value.repeat_interleave(groups, 1)) - (grad * output).sum(-1).t()[..., None]
    )
    key_grad = torch.einsum("hnm,nhd->mhd", slope, query) * scale
    value_grad = torch.einsum("hnm,nhd->mhd", weights, grad)
    query_grad = torch.einsum("hnm,mhd->nhd", slope, key.repeat_interleave(groups, 1)) * scale
    return query_grad, *(part.unflatten(1, (kv_heads, groups)).sum(2) for part in (key_grad, value_grad))


@pytest.mark.parametrize("value_dim", [8, 5])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("steps", [0, 3])
def test_output_and_gradients_equal_one_softmax_over_all_keys(monkeypatch, steps, dense, value_dim):
    monkeypatch.setattr(flash, "causal_forward", naive_forward)
    monkeypatch.setattr(flash, "causal_backward", naive_backward)
    bounds = [0, 7, 8, 21]
    where = torch.arange(21) if dense else torch.tensor([1, 4, 5, 7, 9, 10, 15, 20])
    starts = [0, *torch.searchsorted(where, torch.tensor(bounds[1:])).tolist()]
    segments = Segments.of(bounds, starts, where)

    def make(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    count = len(where)
    query, key, value = make(count, 6, 8), make(21, 2, 8), make(21, 2, value_dim)
    own_keys, own_values = [make(count, 2, 8) for _ in range(steps)], [make(count, 2, value_dim) for _ in range(steps)]
    inputs = [query, key, value, *own_keys, *own_values]
    place = None if segments.dense else where
    own, got, pairs = flash.OwnKeys(steps), 0, list(zip(own_keys, own_values, strict=True))
    for step in range(steps + 1):  # as the steps of an unroll, each of which reads all own keys before it
        got = got + flash.flash_attention(query, key, value, own, place, segments.bounds, segments.lengths, SCALE)
        if step < steps:
            own.add(*pairs[step])
    want = sum(plain_attention(query, key, value, pairs[:count], segments, SCALE) for count in range(steps + 1))
    grad = torch.randn_like(want)
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_whole_unroll_through_flash_attention_has_the_plain_ones_loss_and_gradients(monkeypatch):
    spec = DrafterSpec(
        hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=40,
        draft_vocab_size=24, target_hidden_size=16, target_num_layers=8, taps=(2, 4, 5), rms_norm_eps=1e-5,
        rope=RopeSpec(theta=100.0), max_position_embeddings=64,
    )  # fmt: skip
    drafter = Drafter(spec, torch.randn(40, 16)).double()
    unroll = Unroll(drafter, torch.randn(24, 16).double(), torch.arange(24))
    windows = []
    for length, share in ((19, 1.0), (11, 0.6), (6, 0.5)):
        marks, ids = torch.arange(length) >= length * (1 - share), torch.randint(0, 40, (length,))
        taps, final = torch.randn(length, 3, 16).double(), torch.randn(length, 16).double()
        windows.append(Window(ids, marks, marks.long(), taps, final, ids, 0, length, greedy=True))
    batch, found = pack(windows, 5), []
    for usable in (False, True):
        monkeypatch.setattr(flash, "usable", lambda _, answer=usable: answer)
        monkeypatch.setattr(flash, "causal_forward", naive_forward)
        monkeypatch.setattr(flash, "causal_backward", naive_backward)
        loss, _ = unroll(batch, [1.0, 0.8, 0.64, 0.5, 0.4])
        loss.backward()
        found.append([loss.detach(), *(parameter.grad.clone() for parameter in drafter.parameters())])
        drafter.zero_grad()
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_nothing_of_an_unroll_outlives_its_backward_pass(monkeypatch):
    """Nodes and their owners point at each other; a ring of them would keep gigabytes until the collector runs."""
    monkeypatch.setattr(flash, "causal_forward", naive_forward)
    monkeypatch.setattr(flash, "causal_backward", naive_backward)
    gc.collect()
    gc.disable()
    try:
        own, query = flash.OwnKeys(1), torch.randn(4, 2, 8, requires_grad=True)
        own.add(query * 2, query * 3)
        bounds = torch.tensor([0, 4])
        mixed = flash.flash_attention(query, query * 4, query * 5, own, None, bounds, [4], 8**-0.5)
        weight = torch.nn.Linear(16, 16, bias=False)
        bank = Bank()
        result = bank.linear(weight, bank.linear(weight, mixed.flatten(1)))
        owners = [weakref.ref(own), weakref.ref(bank[weight])]
        result.sum().backward()
        del own, mixed, bank, result
        assert [owner() for owner in owners] == [None, None]
    finally:
        gc.enable()
