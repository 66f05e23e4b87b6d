"""The chunked losses against float64 on fresh random input, values and gradients."""

from __future__ import annotations

import pytest
import torch

from draftsmith.train import loss as module
from draftsmith.train.loss import Objective, arrange, lesson
from draftsmith.train.products import Held

KINDS = ["soft_cross_entropy", "total_variation", "lk_alpha", "lk_lambda"]


def reference(hidden, weight, final, rows, teacher_weight, row_weight, kind="soft_cross_entropy", eta=3.0):
    """The formulas of the papers, by autograd."""
    p = torch.softmax(final[rows] @ teacher_weight.t(), -1)
    log_q = torch.log_softmax(hidden @ weight.t(), -1)
    accepted = torch.minimum(p, log_q.exp()).sum(-1)
    if kind == "soft_cross_entropy":
        losses = -(p * log_q).sum(-1)
    elif kind == "total_variation":
        losses = 0.5 * (p - log_q.exp()).abs().sum(-1)
    elif kind == "lk_alpha":
        losses = -accepted.log()
    else:
        share = torch.exp(-eta * accepted).detach()
        losses = share * (p * (p.log() - log_q)).sum(-1) + (1 - share) * (1 - accepted)
    return (losses * row_weight).sum()


def random_input(rows=37, width=24, vocabulary=101):
    """Not seeded: every run draws new numbers."""
    hidden, weight = torch.randn(rows, width), torch.randn(vocabulary, width)
    final, teacher_weight = torch.randn(53, width), torch.randn(vocabulary, width)
    return hidden, weight, final, torch.randint(0, 53, (rows,)), teacher_weight, (torch.rand(rows) > 0.3).float()


def ours(hidden, weight, final, rows, teacher_weight, row_weight, objective=None, dtype=torch.float32):
    """Two steps: 20 drafts that are all rows of theirs, the rest scattered over rows that count for nothing."""
    more = torch.arange(len(hidden) - 20) * 2 + 1
    second = hidden.new_zeros(2 * len(more) + 1, hidden.shape[1]).index_copy(0, more, hidden[20:])
    return lesson(
        Held(weight, dtype), final, arrange([rows[:20], rows[20:]]), teacher_weight.to(dtype), row_weight,
        objective or Objective(), [torch.arange(20), more], [hidden[:20].to(dtype), second.to(dtype)],
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_value_gradients_and_choices_equal_float64(monkeypatch, kind):
    for chunk in (1, 101 * 5, 1 << 24):
        monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", chunk)
        hidden, weight, final, rows, teacher_weight, row_weight = random_input()
        row_weight = row_weight * torch.rand(len(row_weight))
        hidden.requires_grad_(), weight.requires_grad_()
        value, losses, best = ours(hidden, weight, final, rows, teacher_weight, row_weight, Objective(kind, 2.0))
        (value * 0.37).backward()
        wide = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
        want = reference(*wide, final.double(), rows, teacher_weight.double(), row_weight.double(), kind, 2.0)
        (want * 0.37).backward()
        torch.testing.assert_close(value.double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(hidden.grad.double(), wide[0].grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weight.grad.double(), wide[1].grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(losses @ row_weight, value)
        assert torch.equal(best, (wide[0] @ wide[1].t()).argmax(-1))


@pytest.mark.parametrize(("dtype", "slack"), [(torch.bfloat16, 0.02), (torch.float16, 0.005)])
def test_sixteen_bit_products_stay_close_even_with_tiny_weights(dtype, slack):
    hidden, weight, final, rows, teacher_weight, row_weight = random_input()
    hidden.requires_grad_(), weight.requires_grad_()
    value, *_ = ours(hidden, weight, final, rows, teacher_weight, row_weight * 1e-5, dtype=dtype)
    (value * 1e3).backward()
    wide = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    want = reference(*wide, final.double(), rows, teacher_weight.double(), row_weight.double() * 1e-5)
    (want * 1e3).backward()
    assert abs(value.item() / want.item() - 1) < slack
    for got, expected in ((hidden.grad, wide[0].grad), (weight.grad, wide[1].grad)):
        assert torch.cosine_similarity(got.double().flatten(), expected.flatten(), 0) > 0.999
        assert got.double().norm() == pytest.approx(expected.norm().item(), rel=2 * slack)


def test_rows_of_weight_zero_leave_no_trace():
    hidden, weight, final, rows, teacher_weight, _ = random_input()
    hidden.requires_grad_()
    value, *_ = ours(hidden, weight, final, rows, teacher_weight, torch.zeros(len(hidden)))
    value.backward()
    assert value.item() == 0.0 and not hidden.grad.any()


def test_a_frozen_head_learns_nothing_but_passes_on_gradients():
    hidden, weight, final, rows, teacher_weight, row_weight = random_input()
    hidden.requires_grad_()
    value, *_ = lesson(
        Held(weight, torch.float32), final, arrange([rows]), teacher_weight, row_weight, Objective(),
        [torch.arange(len(hidden))], [hidden], learn=False,
    )  # fmt: skip
    value.backward()
    want = hidden.detach().clone().requires_grad_()
    reference(want, weight, final, rows, teacher_weight, row_weight).backward()
    torch.testing.assert_close(hidden.grad, want.grad, rtol=1e-4, atol=1e-5)
