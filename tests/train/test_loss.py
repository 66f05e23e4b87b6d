"""The chunked soft cross-entropy against float64 on fresh random input, values and gradients."""

from __future__ import annotations

import torch

from draftsmith.train import loss as module
from draftsmith.train.loss import arrange, soft_cross_entropy


def reference(hidden, weight, final, rows, teacher_weight, row_weight):
    teacher = torch.softmax(final[rows] @ teacher_weight.t(), -1)
    return -((teacher * torch.log_softmax(hidden @ weight.t(), -1)).sum(-1) * row_weight).sum()


def random_input(rows=37, width=24, vocabulary=101):
    """Not seeded: every run draws new numbers."""
    hidden, weight = torch.randn(rows, width), torch.randn(vocabulary, width)
    final, teacher_weight = torch.randn(53, width), torch.randn(vocabulary, width)
    return hidden, weight, final, torch.randint(0, 53, (rows,)), teacher_weight, (torch.rand(rows) > 0.3).float()


def test_value_gradients_and_choices_equal_float64(monkeypatch):
    for chunk in (1, 101 * 5, 1 << 24):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
        hidden, weight, final, rows, teacher_weight, row_weight = random_input()
        hidden.requires_grad_(), weight.requires_grad_()
        value, losses, best = soft_cross_entropy(
            hidden, weight, final, arrange([rows[:20], rows[20:]]), teacher_weight, row_weight
        )
        (value * 0.37).backward()
        wide = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
        want = reference(*wide, final.double(), rows, teacher_weight.double(), row_weight.double())
        (want * 0.37).backward()
        torch.testing.assert_close(value.double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(hidden.grad.double(), wide[0].grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weight.grad.double(), wide[1].grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(losses @ row_weight, value)
        assert torch.equal(best, (wide[0] @ wide[1].t()).argmax(-1))


def test_under_autocast_products_are_bf16_and_the_gradient_stays_close():
    hidden, weight, final, rows, teacher_weight, row_weight = random_input()
    hidden.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value, *_ = soft_cross_entropy(
            hidden, weight, final, arrange([rows[:20], rows[20:]]), teacher_weight, row_weight
        )
    value.backward()
    wide = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    want = reference(*wide, final.double(), rows, teacher_weight.double(), row_weight.double())
    want.backward()
    assert abs(value.item() / want.item() - 1) < 0.02
    for got, expected in ((hidden.grad, wide[0].grad), (weight.grad, wide[1].grad)):
        assert torch.cosine_similarity(got.double().flatten(), expected.flatten(), 0) > 0.999


def test_rows_of_weight_zero_leave_no_trace():
    hidden, weight, final, rows, teacher_weight, _ = random_input()
    hidden.requires_grad_()
    value, *_ = soft_cross_entropy(
        hidden, weight, final, arrange([rows[:20], rows[20:]]), teacher_weight, torch.zeros(len(hidden))
    )
    value.backward()
    assert value.item() == 0.0 and not hidden.grad.any()
