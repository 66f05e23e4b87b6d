"""Batches are a function of store, settings and seed; every window appears once an epoch, whatever the processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith.configs.errors import DraftsmithError
from draftsmith.train.evaluate import Chains, summarize, walk
from draftsmith.train.plan import deal, epoch_batches, plan_windows, step_counts


class Tokens:
    """Stands in for a store where only ids and masks are read."""

    path = Path("store")

    def __init__(self, patterns):
        self.patterns = patterns

    def __len__(self):
        return len(self.patterns)

    def tokens(self, index):
        mask = torch.tensor([mark == "1" for mark in self.patterns[index]])
        return torch.zeros(len(mask), dtype=torch.int64), mask


def test_windows_cover_every_supervised_position_once():
    reader = Tokens(["0011111111", "000", "01", "0111"])
    windows = plan_windows(reader, 4, 3, "aligned")
    # conversation 0: step 0 supervises t = 1..7; windows [0,4) [4,8) [8,10) hold 3, 4, 0 of them
    assert [(w.conversation, w.start, w.stop, w.counts) for w in windows] == [
        (0, 0, 4, (3, 3, 3)), (0, 4, 8, (4, 3, 2)), (3, 0, 4, (2, 1, 0)),
    ]  # fmt: skip
    assert step_counts(windows, 3) == [9, 7, 5]


def test_a_store_without_supervision_stops():
    with pytest.raises(DraftsmithError, match="no position"):
        plan_windows(Tokens(["000", "01"]), 8, 2, "aligned")


def test_epochs_hold_every_window_once_and_differ_in_order():
    windows = plan_windows(Tokens(["0" * i + "1" * 9 for i in range(1, 40)]), 64, 2, "aligned")
    orders = []
    for epoch in range(3):
        batches = epoch_batches(windows, 100, 5, epoch)
        flat = [w for batch in batches for w in batch]
        assert sorted(flat, key=lambda w: w.conversation) == windows
        assert all(sum(w.tokens for w in batch) <= 100 for batch in batches)
        orders.append([w.conversation for w in flat])
    assert orders[0] != orders[1] != orders[2]
    assert epoch_batches(windows, 100, 5, 1) == epoch_batches(windows, 100, 5, 1)


def test_dealing_keeps_every_window_and_balances_rows():
    windows = plan_windows(Tokens(["0" * i + "1" * 9 for i in range(1, 40)]), 64, 2, "aligned")
    parts = deal(windows, 4)
    assert sorted((w for part in parts for w in part), key=lambda w: w.conversation) == windows
    loads = [sum(w.tokens for w in part) for part in parts]
    assert max(loads) - min(loads) <= max(w.tokens for w in windows)
    assert [len(part) for part in deal(windows[:1], 3)] == [1, 0, 0]


def chains(starts, accepted, steps=3):
    return Chains(np.array(starts), np.array(accepted), np.zeros(steps, int), np.ones(steps, int), 0)


def test_the_walk_advances_by_what_was_accepted_and_the_bonus_token():
    """Starts 5..11 accept 1 0 3 0 0 0 2: chains at 5, 7 (5+1+1), 11 (7+3+1); a second turn starts anew at 20."""
    c = chains([5, 6, 7, 8, 9, 10, 11, 20, 21, 22], [1, 0, 3, 0, 0, 0, 2, 0, 1, 0])
    assert c.starts[walk(c)].tolist() == [5, 7, 11, 20, 21]
    result = summarize({0: c}, 3)
    # accepted on the walk: 1 3 2 0 1 -> P(>=1) 4/5, P(>=2) 2/5, P(>=3) 1/5
    assert result.as_served.accept_per_position == pytest.approx([0.8, 0.4, 0.2])
    assert result.as_served.accept_length == pytest.approx(2.4)
    assert result.as_served.chains == 5
    # all ten starts: 1 0 3 0 0 0 2 0 1 0
    assert result.all_positions.accept_length == pytest.approx(1 + 7 / 10)


def test_context_buckets_and_categories_use_the_walk():
    result = summarize({0: chains([10], [3]), 1: chains([5000], [0])}, 3, {0: "code", 1: "chat"})
    assert {name: value.accept_length for name, value in result.by_context.items()} == {
        "0-1024": 4.0,
        "4096-16384": 1.0,
    }
    assert {name: value.accept_length for name, value in result.by_category.items()} == {"code": 4.0, "chat": 1.0}
    low, high = result.as_served.interval
    assert low == 1.0 and high == 4.0
